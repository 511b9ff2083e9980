"""Who is let in, what a role may send, and that what cannot be read is counted and dropped."""

from __future__ import annotations

import asyncio
import math
import queue
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.errors import ProtocolError
from asyncrl.wire import sockets
from asyncrl.wire.addresses import (
    MAX_HELD_PORTS,
    bind_address,
    hold_ports,
    own_address,
    reserve_port,
    reserve_ports,
)
from asyncrl.wire.messages.channels import ToCoordinatorControl, ToObserver, ToWorkerBulk
from asyncrl.wire.messages.shared import Attempt, ObserverHello, Stop, WireMessage
from asyncrl.wire.messages.trainer import Checkpointed, Commit, PlanRequest, TrainerHello
from asyncrl.wire.messages.worker import EngineUse, Replied, WorkerHeartbeat, WorkerHello
from asyncrl.wire.sockets import (
    AsyncLink,
    Codec,
    Gate,
    Hub,
    KeyPair,
    Link,
    choose_endpoints,
    encode_message,
    new_key_pair,
    role_of,
    set_identity,
)
from tests.fakes.proxy import Proxy

GOOD = encode_message(ObserverHello(), [])


class Visitors:
    """A hub of the control channel, and sockets that send it what they like."""

    def __init__(self, unions: Mapping[str, object] = ToCoordinatorControl) -> None:
        self.endpoints = choose_endpoints("127.0.0.1", 0)
        self.gate = Gate(self.endpoints)
        self.hub = Hub(self.endpoints.control, unions, self.gate)
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []  # one that nothing refers to is closed, with what it has to send

    def open(self, identity: bytes, key: KeyPair | None = None) -> zmq.Socket:
        """A socket with a key of its own, or that of the role that the identity names."""
        role = role_of(identity)
        socket: zmq.Socket = self._context.socket(zmq.DEALER)
        set_identity(socket, identity, self.endpoints.keys | ({role: key} if key else {}))
        self._sockets.append(socket)
        return socket

    def send(
        self, *messages: list[bytes], identity: bytes = b"observer/0/x", key: KeyPair | None = None
    ) -> None:
        socket = self.open(identity, key)
        socket.connect(self.endpoints.control)
        for parts in messages:
            socket.send_multipart(parts)

    def receive(self) -> object:
        """The next message that the hub takes; None when one is refused, or a few."""
        assert self.hub.socket.poll(10_000), "nothing came"
        received = self.hub.receive()
        return received and received[1]

    def expect(self, message: object, refused: int) -> None:
        """It is taken, and that many messages are refused, in any order."""
        messages = []
        while len(messages) < 1 or self.hub.refused_count < refused:
            messages += filter(None, [self.receive()])
        assert messages == [message] and self.hub.refused_count == refused

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.hub.close()
        self.gate.close()


@pytest.fixture
def visitors() -> Iterator[Visitors]:
    all_visitors = Visitors()
    yield all_visitors
    all_visitors.close()


def test_what_waits_to_be_read_keeps_little_more_memory_than_its_size(visitors: Visitors) -> None:
    visitors.send(GOOD)
    visitors.expect(ObserverHello(), refused=0)
    before = psutil.Process().memory_info().rss
    kept_messages = []
    for _ in range(1000):  # each comes alone
        visitors._sockets[0].send(b"x" * 100)
        assert visitors.hub.socket.poll(10_000)
        kept_messages.append(visitors.hub.socket.recv_multipart(copy=False))

    assert psutil.Process().memory_info().rss - before < 4 << 20


@pytest.mark.parametrize(
    "garbage",
    [
        [b""],
        [b"\xc1"],
        [b"GET / HTTP/1.1"],
        [GOOD[0][:-1]],
        encode_message(PlanRequest(1, 1, 1), []),
        [GOOD[0][:-1] + b"\xff"],
        [b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"],
    ],
    ids=["empty", "no msgpack", "another protocol", "cut", "another channel's", "no text", "deep"],
)
def test_what_cannot_be_read_is_counted_and_the_next_message_comes(
    visitors: Visitors, garbage: list[bytes]
) -> None:
    visitors.send(garbage, GOOD)
    visitors.expect(ObserverHello(), refused=1)


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("rollout", WorkerHeartbeat(-1, (), 0.0, 0.0, 0)),
        ("rollout", WorkerHeartbeat(0, (), math.nan, 0.0, 0)),
        ("rollout", WorkerHeartbeat(0, (), 0.0, math.inf, 0)),
        ("rollout", WorkerHeartbeat(0, (), 0.0, 0.0, 1 << 63)),
        ("rollout", WorkerHeartbeat(0, (), 0.0, 0.0, 0, engines=(EngineUse("e", tokens=-1),))),
        ("rollout", WorkerHello(0, "a", -4, 1)),
        ("trainer", TrainerHello(0, -2, "a", 0)),
        ("trainer", Checkpointed(1, 1 << 63, 0)),
    ],
)
def test_a_number_that_cannot_be_is_not_taken_in(role: str, message: WireMessage) -> None:
    with pytest.raises(ProtocolError, match="undecodable"):
        Codec(ToCoordinatorControl[role]).decode(encode_message(message, []))


