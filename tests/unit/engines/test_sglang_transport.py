"""Every shape in which a server says no, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asyncrl.engines.base import EngineBusy, EngineRefused
from asyncrl.engines.sglang.http import KeyRejected, ServerApi, ServerGone
from asyncrl.engines.sglang.transport import EventSplitter
from asyncrl.errors import AsyncrlError, ConfigError, EngineError
from asyncrl.weights.manifest import WeightsError
from tests.fakes.sglang import DONE, Script, event, scripted


@asynccontextmanager
async def connected(*keys: str) -> AsyncIterator[tuple[Script, ServerApi]]:
    async with asyncio.timeout(60), scripted() as script:
        server = ServerApi(script.url, *keys)
        try:
            yield script, server
        finally:
            await server.close()


async def drained(server: ServerApi, silence: float = 30.0) -> list[bytes]:
    async with server.generate({"input_ids": [1]}, silence) as events:
        return [payload async for payload in events]


@pytest.mark.parametrize(
    ("status", "content", "kind", "text"),
    [
        (400, b'{"error":{"message":"input_ids cannot be empty."}}', EngineRefused, "cannot be empty"),
        (400, b'{"error":"unknown field `x`, expected one of `y`"}', EngineRefused, "unknown field `x`"),
        (400, b'{"object":"error","message":"bad body","code":400}', EngineRefused, "bad body"),
        (503, b'{"message":"The request queue is full.","type":"503"}', EngineBusy, "queue is full"),
        (401, b'{"error":"Unauthorized"}', KeyRejected, "Unauthorized; check the API key"),
        (403, b'{"error":"Forbidden"}', KeyRejected, "Forbidden; check the API key"),
        (404, b'{"detail":"Not Found"}', EngineError, "Not Found"),
        (500, b"Internal Server Error", EngineError, "500: Internal Server Error"),
        (502, b"", EngineError, "502: HTTP 502"),
    ],
)
async def test_error_shapes(status: int, content: bytes, kind: type[AsyncrlError], text: str):
    async with connected() as (script, server):
        for path in ("/generate", "/model_info"):
            script.says(path, status, content)
        for call in (server.generate_whole({}), drained(server), server.model_info()):
            with pytest.raises(kind, match=text) as error:
                await call
            assert type(error.value) is kind and script.url in str(error.value)


async def test_weight_endpoints_fail_with_weights_errors():
    async with connected() as (script, server):
        path = "/update_weights_from_disk"
        script.says(path, 400, b'{"success":false,"message":"Failed to get weights iterator"}')
        with pytest.raises(WeightsError, match="returned 400: Failed to get weights iterator"):
            await server.update_from_disk("/nowhere", "e0-v1")
        script.says(path, 200, b'{"success":false,"message":"said so"}')
        with pytest.raises(WeightsError, match="said so"):
            await server.update_from_disk("/nowhere", "e0-v1")
        script.says(path, 200, b'{"success":true,"message":""}')
        await server.update_from_disk("/here", "e0-v1")
        body = {"model_path": "/here", "weight_version": "e0-v1", "flush_cache": False}
        assert script.requests[-1][:2] == (path, body)


async def test_each_route_gets_the_key_that_opens_it():
    async with connected("a", "b") as (script, server):
        script.says("/model_info", 200, b'{"model_path":"m","weight_version":"default"}')
        for path in ("/generate", "/abort_request", "/flush_cache", "/continue_generation"):
            script.says(path, 200, b"{}")
        await server.weight_label()
        await server.generate_whole({})
        await server.try_admin_key()
        await server.flush_cache(wait=1)
        await server.resume()
        assert [key for _, _, key in script.requests] == ["Bearer a"] * 2 + ["Bearer b"] * 3


@pytest.mark.parametrize(
    ("status", "content", "use"),
    [
        (200, b'{"loads":[{"dp_rank":0,"token_usage":0.25},{"dp_rank":1,"token_usage":0.5}]}', 0.5),
        (200, b'{"loads":[]}', None),
        (200, b'{"loads":[{"num_tokens":3}]}', None),
        (404, b'{"detail":"Not Found"}', None),
        (401, b'{"error":"Unauthorized"}', None),
    ],
)
async def test_the_fullest_rank_says_how_full_a_server_is(status: int, content: bytes, use: float | None):
    async with connected() as (script, server):
        script.says("/v1/loads", status, content)
        assert await server.kv_use() == use


async def test_servers_that_are_gone_silent_or_cut_the_line():
    async with connected() as (script, server):
        forever = asyncio.Event()
        script.streams(event([1], 1), then=forever)
        with pytest.raises(ServerGone, match=r"received no response within 0\.2 s"):
            await drained(server, silence=0.2)
        script.streams(event([1], 1), cut=True)
        with pytest.raises(ServerGone, match="/generate"):
            await drained(server)
        script.streams(event([1], 1))
        with pytest.raises(ServerGone, match="ended prematurely"):
            await drained(server)
        script.streams(event([1], 1), DONE)
        assert len(await drained(server)) == 1


@pytest.mark.parametrize(("url", "kind"), [("http://127.0.0.1:9", ServerGone), ("nonsense", ConfigError)])
async def test_nobody_there_and_no_url(url: str, kind: type[AsyncrlError]):
    server = ServerApi(url)
    with pytest.raises(kind):
        await server.ready()
    await server.close()


async def test_ready_is_a_question_to_servers_of_this_kind_only():
    async with connected() as (script, server):
        for status, ready in ((200, True), (503, False)):
            script.says("/ready", status)
            assert await server.ready() is ready
            assert await server.alive()
        script.says("/ready", 404)
        with pytest.raises(EngineError, match="is this an SGLang server"):
            await server.ready()
        assert not await server.alive()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_wherever_the_stream_was_cut(size: int):
    stream = event([1], 1) + b": a comment\n\n" + event([2], 2) + DONE
    events = EventSplitter()
    payloads = [
        payload
        for start in range(0, len(stream), size)
        for payload in events.feed(stream[start : start + size])
    ]
    assert payloads == [event([1], 1)[6:-2], event([2], 2)[6:-2], b"[DONE]"]


async def test_a_server_that_sleeps_may_be_silent_and_then_has_its_time_anew():
    async with connected() as (script, server):
        request_started = asyncio.Event()
        wakes = asyncio.Event()
        script.streams(event([1], 1), then=wakes)

        async def read() -> None:
            async with server.generate({"input_ids": [1]}, 0.2) as events:
                async for _ in events:
                    request_started.set()

        server.set_asleep(True)
        stream = asyncio.create_task(read())
        await request_started.wait()
        done, _ = await asyncio.wait([stream], timeout=0.5)  # more than it may be silent awake
        assert not done
        start = asyncio.get_running_loop().time()
        server.set_asleep(False)
        with pytest.raises(ServerGone, match=r"received no response within 0\.2 s"):
            await stream
        assert asyncio.get_running_loop().time() - start >= 0.19
        wakes.set()
