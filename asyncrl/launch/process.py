"""A process as the supervisor sees it: a local one, or a Ray actor."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asyncrl.launch.placement import RolePlace

# Exit codes of a role's process. Any other, or a signal, is a crash.
COMPLETED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
CRASHED = 70
TRY_AGAIN = 75  # out of memory: with less it may go well

LOG_BYTES, LOG_END = 64 << 20, 1 << 20  # a log may have so many bytes; of a longer one both ends are kept


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


def bound_log(path: Path) -> None:
    """Shorten a log of more than LOG_BYTES to its two ends: a reward may print without end. Whoever writes it
    must append, so that the next line goes to the new end."""
    with suppress(OSError), path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= LOG_BYTES:
            return
        file.seek(-LOG_END, os.SEEK_END)
        end = file.read(LOG_END)
        os.truncate(path, LOG_END)
        with path.open("ab") as log:
            log.write(b"\n[asyncrl: %d bytes were cut here]\n" % (size - 2 * LOG_END) + end)


def log_tail(path: Path, lines: int = 12) -> str:
    """The end of a log, for an error message; '' when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
