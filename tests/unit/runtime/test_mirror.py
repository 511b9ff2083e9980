"""Versions on machines that do not see the trainer's files, over real sockets: whole, once, or not at all."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.observe.timeline import Timeline
from asyncrl.runtime import mirror as module
from asyncrl.runtime import version_server
from asyncrl.runtime.mirror import Mirror
from asyncrl.runtime.version_server import HELD_VERSIONS, ArrivingVersion, VersionServer, root_server
from asyncrl.runtime.weight_loader import LOAD_TRIES, LoadFailures, WeightLoader
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.manifest import Superseded, Unreachable, WeightsError, WeightsRef
from asyncrl.wire.messages.engine import OpenVersion
from asyncrl.wire.messages.shared import Loaded
from asyncrl.wire.sockets import COORDINATOR, Gate, choose_endpoints
from tests.fakes.launching import config
from tests.fakes.weights import publish, snapshot_of

pytestmark = pytest.mark.slow

FETCHER = """
import asyncio, sys
from pathlib import Path
import msgspec
from asyncrl.config import RunConfig
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime.mirror import Mirror
from asyncrl.weights.manifest import WeightsRef
from asyncrl.wire.sockets import Endpoints
given = tuple[RunConfig, Endpoints, WeightsRef]
run, endpoints, ref = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=given)
async def fetch():
    mirror = Mirror(run, endpoints, "rollout", 9, Timeline(Path(run.run_dir, "killed.jsonl")))
    async with mirror.local_copy(ref):
        pass
asyncio.run(fetch())
"""


class Machines:
    """The trainer's, with a server, and others, which see none of its files."""

    def __init__(self, directory: Path) -> None:
        self._at = directory
        self.published = directory / "trainer"
        self.endpoints = choose_endpoints("127.0.0.1", 0)
        self._gate = Gate(self.endpoints)
        self.newest: WeightsRef | None = None
        here = root_server(config(directory), self.endpoints, self._gate, lambda: self.newest)
        assert here is not None
        self.root: VersionServer = here
        self._mirrors: list[Mirror] = []

    def publish(self, step: int, numbers: int = 3000, **more: Any) -> WeightsRef:
        """Numbers that name their version."""
        tensors = {"a": torch.full((numbers,), float(step)), "b": torch.arange(4.0)}
        self.newest = publish(tensors, self.published, PolicyVersion(1, step), **more)
        return self.newest

    def mirror(self, machine: str, index: int = 0, joined: bool = False) -> Mirror:
        """Of a process on that machine: it sees no path of the trainer's. `joined`: nor keys of others."""
        run = config(self._at / machine)
        Path(run.run_dir, run.name).mkdir(parents=True, exist_ok=True)
        timeline = Timeline(self._at / machine / f"timeline-{index}.jsonl")
        endpoints = self.endpoints
        own = (COORDINATOR, "rollout")
        if joined:
            keys = {role: endpoints.keys[role] for role in own}
            endpoints = msgspec.structs.replace(endpoints, keys=keys)
        made = Mirror(run, endpoints, "rollout", index, timeline)
        made._sees_files = False
        self._mirrors.append(made)
        return made

    def close(self) -> None:
        for mirror in self._mirrors:
            mirror.close()
            if mirror._directory is not None:
                shutil.rmtree(
                    mirror._directory.parent, ignore_errors=True
                )  # as the launcher does, in the end
        self.root.close()
        self._gate.close()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setattr(module, "STALL_SECONDS", 2.0)
    made = Machines(tmp_path)
    yield made
    made.close()


def brought(mirror: Mirror, ref: WeightsRef) -> WeightsRef:
    """The version as files of the mirror's machine, each byte of which is checked."""

    async def load() -> WeightsRef:
        async with mirror.local_copy(ref) as local:
            assert disk.verify_version(local).checksum == disk.read_manifest(ref).checksum
            return local

    return asyncio.run(load())


