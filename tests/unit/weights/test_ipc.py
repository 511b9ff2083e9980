"""Weights through memory that a server opens: all of its ranks get them, and whoever leaves ends the wait."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import zmq

from asyncrl.errors import DeadlineError
from asyncrl.types import PolicyVersion
from asyncrl.weights import ipc
from asyncrl.weights.ipc import BucketMemory, ServerMemory, is_safe, release
from asyncrl.weights.manifest import WeightsError
from asyncrl.weights.snapshot import as_bytes
from tests.fakes.group_sender import weights
from tests.fakes.ipc_worker import read_weights
from tests.fakes.weights import snapshot_of, whole_tensors

CPU = torch.device("cpu")
LONG = 30.0
MEMORY = partial(BucketMemory, 1 << 21, CPU)  # as much as the largest tensor


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_gpus", lambda device: [f"GPU-{index}" for index in range(4)])


@pytest.fixture
def keeper() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sender's end of its connection, and the keeper's."""
    mine, theirs = socket.socketpair()
    with closing(mine), closing(theirs):
        yield mine, theirs


@contextmanager
def reading(memory: ServerMemory, gpus: list[int], wrong: str = "") -> Iterator[list[Future[dict]]]:
    """Ranks of the server, on these GPUs."""
    with ThreadPoolExecutor(4) as pool:
        addresses = list(memory.sockets.values())
        yield [pool.submit(read_weights, addresses[gpu], CPU, wrong) for gpu in gpus]


def show(memory: ServerMemory, seconds: float = LONG) -> None:
    """All of the weights, a tensor at a time."""
    deadline = time.monotonic() + seconds
    memory.open(deadline)
    snapshot = snapshot_of(weights(1), PolicyVersion(0, 1))
    for spec, data in whole_tensors(snapshot):
        memory.load((spec,), data, deadline)
    memory.finish(deadline)


def test_every_rank_of_the_server_gets_all(keeper):
    wanted = weights(1)
    with ServerMemory(2, MEMORY(), keeper[0]) as memory, reading(memory, [3, 1]) as ranks:
        place = Path(next(iter(memory.sockets.values())).removeprefix("ipc://")).parent
        assert place.stat().st_mode & 0o077 == 0, "others could be told, or see what is shown"
        show(memory)
        for rank in ranks:
            found = rank.result(LONG)
            assert found.keys() == wanted.keys()
            assert all((as_bytes(found[name]) == as_bytes(wanted[name])).all() for name in wanted)
    assert not place.exists()


def test_what_a_rank_cannot_load_is_an_error_for_all(keeper):
    with ServerMemory(2, MEMORY(), keeper[0]) as outer, reading(outer, [0, 1], "big1") as ranks:
        with pytest.raises(WeightsError, match="did not load them: KeyError: 'big1'"), outer:
            show(outer)
        for rank in ranks:
            with pytest.raises(RuntimeError, match="big1"):
                rank.result(LONG)


def test_a_rank_that_leaves_between_buckets_is_an_error_for_the_others(keeper):
    memory = ServerMemory(2, MEMORY(), keeper[0])
    place = Path(next(iter(memory.sockets.values())).removeprefix("ipc://")).parent
    with reading(memory, [1]) as (stays,), zmq.Context() as context, context.socket(zmq.REP) as leaves:
        leaves.connect(memory.sockets["GPU-0"])
        deadline = time.monotonic() + LONG
        memory.open(deadline)
        leaves.recv()
        leaves.send(b"")
        memory._await_answers(deadline)
        leaves.close()
        while memory._bound[0].poll(0, zmq.POLLOUT) and time.monotonic() < deadline:
            time.sleep(0.001)  # until it is seen to have left
        with pytest.raises(WeightsError, match="a rank of the server has left"), memory:
            memory.finish(deadline)
        with pytest.raises(RuntimeError, match="has left"):
            stays.result(LONG)
    assert not place.exists()


def test_a_keeper_that_leaves_ends_the_wait_for_its_server(keeper):
    with ServerMemory(1, MEMORY(), keeper[0]) as memory:
        keeper[1].close()
        start = time.monotonic()
        with pytest.raises(WeightsError, match="the keeper has left"):
            memory.open(start + LONG)
        assert time.monotonic() - start < LONG / 2


def test_a_server_that_never_dials_is_an_error_in_time(keeper):
    with ServerMemory(1, MEMORY(), keeper[0]) as memory, pytest.raises(DeadlineError):
        memory.open(time.monotonic() + 0.2)


def test_a_server_whose_trainer_is_gone_is_released(keeper):
    """Its sockets are still to be seen, and nobody is behind them."""
    memory = ServerMemory(1, MEMORY(), keeper[0])
    with reading(memory, [2]) as (rank,):
        memory.open(time.monotonic() + LONG)
        for one in memory._bound:
            path = Path(one.last_endpoint.decode().rstrip("\0").removeprefix("ipc://"))
            one.close(linger=0)
            with socket.socket(socket.AF_UNIX) as left:
                path.unlink(missing_ok=True)
                left.bind(str(path))  # as a process leaves it that was killed
        assert all(is_safe(address) for address in memory.sockets.values())
        release(memory.sockets, rank.done)
        with pytest.raises(RuntimeError, match="the trainer is gone"):
            rank.result(LONG)
    assert not path.parent.exists()


def test_a_server_that_dials_when_all_have_left_is_released(keeper):
    with ServerMemory(1, MEMORY(), keeper[0]) as memory:
        pass
    with reading(memory, [2]) as (rank,):
        release(memory.sockets, rank.done)
        with pytest.raises(RuntimeError, match="the trainer is gone"):
            rank.result(LONG)


def test_only_a_socket_in_a_trainers_own_directory_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, mode, safe in (("asyncrl-1", 0o700, True), ("asyncrl-2", 0o755, False), ("bus", 0o700, False)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        with socket.socket(socket.AF_UNIX) as there:
            there.bind(str(tmp_path / name / "0"))
            assert is_safe(f"ipc://{tmp_path / name / '0'}") == safe
        if not safe:
            release({"GPU-0": f"ipc://{tmp_path / name / '0'}"}, lambda: False)
            assert (tmp_path / name / "0").exists()
    (tmp_path / "asyncrl-3").symlink_to(tmp_path / "asyncrl-1")
    (tmp_path / "asyncrl-1/file").write_text("kept")
    assert not is_safe(f"ipc://{tmp_path}/asyncrl-3/0") and not is_safe(f"ipc://{tmp_path}/asyncrl-1/file")


def test_a_server_of_more_ranks_than_gpus_is_refused(keeper):
    with pytest.raises(WeightsError, match="5 ranks, on a machine of 4 GPUs"):
        ServerMemory(5, MEMORY(), keeper[0])
