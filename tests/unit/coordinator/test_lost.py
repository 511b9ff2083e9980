"""What a power cut or a bad sector took: episodes go on from what is left, or are dropped; steps are found in
the checkpoints' manifests."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.buffer.records import State
from asyncrl.coordinator.state import RunState
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.errors import ProtocolError
from asyncrl.store import segments
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.types import NO_STEP, DropReason, EpisodeResult, EpisodeStats, FailReason
from asyncrl.wire.messages.trainer import (
    Checkpointed,
    Commit,
    PayloadRequest,
    Payloads,
    PlanRequest,
    TrainerHello,
    WorkPlan,
)
from tests.fakes.mail import Sent
from tests.fakes.power import DurableFiles
from tests.unit.buffer.machine import admit, run, turn_payload
from tests.unit.coordinator import test_state
from tests.unit.coordinator.test_state import build

samples = test_state.samples  # the fixture
PEER = b"trainer/0/x"


def play(state: RunState, uid: str, turns: int, end: bool = False) -> None:
    """Turns of an episode, and its end."""
    episode = state.ledger.buffer.episodes[uid]
    if episode.state is State.PENDING:
        run(state.ledger.buffer, uid)
    for _ in range(turns):
        state.journal.store.put_frame(
            uid, episode.turns, "generated", turn_payload(episode.turns, episode.turns)
        )
        episode.add_turn(20, 10, episode.turns, episode.turns)
        state.ledger.buffer.mark_changed(episode)
    if end:
        result = EpisodeResult(1.0, 10 * episode.turns)
        stats = EpisodeStats(episode.turns)
        state.ledger.buffer.finish_episode(episode, result, stats, 0.0)


def landed(run_dir: Path, *uids: str, **buffer: Any) -> RunState:
    """A run whose first group, of these episodes, has landed, with a turn each."""
    state = build(run_dir, **buffer)
    admit(state.ledger.buffer, 1)
    for uid in uids:
        play(state, uid, 1, end=True)
    state.journal.persist()
    return state


def started(run_dir: Path, step: int = 0, **buffer: Any) -> RunState:
    """The next coordinator, with a trainer at `step`."""
    state = build(run_dir, **buffer)
    Training(state, "next", step)
    state.journal.persist()
    return state


class Power(DurableFiles):
    """A run whose machine loses power."""

    def cut(self, state: RunState, surviving: str) -> RunState:
        self.keep(surviving)
        state.journal.store.close()
        self.cut_power()
        return started(self.root)


class BadSector:
    """In place of `os`: the byte at this place of a file cannot be read."""

    def __init__(self, offset: int) -> None:
        self.place = offset

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pread(self, file: int, length: int, offset: int) -> bytes:
        if offset <= self.place < offset + length:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(file, length, offset)


def synced(state: RunState) -> None:
    state.journal.store.request_sync()
    state.journal.persist()


def test_tokens_of_attempts_that_are_given_up_are_counted_once(tmp_path: Path) -> None:
    """Also by a coordinator that is killed and started again. Landed episodes have theirs, whatever becomes
    of their group."""

    def fail(uid: str, reason: FailReason, counted: int) -> None:
        state.ledger.buffer.fail_attempt(state.ledger.buffer.episodes[uid], reason, 0.0)
        assert state.ledger.buffer.abandoned_tokens == counted

    state = build(tmp_path)
    admit(state.ledger.buffer, 3)
    play(state, "0.0", 2)
    fail("0.0", FailReason.WORKER_LOST, 0)  # it goes on
    run(state.ledger.buffer, "0.0")
    fail("0.0", FailReason.NOT_REPEATED, 20)
    state.journal.persist()
    play(state, "0.0", 1)
    fail("0.0", FailReason.REWARD_ERROR, 30)
    state.journal.store.close()  # all of that was not durable
    state = build(tmp_path)
    assert (state.ledger.buffer.abandoned_tokens, state.ledger.buffer.episodes["0.0"].sampled) == (20, 0)
    play(state, "0.0", 1)
    fail("0.0", FailReason.PROMPT_TOO_LONG, 30)
    play(state, "1.0", 1, end=True), play(state, "1.1", 3)
    state.ledger.buffer.drop_group(state.ledger.buffer.live_groups[1], DropReason.STALE)
    assert state.ledger.buffer.abandoned_tokens == 60
    state.journal.persist()
    state.journal.store.close()
    assert build(tmp_path).ledger.buffer.abandoned_tokens == 60


def test_each_episode_goes_on_from_what_reached_the_disk(tmp_path: Path) -> None:
    """SQLite's index did, by one of its own checkpoints; of the segment only what a sync had written."""
    power = Power(tmp_path)
    with power.recorded():
        state = build(tmp_path)
        admit(state.ledger.buffer, 4)
        play(state, "0.0", 2), play(state, "1.0", 1), play(state, "2.0", 3, end=True)
        synced(state)
        play(state, "0.0", 2), play(state, "0.1", 1), play(state, "1.0", 1, end=True)
        play(state, "2.1", 1, end=True), play(state, "3.0", 1, end=True)
        state.journal.persist()
    again = power.cut(state, surviving="run.db*")
    flow = again.ledger.buffer.account()
    episodes = again.ledger.buffer.episodes
    assert flow.conserved and flow.issued == 8
    uids = ("0.0", "0.1", "1.0", "3.0")
    cut = {uid: (episodes[uid].state, episodes[uid].turns, episodes[uid].attempt) for uid in uids}
    assert cut == {
        "0.0": (State.PENDING, 2, 1),  # running: two turns of four are left
        "0.1": (State.PENDING, 0, 1),  # its only turn is gone
        "1.0": (State.PENDING, 1, 1),  # it had landed
        "3.0": (State.PENDING, 0, 1),
    }
    assert (episodes["0.0"].tokens, episodes["0.0"].oldest, episodes["0.0"].newest) == (40, 0, 1)
    assert (
        episodes["2.0"].state is State.READY and again.ledger.buffer.state_counts()[State.DROPPED] == 1
    )  # 2.1
    assert again.ledger.buffer.reasons == {"dropped/corrupt": 1}
    assert again.ledger.buffer.abandoned_tokens == 20 + 10 + 10 + 10  # not those of 2.1: it had landed
    play(again, "0.0", 1)
    again.journal.persist()
    assert list(again.journal.store.reader.turn_frames("0.0", 3)) == [
        part for turn in range(3) for part in (turn_payload(turn, turn), b"")
    ]
    assert again.journal.store.reader.counts() == {
        k: v for k, v in again.ledger.buffer.state_counts().items() if v
    }


