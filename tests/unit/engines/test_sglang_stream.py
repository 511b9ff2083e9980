"""What a server streams, in the shapes that version 0.5.23 was seen to send."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.engines.base import EngineBusy, EngineRefused, Request, Sampling
from asyncrl.engines.sglang.stream import ForeignWeights, StreamedTurn, StreamEvent, decode_event
from asyncrl.errors import EngineError
from asyncrl.types import PolicyVersion, Routes, StopReason, VersionSpan

STOP = {"type": "stop", "matched": 9}
LENGTH = {"type": "length", "length": 4}
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
QUEUED = {"type": "abort", "message": "Abort in waiting queue"}


def event(ids: list[int], total: int, label: str = "e0-v3", **meta: Any) -> StreamEvent:
    entries = [[-0.5 * token, token, None] for token in ids]
    meta_info = {"id": "x", "finish_reason": None, "weight_version": label, "completion_tokens": total}
    body = {"text": "", "output_ids": ids, "meta_info": meta_info | {"output_token_logprobs": entries} | meta}
    return decode_event(msgspec.json.encode(body))


def spans(*labels: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": label, "start": start, "end": end} for label, start, end in labels]


def answer_to(acked: tuple[int, int], in_place: bool) -> StreamedTurn:
    return StreamedTurn(Request("s", (1,), Sampling(99, ())), PolicyVersion(*acked), in_place)


def fed(answer: StreamedTurn, *events: StreamEvent) -> StreamedTurn:
    for event_bytes in events:
        answer.add_event(event_bytes)
    return answer


def last(total: int, *labels: tuple[str, int, int], finish: dict[str, Any] = LENGTH) -> StreamEvent:
    """The end of a request with ids 0, 1, 2, ... (all of them at once)."""
    return event(list(range(total)), total, finish_reason=finish, weight_versions=spans(*labels))


INCREMENTAL = [([1], 1), ([2, 3], 3), ([4], 4)]
CUMULATIVE = [([1], 1), ([1, 2, 3], 3), ([1, 2, 3, 4], 4)]


@pytest.mark.parametrize("chunks", [INCREMENTAL, CUMULATIVE], ids=["incremental", "cumulative"])
def test_both_kinds_of_streams_are_distinguished_by_their_counts(chunks: list[tuple[list[int], int]]):
    answer = answer_to((0, 3), in_place=True)
    for ids, total in chunks[:-1]:
        answer.add_event(event(ids, total, prompt_tokens=7, cached_tokens=5))
        assert answer.finish_reason is None
    ids, total = chunks[-1]
    answer.add_event(event(ids, total, finish_reason=LENGTH, weight_versions=spans(("e0-v3", 0, 4))))
    generation = answer.generation()
    assert answer.finish_reason is not None and answer.finish_reason.type == "length"
    assert generation.ids == (1, 2, 3, 4) and generation.logprobs == (-0.5, -1.0, -1.5, -2.0)
    assert generation.spans == (VersionSpan(0, 4, 3, 3),) and generation.stop is StopReason.ABORT
    assert (answer.prompt_tokens, answer.cached_tokens) == (7, 5)


def test_an_abort_in_the_queue_repeats_everything_behind_what_was_pending():
    answer = fed(answer_to((0, 3), in_place=False), event([1, 2], 2))
    merged = event([3, 1, 2, 3], 3, finish_reason=QUEUED, weight_versions=spans(("e0-v3", 0, 3)))
    answer.add_event(merged)
    assert answer.generation().ids == (1, 2, 3)


def test_tokens_that_are_missing_or_no_numbers_are_errors():
    answer = fed(answer_to((0, 3), in_place=True), event([1], 1))
    with pytest.raises(EngineError, match="2 of 4 tokens are missing"):
        answer.add_event(event([4], 4))
    with pytest.raises(EngineError, match="Expected `float`, got `null`"):
        event([1], 1, output_token_logprobs=[[None, 1, None]])
    with pytest.raises(EngineRefused, match="400: too long"):
        decode_event(b'{"error": {"message": "too long", "type": "invalid_request_error", "code": 400}}')
    for error in (b'{"message": "no room", "code": 500}', b'"no room"'):
        with pytest.raises(EngineError, match="no room") as failed:
            decode_event(b'{"error": ' + error + b"}")
        assert type(failed.value) is EngineError
    with pytest.raises(EngineError, match="cannot parse"):
        decode_event(b"<html>")


def test_a_full_queue_is_busy_unless_there_are_tokens():
    full = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    with pytest.raises(EngineBusy, match="queue is full"):
        answer_to((0, 0), in_place=True).add_event(event([], 0, finish_reason=full))
    bad = {"type": "abort", "status_code": 400, "message": "Bad"}
    with pytest.raises(EngineRefused, match="400: Bad"):
        answer_to((0, 0), in_place=True).add_event(event([], 0, finish_reason=bad))
    broken = {"type": "abort", "status_code": 500, "message": "Out of memory"}
    with pytest.raises(EngineError, match="500: Out of memory") as failed:
        answer_to((0, 0), in_place=True).add_event(event([], 0, finish_reason=broken))
    assert type(failed.value) is EngineError
    aborted = {"type": "abort", "status_code": 400, "message": "Aborted by AbortReq."}  # by a pause, say
    assert fed(answer_to((0, 0), in_place=True), event([], 0, finish_reason=aborted)).finish_reason
    answer = fed(answer_to((0, 3), in_place=True), event([1], 1), event([], 1, finish_reason=full))
    assert answer.generation().ids == (1,)


Spans = list[tuple[int, ...]]
AS_RECORDED: Spans = [(0, 4, 3, 3), (4, 9, 5, 5)]
# In place, the token under way at an update may be of the version before,
UNDER_WAY: Spans = [(0, 4, 3, 3), (4, 5, 3, -1), (5, 6, 4, -1), (6, 9, 4, 3)]
NEWEST_ALONE: Spans = [(0, 4, 3, 3), (4, 5, 3, -1)]
# and the first token may be older than the server says.
FIRST: Spans = [(0, 1, 3, -1), (1, 4, 4, 3)]
FIRST_OF_TWO: Spans = [(0, 1, 3, -1), (1, 2, 4, -1), (2, 4, 5, 3)]


@pytest.mark.parametrize(
    ("in_place", "labels", "spans"),
    [
        (False, [("e0-v3", 0, 4), ("e0-v5", 4, 9)], AS_RECORDED),
        (True, [("e0-v3", 0, 4), ("e0-v4", 4, 5), ("e1-v4", 5, 9)], UNDER_WAY),
        (True, [("e0-v3", 0, 4), ("e0-v4", 4, 5)], NEWEST_ALONE),
        (True, [("e0-v4", 0, 4)], FIRST),
        (True, [("e0-v4", 0, 1), ("e0-v5", 1, 4)], FIRST_OF_TWO),
        (True, [("e0-v4", 0, 0)], []),
    ],
)
def test_spans_are_those_of_the_server_but_for_tokens_that_may_be_older(
    in_place: bool, labels: list[tuple[str, int, int]], spans: Spans
):
    answer = fed(answer_to((0, 3), in_place), last(labels[-1][2], *labels))
    assert answer.generation().spans == tuple(VersionSpan(*span) for span in spans)


@pytest.mark.parametrize(("acked", "oldest"), [((0, 3), 3), ((0, 5), 4)])
def test_unfinished_requests_are_believed_to_be_as_old_as_they_can_be(acked: tuple[int, int], oldest: int):
    """The label of an event is that of the moment it passed the front end."""
    answer = fed(answer_to(acked, in_place=True), event([1], 1, "e0-v4"), event([2, 3], 3, "e0-v6"))
    assert answer.generation().spans == (VersionSpan(0, 3, oldest, -1),)
    same_versions = fed(answer_to((0, 4), in_place=True), event([1], 1, "e0-v4"))
    assert same_versions.generation().spans == (VersionSpan(0, 1, 4, 4),)


def test_weights_of_nobody_are_refused_but_not_when_nothing_was_sampled():
    with pytest.raises(ForeignWeights, match="'default'"):
        fed(answer_to((0, 3), in_place=True), event([1], 1, "default")).generation()
    with pytest.raises(ForeignWeights, match="'default'"):
        fed(answer_to((0, 3), in_place=False), last(2, ("e0-v3", 0, 1), ("default", 1, 2))).generation()
    assert answer_to((0, 3), in_place=True).generation().ids == ()


def routes(*experts: int) -> str:
    return base64.b64encode(np.array(experts, "<i4").tobytes()).decode()


def test_routes_are_of_all_tokens_but_the_last():
    """The prompt has one token, `total` were sampled; two numbers for each that was read."""
    answer = answer_to((0, 3), in_place=True)
    encoded_routes = routes(0, 300, 2, 3, 4, 5)
    end = event([1, 2, 3], 3, finish_reason=LENGTH, routed_experts=encoded_routes)
    decoded_routes = fed(answer, end).generation().routes
    assert (
        decoded_routes == Routes(0, 3, np.array([0, 300, 2, 3, 4, 5], "<u2").tobytes())
        and decoded_routes.end == 3
    )


def test_routes_start_where_they_are_not_known_yet():
    request = Request("s", (1, 2, 3, 4), Sampling(99, ()), routes_from=3)
    answer = StreamedTurn(request, PolicyVersion(0, 3), True)
    decoded_routes = (
        fed(answer, event([5], 1, finish_reason=LENGTH, routed_experts=routes(7, 8))).generation().routes
    )
    assert decoded_routes == Routes(3, 1, np.array([7, 8], "<u2").tobytes())


def test_routes_end_with_the_turn():
    """Its watch ended it two tokens before the server did."""
    request = Request("s", (1, 2), Sampling(99, ()), stop_check=lambda ids: ids[-1] == 6, routes_from=0)
    answer = StreamedTurn(request, PolicyVersion(0, 3), True)
    fed(answer, event([5, 6, 7, 8], 4, finish_reason=LENGTH, routed_experts=routes(*range(10))))
    assert answer.ends_by_check()
    generation = answer.generation()
    assert generation.ids == (5, 6)
    assert generation.routes == Routes(0, 3, np.arange(6, dtype="<u2").tobytes())
    assert generation.routes.until(0) is None


@pytest.mark.parametrize("encoded_routes", [routes(1, 2), routes(-1, 2, 3), routes(1, 2, 1 << 16), "x"])
def test_routes_that_do_not_fit_are_an_error(encoded_routes: str):
    end = event([1, 2, 3], 3, finish_reason=LENGTH, routed_experts=encoded_routes)
    with pytest.raises(EngineError, match="routes"):
        fed(answer_to((0, 3), in_place=True), end)
