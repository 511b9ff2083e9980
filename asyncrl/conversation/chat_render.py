"""Writes messages as text by the tokenizer's own chat template.

Templates differ in small things: whether the arguments of a call are an object or text, how long the id of a
call is, how many calls a turn may have, whether there is a tool role. `find_shape` finds the `Shape` of
messages that a template wants by trying all shapes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from dataclasses import replace as replace_field
from typing import Any, Protocol

from msgspec.structs import replace

from asyncrl.errors import ConfigError, one_line, users_code
from asyncrl.types import MALFORMED_CALL, Message, ToolCall
from asyncrl.values import encodable

Render = Callable[..., str]  # (messages, tools, opening=) -> text: a `Renderer`


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that asyncrl calls."""

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
    content_lists: bool = False  # content is a list of parts, also without images (LLaVA, Idefics, SmolVLM)


@dataclass(frozen=True)
class Renderer:
    """Renders messages and tools (JSON text) as text; `opening`: the start of the model's turn follows.
    ConfigError when the template refuses the messages. `day` formats the date for templates that write a
    date, which must not change while an episode runs; `options` are further arguments of the template.
    `distinct_ids`: the template does not write the ids of calls, so every call gets an id of its own.
    `plain_text`: applied to each text of the messages and tools."""

    tokenizer: Tokenizer
    shape: Shape
    day: Callable[[str], str]
    options: Mapping[str, Any]
    distinct_ids: bool = False
    plain_text: Callable[[str], str] | None = None

    def __call__(
        self, messages: Sequence[Message], tools: tuple[str, ...] = (), *, opening: bool = True
    ) -> str:
        if self.distinct_ids:
            messages = _with_distinct_ids(messages)

        shaped_messages = list(_shape_messages(messages, self.shape))
        try:
            with users_code():
                template_messages = [_template_message(message, self.shape) for message in shaped_messages]
                text: str = self.tokenizer.apply_chat_template(
                    self._with_plain_texts(template_messages),
                    tools=self._with_plain_texts([json.loads(tool) for tool in tools]) or None,
                    tokenize=False,
                    add_generation_prompt=opening,
                    strftime_now=self.day,
                    **self.options,
                )
        except Exception as error:  # templates raise anything, and arguments may be no JSON
            roles = ", ".join(message.role for message in shaped_messages)
            raise ConfigError(
                f"the chat template rejects messages with the roles {roles}: {one_line(error)}"
            ) from error

        return encodable(text)

    def _with_plain_texts(self, value: Any) -> Any:
        """Return a JSON value with `plain_text` of all its texts."""
        if self.plain_text is None:
            return value
        if isinstance(value, str):
            return self.plain_text(value)
        if isinstance(value, list):
            return [self._with_plain_texts(item) for item in value]
        if isinstance(value, dict):
            return {self.plain_text(key): self._with_plain_texts(item) for key, item in value.items()}
        return value


@dataclass(frozen=True)
class Accepted:
    """Which messages a template writes completely, beside the messages of every conversation."""

    system: bool = True  # a system message at the beginning
    several: bool = True  # several system messages at the beginning
    later: bool = True  # a system message after other messages
    users: bool = True  # two messages of the user in a row


def fold(messages: Sequence[Message], accepted: Accepted, beginning: bool = True) -> tuple[Message, ...]:
    """Return the conversation (the `beginning`, or an answer to a turn of the model) in messages that the
    template accepts: system messages at the beginning become one message; system messages that the template
    refuses or would drop become messages of the user."""
    leading_system = tuple(
        itertools.takewhile(lambda message: beginning and message.role == "system", messages)
    )
    later_messages = messages[len(leading_system) :]
    folded_messages = list(leading_system if accepted.system else ())
    if len(folded_messages) > 1 and not accepted.several:
        folded_messages = [_join_messages(folded_messages)]

    for message in later_messages if accepted.system else (*leading_system, *later_messages):
        is_refused = message.role == "system" and not (accepted.system and accepted.later)
        accepted_message = replace(message, role="user") if is_refused else message

        follows_user = bool(folded_messages) and folded_messages[-1].role == accepted_message.role == "user"
        if follows_user and not accepted.users:
            folded_messages[-1] = _join_messages((folded_messages[-1], accepted_message))
        else:
            folded_messages.append(accepted_message)

    return tuple(folded_messages)


