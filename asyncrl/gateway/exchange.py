"""Holds the parts that the APIs of the gateway share: `Exchange`, a request and its answers in the words of
an API; errors; the forms of tools and texts.

Sampling parameters of a request are ignored: the run sets sampling. Parameters for the form of the answer are
hints, for the same reason: a grammar would change the distribution behind the log-probs.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.conversation.requests import AgentRequest, Refusal
from asyncrl.errors import UNDECODABLE, AsyncrlError
from asyncrl.gateway.images import RequestContent, RequestImages
from asyncrl.types import EpisodeEnd, Message, ToolCall, Turn

T = TypeVar("T")

MODEL = "policy"
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
LIMIT_CODES = {EpisodeEnd.LENGTH: "context_length_exceeded"}  # usual error codes of limits
_OUR_CALL_ID = re.compile(r"(.*)-t\d+", re.DOTALL)  # ids of tool calls that clients get
_id_numbers = itertools.count()


class ApiError(AsyncrlError):
    """An error response, which each dialect writes in its own form."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        kind: str = "invalid_request_error",
        refusal: Refusal | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.refusal = refusal


class AgentReply(msgspec.Struct, frozen=True):
    """A turn of the model for an agent, with the message and the number of prompt tokens. `decode`: the
    tokenizer's. `stopped_at`: the stop text that ended the turn."""

    message: Message
    turn: Turn
    prompt_tokens: int
    decode: Callable[[Sequence[int]], str]
    stopped_at: str = ""

    @property
    def texts(self) -> list[str]:
        """Return the text of each token, for log-probs."""
        return [self.decode((token,)) for token in self.turn.generation.ids]


def openai_error(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.code}}


class Listener(Protocol):
    """Hears of a request's answers while they are sampled."""

    def start(self, prompt_tokens: int) -> None:
        """The request was placed; the answers will be sampled, or exist already."""

    def delta(self, index: int, reasoning: str, content: str) -> None:
        """Answer `index` has grown by this text."""


Event = tuple[str, dict[str, Any]]
"""A server-sent event: the type ('' for none), and the data."""


def encode_events(events: Iterable[Event]) -> bytes:
    """Encode events for one write; without events, a comment line."""
    event_texts = [
        (f"event: {kind}\n".encode() if kind else b"") + b"data: " + msgspec.json.encode(data) + b"\n\n"
        for kind, data in events
    ]
    return b"".join(event_texts) or b":\n\n"


class Exchange(Protocol):
    """A request of an API, and the API's way to answer: in one piece, or as events. `request`: the request
    without the conversation, whose images may have 64 MiB. `ignored_parts`: what the run ignores or takes as
    a hint, and what happens to it; `ignored_fields` are added."""

    request: Any
    agent_request: AgentRequest
    count: int = 1
    ignored_parts: dict[str, str]

    def full_answer(self, replies: Sequence[AgentReply]) -> dict[str, Any]: ...
    def begin(self, prompt_tokens: int) -> Iterator[Event]: ...
    def delta(self, index: int, reasoning: str, content: str) -> Iterator[Event]: ...
    def ping(self) -> Iterator[Event]:
        """Return events that show that the turn goes on; without events, a comment line shows it."""
        return iter(())

    def end(self, replies: Sequence[AgentReply]) -> Iterator[Event]: ...


Body = bytes | bytearray
"""The body of a request as received. Making bytes of a bytearray would copy up to 64 MiB."""


@dataclass(frozen=True)
class ApiDialect:
    """An API's requests and errors, and the bytes behind the last event of its streams."""

    read: Callable[[Body, RequestImages], Exchange]
    error: Callable[[ApiError], dict[str, Any]]
    done: bytes = b"data: [DONE]\n\n"


@dataclass
class StreamedText:
    """Keeps the text of a growing answer that was streamed to a client. `kinds`: the API's names of reasoning
    and content."""

    kinds: tuple[str, str]
    reasoning: str = ""
    content: str = ""

    def add_streamed(self, reasoning: str, content: str) -> list[tuple[str, str]]:
        """Keep the text that is streamed now, and return the texts by kind."""
        self.reasoning += reasoning
        self.content += content
        return [(kind, text) for kind, text in zip(self.kinds, (reasoning, content), strict=True) if text]

    def unstreamed_texts(self, message: Message) -> tuple[str, str]:
        """Return the reasoning and content not streamed yet. Content that turns out to be quoted with calls
        contains the streamed text somewhere."""
        return (
            _unstreamed_part(self.reasoning, message.reasoning),
            _unstreamed_part(self.content, message.content),
        )


