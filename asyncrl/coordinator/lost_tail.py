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


def recover_commits(state: RunState, step: int, now: float) -> None:
    """The trainer has resumed from the checkpoint of `step`, beyond what the store has committed.
    ProtocolError when the manifests since then are not there, or do not fit what the store holds."""
    known_steps = state.batches.committed
    checkpoints = checkpoints_of(state.config, state.run_dir)

    refusal = (
        f"the trainer's checkpoint is of step {step}, the run store knows {known_steps} steps: checkpoint and "
        "store are not of one run"
    )
    with ProtocolError.instead_of(CheckpointError, text=refusal, advice=ADVICE):
        manifests = checkpoints.lineage(step, known_steps)

    state.buffer.cohorts.exclude_step(known_steps)
    trained_uids = [uid for manifest in manifests for uid in manifest.trained]
    trained_before = state.buffer.state_counts()[State.TRAINED]
    _mark_trained(state, trained_uids, step, now)
    recovered_count = state.buffer.state_counts()[State.TRAINED] - trained_before

    if trained_before + recovered_count != manifests[-1].trained_total:
        raise ProtocolError(
            f"{refusal} ({manifests[-1].trained_total} trajectories, not {trained_before + recovered_count}); {ADVICE}"
        )

    state.batches.skip_to(step)
    for uid in trained_uids:  # nobody needs its payload
        state.store.forget_frames(uid)

    state.store.forget_plans(range(known_steps, step), recovered_count)
    state.store.put_commit(step, manifests[-1].trainer_epoch, "")
    state.store.put_checkpoint(step)
    state.store.sync()

    log.warning(
        "the run store had lost steps %d to %d: %d trajectories are trained, by the checkpoints' manifests",
        known_steps + 1,
        step,
        recovered_count,
    )


def _mark_trained(state: RunState, uids: Iterable[str], step: int, now: float) -> None:
    """These are trained, whatever the store knew of them; what else it held of their groups is dropped. Some
    may be over in another way: workers may have sampled them again before the trainer reported in."""
    buffer = state.buffer
    live_groups = set[int]()

    for uid in uids:
        group_id = int(uid.partition(".")[0])
        while group_id >= buffer.next_group:  # issued after what is left of the store
            buffer.admit(buffer.committed, now)

        episode = buffer.find_unwritten(uid) or state.store.read.find_episode(uid)
        if episode is None or episode.state is State.TRAINED:
            continue  # by a step that the store knows

        buffer.reasons -= Counter([f"{episode.state}/{episode.reason}"])  # if this process counted it
        if group_id in buffer.live:
            live_groups.add(group_id)
            buffer.take_episode(episode, step - 1)
        else:
            episode.step = step - 1
            buffer.correct_state(episode, State.TRAINED)

    trained_uids = set(uids)
    for group in [buffer.live[group_id] for group_id in live_groups]:
        group_members = [buffer.episodes[uid] for uid in group.members]
        for episode in group_members:
            if not episode.state.over and episode.uid not in trained_uids:
                buffer.drop_episode(episode, DropReason.CORRUPT)
        buffer.mark_trained([episode for episode in group_members if not episode.state.over])
