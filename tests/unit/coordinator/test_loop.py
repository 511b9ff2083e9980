"""Whole turns of the coordinator's loop, with its real store and sockets: what must not end a run."""

from __future__ import annotations

import json
import math
import resource
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from asyncrl import cli
from asyncrl.buffer.records import State
from asyncrl.config import parse
from asyncrl.coordinator.engines import MAX_REFUSALS
from asyncrl.coordinator.lifecycle import Phase
from asyncrl.coordinator.loop import Coordinator
from asyncrl.errors import ProtocolError
from asyncrl.observe.files import read_status, read_summary, write_status, write_summary
from asyncrl.store.runstore import RunStore
from asyncrl.store.schema import SupersededError
from asyncrl.types import DropReason, FailReason, PolicyVersion
from asyncrl.weights.manifest import WeightsRef
from asyncrl.wire.addresses import incarnation_of
from asyncrl.wire.messages.shared import (
    Loaded,
    ObserverHello,
    Replace,
    Status,
    Stop,
    Welcome,
    WireMessage,
    WrittenBytes,
)
from asyncrl.wire.messages.trainer import Commit, Committed, PlanRequest, Published, TrainerHello
from asyncrl.wire.messages.worker import WorkerHeartbeat, WorkerHello
from asyncrl.wire.sockets import choose_endpoints, encode_message, set_identity
from tests.fakes.data import give, rows
from tests.unit.buffer.machine import count_again, land, land_group, turn_payload

ROWS = rows(50)
WORKER = b"rollout/0/w"
OTHER = b"rollout/1/v"
OBSERVER = b"observer/0/x"
TRAINER = b"trainer/0/a"


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, ROWS)


