"""Assignments, records and losses, as a worker's peer sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from asyncrl.buffer.records import MAX_LOSSES, EpisodeRecord, State
from asyncrl.config import parse
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.failures import FailedAttempts
from asyncrl.coordinator.images import ImageHandler
from asyncrl.coordinator.records import RecordHandler
from asyncrl.coordinator.state import RunState
from asyncrl.coordinator.versions import VersionLedger
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.episodes.recorded import stored_result
from asyncrl.store.runstore import RunStore
from asyncrl.types import (
    EpisodeResult,
    EpisodeStats,
    FailReason,
    Message,
    PolicyVersion,
    Routes,
    Sample,
    TurnReply,
    VersionSpan,
)
from asyncrl.vision.image_ids import DIGEST_DIGITS, image_ids
from asyncrl.weights.manifest import Probe, WeightsRef
from asyncrl.wire.messages.shared import Attempt, Loaded, LoadWeights, Stop
from asyncrl.wire.messages.trainer import Probed
from asyncrl.wire.messages.worker import (
    Ack,
    Assign,
    Cancel,
    Failed,
    Fenced,
    Finished,
    Generated,
    Replied,
    WorkerHeartbeat,
    WorkerHello,
)
from tests.fakes.mail import Sent
from tests.unit.buffer.machine import admit, make, turn_payload

A = b"rollout/0/a"
B = b"rollout/1/b"
SAMPLE = Sample(0, "s", (Message("user", "?"),), "1")
IMAGE_IDS = image_ids("a" * DIGEST_DIGITS, 8)


class WorkerSetup:
    def __init__(self, run_dir: Path, greedy: bool = False) -> None:
        config = parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}})
        buffer, batches = make(rows=1, greedy=greedy)
        admit(buffer, 1)
        self.sent = Sent()
        self.state = RunState(
            config,
            run_dir,
            [SAMPLE],
            buffer,
            batches,
            VersionLedger(),
            RunStore(run_dir),
            self.sent,  # type: ignore[arg-type]
        )
        self.landed: list[EpisodeRecord] = []
        self.engines = EngineHandler(self.state, 0.0)
        self.handler = WorkerHandler(self.state, self.engines)
        self.resume()

    def resume(self) -> None:
        reports = SimpleNamespace(
            count_turn=lambda tokens: None, note_landed=lambda episode, *_: self.landed.append(episode)
        )
        images = ImageHandler(self.state)
        self.records = RecordHandler(self.state, self.handler, images, reports)  # type: ignore[arg-type]

    def join(self, peer: bytes, index: int = 0, slots: int = 8) -> None:
        incarnation = peer.decode().rpartition("/")[2]
        self.handler.welcome_worker(peer, WorkerHello(index, incarnation, slots, pid=1), 0.0)

    def beat(self, peer: bytes, beat: WorkerHeartbeat, now: float) -> None:
        self.handler.peers.note_contact(peer, now)
        self.handler.note_heartbeat(peer, beat, now)

    def tick(self, now: float = 0.0) -> list[tuple[bytes, Attempt]]:
        """What is assigned to whom."""
        self.engines.push_newest(now)
        self.handler.assign_pending(now)
        return [(peer, message.attempt) for peer, message in self.sent.take(Assign)]

    def turn(self, peer: bytes, seq: int, attempt: Attempt, turn: int = 0) -> None:
        self.records.process_record(peer, Generated(seq, attempt, turn), [turn_payload(turn)], 0.0)

    def finish(self, peer: bytes, seq: int, attempt: Attempt, turns: int = 1) -> None:
        end = Finished(seq, attempt, EpisodeResult(1.0), EpisodeStats(turns))
        self.records.process_record(peer, end, [], 0.0)

    def play(self, attempt: Attempt, end: Finished | Failed, peer: bytes = A) -> None:
        """Its turns, where it has finished, and its end, as the next records of the worker."""
        worker = self.handler.peers.get(peer)
        assert worker is not None
        for turn in range(end.stats.turns if isinstance(end, Finished) else 0):
            self.turn(peer, worker.last_record + 1, attempt, turn)
        end = msgspec.structs.replace(end, seq=worker.last_record + 1, attempt=attempt)
        self.records.process_record(peer, end, [], 0.0)

    def acks(self) -> list[int]:
        self.records.queue_acks()
        return [ack.seq for _, ack in self.sent.take(Ack)]

    def state_of(self, uid: str) -> tuple[State, int]:
        episode = self.state.ledger.buffer.episodes[uid]
        return episode.state, episode.attempt


@pytest.fixture
def setup(tmp_path: Path) -> WorkerSetup:
    setup = WorkerSetup(tmp_path)
    setup.join(A)
    return setup


def test_records_are_processed_once_and_acknowledged_in_order(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    setup.turn(A, 2, first)  # something before it was lost
    assert setup.acks() == []
    for _ in range(2):  # sent again after a lost ack
        setup.turn(A, 1, first)
        assert setup.acks() == [1]
    setup.finish(A, 2, first)
    setup.turn(A, 1, first)
    assert setup.acks() == [2] and [episode.uid for episode in setup.landed] == [first.uid]
    assert setup.sent.take(Fenced) == [], "it is no record of an attempt that was given up"
    assert list(setup.state.journal.store.reader.turn_frames(first.uid, 1)) == [turn_payload(), b""]


def test_many_episodes_are_assigned_over_several_turns_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages must not wait for all of them. The order of the groups and the balance stay."""
    monkeypatch.setattr("asyncrl.coordinator.workers.MAX_ASSIGNED", 3)
    setup = WorkerSetup(tmp_path)
    setup.join(A, 0), setup.join(B, 1)
    admit(setup.state.ledger.buffer, 3)
    assigned_counts = []
    more = []
    for _ in range(4):
        assigned_counts.append([(peer, attempt.uid) for peer, attempt in setup.tick()])
        more.append(setup.handler.work_left)
    uids = [f"{group}.{member}" for group in range(4) for member in range(2)]
    assert [uid for turn in assigned_counts for _, uid in turn] == uids and [
        len(turn) for turn in assigned_counts
    ] == [
        3,
        3,
        2,
        0,
    ]
    assert more == [True, True, False, False]
    assert [peer for turn in assigned_counts for peer, _ in turn] == [A, B] * 4


