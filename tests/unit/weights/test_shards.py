"""Weights in pieces on real ranks: rank 0 collects them whole, as they were copied."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import ModelConfig
from asyncrl.trainer.model import Policy, PublishedShards, load_policy
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk, ranges
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.manifest import Superseded, WeightsError, split_buckets
from asyncrl.weights.shards import HostShards
from asyncrl.weights.snapshot import Snapshot, Tensors
from tests.fakes.ranks import run_ranks
from tests.fakes.training import full_state, save_tiny_qwen
from tests.fakes.weights import buckets, concat_parts

pytestmark = pytest.mark.slow

DEADLINE = 60.0
BUCKETS = (1, 1000, 1 << 20)  # each tensor alone, some together, all at once


def policy_of(world: World, folder: Path) -> Policy:
    """Rows that no number of ranks divides, and fewer rows than ranks."""
    model = folder / "model"
    if world.rank == 0:
        save_tiny_qwen(model)
    world.gather(0, int)
    return load_policy(ModelConfig(path=str(model), dtype="bfloat16"), world)


def buffers(version: int) -> Tensors:
    """What every rank has whole; in files one comes before the bfloat16 weights, the other after them."""
    return {"count": torch.tensor(version), "flags": torch.tensor([version % 2 == 0, True, False])}


def taken(
    host: HostShards, world: World, policy: Policy, version: int, kept: Tensors | None = None
) -> Snapshot:
    gather = lambda busy: world.gather(busy, list[int])  # noqa: E731
    return host.copy_version(PolicyVersion(0, version), PublishedShards(policy), gather, kept or {})


@torch.no_grad()
def change(policy: Policy) -> None:
    for parameter in policy.parameters():
        parameter.mul_(1.5).add_(0.25)


def collected(snapshot: Snapshot, bucket_bytes: int) -> Tensors:
    return {name: t.clone() for bucket in buckets(snapshot, bucket_bytes) for name, t in bucket.items()}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "weight-shards"]


def test_one_ranks_buckets_are_sent_from_where_they_lie(world: World, tmp_path: Path) -> None:
    """They are not copied; the bytes are those that are collected. A tensor that is sent alone, too."""
    policy = policy_of(world, tmp_path)
    kept = buffers(0)
    host = HostShards(PublishedShards(policy), policy.published, torch.bfloat16, DEADLINE, buffers=kept)
    snapshot = taken(host, world, policy, 1, kept)
    for bucket_bytes in BUCKETS:
        with snapshot.hold_copy() as pinned:
            end = host._buffers._buffers[0].memory.data_ptr()
            for part in split_buckets(snapshot.layout, bucket_bytes):
                contiguous = pinned.contiguous_bytes(part)
                assert contiguous is not None and contiguous.data_ptr() == end
                assert torch.equal(contiguous, concat_parts(chain.from_iterable(pinned.collect_parts(part))))
                end += len(contiguous)
    host.close(DEADLINE)


def collect_twice(world: World, folder: Path) -> Any:
    policy = policy_of(world, folder)
    host = HostShards(PublishedShards(policy), policy.published, torch.bfloat16, DEADLINE, buffers=buffers(0))
    assert len(threads()) == (world.rank > 0)
    found: dict[str, Any] = {"wanted": [], "found": []}
    for version in (1, 2):
        kept = buffers(version)
        found["wanted"].append({"count": kept["count"], **full_state(policy), "flags": kept["flags"]})
        snapshot = taken(host, world, policy, version, kept)
        change(policy)  # training goes on
        if world.rank == 0:
            found["found"].append([collected(snapshot, size) for size in BUCKETS])
            found["layout"] = [spec.name for spec in snapshot.layout]
        world.gather(0, int)
    start = time.monotonic()
    host.close(DEADLINE)
    assert time.monotonic() - start < DEADLINE / 2 and not threads()
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_whole_tensors_as_they_were_copied(tmp_path: Path, ranks: int):
    result = run_ranks(ranks, collect_twice, tmp_path)
    for wanted, copies in zip(result["wanted"], result["found"], strict=True):
        for found in copies:
            assert list(found) == list(wanted) == result["layout"]
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    first, second = result["wanted"]
    assert not torch.equal(first["model.norm.weight"], second["model.norm.weight"])


def overtake(world: World, folder: Path) -> Any:
    """Rank 0 reads one version slowly while three newer ones are copied."""
    policy = policy_of(world, folder)
    host = HostShards(PublishedShards(policy), policy.published, torch.bfloat16, DEADLINE)
    wanted = []
    snapshots = []
    found = {}
    for version in range(4):
        wanted.append(full_state(policy))
        snapshots.append(taken(host, world, policy, version))
        if version == 0 and world.rank == 0:
            slow = buckets(snapshots[0], 1)
            found |= next(slow)
        change(policy)
    if world.rank == 0:
        for bucket in slow:
            found |= bucket
        for old in snapshots[1:3]:
            with pytest.raises(Superseded):
                next(buckets(old, 1))
        found = {"slow": found, "last": collected(snapshots[3], 1000), "wanted": wanted}
    world.gather(0, int)
    host.close(DEADLINE)
    return found


def test_the_latest_wins_and_what_is_read_stays(tmp_path: Path):
    result = run_ranks(2, overtake, tmp_path)
    for found, wanted in ((result["slow"], result["wanted"][0]), (result["last"], result["wanted"][3])):
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def collect_everywhere(world: World, folder: Path) -> Any:
    """Every rank collects each version, in the background and several at a time, while newer ones are
    copied; rank 1 keeps the first one for long, so that no rank may copy over it."""
    policy = policy_of(world, folder)
    host = HostShards(
        PublishedShards(policy), policy.published, torch.bfloat16, DEADLINE, collectors=world.size
    )
    assert len(threads()) == world.size - 1
    wanted: list[Tensors] = []
    found: dict[int, Tensors] = {}
    slow: Tensors = {}

    def collect(version: int, snapshot: Snapshot) -> None:
        with suppress(Superseded):
            found[version] = collected(snapshot, 1000)

    readers = []
    held = None
    for version in range(6):
        wanted.append(full_state(policy))
        snapshot = taken(host, world, policy, version)
        if version == 0 and world.rank == 1:
            held = buckets(snapshot, 1)
            slow |= next(held)
        readers.append(threading.Thread(target=collect, args=(version, snapshot)))
        readers[-1].start()
        change(policy)
    for reader in readers:
        reader.join(DEADLINE)
    for bucket in held or ():
        slow |= bucket
    assert 5 in found, "the last one is not replaced by any"
    for version, tensors in found.items():
        assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted[version].items())
    assert (world.rank != 1) or all(torch.equal(slow[name], tensor) for name, tensor in wanted[0].items())
    world.gather(0, int)
    host.close(DEADLINE)
    assert not threads()
    return sorted(found)


def test_every_rank_may_collect(tmp_path: Path):
    assert 5 in run_ranks(3, collect_everywhere, tmp_path)


def collect_from_a_late_rank(world: World, folder: Path) -> Any:
    """Rank 1 copies only when rank 0 has asked for it."""
    policy = policy_of(world, folder)
    wanted = full_state(policy)
    host = HostShards(PublishedShards(policy), policy.published, torch.bfloat16, DEADLINE)
    was_requested = threading.Event()
    waiting = host._buffers._changed
    wait_for = waiting.wait_for

    def late(there: Callable[[], bool], seconds: float | None) -> bool:
        def look() -> bool:
            found = there()
            was_requested.set()
            return found

        return wait_for(look, seconds)

    waiting.wait_for = late  # type: ignore[method-assign]
    world.gather(0, int)
    found: Tensors = {}
    if world.rank == 0:
        snapshot = host.copy_version(PolicyVersion(0, 1), PublishedShards(policy), lambda busy: [busy])
        reader = threading.Thread(target=lambda: found.update(collected(snapshot, 1)))
        reader.start()
        reader.join(DEADLINE)
    else:
        assert was_requested.wait(DEADLINE) and host._buffers.copy_count == 0
        host.copy_version(PolicyVersion(0, 1), PublishedShards(policy), lambda busy: [busy])
    host.close(DEADLINE)
    return {"same": all(torch.equal(found[name], tensor) for name, tensor in wanted.items())} if found else {}


def test_a_rank_that_copies_late_is_waited_for(tmp_path: Path):
    assert run_ranks(2, collect_from_a_late_rank, tmp_path)["same"]


def lose_a_rank(world: World, folder: Path) -> Any:
    """Rank 1 dies or freezes between two buckets."""
    how = (folder / "how").read_text()
    policy = policy_of(world, folder)
    host = HostShards(PublishedShards(policy), policy.published, torch.bfloat16, DEADLINE)
    snapshot = taken(host, world, policy, 1)
    if world.rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        world.gather(0, int)
        threading.Event().wait(DEADLINE) if how == "freeze" else host.close(DEADLINE)
        os._exit(0)
    world.gather(0, int)
    reading = buckets(snapshot, 1)
    pid = int((folder / "pid").read_text())
    next(reading)
    os.kill(pid, signal.SIGSTOP if how == "freeze" else signal.SIGKILL)
    host._deadline = 2.0
    start = time.monotonic()
    try:
        list(reading)
    except WeightsError as error:
        text = str(error)
    host.close(1.0)
    seconds = time.monotonic() - start
    torch.save({"error": text, "seconds": seconds}, folder / "result.pt")
    if how == "freeze":
        os.kill(pid, signal.SIGKILL)
    return {"error": text, "seconds": seconds}


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_lost_rank_is_an_error_in_time(tmp_path: Path, how: str):
    (tmp_path / "how").write_text(how)
    with pytest.raises(AssertionError, match=r"exit codes .*\[0, -9\]"):
        run_ranks(2, lose_a_rank, tmp_path)
    result = torch.load(tmp_path / "result.pt", weights_only=False)
    assert "did not deliver its shards" in result["error"]
    assert result["seconds"] < 40


def deltas_of_ranks(world: World, folder: Path) -> Any:
    """Five versions, published as deltas; the fourth is collected by nobody, as a newer one replaces it. The
    other ranks are first on rank 0's machine, then on others."""
    policy = policy_of(world, folder)
    received = list[int]()
    ranges.GRID_BYTES = 64
    for machine in ("here", f"machine-{world.rank}"):
        directory = folder / f"versions-on-{machine}"
        socket.gethostname = lambda name=machine: name
        host = HostShards(PublishedShards(policy), policy.published, torch.bfloat16, DEADLINE, 1, buffers(0))
        writer = VersionWriter(directory, 1000, full_every=100)
        for version in range(1, 6):
            wanted = full_state(policy)
            kept = buffers(version)
            snapshot = taken(host, world, policy, version, kept)
            if world.rank == 0 and version != 4:
                before = host.received_bytes
                read = disk.read_tensors(writer.write_version(snapshot))[1]
                wanted = {name: tensor.bfloat16() for name, tensor in wanted.items()} | kept
                assert read.keys() == wanted.keys()
                assert all(torch.equal(read[name], tensor) for name, tensor in wanted.items())
                received.append(host.received_bytes - before)
            world.gather(0, int)
            with torch.no_grad():
                for parameter in policy.parameters():
                    local = parameter.to_local().view(-1)
                    local[version::500] += 1
        host.close(DEADLINE)
    return received


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_ranks_deliver_only_what_has_changed(tmp_path: Path, ranks: int) -> None:
    """Across machines; within one not even all of a whole version."""
    own, *_, whole, one, two, three = run_ranks(ranks, deltas_of_ranks, tmp_path)
    assert whole > 2 * max(one, two, three) > 0 and own < whole