class LoopSetup:
    """A coordinator, its peers, and its turns one by one."""

    def __init__(self, run_dir: Path, **keys: Any) -> None:
        base = {"name": "t", "run_dir": str(run_dir), "model": {"path": "m"}, "data": {"train": "d"}}
        sizes = {"groups_per_batch": 1, "episodes_per_group": 2, "filter_zero_variance": False}
        self.config = parse(base | {"buffer": sizes, "total_steps": 3} | keys)
        self.run_dir = run_dir / "t"
        self.context = zmq.Context()
        self.peers: dict[bytes, zmq.Socket] = {}
        self.start()

    def start(self) -> None:
        """A coordinator, or the next one after it was closed."""
        self.endpoints = choose_endpoints("127.0.0.1", 0)
        self.coordinator = Coordinator(self.config, self.endpoints, "launch")

    def send(self, peer: bytes, *parts: bytes) -> None:
        """To the control socket; waits until it is there."""
        if peer not in self.peers:
            socket = self.peers[peer] = self.context.socket(zmq.DEALER)
            set_identity(socket, peer, self.endpoints.keys)
            socket.connect(self.endpoints.control)
        self.peers[peer].send_multipart(parts)
        assert self.coordinator.control.socket.poll(10_000), "nothing came"

    def say(self, peer: bytes, *messages: WireMessage) -> None:
        for message in messages:
            self.send(peer, *encode_message(message, []))
            self.turn()

    def turn(self, later: float = 0.05) -> None:
        self.coordinator.run_pass(self.coordinator._last_pass_at + later)

    def join(self, start: int = 2, index: int = 0, slots: int = 8) -> Any:
        """A worker says hello, the WORKER unless given otherwise; its record, once it is known."""
        peer = WORKER if not index else OTHER
        self.say(peer, WorkerHello(index, incarnation_of("launch", start), slots, pid=1))
        return self.coordinator.workers.peers.get(peer)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """What this turn has put cannot be written: another process has the store locked."""
        self.coordinator.state.journal.store.put_meta("something", "to write")
        with closing(sqlite3.connect(self.run_dir / "run.db", isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            self.turn()
            yield
            connection.execute("ROLLBACK")

    def received(self, peer: bytes, kind: type) -> int:
        """How many messages of a kind have come to a peer; waits a moment for the first."""
        socket = self.peers[peer]
        count = 0
        while socket.poll(500 if not count else 0):
            tag = msgspec.msgpack.decode(socket.recv_multipart()[0])["type"]
            count += tag == kind.__name__
        return count

    def close(self) -> None:
        self.coordinator.close()
        self.context.destroy(linger=0)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[LoopSetup]:
    loop_setup = LoopSetup(tmp_path)
    yield loop_setup
    loop_setup.close()


def test_what_a_stranger_sends_does_not_end_the_run(setup: LoopSetup) -> None:
    for peer, parts in (
        (b"rollout/8/x", b"GET / HTTP/1.1"),
        (b"observer/\xff\xfe", encode_message(ObserverHello(), [])[0]),
    ):
        setup.send(peer, parts)
        setup.turn()
    assert setup.coordinator.lifecycle.phase is Phase.STARTING and not setup.coordinator.lifecycle.error
    assert setup.coordinator.reporter.gauges()["wire/refused"] == 2


def test_only_a_launcher_that_said_hello_can_stop_the_run(setup: LoopSetup) -> None:
    setup.say(OBSERVER, Stop("a stranger's"))
    assert setup.coordinator.lifecycle.phase is Phase.STARTING
    setup.say(OBSERVER, ObserverHello(), Stop("interrupted"))
    assert setup.coordinator.lifecycle.phase in (Phase.STOPPING, Phase.CLOSED)


def test_nothing_is_taken_in_while_the_store_is_locked(setup: LoopSetup) -> None:
    coordinator = setup.coordinator
    setup.say(OBSERVER, ObserverHello())
    setup.join(1, index=1)
    for peer in (OBSERVER, OTHER):
        assert setup.received(peer, Welcome) == 1
    issued = coordinator.state.ledger.buffer.next_group
    with setup.locked():
        assert setup.join() is None
        setup.turn()
        assert "locked" in coordinator.state.fleet.waits[0] and setup.received(OBSERVER, Status) > 0
        assert setup.received(OTHER, Welcome) > 0  # who is known is kept in contact
        assert coordinator.workers.peers.get(WORKER) is None
    setup.turn(60.0)  # a long pause
    assert setup.received(WORKER, Welcome) == 1
    assert len(coordinator.workers.peers) == 2 and not coordinator.lifecycle.error, "leases are extended"
    assert coordinator.state.journal.store.reader.meta("something") == "to write"
    assert coordinator.state.ledger.buffer.next_group >= issued


def test_of_beats_in_a_pause_the_newest_of_each_peer_is_kept(setup: LoopSetup) -> None:
    """Hundreds of peers send them for minutes. What is no beat waits in its order, a repeat once."""
    coordinator = setup.coordinator
    setup.join()
    coordinator.state.journal.store._db.execute("PRAGMA busy_timeout=0")
    with setup.locked():
        for tokens in range(20):
            setup.say(WORKER, WorkerHeartbeat(0, (), 0.0, 0.0, tokens))
            setup.join(1, index=1)
        assert len(coordinator._unread_messages) == 2
    setup.turn()
    beat = coordinator.workers.peers.get(WORKER).heartbeat
    assert beat is not None and beat.tokens == 19 and len(coordinator.workers.peers) == 2


def test_a_stop_is_heard_while_the_store_is_locked(setup: LoopSetup) -> None:
    """Its deadline counts from then on, as the launcher's does."""
    setup.say(OBSERVER, ObserverHello())
    with setup.locked():
        setup.say(OBSERVER, Stop("interrupted"))
        assert setup.coordinator.lifecycle.phase is Phase.STOPPING and not setup.coordinator.is_over
    setup.turn()
    assert setup.coordinator.lifecycle.outcome == "stopped" and setup.coordinator.is_over


def test_a_store_that_stays_locked_ends_the_run_with_the_reason(setup: LoopSetup) -> None:
    setup.turn()
    with setup.locked():
        setup.turn(setup.config.launch.stall_timeout + 1)
    assert setup.coordinator.is_over and "locked" in setup.coordinator.lifecycle.error
    assert read_summary(setup.run_dir)["outcome"] == "failed"


def test_what_takes_long_leaves_the_next_messages_to_the_next_turn(
    setup: LoopSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.coordinator.loop.DRAIN_SECONDS", -1.0)
    for number in range(3):
        setup.send(f"observer/{number}/x".encode(), *encode_message(ObserverHello(), []))
    for turns in range(1, 4):
        assert setup.coordinator.control.socket.poll(10_000)
        setup.turn()
        assert len(setup.coordinator.observers) == turns


def test_a_peer_that_writes_without_end_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.coordinator.loop.LAST_WORDS_SECONDS", 0.02)
    setup = LoopSetup(tmp_path)
    coordinator = setup.coordinator
    begin = time.monotonic()

    def more() -> tuple[bytes, WrittenBytes, list[bytes]]:
        assert time.monotonic() < begin + 5, "it takes what comes for ever"
        return OTHER, WrittenBytes("logs/rollout-1.log", 0), [b"last words"]

    monkeypatch.setattr(coordinator.bulk, "receive", more)
    coordinator.files.append_bytes(*more()[:2], [], begin)
    coordinator._take_last_words()
    assert (setup.run_dir / "logs/rollout-1.log").read_bytes() == b"last words"
    setup.close()


def test_the_loop_does_not_wait_while_there_is_work_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of two per turn, of the six that there is room for."""
    for module in ("loop", "workers"):
        monkeypatch.setattr(f"asyncrl.coordinator.{module}.MAX_ASSIGNED", 2)
    sizes = {"groups_per_batch": 3, "episodes_per_group": 2, "target_staleness": 1}
    setup = LoopSetup(tmp_path, buffer=sizes)
    coordinator = setup.coordinator
    setup.join(slots=64)
    running = []
    more = []
    for _ in range(8):
        running.append(len(coordinator.workers.peers.get(WORKER).running))
        more.append(coordinator._work_left)
        setup.turn()
    setup.close()
    assert running == [2, 4, 6, 8, 10, 12, 12, 12]
    assert all(more[:5]) and not any(more[6:]), "it goes on at once, until nothing is left"


def test_leases_are_extended_before_messages_that_waited_are_read(setup: LoopSetup) -> None:
    worker = setup.join()
    setup.turn()
    assigned = {uid: seq for uid, (seq, _) in worker.running.items()}
    assert assigned
    setup.send(
        WORKER, *encode_message(WorkerHeartbeat(0, (), 0, 0, 0), [])
    )  # from before the assignments arrived
    setup.turn(60.0)
    assert {uid: seq for uid, (seq, _) in worker.running.items()} == assigned


def test_a_coordinator_that_was_replaced_leaves_everything_alone(setup: LoopSetup) -> None:
    setup.turn()
    with closing(RunStore(setup.run_dir)):
        setup.coordinator.state.journal.store.put_meta("a", "b")
        with pytest.raises(SupersededError):
            setup.turn()
    assert not read_summary(setup.run_dir) and not setup.coordinator.is_over


def test_a_version_of_an_earlier_launch_is_sent_to_nobody(setup: LoopSetup) -> None:
    """A power cut may have damaged its files: servers that refuse them would end the run."""
    ref = WeightsRef(PolicyVersion(1, 3), str(setup.run_dir))
    setup.coordinator.state.journal.store.put_meta("version", msgspec.json.encode(ref).decode())
    setup.turn()
    for launch, sent in (("launch", True), ("the next", False)):
        setup.coordinator.close()
        setup.coordinator = Coordinator(setup.config, choose_endpoints("127.0.0.1", 0), launch)
        assert (setup.coordinator.state.fleet.versions.ref is not None) == sent
        assert setup.coordinator.state.fleet.versions.newest == PolicyVersion(1, 3)


def test_a_version_that_no_engine_can_load_is_published_anew(setup: LoopSetup) -> None:
    """Its files are damaged: the trainer waits for what would be sampled with it, and is replaced, once."""
    coordinator = setup.coordinator
    ref = WeightsRef(PolicyVersion(1, 0), str(setup.run_dir))
    setup.say(OBSERVER, ObserverHello())
    setup.join()
    setup.say(TRAINER, TrainerHello(0, 1, incarnation_of("launch", 1), 0), Published(ref, 0.0, 0.0))
    refusal = Loaded(ref, "train", "", 0.0, error="cut off")
    setup.say(WORKER, *[refusal] * MAX_REFUSALS)
    assert setup.received(OBSERVER, Replace) == 0, "the trainer may still publish another"
    coordinator.engines.refusals.clear()
    for of_others in ({"lost": True}, {"process_failed": True}):
        setup.say(WORKER, *[msgspec.structs.replace(refusal, **of_others)] * MAX_REFUSALS)
    coordinator.trainer.note_request(TRAINER, PlanRequest(1, 1, 0))
    setup.turn(), setup.turn()
    assert setup.received(OBSERVER, Replace) == 0, (
        "nobody delivered it, or a process lacked memory: that says nothing about its files"
    )
    setup.say(WORKER, *[refusal] * MAX_REFUSALS)
    setup.turn(), setup.turn()
    assert setup.received(OBSERVER, Replace) == 1
    setup.say(WORKER, Loaded(ref, "train", "sum", 0.0))
    setup.say(WORKER, *[refusal] * MAX_REFUSALS)
    assert setup.received(OBSERVER, Replace) == 0, "it has loaded it"


def test_many_engines_that_miss_a_version_once_are_no_damage(setup: LoopSetup) -> None:
    """It was deleted while they loaded it, as there is a newer one, which they are sent next."""
    coordinator = setup.coordinator
    ref = WeightsRef(PolicyVersion(1, 0), str(setup.run_dir))
    setup.say(OBSERVER, ObserverHello())
    setup.say(TRAINER, TrainerHello(0, 1, incarnation_of("launch", 1), 0), Published(ref, 0.0, 0.0))
    coordinator.trainer.note_request(TRAINER, PlanRequest(1, 1, 0))
    for engine in (f"engine/{number}/x".encode() for number in range(MAX_REFUSALS)):
        coordinator.engines.add_engine(engine, "engine")
        coordinator.engines.confirm_load(engine, Loaded(ref, "train", "", 0.0, error="gone"), 0.0)
    setup.turn(), setup.turn()
    assert setup.received(OBSERVER, Replace) == 0


def test_an_account_that_is_not_exact_fails_the_run(
    setup: LoopSetup, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index counts three more than the buffer. Commands that print an account say by their code, too."""
    coordinator = setup.coordinator
    setup.turn()
    coordinator.state.journal.store._db.execute("INSERT INTO pruned VALUES('trained', 3)")
    coordinator.lifecycle.stop_run("enough", coordinator._last_pass_at)
    coordinator.trainer.checkpoint_written = True
    setup.turn()
    summary = read_summary(setup.run_dir)
    assert coordinator.is_over and coordinator.lifecycle.error and not summary["conserved"]  # exit code 1
    assert summary["outcome"] == "failed" and "NOT CONSERVED" in summary["error"]
    (setup.run_dir / "config.yaml").touch()
    assert cli.main(["runs", "show", str(setup.run_dir)]) == 1
    assert cli.main(["status", str(setup.run_dir)]) == 1, "by the run's end"
    write_summary(setup.run_dir, summary | {"outcome": "completed", "error": ""})
    assert cli.main(["status", str(setup.run_dir)]) == 0, "its numbers add up"
    status = read_status(setup.run_dir)
    status["gauges"]["flow/issued"] += 1
    write_status(setup.run_dir, status)
    assert cli.main(["status", str(setup.run_dir)]) == 1
    assert capsys.readouterr().out.count("✗ NOT CONSERVED") == 3


def planned(coordinator: Coordinator) -> Commit:
    """A batch that a trainer has: the commit that it will send."""
    state = coordinator.state
    group = state.ledger.buffer.admit_group(0.0)
    for uid in group.members:
        state.journal.store.put_frame(uid, 0, "generated", turn_payload())
    land_group(state.ledger.buffer, group.id, 1.0, 0.0)
    coordinator.trainer.welcome_rank(
        TRAINER, TrainerHello(0, 1, incarnation_of("launch", 1), 0), coordinator._last_pass_at
    )
    assert state.ledger.batches.next_part(1, 0, 1) and state.ledger.batches.next_part(1, 1, 1) == []
    batch = state.ledger.batches.by_step[1]
    return Commit(state.fleet.trainer_epoch, 1, batch.plan_hash, tuple(batch.uids), {}, tuple(batch.lost))


@pytest.mark.parametrize("error", [OSError(28, "no space left"), ProtocolError("broken")])
def test_an_error_in_mid_turn_undoes_the_turn(
    setup: LoopSetup, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """While a commit is handled, after it was put: then it never came, and is sent again."""
    coordinator = setup.coordinator
    commit = planned(coordinator)
    setup.turn()

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(coordinator.reporter, "step_row", broken)
    if isinstance(error, ProtocolError):
        setup.say(TRAINER, commit)
        assert coordinator.is_over and read_summary(setup.run_dir)["conserved"]
        assert read_summary(setup.run_dir)["flow"]["taken"] == 2
    else:
        with pytest.raises(OSError, match="no space"):
            setup.say(TRAINER, commit)
    assert setup.received(TRAINER, Committed) == 0
    coordinator.close()
    setup.peers.clear()
    setup.start()
    assert setup.coordinator.state.ledger.batches.committed == 0
    setup.say(TRAINER, commit)
    assert setup.coordinator.state.ledger.batches.committed == 1
    assert setup.coordinator.state.journal.store.reader.counts() == {State.TRAINED: 2}


READ_ONLY = "PRAGMA query_only=ON"
DROPPED = "DROP TABLE groups"


@pytest.mark.parametrize("fault", [READ_ONLY, DROPPED, "locked"])
def test_a_store_error_at_a_busy_moment_is_no_lost_episode(setup: LoopSetup, fault: str) -> None:
    """Episodes are trained, taken, ready, landed, running and pending, and the turn that fails has moved some
    of each. Where the store cannot be read either, nothing is said of the account."""
    coordinator = setup.coordinator
    state = coordinator.state
    buffer = coordinator.state.ledger.buffer
    commit = planned(coordinator)
    setup.turn()
    setup.say(TRAINER, commit)
    setup.join(slots=3)
    while buffer.next_group < 4:
        buffer.admit_group(0.0)
    land_group(buffer, 1, 1.0, 0.0)
    land(buffer, "2.0")
    buffer.fail_attempt(buffer.episodes["3.1"], FailReason.PROMPT_TOO_LONG, 0.0)
    assert state.ledger.batches.next_part(2, 0, 1) == ["1.0", "1.1"]
    setup.turn()
    stored = buffer.account()
    reasons = dict(buffer.reasons)
    assert reasons == {"failed/prompt_too_long": 1}
    assert stored.conserved and stored.trained == stored.taken == 2 and stored.in_flight

    def move_all() -> None:
        land(buffer, "2.1")
        buffer.fail_attempt(buffer.episodes["3.0"], FailReason.PROMPT_TOO_LONG, 0.0)
        buffer.drop_group(buffer.admit_group(0.0), DropReason.STALE)
        state.ledger.batches.commit_batch(2, ["1.0", "1.1"])

    if fault == "locked":
        with setup.locked():
            move_all()
            setup.turn(setup.config.launch.stall_timeout + 1)
    else:
        state.journal.store._db.execute(fault)
        move_all()
        setup.turn()
    assert coordinator.is_over and coordinator.lifecycle.error  # exit code 1
    assert "NOT CONSERVED" not in coordinator.lifecycle.error
    if fault == DROPPED:
        assert "no such table: groups" in coordinator.lifecycle.error and not read_summary(setup.run_dir)
        return
    count_again(buffer)
    assert buffer.account() == stored and buffer.reasons == reasons
    assert not buffer.waiting_tokens.running_weight(math.inf)
    summary = read_summary(setup.run_dir)
    assert summary["conserved"] and summary["outcome"] == "failed"
    assert summary["flow"] == msgspec.structs.asdict(stored)


def test_the_status_counts_the_steps_that_the_data_are_enough_for(setup: LoopSetup) -> None:
    state = setup.coordinator.state
    total_steps = setup.coordinator.config.total_steps
    assert setup.coordinator.reporter.write_status("running").total_steps == total_steps > 1
    state.ledger.buffer.prompts.max_draws = 1
    assert setup.coordinator.reporter.write_status("running").total_steps == 1


def test_failed_attempts_are_in_the_status_the_rows_and_the_summary(setup: LoopSetup) -> None:
    coordinator = setup.coordinator
    coordinator.state.ledger.failed_attempts.add_failure(
        FailReason.REWARD_ERROR, "KeyError: 'b' (bad.py:41)", coordinator.state.journal.store
    )
    assert coordinator.reporter.write_status("running").failed == (
        "attempts failed: 1 reward_error; latest: KeyError: 'b' (bad.py:41)"
    )
    assert coordinator.reporter.gauges()["rollout/attempts_failed/reward_error"] == 1.0
    coordinator.reporter.write_summary("completed", "")
    summary = read_summary(setup.run_dir)
    assert summary["attempts_failed"] == {"reward_error": 1}
    assert summary["newest_failure"] == "KeyError: 'b' (bad.py:41)"


@contextmanager
def limit_of_files(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: a write is cut there, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_rows_of_the_metrics(setup: LoopSetup) -> None:
    """Whole ones: whoever reads the file meanwhile, or after a run that ends so, finds no half line."""
    reporter = setup.coordinator.reporter
    path = setup.run_dir / "metrics.jsonl"
    reporter.write_row({"a": 0.0})
    written_rows = path.read_bytes()
    with limit_of_files(len(written_rows) + 5):
        for number in (1.0, 2.0):
            reporter.write_row({"a": number})
            assert path.read_bytes() == written_rows
    reporter.write_row({"a": 3.0})
    assert [json.loads(line)["a"] for line in path.read_bytes().splitlines()] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("cut", "kept"), [('{"a"', 1), ('{"a": 1.5}', 2), ("7", 1), ("\0\0", 1)])
def test_after_a_row_that_a_crash_cut_all_rows_are_whole(setup: LoopSetup, cut: str, kept: int) -> None:
    setup.coordinator.close()
    path = setup.run_dir / "metrics.jsonl"
    path.write_text('{"a": 1.0}\n' + cut)
    setup.start()
    setup.coordinator.reporter.write_row({"a": 2.0})
    rows = [json.loads(line)["a"] for line in path.read_bytes().splitlines()]
    assert rows == [*[1.0, 1.5][:kept], 2.0]
