"""The interface of engines: ids in, ids with log-probs and version spans out."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from asyncrl.errors import EngineError
from asyncrl.registry import Registry
from asyncrl.types import Generation, Routes, StopReason, TokenScores, VersionSpan
from asyncrl.weights.manifest import Manifest, WeightsRef


class Sampling(msgspec.Struct, frozen=True):
    """Settings for sampling one turn. Temperature 0 is greedy."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0


Watch = Callable[[Sequence[int]], bool]
"""Called with the ids of a turn so far, once for each new one: whether the turn ends with it. It is cheap,
never raises, and keeps no hold of the ids. Fewer ids than before: those since then were lost."""

OnPart = Callable[[Generation], Awaitable[None]]
"""Called with all that a turn which lasts has sampled so far."""


async def ignore_part(sampled: Generation) -> None:
    """Do nothing."""


class Request(msgspec.Struct, frozen=True):
    """Asks for one turn of one episode.

    `session` names the episode: its prefix may be kept between turns. `ids` is the whole prefix.
    `key` seeds the sampling: for the embedded engine, the token at position p depends on (key, p) and the
    weights only. `watch` hears of every id as it is sampled, and may end the turn with it (StopReason.TEXT);
    ids that were sampled after that one are dropped. `routes_from`: of the tokens before it the routes are
    known; None: none are wanted. `agent`: whose adapter samples it, where they have some. `on_part` hears of
    a turn that lasts, each `part_seconds`.
    """

    session: str
    ids: tuple[int, ...]
    sampling: Sampling
    key: int = 0
    watch: Watch | None = None
    routes_from: int | None = None
    agent: str = ""
    part_seconds: float = math.inf
    on_part: OnPart = ignore_part


class EngineRefused(EngineError):
    """The request itself is wrong, or asks for what the engine cannot do: it would be refused again."""


class EngineBusy(EngineError):
    """The engine's queue is full. Nothing was sampled: the request may be sent again, anywhere."""


class EngineLost(EngineError):
    """The server died, or aborted the request, after it had sampled `partial`: the turn can be continued
    from there, on the same or another server."""

    def __init__(self, message: str, partial: Generation) -> None:
        super().__init__(message)
        self.partial = partial