def _unstreamed_part(streamed_text: str, full_text: str) -> str:
    """Return the text after the streamed text; the full text if it lacks the streamed text (a thought that
    ends without a beginning)."""
    if not streamed_text or streamed_text not in full_text:
        return full_text
    return full_text.partition(streamed_text)[2]


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content. `image_url`: a URL, or an object with `url`."""

    type: str
    text: str = ""
    refusal: str = ""
    image_url: Any = None


Limit = Annotated[int, Meta(ge=1)]


SAMPLING_EFFECT = "is ignored, because the run sets the sampling parameters (rollout.temperature)"
HINT_EFFECT = "is only a hint that the model may ignore (only tool_choice=none is enforced)"
MAX_LOGGED_FIELDS = 200  # names of fields that are logged, since agents choose names
USUAL_VALUES = (msgspec.Raw(b"null"), msgspec.Raw(b'"auto"'))  # of a field that is not worth a line
FORM_FIELDS = ("tool_choice", "parallel_tool_calls", "response_format", "text")
ModelName = Annotated[str, Meta(max_length=256)]  # any text: the name of the agent


def read_body(body: Body, request_type: type[T], unsupported: Mapping[str, str]) -> T:
    """Decode the body of a request. ApiError for an unreadable body, or with advice for the fields
    `unsupported`."""
    try:
        request = msgspec.json.decode(body, type=request_type)
    except UNDECODABLE as error:
        raise ApiError(400, f"the request cannot be read: {error}") from error

    for field_name, advice in unsupported.items():
        if getattr(request, field_name):
            raise ApiError(400, f"{field_name} is not supported: {advice}", "unsupported_parameter")

    return request


def agent_request(
    messages: Iterable[Message],
    tools: Iterable[dict[str, Any]],
    *,
    model: str | None,
    tool_choice: Any,
    max_tokens: int | None,
    stops: Sequence[str] = (),
) -> AgentRequest:
    """Make the request for the episode, of messages with the client's ids. `max_tokens`: the client's limit.
    ApiError for invalid tools, and for a conversation that ends with the model's own words."""
    conversation = tuple(_template_messages(messages))
    if conversation and conversation[-1].role == "assistant":
        raise ApiError(
            400,
            "the last message is from the assistant and cannot be continued; add a user message",
        )

    choice_kind = tool_choice.get("type") if isinstance(tool_choice, dict) else tool_choice
    schemas = () if choice_kind == "none" else tuple(map(_tool_schema, tools))
    return AgentRequest(
        messages=conversation,
        tools=schemas,
        max_new_tokens=max_tokens,
        stops=tuple(stops),
        agent=model or MODEL,
    )


def _template_messages(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield messages with the roles and ids that templates know. Replies to calls get the name of the tool,
    which some templates write, from the call."""
    tool_names: dict[str, str] = {}
    for message in messages:
        tool_names |= {call.id: call.name for call in message.tool_calls if call.id}
        calls = tuple(replace(call, id=own_id(call.id)) for call in message.tool_calls)
        role = "system" if message.role == "developer" else message.role
        tool_name = tool_names.get(message.tool_call_id, message.name)
        yield replace(
            message, role=role, tool_calls=calls, tool_call_id=own_id(message.tool_call_id), name=tool_name
        )


def ignored_fields(body: Body, request_type: type[msgspec.Struct]) -> dict[str, str]:
    """Return those of the first MAX_LOGGED_FIELDS fields of a body that are ignored or only hints, and what
    happens to them; none for a body with a name that is not UTF-8. `request_type` has the fields that a
    dialect knows."""
    try:
        sent_fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNDECODABLE:
        return {}

    effects = dict.fromkeys(request_type.__struct_fields__, "") | dict.fromkeys(FORM_FIELDS, HINT_EFFECT)
    effects |= dict.fromkeys(SAMPLING_FIELDS, SAMPLING_EFFECT)
    effects_by_name = {}
    for field_name, value in itertools.islice(sent_fields.items(), MAX_LOGGED_FIELDS):
        effect = effects.get(field_name, "has no effect")
        if effect and value not in USUAL_VALUES:
            effects_by_name[field_name] = effect

    return effects_by_name


def _tool_schema(schema: dict[str, Any]) -> str:
    """Return a tool's schema as JSON text. ApiError if the schema describes no function."""
    function = schema.get("function")
    if schema.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
        raise ApiError(400, 'a tool must have the form {"type": "function", "function": {"name": ...}}')
    return msgspec.json.encode(schema).decode()


def content_of(content: str | list[ContentPart] | None, images: RequestImages) -> RequestContent:
    """Return the text and the images of a message. ApiError for other content, ImageError for a bad image."""
    if content is None or isinstance(content, str):
        return images.read_text(content or "")

    picture_types = ("image", "image_url")
    contents: list[RequestContent] = []
    for part in content:
        if part.type.endswith(picture_types):
            is_object = isinstance(part.image_url, dict)
            contents.append(images.read_url(part.image_url.get("url") if is_object else part.image_url))
        elif part.type.endswith(("text", "refusal")):
            contents.append(images.read_text(part.text or part.refusal))
        else:
            raise ApiError(400, f"content of type {part.type!r} is not supported; send text or images")

    return RequestContent.join("", contents)


def tool_call(name: str, arguments: str, wire_id: str) -> ToolCall:
    """Read a call that a client sends back. ApiError if the arguments are no JSON object."""
    try:
        parsed_arguments = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed_arguments = None
    if not isinstance(parsed_arguments, dict):
        raise ApiError(400, f"the arguments of a call to {name!r} are not a JSON object")
    return ToolCall(name, arguments or "{}", wire_id)


def own_id(wire_id: str) -> str:
    """Return the id in the model's format."""
    match = _OUR_CALL_ID.fullmatch(wire_id)
    return match[1] if match else wire_id


def model(name: str = MODEL) -> dict[str, Any]:
    """Describe the policy under any name that a client uses."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "asyncrl"}


def new_id(prefix: str) -> str:
    """Make an id that no other answer of this process has."""
    return f"{prefix}-{next(_id_numbers)}"


def stops_of(stop: str | Sequence[str] | None) -> Sequence[str]:
    return (stop,) if isinstance(stop, str) else stop or ()


def calls_of(reply: AgentReply) -> list[ToolCall]:
    """Return the calls with the ids that clients get: parsers number the calls of each turn anew."""
    return [replace(call, id=f"{call.id}-t{reply.turn.index}") for call in reply.message.tool_calls]
