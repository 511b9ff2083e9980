"""Recovers commits that a power cut took from the store, from the manifests of checkpoints.

A checkpoint is fsynced before the coordinator hears of it, and the store is fsynced only then. In between, a
power cut may take everything since the previous checkpoint from the store: commits, plans, even the issue of
groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asyncrl.buffer.records import State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.coordinator.state import RunState, log
from asyncrl.errors import ProtocolError
from asyncrl.store.checkpoints import CheckpointError, checkpoints_of
from asyncrl.store.reader import RunReader
from asyncrl.types import DropReason

ADVICE = "restore both from the same copy"


def recover_commits(state: RunState, step: int, now: float) -> None:
    """Recover the commits up to the trainer's checkpoint of `step`, which the store does not have.

    ProtocolError if manifests are missing, or do not fit the store.
    """
    ledger = state.ledger
    store = state.journal.store
    known_steps = ledger.batches.committed
    checkpoints = checkpoints_of(state.config, state.run_dir)

    refusal = (
        f"the trainer's checkpoint is from step {step}, but the run store ends at step {known_steps}, and "
        "the two seem to belong to different runs"
    )
    with ProtocolError.instead_of(CheckpointError, text=refusal, advice=ADVICE):
        manifests = checkpoints.lineage(step, known_steps)

    trained_uids = [uid for manifest in manifests for uid in manifest.trained]
    trained_before = ledger.buffer.state_counts()[State.TRAINED]
    _mark_trained(ledger.buffer, store.reader, trained_uids, step, now)
    trained_now = ledger.buffer.state_counts()[State.TRAINED]
    recovered_count = trained_now - trained_before

    expected = manifests[-1].trained_total
    if trained_now != expected:
        raise ProtocolError(
            f"{refusal} (expected {expected} trajectories used for training, found {trained_now}); {ADVICE}"
        )

    ledger.batches.skip_to(step)
    for uid in trained_uids:  # payloads of trained episodes are not needed
        store.forget_frames(uid)

    store.forget_plans(known_steps + 1, step, recovered_count)
    store.put_commit(step, manifests[-1].trainer_epoch, "")
    store.put_checkpoint(step)
    store.request_sync()

    log.warning(
        "the run store had lost steps %d to %d; according to the checkpoint manifests, these steps trained "
        "on %d trajectories",
        known_steps + 1,
        step,
        recovered_count,
    )


def _mark_trained(
    buffer: ReplayBuffer, reader: RunReader, uids: Iterable[str], step: int, now: float
) -> None:
    """Set episodes to trained, whatever their state in the store, and drop the other members of their groups.

    Some may already be in another final state, as workers may have sampled them again before the trainer
    reported.
    """
    live_groups = set[int]()

    for uid in uids:
        group_id = int(uid.partition(".")[0])
        while group_id >= buffer.next_group:  # issued in the lost part of the store
            buffer.admit_group(now)

        episode = buffer.find_unwritten(uid) or reader.find_episode(uid)
        if episode is None or episode.state is State.TRAINED:
            continue  # trained by a step in the store

        # This process may have counted the other state.
        buffer.reasons -= Counter([f"{episode.state}/{episode.reason}"])
        if group_id in buffer.live_groups:
            live_groups.add(group_id)
            buffer.take_episode(episode, step)
        else:
            episode.step = step
            buffer.correct_state(episode, State.TRAINED)

    trained_uids = set(uids)
    for group in [buffer.live_groups[group_id] for group_id in live_groups]:
        group_members = [buffer.episodes[uid] for uid in group.members]
        for episode in group_members:
            if not episode.state.over and episode.uid not in trained_uids:
                buffer.drop_episode(episode, DropReason.CORRUPT)
        buffer.mark_trained([episode for episode in group_members if not episode.state.over])
