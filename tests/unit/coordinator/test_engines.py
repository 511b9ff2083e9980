"""Servers with keepers, as the coordinator sees them: who is updated when, and who may be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import parse
from asyncrl.coordinator.engines import TABLES_PER_SECOND, EngineHandler
from asyncrl.coordinator.state import RunState
from asyncrl.coordinator.versions import MOST_PROBED, VersionLedger
from asyncrl.coordinator.workers import FreeSlots
from asyncrl.store.runstore import RunStore
from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.weights.manifest import Probe, WeightsRef
from asyncrl.wire.messages.engine import KeeperBeat, KeeperHello
from asyncrl.wire.messages.shared import Loaded, LoadWeights
from asyncrl.wire.messages.trainer import Probed
from asyncrl.wire.messages.worker import EngineEntry, Engines, EngineUse
from tests.fakes.mail import Sent
from tests.unit.buffer.machine import make

A, B = b"engine/0/a", b"engine/1/b"
WORKER = b"rollout/0/w"
HEALTHY = KeeperBeat(healthy=True, starting=False)


class EngineSetup:
    """Two keepers whose servers are up; times are passed in."""

    def __init__(self, run_dir: Path, **weights: object) -> None:
        config = parse(
            {
                "name": "t",
                "model": {"path": "m"},
                "data": {"train": "d"},
                "engine": {"name": "sglang", "servers": 2},
                "launch": {"lease": 10.0},
                "weights": weights,
            }
        )
        buffer, batches = make(rows=1)
        self.sent = Sent()
        self.state = RunState(
            config,
            run_dir,
            [],
            buffer,
            batches,
            VersionLedger(),
            RunStore(run_dir),
            self.sent,  # type: ignore[arg-type]
            coordinator_epoch=1,
        )
        self.handler = EngineHandler(self.state, 0.0)
        for index, peer in enumerate((A, B)):
            self.join(peer, index)

    def join(self, peer: bytes, index: int, url: str = "http://host") -> None:
        self.handler.hello(peer, KeeperHello(index, peer.decode()[-1], url, pid=1, engine="sglang 0"), 0.0)
        self.beat(peer, 0.0)

    def beat(self, peer: bytes, now: float, beat: KeeperBeat = HEALTHY) -> None:
        self.handler.keepers.heard(peer, now)
        self.handler.beat(peer, beat, now)

    def publish(self, version: int) -> WeightsRef:
        ref = WeightsRef(PolicyVersion(1, version), f"v{version}")
        assert self.state.versions.publish(ref)
        return ref

    def pushed(self, now: float = 0.0) -> dict[bytes, int]:
        """Versions sent at a tick, by keeper."""
        self.handler.tick(now)
        return {peer: message.ref.version.step for peer, message in self.sent.take(LoadWeights)}

    def ack(self, peer: bytes, ref: WeightsRef, checksum: str = "sum", error: str = "", **more: Any) -> None:
        self.handler.loaded(peer, Loaded(ref, "train", checksum, 0.1, error, **more), 0.0)

    def serve(self, version: int) -> WeightsRef:
        """Both servers load a version."""
        ref = self.publish(version)
        while pushed := self.pushed():
            for peer in pushed:
                self.ack(peer, ref)
        return ref

    def version(self, needed: int) -> int | None:
        """That an episode which needs one starts on."""
        found = FreeSlots([(WORKER, 1, self.handler.steps()(WORKER))]).take(needed)
        return found[1] if found else None

    def table(self) -> list[tuple[int, bool, str]]:
        return [(entry.version.step, entry.healthy, entry.lane) for entry in self.handler.table()]


@pytest.fixture
def setup(tmp_path: Path) -> EngineSetup:
    return EngineSetup(tmp_path)


def test_a_server_gets_no_work_before_it_holds_a_published_version(setup: EngineSetup) -> None:
    assert setup.table() == [(0, False, "train")] * 2 and not setup.handler.ready
    assert setup.version(0) is None
    first = setup.publish(0)
    assert setup.pushed() == {A: 0, B: 0}  # neither serves: neither has to wait for the other
    setup.ack(A, first)
    assert setup.table() == [(0, True, "train"), (0, False, "train")] and setup.handler.ready
    assert setup.version(0) == 0


def test_a_server_that_was_started_samples_only_after_the_probe(setup: EngineSetup) -> None:
    """Each server is compared with the trainer before its first token; the version that it loaded first came
    without a probe. A newer one without is not loaded meanwhile; the others load it."""
    versions, probe = setup.state.versions, Probe((1, 2), (-1.0,))
    first = setup.publish(0)
    assert setup.pushed() == {A: 0, B: 0} and not versions.lacks_probe(first.version)
    setup.ack(A, first)
    setup.ack(B, first, unproven=True)
    assert [healthy for _, healthy, _ in setup.table()] == [True, False]
    assert versions.lacks_probe(first.version) and setup.pushed() == {}
    second = setup.publish(1)
    assert setup.pushed(1.0) == {A: 1}
    setup.ack(A, second)
    versions.take_probe(Probed(first.version, probe), 2.0)
    assert setup.pushed(2.0) == {} and versions.lacks_probe(second.version)
    versions.take_probe(Probed(second.version, probe), 3.0)
    setup.handler.tick(3.0)  # the one that samples compares, too, and goes on
    order = LoadWeights(second, "train", probe)
    assert sorted(setup.sent.take(LoadWeights)) == [(A, order), (B, order)]
    assert [healthy for _, healthy, _ in setup.table()] == [True, False]
    setup.ack(B, second)
    assert [healthy for _, healthy, _ in setup.table()] == [True, True]
    assert [step for step in (1, 2, 50, 51) if versions.lacks_probe(PolicyVersion(1, step))] == [51]


def test_a_server_is_compared_where_writing_takes_longer_than_a_step(setup: EngineSetup) -> None:
    """When a version can be loaded, the trainer has scored the probe with newer ones already."""
    versions = setup.state.versions
    first = setup.publish(0)
    assert setup.pushed() == {A: 0, B: 0}
    setup.ack(A, first)
    setup.ack(B, first, unproven=True)
    for step in range(1, 6):
        if versions.lacks_probe(PolicyVersion(1, step)):
            versions.take_probe(Probed(PolicyVersion(1, step), Probe((step,), (-1.0,))), 1.0)
        if step > 2:
            setup.publish(step - 2)
        setup.handler.tick(1.0)
        for peer, order in setup.sent.take(LoadWeights):
            if peer == B:
                assert order.probe == Probe((order.ref.version.step,), (-1.0,))
            setup.ack(peer, order.ref)
    assert versions.engines[B].acked.step > 0 and len(versions.probed) <= 3


def test_probes_of_versions_that_are_never_written_do_not_pile_up(setup: EngineSetup) -> None:
    versions = setup.state.versions
    for step in range(1000):
        versions.take_probe(Probed(PolicyVersion(1, step), Probe((1,), (-1.0,))), 1.0)
    assert len(versions.probed) == MOST_PROBED and versions.probed[-1].version.step == 999


def test_servers_that_serve_are_updated_one_after_another(setup: EngineSetup) -> None:
    setup.serve(0)
    ref = setup.publish(1)
    (first,) = setup.pushed(1.0)
    assert setup.pushed(2.0) == {}  # the other one generates meanwhile
    assert setup.version(0) == 0
    setup.ack(first, ref)
    assert setup.version(0) == 0  # new episodes may start on the slower server
    (second,) = setup.pushed(3.0)
    assert {first, second} == {A, B}
    setup.ack(second, ref)
    assert setup.version(0) == 1


def test_versions_that_come_faster_than_pushes_reach_both_servers_in_turn(setup: EngineSetup) -> None:
    setup.serve(0)
    order = []
    for version in range(1, 9):
        ref = setup.publish(version)
        (peer,) = setup.pushed(float(version))
        setup.ack(peer, ref)
        order.append(peer)
    assert order == [order[0], order[1]] * 4 and order[0] != order[1]


def test_without_rolling_all_are_updated_at_once(tmp_path: Path) -> None:
    setup = EngineSetup(tmp_path, rolling=False)
    setup.serve(0)
    setup.publish(1)
    assert setup.pushed(1.0) == {A: 1, B: 1}


def test_a_server_that_does_not_confirm_holds_the_others_up_for_one_deadline(setup: EngineSetup) -> None:
    setup.serve(0)
    setup.publish(1)
    (slow,) = setup.pushed(1.0)
    deadline = setup.state.config.weights.deadline
    for now in (20.0, 40.0, deadline):  # it is alive, and silent about the version
        setup.beat(slow, now)
        other = B if slow == A else A
        setup.beat(other, now)
        assert setup.pushed(now) == {}
    setup.beat(A, deadline + 2)
    setup.beat(B, deadline + 2)
    setup.pushed(deadline + 2)  # overdue: noticed at this tick
    assert setup.pushed(deadline + 2.1) == {other: 1}


def test_a_version_that_cannot_be_loaded_is_sent_again_later(setup: EngineSetup) -> None:
    ref = setup.publish(0)
    setup.pushed()
    setup.ack(A, ref, error="no such file")
    assert A not in setup.pushed(0.5) and A in setup.pushed(1.1)


def test_a_server_with_other_weights_is_not_used(setup: EngineSetup) -> None:
    ref = setup.publish(0)
    setup.pushed()
    setup.ack(A, ref, "right")
    setup.ack(B, ref, "wrong")
    assert [entry[1] for entry in setup.table()] == [True, False]
    assert setup.pushed(1.0) == {B: 0}
    setup.ack(B, ref, "right")
    assert [entry[1] for entry in setup.table()] == [True, True]


def test_a_silent_keeper_is_lost_and_its_successor_starts_without_versions(setup: EngineSetup) -> None:
    setup.serve(3)
    setup.beat(B, 9.0)
    setup.handler.tick(10.1)
    assert [one.peer for one in setup.handler.keepers] == [B]
    setup.join(b"engine/0/c", 0, url="")
    assert setup.table() == [(3, True, "train"), (0, False, "train")]
    assert setup.pushed(0.0) == {}  # its server is not up yet
    setup.join(b"engine/0/c", 0)
    assert setup.pushed(0.1) == {b"engine/0/c": 3}


class Tables:
    """What workers know of the servers."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup, self.now = setup, 0.0
        self.known: dict[bytes, dict[str, EngineEntry]] = {}

    def send(self, *workers: bytes, after: float = 10.0, lost: bytes = b"") -> int:
        """Entries that left; the messages to one worker may be lost."""
        self.now += after
        self.setup.handler.send_table(workers, self.now)
        mail = self.setup.sent.take(Engines)
        self.setup.sent.unreachable = {peer for peer, _ in mail if peer == lost}
        for peer, message in mail:
            if peer != lost:
                self.known[peer] = message.update(self.known.get(peer, {}))
        return sum(len(message.entries) for _, message in mail)

    def know(self, *workers: bytes) -> bool:
        table = sorted(self.setup.handler.table(), key=lambda entry: entry.name)
        return all(sorted(self.known[peer].values(), key=lambda e: e.name) == table for peer in workers)


