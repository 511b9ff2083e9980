"""What the parts that train share: a world of one rank, configurations, episodes, and the gradients of a real
Learner on a model with random weights."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from asyncrl.config import RunConfig, parse
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import score
from asyncrl.trainer.world import World, join, leave
from asyncrl.types import EpisodeResult, StopReason, Turn, VersionSpan
from asyncrl.wire.messages.trainer import PlannedTrajectory
from parts.common import Context, release

Episode = tuple[PlannedTrajectory, list[Turn]]
GROUP = 4  # episodes of one prompt
# On a CPU: over the size from which FSDP2 shards layer by layer, with micro-batches of about as much.
SMALL_BUT_LAYERED: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "vocab_size": 32_000,
}


@contextmanager
def one_rank(context: Context) -> Iterator[World]:
    world = join(0, 1, device=context.kind)
    try:
        yield world
    finally:
        leave()


def model_of(context: Context, name: str) -> Path:
    made = context.random_model(name, **(SMALL_BUT_LAYERED if context.small else {}))
    release(context)  # it is made on the GPU
    return made


def config_of(
    path: Path, device: str, dtype: str, rows: int, length: int, lora_rank: int = 0, **trainer: Any
) -> RunConfig:
    """Micro-batches of `rows` rows of `length` tokens. Gradients are not clipped."""
    return parse(
        {
            "name": "kit",
            "model": {"path": str(path), "device": device, "dtype": dtype, "lora_rank": lora_rank},
            "data": {"train": "none"},
            "rollout": {"max_tokens": length, "max_new_tokens": length // 2},
            "trainer": {"micro_batch_tokens": rows * length, "grad_clip": 0.0, "packing": "padded"} | trainer,
        }
    )


def full_rows(rows: int, length: int, version: int = 0) -> list[Episode]:
    """Rows that share nothing and are as long as may be, sampled by a version."""
    return _episodes([[1 + index] + [2 + index] * (length - 1) for index in range(rows)], None, version)


def mixed_rows(learner: Learner, count: int, length: int) -> list[Episode]:
    """Random rows of half the length to all of it, with the learner's own log-probs."""
    rng, size = random.Random(0), learner.policy.vocabulary
    rows = [[rng.randrange(size) for _ in range(rng.randint(length // 2, length))] for _ in range(count)]
    return _episodes(rows, learner)


def _episodes(rows: Sequence[list[int]], learner: Learner | None, version: int = 0) -> list[Episode]:
    """One turn each, of all tokens but the first; every second one earns a reward."""
    found = []
    for index, ids in enumerate(rows):
        count, first = len(ids) - 1, index - index % GROUP
        siblings = tuple(
            EpisodeResult(float(place % 2), len(row) - 1, (float(place % 2),))
            for place, row in enumerate(rows[first : first + GROUP])
        )
        mu = (-10.0,) * count
        if learner is not None:
            mu = score(learner.policy, tuple(ids), learner.world.device)
        spans = (VersionSpan(0, count, version, version),)
        turn = Turn(0, (ids[0],), tuple(ids[1:]), mu, spans, StopReason.STOP)
        place, group = index % GROUP, f"{index // GROUP}"
        planned = PlannedTrajectory(
            f"{group}/{place}", group, 1, siblings[place], siblings, place, len(siblings), 1.0
        )
        found.append((planned, [turn]))
    return found


def gradients(learner: Learner, episodes: Sequence[Episode]) -> dict[str, Tensor]:
    """Of a batch of these, in main memory, as the optimizer would be given them; no step is taken."""
    found: dict[str, Tensor] = {}

    def capture() -> None:
        for name, parameter in learner.policy.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.full_tensor().to("cpu", copy=True)  # type: ignore[attr-defined]

    with mock.patch.object(learner.optimizer, "step", capture):
        learner.accumulate(episodes)
        learner.finish()
    learner.step -= 1
    return found


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of a number, as a share of the norm of all wanted."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    norm = torch.stack([tensor.double().norm() for tensor in wanted.values()]).norm()
    return float(max((found[name] - wanted[name]).abs().max() for name in wanted) / norm)
