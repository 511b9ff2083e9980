"""What requests of a program in a sandbox cannot do: write into the worker's log, or take its loop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import socket
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest

from asyncrl.gateway import Endpoint, Gateway, connections, loop_time, server
from asyncrl.types import Message
from tests.fakes.agents import ask
from tests.fakes.dialects import DIALECTS, Dialect
from tests.fakes.hostile import HOSTILE, base_address, request, send
from tests.fakes.hosts import FakeHost, fetch, served

MUCH = 300_000  # bytes
every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


@pytest.fixture(autouse=True)
def no_time_to_read_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.05)


def test_no_request_reaches_a_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever a program sends, however often: the log says so once for each kind of error, and never has a
    byte of it. Clients wait for the answer, or leave at once. Everybody else is served."""
    caplog.set_level(logging.INFO)

    async def main() -> str:
        gateway = Gateway()
        await gateway.start()
        async with gateway.admit_episode(FakeHost()) as endpoint, gateway.admit_episode(FakeHost()) as other:
            for write, waits in itertools.product(HOSTILE.values(), (False, True)):
                async with asyncio.timeout(10):
                    await send(endpoint, write(endpoint.api_key), waits)
            assert (await ask(other, "q"))[0] == 200
            assert (await ask(endpoint, "q"))[0] == 200
        await gateway.close()
        return endpoint.api_key

    key = asyncio.run(main())
    captured = capfd.readouterr()
    logged = caplog.text + captured.out + captured.err
    assert key not in logged and "Traceback" not in logged, logged
    assert "requests from agents that failed or could not be read: " in caplog.records[-1].message
    assert len(caplog.records) < 12, logged