def _join_messages(messages: Sequence[Message]) -> Message:
    return replace(
        messages[0],
        content="\n\n".join(message.content for message in messages),
        images=tuple(image for message in messages for image in message.images),
    )


def find_renderer(
    tokenizer: Tokenizer, format_date: Callable[[str], str], options: Mapping[str, Any]
) -> Renderer:
    """Return the renderer for the tokenizer's template: with the shape of messages that the template wants,
    and with distinct ids unless the template writes ids."""
    shape = _find_shape(tokenizer, format_date, options)
    renderer = Renderer(tokenizer, shape, format_date, options)
    distinct_renderer = replace_field(renderer, distinct_ids=True)
    try:
        ids_matter = renderer(_PROBE_CONVERSATION) != distinct_renderer(_PROBE_CONVERSATION)
    except ConfigError:
        return renderer

    return renderer if ids_matter else distinct_renderer


def _find_shape(tokenizer: Tokenizer, format_date: Callable[[str], str], options: Mapping[str, Any]) -> Shape:
    """Return the shape nearest to the default in which the template shows turns with calls, well-formed or
    not, and the replies; else a shape in which the template shows the replies only. Shapes with a tool role
    come first, and shapes that show the content. The default shape for a template that cannot show tools."""
    content_lists = _needs_content_lists(tokenizer, format_date, options)
    flags = itertools.product((False, True), repeat=len(astuple(Shape())) - 1)
    shapes = sorted(
        (replace_field(shape, content_lists=content_lists) for shape in itertools.starmap(Shape, flags)),
        key=lambda shape: (shape.user_replies, shape.bare_calls, sum(astuple(shape))),
    )
    for _, similar_shapes in itertools.groupby(shapes, key=lambda shape: shape.user_replies):
        parts_by_shape = {
            shape: _shown_parts(Renderer(tokenizer, shape, format_date, options)) for shape in similar_shapes
        }
        for wanted_parts in (
            ("calls", "replies", "errors"),
            ("calls", "replies"),
            ("replies", "errors"),
            ("replies",),
        ):
            if matching_shape := next(
                (shape for shape, parts in parts_by_shape.items() if parts == wanted_parts), None
            ):
                return matching_shape

    return Shape(content_lists=content_lists)


def _needs_content_lists(
    tokenizer: Tokenizer, format_date: Callable[[str], str], options: Mapping[str, Any]
) -> bool:
    """Return True if the template shows content that is a list of parts, but not content that is a text."""
    messages = (Message("user", "asyncrl-question"), Message("assistant", "asyncrl-turn"))
    for content_lists in (False, True):
        render = Renderer(tokenizer, Shape(content_lists=content_lists), format_date, options)
        with suppress(ConfigError):
            text = render(messages, opening=False)
            if all(message.content in text for message in messages):
                return content_lists

    return False


def _shown_parts(render: Render) -> tuple[str, ...]:
    """Return the parts of turns with calls that the template shows: the calls (all or none), the replies, and
    the errors of malformed calls. Nothing if a part is out of order."""
    try:
        text = render(_PROBE_CONVERSATION)
    except ConfigError:
        return ()

    reply_positions = [text.find(f"asyncrl-{number}") for number in ("one", "two", "three")]
    calls_shown = [f"asyncrl-{number}" in text for number in ("first", "second", "third")]
    if (
        min(reply_positions) < 0
        or reply_positions != sorted(reply_positions)
        or any(calls_shown) != all(calls_shown)
    ):
        return ()

    content_positions = [text.find(content) for content in ("asyncrl-turn", "asyncrl-later-turn")]
    if content_positions[0] > reply_positions[0] or content_positions[1] > reply_positions[2]:
        return ()  # Gemma 4 writes the content of a turn after the replies

    if "'asyncrl'" in text:  # arguments as Python writes them
        return ()

    shown_parts = ["calls"] if all(calls_shown) else []
    shown_parts.append("replies")
    if text.find("asyncrl-error") > reply_positions[-1]:
        shown_parts.append("errors")
    return tuple(shown_parts)


_PROBE_CONVERSATION = (
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
        "asyncrl-later-turn",
        (ToolCall("asyncrl_one", '{"asyncrl": "asyncrl-third"}', "call_2"),),
    ),
    Message("tool", "asyncrl-three", tool_call_id="call_2", name="asyncrl_one"),
    Message("assistant", "asyncrl-wrong"),
    Message("tool", "asyncrl-error", name=MALFORMED_CALL),
    Message("assistant", "asyncrl-answer"),
    Message("user", "asyncrl-more"),
)


