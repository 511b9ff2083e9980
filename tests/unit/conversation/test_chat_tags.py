"""Templates that write tags around a turn's parts, or that end turns only where somebody answers."""

from __future__ import annotations

import functools

import pytest
from tokenizers import AddedToken

from asyncrl.config import RolloutConfig
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.commands import Observed, Opened, Rules, Step, TurnGenerated
from asyncrl.conversation.episode import advance_episode, begin_episode, conversation
from asyncrl.conversation.parsers import load_parser
from asyncrl.types import Generation, Message, Observation, Sample, StopReason, ToolCall, VersionSpan
from tests.fakes.families import TEMPLATES, tokenizer_of

CONTROLS = {  # of the templates in fixtures/chat/tags, each without what other templates do, too
    "gemma4": ["<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"],
    "solar": ["<|begin|>", "<|think|>", "<|content|>", "<|end|>"],
    "command-tags": [f"<|{part}_TOKEN|>" for part in ("START_OF_TURN", "END_OF_TURN", "CHATBOT", "USER")]
    + [f"<|{edge}_{part}|>" for part in ("THINKING", "RESPONSE") for edge in ("START", "END")],
    "kimi-k3": ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    "apertus": [f"<|{part}_{edge}|>" for part in ("assistant", "user") for edge in ("start", "end")]
    + ["<|tools_prefix|>", "<|tools_suffix|>"],
    "apriel": ["<|begin_user|>", "<|begin_assistant|>", "<|begin_tool|>", "<|end|>"],
}


@functools.cache
def chat_of(template: str) -> Chat:
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS[template]])
    tokenizer.chat_template = (TEMPLATES / f"tags/{template}.jinja").read_text()
    return Chat(tokenizer)


def written(chat: Chat, text: str) -> tuple[int, ...]:
    return tuple(chat._tokenizer.encode(text, add_special_tokens=False))


QUESTION = Message("user", "Rain?")


def test_thoughts_reach_a_template_that_reads_reasoning() -> None:
    chat = chat_of("solar")
    said = (QUESTION, Message("assistant", "Yes.", reasoning="Hm."), Message("tool", "so"))
    assert "<|think|>Hm.<|end|>" in chat.decode(chat.prompt_ids(said))
    assert chat.check_history("fork", ["user"])[0].startswith("the chat template drops the reasoning")


@pytest.mark.parametrize(
    ("template", "parser", "turn", "end"),
    [
        ("command-tags", "hermes", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
        ("command-tags", "cohere", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
        (
            "command-tags",
            "cohere",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            "<|END_OF_TURN_TOKEN|>",
        ),
        ("command-tags", "hermes", "<|START_RESPONSE|>Yes.", "<|END_OF_TURN_TOKEN|>"),  # left open
        ("command-tags", "hermes", "Yes.", "<|END_OF_TURN_TOKEN|>"),
        ("solar", "hermes", "<|content|>Yes.", "<|end|>"),
        (
            "kimi-k3",
            "kimi_k3",
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
    ],
)
def test_tags_that_the_template_writes_are_no_content(
    template: str, parser: str, turn: str, end: str
) -> None:
    """Neither what an environment, a reward and another row read, nor doubled where a template renders it."""
    chat = chat_of(template)
    rules = Rules(chat, load_parser(parser), RolloutConfig(max_turns=3, history="fork", environment="fake"))
    episode = advance_episode(rules, begin_episode(Sample(0, "", (QUESTION,), "yes")), Opened())
    ids = written(chat, turn + end)
    sampled = Generation(ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 1, 1),), StopReason.STOP)
    episode = advance_episode(rules, episode, TurnGenerated(sampled))
    assert isinstance(episode.command, Step)
    assert episode.command.message.content == "Yes."
    episode = advance_episode(rules, episode, Observed(Observation((Message("user", "Sure?"),))))
    shown = chat.decode(chat.prompt_ids(conversation(rules, episode)))
    assert all(shown.count(f"{token}{token}") == 0 for token in CONTROLS[template])
    assert shown.count("Yes.") == 1


def test_a_user_who_ends_the_turn_and_a_tool_that_speaks_within_it() -> None:
    """Apertus: its `<|assistant_end|>` stands where a user speaks, and not where a tool replies."""
    chat = chat_of("apertus")
    assert chat.stop_ids[:2] == written(chat, "<|assistant_end|><|tools_suffix|>")
    chat.check_history("fork", ["tool", "user"])
    call = ToolCall("f", '{"a": 1}', "c")
    said = (QUESTION, Message("assistant", "", (call,)), Message("tool", "rain", tool_call_id="c", name="f"))
    assert '[{"f": {"a": 1}}]<|tools_suffix|>[rain]' in chat.decode(chat.prompt_ids(said))


def test_the_first_token_after_a_line_break_ends_the_turn() -> None:
    """Apriel-1.6 ends all turns but the last one."""
    chat = chat_of("apriel")
    [end] = written(chat, "<|end|>")
    assert chat.stop_ids[0] == end
    assert "starts a new row" in chat.check_history("fork", ["user"])[0]


def test_calls_before_the_words_beside_them_are_shown() -> None:
    """Gemma 4 writes calls, replies, and then what the turn says."""
    assert not any(
        "does not render tool calls" in line for line in chat_of("gemma4").check_history("fork", ["tool"])
    )
