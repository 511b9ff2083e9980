from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.algorithms.aggregation import aggregations
from asyncrl.algorithms.recipe import Recipe, compose
from asyncrl.errors import ConfigError
from asyncrl.trainer import world as ranks
from asyncrl.trainer.advantages import (
    PackedEpisode,
    gather_episodes,
    gather_traces,
    with_advantages,
    with_kl_penalty,
    with_penalised_siblings,
)
from asyncrl.trainer.barrier import _loss_arrays, compare_batch
from asyncrl.trainer.batch import TrainingSample, training_sample
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult, Generation, StopReason, Turn, VersionSpan
from asyncrl.wire.messages.trainer import PlannedTrajectory
from tests.fakes.ranks import run_ranks
from tests.fakes.training import tiny_config

THIRD = 1 / 3  # no float32


def one(number: int) -> TrainingSample:
    """An episode of number + 2 tokens."""
    n = number + 2
    own = EpisodeResult(THIRD, n)
    row = PlannedTrajectory(f"u{number}", f"g{number // 2}", 1, own, (own,), number, 1, 1.0)
    turn = Turn(0, (1,), Generation((2,) * n, (-THIRD,) * n, (VersionSpan(0, n, 0, 0),), StopReason.STOP))
    trained_sample = training_sample(row, [turn], 0, 4, aggregations.get("token_mean"))
    return replace(trained_sample, proximal_logprobs=-np.arange(n) / 3, collision=np.full(n, THIRD))


def exchanged_arrays(e: TrainingSample) -> dict[str, np.ndarray]:
    return {"prox": np.asarray(e.proximal_logprobs), "trainable": np.arange(e.model_tokens) % 2 == 0}


def of(packed: PackedEpisode) -> tuple[str, str, int, list[float], list[bool]]:
    return (
        packed.uid,
        packed.group,
        packed.place,
        packed.array("prox").tolist(),
        packed.array("trainable").tolist(),
    )


def exchange(world: World, folder: Path) -> tuple[object, object]:
    """Five episodes dealt to the ranks, exchanged in parts."""
    ranks.PART_BYTES = 64
    mine = [one(number) for number in range(world.rank, 5, world.size)]
    traces = gather_traces(world, mine, [exchanged_arrays(e) | {"rewards": e.rewards} for e in mine])
    plain = [
        (t.uid, t.group, t.own.tokens - 2, t.rewards.tolist(), t.prox.tolist(), t.trainable.tolist())
        for t in traces
    ]
    return [of(packed) for packed in gather_episodes(world, mine, [exchanged_arrays(e) for e in mine])], plain


@pytest.mark.slow
def test_all_ranks_see_all_episodes_exactly_as_one_rank_does(world: World, tmp_path: Path) -> None:
    alone = exchange(world, tmp_path)
    together = run_ranks(2, exchange, tmp_path / "two")
    assert alone == together
    episodes = [
        (f"u{i}", f"g{i // 2}", i, [-j / 3 for j in range(i + 2)], [j % 2 == 0 for j in range(i + 2)])
        for i in range(5)
    ]
    assert alone[0] == episodes


def test_a_token_that_the_reference_cannot_score_changes_nothing_else() -> None:
    """No penalty for it, and it is not fresh for a loss that looks at the whole batch."""
    plain = replace(one(2), advantage=np.ones(4), reference=np.full(4, -1.0))
    broken = replace(plain, reference=np.array([-1.0, -np.inf, -1.0, np.nan]))
    advantages, by_turn = with_kl_penalty(broken, 0.5, "k1")
    assert by_turn == [-0.5 * 2 * (1 - THIRD)]
    assert advantages.planned.own.reward == THIRD + by_turn[0] and advantages.rewards[1] == 0
    view = _loss_arrays(broken)
    assert view["trainable"].tolist() == [True, False, True, False]
    assert view["reference"].tolist() == [-1, 0, -1, 0] and view["prox"][1] == 0


def test_a_stale_token_is_not_trainable_for_a_loss_that_looks_at_the_whole_batch() -> None:
    is_stale = np.array([False, True, False, False])
    sample = replace(one(2), advantage=np.ones(4), stale=is_stale)
    assert _loss_arrays(sample)["trainable"].tolist() == (~is_stale).tolist()


# -- agents with rewards of their own ----------------------------------------------------------------


def game(
    place: int, agents: str, rewards: list[float], siblings: tuple[EpisodeResult, ...] = ()
) -> TrainingSample:
    """An episode of one agent a turn, by its letter, and 2 tokens a turn."""
    own = result_of(agents, rewards)
    siblings = siblings or (own,)
    row = PlannedTrajectory(f"u{place}", "g", 1, own, siblings, place, len(siblings), 1.0)
    spans = (VersionSpan(0, 2, 0, 0),)
    turns = [
        Turn(k, (1,), Generation((2, 3), (-THIRD, -THIRD), spans, StopReason.STOP), agent=agent)
        for k, agent in enumerate(agents)
    ]
    return training_sample(row, turns, 0, 4, aggregations.get("token_mean"))


def result_of(agents: str, rewards: list[float]) -> EpisodeResult:
    counts = (2,) * len(agents)
    return EpisodeResult(
        sum(rewards), 2 * len(agents), tuple(rewards), agents=tuple(agents), turn_tokens=counts
    )


