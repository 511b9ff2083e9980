"""However a turn is cut into parts, together they are the turn."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.base import (
    NOTHING,
    Request,
    Sampling,
    concat,
    ignore_part,
    remaining_request,
    suffix_after,
    with_part,
)
from asyncrl.types import Generation, Routes, StopReason, VersionSpan

STOP_ID = 9
REQUEST = Request("s", (1, 2), Sampling(6, (STOP_ID,), temperature=0.7), key=5)


def part(*ids: int, version: int = 0, stop: StopReason = StopReason.ABORT) -> Generation:
    spans = (VersionSpan(0, len(ids), version, version - 1),) if ids else ()
    return Generation(ids, tuple(-0.1 * id for id in ids), spans, stop, 0.5)


def unheard_of(request: Request) -> Request:
    return msgspec.structs.replace(request, on_part=ignore_part)


def test_what_is_left_continues_the_tokens_within_the_limit() -> None:
    left, all_of_it = (remaining_request(REQUEST, sampled) for sampled in (part(3, 4), NOTHING))
    assert unheard_of(left) == Request("s", (1, 2, 3, 4), Sampling(4, (STOP_ID,), temperature=0.7), key=5)
    assert unheard_of(all_of_it) == REQUEST


def test_the_watch_hears_of_the_whole_turn() -> None:
    heard: list[tuple[int, ...]] = []
    request = msgspec.structs.replace(REQUEST, stop_check=lambda ids: bool(heard.append(tuple(ids))))
    for sampled in (NOTHING, part(3, 4)):
        stop_check = remaining_request(request, sampled).stop_check
        assert stop_check is not None
        stop_check([5, 6])
    # Not wrapped: a check of each token would copy all ids of a turn that nobody has begun.
    assert remaining_request(request, NOTHING).stop_check is request.stop_check
    assert heard == [(5, 6), (3, 4, 5, 6)]


async def test_who_hears_of_parts_hears_of_the_whole_turn() -> None:
    heard: list[Generation] = []

    async def on_part(sampled: Generation) -> None:
        heard.append(sampled)

    request = msgspec.structs.replace(REQUEST, on_part=on_part)
    lost = part(3, 4, version=7)
    await remaining_request(request, lost).on_part(part(5, version=6))
    await remaining_request(remaining_request(request, lost), part(5)).on_part(part(6, STOP_ID))
    assert heard[0] == with_part(REQUEST, lost, part(5, version=6))
    assert (heard[1].ids, heard[1].stop) == ((3, 4, 5, 6, STOP_ID), StopReason.STOP)


def by_token(sampled: Generation) -> list[tuple[int, float, int, int]]:
    spans = [span for span in sampled.spans for _ in range(span.start, span.end)]
    sampled_by = [(span.version, span.kv_version) for span in spans]
    return [
        (*token, *versions)
        for *token, versions in zip(sampled.ids, sampled.logprobs, sampled_by, strict=True)
    ]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_the_parts_of_a_turn_are_the_turn(sizes: list[int], data: st.DataObject) -> None:
    request = Request("s", (1,), Sampling(100, ()))
    joined_turn = NOTHING
    for version, size in enumerate(sizes):
        joined_turn = with_part(request, joined_turn, part(*range(size), version=version))
    cuts = data.draw(st.lists(st.integers(0, len(joined_turn.ids)), max_size=4).map(sorted))
    sampled_before = NOTHING
    for cut in [*cuts, len(joined_turn.ids)]:
        seen = concat(NOTHING, msgspec.structs.replace(joined_turn, ids=joined_turn.ids[:cut]))
        sampled_before = concat(sampled_before, suffix_after(sampled_before, clipped(seen)))
        assert len(sampled_before.ids) == cut
    assert by_token(sampled_before) == by_token(joined_turn) and sampled_before.stop is joined_turn.stop
    assert sampled_before.seconds == joined_turn.seconds


def clipped(seen: Generation) -> Generation:
    """A turn as it was when it had so many ids."""
    count = len(seen.ids)
    spans = [VersionSpan(s.start, min(s.end, count), s.version, s.kv_version) for s in seen.spans]
    spans = [span for span in spans if span.start < span.end]
    return msgspec.structs.replace(seen, logprobs=seen.logprobs[:count], spans=tuple(spans))


def test_parts_line_up() -> None:
    first = with_part(REQUEST, NOTHING, part(3, 4, version=7))
    joined_turn = with_part(REQUEST, first, part(5, STOP_ID, version=6, stop=StopReason.STOP))
    assert joined_turn.ids == (3, 4, 5, STOP_ID)
    assert joined_turn.logprobs == tuple(-0.1 * id for id in joined_turn.ids)
    assert joined_turn.spans == (VersionSpan(0, 2, 7, 6), VersionSpan(2, 4, 6, 5))  # versions may decrease
    assert joined_turn.stop is StopReason.STOP
    assert joined_turn.seconds == 1.0


def test_a_part_cut_off_after_its_last_token_is_whole() -> None:
    assert with_part(REQUEST, NOTHING, part(3, STOP_ID)).stop is StopReason.STOP
    assert with_part(REQUEST, part(3, 4, 5), part(3, 4, 5)).stop is StopReason.LENGTH
    assert with_part(REQUEST, part(3, 4, 5), part(3, 4, STOP_ID)).stop is StopReason.STOP
    assert with_part(REQUEST, part(3, 4, 5), part(3, 4)).stop is StopReason.ABORT
    assert with_part(REQUEST, NOTHING, part()).stop is StopReason.ABORT


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 3))
def test_spans_cover_every_token_however_it_is_cut(sizes: list[int], version: int) -> None:
    request = Request("s", (1,), Sampling(100, ()))
    sampled = NOTHING
    for size in sizes:
        sampled = with_part(request, sampled, part(*range(size), version=version))
        assert (
            len(remaining_request(request, sampled).ids)
            + remaining_request(request, sampled).sampling.max_new_tokens
            == 101
        )
    edges = [0, *(span.end for span in sampled.spans)]
    assert [span.start for span in sampled.spans] == edges[:-1]
    assert edges[-1] == len(sampled.ids) == len(sampled.logprobs) == sum(sizes)


def test_routes_line_up_whichever_server_reported_them() -> None:
    """The first server told those of all but its last token, or was lost before it told any."""
    first_part = msgspec.structs.replace(part(3, 4), routes=Routes(0, 3, b"aabbcc"))
    left = remaining_request(REQUEST, first_part)
    assert (left.ids, left.routes_from) == ((1, 2, 3, 4), 3)
    more = msgspec.structs.replace(part(5), routes=Routes(3, 1, b"dd"))
    assert with_part(REQUEST, first_part, more).routes == Routes(0, 4, b"aabbccdd")
    silent = part(3, 4)
    assert remaining_request(msgspec.structs.replace(REQUEST, routes_from=2), silent).routes_from == 2
    assert with_part(REQUEST, silent, more).routes == more.routes
    assert with_part(REQUEST, first_part, part(5)).routes == first_part.routes