def test_a_version_comes_to_a_machine_once_and_goes_on_from_there(machines: Machines) -> None:
    first, beside, second, third = map(machines.mirror, ("2", "2", "3", "4"), (0, 1, 2, 3))
    for step in range(1, 9):
        ref = machines.publish(step)
        before = machines.root.sent_bytes
        local = brought(first, ref)
        assert local.path != ref.path and local.version == ref.version
        assert brought(beside, ref) == local
        brought(second, ref)
        brought(third, ref)
        payload = (Path(ref.path) / disk.PAYLOAD).stat().st_size
        assert machines.root.sent_bytes - before == payload, "one machine read from the trainer's"
    assert len(disk.published_versions(Path(local.path).parent)) <= disk.KEPT_VERSIONS + HELD_VERSIONS


def test_machines_read_at_once_what_has_arrived_so_far(machines: Machines) -> None:
    ref = machines.publish(1, numbers=8 << 20)
    mirrors = [machines.mirror(str(machine), machine) for machine in range(4)]

    async def all_of_them() -> None:
        await asyncio.gather(*(asyncio.to_thread(brought, mirror, ref) for mirror in mirrors))

    asyncio.run(all_of_them())
    assert machines.root.sent_bytes == (Path(ref.path) / disk.PAYLOAD).stat().st_size


def test_who_has_joined_reads_from_the_trainers_machine(machines: Machines) -> None:
    ref = machines.publish(1)
    for index, joined in enumerate((False, True, False)):
        brought(machines.mirror(str(index), index, joined), ref)
    assert machines.root.sent_bytes == 2 * (Path(ref.path) / disk.PAYLOAD).stat().st_size


