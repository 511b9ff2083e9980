"""One turn sampled in parts: what an engine could not finish, another goes on with, from the last token."""

from __future__ import annotations

import msgspec

from asyncrl.engines.base import Request
from asyncrl.types import Generation, StopReason, VersionSpan

NOTHING = Generation((), (), (), StopReason.ABORT)
"""What is sampled of a turn before it begins."""


def rest(request: Request, sampled: Generation) -> Request:
    """What is left to ask for: the same turn, with `sampled` as part of its prompt."""
    left = request.sampling.max_new_tokens - len(sampled.ids)
    sampling = msgspec.structs.replace(request.sampling, max_new_tokens=left)
    return msgspec.structs.replace(request, ids=request.ids + sampled.ids, sampling=sampling)


def extended(request: Request, sampled: Generation, part: Generation) -> Generation:
    """`sampled` and the part after it, as if one engine had sampled both; the stop reason is the part's. One
    that was cut off may be the end all the same: its last token is a stop id, or the limit is reached."""
    ids, stop = sampled.ids + part.ids, part.stop
    if stop is StopReason.ABORT and ids and ids[-1] in request.sampling.stop_ids:
        stop = StopReason.STOP
    elif stop is StopReason.ABORT and len(ids) >= request.sampling.max_new_tokens:
        stop = StopReason.LENGTH
    spans = sampled.spans + tuple(shifted(span, len(sampled.ids)) for span in part.spans)
    return Generation(ids, sampled.logprobs + part.logprobs, spans, stop, sampled.seconds + part.seconds)


def shifted(span: VersionSpan, tokens: int) -> VersionSpan:
    """The same span of a text with `tokens` more in front."""
    return VersionSpan(span.start + tokens, span.end + tokens, span.version, span.kv_version)
