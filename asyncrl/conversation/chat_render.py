"""Messages as the tokenizer's own chat template writes them.

Templates differ in small things: whether the arguments of a call are an object or text, how long the id of a
call is, how many calls a turn may have, whether there is a tool role. `find_shape` finds by trying which
`Shape` of messages a template wants.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from msgspec.structs import replace

from asyncrl.errors import ConfigError, one_line, users_code
from asyncrl.types import Message, ToolCall
from asyncrl.values import encodable

Render = Callable[..., str]  # (messages, tools, opening=) -> text: a `Renderer`


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    chat_template: Any
    eos_token_id: int | None
    all_special_tokens: list[str]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def get_vocab(self) -> dict[str, int]: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...


@dataclass(frozen=True)
class Shape:
    """The form in which a template wants its messages. The default is OpenAI's, with arguments as objects."""

    argument_text: bool = False  # arguments are JSON text (DeepSeek)
    short_ids: bool = False  # ids of calls have nine letters or digits (Mistral)
    bare_calls: bool = False  # calls without the content beside them (DeepSeek V3, R1, Mistral v3)
    single_calls: bool = False  # a message has one call (Llama, gpt-oss): several become several messages
    one_text: bool = False  # reasoning or content next to calls, not both (gpt-oss)
    called_only: bool = False  # tool messages need a call before them (Mistral, gpt-oss), malformed or not
    user_replies: bool = False  # there is no tool role (Gemma): replies become messages of the user


