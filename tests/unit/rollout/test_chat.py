"""Against the example's real tokenizer, and templates that misbehave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncrl.errors import ConfigError
from asyncrl.rollout.chat import Chat
from asyncrl.rollout.parsers import hermes
from asyncrl.tools import load_tool
from asyncrl.types import Message, ToolCall, ToolReply

MODEL = Path(__file__).resolve().parents[3] / "examples/multiturn/calculator/model"
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
SCHEMAS = [load_tool("calculator").schema]
CHAT = Chat(TOKENIZER, SCHEMAS)
TURN_END = "<|im_end|>"
# Text as people and tools write it; control tokens of the template are nobody's words.
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda text: "<|" not in text)


def reply(content: str, number: int = 0) -> ToolReply:
    return ToolReply(ToolCall("calculator", "{}", f"call_{number}"), content)


def render(messages: list[dict[str, Any]], opening: bool = True) -> str:
    return TOKENIZER.apply_chat_template(
        messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=opening
    )


@settings(max_examples=50, deadline=None)
@given(words, st.lists(st.tuples(words, st.lists(words, min_size=1, max_size=2)), max_size=3))
def test_pieces_are_the_whole_conversation(question: str, turns: list[tuple[str, list[str]]]) -> None:
    messages = [{"role": "user", "content": question}]
    ids = list(CHAT.prompt_ids((Message("user", question),)))
    for said, results in turns:
        messages += [{"role": "assistant", "content": said}]
        messages += [{"role": "tool", "content": result} for result in results]
        ids += [*TOKENIZER.encode(said, add_special_tokens=False), CHAT.stop_ids[0]]
        ids += CHAT.delta_ids(tuple(reply(result, n) for n, result in enumerate(results)))
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == render(messages)


def test_history_with_tool_calls_is_rendered() -> None:
    call = ToolCall("calculator", '{"a": 1, "op": "plus", "b": 2}', "call_0")
    history = (
        Message("user", "Start with 1, plus 2."),
        Message("assistant", "", (call,)),
        Message("tool", "3", tool_call_id="call_0", name="calculator"),
    )
    text = TOKENIZER.decode(CHAT.prompt_ids(history), skip_special_tokens=False)
    assert hermes(text).calls[0].arguments == call.arguments
    assert text.endswith("3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_decode_keeps_tags_and_drops_the_end_of_turn() -> None:
    text = '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert CHAT.decode([*ids, CHAT.stop_ids[0]]) == CHAT.decode(ids) == text
    assert CHAT.stop_ids == (TOKENIZER.convert_tokens_to_ids(TURN_END),)
    assert CHAT.decode([]) == ""


def test_constant_phrases_are_few_tokens() -> None:
    assert len(CHAT.prompt_ids((Message("user", "Start with 5, plus 9."),))) < 20


class Fake:
    """A tokenizer whose ids are code points, with a template given as a function."""

    def __init__(self, template: Any) -> None:
        self.chat_template, self.eos_token_id = template, ord("#")

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return self.chat_template(conversation, options["add_generation_prompt"])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, **options: Any) -> str:
        return "".join(map(chr, token_ids))


def append_only(messages: list[dict[str, Any]], opening: bool) -> str:
    return "".join(f"@{m['role'][0]}{m['content']};\n" for m in messages) + "@a" * opening


def rewriting(messages: list[dict[str, Any]], opening: bool) -> str:
    """Drops what the assistant said before the last tool reply, as templates that strip reasoning do."""
    last = max((n for n, m in enumerate(messages) if m["role"] == "tool"), default=0)
    kept = [
        m if n > last - 2 or m["role"] != "assistant" else m | {"content": ""} for n, m in enumerate(messages)
    ]
    return append_only(kept, opening)


def without_tools(messages: list[dict[str, Any]], opening: bool) -> str:
    if any(message["role"] == "tool" for message in messages):
        raise ValueError("Conversation roles must alternate user/assistant")
    return append_only(messages, opening)


def test_end_of_turn_comes_from_the_template() -> None:
    chat = Chat(Fake(append_only))
    assert chat.stop_ids == (ord(";"), ord("#"))
    assert "".join(map(chr, chat.delta_ids((reply("7"),)))) == "\n@t7;\n@a"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "no chat template"),
        (rewriting, "rewrites earlier turns"),
        (without_tools, "refuses the roles .*must alternate"),
        (lambda messages, opening: "".join(m["content"] for m in messages), "no end of turn"),
    ],
)
def test_unusable_templates_are_refused(template: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Chat(Fake(template))
