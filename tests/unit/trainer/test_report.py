from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.transcripts import read_ratios
from asyncrl.trainer.advantages import with_kl_penalty
from asyncrl.trainer.batch import training_sample
from asyncrl.trainer.report import (
    MetricSums,
    RatioRecorder,
    advantage_factor,
    batch_metrics,
    tally_advantages,
    tally_samples,
)
from asyncrl.types import EpisodeResult, Generation, StopReason, Turn
from tests.unit.trainer.test_batch import ROW, TOKEN_MEAN, TURNS

numbers = st.lists(st.integers(-50, 50), min_size=1, max_size=20)


@given(numbers, st.integers(0, 20))
def test_a_tally_does_not_depend_on_the_cut(values: list[int], cut: int) -> None:
    parts = [MetricSums(), MetricSums()]
    for i, value in enumerate(values):
        parts[i >= cut].add_summary("x", [value])
        parts[i >= cut].add_total("n", 1)
    parts[0].merge(parts[1])
    assert parts[0].metrics() == {
        "x/mean": sum(values) / len(values),
        "x/max": max(values),
        "x/min": min(values),
        "n": len(values),
    }


def test_a_ratio_over_nothing_is_left_out() -> None:
    tally = MetricSums()
    tally.add_ratio("x", 0.0, 0.0)
    assert tally.metrics() == {}


def test_episode_metrics() -> None:
    tally = MetricSums()
    examples = [
        training_sample(ROW, TURNS, 5, 1, TOKEN_MEAN),
        training_sample(ROW, TURNS[:1], 5, 1, TOKEN_MEAN),
    ]
    tally_samples(tally, examples, longest_prompt=2)
    tally_advantages(tally, [replace(e, advantage=np.full(e.model_tokens, 0.5)) for e in examples])
    metrics = batch_metrics(tally, lambda advantage: advantage)
    assert metrics["critic/score/mean"] == 1.0 and metrics["critic/advantages/max"] == 0.5
    assert metrics["response_length/mean"] == 3.5 and metrics["response_length/clip_ratio"] == 1.0
    assert metrics["prompt_length/max"] == 2 and metrics["prompt_length/clip_ratio"] == 1.0
    assert metrics["global_seqlen/minmax_diff"] == examples[0].total_tokens - examples[1].total_tokens > 0
    assert "num_turns/min" not in metrics  # the coordinator counts all that landed
    assert metrics["staleness/masked_token_frac"] == pytest.approx(2 / 7)
    assert metrics["staleness/by_length/0/masked_frac"] == pytest.approx(2 / 7)
    assert metrics["staleness/lag_tokens/2"] == 2 and metrics["staleness/lag_tokens/0"] == 5
    assert metrics["staleness/lag_taken/max"] == 2 and metrics["staleness/lag/max"] == 0  # none trained yet
    assert metrics["staleness/by_length/0/masked_q1"] == 1.0  # the stale token opens the long response


def test_a_trajectory_is_fully_masked_if_it_has_tokens_and_all_are_stale() -> None:
    partly_stale = training_sample(ROW, TURNS, 5, 1, TOKEN_MEAN)
    fully_stale = replace(partly_stale, stale=np.ones(5, dtype=bool))
    without_tokens = training_sample(
        ROW, [Turn(0, (1, 2), Generation((), (), (), StopReason.LENGTH))], 5, 1, TOKEN_MEAN
    )
    tally = MetricSums()
    tally_samples(tally, [partly_stale, fully_stale, without_tokens], longest_prompt=9)
    assert tally.metrics()["staleness/fully_masked_trajectories"] == 1


def test_the_explained_variance_compares_values_with_returns() -> None:
    """V is half of G, so 1 − Var(G − V)/Var(G) is 3/4."""
    returns = np.array([1.0, 2.0, 3.0, 4.0, 6.0])
    sample = training_sample(ROW, TURNS, 5, 1, TOKEN_MEAN)
    sample = replace(sample, advantage=np.ones(5), returns=returns, value=returns / 2)
    tally = MetricSums()
    tally_samples(tally, [sample], longest_prompt=9)
    tally_advantages(tally, [sample])
    metrics = batch_metrics(tally, lambda advantage: advantage)
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.75)


