"""Serves OpenAI's older completions: the model continues a text, or ids. No tools, and nothing is parsed.

A prompt that begins with a complete row, as text or as ids, continues that row. In a stream the text comes at
the end: the client must find thoughts and calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.gateway.completions import (
    MAX_CHOICES,
    MAX_STOPS,
    Stop,
    StreamOptions,
    answer_fields,
    answer_head,
)
from asyncrl.gateway.exchange import (
    AgentReply,
    ApiDialect,
    ApiError,
    Body,
    Event,
    Exchange,
    Limit,
    ModelName,
    agent_request,
    openai_error,
    read_body,
    stops_of,
)
from asyncrl.gateway.images import TEXT_ONLY, RequestImages
from asyncrl.types import Message


class TextRequest(msgspec.Struct, frozen=True):
    """The body of a request. Other fields have no effect."""

    prompt: Any
    model: ModelName | None = None
    max_tokens: Limit | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    suffix: Any = None
    best_of: Any = None


UNSUPPORTED_FIELDS = {"echo": "you already have the prompt", "suffix": "text can only be continued"}


def read(body: Body, images: RequestImages = TEXT_ONLY) -> TextExchange:
    """Read a request. ApiError for an invalid request, or an unsupported option."""
    request = read_body(body, TextRequest, UNSUPPORTED_FIELDS)
    if request.best_of not in (None, request.n or 1):
        raise ApiError(400, "best_of is not supported: use n", "unsupported_parameter")
    return TextExchange(request)


DIALECT = ApiDialect(read, openai_error)


def _single_prompt(value: Any) -> str | tuple[int, ...]:
    """Return the prompt of a request. ApiError for several prompts, or other values."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value

    is_token_list = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    if is_token_list and value:
        return tuple(value)

    raise ApiError(400, "prompt must be a non-empty string or a non-empty list of token IDs")


class TextExchange(Exchange):
    """An `Exchange` of text completions. ApiError for an invalid prompt."""

    request: TextRequest

    def __init__(self, request: TextRequest) -> None:
        self.request = replace(request, prompt=None)
        self.ignored_parts = {}
        prompt = _single_prompt(request.prompt)
        prompt_request = agent_request(
            [Message("user", prompt if isinstance(prompt, str) else "")],
            (),
            model=request.model,
            tool_choice=None,
            max_tokens=request.max_tokens,
            stops=stops_of(request.stop),
        )

        self.agent_request = replace(prompt_request, prompt=prompt)
        self.count = request.n or 1
        self._answer_head = answer_head("text_completion", "cmpl")
        self._write_logprobs = _token_logprobs if request.logprobs else lambda reply: None

    def full_answer(self, replies: Sequence[AgentReply]) -> dict[str, Any]:
        answer = answer_fields(replies, lambda reply: {"text": reply.message.content}, self._write_logprobs)
        return {**self._answer_head, **answer}

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        choices = [{"index": index, "text": "", "finish_reason": None} for index in range(self.count)]
        yield "", {**self._answer_head, "choices": choices}

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[Event]:
        return iter(())

    def end(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        answer = self.full_answer(replies)
        stream_options = self.request.stream_options
        if stream_options is None or not stream_options.include_usage:
            del answer["usage"]
        yield "", answer


def _token_logprobs(reply: AgentReply) -> dict[str, Any]:
    text_offsets = [0]
    for text in reply.texts:
        text_offsets.append(text_offsets[-1] + len(text))
    logprob_fields = {"tokens": reply.texts, "token_logprobs": list(reply.turn.generation.logprobs)}
    return {**logprob_fields, "top_logprobs": None, "text_offset": text_offsets[:-1]}
