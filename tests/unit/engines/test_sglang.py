"""The client's side of a turn, against a scripted server; against real ones: tests/sglang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncrl.engines.base import EngineBusy, EngineLost
from asyncrl.engines.sglang.engine import SGLangEngine, Terms
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.errors import EngineError
from asyncrl.types import StopReason, VersionSpan
from tests.fakes.sglang import DONE, Script, event, scripted

from .tiny import ask

LENGTH = {"type": "length", "length": 0}
STOP = {"type": "stop", "matched": 0}
ABORT = {"type": "abort", "message": "Aborted"}
FULL = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
Test = Callable[[Script, SGLangEngine], Awaitable[None]]


def run(test: Test, **terms: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), scripted() as script:
            script.says("/abort_request", 200)
            defaults: dict[str, Any] = {"vocabulary": 64, "max_len": 32, "silence": 30.0}
            engine = SGLangEngine(ServerApi(script.url), Terms(**defaults | terms), salt="mine")
            try:
                await test(script, engine)
                assert engine.running == 0
            finally:
                await engine.close()

    asyncio.run(main())


def bodies(script: Script) -> list[dict[str, Any]]:
    return [body for path, body, _ in script.asked if path == "/generate"]


def test_what_is_asked_for_and_what_comes_back():
    async def test(script: Script, engine: SGLangEngine) -> None:
        engine.mark((2, 7))
        last = event([7], 3, "e2-v7", STOP, prompt_tokens=4, cached_tokens=2)
        script.streams(event([5, 6], 2, "e2-v7"), last, DONE)
        request = ask((1, 2, 3, 4), 9, stop_ids=(7,), temperature=0.7, top_p=0.9, top_k=5, key=1 << 40)
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
                "top_p": 0.9,
                "top_k": 5,
                "stop_token_ids": [7],
                "ignore_eos": False,
                "sampling_seed": 0,
            },
            "return_logprob": True,
            "stream": True,
            "cache_salt": "mine/e2-v7",
        }
        counters = engine.counters
        assert (counters.requests, counters.generated_tokens) == (1, 3)
        assert (counters.prompt_tokens, counters.cached_tokens, counters.lost) == (4, 2, 0)

    run(test)


def test_modes_that_empty_the_cache_need_no_salt_and_no_stop_ids_means_none():
    async def test(script: Script, engine: SGLangEngine) -> None:
        script.streams(event([5], 1, finish=LENGTH), DONE)
        await engine.generate(ask((1,), 1))
        [body] = bodies(script)
        assert "cache_salt" not in body and "top_k" not in body["sampling_params"]
        assert body["sampling_params"]["ignore_eos"] is True

    run(test, mode="retract")


def test_a_turn_goes_on_after_an_end_of_sequence_id_of_the_servers_own():
    async def test(script: Script, engine: SGLangEngine) -> None:
        async def next_part(request: Any) -> Any:
            part = parts.pop(0)
            script.streams(part, DONE)
            answer = script.answers["/generate"]
            script.answers["/generate"] = next_part
            return await answer(request)

        parts = [event([5, 63], 2, finish=STOP), event([6, 9], 2, finish=STOP)]
        script.answers["/generate"] = next_part
        generation = await engine.generate(ask((1,), 10, stop_ids=(9,)))
        assert generation.ids == (5, 63, 6, 9) and generation.stop is StopReason.STOP
        assert [
            (body["input_ids"], body["sampling_params"]["max_new_tokens"]) for body in bodies(script)
        ] == [
            ([1], 10),
            ([1, 5, 63], 8),
        ]
        parts[:] = [event([5, 63], 2, finish=STOP)]  # on its last token
        script.answers["/generate"] = next_part
        assert (await engine.generate(ask((1,), 2, stop_ids=(9,)))).stop is StopReason.LENGTH
        parts[:] = [event([5, 63], 2, finish=STOP), event([], 0, finish=FULL)]
        script.answers["/generate"] = next_part
        with pytest.raises(EngineLost) as lost:  # not busy: something was sampled
            await engine.generate(ask((1,), 10, stop_ids=(9,)))
        assert lost.value.partial.ids == (5, 63)

    run(test)


@pytest.mark.parametrize(
    ("parts", "cut", "text"),
    [
        ([event([5], 1), event([6], 2)], True, "the stream of /generate"),
        ([event([5, 6], 2), event([], 2, finish=ABORT), DONE], False, "took the request back"),
        ([event([5, 6], 2), DONE], False, "ended, but not the request"),
        ([event([5, 6], 2)], False, "before its end mark"),
    ],
)
def test_what_a_lost_request_has_is_kept(parts: list[bytes], cut: bool, text: str):
    async def test(script: Script, engine: SGLangEngine) -> None:
        script.streams(*parts, cut=cut)
        with pytest.raises(EngineLost, match=text) as lost:
            await engine.generate(ask((1,), 10))
        assert lost.value.partial.ids == (5, 6) and lost.value.partial.stop is StopReason.ABORT
        assert lost.value.partial.spans == (VersionSpan(0, 2, 0, 0),)
        assert engine.counters.lost == 1 and script.url in str(lost.value)

    run(test)


def test_weights_of_nobody_lose_the_request_and_its_tokens():
    async def test(script: Script, engine: SGLangEngine) -> None:
        script.streams(event([5, 6], 2, "default", LENGTH), DONE)
        with pytest.raises(EngineLost, match=r"'default'.*load them anew") as lost:
            await engine.generate(ask((1,), 2))
        assert lost.value.partial.ids == ()

    run(test)


def test_busy_short_and_nonsense():
    async def test(script: Script, engine: SGLangEngine) -> None:
        script.streams(event([], 0, finish=FULL), DONE)
        with pytest.raises(EngineBusy, match="queue is full"):
            await engine.generate(ask((1,), 4))
        assert engine.counters.busy == 1
        script.streams(event([5], 1, finish=LENGTH), DONE)
        with pytest.raises(EngineError, match="cut a turn to 1 of 4 tokens"):
            await engine.generate(ask((1,), 4))
        script.streams(event([5], 1, finish={"type": "stop", "matched": "NaN happened"}), DONE)
        with pytest.raises(EngineError, match="NaN happened"):
            await engine.generate(ask((1,), 4, stop_ids=(9,)))
        with pytest.raises(EngineError, match="set temperature 0"):
            await engine.generate(ask((1,), 4, top_k=1, temperature=0.7))

    run(test)


def test_an_abort_that_the_server_ignores_cuts_the_connection():
    async def test(script: Script, engine: SGLangEngine) -> None:
        never = asyncio.Event()
        script.streams(event([5], 1), then=never)
        task = asyncio.create_task(engine.generate(ask((1,), 10)))
        await script.came.wait()
        engine.abort("s")
        engine.abort("s")  # once is enough
        generation = await task
        assert generation.ids == (5,) and generation.stop is StopReason.ABORT
        assert [body for path, body, _ in script.asked if path == "/abort_request"] == [
            {"rid": bodies(script)[0]["rid"]}
        ]
        assert engine.counters.aborted == 1 and engine.counters.lost == 0

    run(test)


def test_requests_wait_for_room_and_can_be_aborted_there():
    async def test(script: Script, engine: SGLangEngine) -> None:
        go = asyncio.Event()
        script.streams(event([5], 1, finish=LENGTH), DONE, then=go)
        tasks = [asyncio.create_task(engine.generate(ask((1,), 1, str(i)))) for i in range(3)]
        await asyncio.sleep(0)
        assert engine.running == 3
        with pytest.raises(EngineError, match="still running"):
            await engine.generate(ask((1,), 1, "2"))
        engine.release("2")
        aborted = await tasks[2]
        assert aborted.ids == () and aborted.stop is StopReason.ABORT
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        go.set()
        assert (await tasks[0]).ids == (5,)
        assert len(bodies(script)) == 1

    run(test, max_requests=1)


def test_who_asks_a_broken_server_again_and_again_does_not_block_its_mending():
    async def test(script: Script, engine: SGLangEngine) -> None:
        engine._loader.broken = "half loaded"
        asyncio.get_running_loop().call_soon(setattr, engine._loader, "broken", "")
        script.streams(event([5], 1, finish=LENGTH), DONE)
        with pytest.raises(EngineLost, match="half loaded") as lost:
            await engine.generate(ask((1,), 1))
        assert lost.value.partial.ids == ()
        assert (await engine.generate(ask((1,), 1))).ids == (5,)

    run(test)


def test_scores_are_computed_anew():
    async def test(script: Script, engine: SGLangEngine) -> None:
        answer = b'{"meta_info":{"input_token_logprobs":[[null,4,null],[-1.5,5,null],[-2.5,6,null]]}}'
        script.says("/generate", 200, answer)
        assert await engine.score((4, 5, 6)) == (-1.5, -2.5)
        with pytest.raises(EngineError, match="other ids"):
            await engine.score((4, 6, 5))
        salts = {body["cache_salt"] for body in bodies(script)}
        assert len(salts) == 2 and "" not in salts

    run(test)
