"""Recorded batches trained once more, by one rank apart from the run: it writes nothing.

newest checkpoint before a step ──► the recorded plans since, in order ──► the metrics of each batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count

import torch

from asyncrl.buffer.batches import Batch
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.store.checkpoints import Checkpoints
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StoreError
from asyncrl.trainer import checkpoint, world
from asyncrl.trainer.batch import with_turns
from asyncrl.trainer.learner import Learner, Work
from asyncrl.wire.messages.trainer import PlannedTrajectory

Deal = Callable[[Sequence[PlannedTrajectory], int], list[list[list[PlannedTrajectory]]]]  # by rank
INITIAL = 0  # the step of the policy that a run begins with


def retrain(
    config: RunConfig, reader: RunReader, place: Checkpoints, step: int, budget: int = 0
) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, metrics) of each batch from the newest checkpoint before `step` up to it; steps are counted from
    1. `budget`: tokens of a micro-batch; 0: as recorded. On one CPU rank, with the run's configuration, the
    same as the run's to the last bit. ConfigError says which steps can be repeated, StoreError what cannot
    be read."""
    first = start_of(reader, place, step)
    torch.set_num_threads(config.launch.threads)
    torch.manual_seed(config.seed)
    try:
        learner = Learner(config, world.join(0, 1, device=config.model.device))
        learner.on_spike = "skip"  # the batch is looked at, not left out
        if first > INITIAL:
            checkpoint.load_checkpoint(place, first, learner)
        for number in range(first, step):
            plan = reader.plan(number)
            learner.budget = budget or plan.budget
            for work in recorded(config, reader, plan, learner.deal):
                learner.accumulate(work)
            yield number + 1, learner.finish()
    finally:
        world.leave()


def start_of(reader: RunReader, place: Checkpoints, step: int) -> int:
    """Step of the newest sound checkpoint from which every batch up to `step` is recorded. ConfigError."""
    known = reader.planned_steps()
    found = max(INITIAL, checkpoint.newest_step(place, before_step=step))
    if step > 0 and known.issuperset(range(found, step)):
        return found
    ends = {start: next(n for n in count(start) if n not in known) for start in (INITIAL, *place.steps())}
    longest = {end: start for start, end in sorted(ends.items(), reverse=True) if end > start}
    spans = [f"{start + 1} to {end}" for end, start in sorted(longest.items())]
    why = "it needs a checkpoint before it, and the plans and turns of all batches since"
    if reader.plan_hash(step) is None:
        why = "no such step was committed"
    raise ConfigError(
        f"step {step} cannot be replayed: {why}; these can: {', '.join(spans) or 'none'} (store.keep_bytes, "
        "checkpoint.keep and checkpoint.every decide)"
    )


def recorded(config: RunConfig, reader: RunReader, plan: Batch, deal: Deal) -> Iterator[Work]:
    """The parts of the plan as its ranks had them, one rank's after another's."""
    for part in plan.micros:
        episodes = map(reader.episode, part)
        temperature = config.rollout.temperature
        planned = [PlannedTrajectory.of(e, reader.baseline(e.group), temperature) for e in episodes]
        for share in deal(planned, plan.ranks):
            ordered = [p for p in chain(*share) if p.uid not in plan.lost]
            frames = [frame for p in ordered for frame in list(reader.frames(p.uid, p.frames))[::2]]
            if not all(frames):
                raise StoreError("turns of the batch were deleted meanwhile: set a larger store.keep_bytes")
            yield with_turns(ordered, frames)
