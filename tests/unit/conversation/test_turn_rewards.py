"""Which turn earns what: score, turn rewards and tool rewards add up to the reward."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.conversation.commands import CallTools, Done, EpisodeScored, Fail, ToolsReplied, TurnGenerated
from asyncrl.conversation.episode import Episode, advance_episode
from asyncrl.types import EpisodeEnd, EpisodeResult, FailReason, RewardResult, ToolReply
from tests.fakes.chat import call, rules, start
from tests.fakes.engine import generation


def played(tool_rewards: list[list[float]]) -> Episode:
    """An episode whose turns call tools that give these rewards, and that then answers."""
    episode_rules = rules(max_turns=99)
    episode = start(episode_rules)
    for rewards in tool_rewards:
        episode = advance_episode(
            episode_rules, episode, TurnGenerated(generation("".join(call("a") for _ in rewards)))
        )
        assert isinstance(episode.command, CallTools)
        replies = [ToolReply(c, "ok", reward=r) for c, r in zip(episode.command.calls, rewards, strict=True)]
        episode = advance_episode(episode_rules, episode, ToolsReplied(tuple(replies)))
    return advance_episode(episode_rules, episode, TurnGenerated(generation("42")))


def result(episode: Episode, verdict: RewardResult) -> EpisodeResult:
    command = advance_episode(rules(), episode, EpisodeScored(verdict)).command
    assert isinstance(command, Done)
    return command.result


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (RewardResult(1.0), (0.75, 0.0, 1.0)),
        (RewardResult(1.0, (0.0, 2.0, 4.0)), (0.75, 2.0, 5.0)),
        (RewardResult(1.0, shaping=-0.5), (0.75, 0.0, 0.5)),
        (RewardResult(0.0, (-0.75, 0.0, 0.0), shaping=-1.0), (0.0, 0.0, -1.0)),
    ],
)
def test_every_turn_earns_its_own(verdict: RewardResult, expected: tuple[float, ...]) -> None:
    episode_result = result(played([[0.5, 0.25], [0.0]]), verdict)
    assert episode_result.turn_rewards == expected
    assert (episode_result.reward, episode_result.end, episode_result.shaping) == (
        sum(expected),
        EpisodeEnd.ANSWERED,
        verdict.shaping,
    )


def test_components_are_carried() -> None:
    assert result(played([]), RewardResult(1.0, components={"format": 0.5})).components == {"format": 0.5}


@pytest.mark.parametrize("turns", [(0.0,), (0.0, 0.0, 0.0)])
def test_another_number_of_turns_is_a_reward_error(turns: tuple[float, ...]) -> None:
    command = advance_episode(rules(), played([[0.0]]), EpisodeScored(RewardResult(1.0, turns))).command
    detail = f"the reward function must return a reward for each of the 2 turns, but returned {len(turns)}"
    assert command == Fail(FailReason.REWARD_ERROR, detail)


@pytest.mark.parametrize("earned", [math.nan, math.inf, 1e308])
def test_rewards_that_add_up_to_no_number_are_a_reward_error(earned: float) -> None:
    command = advance_episode(
        rules(), played([[earned, 1e308]]), EpisodeScored(RewardResult(0.0, (0.0, 1e308)))
    ).command
    assert isinstance(command, Fail) and command.reason is FailReason.REWARD_ERROR


numbers = st.floats(-1e3, 1e3)


@given(st.lists(st.lists(numbers, min_size=1, max_size=3), max_size=4), numbers, numbers)
def test_turn_rewards_sum_to_the_reward(
    tool_rewards: list[list[float]], score: float, shaping: float
) -> None:
    episode_result = result(played(tool_rewards), RewardResult(score, shaping=shaping))
    assert len(episode_result.turn_rewards) == len(tool_rewards) + 1
    assert episode_result.reward == math.fsum(episode_result.turn_rewards)
    assert episode_result.reward == pytest.approx(sum(map(sum, tool_rewards)) + score + shaping, abs=1e-9)
