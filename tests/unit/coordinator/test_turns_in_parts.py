"""Parts of turns that are under way: kept until the turn is whole, and given to the next attempt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl.buffer.payloads import TurnPart
from asyncrl.store.schema import StoreError
from asyncrl.store.segments import SegmentReader
from asyncrl.types import FailReason, Generation, PolicyVersion, Routes, StopReason, VersionSpan
from asyncrl.weights.manifest import WeightsRef
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Assign, Failed, Fenced, Generated, Sampled, WorkerHeartbeat
from tests.unit.buffer.machine import turn_payload
from tests.unit.coordinator.test_workers import A, B, WorkerSetup

LATE = 31.0  # the first worker's lease is over


@pytest.fixture
def setup(tmp_path: Path) -> WorkerSetup:
    setup = WorkerSetup(tmp_path)
    setup.join(A)
    return setup


def part(
    start: int, count: int = 4, session: int = 0, prompt: bytes = b"p", version: int = 0, **changed: Any
) -> bytes:
    ids = tuple(range(start, start + count))
    spans = (VersionSpan(0, count, version, version),)
    sampled = Generation(ids, (-0.5,) * count, spans if count else (), StopReason.ABORT)
    return msgspec.msgpack.encode(TurnPart(session, prompt, start, replace(sampled, **changed)))


def post(setup: WorkerSetup, attempt: Attempt, *parts: bytes, peer: bytes = A, seconds: float = 0.0) -> None:
    for payload in parts:
        worker = setup.handler.peers.get(peer)
        assert worker is not None
        setup.records.process_record(peer, Sampled(worker.last_record + 1, attempt, seconds), [payload], 1.0)


def lost(setup: WorkerSetup, uid: str) -> tuple[Assign, list[bytes]]:
    """What another worker is given of an episode once the first is lost."""
    setup.join(B, index=1)
    setup.beat(B, WorkerHeartbeat(0, (), 0, 0, 0), now=LATE)
    setup.handler.assign_pending(LATE)
    assigned = {message.attempt.uid: message for peer, message in setup.sent.take(Assign) if peer == B}
    return assigned[uid], next(
        (frames for message, frames in setup.sent.frames if message is assigned[uid]), []
    )


def test_the_next_attempt_is_given_the_parts_of_the_turn_that_was_under_way(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    setup.turn(A, 1, first)
    post(setup, first, part(0), part(4, 2), part(0, session=3), seconds=7.5)
    post(setup, first, part(4, 2), part(9))  # sent again; one that does not follow the one before
    assert setup.acks() == [6] and setup.sent.take(Fenced) == []
    message, frames = lost(setup, first.uid)
    assert (message.parts, message.seconds, message.attempt.attempt) == (3, 7.5, 1)
    assert frames == [turn_payload(), b"", part(0), part(4, 2), part(0, session=3)]
    post(setup, first, part(6), peer=B)  # of an attempt that is lost
    assert len(setup.sent.take(Fenced)) == 1
    again = message.attempt
    post(setup, again, part(6), peer=B)
    setup.records.process_record(B, Generated(3, again, 1), [turn_payload(1)], LATE)
    episode = setup.state.ledger.buffer.episodes[first.uid]
    assert episode.open.keys() == {3} and (episode.turns, episode.sampled, episode.tokens) == (2, 20, 40)
    setup.finish(B, 4, again, turns=2)
    assert not episode.open


def test_parts_alone_outlive_the_worker_and_the_coordinator(setup: WorkerSetup, tmp_path: Path) -> None:
    (_, first), _ = setup.tick()
    post(setup, first, part(0), part(4))
    setup.state.journal.persist()
    stored_episodes = setup.state.journal.store.reader.load_run().episodes
    (stored_episode,) = [episode for episode in stored_episodes if episode.uid == first.uid]
    assert stored_episode.open == setup.state.ledger.buffer.episodes[first.uid].open
    message, frames = lost(setup, first.uid)
    assert (message.parts, frames) == (2, [part(0), part(4)])
    waiting_tokens = setup.state.ledger.buffer.waiting_tokens
    assert waiting_tokens.running_weight(began_before=math.inf) == 8  # four tokens of each part

    end = Failed(1, message.attempt, FailReason.NOT_REPEATED, "")
    setup.records.process_record(B, end, [], LATE)
    assert waiting_tokens.running_weight(began_before=math.inf) == 0
    episode = setup.state.ledger.buffer.episodes[first.uid]
    assert not episode.open and setup.state.ledger.buffer.abandoned_tokens == 0  # no durable turn had them
    setup.state.journal.persist()
    assert list(setup.state.journal.store.reader.turn_frames(first.uid, 1, ["part 0", "part 1"])) == [
        b"",
        b"",
    ]


def test_another_turn_of_the_session_takes_the_place_of_one_that_was_given_up(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    post(setup, first, part(0), part(4), part(0, 3, prompt=b"q"))
    _, frames = lost(setup, first.uid)
    assert frames == [part(0, 3, prompt=b"q")]


def test_tokens_of_parts_wait_from_when_they_came_and_hold_the_floor(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    buffer = setup.state.ledger.buffer
    episode = buffer.episodes[first.uid]
    setup.state.fleet.versions.set_newest(WeightsRef(PolicyVersion(1, 5), "somewhere"))
    post(setup, first, part(0, version=5), part(4, version=3))
    setup.records.process_record(A, Generated(3, first, 0), [turn_payload(version=3)], 9.0)
    waited = buffer.waiting_tokens
    assert (waited.running_weight(1.5), waited.running_weight(10.0)) == (8, 10)
    post(setup, first, part(0, prompt=b"q", version=2))
    assert episode.oldest_possible_version == 0  # it was started on version 0, and still runs
    buffer.fail_attempt(episode, FailReason.WORKER_LOST, 9.0)
    assert (episode.oldest_possible_version, episode.oldest) == (2, 3) and waited.running_weight(10.0) == 14


def test_a_turn_whose_parts_cannot_be_read_begins_anew(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, first), _ = setup.tick()
    setup.turn(A, 1, first)
    post(setup, first, part(0), part(4))
    setup.state.journal.persist()
    read = SegmentReader.read_record

    def damaged(reader: SegmentReader, place: object) -> bytes:
        payload = read(reader, place)  # type: ignore[arg-type]
        if payload == part(4):
            raise StoreError("damaged")
        return payload

    monkeypatch.setattr(SegmentReader, "read_record", damaged)
    message, frames = lost(setup, first.uid)
    assert (message.parts, frames) == (0, [turn_payload(), b""])
    post(setup, message.attempt, part(0, 2), peer=B)
    assert setup.state.ledger.buffer.episodes[first.uid].open[0].tokens == 2


def test_parts_that_are_sent_again_after_their_turn_are_forgotten_with_it(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    post(setup, first, part(0))
    setup.turn(A, 2, first)
    worker = setup.handler.peers.get(A)
    assert worker is not None
    worker.last_record = 0  # the coordinator was killed between its commit and the ack
    post(setup, first, part(0))
    assert setup.state.ledger.buffer.episodes[first.uid].open
    setup.turn(A, 2, first)
    episode = setup.state.ledger.buffer.episodes[first.uid]
    assert (episode.turns, episode.open) == (1, {}) and setup.sent.take(Fenced) == []


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (part(0, session=1 << 63), "cannot be decoded"),
        (part(0, prompt=b"p" * 65), "cannot be decoded"),
        (part(0, ids=(0, 1, 2, -1)), "cannot be decoded"),
        (part(0, ids=(0, 1, 2, 100)), "is not a valid token ID"),
        (part(0, logprobs=(-0.5,) * 3), "4 tokens with 3 log-probs"),
        (part(0, logprobs=(-0.5, -0.5, -0.5, math.nan)), "must be a finite number not above 0"),
        (part(0, version=-1), "versions must not be negative: [-1]"),
        (part(0, routes=Routes(0, 4, b"12345678")), "routes"),
    ],
)
def test_a_part_that_cannot_be_trained_is_never_given_to_another_attempt(
    setup: WorkerSetup, payload: bytes, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    (_, first), _ = setup.tick()
    setup.state.fleet.vocabulary = 100
    post(setup, first, payload)
    setup.state.journal.persist()
    episode = setup.state.ledger.buffer.episodes[first.uid]
    assert error in caplog.text and (episode.open, episode.attempt) == ({}, 1)


def test_a_part_of_weights_that_were_never_pushed_is_charged_to_who_sampled_it(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    post(setup, first, part(0), part(4, version=99))
    assert setup.engines.quarantined(A) and setup.state.ledger.buffer.episodes[first.uid].open[0].parts == 1


def test_a_turn_that_is_refused_takes_its_parts_along(setup: WorkerSetup) -> None:
    """Else each worker in turn would go on after them, and be quarantined."""
    (_, first), _ = setup.tick()
    post(setup, first, part(0))
    setup.records.process_record(A, Generated(2, first, 0), [turn_payload(version=99)], 1.0)
    episode = setup.state.ledger.buffer.episodes[first.uid]
    assert (episode.attempt, episode.open) == (1, {})


def test_parts_are_bounded_by_the_tokens_of_an_episode(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    episode = setup.state.ledger.buffer.episodes[first.uid]
    post(setup, first, part(0, 0), part(0, 0))  # no tokens
    assert episode.open == {}
    episode.tokens = setup.state.config.rollout.max_tokens - 10
    post(setup, first, part(0), part(0, session=1), part(0, session=2), part(4, 2))
    assert [turn.tokens for turn in episode.open.values()] == [6, 4]
    assert setup.sent.take(Fenced) == []


def test_no_part_is_no_reason_to_wait(setup: WorkerSetup) -> None:
    (_, first), _ = setup.tick()
    assert setup.state.ledger.buffer.waiting_tokens.quantile(0.5, 9.0) == math.inf
    post(setup, first, b"nonsense")
    (fenced,) = setup.sent.take(Fenced)
    assert fenced[1].attempt == first
