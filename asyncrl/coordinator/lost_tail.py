"""Commits that a power cut took from the store come from the checkpoints' manifests.

A checkpoint is fsynced before the coordinator hears of it, and only then is the store. In between, the store
may lose all since the checkpoint before: commits, plans, even that groups were issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asyncrl.buffer.records import State
from asyncrl.coordinator.state import RunState, log
from asyncrl.errors import ProtocolError
from asyncrl.store.checkpoints import CheckpointError, checkpoints_of
from asyncrl.types import DropReason

ADVICE = "restore both from the same copy"


def recover(state: RunState, step: int, now: float) -> None:
    """The trainer has resumed from the checkpoint of `step`, beyond what the store has committed.
    ProtocolError when the manifests since then are not there, or do not fit what the store holds."""
    known = state.batches.committed
    checkpoints = checkpoints_of(state.config, state.run_dir)

    refusal = (
        f"the trainer's checkpoint is of step {step}, the run store knows {known} steps: checkpoint and "
        "store are not of one run"
    )
    with ProtocolError.instead_of(CheckpointError, text=refusal, advice=ADVICE):
        manifests = checkpoints.lineage(step, known)

    state.buffer.cohorts.exclude_step(known)
    trained = [uid for manifest in manifests for uid in manifest.trained]
    before = state.buffer.counts()[State.TRAINED]
    _set_trained(state, trained, step, now)
    rows = state.buffer.counts()[State.TRAINED] - before

    if before + rows != manifests[-1].trained_total:
        raise ProtocolError(
            f"{refusal} ({manifests[-1].trained_total} trajectories, not {before + rows}); {ADVICE}"
        )

    state.batches.skip_to(step)
    for uid in trained:  # nobody needs its payload
        state.store.forget_frames(uid)

    state.store.forget_plans(range(known, step), rows)
    state.store.put_commit(step, manifests[-1].trainer_epoch, "")
    state.store.put_checkpoint(step)
    state.store.sync()

    log.warning(
        "the run store had lost steps %d to %d: %d trajectories are trained, by the checkpoints' manifests",
        known + 1,
        step,
        rows,
    )


def _set_trained(state: RunState, uids: Iterable[str], step: int, now: float) -> None:
    """These are trained, whatever the store knew of them; what else it held of their groups is dropped. Some
    may be over in another way: workers may have sampled them again before the trainer reported in."""
    buffer = state.buffer
    groups = set[int]()

    for uid in uids:
        number = int(uid.partition(".")[0])
        while number >= buffer.next_group:  # issued after what is left of the store
            buffer.admit(buffer.committed, now)

        episode = buffer.unwritten(uid) or state.store.read.find_episode(uid)
        if episode is None or episode.state is State.TRAINED:
            continue  # by a step that the store knows

        buffer.reasons -= Counter([f"{episode.state}/{episode.reason}"])  # if this process counted it
        if number in buffer.live:
            groups.add(number)
            buffer.take(episode, step - 1)
        else:
            episode.step = step - 1
            buffer.correct(episode, State.TRAINED)

    left = set(uids)
    for group in [buffer.live[number] for number in groups]:
        members = [buffer.episodes[uid] for uid in group.members]
        for episode in members:
            if not episode.state.over and episode.uid not in left:
                buffer.drop(episode, DropReason.CORRUPT)
        buffer.trained([episode for episode in members if not episode.state.over])