def test_machines_may_share_the_run_directory(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own lock, and its own files in its own shared memory."""
    ref = machines.publish(1)
    here = brought(machines.mirror("2", 0), ref)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
    assert Path(brought(machines.mirror("2", 1), ref).path).parent != Path(here.path).parent


def test_deltas_come_with_what_they_build_upon(machines: Machines, tmp_path: Path) -> None:
    writer = VersionWriter(machines.published, 4096, full_every=4)
    tensors = {"a": torch.zeros(5000)}
    for step in range(3):
        tensors["a"][step] += 1
        ref = writer.write_version(snapshot_of(tensors, PolicyVersion(1, step)))
    machines.newest = ref
    mirror = machines.mirror("2")
    local = brought(mirror, ref)
    assert (Path(local.path) / disk.DELTA).exists()
    assert len(disk.published_versions(Path(local.path).parent)) == 3
    mirror._timeline.close()
    spans = [json.loads(line) for line in (tmp_path / "2" / "timeline-0.jsonl").read_text().splitlines()]
    assert len(spans) == 3
    assert all(one["end"] <= other["start"] for one, other in pairwise(spans)), "its rate is of its own bytes"


def test_an_older_delta_comes_whole_beside_newer_versions(machines: Machines) -> None:
    """As a validation of an earlier version needs it."""
    writer = VersionWriter(machines.published, 4096, full_every=3)
    tensors = {"a": torch.zeros(5000)}
    refs = []
    for step in range(9):
        tensors["a"][step] += 1
        refs.append(writer.write_version(snapshot_of(tensors, PolicyVersion(1, step))))
    machines.newest, mirror = refs[-1], machines.mirror("2")
    for ref in (*refs[6:], refs[2]):
        brought(mirror, ref)


def test_closing_ends_a_fetch_that_gets_no_answer(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 60.0)
    ref = machines.publish(1)
    mirror = machines.mirror("2")
    begun = threading.Event()
    machines.root.close()
    answer = mirror._await_answer
    monkeypatch.setattr(mirror, "_await_answer", lambda link: (begun.set(), answer(link))[1])

    async def close_meanwhile() -> None:
        fetching = asyncio.create_task(asyncio.to_thread(brought, mirror, ref))
        await asyncio.to_thread(begun.wait, 20)
        mirror.close()
        with pytest.raises(Unreachable):
            await asyncio.wait_for(fetching, 20)

    asyncio.run(close_meanwhile())


def test_closing_ends_a_fetch_that_goes_on(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    # 32 pieces
    ref = machines.publish(1, numbers=8 << 20)
    mirror = machines.mirror("2")
    piece = module._received_piece
    monkeypatch.setattr(
        module, "_received_piece", lambda *answer: (piece(*answer), mirror._closing_event.set())[0]
    )
    with pytest.raises(Unreachable, match="this process is shutting down"):
        brought(mirror, ref)


def test_a_source_that_only_waits_is_left(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BARREN_SECONDS", 0.2)
    monkeypatch.setattr(version_server, "PENDING_SECONDS", 0.05)
    ref = machines.publish(1)
    gate = Gate(machines.endpoints, owner="rollout")
    with (
        closing(gate),
        closing(
            VersionServer(gate, "tcp://127.0.0.1:*", lambda: None, {ref.version: ArrivingVersion()})
        ) as waiting,
    ):
        machines.root._open_answer(OpenVersion(ref.version, waiting.address, waiting.key))
        brought(machines.mirror("2"), ref)


def test_a_process_waits_while_another_of_its_machine_tries_the_next_source(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BARREN_SECONDS", 1.5)
    monkeypatch.setattr(module, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(version_server, "PENDING_SECONDS", 0.05)
    ref = machines.publish(1)
    gate = Gate(machines.endpoints, owner="rollout")
    first, beside = (machines.mirror("2", index) for index in range(2))
    with (
        closing(gate),
        closing(
            VersionServer(gate, "tcp://127.0.0.1:*", lambda: None, {ref.version: ArrivingVersion()})
        ) as waiting,
        ThreadPoolExecutor() as threads,
    ):
        machines.root._open_answer(OpenVersion(ref.version, waiting.address, waiting.key))
        pending_copies = [threads.submit(brought, mirror, ref) for mirror in (first, beside)]
        assert pending_copies[0].result(30) == pending_copies[1].result(30)


@pytest.mark.parametrize(("address", "key"), [("nonsense", "x" * 40), ("tcp://127.0.0.1:1", "short")])
def test_a_source_that_cannot_be_dialled_is_left(machines: Machines, address: str, key: str) -> None:
    ref = machines.publish(1)
    machines.root._open_answer(OpenVersion(ref.version, address, key))
    brought(machines.mirror("2"), ref)


def test_who_gets_nothing_from_its_source_reads_from_the_trainers_machine(machines: Machines) -> None:
    ref = machines.publish(1)
    dead = choose_endpoints("127.0.0.1", 0)
    claimed = OpenVersion(ref.version, dead.control, machines.endpoints.keys["rollout"].public)
    assert machines.root._open_answer(claimed).address == machines.root.address
    begin = time.monotonic()
    brought(machines.mirror("2"), ref)  # is told to read from the one that has died
    assert 2.0 < time.monotonic() - begin < 10.0


def test_a_killed_fetch_is_done_again_by_another_process_of_the_machine(machines: Machines) -> None:
    ref = machines.publish(1, numbers=32 << 20)  # 128 MB
    mirror = machines.mirror("2")
    hidden = msgspec.structs.replace(ref, path="/nowhere/at/all")
    process = subprocess.Popen([sys.executable, "-c", FETCHER], stdin=subprocess.PIPE)
    assert process.stdin is not None
    given = (config(mirror._run_dir.parent), machines.endpoints, hidden)
    process.stdin.write(msgspec.msgpack.encode(given))
    process.stdin.close()
    end = time.monotonic() + 60
    while not machines.root.sent_bytes:
        with suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it ended with {process.wait(0.002)}")
        assert time.monotonic() < end
    process.kill()
    process.wait()
    assert machines.root.sent_bytes < (Path(ref.path) / disk.PAYLOAD).stat().st_size, "killed in mid-transfer"
    local = brought(mirror, ref)
    assert [path.name for path in Path(local.path).parent.iterdir()] == [Path(local.path).name]


def test_a_version_that_is_gone_is_no_fault_when_there_is_a_newer_one(machines: Machines) -> None:
    old = machines.publish(1)
    mirror = machines.mirror("2")
    machines.publish(2)
    disk.delete_version(old)
    with pytest.raises(Superseded, match="e1-v1 no longer exists"):
        brought(mirror, old)
    missing = disk.ref_to(machines.published, PolicyVersion(1, 9))
    with pytest.raises(WeightsError, match="e1-v9 no longer exists") as caught:
        brought(mirror, missing)
    assert not isinstance(caught.value, Unreachable)


def test_what_is_damaged_is_brought_anew(machines: Machines) -> None:
    """What a delta builds upon, too."""
    writer = VersionWriter(machines.published, 4096, full_every=2)
    mirror = machines.mirror("2")
    for step in range(2):
        ref = writer.write_version(
            snapshot_of({"a": torch.full((5000,), float(step))}, PolicyVersion(1, step))
        )
        machines.newest = ref
        local = brought(mirror, ref)
        whole = Path(local.path).parent / Path(disk.ref_to(Path(), PolicyVersion(1, 0)).path) / disk.PAYLOAD
        whole.write_bytes(whole.read_bytes()[:-1] + b"?")
        with pytest.raises(WeightsError, match="does not match"):
            brought(mirror, ref)
        brought(mirror, ref)


def test_what_an_engine_fails_to_load_stays_if_it_is_sound(machines: Machines) -> None:
    """Other engines of the machine are loading it."""
    ref = machines.publish(1)
    mirror = machines.mirror("2")

    async def load() -> None:
        async with mirror.local_copy(ref):
            raise WeightsError("the server took too long")

    with pytest.raises(WeightsError, match="too long"):
        asyncio.run(load())
    sent = machines.root.sent_bytes
    brought(mirror, ref)
    assert machines.root.sent_bytes == sent


def test_no_answer_is_an_error_in_time(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.2)
    ref = machines.publish(1)
    mirror = machines.mirror("2")
    machines.root.close()
    with pytest.raises(Unreachable, match=r"e1-v1 cannot be fetched: .*no answer for 0\.2 s"):
        brought(mirror, ref)


def test_a_dead_source_is_given_up_by_name(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no version that a newer one has replaced, which would be asked for again for ever."""
    monkeypatch.setattr(module, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.05)
    ref = machines.publish(1)
    mirror = machines.mirror("2")
    failures = LoadFailures()

    async def engine() -> Any:
        raise AssertionError("there is nothing to load")

    async def load() -> Loaded:
        loads.offer_version(ref)
        return await loads.load_next()

    loads = WeightLoader("train", mirror._timeline, 60.0, engine, mirror)
    machines.root.close()
    for count in range(LOAD_TRIES):
        assert not failures.give_up_reason(0.0), count
        answer = asyncio.run(load())
        assert answer.lost and not answer.postponed
        failures.add_answer(answer)
    assert not failures.give_up_reason(60.0), "a coordinator that is replaced is away for a while, too"
    assert re.fullmatch(
        r"3 loads in a row failed.* e1-v1 cannot be fetched: .*no answer for .*", failures.give_up_reason(0.0)
    )


def test_a_server_that_dies_ends_its_process_by_name(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = queue.Queue[int]()
    monkeypatch.setattr("asyncrl.errors._exit", ended.put)
    monkeypatch.setattr(module, "STALL_SECONDS", 0.5)
    machines.root._chains = None  # type: ignore[assignment]
    with pytest.raises(Unreachable):
        brought(machines.mirror("2"), machines.publish(1))
    assert ended.get(timeout=30) == 1
    assert "thread 'versions' failed; exiting: AttributeError" in caplog.text


def test_a_version_that_is_being_read_is_not_pruned(machines: Machines) -> None:
    ref = machines.publish(1)
    machines.root._open_answer(OpenVersion(ref.version, "", ""))
    for step in range(2, 8):
        machines.publish(step)
    disk.prune(machines.published)
    assert Path(ref.path).exists()
    brought(machines.mirror("2"), ref)
