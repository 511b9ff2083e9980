"""The gateway's listeners: strangers are bounded, and an episode can have one of its own, in its sandbox."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import pickle
import socket
import struct
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.gateway import Endpoint, Gateway, connections
from asyncrl.isolation.calls import LoopThread
from tests.fakes.agents import ask, message
from tests.fakes.hosts import FakeHost, served


@served
async def test_strangers_keep_nobody_away(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of too many is closed, and each that shows no key in time; who has one stays."""
    monkeypatch.setattr(connections, "MAX_STRANGERS", 20)
    async with gateway.admit_episode(FakeHost()) as endpoint, aiohttp.ClientSession() as session:
        where = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with session.get(endpoint.base_url + "/models", headers=headers) as answer:
            assert answer.status == 200
        known = list(session.connector._conns)  # type: ignore[union-attr]
        opened = [await asyncio.open_connection(*where) for _ in range(50)]
        assert await opened[0][0].read() == b""  # closed
        async with session.get(endpoint.base_url + "/models", headers=headers) as answer:
            assert answer.status == 200
        assert list(session.connector._conns) == known  # type: ignore[union-attr]
        for _, writer in opened:
            writer.close()
        monkeypatch.setattr(connections, "HEADER_SECONDS", 0.05)
        reader, writer = await asyncio.open_connection(*where)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost:")
        assert await reader.read() == b""
        writer.close()


def test_a_burst_of_strangers_is_bounded_before_any_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop accepts a hundred connections before it calls `connection_lost` of the first."""
    monkeypatch.setattr(connections, "MAX_STRANGERS", 3)
    aborted: list[int] = []

    class Opened(asyncio.Transport):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def abort(self) -> None:
            aborted.append(self.number)

    async def main() -> None:
        bounded = connections.Connections(lambda: Mock()).protocol_factory()
        for number in range(8):
            bounded().connection_made(Opened(number))

    asyncio.run(main())
    assert aborted == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("0.0.0.0", "agents cannot connect to this address"),
        ("::", "agents cannot connect to this address"),
        ("192.0.2.1", "assign requested address; set an address or host name of this machine"),
        ("no such name", "set an address or host name of this machine"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_named(address: str, why: str) -> None:
    async def main() -> None:
        gateway = Gateway(address)
        try:
            await gateway.start()
        finally:
            await gateway.close()

    with pytest.raises(ConfigError, match=rf"^rollout\.agent_address '{address}'.*{why}"):
        asyncio.run(main())


def test_agents_get_the_address_that_is_named() -> None:
    async def main() -> None:
        gateway = Gateway("127.0.0.2")
        await gateway.start()
        async with gateway.admit_episode(FakeHost()) as endpoint:
            assert endpoint.base_url.startswith("http://127.0.0.2:")
            assert (await message(endpoint, "q"))["content"] == "42"
        await gateway.close()

    asyncio.run(main())


CLONE_NEWNET = 0x40000000
SET_FLAGS = 0x8914
UP_AND_RUNNING = 0x41


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


async def elsewhere(work: Callable[[socket.socket], Any]) -> None:
    """Call it in a thread, with a listening socket of a network namespace of that thread alone; without the
    right to make one, of this."""

    def inside() -> None:
        if ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", UP_AND_RUNNING))
        work(listening())

    with ThreadPoolExecutor(1) as thread:
        await asyncio.get_running_loop().run_in_executor(thread, inside)


@served
async def test_an_episode_has_a_listener_of_its_own_in_another_namespace(gateway: Gateway) -> None:
    said: list[Any] = []

    def agent(listener: socket.socket) -> None:
        async def main() -> None:  # in a loop of this thread
            inner = await endpoint.serve_on(listener)
            assert inner.base_url != endpoint.base_url
            said.append(pickle.loads(pickle.dumps(inner)))
            assert (await message(inner, "q"))["content"] == "42"
            said.append(await ask(Endpoint(inner.base_url, other.api_key), "q"))

        asyncio.run(main())

    async with gateway.admit_episode(FakeHost()) as endpoint, gateway.admit_episode(FakeHost()) as other:
        await elsewhere(agent)
        inner, (status, body) = said
        assert inner == Endpoint(inner.base_url, endpoint.api_key)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")  # of another episode
        assert (await ask(other, "q"))[0] == 200


@served
async def test_own_listeners_end_with_the_episode(gateway: Gateway) -> None:
    """Also those that were asked for in the agents' loop, and while a request is under way."""
    host = FakeHost()
    agents = LoopThread("agents")
    async with gateway.admit_episode(FakeHost()) as other, gateway.admit_episode(host) as endpoint:
        kept = listening()
        left = listening()

        async def agent() -> list[Endpoint]:
            return [await endpoint.serve_on(kept), await endpoint.serve_on(left)]

        first, second = await agents.call(agent)
        assert first.base_url != second.base_url
        idle = await asyncio.open_connection(*second.base_url[7:-3].split(":"))
        for one in (endpoint, first, second):
            assert (await ask(one, "q"))[0] == 200
        host.entered.clear()
        host.gate.clear()
        asking = asyncio.create_task(ask(first, "q"))
        await host.entered.wait()
        kept.close()  # it is the gateway's
        assert (await ask(other, "q"))[0] == 200
    assert host.cancelled.is_set()
    with pytest.raises(aiohttp.ClientConnectionError):
        await asking
    assert await idle[0].read() == b""
    idle[1].close()
    for one in (first, second):
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(one, "q")
    with pytest.raises(AsyncrlError, match="has ended"):
        await endpoint.serve_on(listening())
    agents.close()


