"""The interface of engines: ids in, ids with log-probs and version spans out."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from asyncrl.errors import EngineError
from asyncrl.registry import Registry
from asyncrl.types import Generation, Routes, StopReason, TokenScores, VersionSpan
from asyncrl.vision.image_ids import largest_token_id
from asyncrl.weights.manifest import Manifest, WeightsRef


class Sampling(msgspec.Struct, frozen=True):
    """Settings for sampling one turn. Temperature 0 is greedy."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0


StopCheck = Callable[[Sequence[int]], bool]
"""Called with the ids of a turn so far, once for each new id; returns True if the turn ends with this id. A
stop check is cheap, never raises, and keeps no reference to the ids. Fewer ids than at the last call mean
that the latest ids were lost."""

OnPart = Callable[[Generation], Awaitable[None]]
"""Called with everything that a long turn has sampled so far."""


async def ignore_part(sampled: Generation) -> None:
    """Do nothing."""


class Request(msgspec.Struct, frozen=True):
    """Asks for one turn of one episode.

    `session` names the episode: the engine may keep the episode's prefix between turns. `ids` is the whole
    prefix. `key` seeds the sampling: in the embedded engine, the token at position p depends on (key, p) and
    the weights only. `stop_check` is called for every sampled id, and may end the turn there
    (StopReason.TEXT); ids sampled later are dropped. `routes_from`: the routes of earlier tokens are known;
    None: no routes are wanted. `agent`: the agent whose adapter samples the turn, where agents have adapters.
    `on_part` gets the beginning of a long turn, every `part_seconds`. `images`: the stored file of each image
    in `ids`, by digest.
    """

    session: str
    ids: tuple[int, ...]
    sampling: Sampling
    key: int = 0
    stop_check: StopCheck | None = None
    routes_from: int | None = None
    agent: str = ""
    part_seconds: float = math.inf
    on_part: OnPart = ignore_part
    images: Mapping[str, bytes] = {}


class EngineRefused(EngineError):
    """The request is malformed or asks for something that the engine cannot do: a retry would fail, too."""


class EngineBusy(EngineError):
    """The engine's queue is full. Nothing was sampled: the request may be sent again, anywhere."""


class EngineLost(EngineError):
    """The server died or aborted the request after sampling `partial`: the turn can be continued from there,
    on the same or another server."""

    def __init__(self, message: str, partial: Generation) -> None:
        super().__init__(message)
        self.partial = partial


