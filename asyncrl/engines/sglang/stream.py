"""Puts together the stream of one request at an SGLang server: ids, log-probs and versions.

Streams are cumulative (each event repeats all tokens so far) or incremental (each event has the new tokens
only). The number of tokens so far, a part of every event, tells cumulative and incremental streams apart. Ids
are read from the log-prob entries, so that ids and log-probs cannot be out of step. Nothing here waits.
"""

from __future__ import annotations

import base64
import time

import msgspec
import numpy as np

from asyncrl.engines.base import EngineBusy, EngineRefused, Request, end_reason
from asyncrl.engines.sglang.transport import error_text
from asyncrl.errors import UNDECODABLE, EngineError, one_line
from asyncrl.types import Generation, PolicyVersion, Routes, StopReason, VersionSpan
from asyncrl.weights.manifest import version_of

# (first token, version that sampled the tokens from there on, False if a newer version may have sampled them)
Stamp = tuple[int, PolicyVersion, bool]

ABORTED = "Aborted by AbortReq."  # with status 400 where the request waited for its grammar
_ERRORS: dict[int | None, type[EngineError]] = {400: EngineRefused, 503: EngineBusy}  # by status
_MAX_EXPERTS = 1 << 16  # experts are stored as uint16
BASE_LABEL = "default"  # label of the weights that a server was started with
UNKNOWN = -1  # kv_version of tokens for which only the oldest possible version is known


class ForeignWeights(EngineError):
    """The server sampled with weights that this run never gave it; the tokens are discarded."""


class OutputToken(msgspec.Struct, frozen=True, array_like=True):
    """One entry of `output_token_logprobs`."""

    logprob: float
    id: int


class InputToken(msgspec.Struct, frozen=True, array_like=True):
    """One entry of `input_token_logprobs`; the first entry of a prompt has no log-prob."""

    logprob: float | None
    id: int


class FinishReason(msgspec.Struct, frozen=True):
    """The reason why the server ended a request: type stop, length or abort."""

    type: str
    message: str = ""
    status_code: int | None = None
    matched: int | str | list[int] | None = None


