"""From rewards to advantages: per episode as it streams in, or for a whole batch behind a barrier.

rewards ── − β·KL ──► advantage ──► / batch (whitening, std) ──► Example.advantage, .returns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from asyncrl.algorithms.credit import CreditInput, Trace
from asyncrl.algorithms.kl import kl_tokens
from asyncrl.algorithms.recipe import Recipe
from asyncrl.buffer.batches import Baseline
from asyncrl.buffer.records import EpisodeRecord
from asyncrl.config import RunConfig
from asyncrl.conversation.turns import trained
from asyncrl.errors import ConfigError
from asyncrl.trainer.batch import Example, example
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult, Turn
from asyncrl.wire.messages.trainer import PlannedTrajectory

Penalties = Mapping[tuple[str, int], Sequence[float]]  # (group, place among the siblings) → β·KL by turn


def credit(example: Example, recipe: Recipe, traces: Sequence[Trace] = ()) -> Example:
    """With its advantage and, where there is a critic, the returns V is trained on."""
    given = replace(example.credit_input(), traces=traces)
    found = _by_agent(given, recipe) if given.own.agents else recipe.advantage.of(given)
    advantage = np.broadcast_to(np.asarray(found, dtype=np.float64), example.mu.shape)
    returns = None if example.value is None else advantage + example.value
    return replace(example, advantage=advantage, returns=returns)


def _by_agent(given: CreditInput, recipe: Recipe) -> np.ndarray:
    """[T] for agents with rewards of their own: the turns of each are an episode by themselves, compared with
    the same agent's turns in the siblings that have some. ConfigError for what compares whole episodes, as
    components are those of an episode."""
    advantage = recipe.advantage
    if advantage.greedy or advantage.whole_group or advantage.components or recipe.loss.whole_group:
        raise ConfigError(
            f"algorithm: advantage {recipe.advantage_name!r} with loss {recipe.loss_name!r} compares whole "
            "episodes, and agents earned rewards of their own; use dr_grpo or rloo with reinforce or ppo"
        )
    found = np.zeros(len(given.turn))
    for agent, own in given.own.parts.items():
        turns = [turn for turn, who in enumerate(given.own.agents) if who == agent]
        mine = np.isin(given.turn, turns)
        places = [place for place, sibling in enumerate(given.siblings) if agent in sibling.agents]
        part = CreditInput(
            own=own,
            siblings=[given.siblings[place].of(agent) for place in places],
            rewards=given.rewards[mine],
            turn=np.searchsorted(turns, given.turn[mine]),
            issued=given.issued - (len(given.siblings) - len(places)),  # those without the agent are others
            place=places.index(given.place) if given.place in places else -1,
            values=None if given.values is None else given.values[mine],
        )
        found[mine] = advantage.of(part)
    return found


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
    """The episodes of all ranks, by uid: the same list on all of them. A collective."""
    mine = []
    for planned, named in zip((e.planned for e in examples), arrays, strict=True):
        content = {name: array.astype(_dtype(name)).tobytes() for name, array in named.items()}
        mine.append(Packed(planned.uid, planned.group, planned.own, planned.place, content))
    everyone = [packed for part in world.gather_data(mine, list[Packed]) for packed in part]
    return sorted(everyone, key=lambda packed: packed.uid)


def share_penalties(world: World, pairs: Sequence[tuple[Example, Sequence[float]]]) -> Penalties:
    """The penalties of all ranks' episodes. A collective."""
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


def credited(
    config: RunConfig, recipe: Recipe, episode: EpisodeRecord, baseline: Baseline, turns: Sequence[Turn]
) -> Example:
    """Its trained tokens as training saw them: lags, rewards, what is over the bound; and advantages before
    the batch scales them, unless they also read what models compute."""
    planned = PlannedTrajectory.of(episode, baseline, config.rollout.temperature)
    given = example(
        planned, trained(turns), max(0, episode.step), config.buffer.max_staleness, recipe.aggregate
    )
    return given if recipe.critic or recipe.advantage.whole_group else credit(given, recipe)


def advantage(
    config: RunConfig, recipe: Recipe, episode: EpisodeRecord, baseline: Baseline, turns: Sequence[Turn]
) -> float | None:
    """The mean of its tokens' advantages, before the batch scales them. None where the advantage also reads
    what models compute, or the episode has no token of the model's."""
    found = credited(config, recipe, episode, baseline, turns).advantage
    return float(found.mean()) if found is not None and len(found) else None