def test_an_error_of_our_own_is_logged_with_its_place_and_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once for each type; debug records do not count."""
    unread = server._UnreadRequests()
    text = "k" + "ey"
    for _ in range(3):
        unread.logger.debug("Error handling request", exc_info=ValueError(text))
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            unread.logger.exception("Unhandled exception", exc_info=error)
    (record,) = caplog.records
    assert "a request from an agent failed: RuntimeError (" in record.message and "key" not in record.message
    assert f'{__file__}", line ' in record.message
    assert unread.counts == {"RuntimeError": 3}


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "identity, gzip", "x"])
@every_dialect
@served
async def test_compressed_requests_are_refused_unread(
    gateway: Gateway, dialect: Dialect, coding: str
) -> None:
    """Not one byte of the body has come when the answer does."""
    async with gateway.admit_episode(FakeHost()) as endpoint:
        reader, writer = await asyncio.open_connection(*base_address(endpoint))
        line = f"POST /v1{dialect.path} HTTP/1.1"
        writer.write(request(endpoint.api_key, line, Content_Length=str(MUCH), Content_Encoding=coding))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.startswith("http/1.1 415 ") and "connection: close" in head
        body = json.loads(await reader.readexactly(int(head.partition("content-length: ")[2].split()[0])))
        assert body["error"]["message"] == f"Content-Encoding {coding}: requests must not be compressed"
        writer.transport.abort()
        headers = {"Content-Encoding": "identity"}
        assert (
            await fetch(endpoint, dialect.path, json=dialect.body([Message("user", "q")]), headers=headers)
        )[0] == 200


@pytest.mark.parametrize("flaw", ["length", "chunks", "path", "key"])
@served
async def test_a_body_that_nobody_reads_ends_the_connection(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    """The body is too large by its announced length, or as it comes; the path is unknown; the key is missing.
    The rest of the body is not read: the client can send no more than buffers hold."""
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        reader, writer = await asyncio.open_connection(*base_address(endpoint))
        large = {"Content_Length": str(10 << 30), "Content_Encoding": "gzip" * (flaw == "path")}
        if flaw == "chunks":
            head = request(endpoint.api_key, Content_Length="", Transfer_Encoding="chunked")
            writer.write(head + f"{1 << 30:x}\r\n".encode())
        elif flaw == "path":
            writer.write(request(endpoint.api_key, "POST /v1/nothing HTTP/1.1", **large))
        else:
            writer.write(request("" if flaw == "key" else endpoint.api_key, **large))
        answer = asyncio.create_task(reader.read(12))
        sent = 0
        with suppress(ConnectionError):
            while sent < 1 << 30:
                writer.write(bytes(1 << 20))
                await writer.drain()
                sent += 1 << 20
        assert sent < 32 << 20
        status = {"path": 404, "key": 401}.get(flaw, 413)
        assert await answer == f"HTTP/1.1 {status}".encode()


def values(count: int) -> dict[str, bytes]:
    return {
        "messages": b'{"messages":[' + b",".join([b'{"role":"user","content":"q"}'] * count) + b"]}",
        "tools": b'{"messages":[],"tools":[' + b",".join([b"{}"] * count) + b"]}",
        "names": b"{" + b",".join([b'"a":1'] * count) + b"}",
        "deep": b'{"a":' + b"[" * count,
        "numbers": b'{"messages":[' + b",".join([b"1"] * count) + b"]}",
    }


@pytest.mark.parametrize("kind", values(0))
@every_dialect
@served
async def test_the_parts_of_a_request_are_bounded(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, dialect: Dialect, kind: str
) -> None:
    """They are counted before anything is made of them."""
    monkeypatch.setattr(server, "MAX_PARTS", 1000)
    monkeypatch.setattr(server, "COUNT_STEP", 512)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        status, body = await fetch(endpoint, dialect.path, data=values(2000)[kind])
        assert (status, body["error"]["message"]) == (
            413,
            "the request contains more than 1,000 brackets and commas; send fewer or shorter messages",
        )
        text = dialect.body([Message("user", "a, b" * 300 + "[]" * 50)])  # as long, with fewer
        assert (await fetch(endpoint, dialect.path, json=text))[0] == 200


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Counter[object]:
    """Count the bytes that the worker reads, by the owner of the connection at first."""
    counts = Counter[object]()
    read = connections._LimitedConnection.buffer_updated

    def counting(self: connections._LimitedConnection, nbytes: int) -> None:
        counts[self.episode] += nbytes
        read(self, nbytes)

    monkeypatch.setattr(connections._LimitedConnection, "buffer_updated", counting)
    return counts


def chunks_of_one_byte(key: str) -> bytes:
    return request(key, Content_Length="", Transfer_Encoding="chunked") + b"1\r\na\r\n" * 100_000


def pipelined(key: str) -> bytes:
    return request(key, "GET /v1/models HTTP/1.1") * 5000


def extension_of_a_chunk(key: str) -> bytes:
    return request(key, Content_Length="", Transfer_Encoding="chunked") + b"1;" + b"a" * 500_000


@pytest.mark.parametrize("costly", [chunks_of_one_byte, pipelined, extension_of_a_chunk])
@served
async def test_an_episode_that_takes_the_loop_is_held(
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    received: Counter[object],
    costly: Callable[[str], bytes],
) -> None:
    """Of what it sends on 20 connections the worker reads what its share of the loop's time allows, here next
    to nothing; nor does it read of a new connection. Another episode is served meanwhile."""
    monkeypatch.setattr(loop_time, "LOOP_BURST", 1e-4)
    monkeypatch.setattr(loop_time, "LOOP_FRACTION", 1e-9)
    async with gateway.admit_episode(FakeHost()) as hostile:
        inner = await hostile.serve_on(socket.create_server(("127.0.0.1", 0)))
        streams = [await asyncio.open_connection(*base_address(inner)) for _ in range(20)]
        for _, writer in streams:
            writer.write(costly(hostile.api_key))
        owner = gateway.running_episodes[hostile.api_key]
        while not gateway._connections.loop_times.is_held(owner):  # noqa: ASYNC110
            await asyncio.sleep(0)

        bytes_before = received[owner]
        monkeypatch.setattr(loop_time, "LOOP_BURST", 10.0)
        late = asyncio.create_task(ask(Endpoint(inner.base_url, hostile.api_key), "q"))
        async with gateway.admit_episode(FakeHost()) as endpoint:
            for _ in range(20):
                assert (await ask(endpoint, "q"))[0] == 200
        assert received[owner] == bytes_before < 20 * connections.READ_BYTES
        assert not late.done()
        late.cancel()
        for _, writer in streams:
            writer.transport.abort()


@served
async def test_a_held_episode_goes_on(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share grows with time: it loses time, and no request."""
    monkeypatch.setattr(loop_time, "LOOP_BURST", 1e-4)
    monkeypatch.setattr(loop_time, "MIN_HELD_SECONDS", 0.01)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        held = 0
        for _ in range(10):
            assert (await ask(endpoint, "q" * 1000))[0] == 200
            held += gateway._connections.loop_times.is_held(gateway.running_episodes[endpoint.api_key])
        assert held > 0


def hold(gateway: Gateway, endpoint: Endpoint) -> None:
    gateway._connections.loop_times.charge_episode(gateway.running_episodes[endpoint.api_key], 1e6)


def release(gateway: Gateway, endpoint: Endpoint) -> None:
    loop_times = gateway._connections.loop_times
    episode = gateway.running_episodes[endpoint.api_key]
    loop_times.charge_episode(episode, -1e7)
    loop_times._release(episode, loop_times._episode_times[episode])