class Engine(Protocol):
    """A continuous-batching sampler inside this process that swaps its weights between two tokens."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""

    @property
    def tokens(self) -> int:
        """Tokens sampled so far, those of turns under way included: a sign of life."""

    @property
    def asleep(self) -> bool:
        """It holds neither KV cache nor weights."""

    async def sleep(self) -> None:
        """Give up KV cache and weights until the next `load`. Turns under way keep what they have sampled,
        and wait, as new ones do. Nothing, if it sleeps."""

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Cancelling the call ends it. Raises EngineError on a request it must refuse."""

    def release(self, session: str) -> None:
        """The episode is over: end its running turn with StopReason.ABORT and forget its prefix. Unknown
        sessions are fine."""

    async def load(self, ref: WeightsRef) -> Manifest:
        """Swap in a published version without waiting for running turns; returns what was loaded. Raises
        WeightsError and keeps the old weights, or sleeps on, when the files are missing or damaged."""

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probs of ids[1:] under the weights in use, at temperature 1, with each adapter in turn. Waits
        while the engine sleeps."""

    async def read(self, ids: tuple[int, ...], count: int, top: int) -> TokenScores:
        """Score the last `count` of these ids, without adapters, at temperature 1, and name the `top`
        likeliest at each of their places."""

    async def close(self) -> None: ...


engines: Registry = Registry("engine", modules={"torch": "asyncrl.engines.torch.engine"})


def check_request(request: Request, vocabulary: int, max_len: int) -> None:
    """EngineRefused for a request that cannot be served. (SGLang servers die of unknown ids.)"""
    prompt_length = len(request.ids)
    sampling = request.sampling
    problem = ""

    if prompt_length == 0:
        problem = "no ids"
    elif min(request.ids) < 0 or max(request.ids) >= vocabulary:
        problem = f"ids outside the vocabulary of {vocabulary}"
    elif prompt_length + 1 > max_len:
        problem = f"{prompt_length} ids leave no room for a token within max_len {max_len}"
    elif sampling.max_new_tokens < 1 or sampling.temperature < 0:
        problem = f"sampling parameters out of range: {sampling}"

    if problem:
        raise EngineRefused(f"session {request.session!r}: {problem}")


NOTHING = Generation((), (), (), StopReason.ABORT)
"""The empty beginning of a turn."""


def remaining_request(request: Request, sampled: Generation) -> Request:
    """Returns the request that continues a turn of which a lost server has `sampled` a part: of 10 tokens,
    4 of them sampled, it asks for 6 after the prompt and those 4; `extended` puts both together."""
    remaining_tokens = request.sampling.max_new_tokens - len(sampled.ids)
    sampling = replace(request.sampling, max_new_tokens=remaining_tokens)
    watch = None if request.watch is None else _watch_after(sampled.ids, request.watch)
    routes_from = request.routes_from if sampled.routes is None else sampled.routes.end
    changes = {
        "ids": request.ids + sampled.ids,
        "sampling": sampling,
        "watch": watch,
        "routes_from": routes_from,
    }

    return replace(
        request, **changes, on_part=lambda part: request.on_part(with_part(request, sampled, part))
    )


def _watch_after(sampled: tuple[int, ...], watch: Watch) -> Watch:
    """The same watch, of what follows the ids that it has heard of."""
    return (lambda ids: watch((*sampled, *ids))) if sampled else watch


def with_part(request: Request, sampled: Generation, part: Generation) -> Generation:
    """`sampled` and the part after it, as if one engine had sampled both."""
    generation = concat(sampled, part)
    stop = end_reason(request, generation.ids) if part.stop is StopReason.ABORT else part.stop
    return replace(generation, stop=stop)


def concat(sampled: Generation, part: Generation) -> Generation:
    """Join `sampled` and the part after it, which stopped as that did."""
    spans = sampled.spans + tuple(shift_span(span, len(sampled.ids)) for span in part.spans)
    both = sampled.ids + part.ids, sampled.logprobs + part.logprobs
    seconds = sampled.seconds + part.seconds
    routes = concat_routes(sampled.routes, part.routes)
    return Generation(*both, spans, part.stop, seconds, routes)


def suffix_after(sampled: Generation, generation: Generation) -> Generation:
    """Return the part of `whole` after `sampled`, without routes: the server that goes on tells them all."""
    count = len(sampled.ids)
    clipped_spans = (
        replace(span, start=max(span.start, count)) for span in generation.spans if span.end > count
    )
    spans = tuple(shift_span(span, -count) for span in clipped_spans)
    seconds = generation.seconds - sampled.seconds
    return Generation(generation.ids[count:], generation.logprobs[count:], spans, generation.stop, seconds)


def concat_routes(first_routes: Routes | None, later_routes: Routes | None) -> Routes | None:
    """The routes of a turn's beginning, and of what follows it. A server that is lost has told none: then
    those of the server that went on are of all of it."""
    if first_routes is None or later_routes is None:
        return first_routes or later_routes
    return Routes(
        first_routes.start, first_routes.tokens + later_routes.tokens, first_routes.data + later_routes.data
    )


def end_reason(request: Request, ids: tuple[int, ...]) -> StopReason:
    """Returns the reason why the request ends after it has sampled `ids`; ABORT: it does not end there."""
    if ids and ids[-1] in request.sampling.stop_ids:
        return StopReason.STOP
    return StopReason.LENGTH if len(ids) >= request.sampling.max_new_tokens else StopReason.ABORT


def shift_span(span: VersionSpan, tokens: int) -> VersionSpan:
    """Return the same span of a text with `tokens` more in front."""
    return VersionSpan(span.start + tokens, span.end + tokens, span.version, span.kv_version)
