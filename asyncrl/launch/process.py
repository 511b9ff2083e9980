"""A process as the supervisor sees it: a local one, or a Ray actor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asyncrl.launch.placement import RolePlace

# Exit codes of a role's process. Any other, or a signal, is a crash.
COMPLETED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
CRASHED = 70
TRY_AGAIN = 75  # out of memory: with less it may go well


@dataclass(frozen=True)
class ProcessSpec:
    """A request to start `place`. Ranks that start together share `incarnation` and `rendezvous`."""

    place: RolePlace
    incarnation: str
    rendezvous: str = ""


class ProcessHandle(Protocol):
    """A started process. `poll` is None while it runs, afterwards its exit code (negative: a signal)."""

    name: str

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


Spawn = Callable[[ProcessSpec], ProcessHandle]


def log_path(run_dir: Path, name: str) -> Path:
    return run_dir / "logs" / f"{name}.log"


def log_tail(path: Path, lines: int = 12) -> str:
    """The end of a log, for an error message; '' when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