def test_workers_get_what_changes_of_the_table_and_all_of_it_after_a_hello(setup: EngineSetup) -> None:
    other, tables = b"rollout/1/x", Tables(setup)
    assert tables.send(WORKER) == 2 and tables.know(WORKER)
    assert tables.send(WORKER) == 0
    ref = setup.serve(0)
    assert tables.send(WORKER, other) == 4 and tables.know(WORKER, other)
    setup.beat(A, 0.0, KeeperBeat(healthy=False, starting=False))
    assert tables.send(WORKER, other) == 2 and tables.know(WORKER, other)
    setup.handler.worker_here(WORKER, NO_VERSION, 0.0)
    assert tables.send(WORKER, other) == 2 and tables.know(WORKER, other)
    setup.beat(A, 0.0)
    assert tables.send(WORKER, other, lost=other) == 2 and not tables.know(other)
    assert tables.send(WORKER, other) == 2 and tables.know(WORKER, other)
    assert setup.handler.pin(ref.version, False)
    setup.handler.keepers.lose(B, "gone", 0.0)
    tables.setup.handler._began = -100.0  # its keeper is not waited for
    tables.send(WORKER, other)
    assert tables.know(WORKER, other) and len(tables.known[WORKER]) == 1


def test_changes_of_the_table_that_come_fast_go_out_together(setup: EngineSetup) -> None:
    workers = [f"rollout/{number}/w".encode() for number in range(512)]
    tables, pause = Tables(setup), 512 / TABLES_PER_SECOND
    tables.send(*workers)
    setup.serve(0)
    assert tables.send(*workers) == 2 * 512
    setup.beat(A, 0.0, KeeperBeat(healthy=False, starting=False))
    assert tables.send(*workers, after=0.5 * pause) == 0
    setup.beat(A, 0.0)
    ref = setup.serve(1)
    assert tables.send(*workers, after=0.6 * pause) == 2 * 512 and tables.know(*workers)
    setup.ack(A, setup.publish(2))
    assert tables.send(*workers, after=0.0) == 0
    assert setup.handler.pin(ref.version, False)  # its episodes follow at once
    assert tables.send(*workers, after=0.0) > 0 and tables.know(*workers)


