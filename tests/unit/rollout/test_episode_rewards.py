"""Rewards on their way: from tools, reward function and shaping, through a crash, to the coordinator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.records import EpisodeRecord
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.rewards import in_loop, select_shapings
from asyncrl.tools import Rewarded, Tool, tool
from asyncrl.types import EpisodeResult, EpisodeStats, FailReason
from asyncrl.wire.messages.worker import Assign, Finished
from tests.fakes.episodes import TurnBench, look
from tests.unit.coordinator.test_workers import A, WorkerSetup


def paying() -> Tool:
    """`look` pays a tenth for each character looked at."""

    @tool(name="look")
    def pay(what: str = "") -> Rewarded:
        """Look."""
        return Rewarded(f"saw {what}", len(what) / 10)

    return pay


def bench(
    turns: list[str], result: Any, shaping: dict[str, dict[str, Any]] | None = None, **options: Any
) -> TurnBench:
    turn_bench = TurnBench(turns, lambda **_: result, **options)
    turn_bench.tools["look"] = paying()
    episode_reward = EpisodeReward([in_loop(lambda **_: result)], 60.0, select_shapings(shaping or {}, "x"))
    turn_bench.context = replace(turn_bench.context, reward=episode_reward)
    return turn_bench


TURNS = [look("left") + look("up"), look("right"), "42"]  # 0.4 + 0.2, 0.5, the answer


def test_tool_rewards_fall_on_their_turns_and_the_score_on_the_last() -> None:
    result = {"score": 1.0, "turns": [0.0, -0.5, 0.25], "components": {"format": 1}, "acc": True}
    end = bench(list(TURNS), result).finished()
    assert end.result.turn_rewards == pytest.approx((0.6, 0.0, 1.25), abs=1e-15)
    assert end.result.reward == pytest.approx(1.85) and end.result.score == end.result.reward
    assert end.result.components == {"format": 1.0}


def test_verls_numbers_are_components_and_its_texts_go_along_with_the_end() -> None:
    end = bench(["42"], {"score": 1.0, "acc": True, "pred": "42"}).finished(transcript=True)
    assert (end.result.score, end.result.judged, end.result.components) == (1.0, 1.0, {"acc": 1.0})
    assert end.notes == {"pred": "42"}


def test_a_resumed_episode_keeps_what_its_tools_paid() -> None:
    uninterrupted = bench(list(TURNS), 1.0)
    expected = uninterrupted.finished()
    for durable in (1, 2, 3):
        resumed = bench(TURNS[durable:], 1.0)
        end = resumed.finished(uninterrupted.record[: 2 * durable])
        assert (end.result.reward, end.result.turn_rewards) == (
            expected.result.reward,
            expected.result.turn_rewards,
        )


@pytest.mark.parametrize(
    ("result", "detail"),
    [
        ({"score": 1.0, "turns": [0.0]}, "for each of the 3 turns, but returned 1"),
        ({"score": 1.0, "turns": [0.0, 0.0, float("inf")]}, "the reward of turn 2 is inf"),
        ({"score": 1.0, "components": {"style": None}}, "component 'style' of the reward is None"),
    ],
)
def test_rewards_that_do_not_fit_are_a_reward_error(result: Any, detail: str) -> None:
    end = bench(list(TURNS), result).failed()
    assert end.reason is FailReason.REWARD_ERROR and detail in end.detail


def test_shaping_counts_model_tokens_and_is_reported_apart_from_the_score() -> None:
    plain = bench(["42"], 1.0)
    plain.play()
    tokens = len(plain.turns[0].generation.ids)
    end = bench(["42"], 1.0, {"overlong": {"buffer": 4, "limit": tokens + 1}}).finished()
    assert (end.result.reward, end.result.turn_rewards, end.result.shaping, end.result.score) == (
        0.25,
        (0.25,),
        -0.75,
        1.0,
    )


def test_the_limit_of_an_episode_is_what_its_turns_can_hold() -> None:
    turn_bench = bench(
        ["42"], 1.0, {"overlong": {"buffer": 10}}, max_turns=2, max_new_tokens=5
    )  # 3 tokens of 10
    assert turn_bench.finished().result.shaping == pytest.approx(-0.3)


def test_validation_is_not_shaped() -> None:
    end = bench(["42"], 1.0, {"overlong": {"buffer": 4, "limit": 4}}).finished(lane="eval")
    assert (end.result.reward, end.result.shaping) == (1.0, 0.0)


def test_a_shaping_that_fails_is_a_reward_error() -> None:
    turn_bench = bench(["42"], 1.0)
    episode_reward = EpisodeReward([in_loop(lambda **_: 1.0)], 60.0, [lambda reward_input: 1 / 0])
    turn_bench.context = replace(turn_bench.context, reward=episode_reward)
    end = turn_bench.failed()
    assert end.reason is FailReason.REWARD_ERROR and "algorithm.shaping" in end.detail


# -- at the coordinator ------------------------------------------------------------------------------


def test_the_coordinator_keeps_what_an_episode_earned(tmp_path: Path) -> None:
    setup = WorkerSetup(tmp_path)
    setup.join(A)
    (_, attempt), _ = setup.tick()
    setup.turn(A, 1, attempt)
    result = EpisodeResult(0.5, 10, (0.5,), {"format": 1.0}, shaping=-0.5)
    setup.records.process_record(A, Finished(2, attempt, result, EpisodeStats(1)), [], 0.0)
    setup.state.journal.persist()
    stored_episode = {
        episode.uid: episode for episode in setup.state.journal.store.reader.load_run().episodes
    }[attempt.uid]
    for episode in (setup.state.ledger.buffer.episodes[attempt.uid], stored_episode):
        assert episode.result == result


def test_the_greedy_episode_is_asked_for_at_temperature_zero(tmp_path: Path) -> None:
    setup = WorkerSetup(tmp_path)
    episodes: list[EpisodeRecord] = list(setup.state.ledger.buffer.episodes.values())
    episodes[-1].greedy = True
    setup.join(A)
    setup.engines.push_newest(0.0)
    setup.handler.assign_pending(0.0)
    temperatures = {message.attempt.uid: message.temperature for _, message in setup.sent.take(Assign)}
    assert temperatures == {"0.0": setup.state.config.rollout.temperature, "0.1": 0.0}