@served
async def test_strangers_are_bounded_on_all_listeners_together(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 4)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        inner = await endpoint.serve_on(listening())
        where = [one.base_url[7:-3].split(":") for one in (endpoint, inner)]
        opened = [await asyncio.open_connection(*where[number % 2]) for number in range(10)]
        for reader, _ in opened[:6]:
            assert await reader.read() == b""
        assert (await ask(inner, "q"))[0] == 200
        for _, writer in opened:
            writer.close()


@served
async def test_an_agent_that_keeps_connections_keeps_nobody_away(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with its key, nor, through its own listener, without."""
    for name in ("MAX_STRANGERS", "MAX_KNOWN"):
        monkeypatch.setattr(connections, name, 8)
    async with gateway.admit_episode(FakeHost()) as greedy, gateway.admit_episode(FakeHost()) as other:
        where = [one.base_url[7:-3].split(":") for one in (await greedy.serve_on(listening()), other)]
        asking = [
            f"GET /v1/models HTTP/1.1\r\nHost:\r\nx-api-key: {one.api_key}\r\n\r\n".encode()
            for one in (greedy, other)
        ]
        kept = [await asyncio.open_connection(*where[0]) for _ in range(12)]
        for reader, writer in kept[4:]:
            writer.write(asking[0])
            assert (await reader.readline()).endswith(b" 200 OK\r\n")
        reader, writer = await asyncio.open_connection(*where[1])
        kept += [(reader, writer)] + [await asyncio.open_connection(*where[0]) for _ in range(12)]
        writer.write(asking[1])
        assert (await reader.readline()).endswith(b" 200 OK\r\n")
        for _, writer in kept:
            writer.close()


@served
async def test_kept_connections_do_not_keep_ended_episodes(gateway: Gateway) -> None:
    """Nor where a client uses one connection for several, or its request ends as the episode does."""
    hosts = [FakeHost() for _ in range(3)]
    alive = [weakref.ref(host) for host in hosts]
    async with aiohttp.ClientSession() as session:

        async def post(endpoint: Endpoint) -> int:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            body = {"messages": [{"role": "user", "content": "q"}]}
            async with session.post(
                endpoint.base_url + "/chat/completions", json=body, headers=headers
            ) as answer:
                await answer.read()
                return answer.status

        for number, host in enumerate(hosts):
            async with gateway.admit_episode(host) as endpoint:
                assert await post(endpoint) == 200
                if number == 2:
                    host.entered.clear()
                    host.gate.clear()
                    asking = asyncio.create_task(post(endpoint))
                    await host.entered.wait()
        assert await asking == 410
        hosts.clear()
        del host
        gc.collect()
        assert len(session.connector._conns) == 1  # type: ignore[union-attr]
        assert [host() for host in alive] == [None, None, None]


@pytest.mark.parametrize("reads", [True, False])
@served
async def test_an_idle_connection_that_is_reset_had_its_answer_read(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """Not so where the client has not taken all of a long answer, however long ago that was written."""
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.0)
    host = FakeHost("4" if reads else "4" * (60 << 10))
    async with gateway.admit_episode(host) as endpoint:
        address = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets
        client.connect((address[0], int(address[1])))
        client.setblocking(False)
        while not gateway._connections._strangers:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        (connection,) = gateway._connections._strangers.values()
        accepted = connection.transport.get_extra_info("socket")
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        body = b'{"messages": [{"role": "user", "content": "q"}]}'
        start = "POST /v1/chat/completions HTTP/1.1\r\nHost: x"
        head = f"{start}\r\nAuthorization: Bearer {endpoint.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, head.encode() + body)
        assert await loop.sock_recv(client, 8192)
        for _ in range(100):
            await asyncio.sleep(0)
        assert (connection.note_loss is None) is reads
        client.close()
        while gateway._connections._known_connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert len(host.lost) == (not reads)
