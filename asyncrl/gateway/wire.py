"""OpenAI's chat completions, as far as a policy under training can serve them: requests, answers, errors.

Options that would change the sampled distribution or the model's tokens are refused. Sampling parameters of a
request are ignored: the run has its own.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.conversation.branches import AgentRequest, Refusal
from asyncrl.errors import AsyncrlError
from asyncrl.types import EpisodeEnd, Message, StopReason, ToolCall, Turn

MODEL = "policy"
IGNORED = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
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


class ChatRequest(msgspec.Struct, frozen=True):
    """The body of a request. Fields that are not here are ignored, as are those in IGNORED."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n: int | None = None
    stop: Any = None
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

    @property
    def ignored(self) -> list[str]:
        return [name for name in IGNORED if getattr(self, name) is not None]


_decode = msgspec.json.Decoder(ChatRequest).decode


def read_request(body: bytes) -> ChatRequest:
    """ApiError for an invalid request, or an unsupported option."""
    try:
        request = _decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the request cannot be read: {error}") from error
    unsupported = {
        "n: ask several times instead; each answer becomes a row": request.n not in (None, 1),
        "stop: a turn ends with the model's own end of turn": bool(request.stop),
        "response_format: tokens are not constrained while the policy is trained": (
            request.response_format is not None and request.response_format.get("type") != "text"
        ),
        "tool_choice: the model decides; use auto or none": request.tool_choice not in (None, "auto", "none"),
        "functions: use tools": bool(request.functions),
        "top_logprobs: only the sampled token's log-prob is known": bool(request.top_logprobs),
    }
    for what, given in unsupported.items():
        if given:
            raise ApiError(400, f"not supported: {what}", "unsupported_parameter")
    return request


def agent_request(request: ChatRequest) -> AgentRequest:
    """The request as the episode sees it. ApiError for a message or a tool that no template can write."""
    tools = () if request.tool_choice == "none" else tuple(map(_tool, request.tools or ()))
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    return AgentRequest(_messages(request.messages), tools, min(limits, default=None))


def _tool(schema: dict[str, Any]) -> str:
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
                content=_text(one.content),
                tool_calls=calls,
                tool_call_id=_own_id(answers),
                name=names.get(answers, one.name or ""),
                reasoning=one.reasoning_content or "",
            )
        )
    return tuple(messages)


def _text(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if other := [part.type for part in content if part.type != "text"]:
        raise ApiError(400, f"content of type {other[0]!r} is not supported; send text")
    return "".join(part.text for part in content)


def _call(call: ChatToolCall) -> ToolCall:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"the arguments of a call of {call.function.name!r} are no JSON object")
    return ToolCall(call.function.name, call.function.arguments or "{}", _own_id(call.id))


def _own_id(wire_id: str) -> str:
    """The id as the model's format has it."""
    match = _OURS.fullmatch(wire_id)
    return match[1] if match else wire_id


# -- answers -----------------------------------------------------------------------------------------


def completion(request: ChatRequest, reply: AgentReply, texts: Sequence[str]) -> dict[str, Any]:
    """A whole answer. `texts`: one per id of the turn, for log-probs."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", **_content(reply), "refusal": None},
        "finish_reason": _finish(reply),
        "logprobs": _logprobs(reply, texts) if request.logprobs else None,
    }
    return {**_head("chat.completion"), "choices": [choice], "usage": _usage(reply)}


def chunks(request: ChatRequest, reply: AgentReply, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The same as a stream: role, reasoning, content, one chunk per call, the end."""
    head = _head("chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    content = _content(reply)
    calls = content.pop("tool_calls", [])
    deltas += [{key: text} for key, text in reversed(content.items()) if text]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
    for delta in deltas:
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    logprobs = _logprobs(reply, texts) if request.logprobs else None
    last = {"index": 0, "delta": {}, "finish_reason": _finish(reply), "logprobs": logprobs}
    yield {**head, "choices": [last]}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


def models() -> dict[str, Any]:
    """The list of one."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncrl"}]}


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{next(_ids)}", "object": kind, "created": int(time.time()), "model": MODEL}


def _content(reply: AgentReply) -> dict[str, Any]:
    message = reply.message
    found: dict[str, Any] = {"content": message.content or (None if message.tool_calls else "")}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            # parsers number the calls of each turn anew
            replace(call, id=f"{call.id}-t{reply.turn.index}").openai()
            for call in message.tool_calls
        ]
    return found


def _finish(reply: AgentReply) -> str:
    if reply.turn.stop is StopReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _usage(reply: AgentReply) -> dict[str, int]:
    written = len(reply.turn.ids)
    total = reply.prompt_tokens + written
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": written, "total_tokens": total}


def _logprobs(reply: AgentReply, texts: Sequence[str]) -> dict[str, Any]:
    """Those of all tokens, markup of calls and the end of turn included."""
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, reply.turn.logprobs, strict=True)
        ]
    }