class Engine(Protocol):
    """A continuous-batching sampler inside this process that swaps its weights between two tokens.

    An engine may also count `reprefilled_tokens`, the metric of that name: an int that never decreases.
    """

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""

    @property
    def tokens(self) -> int:
        """Tokens sampled so far, including turns under way: a sign of life."""

    @property
    def asleep(self) -> bool:
        """True while the engine holds neither KV cache nor weights."""

    async def sleep(self) -> None:
        """Give up KV cache and weights until the next `load`. Turns under way keep their sampled tokens, and
        wait, as new turns do. Does nothing if the engine sleeps already."""

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Cancelling the call ends the turn. Raises EngineError for an invalid request."""

    def release(self, session: str) -> None:
        """Forget a finished episode: end the session's running turn with StopReason.ABORT and drop the
        prefix. Unknown sessions are fine."""

    async def load(self, ref: WeightsRef) -> Manifest:
        """Swap in a published version without waiting for running turns; returns the version's manifest.
        Raises WeightsError and keeps the old weights, or sleeps on, when the files are missing or damaged."""

    async def score(self, ids: tuple[int, ...], images: Mapping[str, bytes] = {}) -> tuple[float, ...]:
        """Return log-probs of ids[1:] under the weights in use, at temperature 1, with each adapter in turn;
        those of image ids mean nothing. `images`: as in Request, given only where `ids` have images. Waits
        while the engine sleeps."""

    async def read(
        self, ids: tuple[int, ...], count: int, top: int, images: Mapping[str, bytes] = {}
    ) -> TokenScores:
        """Score the last `count` ids, without adapters, at temperature 1, and name the `top` likeliest tokens
        at each of these positions. `images`: as in `score`."""

    async def close(self) -> None: ...


engines: Registry = Registry("engine", modules={"torch": "asyncrl.engines.torch.engine"})


def check_request(request: Request, vocabulary: int, max_len: int) -> None:
    """Raise EngineRefused for a request that cannot be served. (SGLang servers die of unknown ids.)"""
    prompt_length = len(request.ids)
    sampling = request.sampling
    problem = ""

    if prompt_length == 0:
        problem = "the prompt is empty"
    elif min(request.ids) < 0 or largest_token_id(request.ids) >= vocabulary:
        problem = f"the prompt contains token IDs outside the vocabulary (size {vocabulary})"
    elif prompt_length + 1 > max_len:
        problem = f"a prompt of {prompt_length} tokens leaves no room for a new token (max_len={max_len})"
    elif sampling.max_new_tokens < 1 or sampling.temperature < 0:
        problem = f"sampling parameters are out of range: {sampling}"

    if problem:
        raise EngineRefused(f"session {request.session!r}: {problem}")


NOTHING = Generation((), (), (), StopReason.ABORT)
"""The beginning of a turn that has no tokens yet."""


def remaining_request(request: Request, sampled: Generation) -> Request:
    """Return the request that continues a turn after a lost server has `sampled` the beginning. Example: of
    10 tokens 4 are sampled; the new request has the prompt and these 4 as its prefix, and asks for 6.
    `with_part` puts beginning and continuation together."""
    remaining_tokens = request.sampling.max_new_tokens - len(sampled.ids)

    stop_check = check_turn = request.stop_check
    if check_turn is not None and sampled.ids:

        def check_continued(ids: Sequence[int]) -> bool:
            return check_turn((*sampled.ids, *ids))

        stop_check = check_continued  # copies the beginning for each token, so not where there is none

    return replace(
        request,
        ids=request.ids + sampled.ids,
        sampling=replace(request.sampling, max_new_tokens=remaining_tokens),
        stop_check=stop_check,
        routes_from=request.routes_from if sampled.routes is None else sampled.routes.end,
        on_part=lambda part: request.on_part(with_part(request, sampled, part)),
    )


def with_part(request: Request, sampled: Generation, part: Generation) -> Generation:
    """Join `sampled` and the part that follows, as if one engine had sampled both."""
    generation = concat(sampled, part)
    stop = end_reason(request, generation.ids) if part.stop is StopReason.ABORT else part.stop
    return replace(generation, stop=stop)


def concat(sampled: Generation, part: Generation) -> Generation:
    """Join `sampled` and the part that follows; the stop reason is that of the part."""
    part_spans = tuple(shift_span(span, len(sampled.ids)) for span in part.spans)

    # A lost server has reported no routes: then the server that continued the turn has reported the routes of
    # all tokens.
    routes = sampled.routes or part.routes
    if sampled.routes is not None and part.routes is not None:
        routes = Routes(
            sampled.routes.start,
            sampled.routes.tokens + part.routes.tokens,
            sampled.routes.data + part.routes.data,
        )

    return Generation(
        sampled.ids + part.ids,
        sampled.logprobs + part.logprobs,
        sampled.spans + part_spans,
        part.stop,
        sampled.seconds + part.seconds,
        routes,
    )


def suffix_after(sampled: Generation, generation: Generation) -> Generation:
    """Return the part of `generation` after `sampled`, without routes: the server that continues the turn
    reports all routes."""
    count = len(sampled.ids)
    clipped_spans = (
        replace(span, start=max(span.start, count)) for span in generation.spans if span.end > count
    )
    spans = tuple(shift_span(span, -count) for span in clipped_spans)
    seconds = generation.seconds - sampled.seconds
    return Generation(generation.ids[count:], generation.logprobs[count:], spans, generation.stop, seconds)


def end_reason(request: Request, ids: tuple[int, ...]) -> StopReason:
    """Return the reason why a request ends after sampling `ids`; ABORT: the request does not end there."""
    if ids and ids[-1] in request.sampling.stop_ids:
        return StopReason.STOP
    return StopReason.LENGTH if len(ids) >= request.sampling.max_new_tokens else StopReason.ABORT


def shift_span(span: VersionSpan, tokens: int) -> VersionSpan:
    """Return the same span in a text that has `tokens` more in front."""
    return VersionSpan(span.start + tokens, span.end + tokens, span.version, span.kv_version)