def test_failed_attempts_are_counted_though_the_next_one_lands(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    cause = "KeyError: 'b' (bad.py:41)"
    setup.records.process_record(A, Failed(1, first, FailReason.REWARD_ERROR, cause), [], 0.0)
    again = {attempt.uid: attempt for _, attempt in setup.tick()}[first.uid]
    setup.turn(A, 2, again)
    setup.finish(A, 3, again)
    log = setup.state.run_dir / "logs" / "rollout-0.log"
    log.parent.mkdir()
    began = "1:00 INFO asyncrl.launch: rollout-0 starts, pid 7, incarnation {}\n".format
    log.write_text(began(A.decode().rpartition("/")[2]) + "Killed: too much memory\n" + began("later"))
    setup.handler.peers.remove_process(A, "killed", 0.0)
    state = setup.state
    lost = "worker 0 in step 1 (killed): Killed: too much memory"
    assert state.ledger.failed_attempts == FailedAttempts({"reward_error": 1, "worker_lost": 1}, cause, lost)
    assert [episode.uid for episode in setup.landed] == [first.uid]
    state.journal.store.commit()
    assert FailedAttempts.load_from(state.journal.store) == state.ledger.failed_attempts, (
        "a restarted coordinator goes on counting"
    )


def test_first_attempts_are_judged_until_one_lands(setup: WorkerSetup) -> None:
    state = setup.state
    seq = 0
    for _ in range(100):  # groups of failing attempts follow each other
        for _, attempt in setup.tick():
            seq += 1
            setup.records.process_record(A, Failed(seq, attempt, FailReason.TOOL_ERROR, "no"), [], 0.0)
        if state.ledger.buffer.waiting_count == 0:
            admit(state.ledger.buffer, 1)
    assert state.ledger.futile_reason() == (
        f"the first {seq} attempts (samples: 1) all failed with tool_error: no; "
        "fix the cause, then continue with resume=auto"
    )
    (_, first), *_ = setup.tick()
    setup.turn(A, seq + 1, first)
    setup.finish(A, seq + 2, first)
    assert state.ledger.first_attempts.landed and state.ledger.futile_reason() == ""


def test_tokens_that_engines_prefill_again_are_counted_over_workers(setup: WorkerSetup) -> None:
    setup.join(B, index=1)
    for peer, tokens in ((A, 30), (B, 5), (A, 70)):
        setup.beat(peer, WorkerHeartbeat(0, (), 0, 0, 0, reprefilled_tokens=tokens), now=1.0)
    assert setup.handler.reprefilled_tokens == 70 + 5


def test_a_silent_worker_loses_its_episodes_and_is_fenced_when_it_returns(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    setup.turn(A, 1, first)
    setup.join(B, index=1)
    setup.beat(B, WorkerHeartbeat(0, (), 0, 0, 0), now=31.0)
    again = dict(setup.tick(now=31.0))
    assert setup.state_of(first.uid) == (State.RUNNING, 1)
    assert again.keys() == {B}
    assert setup.state.ledger.buffer.episodes[first.uid].turns == 1  # goes on from the durable turn
    setup.join(A)
    setup.finish(A, 1, first)
    assert setup.sent.take(Fenced) == [(A, Fenced(first))] and setup.landed == []


def test_a_hello_that_its_acks_have_overtaken_stops_no_record(setup: WorkerSetup) -> None:
    """The connections carried nothing for longer than a lease, then all: each channel in its own order."""
    (_, first), _ = setup.tick()
    setup.turn(A, 1, first)
    assert setup.acks() == [1]
    setup.handler.peers.remove_process(A, "silent", 31.0)
    setup.join(A)  # said before the ack arrived
    again = {attempt.uid: attempt for _, attempt in setup.tick()}[first.uid]
    setup.turn(A, 2, again, turn=1)
    assert setup.acks() == []
    setup.beat(A, WorkerHeartbeat(0, (), 0, 0, 0, acked=1), 31.0)
    setup.turn(A, 2, again, turn=1)
    assert setup.acks() == [2]


def test_a_dead_workers_late_hello_does_not_replace_its_successor(setup: WorkerSetup) -> None:
    setup.state.fleet.launch = "l"
    late_peer = b"rollout/0/l.2"
    living = b"rollout/0/l.10"
    setup.join(living), setup.tick()
    setup.join(late_peer)
    assert setup.sent.take(Stop) == [(late_peer, Stop("another process has replaced this one"))]
    assert [(worker.peer, len(worker.running)) for worker in setup.handler.peers] == [(living, 2)]
    setup.join(b"rollout/0/l.11")
    assert [worker.peer for worker in setup.handler.peers] == [b"rollout/0/l.11"]


def test_a_continued_episode_has_what_is_left_of_its_time(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    setup.records.process_record(A, Generated(1, first, 0, 7.5), [turn_payload()], 0.0)
    setup.join(B, index=1)
    setup.beat(B, WorkerHeartbeat(0, (), 0, 0, 0), now=31.0)
    setup.handler.assign_pending(31.0)
    seconds_by_uid = {
        message.attempt.uid: message.seconds for peer, message in setup.sent.take(Assign) if peer == B
    }
    assert seconds_by_uid == {first.uid: 7.5, "0.1": 0.0}
    again = setup.state.ledger.buffer.episodes[first.uid]
    setup.records.process_record(B, Failed(1, Attempt(first.uid, 1), FailReason.REWARD_ERROR, ""), [], 31.0)
    assert (again.attempt, again.turns, again.seconds) == (2, 0, 0.0)  # starts again from the prompt


def test_no_lease_expires_while_the_coordinator_did_not_run(setup: WorkerSetup) -> None:
    """Nor is what was assigned just before lost by a heartbeat that was sent earlier and read now."""
    (_, first), _ = setup.tick()
    setup.handler.extend_leases(60.0, 60.0)
    setup.beat(A, WorkerHeartbeat(0, (), 0, 0, 0), now=60.0)
    setup.handler.assign_pending(60.0)
    assert setup.handler.peers.get(A) and setup.state_of(first.uid) == (State.RUNNING, 0)


def test_an_assignment_that_never_arrived_is_found_by_the_heartbeat(setup: WorkerSetup) -> None:
    (_, first), (_, second) = setup.tick()
    setup.beat(A, WorkerHeartbeat(setup.handler.assign_seq, (second,), 0, 0, 0), now=1.0)
    assert setup.state_of(first.uid) == (State.PENDING, 1)
    assert setup.state_of(second.uid) == (State.RUNNING, 0)


BEAT = WorkerHeartbeat(99 << 32, (), 0.0, 0.0, 0)  # it has received all, and holds nothing any more


def beats(setup: WorkerSetup, leaving: bool = False) -> None:
    setup.beat(A, msgspec.structs.replace(BEAT, leaving=leaving), 1.0)


def leaves(setup: WorkerSetup) -> None:
    setup.handler.note_leaving(A)
    setup.handler.peers.remove_process(A, "it leaves", 1.0)


def stops(setup: WorkerSetup, act: Callable[[], None]) -> None:
    setup.state.fleet.stopping = True
    act()


def loses_its_server(setup: WorkerSetup) -> None:
    for episode in list(setup.state.ledger.buffer.episodes.values()):
        setup.play(Attempt(episode.uid, 0), Failed(0, Attempt("", 0), FailReason.ENGINE_LOST, "gone"))


@pytest.mark.parametrize(
    ("end", "lost"),
    [
        (beats, 2),
        (lambda setup: setup.handler.peers.remove_process(A, "silent", 1.0), 2),
        (loses_its_server, 2),
        (lambda setup: beats(setup, leaving=True), 0),
        (leaves, 0),
        (lambda setup: stops(setup, lambda: beats(setup)), 0),
        (lambda setup: stops(setup, lambda: setup.handler.peers.remove_process(A, "silent", 1.0)), 0),
        (lambda setup: stops(setup, lambda: loses_its_server(setup)), 0),
    ],
    ids=["dropped", "silent", "no server", "dropped by a signal", "leaves", *[f"stop {n}" for n in range(3)]],
)
def test_a_stop_that_was_asked_for_is_no_loss(
    setup: WorkerSetup, end: Callable[[WorkerSetup], None], lost: int
) -> None:
    """Its episodes are issued again, and nobody is told of lost attempts."""
    setup.join(A)
    assert len(setup.tick()) == 2
    end(setup)
    assert setup.state.ledger.buffer.waiting_count == 2
    assert sum(setup.state.ledger.failed_attempts.counts.values()) == lost
    worker = setup.handler.peers.get(A)
    assert worker is None or worker.free_slots == (0 if worker.leaving else 8), (
        "one that leaves is given nothing"
    )


def test_an_assignment_is_not_lost_while_its_worker_could_not_read_it(setup: WorkerSetup) -> None:
    """Its loop was blocked, by a large forward say, and its first beat was sent before it read."""
    (_, first), _ = setup.tick()
    for beat, state in ((1, (State.RUNNING, 0)), (2, (State.PENDING, 1))):
        setup.beat(A, WorkerHeartbeat(0, (), 0, 0, 0), now=31.0 + beat)
        assert setup.state_of(first.uid) == state


def test_a_held_attempt_that_is_not_current_is_cancelled(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    stale = Attempt(first.uid, first.attempt + 7)
    setup.beat(A, WorkerHeartbeat(setup.handler.assign_seq, (first, stale), 0, 0, 0), now=1.0)
    assert [message.attempt for _, message in setup.sent.take(Cancel) if message.attempt != first] == [stale]


def test_a_side_turn_has_no_part_in_staleness_and_sizes(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    setup.state.fleet.versions.set_newest(WeightsRef(PolicyVersion(1, 5), "somewhere"))
    side = turn_payload(untrained=True)
    setup.records.process_record(A, Generated(1, first, 0), [side], 0.0)
    buffer = setup.state.ledger.buffer
    episode = buffer.episodes[first.uid]
    age = buffer.waiting_tokens.quantile(0.5, 9.0)
    assert (episode.oldest, episode.tokens, age) == (-1, 0, math.inf)
    setup.records.process_record(A, Generated(2, first, 1), [turn_payload(1, 3, row=1)], 0.0)
    assert (episode.oldest, episode.newest, episode.oldest_possible_version) == (3, 3, 0)
    assert (episode.tokens, episode.untrained_tokens, episode.sampled) == (20, 20, 20)
    end = Finished(3, first, EpisodeResult(1.0, 10), EpisodeStats(1, untrained_turns=1, longest_row=20))
    setup.records.process_record(A, end, [], 0.0)
    assert setup.state_of(first.uid) == (State.LANDED, 0) and episode.oldest_possible_version == 3


@pytest.mark.parametrize(
    ("result", "stats", "error"),
    [
        (EpisodeResult(math.nan), {}, "reward_error (the reward is nan"),
        (EpisodeResult(1e300), {}, "reward_error (the reward is 1e+300; it must be within ±1e+06"),
        (EpisodeResult(0.0, 1, (-1e7, 1e7)), {}, "reward_error (the reward of turn 0 is -1e+07"),
        (EpisodeResult(0.0, components={"a": math.inf}), {}, "(component 'a' of the reward is inf"),
        (EpisodeResult(1.0), {"turns": 2}, "are durable"),
        (EpisodeResult(1.0, tokens=-1), {}, "impossible"),
        (EpisodeResult(1.0, tokens=21), {}, "are durable"),
        (EpisodeResult(1.0, turn_rewards=(1.0, 0.0)), {}, "impossible"),
        (EpisodeResult(1.0, turn_rewards=(1.0,), agents=("a",)), {}, "impossible"),
        (EpisodeResult(1.0, turn_rewards=(1.0,), agents=("a",), turn_tokens=(-1,)), {}, "impossible"),
        (EpisodeResult(1.0), {"seconds": math.nan}, "impossible"),
        (EpisodeResult(1.0), {"tool_s": -1.0}, "impossible"),
        (EpisodeResult(1.0), {"tool_calls": -1}, "impossible"),
        (EpisodeResult(1.0), {"refused": 1 << 63}, "impossible"),
        (EpisodeResult(1.0), {"longest_row": 21}, "are durable"),
    ],
)
def test_an_end_that_cannot_be_fails_the_episode_and_nothing_else(
    setup: WorkerSetup, caplog: pytest.LogCaptureFixture, result: EpisodeResult, stats: dict, error: str
) -> None:
    """It starts again from the prompt."""
    (_, first), (_, second) = setup.tick()
    setup.turn(A, 1, first)
    with caplog.at_level("INFO"):
        end = Finished(2, first, result, EpisodeStats(**{"turns": 1} | stats))
        setup.records.process_record(A, end, [], 0.0)
    assert error in caplog.text
    setup.turn(A, 3, second)
    setup.finish(A, 4, second)
    setup.state.journal.persist()  # SQLite takes NaN for no value
    assert setup.state_of(first.uid) == (State.PENDING, 1) and [e.uid for e in setup.landed] == [second.uid]
    assert setup.state.ledger.buffer.episodes[first.uid].turns == 0


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"no turn", "cannot be decoded"),
        (turn_payload()[:-1], "cannot be decoded"),
        (turn_payload().replace(b"\xa4stop\xa4stop", b"\xa4stop\xa4\xff\xff\xff\xff"), "cannot be decoded"),
        (turn_payload(logprobs=(-0.5,) * 9), "10 tokens with 9 log-probs"),
        (turn_payload(spans=(VersionSpan(0, 4, 0, 0), VersionSpan(5, 10, 0, 0))), "spans"),
        (turn_payload(ids=(1,) * 9 + (1 << 31,)), "is not a valid token ID"),
        (turn_payload(ids=(1,) * 9 + (-1,)), "cannot be decoded"),
        (turn_payload(context=(1,) * 9 + (-1,)), "cannot be decoded"),
        (turn_payload(context=()), "must not start with a token that the model sampled"),
        (turn_payload(row=1), "expected a row from 0 to 0, got row 1"),
        (turn_payload(routes=Routes(0, 19, b"odd")), "invalid routes (19 tokens from position 0,"),
        (turn_payload(routes=Routes(0, 19, bytes(19))), "invalid routes (19 tokens from position 0,"),
        (turn_payload(routes=Routes(0, 19, b"")), "invalid routes (19 tokens from position 0,"),
        (turn_payload(routes=Routes(0, 0, b"1234")), "invalid routes (0 tokens from position 0,"),
        (turn_payload(index=1), "expected turn 0, got turn 1"),
        (turn_payload(version=-3), "versions must not be negative: [-3]"),
        (turn_payload(ids=(1,) * 9 + (100,)), "is not a valid token ID"),
        (turn_payload(context=(100,) * 10), "is not a valid token ID"),
        (turn_payload(taught=(100,) * 10), "is not a valid token ID"),
        (turn_payload(context=(1,) * 9 + (1 << 31,)), "2147483648 is not a valid token ID"),
        (turn_payload(context=(1,) * 9 + (1 << 63,)), "9223372036854775808 is not a valid token ID"),
        (turn_payload(context=(1, *IMAGE_IDS[1:])), "image ids must begin with the first 4 ids of an image"),
        (turn_payload(context=(1, *IMAGE_IDS[:3])), "image ids must begin with the first 4 ids of an image"),
        (turn_payload(taught=(1, *IMAGE_IDS[1:])), "image ids must begin with the first 4 ids of an image"),
        (turn_payload(context=(1, *IMAGE_IDS)), "turn 0: image ids, but m/config.json"),
        (turn_payload(logprobs=(-0.5,) * 9 + (math.nan,)), "must be a finite number not above 0"),
        (turn_payload(logprobs=(-0.5,) * 9 + (-math.inf,)), "must be a finite number not above 0"),
        (turn_payload(logprobs=(-0.5,) * 9 + (2.0,)), "must be a finite number not above 0"),
        (turn_payload(logprobs=(-1e308,) * 10), "must be a finite number not above 0"),
        (turn_payload(logprobs=(-math.inf, math.inf) * 5), "must be a finite number not above 0"),
    ],
)
def test_a_turn_that_cannot_be_trained_is_never_taken_in(
    setup: WorkerSetup, payload: bytes, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end the trainer at every start, as its plan is repeated."""
    (_, first), _ = setup.tick()
    setup.state.fleet.vocabulary = 100
    setup.records.process_record(A, Generated(1, first, 0), [payload], 0.0)
    assert error in caplog.text
    assert setup.state.ledger.buffer.episodes[first.uid].turns == 0 and setup.state_of(first.uid)[1] == 1
    assert [message.attempt for _, message in setup.sent.take(Fenced)] == [first]


@pytest.mark.parametrize(("left", "attempt"), [(20, 0), (19, 1)])
def test_a_turn_beyond_the_limit_is_not_trained(setup: WorkerSetup, left: int, attempt: int) -> None:
    """Memory is reserved by the limit."""
    (_, first), _ = setup.tick()
    setup.state.ledger.buffer.episodes[first.uid].tokens = setup.state.config.rollout.max_tokens - left
    setup.turn(A, 1, first)
    assert setup.state_of(first.uid)[1] == attempt


def test_an_episode_may_end_that_began_with_a_larger_limit(setup: WorkerSetup) -> None:
    """After a resume with a smaller rollout.max_tokens it is over at once, with the tokens that it has."""
    (_, first), _ = setup.tick()
    setup.turn(A, 1, first)
    rollout = msgspec.structs.replace(setup.state.config.rollout, max_tokens=16)
    setup.state.config = msgspec.structs.replace(setup.state.config, rollout=rollout)
    setup.resume()
    end = Finished(2, first, EpisodeResult(1.0, tokens=10), EpisodeStats(1, longest_row=20, prompt=10))
    setup.records.process_record(A, end, [], 0.0)
    assert setup.state_of(first.uid) == (State.LANDED, 0)


def test_a_worker_may_call_itself_as_it_likes(setup: WorkerSetup) -> None:
    """More digits than Python reads as a number end nothing; an earlier start is told to end all the same."""
    setup.state.fleet.launch = "launch"
    names = [f"launch.{start}" for start in ("10", "9" * 5000, "11", "2")]
    for name in names:
        setup.join(f"rollout/7/{name}".encode(), index=7)
    assert [worker.hello.incarnation for worker in setup.handler.peers][-1] == names[1]
    assert [peer for peer, _ in setup.sent.take(Stop)] == [f"rollout/7/{name}".encode() for name in names[2:]]


@pytest.mark.parametrize(("payload", "state"), [(b'{"a": 1}', State.LANDED), (b"no JSON", State.PENDING)])
def test_what_an_episode_left_for_its_reward_is_kept(
    setup: WorkerSetup, payload: bytes, state: State
) -> None:
    (_, first), _ = setup.tick()
    setup.turn(A, 1, first)
    end = Finished(2, first, EpisodeResult(1.0), EpisodeStats(1))
    setup.records.process_record(A, end, [payload], 0.0)
    setup.state.journal.persist()
    assert setup.state_of(first.uid)[0] is state
    if state is State.LANDED:
        assert stored_result(setup.state.journal.store.reader, first.uid, 1) == {"a": 1}


REPLY = msgspec.msgpack.encode(TurnReply())


@pytest.mark.parametrize(("turn", "payload"), [(0, b"no reply"), (1, REPLY), (1 << 63, REPLY)])
def test_replies_that_fit_no_turn_are_never_taken_in(setup: WorkerSetup, turn: int, payload: bytes) -> None:
    (_, first), _ = setup.tick()
    setup.turn(A, 1, first)
    setup.records.process_record(A, Replied(2, first, turn), [payload], 0.0)
    setup.state.journal.persist()
    assert setup.state_of(first.uid) == (State.PENDING, 1)


def test_a_version_that_was_never_pushed_quarantines_the_worker(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    setup.records.process_record(A, Generated(1, first, 0), [turn_payload(version=99)], 0.0)
    assert setup.engines.quarantined(A) and setup.handler.free_slots == 0
    assert setup.state_of(first.uid)[0] is State.PENDING


def test_engines_must_agree_on_a_version(setup: WorkerSetup) -> None:
    setup.join(B, index=1)
    ref = WeightsRef(PolicyVersion(1, 1), "somewhere")
    setup.state.fleet.versions.set_newest(ref)
    setup.tick()
    assert {peer for peer, _ in setup.sent.take(LoadWeights)} == {A, B}
    setup.engines.confirm_load(A, Loaded(ref, "train", "sum", 0.1), 0.0)
    setup.engines.confirm_load(B, Loaded(ref, "train", "other", 0.1), 0.0)
    assert [setup.state.fleet.versions.engines[peer].acked.step for peer in (A, B)] == [1, 0]
    assert [setup.engines.quarantined(peer) for peer in (A, B)] == [False, True]


@pytest.mark.parametrize(
    ("says", "acked", "again"),
    [(3, 3, False), (2, 2, True), (3, 2, True), (0, 3, True)],  # the second: what it was sent was lost
    ids=["it has it", "it missed it", "its answer was lost", "it lost it"],
)
def test_a_hello_out_of_silence_is_sent_what_its_engine_lacks(
    setup: WorkerSetup, says: int, acked: int, again: bool
) -> None:
    """A worker says hello after 5 s in which the coordinator had nothing to say, as in each long turn."""
    setup.state.fleet.versions.set_newest(WeightsRef(PolicyVersion(1, 3), "somewhere"))
    setup.tick()
    assert [peer for peer, _ in setup.sent.take(LoadWeights)] == [A]
    setup.state.fleet.versions.engines[A].acked = PolicyVersion(1, acked)
    setup.handler.welcome_worker(A, WorkerHello(0, "a", 8, 1, 0, PolicyVersion(1, says)), 1.0)
    setup.tick(1.0)
    assert [peer for peer, _ in setup.sent.take(LoadWeights)] == [A] * again


def test_a_probe_that_the_trainer_repeats_is_not_compared_again(setup: WorkerSetup) -> None:
    """A rank repeats its newest one when the coordinator welcomes it, which is after each quiet time."""
    ref = WeightsRef(PolicyVersion(1, 3), "somewhere")
    setup.state.fleet.versions.set_newest(ref)
    probed = Probed(ref.version, Probe(((1, 2),), ((-1.0,),)))
    probes = []
    for now in (0.0, 1.0, 2.0):
        setup.state.fleet.versions.add_probe(probed, now)
        setup.tick(now)
        probes += [message.probe for _, message in setup.sent.take(LoadWeights)]
        setup.engines.confirm_load(A, Loaded(ref, "train", "sum", 0.1), now)
    assert probes == [probed.probe]


def test_an_assignment_says_how_old_the_weights_of_its_turns_may_be(setup: WorkerSetup) -> None:
    setup.state.fleet.versions.engines[A].acked = PolicyVersion(1, 3)
    setup.handler.assign_pending(0.0)
    assert [message.min_version for _, message in setup.sent.take(Assign)] == [3, 3]
    assert {episode.min_version for episode in setup.state.ledger.buffer.episodes.values()} == {3}


def test_without_its_greedy_episode_a_group_is_cancelled_wherever_it_runs(tmp_path: Path) -> None:
    setup = WorkerSetup(tmp_path, greedy=True)
    setup.join(A, slots=2), setup.join(B, index=1, slots=2)
    assigned_attempts = {attempt.uid: (peer, attempt) for peer, attempt in setup.tick()}
    peer, greedy = assigned_attempts.pop("0.2")
    setup.records.process_record(peer, Failed(1, greedy, FailReason.PROMPT_TOO_LONG, ""), [], 0.0)
    assert sorted((to, m.attempt) for to, m in setup.sent.take(Cancel)) == sorted(assigned_attempts.values())
    assert setup.handler.free_slots == 4 and not setup.state.ledger.buffer.live_groups
    left, attempt = assigned_attempts["0.0"]
    setup.turn(left, 2 if left == peer else 1, attempt)  # written before the word arrived
    assert [message.attempt for _, message in setup.sent.take(Fenced)] == [attempt]


def test_a_lost_worker_may_hold_a_greedy_episode_and_the_group_it_takes_along(tmp_path: Path) -> None:
    setup = WorkerSetup(tmp_path, greedy=True)
    setup.join(A)
    setup.tick()
    worker = setup.handler.peers.get(A)
    assert worker is not None
    worker.running = dict(reversed(worker.running.items()))  # the greedy one is the first to be given up
    for episode in setup.state.ledger.buffer.episodes.values():
        episode.losses = MAX_LOSSES
    setup.handler.peers.remove_process(A, "gone", 0.0)
    flow = setup.state.ledger.buffer.account()
    assert flow.conserved and (flow.failed, flow.dropped) == (1, 2)
