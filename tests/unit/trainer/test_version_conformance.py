"""A version in files is the same however many ranks, replicas and machines it comes from, and whole or not
there at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.manifest import Superseded, WeightsError
from asyncrl.weights.snapshot import Buffers
from tests.fakes.nodes import emulated, forbidden
from tests.fakes.publishing import DEADLINE, EPOCH, Trainer, publish_four
from tests.fakes.ranks import run_ranks
from tests.fakes.training import save_tiny_qwen

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]


def in_replicas(replicas: int, world: World, folder: Path) -> Any:
    return publish_four(world.arranged(replicas, 1), folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one rank publishes."""
    rank_results = run_ranks(1, partial(in_replicas, 1), tmp_path_factory.mktemp("one"))
    assert [is_delta for is_delta, *_ in rank_results] == [False, True, True, False]
    assert len({checksum for _, checksum, _ in rank_results}) == 4
    return rank_results


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_any_ranks_publish_the_same(one: Any, tmp_path: Path, ranks: int, replicas: int) -> None:
    assert run_ranks(ranks, partial(in_replicas, replicas), tmp_path) == one


@pytest.mark.full
def test_ranks_on_two_machines_publish_the_same(one: Any) -> None:
    """They share no memory: versions are in that of rank 0's machine only."""
    if why := forbidden():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place, emulated(2) as nodes:
        folder = Path(place)
        address = f"{nodes[0].address}:29500"
        save_tiny_qwen(folder / "model")
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = []
        for rank, node in enumerate(nodes):
            words = ("-m", "tests.fakes.publishing", str(rank), "2", address, place, f"{place}/result.pt")
            ranks.append(node.start(sys.executable, *words, env=env, out=subprocess.PIPE))
        for process in ranks:
            said, _ = process.communicate(timeout=2 * DEADLINE)
            assert process.returncode == 0, said.decode()
        left = [any(node.seen("/dev/shm").glob("asyncrl-*")) for node in nodes]
        assert left == [True, False]
        assert torch.load(folder / "result.pt", weights_only=False) == one


def lose_a_part(how: str, world: World, folder: Path) -> Any:
    """Rank 1 dies, or has no bytes for it any more, when it is to give its part of the second version."""
    trainer = Trainer(world, folder, patience=2.0, full_every=3)
    trainer.publish()
    if world.rank == 0:
        trainer.announced_version()
    world.gather(0, int)
    reading = Buffers.reading

    def lost(buffers: Buffers, index: int, copied: int, wait_seconds: float) -> Any:
        if copied < 2:
            return reading(buffers, index, copied, wait_seconds)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Superseded("another one")

    Buffers.reading = lost if world.rank else reading  # type: ignore[method-assign]
    trainer.publish()
    if world.rank == 0:
        with pytest.raises(WeightsError, match="did not deliver its"):
            check_until(trainer, time.monotonic() + DEADLINE)
    if how == "skipped" or world.rank:
        world.gather(0, int)
    trainer.publishing.drain()
    if world.rank == 0:
        torch.save(left_in(folder), folder / "left.pt")
    return None


def check_until(trainer: Trainer, end: float) -> None:
    while time.monotonic() < end:
        trainer.publishing.raise_failure()


def left_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run/weights").iterdir() if path.is_dir()}


@pytest.mark.parametrize("how", ["killed", pytest.param("skipped", marks=pytest.mark.full)])
def test_a_version_that_lacks_a_part_never_appears(tmp_path: Path, how: str) -> None:
    """And the next start's first one is whole, of whatever ranks."""
    if how == "killed":
        with pytest.raises(AssertionError, match=r"exit codes .*\[0, -9\]"):
            run_ranks(2, partial(lose_a_part, how), tmp_path)
    else:
        run_ranks(2, partial(lose_a_part, how), tmp_path)
    first, last = (Path(disk.ref_to(tmp_path, PolicyVersion(EPOCH, step)).path).name for step in (1, 2))
    left = torch.load(tmp_path / "left.pt", weights_only=False)
    assert first in left and last not in left
    (tmp_path / "rendezvous").unlink()
    (tmp_path / "run/weights/.writing-by-a-killed-rank").mkdir()
    rank_results = run_ranks(1, partial(in_replicas, 1), tmp_path)
    assert [is_delta for is_delta, *_ in rank_results] == [False, True, True, False]
    assert not [name for name in left_in(tmp_path) if name.startswith(".writing-")]
