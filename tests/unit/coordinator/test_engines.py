"""Servers with keepers, as the coordinator sees them: who is updated when, and who may be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import parse
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.state import RunState
from asyncrl.coordinator.versions import VersionLedger
from asyncrl.store.runstore import RunStore
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import WeightsRef
from asyncrl.wire.messages.keeper import KeeperBeat, KeeperHello
from asyncrl.wire.messages.shared import Loaded, LoadWeights
from asyncrl.wire.messages.worker_control import EngineEntry, Engines, EngineUse
from tests.fakes.mail import Sent
from tests.unit.buffer.machine import make

A, B = b"engine/0/a", b"engine/1/b"
WORKER = b"rollout/0/w"
HEALTHY = KeeperBeat(healthy=True, starting=False)


class Desk:
    """Two keepers whose servers are up; times are passed in."""

    def __init__(self, run_dir: Path, **weights: object) -> None:
        config = parse(
            {
                "name": "t",
                "model": {"path": "m"},
                "data": {"train": "d"},
                "engine": {"name": "sglang", "servers": 2},
                "weights": weights,
            }
        )
        buffer, batches = make(rows=1)
        self.sent = Sent()
        self.core = RunState(
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
        self.desk = EngineHandler(self.core, 0.0)
        for index, peer in enumerate((A, B)):
            self.join(peer, index)

    def join(self, peer: bytes, index: int, url: str = "http://host") -> None:
        self.desk.hello(peer, KeeperHello(index, peer.decode()[-1], url, pid=1, engine="sglang 0"), 0.0)
        self.desk.beat(peer, HEALTHY, 0.0)

    def publish(self, version: int) -> WeightsRef:
        ref = WeightsRef(PolicyVersion(1, version), f"v{version}")
        assert self.core.versions.publish(ref)
        return ref

    def pushed(self, now: float = 0.0) -> dict[bytes, int]:
        """Versions sent at a tick, by keeper."""
        self.desk.tick(now, 0.0)
        return {peer: message.ref.version.step for peer, message in self.sent.take(LoadWeights)}

    def ack(self, peer: bytes, ref: WeightsRef, checksum: str = "sum", error: str = "") -> None:
        self.desk.confirmed(peer, Loaded(ref, "train", checksum, 0.1, error), 0.0)

    def serve(self, version: int) -> WeightsRef:
        """Both servers load a version."""
        ref = self.publish(version)
        while pushed := self.pushed():
            for peer in pushed:
                self.ack(peer, ref)
        return ref

    def table(self) -> list[tuple[int, bool, str]]:
        return [(entry.version.step, entry.healthy, entry.lane) for entry in self.desk.table()]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_server_gets_no_work_before_it_holds_a_published_version(desk: Desk) -> None:
    assert desk.table() == [(0, False, "train")] * 2 and not desk.desk.ready
    assert desk.desk.version("any worker") == -1
    first = desk.publish(0)
    assert desk.pushed() == {A: 0, B: 0}  # neither serves: nobody has to wait for the other
    desk.ack(A, first)
    assert desk.table() == [(0, True, "train"), (0, False, "train")] and desk.desk.ready
    assert desk.desk.version("any worker") == 0


def test_servers_that_serve_are_updated_one_after_another(desk: Desk) -> None:
    desk.serve(0)
    ref = desk.publish(1)
    (first,) = desk.pushed(1.0)
    assert desk.pushed(2.0) == {}  # the other one generates meanwhile
    assert desk.desk.version("any worker") == 0
    desk.ack(first, ref)
    assert desk.desk.version("any worker") == 0  # new episodes may start on the slower server
    (second,) = desk.pushed(3.0)
    assert {first, second} == {A, B}
    desk.ack(second, ref)
    assert desk.desk.version("any worker") == 1


def test_versions_that_come_faster_than_pushes_reach_both_servers_in_turn(desk: Desk) -> None:
    desk.serve(0)
    order = []
    for version in range(1, 9):
        ref = desk.publish(version)
        (peer,) = desk.pushed(float(version))
        desk.ack(peer, ref)
        order.append(peer)
    assert order == [order[0], order[1]] * 4 and order[0] != order[1]


def test_without_rolling_all_are_updated_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path, rolling=False)
    desk.serve(0)
    desk.publish(1)
    assert desk.pushed(1.0) == {A: 1, B: 1}


def test_a_server_that_does_not_confirm_holds_the_others_up_for_one_deadline(desk: Desk) -> None:
    desk.serve(0)
    desk.publish(1)
    (slow,) = desk.pushed(1.0)
    deadline = desk.core.config.weights.deadline
    for now in (20.0, 40.0, deadline):  # it is alive, and silent about the version
        desk.desk.beat(slow, HEALTHY, now)
        other = B if slow == A else A
        desk.desk.beat(other, HEALTHY, now)
        assert desk.pushed(now) == {}
    desk.desk.beat(A, HEALTHY, deadline + 2)
    desk.desk.beat(B, HEALTHY, deadline + 2)
    desk.pushed(deadline + 2)  # overdue: noticed at this tick
    assert desk.pushed(deadline + 2.1) == {other: 1}


def test_a_version_that_cannot_be_loaded_is_sent_again_later(desk: Desk) -> None:
    ref = desk.publish(0)
    desk.pushed()
    desk.ack(A, ref, error="no such file")
    assert A not in desk.pushed(0.5) and A in desk.pushed(1.1)


def test_a_server_with_other_weights_is_not_used(desk: Desk) -> None:
    ref = desk.publish(0)
    desk.pushed()
    desk.ack(A, ref, "right")
    desk.ack(B, ref, "wrong")
    assert [entry[1] for entry in desk.table()] == [True, False]
    assert desk.pushed(1.0) == {B: 0}
    desk.ack(B, ref, "right")
    assert [entry[1] for entry in desk.table()] == [True, True]


def test_a_silent_keeper_is_lost_and_its_successor_starts_without_versions(desk: Desk) -> None:
    desk.serve(3)
    desk.desk.beat(B, HEALTHY, 9.0)
    desk.desk.tick(10.1, 0.0)
    assert list(desk.desk.keepers) == [B] and desk.desk.lost == 1
    desk.join(b"engine/0/c", 0, url="")
    assert desk.table() == [(3, True, "train"), (0, False, "train")]
    assert desk.pushed(0.0) == {}  # its server is not up yet
    desk.join(b"engine/0/c", 0)
    assert desk.pushed(0.1) == {b"engine/0/c": 3}


def test_a_coordinator_that_was_away_does_not_blame_the_keepers(desk: Desk) -> None:
    desk.desk.tick(60.0, gap=55.0)
    assert len(desk.desk.keepers) == 2


def test_workers_are_told_what_changed_and_all_of_it_after_a_hello(desk: Desk) -> None:
    def told() -> list[tuple[EngineEntry, ...]]:
        desk.desk.tell([WORKER], 0.0)
        return [message.entries for _, message in desk.sent.take(Engines)]

    assert told() == [desk.desk.table()]
    assert told() == []
    desk.serve(0)
    assert told() == [desk.desk.table()]
    desk.desk.forget(WORKER)
    assert told() == [desk.desk.table()]


def test_what_workers_had_from_each_server_is_counted(desk: Desk) -> None:
    desk.serve(2)
    uses = [
        EngineUse("engine 0", requests=2, prompt_tokens=60, cached_tokens=15),
        EngineUse("engine 0", requests=1, prompt_tokens=40, cached_tokens=35),
        EngineUse("engine 7", requests=9),
    ]
    gauges = desk.desk.gauges(uses)
    assert gauges["engine/0/requests"] == 3 and gauges["engine/0/cache_hit"] == 0.5
    assert gauges["engine/1/requests"] == 0 and gauges["engine/1/version"] == 2
    assert gauges["async/engines"] == 2 and not any("engine/7" in name for name in gauges)


def test_validation_pins_one_server_of_two(desk: Desk) -> None:
    ref = desk.serve(4)
    assert desk.desk.pin(ref.version)
    assert sorted(lane for _, _, lane in desk.table()) == ["eval", "train"]
    newer = desk.publish(5)
    (peer,) = desk.pushed(1.0)
    desk.ack(peer, newer)
    assert sorted(desk.table()) == [(4, True, "eval"), (5, True, "train")]
    assert desk.pushed(2.0) == {}
    assert desk.desk.version("any worker") == 5  # training does not wait for the leased one
    desk.desk.release()
    assert list(desk.pushed(3.0).values()) == [5]


def test_validation_waits_for_its_version(desk: Desk) -> None:
    desk.serve(4)
    ref = desk.publish(5)
    assert not desk.desk.pin(ref.version)
    (peer,) = desk.pushed(1.0)
    desk.ack(peer, ref)
    assert desk.desk.pin(ref.version)


def test_a_single_server_is_not_pinned(desk: Desk) -> None:
    ref = desk.serve(4)
    desk.desk.beat(A, HEALTHY, 9.0)
    desk.desk.tick(10.1, 0.0)  # B is lost
    assert desk.desk.pin(ref.version)
    assert {lane for _, _, lane in desk.table()} == {"train"}


def test_one_of_two_that_is_away_for_a_moment_does_not_leave_validation_unpinned(desk: Desk) -> None:
    ref = desk.serve(4)
    desk.desk.beat(B, KeeperBeat(healthy=False, starting=False), 0.0)
    assert desk.desk.pin(ref.version)
    assert desk.table() == [(4, True, "eval"), (4, False, "train")]


def test_a_server_that_is_being_loaded_is_not_set_aside(desk: Desk) -> None:
    old = desk.serve(4)
    desk.publish(5)
    (loading,) = desk.pushed(1.0)
    assert desk.desk.pin(old.version)
    assert desk.desk._eval_server not in (None, loading.decode())


def test_a_server_that_reloads_after_a_failure_still_holds_the_others_off(desk: Desk) -> None:
    """Unhealthy is not idle: one paused server at a time."""
    desk.serve(0)
    desk.publish(1)
    (first,) = desk.pushed(1.0)
    desk.desk.beat(first, KeeperBeat(healthy=False, starting=False), 1.5)
    assert desk.pushed(2.0) == {}


def test_a_hello_out_of_silence_does_not_push_again(desk: Desk) -> None:
    desk.serve(0)
    desk.join(A, 0)
    assert desk.pushed(1.0) == {}


def test_a_server_that_cannot_keep_up_does_not_hold_up_new_episodes(desk: Desk) -> None:
    desk.serve(0)
    desk.core.buffer.committed = 6  # with max_staleness 4, version 0 is of no use any more
    ref = desk.publish(5)
    (first,) = desk.pushed(1.0)
    desk.ack(first, ref)
    assert desk.desk.version("any worker") == 5


def test_a_restarted_coordinator_waits_for_the_keepers_before_it_tells_of_them(desk: Desk) -> None:
    del desk.desk.keepers[B]
    desk.desk.tell([WORKER], 1.0)
    assert desk.sent.take(Engines) == []
    desk.desk.tell([WORKER], 10.1)  # the lease is over: B is gone
    assert len(desk.sent.take(Engines)) == 1


def test_a_server_of_validation_that_dies_is_replaced_by_another(desk: Desk) -> None:
    ref = desk.serve(4)
    assert desk.desk.pin(ref.version)
    leased = next(peer for peer in (A, B) if desk.desk.keepers[peer].engine == desk.desk._eval_server)
    other = B if leased == A else A
    desk.desk.beat(other, HEALTHY, 9.0)
    desk.desk.tick(10.1, 0.0)
    assert list(desk.desk.keepers) == [other]
    assert desk.desk.pin(ref.version)  # the only one left: shared with training
    assert desk.table() == [(4, True, "train")]
