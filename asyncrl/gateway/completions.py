"""OpenAI's chat completions, as far as a policy under training can serve them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncrl.conversation.requests import AgentRequest
from asyncrl.gateway.exchange import (
    MODEL,
    AgentReply,
    ApiDialect,
    ContentPart,
    Event,
    Limit,
    ModelName,
    StreamedText,
    agent_request,
    calls_of,
    new_id,
    openai_error,
    read_body,
    stops_of,
    text_of,
    tool_call,
)
from asyncrl.types import Message, StopReason

MAX_CHOICES = 128  # answers to one request
MAX_STOPS = 32  # texts of one request that end the answer


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str | None = None


class ChatToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


Stop = Annotated[str, Meta(min_length=1, max_length=1024)]


class ChatRequest(msgspec.Struct, frozen=True):
    """The body of a request. Fields that are not here have no effect."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: ModelName | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    functions: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


REFUSED = {"functions": "use tools", "top_logprobs": "only the sampled token's log-prob is known"}


def read(body: bytes) -> ChatExchange:
    """ApiError for an invalid request, or an unsupported option."""
    return ChatExchange(read_body(body, ChatRequest, REFUSED))


DIALECT = ApiDialect(read, openai_error)


def _message(sent: ChatMessage) -> Message:
    calls = [(call.function, call.id or "") for call in sent.tool_calls or ()]
    return Message(
        sent.role,
        text_of(sent.content),
        tuple(tool_call(function.name, function.arguments or "", wire_id) for function, wire_id in calls),
        sent.tool_call_id or "",
        sent.name or "",
        sent.reasoning_content or "",
    )


@dataclass
class ChatExchange:
    """See `Exchange`. ApiError for a message or a tool that no template can write."""

    request: ChatRequest
    ask: AgentRequest = field(init=False)
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sent = self.request
        limits = [most for most in (sent.max_tokens, sent.max_completion_tokens) if most is not None]
        self.ask = agent_request(
            map(_message, sent.messages),
            sent.tools or (),
            model=sent.model,
            choice=sent.tool_choice,
            most=min(limits, default=None),
            stops=stops_of(sent.stop),
        )
        self.count = sent.n or 1
        self._head = head("chat.completion.chunk")
        self._logprobs = _logprobs if sent.logprobs else lambda reply: None
        self._streamed = [StreamedText(("reasoning_content", "content")) for _ in range(self.count)]

    def whole(self, replies: Sequence[AgentReply]) -> dict[str, Any]:
        return {**head("chat.completion"), **answers(replies, _content, self._logprobs)}

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        for index in range(self.count):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[Event]:
        for key, text in self._streamed[index].add(reasoning, content):
            yield self._delta(index, {key: text})

    def ping(self) -> Iterator[Event]:
        return iter(())

    def end(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        """Stream what was not streamed yet, one chunk per call, the end."""
        for index, reply in enumerate(replies):
            yield from self.delta(index, *self._streamed[index].rest(reply.message))
            for number, call in enumerate(calls_of(reply)):
                yield self._delta(index, {"tool_calls": [{"index": number, **call.openai()}]})
            yield self._delta(index, {}, finish_of(reply), self._logprobs(reply))
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield "", {**self._head, "choices": [], "usage": usage_of(replies)}

    def _delta(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return "", {**self._head, "choices": [choice]}


def head(kind: str, prefix: str = "chatcmpl") -> dict[str, Any]:
    """The fields with which each answer, and each event of a stream, begins."""
    return {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": MODEL}


def answers(
    replies: Sequence[AgentReply],
    content: Callable[[AgentReply], dict[str, Any]],
    logprobs: Callable[[AgentReply], Any],
) -> dict[str, Any]:
    """Write the choices of a whole answer, each with its own fields by `content`, and its usage."""
    choices = [
        {
            "index": index,
            **content(reply),
            "finish_reason": finish_of(reply),
            "logprobs": logprobs(reply),
        }
        for index, reply in enumerate(replies)
    ]
    return {"choices": choices, "usage": usage_of(replies)}


def _content(reply: AgentReply) -> dict[str, Any]:
    message = reply.message
    found: dict[str, Any] = {"content": message.content or (None if message.tool_calls else "")}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [call.openai() for call in calls_of(reply)]
    return {"message": {"role": "assistant", **found, "refusal": None}}


def finish_of(reply: AgentReply) -> str:
    """The reason why the answer ended, in OpenAI's words."""
    if reply.turn.stop is StopReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def usage_of(replies: Sequence[AgentReply]) -> dict[str, int]:
    """The answers to one request have its prompt in common."""
    read = replies[0].prompt_tokens
    written = sum(len(reply.turn.ids) for reply in replies)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _logprobs(reply: AgentReply) -> dict[str, Any]:
    """Write log-probs of all tokens, markup of calls and the end of turn included."""
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(reply.texts, reply.turn.logprobs, strict=True)
        ]
    }
