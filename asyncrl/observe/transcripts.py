"""Reads and writes what is kept of some episodes, for whoever watches a run.

`transcripts/…/step-<N>.jsonl`: texts (written by the coordinator's reporter).
`ratios/step-<N>-<rank>-<time>.jsonl`: pi/mu of each token of the training episodes among them, as they were
first trained on; a line for each episode that this rank trained in step N. A file is written once, as those
of other machines are fetched in chunks: a step that is repeated has more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import UNDECODABLE
from asyncrl.observe.files import read_lines

KEPT_MEMBERS = 4  # of one group for each batch
SCORE_ROUNDING = 1e-6
MAX_FILES = 50  # looked through for a good or a bad one, at most


@dataclass(frozen=True)
class Transcript:
    title: str
    text: str


def is_kept(group: int, member: int, groups_per_batch: int) -> bool:
    """True for the episodes of training that are kept: it does not depend on how one ends, nor on when."""
    return group % groups_per_batch == 0 and member < KEPT_MEMBERS


def newest(run_dir: Path, good: bool, threshold: float) -> Transcript | None:
    """The newest whose score reaches the threshold, or does not; of training or of a validation, by the times
    of their files. None if there is none in the newest files."""
    for path in _newest_files(run_dir)[:MAX_FILES]:
        with suppress(OSError):
            for entry in reversed(list(read_lines(path))):
                if "score" in entry and succeeds(entry, threshold) == good:
                    return Transcript(_transcript_title(path, entry, good), str(entry.get("text", "")))
    return None


def succeeds(entry: Mapping[str, Any], threshold: float) -> bool:
    """A validation has judged its entries itself."""
    return bool(entry.get("success", entry["score"] >= threshold - SCORE_ROUNDING))


def _newest_files(run_dir: Path) -> list[Path]:
    def dated() -> Iterator[tuple[float, Path]]:
        for path in (run_dir / "transcripts").glob("*/step-*.jsonl"):
            with suppress(OSError):
                yield path.stat().st_mtime, path

    return [path for _, path in sorted(dated(), reverse=True)]


def _transcript_title(path: Path, entry: Mapping[str, Any], good: bool) -> str:
    facts = {
        "score": f"{entry['score']:g}",
        "ground truth": entry.get("ground_truth"),
        "end": entry.get("end"),
    }

    facts_text = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    kind = path.parent.name
    step = path.stem.removeprefix("step-")

    return f"newest {'good' if good else 'bad'} transcript: {kind}, step {step}, {entry.get('uid')}, {facts_text}"


log = logging.getLogger("asyncrl.observe")

MOST_TOKENS = 8192  # of an episode: a run with long ones would fill the disk
KEPT_STEPS = 1000  # the newest ones, whose files are kept: four episodes a step are at most about 500 MB


class TokenRatios(msgspec.Struct, frozen=True):
    """Ratios of an episode's first MOST_TOKENS model tokens, in order. `log_ratio`: log pi - log mu, in nats;
    None where it is no number. `dropped`: the correction, or the loss, took it out."""

    uid: str
    log_ratio: list[float | None]
    dropped: list[bool]


def save_ratios(run_dir: Path, step: int, rank: int, episode_ratios: Iterable[TokenRatios]) -> None:
    """Write a file of a step (counted from 1); none without episodes. Files of the step that is STEPS older
    are deleted, those of other ranks, too: there may be fewer now. A full disk costs no more than that."""
    lines = [msgspec.json.encode(ratios) + b"\n" for ratios in episode_ratios]
    path = run_dir / "ratios" / f"step-{step}-{rank}-{time.time_ns()}.jsonl"

    try:
        if lines:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"".join(lines))

        for old_file in path.parent.glob(f"step-{step - KEPT_STEPS}-*.jsonl"):
            old_file.unlink(missing_ok=True)
    except OSError as error:
        log.error("%s: not written (%s)", path, error)


def read_ratios(run_dir: Path, step: int, uid: str) -> TokenRatios | None:
    """Read those of an episode that was trained in a step; None where there are none. The newest file that
    has them counts: a resumed run that repeats the step may have given it to another rank. Raises OSError."""
    found = (run_dir / "ratios").glob(f"step-{step}-*.jsonl")
    for path in sorted(found, key=lambda path: path.stem.rpartition("-")[2], reverse=True):
        for line in path.read_bytes().splitlines():
            with suppress(*UNDECODABLE):  # cut by a crash
                if (found := msgspec.json.decode(line, type=TokenRatios)).uid == uid:
                    return found
    return None
