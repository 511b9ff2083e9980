"""Real trainer ranks: processes with a gloo group among them, run to a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asyncrl.trainer.world import World, join_ranks, leave_ranks
from tests.fakes.forked import FORKED

DEADLINE = 299.0  # not torch's own default
Work = Callable[[World, Path], Any]


def run_ranks(size: int, work: Work, folder: Path) -> Any:
    """Run `work(world, folder)` on `size` new ranks; returns rank 0's result. Fails at the deadline."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [FORKED.Process(target=_rank, args=(rank, size, work, folder)) for rank in range(size)]
    for process in ranks:
        process.start()

    end = time.monotonic() + DEADLINE
    try:
        for process in ranks:
            process.join(max(end - time.monotonic(), 0))
        codes = [process.exitcode for process in ranks]
        assert codes == [0] * size, f"exit codes of the ranks, None is past the deadline: {codes}"
    finally:
        for process in ranks:
            process.kill()

    return torch.load(folder / "result.pt", weights_only=False)


def _rank(rank: int, size: int, work: Work, folder: Path) -> None:
    torch.set_num_threads(1)
    world = join_ranks(rank, size, str(folder / "rendezvous"), "cpu", timeout_s=DEADLINE)
    result = work(world, folder)
    if rank == 0:
        torch.save(result, folder / "result.pt")
    leave_ranks()
