"""Planning: rates recovered from synthetic measurements, and predictions of cases with a closed form."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.planning.forecast import (
    EngineLoad,
    Rates,
    fit,
    fit_engine,
    measured_forecast,
    predict,
    recorded_turns,
    stretch_tail,
    time_savings,
    workload,
)
from asyncrl.planning.simulator import RecordedTurn
from asyncrl.types import EpisodeStats, Generation, Observation, StopReason, ToolCall, ToolReply, Turn

RATES = Rates(  # 8 episodes of 100 tokens; 40 tokens/s of one alone
    recorded=(((RecordedTurn(100.0, 0.0),),) * 4,),
    base=0.025,
    slope=0.0,
    assumed=False,
    episode_s=0.05,
    commit_s=0.2,
    publish_s=0.1,
    group_tokens=400.0,
    filtered=0.0,
)


def configured(slots: int = 64, ranks: int = 1, bound: int = 4) -> RunConfig:
    keys = {
        "groups_per_batch": 8,
        "episodes_per_group": 4,
        "max_staleness": bound,
        "group_policy": "complete",
    }
    return parse(
        {
            "name": "plan",
            "model": {"path": "model"},
            "data": {"train": "data.jsonl"},
            "buffer": keys,
            "rollout": {"slots": slots},
            "trainer": {"ranks": ranks},
        }
    )


def test_the_trainer_is_the_limit_where_it_takes_longer() -> None:
    """32 episodes of 0.5 s on one rank, on two ranks half, and 0.2 s a step."""
    slow = replace(RATES, episode_s=0.5, base=0.001)
    for ranks in (1, 2):
        forecast = predict(configured(ranks=ranks), slow, 20)
        assert forecast.step_s == pytest.approx(32 * 0.5 / ranks + 0.2, rel=0.02)
        assert forecast.trainer_idle < 0.02 and forecast.tokens == 3200


def test_engines_are_the_limit_at_tokens_by_their_rate() -> None:
    """They sample 100 tokens/s together: 3200 of a batch take 32 s; two of them half."""
    shared = replace(RATES, base=0.0, slope=0.01)
    config = configured()
    assert predict(config, shared, 30).step_s == pytest.approx(32.0, rel=0.05)
    two = replace(config, rollout=replace(config.rollout, workers=2))
    assert predict(two, shared, 30).step_s == pytest.approx(16.0, rel=0.05)


def test_slots_are_the_limit_where_episodes_wait_for_one() -> None:
    """Episodes of 2.5 s in 4 slots: 8 turns of these are a batch. With twice the slots, 4 turns."""
    forecast = predict(configured(slots=4), RATES)
    assert forecast.step_s == pytest.approx(8 * 2.5, rel=0.02)
    saved = time_savings(configured(slots=4), RATES)
    assert (
        saved["rollout.slots"] == pytest.approx(0.5, abs=0.05) == saved["engines"]
    )  # each ends what they wait for
    assert saved["trainer"] < 0.02


def test_a_bound_of_zero_takes_both_times() -> None:
    """Synchronous: all episodes, then training, the end of the step and the push."""
    forecast = predict(configured(bound=0), RATES, 9)
    assert forecast.step_s == pytest.approx(2.5 + 32 * 0.05 + 0.2 + 0.1, rel=0.01)
    assert forecast.lag == forecast.masked == 0.0


def test_the_law_of_the_engines() -> None:
    loads = [EngineLoad(n, 0.01 + 0.002 * n) for n in (4.0, 20.0, 31.0)]
    assert fit_engine(loads) == (pytest.approx(0.01), pytest.approx(0.002), False)
    base, share, assumed = fit_engine(loads[2:])
    assert assumed and base + 31 * share == pytest.approx(0.072) and base == pytest.approx(0.036)
    falls = [EngineLoad(4.0, 0.02), EngineLoad(8.0, 0.01)]
    assert fit_engine(falls) == (pytest.approx(0.015), 0.0, False)
    base, share, assumed = fit_engine(
        [EngineLoad(1.0, 0.001), EngineLoad(10.0, 0.1)]
    )  # it crosses 0 below no load
    assert (base, assumed) == (0.0, False) and share == pytest.approx(0.01, rel=0.02)


def test_rates_of_a_run() -> None:
    row = {
        "timing_s/step": 3.0,
        "timing_s/wait_data": 1.0,
        "timing_s/update_actor": 1.4,
        "timing_s/ref": 0.2,
        "trainer/trajectories": 32.0,
        "perf/computed_tokens": 6400.0,
        "rollout/discarded_group_frac": 0.25,
        "staleness/lag/mean": 0.5,
        "staleness/masked_token_frac": 0.1,
        "trainer/model_tokens": 3200.0,
    }
    first = row | {"timing_s/step": 99.0, "timing_s/wait_data": 90.0}
    rows = [first, first, *[row] * 6, first]
    config = configured(ranks=2)
    explained_variance = fit(config, rows, RATES.recorded, [EngineLoad(8.0, 0.02)], 0.3)
    assert explained_variance.episode_s == pytest.approx(
        2 * 1.6 / 32
    ) and explained_variance.commit_s == pytest.approx(0.4)
    assert (explained_variance.group_tokens, explained_variance.filtered, explained_variance.publish_s) == (
        800.0,
        0.25,
        0.3,
    )
    moved = fit(config, rows, RATES.recorded, [EngineLoad(8.0, 0.02)], 0.3, state_bytes=4e10)
    assert moved.shift_s == pytest.approx(0.3 + 2 * 2e10 / 1e10) and "40 GB" in moved.shift_source
    changes = [row | {"shift/sleep_s": 1.5, "shift/wake_s": 2.0} for row in rows]
    fitted_rates = fit(config, changes, RATES.recorded, [EngineLoad(8.0, 0.02)], 0.3, state_bytes=4e10)
    assert (fitted_rates.shift_s, fitted_rates.shift_source) == (3.5, "measured")
    shared = replace(config, engine=replace(config.engine, colocated=1))
    assert (workload(config, fitted_rates).shift, workload(shared, fitted_rates).shift) == (None, 3.5)
    was = measured_forecast(rows)
    assert (was.step_s, was.lag) == (3.0, 0.5) and was.tokens_per_s == pytest.approx(960.0)


def test_a_run_that_is_too_short_is_named() -> None:
    with pytest.raises(ConfigError, match="needs 4 committed steps"):
        fit(configured(), [{"timing_s/step": 1.0}] * 3, RATES.recorded, [EngineLoad(8.0, 0.02)], 0.3)
    with pytest.raises(ConfigError, match="keep_bytes"):
        fit(configured(), [{"timing_s/step": 1.0}] * 9, (), [EngineLoad(8.0, 0.02)], 0.3)


def test_groups_that_are_all_filtered_end_the_simulation_all_the_same() -> None:
    """At most `max_refill` batches of them: then the batch is trained with what it has."""
    config = configured()
    most = replace(config, buffer=replace(config.buffer, max_refill=1))
    assert workload(most, replace(RATES, filtered=1.0)).filtered == 0.5


@dataclass
class StoredTurn:
    """An episode's turns, as they are stored."""

    seconds: float
    calls: tuple[float, ...] = ()

    def turn(self, index: int) -> Turn:
        replies = tuple(ToolReply(ToolCall("f", "{}"), "", seconds=s) for s in self.calls)
        seen = Observation(seconds=0.5)
        generation = Generation((2, 3), (0.0, 0.0), (), StopReason.STOP, seconds=self.seconds)
        return Turn(index, (1,), generation, replies, observation=seen)


