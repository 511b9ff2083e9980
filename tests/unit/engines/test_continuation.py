"""However a turn is cut into parts, together they are the turn."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.base import NOTHING, Request, Sampling, extended, rest
from asyncrl.types import Generation, Routes, StopReason, VersionSpan

STOP_ID = 9
REQUEST = Request("s", (1, 2), Sampling(6, (STOP_ID,), temperature=0.7), key=5)


def part(*ids: int, version: int = 0, stop: StopReason = StopReason.ABORT) -> Generation:
    spans = (VersionSpan(0, len(ids), version, version - 1),) if ids else ()
    return Generation(ids, tuple(-0.1 * id for id in ids), spans, stop, 0.5)


def test_what_is_left_continues_the_tokens_within_the_limit() -> None:
    left = rest(REQUEST, extended(REQUEST, NOTHING, part(3, 4)))
    assert left == Request("s", (1, 2, 3, 4), Sampling(4, (STOP_ID,), temperature=0.7), key=5)
    assert rest(REQUEST, NOTHING) == REQUEST


def test_the_watch_hears_of_the_whole_turn() -> None:
    heard: list[tuple[int, ...]] = []
    request = msgspec.structs.replace(REQUEST, watch=lambda ids: bool(heard.append(tuple(ids))))
    for sampled in (NOTHING, part(3, 4)):
        watch = rest(request, sampled).watch
        assert watch is not None
        watch([5, 6])
    assert heard == [(5, 6), (3, 4, 5, 6)]


def test_parts_line_up() -> None:
    first = extended(REQUEST, NOTHING, part(3, 4, version=7))
    whole = extended(REQUEST, first, part(5, STOP_ID, version=6, stop=StopReason.STOP))
    assert whole.ids == (3, 4, 5, STOP_ID)
    assert whole.logprobs == tuple(-0.1 * id for id in whole.ids)
    assert whole.spans == (VersionSpan(0, 2, 7, 6), VersionSpan(2, 4, 6, 5))  # versions may decrease
    assert whole.stop is StopReason.STOP
    assert whole.seconds == 1.0


def test_a_part_cut_off_after_its_last_token_is_whole() -> None:
    assert extended(REQUEST, NOTHING, part(3, STOP_ID)).stop is StopReason.STOP
    assert extended(REQUEST, part(3, 4, 5), part(3, 4, 5)).stop is StopReason.LENGTH
    assert extended(REQUEST, part(3, 4, 5), part(3, 4, STOP_ID)).stop is StopReason.STOP
    assert extended(REQUEST, part(3, 4, 5), part(3, 4)).stop is StopReason.ABORT
    assert extended(REQUEST, NOTHING, part()).stop is StopReason.ABORT


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 3))
def test_spans_cover_every_token_however_it_is_cut(sizes: list[int], version: int) -> None:
    request = Request("s", (1,), Sampling(100, ()))
    sampled = NOTHING
    for size in sizes:
        sampled = extended(request, sampled, part(*range(size), version=version))
        assert len(rest(request, sampled).ids) + rest(request, sampled).sampling.max_new_tokens == 101
    edges = [0, *(span.end for span in sampled.spans)]
    assert [span.start for span in sampled.spans] == edges[:-1]
    assert edges[-1] == len(sampled.ids) == len(sampled.logprobs) == sum(sizes)


def test_routes_line_up_whichever_server_told_them() -> None:
    """The first server told those of all but its last token, or was lost before it told any."""
    told = msgspec.structs.replace(part(3, 4), routes=Routes(0, 3, b"aabbcc"))
    left = rest(REQUEST, told)
    assert (left.ids, left.routes_from) == ((1, 2, 3, 4), 3)
    more = msgspec.structs.replace(part(5), routes=Routes(3, 1, b"dd"))
    assert extended(REQUEST, told, more).routes == Routes(0, 4, b"aabbccdd")
    silent = part(3, 4)
    assert rest(msgspec.structs.replace(REQUEST, routes_from=2), silent).routes_from == 2
    assert extended(REQUEST, silent, more).routes == more.routes
    assert extended(REQUEST, told, part(5)).routes == told.routes
