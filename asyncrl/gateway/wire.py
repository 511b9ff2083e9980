"""OpenAI's chat completions, as far as a policy under training can serve them: requests, answers, errors.

Sampling parameters of a request are ignored: the run has its own. What asks for a certain form of the answer
is a hint, for the same reason: a grammar would change the distribution that log-probs are of.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.conversation.branches import AgentRequest, Refusal
from asyncrl.errors import AsyncrlError
from asyncrl.types import EpisodeEnd, Message, StopReason, ToolCall, Turn

MODEL = "policy"
IGNORED = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
MAX_CHOICES = 128  # answers to one request
MAX_STOPS = 32  # texts of one request that end the answer
_CODES = {EpisodeEnd.LENGTH: "context_length_exceeded"}
_OURS = re.compile(r"(.*)-t\d+", re.DOTALL)  # ids of tool calls as we give them out
_ids = itertools.count()


class ApiError(AsyncrlError):
    """An error response, in OpenAI's format."""

    def __init__(
        self, status: int, message: str, code: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.kind = status, code, kind

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.code}
        return {"error": error}


class AgentReply(msgspec.Struct, frozen=True):
    """A turn of the model for an agent, its message, and the number of tokens in its prompt."""

    message: Message
    turn: Turn
    prompt_tokens: int


def refused(refusal: Refusal) -> ApiError:
    """The error that the client gets for a limit."""
    return ApiError(400, refusal.detail, _CODES.get(refusal.end, str(refusal.end)))


ToldOf = Callable[[int, str, str], None]
"""Called with the number of an answer, and what is new of its reasoning and of its content."""

Event = tuple[str, dict[str, Any]]
"""A server-sent event: its type ('' for none), and its data."""


class Exchange(Protocol):
    """A request of one of the APIs, read, and how that API answers it: as a whole, or as events. `unheeded`:
    the parameters that do not have the effect that their names promise. `texts`: of each answer, one per id
    of its turn, for log-probs."""

    ask: AgentRequest
    count: int
    stream: bool
    logprobs: bool
    unheeded: dict[str, str]

    def whole(self, replies: Sequence[AgentReply], texts: Sequence[Sequence[str]]) -> dict[str, Any]: ...
    def begin(self) -> Iterator[Event]: ...
    def told(self, index: int, reasoning: str, content: str) -> Iterator[Event]: ...
    def end(self, replies: Sequence[AgentReply], texts: Sequence[Sequence[str]]) -> Iterator[Event]: ...


@dataclass
class ToldText:
    """What a client has been told of an answer that grows."""

    reasoning: str = ""
    content: str = ""

    def rest(self, message: Message) -> tuple[str, str]:
        """What it has not been told of the whole reasoning and content. Content that turns out to be quoted
        with its calls has what was told somewhere in it."""
        return _after(self.reasoning, message.reasoning), _after(self.content, message.content)


def _after(told: str, whole: str) -> str:
    return whole.partition(told)[2] if told else whole


# -- requests ----------------------------------------------------------------------------------------


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class ChatToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