@served
async def test_time_in_which_an_episode_is_held_counts_for_no_limit(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a new connection nor for a body that is not read meanwhile. Both have their limits again
    afterwards."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(server, "READ_SECONDS", 0.2)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        inner = await endpoint.serve_on(socket.create_server(("127.0.0.1", 0)))
        begun = [await asyncio.open_connection(*base_address(inner)) for _ in range(2)]
        for _, writer in begun:
            writer.write(request(endpoint.api_key, Content_Length="100"))
        slots = gateway.running_episodes[endpoint.api_key].request_slots
        while slots._value > server.REQUEST_SLOTS - 2:  # noqa: ASYNC110
            await asyncio.sleep(0)

        hold(gateway, endpoint)
        late = asyncio.create_task(ask(Endpoint(inner.base_url, endpoint.api_key), "q"))
        idle = await asyncio.open_connection(*base_address(inner))
        await asyncio.wait([late], timeout=0.5)
        assert not late.done()
        begun[0][1].write(b"{".ljust(100))

        release(gateway, endpoint)
        assert (await late)[0] == 200
        assert (await begun[0][0].readline()).split()[1] == b"400"  # no JSON
        assert (await begun[1][0].readline()).split()[1] == b"408"
        assert await idle[0].read() == b""
        for _, writer in (*begun, idle):
            writer.transport.abort()


@served
async def test_an_episode_is_held_for_a_bounded_time_before_it_is_decided_anew(gateway: Gateway) -> None:
    """However much it owes, and however many others are held."""
    async with gateway.admit_episode(FakeHost()) as endpoint, gateway.admit_episode(FakeHost()) as other:
        now = asyncio.get_running_loop().time()
        for each in (endpoint, other):
            hold(gateway, each)
            episode_times = gateway._connections.loop_times._episode_times
            timer = episode_times[gateway.running_episodes[each.api_key]].release_timer
            assert timer is not None and now < timer.when() < now + loop_time.MAX_HELD_SECONDS + 1


@served
async def test_an_ended_episode_is_let_go(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not kept in memory, and does not hold others for longer; none of its waiting requests is
    decoded."""
    host = FakeHost()
    decoded = list[bytes]()
    alive = weakref.ref(host)

    def check(body: bytes) -> None:
        decoded.append(body)
        hold(gateway, endpoint)

    monkeypatch.setattr(server, "_check_parts", check)
    async with gateway.admit_episode(host) as endpoint:
        streams = [await asyncio.open_connection(*base_address(endpoint)) for _ in range(3)]
        for _, writer in streams:
            writer.write(request(endpoint.api_key, body="{}"))
        while not decoded:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert not gateway._connections.loop_times._episode_times
    assert [(await reader.readline()).split()[1] for reader, _ in streams] == [b"400", b"401", b"401"]
    assert len(decoded) == 1
    for _, writer in streams:
        writer.transport.abort()
    del host
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "line", ["GET /x", "PUT /v1/messages", "HEAD /", "GET /v1/models", "GET /v1/models/a"]
)
@served
async def test_requests_without_a_body_are_charged_too(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Those that were read at once are answered one after the other, as the episode's share allows; so are
    those for paths and methods that are not there."""
    async with gateway.admit_episode(FakeHost()) as hostile, gateway.admit_episode(FakeHost()) as endpoint:
        inner = await hostile.serve_on(socket.create_server(("127.0.0.1", 0)))
        reader, writer = await asyncio.open_connection(*base_address(inner))
        monkeypatch.setattr(connections, "REQUEST_SECONDS", 1e6)
        writer.write(request(hostile.api_key, f"{line} HTTP/1.1") * 20)
        answers = await reader.readuntil(b"\r\n\r\n")
        monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.0)
        for _ in range(5):
            assert (await ask(endpoint, "q"))[0] == 200
        writer.transport.abort()
        answers += await reader.read()
        assert answers.count(b"HTTP/1.1 ") == 1


@served
async def test_costly_requests_of_an_episode_are_decoded_one_after_the_other(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that had come at once, before the first was decoded."""
    host = FakeHost()
    async with gateway.admit_episode(host) as hostile, gateway.admit_episode(FakeHost()) as endpoint:
        owner = gateway.running_episodes[hostile.api_key]
        streams = [await asyncio.open_connection(*base_address(hostile)) for _ in range(5)]
        monkeypatch.setattr(
            server, "_check_parts", lambda body: gateway._connections.loop_times.charge_episode(owner, 1000.0)
        )
        for number, (_, writer) in enumerate(streams):
            messages = [{"role": "user", "content": f"q{number}"}]
            body = json.dumps({"messages": messages, "max_tokens": 1})
            writer.write(request(hostile.api_key, body=body))
        await host.entered.wait()
        monkeypatch.setattr(server, "_check_parts", lambda body: None)
        for _ in range(5):
            assert (await ask(endpoint, "q"))[0] == 200
        assert len(host.requests) == 1
        for _, writer in streams:
            writer.transport.abort()
