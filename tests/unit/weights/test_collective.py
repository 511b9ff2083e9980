"""The collective weight plane: what is offered is what arrives, and nobody waits for the dead for ever.

Servers and trainers that die are processes of their own; the server's make SGLang's own torch calls.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from signal import SIGCONT, SIGKILL, SIGSTOP
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from asyncrl.engines.sglang import receiver as receiving
from asyncrl.engines.sglang.receiver import Receiver
from asyncrl.errors import EngineError
from asyncrl.runtime.weight_loader import WeightLoader
from asyncrl.types import PolicyVersion
from asyncrl.weights import collective, disk
from asyncrl.weights.collective import Sender
from asyncrl.weights.collective_messages import BucketRequest, VersionRequest, ask_question
from asyncrl.weights.group import ServerGroup, loaded_nccl_version
from asyncrl.weights.manifest import Manifest, Postponed, WeightsError, WeightsRef
from asyncrl.weights.pause import TrainingPause
from tests.fakes.group_sender import BUCKET_BYTES, BUCKETS, SenderProcess, weights
from tests.fakes.group_server import FakeServer, described
from tests.fakes.weights import PinnedTensors, publish, snapshot_of

pytestmark = pytest.mark.slow

LONG = 60.0  # seconds in which everything is over that does not hang
FEW = 3.0  # for what ends at its deadline only
Spawn = Callable[..., FakeServer]


@pytest.fixture(autouse=True)
def _quick_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "CLEANUP_SECONDS", 0.5)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    servers: list[FakeServer] = []

    def start(ranks: int = 1) -> FakeServer:
        servers.append(FakeServer(ranks))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def sender() -> Iterator[Sender]:
    with closing(Sender("127.0.0.1", BUCKET_BYTES, LONG, torch.device("cpu"))) as sender:
        yield sender


async def push(receiver: Receiver, ref: WeightsRef, seconds: float = LONG) -> Manifest:
    async with receiver.push(ref, seconds) as ready:
        return await ready.load_buckets()


def offer(sender: Sender, version: int = 1) -> WeightsRef:
    return sender.offer_snapshot(snapshot_of(weights(version), PolicyVersion(0, version)))


def at_update(server: FakeServer, number: int, act: Callable[[], None]) -> None:
    """`act` when the server is about to be told to receive for the `number`-th time, counted from 0."""

    def look(name: str) -> None:
        if name == "update_from_group" and server.calls.count(name) == number + 1:
            act()

    server.before = look


def check(server: FakeServer, version: int, rank: int = 0) -> None:
    """It has the weights of that seed, exactly, and their label."""
    entries = {name: described(name, tensor) for name, tensor in weights(version).items()}
    assert server.look(rank) == (f"e0-v{version}", entries)


async def test_what_arrives_is_what_was_offered(tmp_path, spawn, sender):
    server = spawn()
    tensors = weights(1)
    receiver = Receiver(server, 0, 1)
    manifest = await push(receiver, sender.offer_snapshot(snapshot_of(tensors, PolicyVersion(0, 1))))
    check(server, 1)
    assert manifest == disk.read_manifest(publish(tensors, tmp_path, PolicyVersion(0, 1)))
    assert server.calls == ["init_group", *["update_from_group"] * BUCKETS]
    assert server.labels == [None] * (BUCKETS - 1) + ["e0-v1"]
    await receiver.close()
    assert server.calls[-1] == "destroy_group"


async def test_two_versions_over_one_group_to_two_ranks(spawn, sender):
    server = spawn(ranks=2)
    receiver = Receiver(server, 0, 2)
    for version in (1, 2):
        await push(receiver, offer(sender, version))
        check(server, version, rank=0)
        check(server, version, rank=1)
    assert server.calls.count("init_group") == 1
    await receiver.close()


@contextmanager
def training(pause: TrainingPause) -> Iterator[None]:
    """A thread that trains nothing, and pauses where it is to."""
    over = threading.Event()

    def train() -> None:
        while not over.wait(0.001):
            pause.allow_pause()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LONG)


async def test_training_stands_still_while_a_group_sends_its_first_bucket(spawn):
    """With it NCCL makes the communicator. Later ones, and other versions, are sent beside training."""
    server = spawn()
    pause = TrainingPause(torch.device("cpu"))
    stands_still: list[tuple[str, bool]] = []

    def look(name: str) -> None:
        # After a pause `_paused` stays until the training thread runs again; it runs when nobody wants one.
        stands_still.append((name, pause._is_paused and pause._waiting_threads > 0))

    server.before = look
    with (
        training(pause),
        closing(Sender("127.0.0.1", BUCKET_BYTES, LONG, torch.device("cpu"), pause)) as sender,
    ):
        receiver = Receiver(server, 0, 1)
        for version in (1, 2):
            await push(receiver, offer(sender, version))
            check(server, version)
        await receiver.close()
    beside = [("update_from_group", False)]
    first_version = [("init_group", True), ("update_from_group", True), *beside * (BUCKETS - 1)]
    assert stands_still == [*first_version, *beside * BUCKETS, ("destroy_group", False)]


async def test_training_goes_on_while_the_second_bucket_is_collected(spawn, monkeypatch):
    """Which waits for other ranks, and needs no device."""
    server = spawn()
    pause = TrainingPause(torch.device("cpu"))
    collected = list[int]()
    shares = PinnedTensors.collect_parts

    def collect(pinned: PinnedTensors, part: slice) -> Any:
        if len(collected) == 1:
            with pause._state_changed:
                assert pause._state_changed.wait_for(lambda: not pause._waiting_threads, FEW), (
                    "training still waits"
                )
        collected.append(part.start)
        return shares(pinned, part)

    monkeypatch.setattr(PinnedTensors, "collect_parts", collect)
    with (
        training(pause),
        closing(Sender("127.0.0.1", BUCKET_BYTES, LONG, torch.device("cpu"), pause)) as sender,
    ):
        receiver = Receiver(server, 0, 1)
        await push(receiver, offer(sender))
        check(server, 1)
        await receiver.close()
    assert len(collected) == BUCKETS


async def test_a_server_that_finds_training_busy_is_not_touched_and_asks_again(spawn, monkeypatch):
    """Compiling may take longer than a load. No failure of the server, which keeps its weights."""
    monkeypatch.setattr(collective, "PAUSE_FRACTION", 0.005)
    server = spawn()
    pause = TrainingPause(torch.device("cpu"))
    with closing(Sender("127.0.0.1", BUCKET_BYTES, LONG, torch.device("cpu"), pause)) as sender:
        ref = offer(sender)
        receiver = Receiver(server, 0, 1)
        engine = SimpleNamespace(load=partial(push, receiver))
        loader = WeightLoader("train", mock.Mock(), LONG, mock.AsyncMock(return_value=engine))
        loader.offer_version(ref)
        answer = await loader.load_next()
        assert "training did not pause" in answer.error
        assert answer.postponed and not answer.process_failed
        assert server.calls == [] and sender.error is None
        with training(pause):
            await push(receiver, ref)
            await receiver.close()
    check(server, 1)


def test_a_push_from_a_gpu_uses_that_gpu_and_no_other(monkeypatch):
    """A new thread's is GPU 0, where each process on other GPUs would hold memory."""
    devices = list[str]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(str(device)))
    with closing(Sender("127.0.0.1", BUCKET_BYTES, LONG, torch.device("cuda", 1))) as sender:
        host, port = sender.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), LONG) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b"", "the connection was served, and has ended"
    assert devices == ["cuda:1"]


