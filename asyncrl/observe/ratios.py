"""pi/mu of each token of the training episodes whose transcripts are kept, as they were first trained on.

`ratios/step-<N>-<rank>-<time>.jsonl`: a line for each episode that this rank trained in step N. A file is
written once, as those of other machines are fetched piece by piece: a step that is repeated has more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncrl.errors import UNDECODABLE

log = logging.getLogger("asyncrl.observe")

MOST_TOKENS = 8192  # of an episode: a run with long ones would fill the disk
STEPS = 1000  # the newest ones, whose files are kept: four episodes a step are at most about 500 MB


class TokenRatios(msgspec.Struct, frozen=True):
    """Ratios of an episode's first MOST_TOKENS model tokens, in order. `log_ratio`: log pi - log mu, in nats;
    None where it is no number. `dropped`: the correction, or the loss, took it out."""

    uid: str
    log_ratio: list[float | None]
    dropped: list[bool]


def save(run_dir: Path, step: int, rank: int, found: Iterable[TokenRatios]) -> None:
    """Write a file of a step (counted from 1); none without episodes. Files of the step that is STEPS older
    are deleted, those of other ranks, too: there may be fewer now. A full disk costs no more than that."""
    lines = [msgspec.json.encode(each) + b"\n" for each in found]
    path = run_dir / "ratios" / f"step-{step}-{rank}-{time.time_ns()}.jsonl"
    try:
        if lines:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"".join(lines))
        for old in path.parent.glob(f"step-{step - STEPS}-*.jsonl"):
            old.unlink(missing_ok=True)
    except OSError as error:
        log.error("%s: not written (%s)", path, error)


def read(run_dir: Path, step: int, uid: str) -> TokenRatios | None:
    """Read those of an episode that was trained in a step; None where there are none. The newest file that
    has them counts: a resumed run that repeats the step may have given it to another rank. Raises OSError."""
    found = (run_dir / "ratios").glob(f"step-{step}-*.jsonl")
    for path in sorted(found, key=lambda path: path.stem.rpartition("-")[2], reverse=True):
        for line in path.read_bytes().splitlines():
            with suppress(*UNDECODABLE):  # cut by a crash
                if (found := msgspec.json.decode(line, type=TokenRatios)).uid == uid:
                    return found
    return None