def test_what_workers_had_from_each_server_is_counted(setup: EngineSetup) -> None:
    setup.serve(2)
    first = [EngineUse("engine 0", requests=2, prompt_tokens=60, cached_tokens=15)]
    more = EngineUse("engine 0", 4, prompt_tokens=70, cached_tokens=25, retracted=3)
    later = [more, EngineUse("engine 7", requests=9)]
    setup.handler.add_use([], first)
    setup.handler.add_use(first, later)
    setup.handler.add_use(later, later)
    setup.handler.add_use([], [EngineUse("engine 0", requests=1, prompt_tokens=30, cached_tokens=25)])
    gauges = setup.handler.gauges()
    assert gauges["engine/0/requests"] == 5 and gauges["engine/0/cache_hit"] == 0.5
    assert gauges["engine/0/retracted"] == 3 == setup.state.live_limit.kv.retracted
    assert gauges["rollout/prefix_cache_hit"] == 0.5
    assert gauges["engine/1/requests"] == 0 and gauges["engine/1/version"] == 2
    assert gauges["async/engines"] == 2 and not any("engine/7" in name for name in gauges)


def test_the_memory_of_the_fullest_server_is_what_counts(setup: EngineSetup) -> None:
    setup.serve(2)
    for peer, use in ((A, 0.9), (B, 0.7), (A, 0.3), (B, None)):
        setup.beat(peer, 1.0, msgspec.structs.replace(HEALTHY, kv_use=use))
    gauges = setup.handler.gauges()
    assert (gauges["engine/0/kv_use"], gauges["engine/1/kv_use"]) == (0.3, 0.7)
    assert setup.state.live_limit.kv.use == 0.7


