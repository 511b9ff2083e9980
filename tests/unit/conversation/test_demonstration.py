"""Conversations of the data as turns: the tokens that an episode would have, and what cannot be learned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.config import RolloutConfig
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.commands import Fail, Opened, Rules, ToolsReplied, TurnGenerated
from asyncrl.conversation.demonstration import demonstration_turns, length_failure
from asyncrl.conversation.episode import advance_episode, begin_episode
from asyncrl.conversation.parsers import hermes
from asyncrl.conversation.turns import rows_of
from asyncrl.types import Generation, Message, Sample, StopReason, ToolCall, ToolReply, Turn, VersionSpan
from tests.fakes.families import tokenizer_of
from tests.unit.conversation.test_chat import REPLY, TODAY, TOOL

CALL = ToolCall("weather", '{"city": "Ulm"}', REPLY.tool_call_id)
ASK = Message("user", "Rain in Ulm?")
ANSWER = Message("assistant", "Yes.")
TALK = (ASK, Message("assistant", "", (CALL,)), REPLY, ANSWER)


def rules(family: str = "qwen2.5", **config: Any) -> Rules:
    return Rules(Chat(tokenizer_of(family), TODAY), hermes, RolloutConfig(**{"max_tokens": 1000, **config}))


def sample(*messages: Message, given: int = 0) -> Sample:
    return Sample(7, "test", messages, "null", given=given)


def learned(episode_rules: Rules, *messages: Message, given: int = 0) -> list[str]:
    """The text of each turn, stop token left out."""
    turns = demonstration_turns(episode_rules, sample(*messages, given=given), (TOOL,))
    assert not isinstance(turns, Fail), turns
    return [episode_rules.chat.decode(turn.generation.ids) for turn in turns]


def test_a_conversation_is_the_episode_that_would_have_sampled_it() -> None:
    """Token for token, through the machine that plays episodes."""
    episode_rules = rules()
    turns = demonstration_turns(episode_rules, sample(*TALK), (TOOL,), version=3)
    assert not isinstance(turns, Fail)
    episode = advance_episode(episode_rules, begin_episode(sample(ASK)), Opened((TOOL,)))
    for turn in turns:
        span = (VersionSpan(0, len(turn.generation.ids), 3, -1),)
        said = Generation(turn.generation.ids, (0.0,) * len(turn.generation.ids), span, StopReason.STOP)
        episode = advance_episode(episode_rules, episode, TurnGenerated(said))
        if calls := getattr(episode.command, "calls", ()):
            episode = advance_episode(
                episode_rules, episode, ToolsReplied((ToolReply(calls[0], REPLY.content),))
            )
    played = [Turn(turn.index, turn.context, turn.generation) for turn in episode.turns]
    assert played == list(turns) and len(turns) == 2
    assert episode.rows == (rows_of(turns)[0],)


def test_what_the_assistant_says_is_learned_and_nothing_else() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    assert learned(rules(), *TALK) == [call, "Yes."]
    assert learned(rules(), *TALK, given=3) == ["Yes."]  # the call is a part of the prompt
    assert learned(rules(), *TALK, Message("user", "Bye.")) == [call, "Yes."]


def test_a_long_reply_of_a_tool_is_cut_as_in_an_episode() -> None:
    episode_rules = rules(max_reply_tokens=20)
    long = Message("tool", "rain " * 300, tool_call_id=CALL.id, name=CALL.name)
    turns = demonstration_turns(episode_rules, sample(*TALK[:2], long, ANSWER), (TOOL,))
    assert not isinstance(turns, Fail)
    assert episode_rules.shorten(long.content) in episode_rules.chat.decode(turns[1].context)


def test_a_template_that_rewrites_earlier_turns_begins_new_rows() -> None:
    thought = Message("assistant", "No.", reasoning="hm")
    talk = (ASK, thought, Message("user", "Why?"), ANSWER)
    turns = demonstration_turns(rules("qwen3", history="fork"), sample(*talk), ())
    assert not isinstance(turns, Fail) and [turn.row for turn in turns] == [0, 1]
    assert "hm" not in rules("qwen3").chat.decode(turns[1].context)
    found = demonstration_turns(rules("qwen3"), sample(*talk), ())
    assert isinstance(found, Fail) and "set rollout.history=fork" in found.detail
    assert length_failure(RolloutConfig(history="fork", max_rows=2), turns) is None
    found = length_failure(RolloutConfig(history="fork", max_rows=1), turns)
    assert found is not None and "2 rows" in found.detail


def test_a_row_that_begins_anew_joins_a_continued_message_with_its_turn() -> None:
    begun = Message("assistant", "It is")
    episode_rules = rules("qwen3", history="fork")
    talk = (ASK, begun, Message("assistant", " so."), Message("user", "Why?"), ANSWER)
    turns = demonstration_turns(episode_rules, sample(*talk, given=2), ())
    assert not isinstance(turns, Fail) and [turn.row for turn in turns] == [0, 1]
    assert episode_rules.chat.decode(turns[0].generation.ids) == " so."
    last_row = episode_rules.chat.decode(rows_of(turns)[1])
    assert "It is so." in last_row and last_row.count("assistant\n") == 2


@pytest.mark.parametrize(
    ("messages", "tools", "why"),
    [
        (
            (ASK, ANSWER, ANSWER),
            (TOOL,),
            "message 2: an assistant message must follow the message that it answers",
        ),
        ((ANSWER, ASK), (TOOL,), "message 0: an assistant message must follow"),
        (TALK, (), "message 1: rollout.parser cannot read back the call to 'weather'"),
        ((ASK, Message("assistant", "a<|im_end|>b")), (), r"message 1: the chat template writes 'a' where"),
    ],
)
def test_what_cannot_be_learned(messages: tuple[Message, ...], tools: tuple[str, ...], why: str) -> None:
    turns_or_failure = demonstration_turns(rules(), sample(*messages), tools)
    assert isinstance(turns_or_failure, Fail) and why in turns_or_failure.detail


def test_arguments_count_as_values() -> None:
    """Not as the data happens to spell them."""
    spelled = ToolCall("weather", json.dumps({"city": "Ulm"}, indent=2), CALL.id)
    assert learned(rules(), ASK, Message("assistant", "", (spelled,)))