async def test_only_the_newest_version_is_to_be_had(spawn, sender, monkeypatch):
    monkeypatch.setattr(collective, "OFFER_SECONDS", 0.1)
    server = spawn()
    first = offer(sender)
    second = offer(sender, 2)
    receiver = Receiver(server, 0, 1)
    with pytest.raises(Postponed, match="the sender offers e0-v2"):
        await push(receiver, first)
    with pytest.raises(WeightsError, match="the sender offers e0-v2") as caught:
        await push(receiver, WeightsRef(PolicyVersion(0, 3), first.path))
    assert not isinstance(caught.value, Postponed)
    assert server.calls == [] and sender.error is None
    await push(receiver, second)
    check(server, 2)
    await receiver.close()


async def test_a_version_that_was_announced_elsewhere_is_waited_for(spawn, sender, monkeypatch):
    """Another rank has announced it; here it is offered a little later."""
    server = spawn()
    was_requested = threading.Event()
    first = offer(sender)
    latest = sender.latest_snapshot
    monkeypatch.setattr(sender, "latest_snapshot", lambda *given: was_requested.set() or latest(*given))
    receiver = Receiver(server, 3, 1)
    wanted = WeightsRef(PolicyVersion(0, 2), f"tcp://127.0.0.1:9,{first.path}")
    task = asyncio.create_task(push(receiver, wanted))
    await asyncio.to_thread(was_requested.wait, LONG)
    offer(sender, 2)
    await task
    check(server, 2)
    await receiver.close()