@dataclass(frozen=True)
class Renderer:
    """Messages and tools (JSON text) to text; `opening`: the start of the model's turn follows. ConfigError
    when the template refuses them. `day` formats the date for templates that write it, which must not change
    while an episode runs; `options` are further arguments of the template."""

    tokenizer: Tokenizer
    shape: Shape
    day: Callable[[str], str]
    options: Mapping[str, Any]

    def __call__(
        self, messages: Sequence[Message], tools: tuple[str, ...] = (), *, opening: bool = True
    ) -> str:
        shaped = list(_shaped(messages, self.shape))
        try:
            with users_code():
                text: str = self.tokenizer.apply_chat_template(
                    [_plain(message, self.shape) for message in shaped],
                    tools=[json.loads(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=opening,
                    strftime_now=self.day,
                    **self.options,
                )
        except Exception as error:  # templates raise anything, and arguments may be no JSON
            roles = ", ".join(message.role for message in shaped)
            raise ConfigError(f"the chat template refuses the roles ({roles}): {one_line(error)}") from error
        return encodable(text)


@dataclass(frozen=True)
class Accepted:
    """The messages that a template writes beside those of every conversation, all of their text."""

    system: bool = True  # a system message at the beginning
    several: bool = True  # more of them there
    later: bool = True  # and behind other messages
    users: bool = True  # two messages of the user in a row


def fold(messages: Sequence[Message], accepted: Accepted, beginning: bool = True) -> tuple[Message, ...]:
    """The conversation (its `beginning`, or what answers a turn of the model) in messages that the template
    accepts: system messages at the beginning become one; those that it refuses or would drop, the user's."""
    lead = tuple(itertools.takewhile(lambda message: beginning and message.role == "system", messages))
    rest = messages[len(lead) :]
    found = list(lead if accepted.system else ())
    if len(found) > 1 and not accepted.several:
        found = [_joined(found)]
    for message in rest if accepted.system else (*lead, *rest):
        foreign = message.role == "system" and not (accepted.system and accepted.later)
        own = replace(message, role="user") if foreign else message
        follows = bool(found) and found[-1].role == own.role == "user"
        if follows and not accepted.users:
            found[-1] = _joined((found[-1], own))
        else:
            found.append(own)
    return tuple(found)


def _joined(messages: Sequence[Message]) -> Message:
    return replace(messages[0], content="\n\n".join(message.content for message in messages))


def find_shape(tokenizer: Tokenizer, day: Callable[[str], str], options: Mapping[str, Any]) -> Shape:
    """The shape nearest to the default in which the template shows turns with calls, well-formed or not, and
    their replies; else one in which it shows the replies only. Shapes with a tool role come first, and those
    that show the content. The default if there is none: the template is not one for tools."""
    flags = itertools.product((False, True), repeat=len(astuple(Shape())))
    shapes = sorted(
        itertools.starmap(Shape, flags), key=lambda s: (s.user_replies, s.bare_calls, sum(astuple(s)))
    )
    for _, alike in itertools.groupby(shapes, key=lambda shape: shape.user_replies):
        shown = {shape: _shown(Renderer(tokenizer, shape, day, options)) for shape in alike}
        for wanted in (("calls", "replies"), ("replies",)):
            if found := next((shape for shape, parts in shown.items() if parts == wanted), None):
                return found
    return Shape()


def _shown(render: Render) -> tuple[str, ...]:
    """The part of turns with calls that the template shows: their calls, or none of them, and the replies."""
    try:
        text = render(_PROBE)
    except ConfigError:
        return ()
    replies = [text.find(f"asyncrl-{number}") for number in ("one", "two", "three")]
    calls = [f"asyncrl-{number}" in text for number in ("first", "second", "third")]
    if min(replies) < 0 or replies != sorted(replies) or any(calls) != all(calls):
        return ()
    if "'asyncrl'" in text:  # arguments as Python writes them
        return ()
    return ("calls", "replies") if all(calls) else ("replies",)


_PROBE = (
    Message("user", "asyncrl-question"),
    Message(
        "assistant",
        "asyncrl-turn",
        (
            ToolCall("asyncrl_one", '{"asyncrl": "asyncrl-first"}', "call_0"),
            ToolCall("asyncrl_two", '{"asyncrl": "asyncrl-second"}', "call_1"),
        ),
        reasoning="asyncrl-thought",
    ),
    Message("tool", "asyncrl-one", tool_call_id="call_0", name="asyncrl_one"),
    Message("tool", "asyncrl-two", tool_call_id="call_1", name="asyncrl_two"),
    Message(
        "assistant",
        "asyncrl-turn",
        (ToolCall("asyncrl_one", '{"asyncrl": "asyncrl-third"}', "call_2"),),
    ),
    Message("tool", "asyncrl-three", tool_call_id="call_2", name="asyncrl_one"),
    Message("assistant", "asyncrl-wrong"),
    Message("tool", "asyncrl-error", name="malformed_call"),
    Message("assistant", "asyncrl-answer"),
    Message("user", "asyncrl-more"),
)


def _shaped(messages: Sequence[Message], shape: Shape) -> Iterator[Message]:
    """The same conversation in messages that the template accepts."""
    if shape.user_replies:
        messages = _as_user_messages(messages)
    if shape.called_only:
        messages = _with_calls(messages)
    for message in messages:
        if shape.bare_calls and message.tool_calls:
            message = replace(message, content="")
        if shape.one_text and message.tool_calls and message.reasoning and message.content:
            both = f"{message.reasoning}\n\n{message.content}"
            message = replace(message, content="", reasoning=both)
        if shape.single_calls and len(message.tool_calls) > 1:
            yield replace(message, tool_calls=message.tool_calls[:1])
            for call in message.tool_calls[1:]:
                yield Message(message.role, tool_calls=(call,))
        else:
            yield message


def _as_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Tool replies, and a user message that follows them, as one message of the user."""
    shaped: list[Message] = []
    after_tool = False
    for message in messages:
        tool = message.role == "tool"
        text = f"<tool_response>\n{message.content}\n</tool_response>" if tool else message.content
        if after_tool and message.role in ("tool", "user"):
            shaped[-1] = Message("user", f"{shaped[-1].content}\n{text}")
        else:
            shaped.append(Message("user", text) if tool else message)
        after_tool = tool
    return shaped


def _with_calls(messages: Sequence[Message]) -> list[Message]:
    """A turn with tool replies but no call that can be shown gets calls of those tools without arguments."""
    shaped: list[Message] = []
    for message in reversed(messages):
        if message.role == "assistant" and not message.tool_calls:
            replies = list(itertools.takewhile(lambda later: later.role == "tool", reversed(shaped)))
            calls = tuple(ToolCall(reply.name or "tool", "{}", reply.tool_call_id) for reply in replies)
            message = Message(message.role, tool_calls=calls) if calls else message
        shaped.append(message)
    return shaped[::-1]


def _plain(message: Message, shape: Shape) -> dict[str, Any]:
    """The message as the template gets it. Most templates read `reasoning_content`, gpt-oss `thinking`,
    Solar-Open `reasoning`."""
    plain = message.openai()
    if shape.bare_calls and message.tool_calls:
        plain["content"] = None
    if message.reasoning:
        plain["thinking"] = plain["reasoning"] = message.reasoning
    for call in plain.get("tool_calls", ()):
        call["id"] = _call_id(call["id"], shape)
        if not shape.argument_text:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    if message.tool_call_id or message.role == "tool":
        plain["tool_call_id"] = _call_id(message.tool_call_id, shape)
    return plain


def _call_id(name: str, shape: Shape) -> str:
    if not shape.short_ids or re.fullmatch("[a-zA-Z0-9]{9}", name):
        return name
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=5).hexdigest()[:9]
