"""A learner with random weights that are made on the device, and episodes for it; for the parts that take the
trainer's own steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import init_empty_weights
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from asyncrl.config import parse
from asyncrl.trainer.gradient_check import LAYOUTS
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult, Generation, StopReason, Turn, VersionSpan
from asyncrl.weights.manifest import TensorSpec
from asyncrl.weights.names import FilePiece
from asyncrl.weights.ranges import file_header
from asyncrl.wire.messages.trainer import PlannedTrajectory
from parts.common import Context

Episode = tuple[PlannedTrajectory, list[Turn]]
PROMPT = 128
SPREAD = 0.02  # standard deviation of the weights


def make_learner(
    context: Context, world: World, name: str, tokens: int, *, lora_rank: int = 0, **trainer: Any
) -> Learner:
    """A rank as a run has it: FSDP2 over one device, bfloat16 with float32 weights, AdamW, packed rows of at
    most `tokens` in a micro-batch."""
    path = context.work / name
    write_sizes(context.model_config(name), path)
    config = parse(
        {
            "name": "check",
            "model": {"path": str(path), "dtype": "bfloat16", "device": context.kind, "lora_rank": lora_rank},
            "data": {"train": "none"},
            "rollout": {"max_tokens": tokens, "max_new_tokens": 16},
            "algorithm": {"correction": {"truncate": {}}},  # the log-probs are made up
            "trainer": {"packing": "packed", "micro_batch_tokens": tokens, **trainer},
        }
    )
    with random_weights():
        return Learner(config, world)


def write_sizes(config: Any, directory: Path) -> None:
    """Write config.json, and a file of weights that is a header and a hole: the estimate of memory reads
    shapes there."""
    config.save_pretrained(directory)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # emptying parameters one by one separates shared ones
    layout = tuple(TensorSpec(name, tuple(p.shape), "bfloat16") for name, p in model.named_parameters())
    with (directory / "model.safetensors").open("wb") as weights:
        begin = weights.write(file_header(layout))
        weights.truncate(begin + sum(spec.nbytes for spec in layout))


@contextmanager
def random_weights() -> Iterator[None]:
    """Inside, the trainer fills its shards with random numbers where they lie: no gigabytes are written and
    read. Nor does it check gradients."""
    with (
        mock.patch("asyncrl.trainer.loading.locate_tensors", _everywhere),
        mock.patch("asyncrl.trainer.loading.fill_shards", _randomise),
        without_gradient_check(),
    ):
        yield


@contextmanager
def without_gradient_check() -> Iterator[None]:
    """Inside, the trainer does not compare packed rows and trees with rows one by one, as parts do: for that
    layers would be compiled for padded rows, too."""
    passed = dict.fromkeys(LAYOUTS, "")
    with mock.patch("asyncrl.trainer.packing.cached_gradient_check", return_value=passed):
        yield


def _everywhere(model: Any, path: str, file_tensors: Any) -> dict[FilePiece, str]:
    state = model.state_dict(keep_vars=True)
    return {FilePiece(name, name, tuple(tensor.shape)): path for name, tensor in state.items()}


@torch.no_grad()
def _randomise(model: Any, file_of_piece: dict[FilePiece, str], label: str) -> None:
    state = model.state_dict(keep_vars=True)
    for piece in file_of_piece:
        parameter = state[piece.parameter]
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if shard.dim() == 1:  # of a norm
            shard.fill_(1.0)
        else:
            shard.normal_(0, SPREAD)


def episodes(learner: Learner, lengths: Sequence[int]) -> list[Episode]:
    """Rows of so many tokens, sampled by the version that the learner is about to train, in groups of two of
    which one was right: so each has an advantage."""
    rng = random.Random(learner.step)
    step = learner.step
    words = learner.policy.vocabulary
    made_episodes = []
    for number, length in enumerate(lengths):
        prompt = min(PROMPT, length // 2)
        ids = tuple(rng.randrange(words) for _ in range(length))
        new = length - prompt
        spans = (VersionSpan(0, new, step, step),)
        turn = Turn(0, ids[:prompt], Generation(ids[prompt:], (-10.0,) * new, spans, StopReason.STOP))
        results = tuple(EpisodeResult(float(won), new) for won in (1, 0))
        member_index = number % 2
        member_result = results[member_index]
        planned = PlannedTrajectory(
            f"{step}/{number}", f"{number // 2}", 1, member_result, results, member_index, 2, 1.0
        )
        made_episodes.append((planned, [turn]))
    return made_episodes


def train(learner: Learner, step_episodes: list[Episode]) -> dict[str, float]:
    """One optimizer step on them, in one micro-batch."""
    learner.accumulate(step_episodes)
    return learner.finish()