@pytest.mark.parametrize("damage", ["sector", "flip", "file"])
def test_a_bad_sector_costs_what_is_in_it(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = build(tmp_path)
    admit(state.ledger.buffer, 1)
    play(state, "0.0", 3), play(state, "0.1", 1)
    state.journal.persist()
    state.journal.store.close()
    (segment,) = (tmp_path / "segments").iterdir()
    if damage == "file":  # its name was not yet on the disk
        segment.unlink()
    data = bytearray(segment.read_bytes()) if damage != "file" else bytearray()
    bad = len(data) // 4 + 30  # in the second turn of 0.0
    if damage == "flip":
        data[bad] ^= 1
        segment.write_bytes(data)
    elif damage == "sector":
        monkeypatch.setattr(segments, "os", BadSector(bad))
    again = started(tmp_path)
    left = {uid: episode.turns for uid, episode in again.ledger.buffer.episodes.items()}
    assert left == ({"0.0": 0, "0.1": 0} if damage == "file" else {"0.0": 1, "0.1": 1})
    assert again.ledger.buffer.account().conserved


class Training:
    """A trainer's requests to a state."""

    def __init__(self, state: RunState, incarnation: str, step: int = 0) -> None:
        self.state = state
        self.sent = Sent()
        state.journal.outbox = self.sent  # type: ignore[assignment]
        self.handler = TrainerHandler(state, lambda commit: None)
        self.handler.welcome_rank(PEER, TrainerHello(0, 1, incarnation, step), 0.0)

    def plan(self, micro: int, step: int = 1) -> WorkPlan:
        self.handler.note_request(PEER, PlanRequest(self.state.fleet.trainer_epoch, step, micro))
        self.handler.serve_request()
        ((_, plan),) = self.sent.take(WorkPlan)
        return plan

    def payloads(self, plan: WorkPlan) -> list[str]:
        """Those of the plan that the rank is given."""
        uids = tuple(planned.uid for planned in plan.trajectories)
        request = PayloadRequest(self.state.fleet.trainer_epoch, plan.step, uids)
        self.handler.send_payloads(PEER, request)
        ((_, payloads),) = self.sent.take(Payloads)
        return [uid for uid in uids if uid not in payloads.lost]

    def train(self, uids: list[str] | None = None) -> list[str]:
        """Batch 0, of one part, perhaps as it was received before; what was in it."""
        uids = self.payloads(self.plan(0)) if uids is None else uids
        plan_hash = self.plan(1).plan_hash
        lost = set(self.state.ledger.batches.by_step[1].planned).difference(uids)
        commit = Commit(self.state.fleet.trainer_epoch, 1, plan_hash, tuple(uids), {}, tuple(lost))
        self.handler.record_commit(PEER, commit, 0.0)
        self.state.journal.persist()
        return uids


def damage(state: RunState, uid: str) -> None:
    """From now on the first turn of an episode cannot be read."""
    state.journal.store.forget_frames(uid)
    state.journal.persist()


def audit(state: RunState) -> None:
    flow = state.ledger.buffer.account()
    assert flow.conserved and state.journal.store.reader.trained_in_plans() == flow.trained
    assert state.journal.store.reader.counts() == {
        k: v for k, v in state.ledger.buffer.state_counts().items() if v
    }


def test_a_plan_goes_on_without_what_cannot_be_read(tmp_path: Path) -> None:
    """Also the same plan again, for another trainer and from another coordinator."""
    state = landed(tmp_path, "0.0", "0.1", "0.2", episodes_per_group=3)
    damage(state, "0.1")
    for incarnation in ("a", "b"):
        trainer = Training(state, incarnation)
        plan = trainer.plan(0)
        assert trainer.payloads(plan) == ["0.0", "0.2"]
        assert len(plan.trajectories[0].siblings) == 3  # the baseline stays as it was
        state.journal.persist()
    state.journal.store.close()
    again = build(tmp_path, episodes_per_group=3)
    assert Training(again, "c").train() == ["0.0", "0.2"]
    flow = again.ledger.buffer.account()
    assert (flow.trained, flow.dropped, flow.taken) == (2, 1, 0)
    audit(again)


@pytest.mark.parametrize("repeating", [False, True])
def test_what_a_trainer_was_given_before_the_damage_is_trained(tmp_path: Path, repeating: bool) -> None:
    """Its request comes once more, to another coordinator. The next trainer goes on without."""
    state = landed(tmp_path, "0.0", "0.1")
    if repeating:
        assert Training(state, "a").train() == ["0.0", "0.1"]
    trainer = Training(state, "b")
    first = trainer.payloads(trainer.plan(0))
    damage(state, "0.1")
    state.journal.store.close()
    again = build(tmp_path)
    trainer = Training(again, "b")
    assert trainer.payloads(trainer.plan(0)) == ["0.0"]
    assert len(trainer.plan(0).trajectories) == 2  # the others are dealt as if it were there
    again.journal.persist()
    assert trainer.train(first) == ["0.0", "0.1"] and again.ledger.buffer.account().trained == 2
    audit(again)
    assert Training(again, "c").train() == ["0.0"] and again.ledger.buffer.reasons == {"dropped/corrupt": 1}
    audit(again)


def test_a_late_request_for_a_committed_step_loses_nothing(tmp_path: Path) -> None:
    """It was sent again before the answer came, and the payload was damaged since."""
    state = landed(tmp_path, "0.0", "0.1")
    trainer = Training(state, "a")
    assert trainer.train() == ["0.0", "0.1"]
    damage(state, "0.1")
    trainer.handler.note_request(PEER, PlanRequest(state.fleet.trainer_epoch, 1, 0))
    trainer.handler.send_payloads(PEER, PayloadRequest(state.fleet.trainer_epoch, 1, ("0.0", "0.1")))
    trainer.handler.serve_request()
    assert trainer.sent.take(WorkPlan) == trainer.sent.take(Payloads) == []
    state.journal.persist()
    audit(state)


def test_what_is_trained_again_may_have_been_lost_since(tmp_path: Path) -> None:
    """What the repeated step has lost counts as trained until that is committed."""
    state = landed(tmp_path, "0.0", "0.1")
    assert Training(state, "a").train() == ["0.0", "0.1"]
    damage(state, "0.1")
    trainer = Training(state, "b")  # it resumed from a checkpoint before that batch
    again = trainer.payloads(trainer.plan(0))
    state.journal.persist()
    assert state.ledger.batches.by_step[1].lost == {"0.1"} and state.ledger.buffer.account().trained == 2
    audit(state)
    assert trainer.train(again) == ["0.0"]
    assert state.ledger.buffer.account().trained == 1 and state.ledger.buffer.reasons["dropped/corrupt"] == 1
    audit(state)
    state.ledger.batches.forget_covered_plans(1)
    assert not state.ledger.batches.planned_episodes


# -- a power cut between a checkpoint and the sync of the store ---------------------------------------------


class Trainer(Training):
    """Trains batches of one group, and keeps the count that its checkpoints hold."""

    def __init__(self, state: RunState, incarnation: str, at: CheckpointManifest | None = None) -> None:
        super().__init__(state, incarnation, at.step if at else 0)
        self.step = at.step if at else 0
        self.total = at.trained_total if at else 0
        self.parent = at.step if at else -1
        self.uids = list[str]()
        self.checkpoints = state.run_dir / "checkpoints"

    def step_on(self) -> None:
        """Admit a group where none is ready, land it, train it."""
        buffer = self.state.ledger.buffer
        if not any(group.step == NO_STEP for group in buffer.live_groups.values()):
            buffer.admit_group(0.0)
        for episode in [e for e in buffer.episodes.values() if e.state in (State.PENDING, State.RUNNING)]:
            play(self.state, episode.uid, 1, end=True)
        uids = [planned.uid for planned in self.plan(0, self.step + 1).trajectories]
        self.uids += uids
        done = self.plan(1, self.step + 1)
        assert done.kind == "step"
        self.step += 1
        commit = Commit(self.state.fleet.trainer_epoch, self.step, done.plan_hash, tuple(uids), {})
        self.handler.record_commit(PEER, commit, 0.0)
        self.state.journal.persist()

    def save(self) -> CheckpointManifest:
        """What is on the disk before anybody is told."""
        self.total += len(self.uids)
        manifest = CheckpointManifest(
            step=self.step,
            trainer_epoch=self.state.fleet.trainer_epoch,
            parent=self.parent,
            trained=tuple(self.uids),
            trained_total=self.total,
        )
        path = self.checkpoints / f"step-{self.step}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        self.parent = self.step
        self.uids = []
        return manifest

    def tell(self, manifest: CheckpointManifest) -> None:
        message = Checkpointed(self.state.fleet.trainer_epoch, manifest.step, manifest.trained_total)
        self.handler.record_checkpoint(PEER, message, 0.0)
        self.state.journal.persist()


def cut(power: Power, state: RunState) -> RunState:
    """Only what was synced is left of the store; checkpoints are there."""
    power.keep("checkpoints/**")
    power.names[power.root].add("checkpoints")
    for path in (power.root / "checkpoints").rglob("*"):
        power._note(path)
    power._note(power.root / "checkpoints")
    state.journal.store.close()
    power.cut_power()
    return build(power.root)


@pytest.mark.parametrize("reported", [True, False], ids=["after a synced checkpoint", "before any"])
@pytest.mark.parametrize("checkpoints", [1, 2])
def test_what_the_checkpoints_say_is_trained_and_the_run_goes_on(
    tmp_path: Path, reported: bool, checkpoints: int
) -> None:
    """`checkpoints` of two steps each are not known to the store; a group was in flight."""
    power = Power(tmp_path)
    with power.recorded():
        state = build(tmp_path)
        trainer = Trainer(state, "a")
        state.journal.persist()
        trainer.step_on()
        if reported:
            trainer.tell(trainer.save())
        for _ in range(checkpoints):
            trainer.step_on(), trainer.step_on()
            manifest = trainer.save()
        state.ledger.buffer.admit_group(0.0)
        state.journal.persist()
    steps = trainer.step
    old_epoch = state.fleet.trainer_epoch
    again = cut(power, state)
    assert again.ledger.batches.committed == (1 if reported else 0)
    again.ledger.buffer.admit_group(0.0)  # by a coordinator that does not know yet
    play(again, next(reversed(again.ledger.buffer.episodes)), 1)
    resumed = Trainer(again, "b", manifest)
    again.journal.persist()
    assert (again.ledger.batches.committed, again.fleet.trainer_epoch) == (steps, old_epoch + 1)
    assert again.ledger.buffer.account().trained == manifest.trained_total == 2 * steps
    audit(again)
    for _ in range(2):
        resumed.step_on()
    assert again.ledger.buffer.account().trained == 2 * steps + 4
    audit(again)
    resumed.tell(resumed.save())
    again.journal.store.close()
    third = build(tmp_path)  # nothing is left to heal
    assert third.ledger.batches.committed == steps + 2
    audit(third)


def test_what_was_ready_and_is_trained_now_needs_no_payload(tmp_path: Path) -> None:
    """Its payload was lost in the same power cut."""
    power = Power(tmp_path)
    with power.recorded():
        state = build(tmp_path)
        trainer = Trainer(state, "a")
        trainer.step_on()
        trainer.tell(trainer.save())
        state.ledger.buffer.admit_group(0.0)
        for uid in ("1.0", "1.1"):
            play(state, uid, 1, end=True)
        state.journal.persist()
        power.keep("run.db*")  # with the index that says they are ready
        trainer.step_on()
        manifest = trainer.save()
    again = cut(power, state)
    assert again.ledger.buffer.state_counts()[State.READY] == 2
    Trainer(again, "b", manifest)
    again.journal.persist()
    assert again.ledger.buffer.account().trained == 4 and not again.ledger.buffer.reasons
    audit(again)
    assert not any(
        again.journal.store.reader.turn_frames("1.0", 1)
    )  # it would keep its segment, and all later ones


@pytest.mark.parametrize("ending", ["filtered", "filtered, not yet written", "failed, its sibling runs"])
def test_episodes_that_ended_otherwise_before_the_trainer_came_are_trained(
    tmp_path: Path, ending: str
) -> None:
    """The store was made anew from a copy, or lost power; workers are there before the trainer."""
    state = build(tmp_path, filter_zero_variance=True)
    trainer = Trainer(state, "a")
    state.journal.persist()
    trainer.step = 1
    trainer.uids = ["0.0", "0.1"]
    manifest = trainer.save()  # of a step that the store has lost
    group = state.ledger.buffer.admit_group(0.0)
    if ending.startswith("filtered"):
        for uid in group.members:
            play(state, uid, 1, end=True)
        assert state.ledger.buffer.state_counts()[State.FILTERED] == 2 and not state.ledger.buffer.live_groups
    else:
        for _ in range(1 + state.ledger.buffer.retries):
            play(state, "0.0", 1)
            state.ledger.buffer.fail_attempt(state.ledger.buffer.episodes["0.0"], FailReason.TOOL_ERROR, 0.0)
        play(state, "0.1", 1)
    if "not yet" not in ending:
        state.journal.persist()
    Trainer(state, "b", manifest)
    state.journal.persist()
    assert (
        state.ledger.buffer.account().trained == manifest.trained_total == 2
        and state.ledger.batches.committed == 1
    )
    assert not state.ledger.buffer.live_groups and not +state.ledger.buffer.reasons
    audit(state)
    state.journal.store.close()
    audit(build(tmp_path))


@pytest.mark.parametrize("wrong", ["gone", "of another run"])
def test_a_store_that_no_manifest_fits_is_refused(tmp_path: Path, wrong: str) -> None:
    state = build(tmp_path)
    trainer = Trainer(state, "a")
    trainer.step_on()
    state.journal.persist()
    trainer.step = 3
    trainer.uids = ["1.0", "1.1"]
    manifest = trainer.save()  # which does not know the batch that the store has
    if wrong == "gone":
        (tmp_path / "checkpoints" / "step-3" / "manifest.json").unlink()
    else:
        trainer.total += 2
    with pytest.raises(ProtocolError, match="belong to different runs"):
        Trainer(state, "b", manifest)
    state.journal.roll_back()
    assert state.ledger.batches.committed == 1 and state.ledger.buffer.account().trained == 2
    audit(state)
