"""The client's side of a turn, against a scripted server; against real ones: tests/sglang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.engines.base import EngineBusy, EngineLost
from asyncrl.engines.sglang import client as sglang_client
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.errors import EngineError
from asyncrl.types import Generation, PolicyVersion, StopReason, VersionSpan
from asyncrl.wire.messages.worker import EngineUse
from tests.fakes.sglang import DONE, Script, event, scripted, sglang_config

from .tiny import ask

LENGTH = {"type": "length", "length": 0}
STOP = {"type": "stop", "matched": 0}
ABORT = {"type": "abort", "message": "Aborted"}
FULL = {"type": "abort", "status_code": 503, "message": "The request queue is full."}


@asynccontextmanager
async def connected(mode: str = "in_place", shifts: int = 0) -> AsyncIterator[tuple[Script, SGLangClient]]:
    config = sglang_config(32, mode)
    config = replace(config, engine=replace(config.engine, colocated=shifts))
    async with asyncio.timeout(60), scripted() as script:
        client = SGLangClient(ServerApi(script.url), config, vocabulary=64, salt="mine")
        try:
            yield script, client
        finally:
            await client.close()


def bodies(script: Script) -> list[dict[str, Any]]:
    return [body for path, body, _ in script.requests if path == "/generate"]


async def test_what_is_asked_for_and_what_comes_back():
    async with connected() as (script, engine):
        engine.mark_version(PolicyVersion(2, 7))
        last = event([7], 3, "e2-v7", STOP, prompt_tokens=4, cached_tokens=2)
        script.streams(event([5, 6], 2, "e2-v7"), last, DONE)
        request = ask((1, 2, 3, 4), 9, stop_ids=(7,), temperature=0.7, key=1 << 40)
        generation = await engine.generate(request)
        assert generation.ids == (5, 6, 7) and generation.logprobs == (-2.5, -3.0, -3.5)
        assert generation.stop is StopReason.STOP and generation.spans == (VersionSpan(0, 3, 7, 7),)
        [body] = bodies(script)
        assert len(body.pop("rid")) == 32
        assert body == {
            "input_ids": [1, 2, 3, 4],
            "sampling_params": {
                "max_new_tokens": 9,
                "temperature": 0.7,
                "stop_token_ids": [7],
                "ignore_eos": False,
                "sampling_seed": 0,
            },
            "return_logprob": True,
            "stream": True,
            "cache_salt": "mine/e2-v7",
        }
        assert engine.use == EngineUse(script.url, requests=1, tokens=3, prompt_tokens=4, cached_tokens=2)


async def test_modes_that_empty_the_cache_need_no_salt_and_no_stop_ids_means_none():
    async with connected(mode="retract") as (script, engine):
        script.streams(event([5], 1, finish=LENGTH), DONE)
        await engine.generate(ask((1,), 1))
        [body] = bodies(script)
        assert "cache_salt" not in body
        assert body["sampling_params"]["ignore_eos"] is True


@pytest.mark.parametrize(
    ("mode", "shifts", "counted"),
    [("in_place", 0, 3), ("abort", 0, 3), ("retract", 0, 0), ("in_place", 1, 0)],
)
async def test_memory_that_a_server_took_back_is_counted_where_neither_updates_nor_sleep_take_it(
    mode: str, shifts: int, counted: int
):
    async with connected(mode, shifts) as (script, engine):
        events = [event([5], total, num_retractions=times) for total, times in ((1, 0), (2, 1))]
        script.streams(*events, event([5], 3, finish=LENGTH, num_retractions=3), DONE)
        await engine.generate(ask((1,), 3))
        assert engine.use.retracted == counted


async def test_a_turn_that_lasts_is_heard_of_while_it_streams():
    """An unfinished stream tells no spans: its tokens count as of the oldest version that may be theirs."""
    heard = []

    async def on_part(sampled: Generation) -> None:
        heard.append((sampled.ids, sampled.spans, sampled.stop, sampled.routes))

    async with connected() as (script, engine):
        engine.mark_version(PolicyVersion(2, 6))
        script.streams(
            *(event([5], 1, "e2-v6"), event([6, 7], 3, "e2-v7"), event([8], 4, "e2-v7", LENGTH), DONE)
        )
        request = ask((1, 2), 4)
        await engine.generate(replace(request, part_seconds=1000.0, on_part=on_part))
        assert heard == []
        await engine.generate(replace(request, part_seconds=0.0, on_part=on_part))
    assert heard == [
        ((5,), (VersionSpan(0, 1, 6, 6),), StopReason.ABORT, None),
        ((5, 6, 7), (VersionSpan(0, 3, 6, -1),), StopReason.ABORT, None),
        # The last event tells them, but for a token that was perhaps under way at the update.
        ((5, 6, 7, 8), (VersionSpan(0, 1, 6, -1), VersionSpan(1, 4, 7, 6)), StopReason.LENGTH, None),
    ]


async def test_an_end_of_sequence_id_of_the_servers_own_is_not_the_end():
    async with connected() as (script, engine):
        script.streams(event([5, 63], 2, finish=STOP), DONE)
        for limit, stop in ((10, StopReason.ABORT), (2, StopReason.LENGTH)):
            generation = await engine.generate(ask((1,), limit, stop_ids=(9,)))
            assert generation.ids == (5, 63) and generation.stop is stop
        generation = await engine.generate(ask((1,) * 30, 10, stop_ids=(9,)))  # there is room for 2 tokens
        assert generation.stop is StopReason.LENGTH
        assert bodies(script)[-1]["sampling_params"]["max_new_tokens"] == 2


async def test_a_request_that_ends_without_a_token_is_a_loss():
    async with connected() as (script, engine):
        script.streams(event([], 0, finish=STOP), DONE)
        with pytest.raises(EngineLost, match="before its first token"):
            await engine.generate(ask((1,), 10, stop_ids=(9,)))


@pytest.mark.parametrize(
    ("parts", "cut", "text"),
    [
        ([event([5], 1), event([6], 2)], True, "the stream from /generate"),
        ([event([5, 6], 2), event([], 2, finish=ABORT), DONE], False, "aborted the request "),
        ([event([5, 6], 2), DONE], False, "ended before the request was finished"),
        ([event([5, 6], 2)], False, "ended prematurely"),
    ],
)
async def test_what_a_lost_request_has_is_kept(parts: list[bytes], cut: bool, text: str):
    async with connected() as (script, engine):
        script.streams(*parts, cut=cut)
        with pytest.raises(EngineLost, match=text) as lost:
            await engine.generate(ask((1,), 10))
        assert lost.value.partial.ids == (5, 6) and lost.value.partial.stop is StopReason.ABORT
        assert lost.value.partial.spans == (VersionSpan(0, 2, 0, 0),)
        assert script.url in str(lost.value)


async def test_weights_of_nobody_lose_the_request_and_its_tokens():
    async with connected() as (script, engine):
        script.streams(event([5, 6], 2, "default", LENGTH), DONE)
        with pytest.raises(EngineLost, match=r"'default'.*load them again") as lost:
            await engine.generate(ask((1,), 2))
        assert lost.value.partial.ids == ()


async def test_busy_short_and_nonsense():
    async with connected() as (script, engine):
        script.streams(event([], 0, finish=FULL), DONE)
        with pytest.raises(EngineBusy, match="queue is full"):
            await engine.generate(ask((1,), 4))
        script.streams(event([5], 1, finish=LENGTH), DONE)
        with pytest.raises(EngineError, match="truncated a turn to 1 of 4 tokens"):
            await engine.generate(ask((1,), 4))
        script.streams(event([5], 1, finish={"type": "stop", "matched": "NaN happened"}), DONE)
        with pytest.raises(EngineError, match="NaN happened"):
            await engine.generate(ask((1,), 4, stop_ids=(9,)))
        with pytest.raises(EngineError, match=r"outside the vocabulary \(size 64\)"):
            await engine.generate(ask((64,), 4))


async def test_closing_gives_back_what_was_streamed_and_who_waits_for_room(monkeypatch: pytest.MonkeyPatch):
    def decoded(payload: bytes) -> Any:
        streamed.set()
        return decode(payload)

    streamed = asyncio.Event()
    decode = sglang_client.decode_event
    monkeypatch.setattr(sglang_client, "decode_event", decoded)
    monkeypatch.setattr(sglang_client, "MAX_REQUESTS", 1)
    async with connected() as (script, engine):
        script.streams(event([5], 1), then=asyncio.Event())
        first, second = [asyncio.create_task(engine.generate(ask((1,), 9, session))) for session in "st"]
        await streamed.wait()
        assert engine.use.tokens == 1  # while the turn is under way: a sign of life
        await engine.close()
        for task, ids in ((first, (5,)), (second, ())):
            with pytest.raises(EngineLost, match="no longer used") as lost:
                await task
            assert lost.value.partial.ids == ids
        assert len(bodies(script)) == 1


async def test_who_waits_for_room_can_leave(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sglang_client, "MAX_REQUESTS", 1)
    async with connected() as (script, engine):
        go = asyncio.Event()
        script.streams(event([5], 1, finish=LENGTH), DONE, then=go)
        first, second = [asyncio.create_task(engine.generate(ask((1,), 1, session))) for session in "st"]
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        go.set()
        assert (await first).ids == (5,)
        assert len(bodies(script)) == 1


@pytest.mark.parametrize("finished", [False, True])
async def test_a_watch_ends_the_turn_within_an_event(finished: bool):
    """The request is aborted; what the server sampled after the id is forgotten, its versions too."""
    async with connected() as (script, engine):
        engine.mark_version(PolicyVersion(0, 3))
        spans = [{"version": "e0-v3", "start": 0, "end": 4}, {"version": "e0-v4", "start": 4, "end": 6}]
        end = event([9, 10], 6, "e0-v4", LENGTH, weight_versions=spans)
        first = event([5, 6], 2, "e0-v3")
        connection_closed = asyncio.Event()
        if finished:
            script.streams(first, event([7, 8, 9, 10], 6, "e0-v4", LENGTH, weight_versions=spans), DONE)
        else:
            script.streams(first, event([7, 8], 4, "e0-v3"), end, then=connection_closed)
        heard: list[tuple[int, ...]] = []

        def watch(ids: Sequence[int]) -> bool:
            heard.append(tuple(ids))
            return ids[-1] == 7

        sampled = await engine.generate(replace(ask((1, 2), 6), stop_check=watch))
        connection_closed.set()
        assert heard == [(5,), (5, 6), (5, 6, 7)]
        assert (sampled.ids, sampled.logprobs) == ((5, 6, 7), (-2.5, -3.0, -3.5))
        assert (sampled.stop, sampled.spans) == (StopReason.TEXT, (VersionSpan(0, 3, 3, 3),))