Limit = Annotated[int, Meta(ge=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]

SAMPLING = "is ignored: sampling is the run's (rollout.temperature)"
HINT = "is a hint: tokens are not constrained, so the model may answer otherwise"


ModelName = Annotated[str, Meta(max_length=256)]  # any: it names the agent


class ChatRequest(msgspec.Struct, frozen=True):
    """The body of a request. Fields that are not here have no effect, as have those in IGNORED."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: ModelName | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    response_format: dict[str, Any] | None = None
    functions: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Any = None
    top_p: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None


_decode = msgspec.json.Decoder(ChatRequest).decode


def read_request(body: bytes) -> ChatRequest:
    """ApiError for an invalid request, or an unsupported option."""
    try:
        request = _decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the request cannot be read: {error}") from error
    refuse(
        {
            "functions: use tools": bool(request.functions),
            "top_logprobs: only the sampled token's log-prob is known": bool(request.top_logprobs),
        }
    )
    return request


def refuse(unsupported: dict[str, bool]) -> None:
    """ApiError for the first of these that is given."""
    for what, given in unsupported.items():
        if given:
            raise ApiError(400, f"not supported: {what}", "unsupported_parameter")


def agent_request(request: ChatRequest) -> AgentRequest:
    """The request as the episode sees it. ApiError for a message or a tool that no template can write."""
    tools = () if request.tool_choice == "none" else tuple(map(tool, request.tools or ()))
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    most, agent = min(limits, default=None), request.model or MODEL
    return AgentRequest(_messages(request.messages), tools, most, stops, agent)


def unheeded(request: Any, form: dict[str, Any] | None) -> dict[str, str]:
    """The parameters of a request that do not do what their names say, and what they do. `form`: of the
    answer. ApiError for a choice or a form that OpenAI does not know."""
    choice = request.tool_choice
    if not (choice in (None, "auto", "none", "required") or (isinstance(choice, dict) and "type" in choice)):
        raise ApiError(400, f"tool_choice: {choice!r} is none of auto, none, required, or a named function")
    kind = (form or {}).get("type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        raise ApiError(400, f"the format {kind!r} of the answer is none of text, json_object, json_schema")
    hints = {
        "tool_choice": choice not in (None, "auto", "none"),
        "parallel_tool_calls": request.parallel_tool_calls is False,
        "response_format": kind != "text",
    }
    found = {name: SAMPLING for name in IGNORED if getattr(request, name, None) is not None}
    return found | {name: HINT for name, given in hints.items() if given}


def tool(schema: dict[str, Any]) -> str:
    """A tool's schema as JSON text. ApiError if it is none."""
    function = schema.get("function")
    if schema.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
        raise ApiError(400, 'a tool is {"type": "function", "function": {"name": ...}}')
    return msgspec.json.encode(schema).decode()


def _messages(sent: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Replies to tool calls get the name of the tool, which some templates write, from the call."""
    names: dict[str, str] = {}
    messages = []
    for one in sent:
        calls = tuple(map(_call, one.tool_calls or ()))
        names |= {sent.id: call.name for sent, call in zip(one.tool_calls or (), calls, strict=True)}
        answers = one.tool_call_id or ""
        messages.append(
            Message(
                role="system" if one.role == "developer" else one.role,
                content=text_of(one.content),
                tool_calls=calls,
                tool_call_id=own_id(answers),
                name=names.get(answers, one.name or ""),
                reasoning=one.reasoning_content or "",
            )
        )
    return tuple(messages)


def text_of(content: str | list[ContentPart] | None) -> str:
    """ApiError for content that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if other := [part.type for part in content if not part.type.endswith("text")]:
        raise ApiError(400, f"content of type {other[0]!r} is not supported; send text")
    return "".join(part.text for part in content)


def _call(call: ChatToolCall) -> ToolCall:
    return tool_call(call.function.name, call.function.arguments, call.id)


def tool_call(name: str, arguments: str, wire_id: str) -> ToolCall:
    """A call that a client sends back. ApiError if its arguments are no JSON object."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, f"the arguments of a call of {name!r} are no JSON object")
    return ToolCall(name, arguments or "{}", own_id(wire_id))


def own_id(wire_id: str) -> str:
    """The id as the model's format has it."""
    match = _OURS.fullmatch(wire_id)
    return match[1] if match else wire_id


# -- answers -----------------------------------------------------------------------------------------


@dataclass
class ChatExchange:
    """See `Exchange`."""

    request: ChatRequest
    ask: AgentRequest = field(init=False)
    unheeded: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.unheeded = unheeded(self.request, self.request.response_format)
        self.ask = agent_request(self.request)
        self.count, self.stream = self.request.n or 1, bool(self.request.stream)
        self.logprobs = bool(self.request.logprobs)
        self._head, self._told = _head("chat.completion.chunk"), [ToldText() for _ in range(self.count)]

    def whole(self, replies: Sequence[AgentReply], texts: Sequence[Sequence[str]]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", **_content(reply), "refusal": None},
                "finish_reason": _finish(reply),
                "logprobs": _logprobs(reply, text) if self.logprobs else None,
            }
            for index, (reply, text) in enumerate(zip(replies, texts, strict=True))
        ]
        return {**_head("chat.completion"), "choices": choices, "usage": _usage(replies)}

    def begin(self) -> Iterator[Event]:
        for index in range(self.count):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def told(self, index: int, reasoning: str, content: str) -> Iterator[Event]:
        self._told[index].reasoning += reasoning
        self._told[index].content += content
        for key, text in (("reasoning_content", reasoning), ("content", content)):
            if text:
                yield self._delta(index, {key: text})

    def end(self, replies: Sequence[AgentReply], texts: Sequence[Sequence[str]]) -> Iterator[Event]:
        """What was not told yet, one chunk per call, the end."""
        for index, (reply, text) in enumerate(zip(replies, texts, strict=True)):
            yield from self.told(index, *self._told[index].rest(reply.message))
            for number, call in enumerate(calls_of(reply)):
                yield self._delta(index, {"tool_calls": [{"index": number, **call.openai()}]})
            yield self._delta(index, {}, _finish(reply), _logprobs(reply, text) if self.logprobs else None)
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield "", {**self._head, "choices": [], "usage": _usage(replies)}

    def _delta(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return "", {**self._head, "choices": [choice]}


def model() -> dict[str, Any]:
    """The policy, whatever name a client has for it."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncrl"}


def models() -> dict[str, Any]:
    """The list of one."""
    return {"object": "list", "data": [model()]}


def new_id(prefix: str) -> str:
    """An id that no other answer of this process has."""
    return f"{prefix}-{next(_ids)}"


def calls_of(reply: AgentReply) -> list[ToolCall]:
    """The calls with the ids that clients get: parsers number the calls of each turn anew."""
    return [replace(call, id=f"{call.id}-t{reply.turn.index}") for call in reply.message.tool_calls]


def _head(kind: str) -> dict[str, Any]:
    return {"id": new_id("chatcmpl"), "object": kind, "created": int(time.time()), "model": MODEL}


def _content(reply: AgentReply) -> dict[str, Any]:
    message = reply.message
    found: dict[str, Any] = {"content": message.content or (None if message.tool_calls else "")}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [call.openai() for call in calls_of(reply)]
    return found


def _finish(reply: AgentReply) -> str:
    if reply.turn.stop is StopReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _usage(replies: Sequence[AgentReply]) -> dict[str, int]:
    """The answers to one request have its prompt in common."""
    read, written = replies[0].prompt_tokens, sum(len(reply.turn.ids) for reply in replies)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _logprobs(reply: AgentReply, texts: Sequence[str]) -> dict[str, Any]:
    """Those of all tokens, markup of calls and the end of turn included."""
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, reply.turn.logprobs, strict=True)
        ]
    }