async def test_a_push_is_finished_with_its_own_version(spawn, sender):
    server = spawn()
    at_update(server, 1, lambda: offer(sender, 2) and None)
    receiver = Receiver(server, 0, 1)
    await push(receiver, offer(sender))
    check(server, 1)
    await receiver.close()


@pytest.mark.parametrize("bucket", [0, 2])
async def test_a_server_that_is_killed(spawn, sender, bucket):
    """Its push ends at once, and others are served: also its successor."""
    server = spawn()
    other = spawn()
    at_update(server, bucket, lambda: server.signal(SIGKILL))
    ref = offer(sender)
    start = time.monotonic()
    with pytest.raises(EngineError, match="died"):
        await push(Receiver(server, 0, 1), ref)
    await push(Receiver(other, 0, 1), ref)
    assert time.monotonic() - start < LONG / 2
    check(other, 1)
    assert sender.error is None


async def test_a_server_that_freezes(spawn, sender):
    """Its push ends at the receiver's deadline, others are served then, and a new group serves it again."""
    server = spawn()
    other = spawn()
    server.look()  # it is up: the push below has all of its time
    at_update(server, 1, lambda: server.signal(SIGSTOP))
    ref = offer(sender)
    receiver = Receiver(server, 0, 1)
    start = time.monotonic()
    with pytest.raises((WeightsError, EngineError)):
        await push(receiver, ref, seconds=FEW)
    await push(Receiver(other, 1, 1), ref)
    assert FEW - 0.1 < time.monotonic() - start < LONG / 2
    check(other, 1)
    server.signal(SIGCONT)
    await push(receiver, ref)
    check(server, 1)
    assert server.calls.count("init_group") == 2


async def test_a_server_that_is_late_to_join_does_not_hang(spawn, sender):
    """It was told to join, and does so long after everybody has given up."""
    server = spawn()
    server.look()
    server.signal(SIGSTOP)
    ref = offer(sender)
    receiver = Receiver(server, 0, 1)
    with pytest.raises((WeightsError, EngineError)):
        await push(receiver, ref, seconds=FEW)
    assert server.calls == ["init_group", "destroy_group"]
    server.signal(SIGCONT)
    await push(receiver, ref)
    check(server, 1)


async def test_a_server_is_not_asked_to_join_nobody(spawn, sender, monkeypatch):
    """Rank 0 that cannot listen is an error before the server hears of it; alone it would wait there."""

    def unable(*_: object) -> None:
        raise RuntimeError("no such interface")

    monkeypatch.setattr("asyncrl.weights.group.ProcessGroupGloo", unable)
    server = spawn()
    with pytest.raises(WeightsError, match="no such interface"):
        await push(Receiver(server, 0, 1), offer(sender))
    assert server.calls == []


async def test_rank_0_listens_before_the_server_is_asked(spawn, sender, monkeypatch):
    """However long it takes rank 0 to get there."""
    make = ServerGroup._make_group
    there = []

    def slowly(group: ServerGroup) -> Any:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and not server.calls:
            time.sleep(0.01)
        there.append(bool(server.calls))
        return make(group)

    monkeypatch.setattr(ServerGroup, "_make_group", slowly)
    server = spawn()
    await push(Receiver(server, 0, 1), offer(sender))
    assert there == [False]


