"""Defines the inputs and outputs of an advantage, and how one is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from asyncrl.algorithms.renamed import renamed_attribute
from asyncrl.registry import Registry, bind_options
from asyncrl.types import EpisodeResult

EPSILON = 1e-6  # added to every std that divides
Scale = Literal["none", "batch_std", "nonzero", "whiten", "whiten_running"]


NONE = np.zeros(0)  # an array that nothing asked for


class Trace(NamedTuple):
    """Describes one episode of a whole batch at its start, arrays per model token [T]. `prox`: log pi there.

    An advantage with `whole_group` sees `rewards` and `collision`, Σ π² over the vocabulary; the `prepare` of
    a loss sees `advantage`, `mu`, which tokens are `trainable` (may contribute) and, if it asks, `reference`.
    """

    uid: str
    group: str
    own: EpisodeResult
    prox: np.ndarray
    rewards: np.ndarray = NONE
    collision: np.ndarray = NONE
    advantage: np.ndarray = NONE
    mu: np.ndarray = NONE
    trainable: np.ndarray = NONE
    reference: np.ndarray = NONE

    if not TYPE_CHECKING:  # type: ignore[misc]  # a type checker is to see that the attribute is missing

        def __getattr__(self, name: str) -> object:
            raise renamed_attribute(self, name, {"fresh": "trainable"})


@dataclass(frozen=True)
class AdvantageInput:
    """Holds one episode and the siblings that form its baseline.

    `siblings[position]` is `own`; `position` is -1 for a late member of a partial group, which is not a
    sibling. `issued`: number of members that the group was issued with, whether they have ended or not.
    Arrays have one entry per model token, [T]: `rewards` the reward on each token (a turn's reward is on its
    last token), `turn` the turn of each token, `values` the critic's V, if there is a critic. `greedy`:
    reward of the sample's greedy episode. `traces`: the episodes of the group, including this one, for
    advantages registered with `whole_group`.
    """

    own: EpisodeResult
    siblings: Sequence[EpisodeResult]
    rewards: np.ndarray
    turn: np.ndarray
    issued: int
    position: int = -1
    values: np.ndarray | None = None
    greedy: float | None = None
    traces: Sequence[Trace] = ()

    @property
    def others(self) -> list[EpisodeResult]:
        """Return the siblings without the episode itself. The choice of siblings does not depend on the
        episode."""
        return [sibling for position, sibling in enumerate(self.siblings) if position != self.position]

    if not TYPE_CHECKING:  # a type checker is to see that the attribute is missing

        def __getattr__(self, name: str) -> object:
            raise renamed_attribute(self, name, {"place": "position"})


AdvantageValues = float | np.ndarray


@dataclass(frozen=True)
class Advantage:
    """Describes a registered advantage.

    `scale`: the batch normalisation it is defined with. `siblings`: their rewards enter it; `late`: unbiased
    for partial groups, late members included. `critic`, `greedy`, `whole_group`: what must be there for it.
    `components`: it reads the reward's named parts instead of the reward; `turns`: when it was earned counts.
    """

    of: Callable[..., AdvantageValues]
    scale: Scale = "none"
    siblings: bool = True
    late: bool = False
    critic: bool = False
    greedy: bool = False
    whole_group: bool = False
    components: bool = False
    turns: bool = False

    @property
    def discount(self) -> float:
        """Across turns, where it is an option of the advantage; 1 else."""
        return float(getattr(self.of, "keywords", {}).get("turn_gamma", 1.0))

    def bound(self, options: Mapping[str, Any], where: str) -> Advantage:
        return replace(self, of=bind_options(self.of, options, where))


advantages: Registry[Advantage] = Registry("advantage", Advantage)


def advantage(name: str, **declared_fields: Any) -> Callable[[Callable[..., AdvantageValues]], Advantage]:
    """Register `(episode: AdvantageInput, *, options…) -> AdvantageValues` as `name`. `declared_fields`: of
    Advantage."""
    return lambda function: advantages.register(name)(Advantage(function, **declared_fields))


def by_token(episode: AdvantageInput, advantage: Advantage) -> np.ndarray:
    """[T] the advantage of each token. The turns of an agent with rewards of its own are an episode by
    themselves, compared with the same agent's turns in the siblings that have some."""
    if not episode.own.agents:
        return np.broadcast_to(np.asarray(advantage.of(episode), dtype=np.float64), episode.turn.shape)

    token_advantages = np.zeros(len(episode.turn))
    for agent, own_result in episode.own.agent_results.items():
        turns = [turn for turn, turn_agent in enumerate(episode.own.agents) if turn_agent == agent]
        is_own_token = np.isin(episode.turn, turns)
        sibling_positions = [
            position for position, sibling in enumerate(episode.siblings) if agent in sibling.agents
        ]
        agent_episode = AdvantageInput(
            own=own_result,
            siblings=[episode.siblings[position].of(agent) for position in sibling_positions],
            rewards=episode.rewards[is_own_token],
            turn=np.searchsorted(turns, episode.turn[is_own_token]),
            issued=episode.issued
            - (len(episode.siblings) - len(sibling_positions)),  # those without the agent are others
            position=sibling_positions.index(episode.position)
            if episode.position in sibling_positions
            else -1,
            values=None if episode.values is None else episode.values[is_own_token],
        )
        token_advantages[is_own_token] = advantage.of(agent_episode)

    return token_advantages


def token_rewards(own: EpisodeResult, turn: np.ndarray) -> np.ndarray:
    """[T] each turn's reward on its last token; that of a turn without one on the token before it, or on the
    first. Everything is on the last token where the episode has no rewards by turn.

    Three turns with rewards 1, 2, 4 and tokens of turns 0, 2, 2: 3, 0, 4.
    """
    rewards = np.zeros(len(turn))
    if len(turn):
        by_turn = own.turn_rewards or (own.reward,)
        ends = np.searchsorted(turn, np.arange(len(by_turn)), side="right") - 1
        if not own.turn_rewards:
            ends = np.array([len(turn) - 1])
        np.add.at(rewards, np.maximum(ends, 0), by_turn)

    return rewards