def test_validation_pins_one_server_of_two(setup: EngineSetup) -> None:
    ref = setup.serve(4)
    assert setup.handler.pin(ref.version, False)
    assert sorted(lane for _, _, lane in setup.table()) == ["eval", "train"]
    newer = setup.publish(5)
    (peer,) = setup.pushed(1.0)
    setup.ack(peer, newer)
    assert sorted(setup.table()) == [(4, True, "eval"), (5, True, "train")]
    assert setup.pushed(2.0) == {}
    assert setup.version(1) == 5  # training does not wait for the leased one
    setup.handler.release()
    assert list(setup.pushed(3.0).values()) == [5]


def test_when_training_is_over_validation_has_all_servers(setup: EngineSetup) -> None:
    setup.serve(4)
    ref = setup.publish(5)
    (peer,) = setup.pushed(1.0)
    setup.ack(peer, ref)
    assert setup.handler.pin(ref.version, True)
    assert sorted(setup.table()) == [(4, True, "train"), (5, True, "eval")]
    (late,) = setup.pushed(2.0)
    setup.ack(late, ref)
    assert setup.handler.pin(ref.version, True)
    assert setup.table() == [(5, True, "eval")] * 2
    setup.handler.release()
    assert setup.table() == [(5, True, "train")] * 2