def _with_distinct_ids(messages: Sequence[Message]) -> list[Message]:
    """Give each call an id that no other call of the conversation has, and each reply the id of its call. The
    parsers number the calls of each turn anew, but some templates (Command A) look up the call of a reply in
    the whole conversation. A reply without a call in the turn before keeps its id."""
    call_numbers = itertools.count()
    distinct_messages: list[Message] = []
    ids_in_turn: dict[str, list[str]] = {}  # by the id in the turn, which several calls may share
    for message in messages:
        if message.role == "assistant":
            ids_in_turn = {}
            distinct_calls: list[ToolCall] = []
            for call in message.tool_calls:
                distinct_id = f"asyncrl_call_{next(call_numbers)}"
                ids_in_turn.setdefault(call.id, []).append(distinct_id)
                distinct_calls.append(replace(call, id=distinct_id))
            message = replace(message, tool_calls=tuple(distinct_calls))
        elif ids_in_turn.get(message.tool_call_id):
            message = replace(message, tool_call_id=ids_in_turn[message.tool_call_id].pop(0))

        distinct_messages.append(message)

    return distinct_messages


def _shape_messages(messages: Sequence[Message], shape: Shape) -> Iterator[Message]:
    """Yield the same conversation in messages that the template accepts."""
    if shape.user_replies:
        messages = _as_user_messages(messages)
    if shape.called_only:
        messages = _with_calls(messages)

    for message in messages:
        if shape.bare_calls and message.tool_calls:
            message = replace(message, content="")

        if shape.one_text and message.tool_calls and message.reasoning and message.content:
            joined_text = f"{message.reasoning}\n\n{message.content}"
            message = replace(message, content="", reasoning=joined_text)

        if shape.single_calls and len(message.tool_calls) > 1:
            yield replace(message, tool_calls=message.tool_calls[:1])
            for call in message.tool_calls[1:]:
                yield Message(message.role, tool_calls=(call,))
        else:
            yield message


def _as_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Join tool replies, and a user message after the replies, into one message of the user."""
    user_messages: list[Message] = []
    after_tool = False
    for message in messages:
        is_tool = message.role == "tool"
        text = f"<tool_response>\n{message.content}\n</tool_response>" if is_tool else message.content

        if after_tool and message.role in ("tool", "user"):
            earlier_message = user_messages[-1]
            user_messages[-1] = Message(
                "user",
                f"{earlier_message.content}\n{text}",
                images=earlier_message.images + message.images,
            )
        else:
            user_messages.append(Message("user", text, images=message.images) if is_tool else message)

        after_tool = is_tool

    return user_messages


def _with_calls(messages: Sequence[Message]) -> list[Message]:
    """Give calls without arguments to a turn that has tool replies but no call that can be shown."""
    shaped_messages: list[Message] = []
    for message in reversed(messages):
        if message.role == "assistant" and not message.tool_calls:
            replies = list(itertools.takewhile(lambda later: later.role == "tool", reversed(shaped_messages)))
            calls = tuple(ToolCall(reply.name or "tool", "{}", reply.tool_call_id) for reply in replies)
            message = Message(message.role, tool_calls=calls) if calls else message
        shaped_messages.append(message)

    return shaped_messages[::-1]


def _template_message(message: Message, shape: Shape) -> dict[str, Any]:
    """Return a message as the template reads messages. Most templates read `reasoning_content`, gpt-oss
    `thinking`, Solar-Open `reasoning`."""
    template_message = message.openai()
    if message.images or shape.content_lists:
        parts = message.content_parts() or [{"type": "text", "text": ""}]
        template_message["content"] = [
            {"type": "image"} if part["type"] == "image" else part for part in parts
        ]
    if shape.bare_calls and message.tool_calls:
        template_message["content"] = None
    if message.reasoning:
        template_message["thinking"] = template_message["reasoning"] = message.reasoning

    for call in template_message.get("tool_calls", ()):
        call["id"] = _call_id(call["id"], shape)
        if not shape.argument_text:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])

    if message.tool_call_id or message.role == "tool":
        template_message["tool_call_id"] = _call_id(message.tool_call_id, shape)

    return template_message


def _call_id(name: str, shape: Shape) -> str:
    if not shape.short_ids or re.fullmatch("[a-zA-Z0-9]{9}", name):
        return name
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=5).hexdigest()[:9]