@pytest.mark.parametrize(
    ("server_nccl", "kind", "message"),
    [
        (
            "2.28.9",
            "invalid usage",
            r"the trainer uses NCCL 2\.29\.7, but the server uses 2\.28\.9; install the same version of "
            r"torch in both environments, or set weights\.transport=disk",
        ),
        ("2.29.7", "invalid usage", r"NCCL error in: .*, NCCL version 2\.29\.7"),
        ("2.28.9", "unhandled system error", r"NCCL error in: .*, NCCL version 2\.28\.9"),
    ],
)
async def test_another_nccl_is_named_on_both_sides(spawn, sender, monkeypatch, server_nccl, kind, message):
    """As the server's torch names it in what SGLang answers. A network that fails is none of the version."""
    monkeypatch.setattr(ServerGroup, "nccl_version", "2.29.7")

    def refuse() -> None:
        raise WeightsError(
            "server http://127.0.0.1:9: /update_weights_from_distributed returned 400: Failed to receive "
            "weights: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
            f"{kind} (run with NCCL_DEBUG=WARN for details), NCCL version {server_nccl} …"
        )

    server = spawn()
    at_update(server, 0, refuse)
    with pytest.raises(WeightsError, match=message):
        await push(Receiver(server, 0, 1), offer(sender))


def test_the_version_of_nccl_is_that_of_the_library_in_use(monkeypatch):
    """Another one than torch was compiled with may be installed."""

    def get_version(pointer: Any) -> int:
        pointer._obj.value = 22907
        return 0

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    open_library = mock.Mock(return_value=SimpleNamespace(ncclGetVersion=get_version))
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    assert loaded_nccl_version() == "2.29.7"
    open_library.assert_called_once_with("libnccl.so.2", mode=os.RTLD_NOLOAD)
    open_library.side_effect = OSError("not loaded: it is linked into torch")
    assert loaded_nccl_version() == "2.27.5"


async def test_a_trainer_that_is_killed(spawn):
    """The server is waiting for a broadcast: it gets an error, and lives."""
    server = spawn()
    trainer = SenderProcess(silent_from=2)
    at_update(server, 2, lambda: trainer.signal(SIGKILL))
    start = time.monotonic()
    with pytest.raises(WeightsError):
        await push(Receiver(server, 0, 1), trainer.ref)
    assert time.monotonic() - start < LONG / 2
    assert server.look()[0] == "default"


async def test_a_trainer_that_freezes_takes_the_server_with_it(spawn):
    """The push ends at the deadline. The server waits in the broadcast until the trainer is killed."""
    server = spawn()
    trainer = SenderProcess(silent_from=2)
    server.look()
    at_update(server, 2, lambda: trainer.signal(SIGSTOP))
    with pytest.raises((WeightsError, EngineError)):
        await push(Receiver(server, 0, 1), trainer.ref, seconds=FEW)
    with pytest.raises(EngineError, match="no answer"):
        server.ranks[0].call(1.0, "look")
    trainer.signal(SIGKILL)
    assert server.look()[0] == "default"


async def test_a_trainer_that_is_gone(spawn):
    server = spawn()
    trainer = SenderProcess(silent_from=0)
    trainer.end()
    with pytest.raises(WeightsError, match="cannot connect to the sender"):
        await push(Receiver(server, 0, 1), trainer.ref)
    with pytest.raises(WeightsError, match="not a sender's address"):
        await push(Receiver(server, 0, 1), WeightsRef(PolicyVersion(0, 1), "/dev/shm/weights"))
    assert server.calls == []


async def test_a_rank_that_does_not_deliver(spawn, sender):
    """The server is not told to receive a bucket that the trainer cannot collect. The trainer is told."""

    class Broken(PinnedTensors):
        def collect_parts(self, part: slice, *rest: Any) -> Any:
            if part.start:
                raise WeightsError("a trainer rank did not deliver its shards")
            return super().collect_parts(part, *rest)

    snapshot = snapshot_of(weights(1), PolicyVersion(0, 1))
    broken = replace(snapshot, hold_copy=lambda: nullcontext(Broken(snapshot.layout, weights(1))))
    server = spawn()
    receiver = Receiver(server, 0, 1)
    with pytest.raises(WeightsError, match="did not deliver"):
        await push(receiver, sender.offer_snapshot(broken))
    assert server.calls == ["init_group", "update_from_group", "destroy_group"]
    assert isinstance(sender.error, WeightsError)
    await push(receiver, offer(sender, 2))
    check(server, 2)


