"""A hub that anybody can connect to: what cannot be read is counted and dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from asyncrl.errors import DeadlineError, ProtocolError
from asyncrl.wire import sockets
from asyncrl.wire.messages.channels import (
    ToCoordinatorBulk,
    ToCoordinatorControl,
    ToObserver,
    ToWorkerBulk,
)
from asyncrl.wire.messages.observer import ObserverHello
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.trainer import PlanReceived
from asyncrl.wire.messages.worker_bulk import Replied
from asyncrl.wire.sockets import AsyncLink, Hub, Link, bound, choose_endpoints, encode, own_address
from tools.faults.proxy import Proxy

GOOD = encode(ObserverHello(), [])


class Visitors:
    """A hub of the control channel, and sockets of strangers."""

    def __init__(self, union: object = ToCoordinatorControl) -> None:
        self.context = zmq.Context()
        self.hub = Hub("inproc://hub", union, self.context)

    def send(self, *messages: list[bytes], identity: bytes = b"observer/0/x") -> None:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect("inproc://hub")
        for parts in messages:
            socket.send_multipart(parts)

    def receive(self) -> object:
        assert self.hub.socket.poll(10_000), "nothing came"
        received = self.hub.receive()
        return received and received[1]


@pytest.fixture
def visitors() -> Iterator[Visitors]:
    made = Visitors()
    yield made
    made.context.destroy(linger=0)


@pytest.mark.parametrize(
    "garbage",
    [
        [b""],
        [b"\xc1"],
        [b"GET / HTTP/1.1"],
        [GOOD[0][:-1]],
        encode(PlanReceived(1, 1, 1, 0), []),
        [GOOD[0][:-1] + b"\xff"],
        [b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"],
    ],
    ids=["empty", "no msgpack", "another protocol", "cut", "another channel's", "no text", "deep"],
)
def test_what_cannot_be_read_is_counted_and_the_next_message_comes(
    visitors: Visitors, garbage: list[bytes]
) -> None:
    visitors.send(garbage, GOOD)
    assert visitors.receive() == ObserverHello()
    assert visitors.hub.refused == 1


def test_an_identity_that_is_no_text_is_nobody(visitors: Visitors) -> None:
    visitors.send(GOOD, identity=b"\xff\xfe")
    visitors.send(GOOD)
    assert visitors.receive() == ObserverHello()
    assert visitors.hub.refused or visitors.receive() is None
    assert visitors.hub.refused == 1


def test_a_flood_of_garbage_lets_the_owner_go_on(visitors: Visitors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_REFUSALS", 3)
    visitors.send(*[[b"\xc1"]] * 4, GOOD)
    assert visitors.receive() is None and visitors.hub.refused == 3
    assert visitors.receive() == ObserverHello()


def test_all_frames_of_a_message_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_BYTES", 1000)
    visitors = Visitors(ToCoordinatorBulk)
    reply = Replied(1, Attempt("0.0", 0), 0)
    with pytest.raises(ProtocolError, match="at most 1000"):
        encode(reply, [b"x" * 400] * 3)
    (header,) = encode(reply, [])
    visitors.send([header, *[b"x" * 400] * 3], [header, b"x" * 400])
    assert visitors.receive() == reply and visitors.hub.refused == 1
    visitors.context.destroy(linger=0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_what_peers_dial_is_an_address_of_this_machine(host: str) -> None:
    endpoints = choose_endpoints(host, 0)
    assert endpoints.control.startswith(f"tcp://{own_address() if host == '0.0.0.0' else host}:")
    hub = Hub(bound(endpoints.control, host), ToCoordinatorControl)
    link = Link(endpoints.control, ToObserver, b"observer/0/x")
    link.send(ObserverHello())
    assert hub.socket.poll(10_000) and hub.receive() == (b"observer/0/x", ObserverHello(), [])
    assert (b"0.0.0.0" in hub.socket.getsockopt(zmq.LAST_ENDPOINT)) == (host == "0.0.0.0")
    link.close()
    hub.close()


def test_a_connection_that_garbage_ended_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ gives it up for good. The worker's outbox sends for ever what is not acknowledged."""
    monkeypatch.setattr(sockets, "SEND_DEADLINE", 0.2)
    endpoint = choose_endpoints("127.0.0.1", 0).bulk
    hub = Hub(endpoint, ToCoordinatorBulk)
    proxy = Proxy(int(endpoint.rpartition(":")[2]))

    async def until_received(link: AsyncLink) -> int:
        """Sends that found nobody before one arrived."""
        refused = 0
        while hub.receive() is None:
            try:
                await link.send(PlanReceived(1, 1, 1, 0))
            except DeadlineError:
                refused += 1
            await asyncio.to_thread(hub.socket.poll, 200)
            assert refused < 50, "the connection is not made again"
        return refused

    async def play() -> None:
        link = AsyncLink(f"tcp://127.0.0.1:{proxy.port}", ToWorkerBulk, b"rollout/0/x")
        assert await until_received(link) == 0
        proxy.garble()
        while hub.receive() is not None or hub.socket.poll(300):
            pass
        assert await until_received(link) > 0, "ZeroMQ dials again by itself: no need to"
        link.close()

    asyncio.run(play())
    hub.close()
    proxy.close()
