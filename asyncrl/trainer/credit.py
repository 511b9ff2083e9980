"""From rewards to advantages: per episode as it streams in, or for a whole batch behind a barrier.

rewards ── − β·KL ──► advantage ──► / batch (whitening, std) ──► Example.advantage, .returns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from asyncrl.algorithms.credit import Trace, by_token
from asyncrl.algorithms.kl import kl_tokens
from asyncrl.algorithms.recipe import Recipe
from asyncrl.errors import ConfigError
from asyncrl.trainer.batch import Example
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult

Penalties = Mapping[tuple[str, int], Sequence[float]]  # (group, place among the siblings) → β·KL by turn


def credit(example: Example, recipe: Recipe, traces: Sequence[Trace] = ()) -> Example:
    """With its advantage and, where there is a critic, the returns V is trained on. ConfigError where agents
    have rewards of their own, and what compares whole episodes would mix them."""
    given = replace(example.credit_input(), traces=traces)
    advantage = recipe.advantage
    whole = advantage.greedy or advantage.whole_group or advantage.components or recipe.loss.whole_group
    if whole and given.own.agents:
        raise ConfigError(
            f"algorithm: advantage {recipe.advantage_name!r} with loss {recipe.loss_name!r} compares whole "
            "episodes, and agents earned rewards of their own; use dr_grpo or rloo with reinforce or ppo"
        )
    found = by_token(given, advantage)
    return replace(example, advantage=found, returns=None if example.value is None else found + example.value)


def rescaled(example: Example, change: Callable[[np.ndarray], np.ndarray]) -> Example:
    """With its advantages shifted or scaled by numbers of the batch; returns stay what V estimates."""
    assert example.advantage is not None
    return replace(example, advantage=change(example.advantage))


def penalised(example: Example, coefficient: float, estimator: str) -> tuple[Example, list[float]]:
    """With −β·KL on its token rewards (and in its own total), and the penalty of each turn. A token without
    finite log-probs has none."""
    assert example.reference is not None
    known = np.isfinite(example.mu) & np.isfinite(example.reference)
    mu, reference = (torch.from_numpy(np.where(known, x, 0.0)) for x in (example.mu, example.reference))
    divergence = kl_tokens(mu, reference, estimator)
    penalty = -coefficient * divergence.numpy()
    by_turn = np.zeros(max(example.turns, 1))
    np.add.at(by_turn, example.turn, penalty)
    planned = msgspec.structs.replace(example.planned, own=_minus_penalties(example.planned.own, by_turn))
    return replace(example, planned=planned, rewards=example.rewards + penalty), by_turn.tolist()


def with_penalised_siblings(example: Example, penalties: Penalties) -> Example:
    """The baseline sees the siblings' penalties as well; one whose payload was lost has none."""
    siblings = tuple(
        _minus_penalties(sibling, penalties.get((example.group, place), [0.0] * len(sibling.turn_rewards)))
        for place, sibling in enumerate(example.planned.siblings)
    )
    return replace(example, planned=msgspec.structs.replace(example.planned, siblings=siblings))


def _minus_penalties(result: EpisodeResult, by_turn: Sequence[float] | np.ndarray) -> EpisodeResult:
    turns = tuple(a + float(b) for a, b in zip(result.turn_rewards, by_turn, strict=False))
    reward = result.reward + float(np.sum(by_turn))
    return msgspec.structs.replace(result, reward=reward, turn_rewards=turns)


class Packed(msgspec.Struct, frozen=True):
    """Packs one episode for its way between ranks. `arrays`: float64, but `fresh`."""

    uid: str
    group: str
    own: EpisodeResult
    place: int  # among its siblings, as in PlannedTrajectory
    arrays: dict[str, bytes]

    def array(self, name: str) -> np.ndarray:
        return np.frombuffer(self.arrays[name], dtype=_dtype(name))


def _dtype(name: str) -> type:
    return np.bool_ if name == "fresh" else np.float64


def share(
    world: World, examples: Sequence[Example], arrays: Sequence[Mapping[str, np.ndarray]]
) -> list[Packed]:
    """Return the episodes of all ranks, by uid: the same list on all of them. A collective."""
    mine = []
    for planned, named in zip((e.planned for e in examples), arrays, strict=True):
        content = {name: array.astype(_dtype(name)).tobytes() for name, array in named.items()}
        mine.append(Packed(planned.uid, planned.group, planned.own, planned.place, content))
    everyone = [packed for part in world.gather_data(mine, list[Packed]) for packed in part]
    return sorted(everyone, key=lambda packed: packed.uid)


def share_penalties(world: World, pairs: Sequence[tuple[Example, Sequence[float]]]) -> Penalties:
    """Return the penalties of all ranks' episodes. A collective."""
    shared = share(world, [e for e, _ in pairs], [{"by_turn": np.asarray(turns)} for _, turns in pairs])
    return {(packed.group, packed.place): packed.array("by_turn").tolist() for packed in shared}


def share_traces(
    world: World, examples: Sequence[Example], arrays: Sequence[Mapping[str, np.ndarray]]
) -> list[Trace]:
    """The episodes of all ranks with these arrays, as algorithms see them. A collective."""
    return [
        Trace(packed.uid, packed.group, packed.own, **{name: packed.array(name) for name in packed.arrays})
        for packed in share(world, examples, arrays)
    ]