def test_validation_waits_for_its_version(setup: EngineSetup) -> None:
    setup.serve(4)
    ref = setup.publish(5)
    assert not setup.handler.pin(ref.version, False)
    (peer,) = setup.pushed(1.0)
    setup.ack(peer, ref)
    assert setup.handler.pin(ref.version, False)


def test_a_single_server_is_not_pinned(setup: EngineSetup) -> None:
    ref = setup.serve(4)
    setup.beat(A, 9.0)
    setup.handler.tick(10.1)  # B is lost
    assert setup.handler.pin(ref.version, False)
    assert {lane for _, _, lane in setup.table()} == {"train"}


def test_one_of_two_that_is_away_for_a_moment_does_not_leave_validation_unpinned(setup: EngineSetup) -> None:
    ref = setup.serve(4)
    setup.beat(B, 0.0, KeeperBeat(healthy=False, starting=False))
    assert setup.handler.pin(ref.version, False)
    assert setup.table() == [(4, True, "eval"), (4, False, "train")]


def test_a_server_that_is_being_loaded_is_not_set_aside(setup: EngineSetup) -> None:
    old = setup.serve(4)
    setup.publish(5)
    (loading,) = setup.pushed(1.0)
    assert setup.handler.pin(old.version, False)
    (set_aside,) = [peer for peer in (A, B) if setup.state.versions.engines[peer].pinned]
    assert set_aside != loading


def test_a_server_that_reloads_after_a_failure_still_holds_the_others_off(setup: EngineSetup) -> None:
    """Unhealthy is not idle: one paused server at a time."""
    setup.serve(0)
    setup.publish(1)
    (first,) = setup.pushed(1.0)
    setup.beat(first, 1.5, KeeperBeat(healthy=False, starting=False))
    assert setup.pushed(2.0) == {}


def test_a_hello_out_of_silence_does_not_push_again(setup: EngineSetup) -> None:
    setup.serve(0)
    setup.join(A, 0)
    assert setup.pushed(1.0) == {}


def test_a_server_that_cannot_keep_up_does_not_hold_up_new_episodes(setup: EngineSetup) -> None:
    setup.serve(0)
    ref = setup.publish(5)
    (first,) = setup.pushed(1.0)
    setup.ack(first, ref)
    assert setup.version(2) == 5


def test_a_restarted_coordinator_waits_for_the_keepers_before_it_tells_of_them(setup: EngineSetup) -> None:
    setup.handler.keepers.lose(B, "gone", 0.0)
    setup.join(b"engine/2/c", 2)  # which has joined the run: B is still to come
    setup.handler.send_table([WORKER], 1.0)
    assert setup.sent.take(Engines) == []
    setup.handler.send_table([WORKER], 10.1)  # the lease is over: B is gone
    assert len(setup.sent.take(Engines)) == 1


def test_a_server_of_validation_that_dies_is_replaced_by_another(setup: EngineSetup) -> None:
    ref = setup.serve(4)
    assert setup.handler.pin(ref.version, False)
    leased = next(peer for peer in (A, B) if setup.state.versions.engines[peer].pinned)
    other = B if leased == A else A
    setup.beat(other, 9.0)
    setup.handler.tick(10.1)
    assert [one.peer for one in setup.handler.keepers] == [other]
    assert setup.handler.pin(ref.version, False)  # the only one left: shared with training
    assert setup.table() == [(4, True, "train")]
