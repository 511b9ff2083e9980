"""From rewards to advantages: per episode as it streams in, or for a whole batch behind a barrier.

rewards ── − β·KL ──► advantage ──► / batch (whitening, std) ──► TrainingSample.advantage, .returns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import msgspec
import numpy as np
import torch

from asyncrl.algorithms.credit import Trace, by_token
from asyncrl.algorithms.kl import kl_tokens
from asyncrl.algorithms.recipe import Recipe
from asyncrl.errors import ConfigError
from asyncrl.trainer.batch import TrainingSample
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult

TurnPenalties = Mapping[tuple[str, int], Sequence[float]]  # (group, index of the sibling) → −β·KL by turn


def with_advantages(sample: TrainingSample, recipe: Recipe, traces: Sequence[Trace] = ()) -> TrainingSample:
    """Return the sample with its advantages and, where there is a critic, the returns that V is trained on.
    ConfigError where agents have rewards of their own, and the recipe compares whole episodes, which would
    mix them."""
    advantage_input = replace(sample.advantage_input(), traces=traces)
    estimator = recipe.advantage
    compares_episodes = (
        estimator.greedy or estimator.whole_group or estimator.components or recipe.loss.whole_group
    )

    if compares_episodes and advantage_input.own.agents:
        raise ConfigError(
            f"algorithm: advantage {recipe.advantage_name!r} with loss {recipe.loss_name!r} compares whole "
            "episodes, but agents earned separate rewards; use dr_grpo or rloo with reinforce or ppo"
        )

    token_advantages = by_token(advantage_input, estimator)

    return replace(
        sample,
        advantage=token_advantages,
        returns=None if sample.value is None else token_advantages + sample.value,
    )


def with_scaled_advantages(
    sample: TrainingSample, scale_advantages: Callable[[np.ndarray], np.ndarray]
) -> TrainingSample:
    """Return the sample with its advantages shifted or scaled by numbers of the batch; the returns stay V's
    targets."""
    assert sample.advantage is not None
    return replace(sample, advantage=scale_advantages(sample.advantage))


def with_kl_penalty(
    sample: TrainingSample, coefficient: float, estimator: str
) -> tuple[TrainingSample, list[float]]:
    """Return the sample with −β·KL on its token rewards (and in its total reward), and the penalty of each
    turn. A token without finite log-probs has no penalty."""
    assert sample.reference is not None
    is_finite = np.isfinite(sample.rollout_logprobs) & np.isfinite(sample.reference)
    rollout_logprobs, reference = (
        torch.from_numpy(np.where(is_finite, logprobs, 0.0))
        for logprobs in (sample.rollout_logprobs, sample.reference)
    )
    penalty = -coefficient * kl_tokens(rollout_logprobs, reference, estimator).numpy()
    turn_penalties = np.zeros(max(sample.turns, 1))
    np.add.at(turn_penalties, sample.turn, penalty)
    planned = msgspec.structs.replace(
        sample.planned, own=_with_turn_penalties(sample.planned.own, turn_penalties)
    )

    return replace(sample, planned=planned, rewards=sample.rewards + penalty), turn_penalties.tolist()


def with_penalised_siblings(sample: TrainingSample, penalties: TurnPenalties) -> TrainingSample:
    """Return the sample with the siblings' penalties in their rewards, its own among them; a sibling whose
    payload was lost has none."""
    siblings = tuple(
        _with_turn_penalties(
            sibling, penalties.get((sample.group, position), [0.0] * len(sibling.turn_rewards))
        )
        for position, sibling in enumerate(sample.planned.siblings)
    )
    return replace(sample, planned=msgspec.structs.replace(sample.planned, siblings=siblings))


def _with_turn_penalties(
    result: EpisodeResult, turn_penalties: Sequence[float] | np.ndarray
) -> EpisodeResult:
    turn_rewards = tuple(
        reward_of_turn + float(penalty)
        for reward_of_turn, penalty in zip(result.turn_rewards, turn_penalties, strict=False)
    )
    reward = result.reward + float(np.sum(turn_penalties))
    return msgspec.structs.replace(result, reward=reward, turn_rewards=turn_rewards)


class PackedEpisode(msgspec.Struct, frozen=True):
    """Holds one episode on its way between ranks. `arrays`: bytes of float64 numbers, or of booleans for
    `trainable`."""

    uid: str
    group: str
    own: EpisodeResult
    place: int  # among its siblings, as in PlannedTrajectory
    arrays: dict[str, bytes]

    def array(self, name: str) -> np.ndarray:
        return np.frombuffer(self.arrays[name], dtype=_array_dtype(name))


def _array_dtype(name: str) -> type:
    return np.bool_ if name == "trainable" else np.float64


def gather_episodes(
    world: World, samples: Sequence[TrainingSample], arrays: Sequence[Mapping[str, np.ndarray]]
) -> list[PackedEpisode]:
    """Return the episodes of all ranks, sorted by uid: the same list on all ranks. A collective."""
    rank_episodes = []
    for planned, named_arrays in zip((sample.planned for sample in samples), arrays, strict=True):
        encoded_arrays = {
            name: array.astype(_array_dtype(name)).tobytes() for name, array in named_arrays.items()
        }
        rank_episodes.append(
            PackedEpisode(planned.uid, planned.group, planned.own, planned.place, encoded_arrays)
        )

    all_episodes = chain.from_iterable(world.gather_data(rank_episodes, list[PackedEpisode]))
    return sorted(all_episodes, key=lambda packed: packed.uid)


def gather_traces(
    world: World, samples: Sequence[TrainingSample], arrays: Sequence[Mapping[str, np.ndarray]]
) -> list[Trace]:
    """Return the episodes of all ranks with these arrays, in the form that algorithms read. A collective."""
    return [
        Trace(packed.uid, packed.group, packed.own, **{name: packed.array(name) for name in packed.arrays})
        for packed in gather_episodes(world, samples, arrays)
    ]