# White won twice and lost once, black the other way round; in the third game black never moved.
GAMES = [("wbw", [0.0, -1.0, 1.0]), ("wbwb", [0.0, 0.0, -1.0, 1.0]), ("w", [1.0])]
SIBLINGS = tuple(result_of(*one) for one in GAMES)


def recipe_of(advantage: Any, normalise: str = "none") -> Recipe:
    algorithm = {"advantage": advantage, "normalise": normalise}
    return compose(tiny_config("x", algorithm=algorithm, buffer={"filter_zero_variance": False}))


def advantages_of(name: str, **options: Any) -> list[list[float]]:
    """By game and turn."""
    recipe = recipe_of({name: options})
    advantages = [with_advantages(game(place, *one, SIBLINGS), recipe) for place, one in enumerate(GAMES)]
    assert all(e.advantage is not None for e in advantages)
    return [
        e.advantage.reshape(-1, 2)[:, 0].round(12).tolist() for e in advantages if e.advantage is not None
    ]


def test_an_agents_baseline_is_over_the_same_agents_rewards() -> None:
    """White: 1, -1, 1, with mean 1/3; black: -1, 1, with mean 0. The sums 0, 0, 1 play no part."""
    w = round(1 - THIRD, 12)
    lost = round(-1 - THIRD, 12)
    assert advantages_of("dr_grpo") == [[w, -1, w], [lost, 1, lost, 1], [w]]
    # of the others: white 0 against (-1, 1), -1 against (1, 1); black -1 against 1
    assert advantages_of("rloo") == [[1, -2, 1], [-2, 2, -2, 2], [1]]


def test_every_kind_of_advantage_sees_an_agents_turns_as_an_episode() -> None:
    """opo weighs by the agent's own tokens: white 4, 4, 2, a mean of 0.2; black 2, 4, a mean of 1/3.
    By turn, white's second move is compared with second moves: 1, -1; returns pass over black's turns."""
    lost = round(-1 - THIRD, 12)
    assert advantages_of("opo") == [[0.8, lost, 0.8], [-1.2, round(2 / 3, 12), -1.2, round(2 / 3, 12)], [0.8]]
    assert advantages_of("grpo_turn")[1] == [lost, 1, -1, 1]


def test_without_other_games_of_an_agent_nothing_is_learned_of_it() -> None:
    advantages = with_advantages(
        game(0, "wb", [1.0, -1.0], (result_of("wb", [1.0, -1.0]), SIBLINGS[2])), recipe_of("dr_grpo")
    )
    assert advantages.advantage is not None and advantages.advantage.tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ["remax", "optimal_token_baseline", "gdpo"])
def test_what_compares_whole_episodes_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="agents earned separate rewards; use dr_grpo or rloo"):
        advantages_of(name)


def test_returns_and_penalties_of_an_agent_pass_over_the_other() -> None:
    """With V = 0.5 and λ = 1: white 1 − 0.5, black −1 − 0.5. β·KL of 0.25 a token counts for who wrote it."""
    episode = replace(game(0, *GAMES[0]), value=np.full(6, 0.5))
    advantages = with_advantages(episode, recipe_of("gae"))
    assert advantages.advantage is not None and advantages.returns is not None
    assert advantages.advantage.tolist() == [0.5, 0.5, -1.5, -1.5, 0.5, 0.5]
    assert advantages.returns.tolist() == [1.0, 1.0, -1.0, -1.0, 1.0, 1.0]
    paid, _ = with_kl_penalty(replace(episode, reference=episode.rollout_logprobs - 0.5), 0.5, "k1")
    parts = paid.planned.own.agent_results
    assert [parts["w"].reward, parts["b"].reward] == pytest.approx([1.0 - 4 * 0.25, -1.0 - 2 * 0.25])


def test_the_returns_of_the_critic_are_those_before_whitening(world: World) -> None:
    """Two episodes of two tokens with rewards 1 and 3 and V = 0.5: A = 0.5 and 2.5 with mean 1.5 and
    standard deviation 2/√3 (ddof 1)."""
    recipe = recipe_of("gae", normalise="whiten")
    episodes = [
        replace(game(place, "w", [reward]), value=np.full(2, 0.5)) for place, reward in enumerate([1.0, 3.0])
    ]
    compared_episodes, _ = compare_batch(world, episodes, recipe, kl_penalty=None, whitening=None)
    advantages = [sample.advantage for sample in compared_episodes]
    returns = [sample.returns for sample in compared_episodes]

    scaled_advantage = math.sqrt(3) / 2
    assert np.allclose(advantages, [[-scaled_advantage] * 2, [scaled_advantage] * 2])
    assert np.allclose(returns, [[1.0] * 2, [3.0] * 2])


def test_the_rewards_of_a_sibling_whose_payload_was_lost_stay() -> None:
    """Nobody can tell its KL; what its agents earned is known."""
    advantages = with_penalised_siblings(game(0, *GAMES[0], SIBLINGS), {("g", 1): [-0.5, 0.0, 0.0, 0.0]})
    assert [member.turn_rewards for member in advantages.planned.siblings] == [
        (0.0, -1.0, 1.0),
        (-0.5, 0.0, -1.0, 1.0),
        (1.0,),
    ]
    assert with_advantages(advantages, recipe_of("dr_grpo")).advantage is not None
