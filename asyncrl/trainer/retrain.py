"""Trains recorded batches once more, by one rank apart from the run, without writing anything.

newest checkpoint before a step ──► the recorded plans since, in order ──► the metrics of each batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count

import torch

from asyncrl.buffer.batches import Batch
from asyncrl.config import RunConfig
from asyncrl.data.run_images import RunImages
from asyncrl.errors import ConfigError
from asyncrl.store.checkpoints import Checkpoints
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StoreError
from asyncrl.trainer import checkpoint, world
from asyncrl.trainer.batch import with_turns
from asyncrl.trainer.images import digests_of
from asyncrl.trainer.learner import Learner, PlannedWork
from asyncrl.wire.messages.trainer import PlannedTrajectory

Partition = Callable[[Sequence[PlannedTrajectory], int], list[list[list[PlannedTrajectory]]]]  # by rank
INITIAL = 0  # the step of the policy that a run begins with


def retrain(
    config: RunConfig,
    reader: RunReader,
    images: RunImages,
    checkpoints: Checkpoints,
    step: int,
    token_budget: int = 0,
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, metrics) of each batch from the newest checkpoint before `step` up to it; steps are
    counted from 1. `token_budget`: tokens of a micro-batch; 0: as recorded. On one CPU rank, with the run's
    configuration, the metrics equal the run's to the last bit. ConfigError names the steps that can be
    repeated, StoreError an unreadable record."""
    checkpoint_step = start_step(reader, checkpoints, step)
    torch.set_num_threads(config.launch.threads)
    torch.manual_seed(config.seed)

    try:
        learner = Learner(config, world.join_ranks(0, 1, device=config.model.device))
        learner.on_spike = "skip"  # the batch is looked at, not left out
        if checkpoint_step > INITIAL:
            checkpoint.load_checkpoint(checkpoints, checkpoint_step, learner)

        for repeated_step in range(checkpoint_step + 1, step + 1):
            plan = reader.plan(repeated_step)
            learner.token_budget = token_budget or plan.budget
            for work in recorded_work(config, reader, plan, learner.partition):
                if digests := digests_of(turn for _, turns in work for turn in turns):
                    work = learner.read_images(work, images.files_of(digests))
                learner.accumulate(work)
            yield repeated_step, learner.finish()
    finally:
        world.leave_ranks()


def start_step(reader: RunReader, checkpoints: Checkpoints, step: int) -> int:
    """Return the step of the newest sound checkpoint from which every batch up to `step` is recorded.
    ConfigError if there is none."""
    planned_steps = reader.planned_steps()
    checkpoint_step = max(INITIAL, checkpoint.newest_step(checkpoints, before_step=step))
    if step > 0 and planned_steps.issuperset(range(checkpoint_step + 1, step + 1)):
        return checkpoint_step
    end_of_start = {
        start: next(end for end in count(start) if end + 1 not in planned_steps)
        for start in (INITIAL, *checkpoints.steps())
    }
    start_of_end = {end: start for start, end in sorted(end_of_start.items(), reverse=True) if end > start}
    spans = [f"{start + 1} to {end}" for end, start in sorted(start_of_end.items())]
    reason = "a replay needs an earlier checkpoint, and the plans and turns of all batches since then"
    if reader.plan_hash(step) is None:
        reason = "this step was not committed"
    raise ConfigError(
        f"step {step} cannot be replayed: {reason}; replayable steps: {', '.join(spans) or 'none'} (depends "
        "on store.keep_bytes, checkpoint.keep and checkpoint.every)"
    )


def recorded_work(
    config: RunConfig, reader: RunReader, plan: Batch, partition: Partition
) -> Iterator[PlannedWork]:
    """Yield the parts of the plan as its ranks trained them, rank by rank."""
    for uids in plan.parts:
        planned = [
            PlannedTrajectory.of(episode, reader.baseline(episode.group), config.rollout.temperature)
            for episode in map(reader.episode, uids)
        ]
        for rank_parts in partition(planned, plan.ranks):
            ordered = [trajectory for trajectory in chain(*rank_parts) if trajectory.uid not in plan.lost]
            frames = [
                frame
                for trajectory in ordered
                for frame in list(reader.turn_frames(trajectory.uid, trajectory.frames))[::2]
            ]
            if not all(frames):
                raise StoreError(
                    "turns of the batch were deleted in the meantime; set a larger store.keep_bytes"
                )
            yield with_turns(ordered, frames)
