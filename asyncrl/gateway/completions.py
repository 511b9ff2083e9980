"""Serves OpenAI's chat completions, as far as a policy under training can."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.gateway.exchange import (
    MODEL,
    AgentReply,
    ApiDialect,
    Body,
    ContentPart,
    Event,
    Exchange,
    Limit,
    ModelName,
    StreamedText,
    agent_request,
    calls_of,
    content_of,
    new_id,
    openai_error,
    read_body,
    stops_of,
    tool_call,
)
from asyncrl.gateway.images import TEXT_ONLY, RequestImages
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
    """The body of a request. Other fields have no effect."""

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


UNSUPPORTED_FIELDS = {
    "functions": "use tools",
    "top_logprobs": "only the log-prob of the sampled token is available",
}


def read(body: Body, images: RequestImages = TEXT_ONLY) -> ChatExchange:
    """Read a request. ApiError for an invalid request, or an unsupported option; ImageError for a bad
    image."""
    return ChatExchange(read_body(body, ChatRequest, UNSUPPORTED_FIELDS), images)


DIALECT = ApiDialect(read, openai_error)


def _message(chat_message: ChatMessage, images: RequestImages) -> Message:
    is_answer = chat_message.role == "assistant"
    content = content_of(chat_message.content, TEXT_ONLY if is_answer else images)
    calls = [(call.function, call.id or "") for call in chat_message.tool_calls or ()]
    return Message(
        role=chat_message.role,
        content=content.text,
        tool_calls=tuple(
            tool_call(function.name, function.arguments or "", wire_id) for function, wire_id in calls
        ),
        tool_call_id=chat_message.tool_call_id or "",
        name=chat_message.name or "",
        reasoning=chat_message.reasoning_content or "",
        images=content.images,
    )


class ChatExchange(Exchange):
    """An `Exchange` of chat completions. ApiError for a message or a tool that no template can write."""

    request: ChatRequest

    def __init__(self, request: ChatRequest, images: RequestImages) -> None:
        self.request = replace(request, messages=[])
        self.ignored_parts = {}
        token_limits = filter(None, (request.max_tokens, request.max_completion_tokens))
        self.agent_request = agent_request(
            (_message(message, images) for message in request.messages),
            request.tools or (),
            model=request.model,
            tool_choice=request.tool_choice,
            max_tokens=min(token_limits, default=None),
            stops=stops_of(request.stop),
        )

        self.count = request.n or 1
        self._chunk_head = answer_head("chat.completion.chunk")
        self._write_logprobs = _token_logprobs if request.logprobs else lambda reply: None
        self._streamed_texts = [StreamedText(("reasoning_content", "content")) for _ in range(self.count)]

    def full_answer(self, replies: Sequence[AgentReply]) -> dict[str, Any]:
        return {
            **answer_head("chat.completion"),
            **answer_fields(replies, _choice_message, self._write_logprobs),
        }

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        for index in range(self.count):
            yield self._delta_event(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[Event]:
        for key, text in self._streamed_texts[index].add_streamed(reasoning, content):
            yield self._delta_event(index, {key: text})

    def end(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        """Stream the text not streamed yet, one chunk per call, the end."""
        for index, reply in enumerate(replies):
            yield from self.delta(index, *self._streamed_texts[index].unstreamed_texts(reply.message))
            for call_number, call in enumerate(calls_of(reply)):
                yield self._delta_event(index, {"tool_calls": [{"index": call_number, **call.openai()}]})
            yield self._delta_event(index, {}, finish_of(reply), self._write_logprobs(reply))
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield "", {**self._chunk_head, "choices": [], "usage": usage_of(replies)}

    def _delta_event(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return "", {**self._chunk_head, "choices": [choice]}


def answer_head(object_kind: str, id_prefix: str = "chatcmpl") -> dict[str, Any]:
    """Make the first fields of an answer, or of an event of a stream."""
    return {"id": new_id(id_prefix), "object": object_kind, "created": int(time.time()), "model": MODEL}


def answer_fields(
    replies: Sequence[AgentReply],
    content: Callable[[AgentReply], dict[str, Any]],
    logprobs: Callable[[AgentReply], Any],
) -> dict[str, Any]:
    """Write the choices of a full answer, each with the fields that `content` makes, and the usage."""
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


def _choice_message(reply: AgentReply) -> dict[str, Any]:
    message = reply.message
    message_fields: dict[str, Any] = {"content": message.content or (None if message.tool_calls else "")}
    if message.reasoning:
        message_fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        message_fields["tool_calls"] = [call.openai() for call in calls_of(reply)]
    return {"message": {"role": "assistant", **message_fields, "refusal": None}}


def finish_of(reply: AgentReply) -> str:
    """Return the reason why the answer ended, in OpenAI's words."""
    if reply.turn.generation.stop is StopReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def usage_of(replies: Sequence[AgentReply]) -> dict[str, int]:
    """Count tokens; the answers to one request share the prompt."""
    prompt_tokens = replies[0].prompt_tokens
    completion_tokens = sum(len(reply.turn.generation.ids) for reply in replies)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _token_logprobs(reply: AgentReply) -> dict[str, Any]:
    """Write log-probs of all tokens, markup of calls and the end of turn included."""
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(reply.texts, reply.turn.generation.logprobs, strict=True)
        ]
    }