def test_the_ratios_of_an_episode_are_those_before_the_first_optimizer_step(tmp_path: Path) -> None:
    planned = msgspec.structs.replace(ROW, uid="0.0", group="0")
    sample = training_sample(planned, TURNS, 5, 1, TOKEN_MEAN)
    recorder = RatioRecorder(tmp_path, rank=0, groups_per_batch=1)
    for log_ratio in (0.25, 0.5):
        recorder.record_micro_batch([sample], torch.full((5,), log_ratio), torch.zeros(5, dtype=torch.bool))
    recorder.save_step(1)
    token_ratios = read_ratios(tmp_path, 1, "0.0")
    assert token_ratios is not None and token_ratios.log_ratio == [0.25] * 5


def test_rewards_contain_the_penalty_in_the_reward_and_scores_do_not() -> None:
    """verl's names: the score is what the reward function gave, rewards are what advantages are made of."""
    plain = training_sample(ROW, TURNS, 5, 1, TOKEN_MEAN)
    far, penalties = with_kl_penalty(replace(plain, reference=plain.rollout_logprobs - 1.0), 0.25, "k1")
    tally = MetricSums()
    tally_samples(tally, [plain], longest_prompt=9)
    tally_advantages(tally, [replace(far, advantage=np.zeros(far.model_tokens))])
    metrics = tally.metrics()
    assert sum(penalties) == pytest.approx(-0.25 * far.model_tokens)
    assert metrics["critic/score/mean"] == plain.planned.own.score
    assert metrics["prompt_length/clip_ratio"] == 0
    assert metrics["critic/rewards/mean"] == pytest.approx(plain.planned.own.reward - 0.25 * far.model_tokens)


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ([(0, 0.5, 1)], 1.0),  # the mean of a group that varies is no sign that it taught nothing
        ([(0, 1), (1, 1)], 2.0),
        ([(0, 0.5, 1), (1, 1, 1), (0, 0, 0)], 3.0),
        ([(0.1 + 0.2, 0.3)], 1.0),  # rounding; then there is nothing to divide by
        ([(1, 1)], 1.0),
    ],
)
def test_gpg_counts_episodes_of_groups_without_variance(
    groups: list[tuple[float, ...]], wanted: float
) -> None:
    """α = B/(B − M)."""
    tally = MetricSums()
    for rewards in groups:
        siblings = tuple(EpisodeResult(reward, 5) for reward in rewards)
        for own in siblings:
            e = training_sample(
                msgspec.structs.replace(ROW, own=own, siblings=siblings), TURNS, 5, 1, TOKEN_MEAN
            )
            a = own.reward - sum(rewards) / len(rewards)
            tally_advantages(tally, [replace(e, advantage=np.full(e.model_tokens, a))])
    assert advantage_factor("nonzero", tally.sums) == pytest.approx(wanted, rel=1e-12)


def test_each_agent_with_a_reward_of_its_own_counts_as_an_episode() -> None:
    """What both sides of a game gain adds up to nothing; a draw is no sign of a group without variance."""
    tally = MetricSums()
    scores = (1.0, -1.0, 0.0)
    games = tuple(EpisodeResult(0.0, 5, (won, -won), agents=("w", "b"), turn_tokens=(2, 3)) for won in scores)
    for won, own in zip(scores, games, strict=True):
        e = training_sample(msgspec.structs.replace(ROW, own=own, siblings=games), TURNS, 5, 1, TOKEN_MEAN)
        tally_advantages(tally, [replace(e, advantage=np.where(e.turn < 1, won, -won))])
    assert advantage_factor("nonzero", tally.sums) == 1.0
    std = np.std([score for won in scores for score in (won, -won)], ddof=1)
    assert advantage_factor("batch_std", tally.sums) == pytest.approx(1 / (std + 1e-6))
