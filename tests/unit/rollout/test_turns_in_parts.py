"""A turn that lasts is posted in parts, and goes on after them: in a later attempt, or when it is asked for
again."""

from __future__ import annotations

import asyncio
import threading

import msgspec
from msgspec.structs import replace

from asyncrl.buffer.payloads import TurnPart
from asyncrl.engines.base import Request
from asyncrl.gateway import Endpoint
from asyncrl.types import EpisodeEnd, FailReason, Generation, Sample, StopReason, Turn
from asyncrl.wire.messages.worker import Finished, Generated, Replied, Sampled
from tests.fakes.agents import AgentBench, ask, message
from tests.fakes.chat import encode
from tests.fakes.engine import generation
from tests.fakes.episodes import Bench, TurnBench, look, parts_of, read

TEXT = "it is surely 42"


def said(turn: Turn) -> Turn:
    """The turn without how long it took."""
    return replace(turn, generation=replace(turn.generation, seconds=0.0))


def decoded(bench: Bench) -> list[TurnPart]:
    return [msgspec.msgpack.decode(frame, type=TurnPart) for frame in parts_of(bench)]


def test_a_turn_goes_on_after_its_parts_as_if_nothing_had_happened() -> None:
    uninterrupted = TurnBench([look("left"), TEXT])
    uninterrupted.engine.parts = (4, 4, 9)
    uninterrupted.play()
    kinds = [Sampled, Sampled, Generated, Replied, Sampled, Sampled, Generated, Finished]
    assert [type(record) for record in uninterrupted.sent] == kinds
    parts = decoded(uninterrupted)
    assert [(part.start, len(part.sampled.ids)) for part in parts] == [(0, 4), (4, 5)] * 2
    assert parts[0].prompt == parts[1].prompt != parts[2].prompt
    turns = uninterrupted.record
    resumed = TurnBench([TEXT[9:]])
    resumed.engine.parts = (2, 3)
    resumed.play([*turns[:2], *parts_of(uninterrupted)], parts=4)  # the first two are of a turn that is whole
    assert [type(record) for record in resumed.sent] == [Sampled, Sampled, Generated, Finished]
    assert resumed.engine.requests[0].ids == uninterrupted.engine.requests[1].ids + encode(TEXT[:9])
    max_new_tokens = uninterrupted.engine.requests[1].sampling.max_new_tokens
    assert resumed.engine.requests[0].sampling.max_new_tokens == max_new_tokens - 9
    assert [(part.start, len(part.sampled.ids)) for part in decoded(resumed)] == [(9, 2), (11, 1)]
    (again,) = [turn.generation for turn in resumed.turns]
    expected = uninterrupted.turns[1].generation
    assert (again.ids, again.logprobs, again.stop) == (expected.ids, expected.logprobs, expected.stop)
    assert [span.version for span in again.spans for _ in range(span.start, span.end)] == [0] * len(again.ids)
    last = TurnBench([TEXT[12:]])
    last.play([*turns[:2], *parts_of(uninterrupted)[2:], *parts_of(resumed)], parts=4)
    assert said(last.turns[0]).generation.ids == expected.ids


def test_the_parts_of_another_prompt_or_limit_are_not_used() -> None:
    uninterrupted = TurnBench([TEXT])
    uninterrupted.engine.parts = (4,)
    uninterrupted.play()
    for limits in ({"max_new_tokens": 40}, {"max_new_tokens": 41}):
        other_bench = TurnBench([TEXT], **limits)
        other_bench.engine.parts = (5,)
        other_bench.play(parts_of(uninterrupted), parts=1)
        assert said(other_bench.turns[0]) == said(uninterrupted.turns[0])
        assert [part.start for part in decoded(other_bench)] == [0]


def test_what_cannot_be_read_lets_the_episode_start_again() -> None:
    assert TurnBench([TEXT]).failed([b"nonsense"], parts=1).reason is FailReason.NOT_REPEATED


def test_an_episode_that_has_only_parts_has_what_is_left_of_its_time() -> None:
    uninterrupted = TurnBench([TEXT])
    uninterrupted.engine.parts = (4,)
    uninterrupted.play()
    resumed = TurnBench([TEXT[4:]])
    resumed.earlier_seconds = 7.0
    assert 7 <= resumed.finished(parts_of(uninterrupted), parts=1).stats.seconds < 60


def test_a_turn_that_is_cut_by_its_limit_is_posted_whole() -> None:
    uninterrupted = TurnBench([TEXT], max_new_tokens=4)
    uninterrupted.engine.parts = (2, 4)
    assert uninterrupted.finished().result.end is EpisodeEnd.LENGTH
    assert [type(record) for record in uninterrupted.sent] == [Sampled, Generated, Finished]
    assert uninterrupted.turns[0].generation.stop is StopReason.LENGTH


# -- agents ------------------------------------------------------------------------------------------


async def two_at_once(sample: Sample, endpoint: Endpoint) -> None:
    await asyncio.gather(message(endpoint, "left"), message(endpoint, "right"))


def longer(prompt: str) -> str:
    """What `TEXT` goes on with after a prompt that may end in the middle of it."""
    written = next(count for count in range(len(TEXT), -1, -1) if prompt.endswith(TEXT[:count]))
    return TEXT[written:]


def test_turns_side_by_side_keep_their_own_parts() -> None:
    uninterrupted = AgentBench(two_at_once, longer)
    uninterrupted.engine.parts = (4, 9)
    uninterrupted.finished()
    parts = decoded(uninterrupted)
    assert sorted((part.session, part.start) for part in parts) == [(0, 0), (0, 4), (1, 0), (1, 4)]
    assert {record.session for record in uninterrupted.sent if isinstance(record, Generated)} == {0, 1}
    frames = [msgspec.msgpack.encode(part) for part in parts if part.session or not part.start]
    resumed = AgentBench(two_at_once, longer)
    resumed.finished(frames, parts=3)
    sampled = {len(read(request.ids)) for request in resumed.engine.requests}
    part_lengths = {len("left") + 4, len("right") + 9}
    assert {count - min(sampled) for count in sampled} == {0, max(part_lengths) - min(part_lengths)}
    assert sorted(resumed.rows) == sorted(uninterrupted.rows) == [f"left{TEXT}", f"right{TEXT}"]


def test_a_client_that_comes_again_gets_the_rest_of_its_turn() -> None:
    sampled = threading.Event()

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        conversation = ["q", await message(endpoint, "q"), "sure?"]
        asking = asyncio.ensure_future(ask(endpoint, *conversation))
        assert await asyncio.to_thread(sampled.wait, 30)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert (await message(endpoint, *conversation))["content"] == TEXT

    async def hangs_once(request: Request) -> Generation:
        if read(request.ids).endswith("sure?") and not sampled.is_set():
            await request.on_part(generation(TEXT[:4], stop=StopReason.ABORT))
            sampled.set()
            await asyncio.Event().wait()
        return await plain(request)

    bench = AgentBench(agent, longer)
    plain = bench.engine.generate
    bench.engine.generate = hangs_once  # type: ignore[method-assign]
    bench.finished()
    assert read(bench.engine.requests[-1].ids).endswith(f"sure?{TEXT[:4]}")
    assert bench.rows == [f"q{TEXT}sure?{TEXT}"]


def test_side_requests_are_not_posted_in_parts() -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await message(endpoint, "title")
        await message(endpoint, "q")

    bench = AgentBench(agent, longer, untrained=lambda request: request.messages[0].content == "title")
    bench.engine.parts = (4,)
    bench.finished()
    assert [type(record) for record in bench.sent] == [Generated, Sampled, Generated, Finished]
