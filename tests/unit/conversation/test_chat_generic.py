"""Templates of no family: whatever one does, what is appended is what it would have written."""

from __future__ import annotations

import datetime
import functools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from asyncrl.conversation.chat import Chat
from asyncrl.errors import ConfigError
from asyncrl.types import Message, ToolCall
from tests.fakes.families import tokenizer_of

OPENERS = {"system": "‹S›", "user": "‹U›", "assistant": "‹A›", "tool": "‹T›"}
END = "‹;›"


@dataclass(frozen=True)
class Template:
    """A chat template with habits, and a tokenizer of code points for it."""

    ends: bool = True  # with a token of its own, else with the next message's first
    thoughts: str = "kept"  # kept, until another user message comes (user), or cut out of the text (cut)
    grouped: bool = False  # tool replies of a turn stand in one block
    calls: bool = True  # shown
    system: str = "first"  # or in front of the last user message (last)
    numbered: str = ""  # all but the model's messages are numbered, from the front or the back
    reminds: bool = False  # of the system's rules, with each message of a user
    tool_role: bool = True
    counted: bool = False  # tool replies have the numbers of their calls in the whole conversation

    chat_template = "yes"
    eos_token_id = None
    all_special_tokens = (*OPENERS.values(), END)

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        opening = OPENERS["assistant"] if options["add_generation_prompt"] else ""
        tools = f"[{options['tools']}]" if options["tools"] else ""
        return tools + "".join(self._shown(conversation)) + opening

    def _shown(self, said: Any) -> Any:
        roles = [message["role"] for message in said]
        if "tool" in roles and not self.tool_role:
            raise ValueError("who is that?")
        last = max(at for at, role in enumerate(roles) if role == "user")
        rules = "".join(message["content"] for message in said if message["role"] == "system")
        for at, message in enumerate(said):
            number = {"": "", "front": str(at), "back": str(len(said) - at)}[self.numbered]
            if message["role"] == "assistant":
                kept = self.thoughts == "kept" or (self.thoughts == "user" and at > last)
                yield OPENERS["assistant"] + self.words(message, kept) + END * self.ends
            elif message["role"] == "tool" and self.grouped and roles[at - 1] == "tool":
                yield f",{self.call_number(said, message)}{message['content']}"
            elif message["role"] != "system" or self.system == "first":
                after_all = self.system == "last" and at == last
                before = rules if after_all or (self.reminds and message["role"] == "user") else ""
                before += self.call_number(said, message)
                yield OPENERS[message["role"]] + number + before + message["content"] + "\n"

    def call_number(self, said: Any, message: Any) -> str:
        ids = [call["id"] for earlier in said for call in earlier.get("tool_calls", [])]
        called = self.counted and message.get("tool_call_id", "") in ids
        return str(ids.index(message["tool_call_id"])) if called else ""

    def words(self, message: Any, kept: bool) -> str:
        thought = message.get("reasoning_content", "")
        content = message["content"]
        if self.thoughts == "cut" and not kept:
            content = content.rpartition("</think>")[2]
        calls = [call["function"] for call in message.get("tool_calls", [])] if self.calls else []
        return (
            f"({thought})" * (kept and bool(thought))
            + content
            + "".join(f"<{call['name']}{''.join(call['arguments'].values())}>" for call in calls)
        )

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        for n, token in enumerate(self.all_special_tokens):
            text = text.replace(token, chr(n))
        return list(map(ord, text))

    def decode(self, token_ids: Any, **options: Any) -> str:
        return "".join(map(chr, token_ids))


templates = st.builds(
    Template,
    ends=st.booleans(),
    thoughts=st.sampled_from(["kept", "kept", "kept", "user", "cut"]),
    grouped=st.booleans(),
    calls=st.booleans(),
    system=st.sampled_from(["first", "first", "first", "last"]),
    numbered=st.sampled_from(["", "", "", "", "front", "back"]),
    reminds=st.sampled_from([False, False, False, True]),
    tool_role=st.sampled_from([True, True, False]),
    counted=st.booleans(),
)
letters = st.text("abc", min_size=1, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[Message, ...]]:
    """The prompt, and then in turn what the model says and what it is answered."""
    system = (Message("system", draw(letters)),) * draw(st.booleans())
    pieces = [(*system, Message("user", draw(letters)))]
    for _ in range(draw(st.integers(1, 3))):
        calls = tuple(
            ToolCall(draw(letters), f'{{"x": "{draw(letters)}"}}', f"call_{n}")
            for n in range(draw(st.integers(0, 2)))
        )
        replies = [Message("tool", draw(letters), tool_call_id=call.id, name=call.name) for call in calls]
        user = [Message("user", draw(letters))] if not calls or draw(st.booleans()) else []
        reasoning = draw(st.one_of(st.just(""), letters))
        pieces.append((Message("assistant", draw(letters), calls, reasoning=reasoning),))
        pieces.append((*replies, *user))
    return pieces


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(templates, conversations(), st.booleans())
def test_what_is_appended_is_what_the_template_writes(
    template: Template, pieces: list[tuple[Message, ...]], with_tools: bool
) -> None:
    chat = chat_of(template)
    (prompt, *rest), said = pieces, list(pieces[0])
    tools = ('{"name": "x"}',) * (with_tools or any(turn[0].tool_calls for turn in rest[::2]))
    row = chat.prompt_ids(prompt, tools)
    for (turn,), answer in zip(rest[::2], rest[1::2], strict=True):
        if template.thoughts == "cut" and turn.reasoning:  # which the template knows as text only
            turn = Message("assistant", f"<think>{turn.reasoning}</think>{turn.content}", turn.tool_calls)
        said += [turn, *answer]
        words = template.encode(template.words(plain(turn), kept=True), add_special_tokens=False)
        written = (*words, chat.stop_ids[0] if template.ends else ids_of(template, answer[0]))
        try:
            delta = chat.delta_ids(answer, written[-1], tuple(said[: -len(answer)]), tools)
        except ConfigError:
            assert "user" in [message.role for message in answer[1:]] or not template.tool_role
            return
        if delta is None:
            event("rewrites")
            assert template.thoughts != "kept" or template.system == "last" or template.numbered == "back"
            return
        row += written + delta
    event("appends")
    assert row == chat.prompt_ids(tuple(said), tools)


@functools.cache
def chat_of(template: Template) -> Chat:
    return Chat(template, datetime.date(2026, 1, 31))


def plain(turn: Message) -> dict[str, Any]:
    calls = [{"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in turn.tool_calls]
    return {"content": turn.content, "reasoning_content": turn.reasoning, "tool_calls": calls}


def ids_of(template: Template, message: Message) -> int:
    role = message.role if template.tool_role else "user"
    return template.encode(OPENERS[role], add_special_tokens=False)[0]


def test_a_template_for_tools_beside_another() -> None:
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    with_tools = str(tokenizer.chat_template)
    tokenizer.chat_template = {"default": with_tools.replace("<tool_response>", "("), "tool_use": with_tools}
    chat = Chat(tokenizer)
    delta = chat.delta_ids((Message("tool", "rain"),), chat.stop_ids[0], ())
    assert delta is not None
    assert "<tool_response>\nrain" in tokenizer.decode(delta)


@pytest.mark.parametrize("role", ["tool", "user"])
def test_without_a_tool_role(role: str) -> None:
    chat = Chat(Template(tool_role=False))
    delta = chat.delta_ids((Message(role, "rain"),), chat.stop_ids[0], ())
    assert delta is not None
    assert ("tool_response" in chat.decode(delta)) == (role == "tool")