def test_an_episode_waits_for_tools_the_environment_and_its_reward() -> None:
    turns = [StoredTurn(1.0, (0.25, 0.25)).turn(0), StoredTurn(2.0).turn(1)]
    played = recorded_turns(turns, EpisodeStats(2, seconds=6.0))
    assert played == (RecordedTurn(2, 1.0), RecordedTurn(2, 2.0))  # the last wait: 0.5 and 1.5 of the reward
    beside = recorded_turns([StoredTurn(1.0, (4.0, 4.0)).turn(0)], EpisodeStats(1, seconds=5.25))
    assert beside == (RecordedTurn(2, pytest.approx(4.25)),)  # calls side by side took no longer than this


def test_only_what_is_longer_than_the_median_is_stretched() -> None:
    lengths = (10.0, 20.0, 50.0)
    stretched_turns = stretch_tail((((tuple(RecordedTurn(n, 1.0) for n in lengths)),),), 2.0)
    assert [turn.tokens for turn in stretched_turns[0][0]] == [10.0, 20.0, 80.0]
    assert {turn.wait for turn in stretched_turns[0][0]} == {1.0}


def test_a_longer_tail_takes_longer() -> None:
    groups = tuple(((RecordedTurn(100.0, wait),),) * 4 for wait in (1.0, 1.0, 1.0, 8.0))
    config = configured(bound=1)
    rates = replace(RATES, recorded=groups)
    longer = replace(rates, recorded=stretch_tail(groups, 3.0))
    assert predict(config, longer, 20).step_s > 1.2 * predict(config, rates, 20).step_s
