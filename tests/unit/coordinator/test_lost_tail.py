"""A power cut after a checkpoint was in place, and before the store was synced for it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl.buffer.records import State
from asyncrl.coordinator.state import RunState
from asyncrl.errors import ProtocolError
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.types import FailReason
from asyncrl.wire.messages.trainer import Checkpointed, Commit
from tests.unit.coordinator import test_state
from tests.unit.coordinator.test_lost_payloads import PEER, Power, Training, audit, play
from tests.unit.coordinator.test_state import build

samples = test_state.samples  # the fixture


class Trainer(Training):
    """Trains batches of one group, and keeps the count that its checkpoints hold."""

    def __init__(self, state: RunState, incarnation: str, at: CheckpointManifest | None = None) -> None:
        super().__init__(state, incarnation, at.step if at else 0)
        self.step, self.total = (at.step, at.trained_total) if at else (0, 0)
        self.parent, self.uids = (at.step if at else -1), list[str]()
        self.checkpoints = state.run_dir / "checkpoints"

    def step_on(self) -> None:
        """Admit a group where none is ready, land it, train it."""
        buffer = self.state.buffer
        if not any(group.step < 0 for group in buffer.live.values()):
            buffer.admit(self.step, 0.0)
        for episode in [e for e in buffer.episodes.values() if e.state in (State.PENDING, State.RUNNING)]:
            play(self.state, episode.uid, 1, end=True)
        uids = [planned.uid for planned in self.plan(0, self.step).trajectories]
        self.uids += uids
        done = self.plan(1, self.step)
        assert done.kind == "step"
        self.step += 1
        commit = Commit(self.state.trainer_epoch, self.step, done.plan_hash, tuple(uids), {})
        self.handler.commit(PEER, commit, 0.0)
        self.state.persist()

    def save(self) -> CheckpointManifest:
        """What is on the disk before anybody is told."""
        self.total += len(self.uids)
        manifest = CheckpointManifest(
            step=self.step,
            trainer_epoch=self.state.trainer_epoch,
            parent=self.parent,
            trained=tuple(self.uids),
            trained_total=self.total,
        )
        path = self.checkpoints / f"step-{self.step}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        self.parent, self.uids = self.step, []
        return manifest

    def tell(self, manifest: CheckpointManifest) -> None:
        epoch, path = self.state.trainer_epoch, f"step-{manifest.step}"
        message = Checkpointed(epoch, manifest.step, path, manifest.trained_total)
        self.handler.checkpointed(PEER, message, 0.0)
        self.state.persist()


def cut(power: Power, state: RunState) -> RunState:
    """Only what was synced is left of the store; checkpoints are there."""
    power.keep("checkpoints/**")
    power.names[power.root].add("checkpoints")
    for path in (power.root / "checkpoints").rglob("*"):
        power._note(path)
    power._note(power.root / "checkpoints")
    state.store.close()
    power.cut_power()
    return build(power.root)


@pytest.mark.parametrize("told", [True, False], ids=["after a synced checkpoint", "before any"])
@pytest.mark.parametrize("checkpoints", [1, 2])
def test_what_the_checkpoints_say_is_trained_and_the_run_goes_on(
    tmp_path: Path, told: bool, checkpoints: int
) -> None:
    """`checkpoints` of two steps each are not known to the store; a group was in flight."""
    power = Power(tmp_path)
    with power.recorded():
        state = build(tmp_path)
        trainer = Trainer(state, "a")
        state.persist()
        trainer.step_on()
        if told:
            trainer.tell(trainer.save())
        for _ in range(checkpoints):
            trainer.step_on(), trainer.step_on()
            manifest = trainer.save()
        state.buffer.admit(trainer.step, 0.0)
        state.persist()
    steps, old_epoch = trainer.step, state.trainer_epoch
    again = cut(power, state)
    assert again.batches.committed == (1 if told else 0)
    again.buffer.admit(0, 0.0)  # by a coordinator that does not know yet
    play(again, next(reversed(again.buffer.episodes)), 1)
    resumed = Trainer(again, "b", manifest)
    again.persist()
    assert (again.batches.committed, again.trainer_epoch) == (steps, old_epoch + 1)
    assert again.buffer.flow().trained == manifest.trained_total == 2 * steps
    audit(again)
    for _ in range(2):
        resumed.step_on()
    assert again.buffer.flow().trained == 2 * steps + 4
    audit(again)
    resumed.tell(resumed.save())
    again.store.close()
    third = build(tmp_path)  # nothing is left to heal
    assert third.batches.committed == steps + 2
    audit(third)


def test_what_was_ready_and_is_trained_now_needs_no_payload(tmp_path: Path) -> None:
    """Its payload was lost in the same power cut."""
    power = Power(tmp_path)
    with power.recorded():
        state = build(tmp_path)
        trainer = Trainer(state, "a")
        trainer.step_on()
        trainer.tell(trainer.save())
        state.buffer.admit(1, 0.0)
        for uid in ("1.0", "1.1"):
            play(state, uid, 1, end=True)
        state.persist()
        power.keep("run.db*")  # with the index that says they are ready
        trainer.step_on()
        manifest = trainer.save()
    again = cut(power, state)
    assert again.buffer.counts()[State.READY] == 2
    Trainer(again, "b", manifest)
    again.persist()
    assert again.buffer.flow().trained == 4 and not again.buffer.reasons
    audit(again)
    assert not any(again.store.read.frames("1.0", 1))  # it would keep its segment, and all later ones


@pytest.mark.parametrize("ending", ["filtered", "filtered, not yet written", "failed, its sibling runs"])
def test_episodes_that_ended_otherwise_before_the_trainer_came_are_trained(
    tmp_path: Path, ending: str
) -> None:
    """The store was made anew from a copy, or lost power; workers are there before the trainer."""
    state = build(tmp_path, filter_zero_variance=True)
    trainer = Trainer(state, "a")
    state.persist()
    trainer.step, trainer.uids = 1, ["0.0", "0.1"]
    manifest = trainer.save()  # of a step that the store has lost
    group = state.buffer.admit(0, 0.0)
    if ending.startswith("filtered"):
        for uid in group.members:
            play(state, uid, 1, end=True)
        assert state.buffer.counts()[State.FILTERED] == 2 and not state.buffer.live
    else:
        for _ in range(1 + state.buffer.retries):
            play(state, "0.0", 1)
            state.buffer.fail(state.buffer.episodes["0.0"], FailReason.TOOL_ERROR, 0.0)
        play(state, "0.1", 1)
    if "not yet" not in ending:
        state.persist()
    Trainer(state, "b", manifest)
    state.persist()
    assert state.buffer.flow().trained == manifest.trained_total == 2 and state.batches.committed == 1
    assert not state.buffer.live and not +state.buffer.reasons
    audit(state)
    state.store.close()
    audit(build(tmp_path))


@pytest.mark.parametrize("wrong", ["gone", "of another run"])
def test_a_store_that_no_manifest_fits_is_refused(tmp_path: Path, wrong: str) -> None:
    state = build(tmp_path)
    trainer = Trainer(state, "a")
    trainer.step_on()
    state.persist()
    trainer.step, trainer.uids = 3, ["1.0", "1.1"]
    manifest = trainer.save()  # which does not know the batch that the store has
    if wrong == "gone":
        (tmp_path / "checkpoints" / "step-3" / "manifest.json").unlink()
    else:
        trainer.total += 2
    with pytest.raises(ProtocolError, match="not of one run"):
        Trainer(state, "b", manifest)
    state.rollback()
    assert state.batches.committed == 1 and state.buffer.flow().trained == 2
    audit(state)
