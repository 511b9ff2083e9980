"""OpenAI's older completions: a text, or ids, that the model continues. No tools, and nothing is parsed.

A prompt that begins with all of a row, as text or as ids, continues that row. Of a stream the text comes at
the end: what is a thought or a call is the client's to find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.conversation.requests import AgentRequest
from asyncrl.gateway.completions import MAX_CHOICES, MAX_STOPS, Stop, StreamOptions, answers, head
from asyncrl.gateway.exchange import (
    AgentReply,
    ApiDialect,
    ApiError,
    Event,
    Limit,
    ModelName,
    agent_request,
    openai_error,
    read_body,
    stops_of,
)
from asyncrl.types import Message


class TextRequest(msgspec.Struct, frozen=True):
    """The body of a request. Fields that are not here have no effect."""

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


REFUSED = {"echo": "the prompt is known to you", "suffix": "a text is only continued"}


def read(body: bytes) -> TextExchange:
    """ApiError for an invalid request, or an unsupported option."""
    request = read_body(body, TextRequest, REFUSED)
    if request.best_of not in (None, request.n or 1):
        raise ApiError(400, "not supported: best_of: use n", "unsupported_parameter")
    return TextExchange(request)


DIALECT = ApiDialect(read, openai_error)


def _prompt(given: Any) -> str | tuple[int, ...]:
    """The one prompt of a request. ApiError if it has several, or something else."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str) and given:
        return given
    known = isinstance(given, list) and all(type(token) is int and token >= 0 for token in given)
    if known and given:
        return tuple(given)
    raise ApiError(400, "prompt is a text, or a list of token ids; send one, and not empty")


@dataclass
class TextExchange:
    """See `Exchange`. ApiError for a prompt that is none."""

    request: TextRequest
    ask: AgentRequest = field(init=False)
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sent = self.request
        prompt = _prompt(self.request.prompt)
        stops = stops_of(sent.stop)
        said = [Message("user", prompt if isinstance(prompt, str) else "")]
        ask = agent_request(said, (), model=sent.model, choice=None, most=sent.max_tokens, stops=stops)
        self.ask = replace(ask, prompt=prompt)
        self.count = sent.n or 1
        self._head = head("text_completion", "cmpl")
        self._logprobs = _logprobs if sent.logprobs else lambda reply: None

    def whole(self, replies: Sequence[AgentReply]) -> dict[str, Any]:
        texts = answers(replies, lambda reply: {"text": reply.message.content}, self._logprobs)
        return {**self._head, **texts}

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        choices = [{"index": index, "text": "", "finish_reason": None} for index in range(self.count)]
        yield "", {**self._head, "choices": choices}

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[Event]:
        return iter(())

    def ping(self) -> Iterator[Event]:
        return iter(())

    def end(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        found = self.whole(replies)
        asked = self.request.stream_options
        if asked is None or not asked.include_usage:
            del found["usage"]
        yield "", found


def _logprobs(reply: AgentReply) -> dict[str, Any]:
    edges = [0]
    for text in reply.texts:
        edges.append(edges[-1] + len(text))
    found = {"tokens": reply.texts, "token_logprobs": list(reply.turn.logprobs)}
    return {**found, "top_logprobs": None, "text_offset": edges[:-1]}