class LabelSpan(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, frozen=True):
    """The field `meta_info`; an aborted request lacks most fields."""

    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0  # how often the request's KV was freed and the request was queued again
    weight_version: str = ""
    weight_versions: tuple[LabelSpan, ...] | None = None
    output_token_logprobs: tuple[OutputToken, ...] = ()
    input_token_logprobs: tuple[InputToken, ...] = ()
    input_top_logprobs: tuple[tuple[InputToken, ...] | None, ...] = ()  # by position, the likeliest first
    routed_experts: str | None = None  # base64 of int32 [tokens, layers, k], in the last event


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of a stream, or the whole answer to a request that is not streamed."""

    meta_info: MetaInfo = MetaInfo()
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(StreamEvent).decode


def decode_event(payload: bytes) -> StreamEvent:
    """Decode an event. Raises EngineError for a payload that is not an event, and for an event that reports
    an error. (JSON has no NaN: a server whose logits are not finite numbers sends null for a log-prob, and
    such a payload is not an event.)"""
    try:
        event = _decode(payload)
        server_error = msgspec.json.decode(event.error) if event.error else None
    except UNDECODABLE as error:  # no `instead_of`, which takes longer than decoding
        raise EngineError(f"cannot parse the server's response ({one_line(error)})") from None

    if event.error:
        raise _server_failure(
            server_error.get("code") if isinstance(server_error, dict) else None, error_text(payload)
        )

    return event


def check_image_sizes(prompt_tokens: int, expected_tokens: int) -> None:
    """EngineRefused if a server read a prompt with images as another number of tokens. `prompt_tokens`: as
    the server reports them; 0, which is refused, if the server reports none."""
    if not prompt_tokens:
        raise EngineRefused(
            "the server does not report the length of a prompt with images (prompt_tokens), so it may have "
            "scaled images that are scaled already; use the version of SGLang that the documentation names"
        )
    if prompt_tokens != expected_tokens:
        raise EngineRefused(
            f"the server read a prompt with images as {prompt_tokens} tokens instead of {expected_tokens}: "
            "its image processor scales images that are scaled already; start it with the "
            "preprocessor_config.json of model.path"
        )


class StreamedTurn:
    """Collects one request's tokens.

    `acked`: the version that the server was known to hold when the request was sent; no older version can
    have sampled a token. `in_place`: updates leave the KV cache as it is, and a batch that is under way
    meanwhile is stamped with the new version; in the other modes an update empties the cache, and stamps are
    exact. `adapter`: the request uses the adapter of version `acked`, and labels are those of the base
    weights.
    """

    def __init__(self, request: Request, acked: PolicyVersion, in_place: bool, adapter: bool = False) -> None:
        self.request = request
        self.tokens: list[OutputToken] = []
        self.finish_reason: FinishReason | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.retractions = 0
        self.acked_version = acked
        self._in_place = in_place

        self._has_adapter = adapter
        self._started = time.perf_counter()
        self._seen_labels: set[str] = set()
        self._label_spans: tuple[LabelSpan, ...] | None = None
        self._checked_ids: list[int] = []  # ids that the request's stop check was called with
        self._ended_by_check = False

        self._routes: Routes | None = None

    def add_event(self, event: StreamEvent) -> None:
        """Add the next event. Raises EngineError when tokens are missing, and when the server refuses the
        request: EngineBusy if the queue is full, EngineRefused if the server will never serve the request."""
        meta = event.meta_info
        finish = meta.finish_reason
        self.finish_reason = finish
        if finish and finish.status_code is not None and finish.message != ABORTED and not self.tokens:
            raise _server_failure(finish.status_code, finish.message)

        new_tokens = meta.output_token_logprobs
        total_tokens = meta.completion_tokens
        if len(new_tokens) >= total_tokens:
            # All tokens so far: a cumulative stream, or the last event of a request that was aborted in the
            # queue; merged events may have put new tokens in front.
            self.tokens = list(new_tokens[len(new_tokens) - total_tokens :])
        elif len(self.tokens) + len(new_tokens) == total_tokens:
            self.tokens += new_tokens
        else:
            lost_tokens = total_tokens - len(self.tokens) - len(new_tokens)
            raise EngineError(f"{lost_tokens} of {total_tokens} tokens are missing from the server's stream")

        self.prompt_tokens = max(self.prompt_tokens, meta.prompt_tokens)
        is_complete = finish is not None and finish.type != "abort"
        if self.request.images and (self.prompt_tokens or is_complete):
            check_image_sizes(self.prompt_tokens, len(self.request.ids))
        self.cached_tokens = max(self.cached_tokens, meta.cached_tokens)
        self.retractions = max(self.retractions, meta.num_retractions)
        self._seen_labels.add(meta.weight_version)
        self._label_spans = meta.weight_versions
        if meta.routed_experts:
            self._routes = self._decode_routes(meta.routed_experts)

    def _decode_routes(self, text: str) -> Routes:
        """Decode routes. Raises EngineError unless the routes are of all tokens but the last, from
        `routes_from` on."""
        start = self.request.routes_from or 0
        tokens = len(self.request.ids) + len(self.tokens) - 1 - start
        with EngineError.instead_of(ValueError, text="cannot read the server's routes"):
            experts = np.frombuffer(base64.b64decode(text, validate=True), "<i4")

        is_complete = tokens > 0 and experts.size and experts.size % tokens == 0
        if not is_complete or not 0 <= experts.min() <= experts.max() < _MAX_EXPERTS:
            raise EngineError(f"the server sent {experts.size} routes for {tokens} tokens")

        return Routes(start, tokens, experts.astype("<u2").tobytes())

    def ends_by_check(self) -> bool:
        """Call the request's stop check with the new ids; True if the turn ends with one of them. Later ids
        are dropped."""
        stop_check = self.request.stop_check
        if stop_check is None:
            return False

        for token in self.tokens[len(self._checked_ids) :]:
            self._checked_ids.append(token.id)
            if stop_check(self._checked_ids):
                del self.tokens[len(self._checked_ids) :]
                self._ended_by_check = True
                return True

        return False

    def generation(self) -> Generation:
        """Return the tokens so far; stop ABORT: the turn does not end there. Raises ForeignWeights."""
        ids = tuple(token.id for token in self.tokens)
        logprobs = tuple(token.logprob for token in self.tokens)
        seconds = time.perf_counter() - self._started
        stop = StopReason.TEXT if self._ended_by_check else end_reason(self.request, ids)
        routes = self._routes and self._routes.until(len(self.request.ids) + len(ids) - 1)
        return Generation(ids, logprobs, self.version_spans(), stop, seconds, routes)

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Return the version that sampled each token, as spans. Raises ForeignWeights."""
        if self._has_adapter:
            for label in self._seen_labels:
                if label != BASE_LABEL:
                    raise _foreign_weights(label)
            stamps: list[Stamp] = [(0, self.acked_version, True)]
        elif self._label_spans is not None:  # the scheduler's own record
            stamps = []
            previous_version = self.acked_version
            stamped_until = 0
            for span in self._label_spans:
                version = _version_of_label(span.version)
                # In place, a token under computation at an update is recorded after the update, though the
                # version before sampled it. The record does not say whether there was such a token: the first
                # token after an update may be of either version, and so may a request's first token if the
                # record's version is newer than `acked`.
                if self._in_place and version > previous_version and span.start >= stamped_until:
                    stamps.append((span.start, previous_version, False))
                    stamped_until = min(span.start + 1, len(self.tokens))
                stamps.append((max(span.start, stamped_until), version, True))
                previous_version = version
        else:
            # A request that did not finish has no record, only the label that the server's front end had at
            # each event; tokens sampled just before an update may arrive just after. So all tokens count as
            # sampled by the oldest possible version.
            versions = {self.acked_version, *map(_version_of_label, self._seen_labels)}
            stamps = [(0, min(versions), len(versions) == 1)]

        # In place, the request reads its own KV and, by its salt, KV of other requests from `acked` on.
        kv_versions = [
            min(version, self.acked_version) if self._in_place else version for _, version, _ in stamps
        ]
        token_count = len(self.tokens)  # fewer than in the record if the stop check ended the turn
        span_ends = [min(start, token_count) for start, _, _ in stamps[1:]] + [token_count]

        return tuple(
            VersionSpan(start, end, version.step, oldest.step if certain else UNKNOWN)
            for (start, version, certain), oldest, end in zip(stamps, kv_versions, span_ends, strict=True)
            if start < end
        )


def _server_failure(status: int | None, text: str) -> EngineError:
    return _ERRORS.get(status, EngineError)(f"the server ended a request with status {status}: {text}")


def _version_of_label(label: str) -> PolicyVersion:
    version = version_of(label)
    if version is None:
        raise _foreign_weights(label)
    return version


def _foreign_weights(label: str) -> ForeignWeights:
    return ForeignWeights(f"the server's weights are {label!r}, which this run never sent; load them again")
