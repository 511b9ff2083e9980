"""Messages as the tokenizer's own chat template writes them.

Templates disagree on small things: whether the arguments of a call are an object or text, how long the id of
a call is, how many calls a turn may have, whether tools may speak at all. `Shape` holds what one wants;
`find_shape` finds it by trying.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import msgspec

from asyncrl.errors import ConfigError, one_line
from asyncrl.types import Message, ToolCall
from asyncrl.values import encodable

Render = Callable[..., str]  # (messages, tools, opening=) -> text: a `Renderer`


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: int | None
    all_special_tokens: list[str]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...


@dataclass(frozen=True)
class Shape:
    """How a template wants its messages. The defaults: OpenAI's shape, with arguments as objects."""

    argument_text: bool = False  # arguments are JSON text (DeepSeek)
    short_ids: bool = False  # ids of calls have nine letters or digits (Mistral)
    single_calls: bool = False  # a message has one call (Llama, gpt-oss): several become several messages
    one_text: bool = False  # reasoning or content next to calls, not both (gpt-oss)
    called_only: bool = False  # tools speak after calls only (Mistral, gpt-oss), also about malformed ones
    user_replies: bool = False  # there is no tool role (Gemma): the user says what tools replied


@dataclass(frozen=True)
class Renderer:
    """Messages and tools (JSON text) to text; `opening`: the start of the model's turn follows. ConfigError
    when the template refuses them. `today` is the date for templates that ask for one: it must not change
    under a running episode."""

    tokenizer: Tokenizer
    shape: Shape
    today: datetime.date

    def __call__(
        self, messages: Sequence[Message], tools: tuple[str, ...] = (), *, opening: bool = True
    ) -> str:
        shaped = list(_shaped(messages, self.shape))
        try:
            text: str = self.tokenizer.apply_chat_template(
                [_plain(message, self.shape) for message in shaped],
                tools=[json.loads(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=opening,
                strftime_now=self.today.strftime,
            )
        except Exception as error:  # templates raise what they like, and arguments may be no JSON
            roles = ", ".join(message.role for message in shaped)
            raise ConfigError(f"the chat template refuses the roles ({roles}): {one_line(error)}") from error
        return encodable(text)


def find_shape(tokenizer: Tokenizer, today: datetime.date) -> Shape:
    """The shape with the fewest peculiarities in which turns with calls, well-formed or not, and their
    replies are shown; a template with a tool role keeps it. The default where none is: not a template for
    tools."""
    flags = itertools.product((False, True), repeat=len(astuple(Shape())))
    shapes = itertools.starmap(Shape, flags)
    for shape in sorted(shapes, key=lambda shape: (shape.user_replies, sum(astuple(shape)))):
        try:
            text = Renderer(tokenizer, shape, today)(_PROBE)
        except ConfigError:
            continue
        replies = text.find("asyncrl-one") < text.find("asyncrl-two") and "asyncrl-one" in text
        calls = ("asyncrl-first" in text) == ("asyncrl-second" in text)
        if replies and calls and "'asyncrl'" not in text:
            return shape
    return Shape()


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
    Message("assistant", "asyncrl-wrong"),
    Message("tool", "asyncrl-error", name="malformed_call"),
    Message("assistant", "asyncrl-answer"),
    Message("user", "asyncrl-more"),
)


def _shaped(messages: Sequence[Message], shape: Shape) -> Iterator[Message]:
    """The same conversation in the messages that the template knows."""
    if shape.user_replies:
        messages = _said_by_user(messages)
    if shape.called_only:
        messages = _with_calls(messages)
    for message in messages:
        if shape.one_text and message.tool_calls and message.reasoning and message.content:
            both = f"{message.reasoning}\n\n{message.content}"
            message = msgspec.structs.replace(message, content="", reasoning=both)
        if shape.single_calls and len(message.tool_calls) > 1:
            yield msgspec.structs.replace(message, tool_calls=message.tool_calls[:1])
            for call in message.tool_calls[1:]:
                yield Message(message.role, tool_calls=(call,))
        else:
            yield message


def _said_by_user(messages: Sequence[Message]) -> list[Message]:
    """Tool replies, with the words of a user that follow them, as one message of the user."""
    said: list[Message] = []
    open_to_more = False
    for message in messages:
        tool = message.role == "tool"
        text = f"<tool_response>\n{message.content}\n</tool_response>" if tool else message.content
        if open_to_more and message.role in ("tool", "user"):
            said[-1] = Message("user", f"{said[-1].content}\n{text}")
        else:
            said.append(Message("user", text) if tool else message)
        open_to_more = tool
    return said


def _with_calls(messages: Sequence[Message]) -> list[Message]:
    """A turn that tools answer, though it has no call that could be shown, calls them with nothing."""
    said: list[Message] = []
    for message in reversed(messages):
        if message.role == "assistant" and not message.tool_calls:
            replies = list(itertools.takewhile(lambda later: later.role == "tool", reversed(said)))
            calls = tuple(ToolCall(reply.name or "tool", "{}", reply.tool_call_id) for reply in replies)
            message = Message(message.role, tool_calls=calls) if calls else message
        said.append(message)
    return said[::-1]


def _plain(message: Message, shape: Shape) -> dict[str, Any]:
    """What the template gets. The reasoning has two names: most read the first, gpt-oss the second."""
    plain = message.openai()
    if message.reasoning:
        plain["thinking"] = message.reasoning
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
