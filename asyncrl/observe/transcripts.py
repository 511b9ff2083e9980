"""The transcripts of a run that are kept as text, for whoever watches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.observe.files import read_lines

MEMBERS = 4  # of one group for each batch
ROUNDING = 1e-6
FILES = 50  # looked through for a good or a bad one, at most


@dataclass(frozen=True)
class Transcript:
    title: str
    text: str


def is_kept(group: int, member: int, groups_per_batch: int) -> bool:
    """True for the episodes of training that are kept: it does not depend on how one ends, nor on when."""
    return group % groups_per_batch == 0 and member < MEMBERS


def newest(run_dir: Path, good: bool, threshold: float) -> Transcript | None:
    """The newest whose score reaches the threshold, or does not; of training or of a validation, by the times
    of their files. None if there is none in the newest files."""
    for path in _newest_files(run_dir)[:FILES]:
        with suppress(OSError):
            for entry in reversed(list(read_lines(path))):
                if "score" in entry and succeeds(entry, threshold) == good:
                    return Transcript(_title(path, entry, good), str(entry.get("text", "")))
    return None


def succeeds(entry: Mapping[str, Any], threshold: float) -> bool:
    """A validation has judged its entries itself."""
    return bool(entry.get("success", entry["score"] >= threshold - ROUNDING))


def _newest_files(run_dir: Path) -> list[Path]:
    def dated() -> Iterator[tuple[float, Path]]:
        for path in (run_dir / "transcripts").glob("*/step-*.jsonl"):
            with suppress(OSError):
                yield path.stat().st_mtime, path

    return [path for _, path in sorted(dated(), reverse=True)]


def _title(path: Path, entry: Mapping[str, Any], good: bool) -> str:
    facts = {
        "score": f"{entry['score']:g}",
        "ground truth": entry.get("ground_truth"),
        "end": entry.get("end"),
    }
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    kind, step = path.parent.name, path.stem.removeprefix("step-")
    return f"newest {'good' if good else 'bad'} transcript: {kind}, step {step}, {entry.get('uid')}, {known}"
