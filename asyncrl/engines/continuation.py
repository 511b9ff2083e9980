"""One turn sampled in parts: what one server could not finish is continued from its last token.

Example: of 10 tokens that a request asks for, a server sampled 4 and was lost. `rest` asks for 6 tokens after
the prompt and those 4; `extended` puts the 4 and the 6 together.
"""

from __future__ import annotations

import msgspec

from asyncrl.engines.base import Request, Watch
from asyncrl.types import Generation, Routes, StopReason, VersionSpan

NOTHING = Generation((), (), (), StopReason.ABORT)
"""The empty beginning of a turn."""


def rest(request: Request, sampled: Generation) -> Request:
    """Returns the request for the rest: the same turn, with `sampled` as part of its prompt."""
    left = request.sampling.max_new_tokens - len(sampled.ids)
    grammar = "" if sampled.ids else request.sampling.grammar  # it is of whole turns
    sampling = msgspec.structs.replace(request.sampling, max_new_tokens=left, grammar=grammar)
    watch = None if request.watch is None else _after(sampled.ids, request.watch)
    known = request.routes_from if sampled.routes is None else sampled.routes.end
    ids = request.ids + sampled.ids
    return msgspec.structs.replace(request, ids=ids, sampling=sampling, watch=watch, routes_from=known)


def _after(sampled: tuple[int, ...], watch: Watch) -> Watch:
    """The same watch, of what follows the ids that it has heard of."""
    return (lambda ids: watch((*sampled, *ids))) if sampled else watch


def extended(request: Request, sampled: Generation, part: Generation) -> Generation:
    """`sampled` and the part after it, as if one engine had sampled both."""
    ids = sampled.ids + part.ids
    stop = ending(request, ids) if part.stop is StopReason.ABORT else part.stop
    spans = sampled.spans + tuple(shifted(span, len(sampled.ids)) for span in part.spans)
    seconds, routes = sampled.seconds + part.seconds, joined(sampled.routes, part.routes)
    return Generation(ids, sampled.logprobs + part.logprobs, spans, stop, seconds, routes)


def joined(one: Routes | None, other: Routes | None) -> Routes | None:
    """The routes of a turn's beginning, and of what follows it. A server that is lost has told none: then
    those of the server that went on are of all of it."""
    if one is None or other is None:
        return one or other
    return Routes(one.start, one.tokens + other.tokens, one.data + other.data)


def ending(request: Request, ids: tuple[int, ...]) -> StopReason:
    """Returns the reason why the request ends after it has sampled `ids`; ABORT: it does not end there."""
    if ids and ids[-1] in request.sampling.stop_ids:
        return StopReason.STOP
    return StopReason.LENGTH if len(ids) >= request.sampling.max_new_tokens else StopReason.ABORT


def shifted(span: VersionSpan, tokens: int) -> VersionSpan:
    """The same span of a text with `tokens` more in front."""
    return VersionSpan(span.start + tokens, span.end + tokens, span.version, span.kv_version)