async def test_a_supervisor_that_freezes_holds_others_up_no_longer_than_its_deadline(spawn, sender):
    server = spawn()
    ref = offer(sender)
    frozen = await asyncio.open_connection(*_address(ref))
    start = time.monotonic()
    await ask_question(*frozen, VersionRequest("frozen", PolicyVersion(0, 1), 1, 1.0))
    await push(Receiver(server, 1, 1), ref)
    assert 0.9 < time.monotonic() - start < LONG / 2
    check(server, 1)


async def test_a_supervisor_that_is_cancelled_frees_the_sender(spawn, sender):
    server = spawn()
    other = spawn()
    server.look()
    server.signal(SIGSTOP)
    ref = offer(sender)
    served = asyncio.Event()
    server.before = lambda name: served.set()
    task = asyncio.create_task(push(Receiver(server, 0, 1), ref, seconds=LONG))
    await served.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await push(Receiver(other, 1, 1), ref)
    check(other, 1)


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 3) + b"\xc1\xc1\xc1"])
async def test_junk_on_the_port_bothers_nobody(spawn, sender, junk):
    server = spawn()
    ref = offer(sender)
    with socket.create_connection(_address(ref)) as stranger:
        stranger.sendall(junk)
        await push(Receiver(server, 0, 1), ref)
        stranger.settimeout(LONG)
        assert b"ProtocolError" in stranger.recv(1000)
    check(server, 1)


def test_supervisors_are_heard_again_after_a_lack_of_file_descriptors(spawn, sender, monkeypatch, caplog):
    monkeypatch.setattr(collective, "RETRY_SECONDS", 0.1)
    server = spawn()
    ref = offer(sender)
    server.look()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as connection:
        free = os.dup(connection.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            connection.connect(_address(ref))
            end = time.monotonic() + LONG
            while "Too many open files" not in caplog.text:
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        asyncio.run(push(Receiver(server, 0, 1), ref))
    check(server, 1)


async def test_a_question_out_of_turn_ends_the_push(spawn, sender):
    ref = offer(sender)
    reader, writer = await asyncio.open_connection(*_address(ref))
    await ask_question(reader, writer, VersionRequest("odd", PolicyVersion(0, 1), 1, 10.0))
    answer = await ask_question(reader, writer, BucketRequest(2))
    assert "the engine requested bucket 2, but 0 were sent" in answer.reason


async def test_closing_the_sender_ends_its_pushes(spawn):
    server = spawn()
    sender = Sender("127.0.0.1", BUCKET_BYTES, LONG, torch.device("cpu"))
    at_update(server, 1, sender.close)
    start = time.monotonic()
    with pytest.raises(WeightsError):
        await push(Receiver(server, 0, 1), offer(sender))
    assert time.monotonic() - start < LONG / 2
    assert server.look()[0] == "default"


async def test_a_supervisor_that_asks_for_nothing_is_disconnected_and_dials_again(spawn, sender, monkeypatch):
    """It costs a thread and a descriptor, and may be on a machine that is gone."""
    monkeypatch.setattr(collective, "IDLE_SECONDS", 0.05)
    server = spawn()
    receiver = Receiver(server, 0, 1)
    for version in (1, 2):
        await push(receiver, offer(sender, version))
        check(server, version)
        assert await receiver._connection.reader.read() == b"", "the sender has left, and refused nothing"
    assert server.calls.count("init_group") == 2
    await receiver.close()


async def test_who_dials_and_says_nothing_is_disconnected():
    with closing(Sender("127.0.0.1", BUCKET_BYTES, 0.05, torch.device("cpu"))) as sender:
        place = _address(WeightsRef(PolicyVersion(0, 1), sender.address))
        reader, writer = await asyncio.open_connection(*place)
        assert await reader.read() == b""
        writer.close()


async def test_the_groups_of_training_are_left_alone(spawn, sender):
    """This process has no default group, and gets none."""
    known = dict(dist.distributed_c10d._world.pg_map)
    server = spawn()
    receiver = Receiver(server, 0, 1)
    await push(receiver, offer(sender))
    assert dict(dist.distributed_c10d._world.pg_map) == known
    await receiver.close()


def _address(ref: WeightsRef) -> tuple[str, int]:
    host, port = ref.path.removeprefix("tcp://").split(":")
    return host, int(port)