def test_an_identity_that_is_no_text_is_nobody(visitors: Visitors) -> None:
    visitors.send(GOOD, identity=b"observer/\xff\xfe")
    visitors.send(GOOD)
    visitors.expect(ObserverHello(), refused=1)


# -- who belongs -------------------------------------------------------------------------------------


def refusal(socket: zmq.Socket, endpoint: str) -> int:
    """How a connection ends that is not let in: an event of the socket."""
    monitor = socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
    )
    socket.connect(endpoint)
    with suppress(zmq.Again):  # a connection that has been given up takes nothing: waiting would never end
        socket.send_multipart(GOOD, zmq.DONTWAIT)
    assert monitor.poll(10_000), "no end of the handshake"
    event = int(recv_monitor_message(monitor)["event"])
    socket.disable_monitor()
    monitor.close(linger=0)

    return event


def test_nobody_without_a_key_of_the_launch_is_let_in(
    visitors: Visitors, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key pair may be in order, and it may know the coordinator's public key: both are not enough."""
    stranger = visitors.open(b"observer/0/x", new_key_pair())
    assert refusal(stranger, visitors.endpoints.control) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert "refused" in caplog.text and "new token" in caplog.text
    visitors.send(GOOD)
    assert visitors.receive() == ObserverHello()
    assert visitors.hub.receive() is None and visitors.hub.refused_count == 0


def test_nobody_without_encryption_is_let_in(visitors: Visitors) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        assert refusal(plain, visitors.endpoints.control) == zmq.EVENT_DISCONNECTED
    assert visitors.hub.receive() is None


def test_a_coordinator_of_another_launch_is_not_talked_to(visitors: Visitors) -> None:
    other_endpoints = msgspec.structs.replace(visitors.endpoints, keys=choose_endpoints("127.0.0.1", 0).keys)
    visitors.endpoints = msgspec.structs.replace(
        other_endpoints, keys=visitors.endpoints.keys | {"coordinator": other_endpoints.keys["coordinator"]}
    )
    assert refusal(visitors.open(b"observer/0/x"), other_endpoints.control) == zmq.EVENT_DISCONNECTED


def test_a_role_sends_only_its_own_messages(visitors: Visitors) -> None:
    """A worker that was taken over cannot commit, or stop the run, under its own name or another's."""
    stop = encode_message(Stop("mine now"), [])
    commit = encode_message(Commit(1, 1, "", (), {}), [])
    worker = visitors.endpoints.keys["rollout"]
    visitors.send(stop, commit, identity=b"rollout/0/x")
    visitors.send(stop, GOOD, identity=b"observer/0/y", key=worker)
    visitors.send(commit, identity=b"trainer/0/y", key=worker)
    visitors.send(GOOD)
    visitors.expect(ObserverHello(), refused=5)


def test_a_gate_that_dies_ends_its_process_by_name(
    visitors: Visitors, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would be let in any more: its process is replaced."""
    exit_codes = queue.Queue[int]()
    monkeypatch.setattr("asyncrl.errors._exit", exit_codes.put)
    visitors.gate.role_by_key = None  # type: ignore[assignment]
    visitors.open(b"observer/0/x").connect(visitors.endpoints.control)
    assert exit_codes.get(timeout=30) == 1
    assert "TypeError" in caplog.text
    assert caplog.messages[-1].splitlines()[-1].startswith("thread 'gate' failed; exiting: Type")


def test_a_key_that_is_taken_back_is_heard_no_more(visitors: Visitors) -> None:
    socket = visitors.open(b"observer/0/x")
    socket.connect(visitors.endpoints.control)
    socket.send_multipart(GOOD)
    assert visitors.receive() == ObserverHello()
    del visitors.gate.role_by_key[visitors.endpoints.keys["observer"].public]
    socket.send_multipart(GOOD)
    assert visitors.receive() is None and visitors.hub.refused_count == 1


def test_a_reserved_port_is_given_to_nobody_else_and_the_server_may_listen_on_it() -> None:
    with reserve_port("127.0.0.1") as reserved, socket.socket() as stranger, socket.socket() as server:
        address = reserved.getsockname()
        with pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        socket.create_connection(address, 5).close()


def test_the_ports_of_endpoints_are_held_until_the_coordinator_listens() -> None:
    endpoints = choose_endpoints("127.0.0.1", 0)
    port = int(endpoints.control.rpartition(":")[2])
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))

    gate = Gate(endpoints)
    hub = Hub(endpoints.control, ToCoordinatorControl, gate)
    with socket.create_connection(("127.0.0.1", port), 10):
        hub.close()
        gate.close()


def test_a_process_holds_few_ports() -> None:
    first_socket = reserve_port("127.0.0.1")
    hold_ports([first_socket])
    assert first_socket.fileno() >= 0
    hold_ports(reserve_ports("127.0.0.1", 0, MAX_HELD_PORTS))
    assert first_socket.fileno() < 0  # closed


def test_a_role_is_given_no_other_secret() -> None:
    endpoints = choose_endpoints("127.0.0.1", 0)
    secrets = {role: key.secret for role, key in endpoints.keys.items()}
    assert len(set(secrets.values())) == 6 and all(secrets.values())
    for role in secrets:
        role_endpoints = msgspec.msgpack.encode(endpoints.for_role(role))
        assert [name for name, secret in secrets.items() if secret.encode() in role_endpoints] == [role]
        assert all(key.public.encode() in role_endpoints for key in endpoints.keys.values())

    assert not any(secret in f"{endpoints!r} {endpoints}" for secret in secrets.values())


def test_a_flood_of_garbage_lets_the_owner_go_on(visitors: Visitors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_DROPPED", 1)
    visitors.send(*[[b"\xc1"]] * 4, GOOD)
    for refused in range(1, 5):
        assert visitors.receive() is None and visitors.hub.refused_count == refused
    assert visitors.receive() == ObserverHello()


def test_all_frames_of_a_message_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_BYTES", 1000)
    visitors = Visitors({"observer": Replied})
    reply = Replied(1, Attempt("0.0", 0), 0)
    with pytest.raises(ProtocolError, match="at most 1000"):
        encode_message(reply, [b"x" * 400] * 3)
    (header,) = encode_message(reply, [])
    visitors.send([header, *[b"x" * 400] * 3], [header, b"x" * 400])
    visitors.expect(reply, refused=1)
    visitors.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_what_peers_dial_is_an_address_of_this_machine(host: str) -> None:
    endpoints = choose_endpoints(host, 0)
    assert endpoints.control.startswith(f"tcp://{own_address() if host == '0.0.0.0' else host}:")
    gate = Gate(endpoints)
    hub = Hub(bind_address(endpoints.control, host), ToCoordinatorControl, gate)
    link = Link(endpoints.control, ToObserver, b"observer/0/x", endpoints.keys)
    link.send(ObserverHello())
    assert hub.socket.poll(10_000) and hub.receive() == (b"observer/0/x", ObserverHello(), [])
    assert (b"0.0.0.0" in hub.socket.getsockopt(zmq.LAST_ENDPOINT)) == (host == "0.0.0.0")
    link.close()
    hub.close()
    gate.close()


class Blocking:
    """A Link that is awaited as an AsyncLink."""

    def __init__(self, *arguments: Any) -> None:
        self._link = Link(*arguments)
        self._dial = self._link._dial
        self.close = self._link.close

    async def send(self, message: WireMessage) -> None:
        self._link.send(message)


@pytest.mark.parametrize("kind", [AsyncLink, Blocking])
@pytest.mark.parametrize("towards", ["both", "peer"])
def test_a_connection_that_damaged_bytes_ended_is_made_again(kind: type, towards: str) -> None:
    """ZeroMQ gives it up for good."""
    endpoints = choose_endpoints("127.0.0.1", 0)
    gate = Gate(endpoints)
    hub = Hub(endpoints.bulk, {"rollout": PlanRequest}, gate)
    proxy = Proxy(int(endpoints.bulk.rpartition(":")[2]))

    async def play() -> None:
        link = kind(f"tcp://127.0.0.1:{proxy.port}", ToWorkerBulk, b"rollout/0/x", endpoints.keys)
        await link.send(PlanRequest(1, 1, 1))
        assert await asyncio.to_thread(hub.socket.poll, 10_000) and hub.receive()
        proxy.garble(to_peers_only=towards == "peer")
        assert link._dial._monitor_socket.poll(10_000), "or the next message overtakes the damage"

        for step in range(100):  # those that were in the queue are lost
            await link.send(PlanRequest(1, step, 1))
            if await asyncio.to_thread(hub.socket.poll, 100):
                break

        assert hub.receive() is not None
        link.close()

    asyncio.run(play())
    for end in (hub, gate, proxy):
        end.close()


def test_events_that_nobody_reads_block_no_other_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a link that sends nothing while its coordinator is away: ZeroMQ queues 2,000 by default."""
    endpoints = choose_endpoints("127.0.0.1", 0)
    configure = sockets._configure
    gate = Gate(endpoints)
    hub = Hub(endpoints.bulk, {"trainer": PlanRequest}, gate)

    def impatient(sock: zmq.Socket) -> None:
        configure(sock)
        sock.setsockopt(zmq.RECONNECT_IVL, 1)

    monkeypatch.setattr(sockets, "_configure", impatient)
    both = (endpoints.control, endpoints.bulk)
    idle, link = (Link(at, ToWorkerBulk, b"trainer/0/x", endpoints.keys) for at in both)
    for port in range(1, 100):  # nobody is there either: more events in the same time
        idle.socket.connect(f"tcp://127.0.0.1:{port}")
    for seconds in (1, 4, 16):
        until = time.monotonic() + seconds
        events = 0
        while time.monotonic() < until:
            link.send(PlanRequest(1, 1, 1))
            assert hub.socket.poll(10_000) and hub.receive() is not None
        while idle._dial._monitor_socket.poll(0) and events <= 2100:
            events += bool(recv_monitor_message(idle._dial._monitor_socket))
        if events > 2100:
            break

    assert events > 2100
    for end in (idle, link, hub, gate):
        end.close()
