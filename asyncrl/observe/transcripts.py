"""Reads and writes transcripts and token ratios of some episodes, for people who watch a run.

`transcripts/…/step-<N>.jsonl`: texts (written by the coordinator's reporter).
`ratios/step-<N>-<rank>-<time>.jsonl`: pi/mu of each token of the training episodes with transcripts, from the
first training pass; a line for each episode that this rank trained in step N. A file is written once, as
files of other machines are fetched in chunks; a repeated step writes further files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import UNDECODABLE
from asyncrl.observe.files import read_lines

KEPT_MEMBERS = 4  # members of one group for each batch
SCORE_ROUNDING = 1e-6
MAX_FILES = 50  # most files searched for a good or a bad transcript


@dataclass(frozen=True)
class Transcript:
    title: str
    text: str


def is_kept(group: int, member: int, groups_per_batch: int) -> bool:
    """Tell whether the transcript of a training episode is kept, whatever the episode's end and time."""
    return group % groups_per_batch == 0 and member < KEPT_MEMBERS


def newest_transcript(run_dir: Path, good: bool, threshold: float) -> Transcript | None:
    """Return the newest transcript whose score reaches the threshold (`good`), or does not, of training or of
    a validation, by the files' times. None if the newest files have no such transcript."""
    dated_files = list[tuple[float, Path]]()
    for path in (run_dir / "transcripts").glob("*/step-*.jsonl"):
        with suppress(OSError):
            dated_files.append((path.stat().st_mtime, path))

    for _, path in sorted(dated_files, reverse=True)[:MAX_FILES]:
        with suppress(OSError):
            for entry in reversed(list(read_lines(path))):
                if "score" not in entry or succeeds(entry, threshold) != good:
                    continue

                facts = {
                    "score": f"{entry['score']:g}",
                    "ground truth": entry.get("ground_truth"),
                    "end": entry.get("end"),
                }
                facts_text = ", ".join(f"{name} {fact}" for name, fact in facts.items() if fact is not None)
                origin = f"{path.parent.name}, step {path.stem.removeprefix('step-')}, {entry.get('uid')}"
                title = f"newest {'good' if good else 'bad'} transcript: {origin}, {facts_text}"
                return Transcript(title, str(entry.get("text", "")))
    return None


def succeeds(entry: Mapping[str, Any], threshold: float) -> bool:
    """Tell whether an entry is a success; a validation's entries state their own success."""
    return bool(entry.get("success", entry["score"] >= threshold - SCORE_ROUNDING))


log = logging.getLogger("asyncrl.observe")

MAX_RATIO_TOKENS = 8192  # tokens of an episode, as a run with long episodes would fill the disk
KEPT_STEPS = 1000  # newest steps whose files are kept: four episodes a step are at most about 500 MB


class TokenRatios(msgspec.Struct, frozen=True):
    """Holds ratios of an episode's first MAX_RATIO_TOKENS model tokens, in order. `log_ratio`: log pi - log
    mu, in nats; None if not a number. `dropped`: the correction, or the loss, dropped the token."""

    uid: str
    log_ratio: list[float | None]
    dropped: list[bool]


def save_ratios(run_dir: Path, step: int, rank: int, episode_ratios: Iterable[TokenRatios]) -> None:
    """Write a file of a step (counted from 1) if there are episodes. Files of all ranks from KEPT_STEPS steps
    ago are deleted, as there may be fewer ranks now. On a full disk only the file is lost."""
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
    """Read the ratios of an episode that was trained in a step; None if there are none. The newest file with
    the episode counts, as a resumed run may repeat the step on another rank. Raises OSError."""
    paths = (run_dir / "ratios").glob(f"step-{step}-*.jsonl")
    for path in sorted(paths, key=lambda path: path.stem.rpartition("-")[2], reverse=True):
        for line in path.read_bytes().splitlines():
            with suppress(*UNDECODABLE):  # cut by a crash
                if (ratios := msgspec.json.decode(line, type=TokenRatios)).uid == uid:
                    return ratios

    return None
