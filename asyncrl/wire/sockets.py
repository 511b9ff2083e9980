"""The only importer of zmq: a ROUTER for the coordinator, DEALERs for everyone else.

| socket | when full                   | what was lost is resent by   | may block |
|--------|-----------------------------|------------------------------|-----------|
| Hub    | `send` returns False        | the peer (no ack)            | nobody    |
| Link   | `send` raises DeadlineError | the coordinator (heartbeats) | the peer  |

Identities are `role/index/incarnation`: a restarted peer is a new peer, so ROUTER never delivers it a
message for the old one. Messages are typed, and all frames of one together are bounded by MAX_BYTES. What is
neither is never sent (ProtocolError); a Hub counts and drops it, as anybody can connect to it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from asyncrl.errors import UNDECODABLE, ConfigError, DeadlineError, ProtocolError
from asyncrl.wire.messages.shared import WireMessage

log = logging.getLogger("asyncrl.wire")

MAX_BYTES = 256 << 20  # of a message, header and frames
MAX_REFUSALS = 256  # messages that a Hub drops before it lets its owner go on
HIGH_WATER = 4096
SEND_DEADLINE = 30.0
EVERY_ADDRESS = "0.0.0.0"
LINGER = 500  # milliseconds that a closed socket goes on sending

LAST = int(zmq.DONTWAIT)  # flags of the last part of a message, and of those before it: ints, as sums of
MORE = LAST | int(zmq.SNDMORE)  # zmq's enums take longer than the sending
_encoder = msgspec.msgpack.Encoder()


class Endpoints(msgspec.Struct, frozen=True):
    """Where the coordinator is dialled."""

    control: str
    bulk: str


def choose_endpoints(host: str, port: int) -> Endpoints:
    """Two ports on `host`: `port` and the next one, or free ones for 0. ConfigError if taken. Nobody can
    dial 0.0.0.0 from elsewhere: there they are named with this machine's own address."""
    with socket.socket() as first, socket.socket() as second:
        for sock, number in ((first, port), (second, port + 1 if port else 0)):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, number))
            except OSError as error:
                raise ConfigError(
                    f"launch.host={host} launch.port={number}: cannot bind ({error.strerror}); "
                    "end what uses it, or set launch.port=0 for a free port"
                ) from None
        dialled = own_address() if host == EVERY_ADDRESS else host
        control, bulk = (f"tcp://{dialled}:{sock.getsockname()[1]}" for sock in (first, second))
        return Endpoints(control, bulk)


def own_address() -> str:
    """This machine's address on the default route; a loopback one without any."""
    try:
        return local_address("tcp://192.0.2.1:9")  # an address for documentation: nobody has it
    except OSError:
        return "127.0.0.1"


def bound(endpoint: str, host: str) -> str:
    """Where the coordinator binds for an endpoint."""
    return f"tcp://{EVERY_ADDRESS}:{endpoint.rpartition(':')[2]}" if host == EVERY_ADDRESS else endpoint


def local_address(endpoint: str) -> str:
    """This machine's address on the way to `endpoint`: peers of the coordinator come the same way."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def identity(role: str, index: int, incarnation: str = "") -> bytes:
    """The name of a process on its sockets: the same on both channels, never used twice."""
    return f"{role}/{index}/{incarnation or secrets.token_hex(6)}".encode()


def encode(message: WireMessage, frames: Sequence[bytes]) -> list[bytes]:
    """Header and opaque frames as one multipart message. ProtocolError when it is larger than MAX_BYTES."""
    parts = [_encoder.encode(message), *frames]
    _check_size(parts)
    return parts


class Codec:
    """Typed decoding of one direction's union."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, parts: list[bytes]) -> tuple[Any, list[bytes]]:
        """(message, frames), or ProtocolError for what is not in the union."""
        if not parts:
            raise ProtocolError("empty message")
        _check_size(parts)
        try:
            return self._decoder.decode(parts[0]), parts[1:]
        except UNDECODABLE as error:
            raise ProtocolError(f"undecodable message: {error}") from None


class Hub:
    """The coordinator's end of one channel. Never blocks."""

    def __init__(self, endpoint: str, union: Any, context: zmq.Context | None = None) -> None:
        self.socket: zmq.Socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(endpoint)
        self._codec = Codec(union)
        self.refused = 0  # messages that could not be read

    def send(self, peer: bytes, message: WireMessage, frames: Sequence[bytes] = ()) -> bool:
        """False when the peer is unknown or its queue is full; the caller's protocol resends."""
        try:
            *parts, last = peer, *encode(message, frames)
            for part in parts:
                self.socket.send(part, MORE)
            self.socket.send(last, LAST)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def receive(self) -> tuple[bytes, Any, list[bytes]] | None:
        """The next message that can be read, or None when there is none now."""
        for _ in range(MAX_REFUSALS):
            try:
                peer, *parts = self.socket.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return None
            try:
                peer.decode()  # our identities are text, handlers use it as a name
                return peer, *self._codec.decode(parts)
            except (ProtocolError, UnicodeDecodeError) as error:
                self.refused += 1
                if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                    log.warning("message %d dropped, from %r: %s", self.refused, peer, error)
        return None

    def close(self) -> None:
        self.socket.close(linger=LINGER)


class Poller:
    """Waits on several sockets at once."""

    def __init__(self, *ends: Hub | Link) -> None:
        self._poller = zmq.Poller()
        for end in ends:
            self._poller.register(end.socket, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        self._poller.poll(int(max(0.0, seconds) * 1000))


class Link:
    """A peer's blocking end of one channel (trainer ranks, console)."""

    def __init__(self, endpoint: str, union: Any, name: bytes) -> None:
        self.socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        _configure(self.socket, name)
        self.socket.setsockopt(zmq.SNDTIMEO, int(SEND_DEADLINE * 1000))
        self.socket.connect(endpoint)
        self._codec = Codec(union)

    def send(self, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        """Queue a message. DeadlineError when the queue stays full for SEND_DEADLINE seconds."""
        try:
            self.socket.send_multipart(encode(message, frames))
        except zmq.Again:
            name = type(message).__name__
            raise DeadlineError(f"coordinator took no {name} for {SEND_DEADLINE:g} s") from None

    def receive(self, timeout: float) -> tuple[Any, list[bytes]] | None:
        """The next message, or None after `timeout` seconds."""
        if not self.socket.poll(int(max(0.0, timeout) * 1000)):
            return None
        return self._codec.decode(self.socket.recv_multipart())

    def close(self) -> None:
        self.socket.close(linger=LINGER)


class AsyncLink:
    """A peer's asyncio end of one channel (rollout workers)."""

    def __init__(self, endpoint: str, union: Any, name: bytes) -> None:
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _configure(self._socket, name)
        self._socket.connect(endpoint)
        self._endpoint, self._codec = endpoint, Codec(union)

    async def send(self, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        """Queue a message. DeadlineError when the queue stays full for SEND_DEADLINE seconds; what is in it
        may be lost then. ZeroMQ never dials again after bytes that made no sense, so this does."""
        try:
            async with asyncio.timeout(SEND_DEADLINE):
                await self._socket.send_multipart(encode(message, frames))
        except TimeoutError:
            with suppress(zmq.ZMQError):  # it may have given the connection up
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)
            name = type(message).__name__
            raise DeadlineError(f"coordinator took no {name} for {SEND_DEADLINE:g} s") from None

    async def receive(self) -> tuple[Any, list[bytes]]:
        """The next message; callers race it against their own deadlines."""
        return self._codec.decode(await self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close(linger=LINGER)


def flush_sockets() -> None:
    """Wait for closed sockets to send what they hold, at most LINGER. Afterwards there are none any more."""
    zmq.Context.instance().term()
    zmq.asyncio.Context.instance().term()


def _check_size(parts: Sequence[bytes]) -> None:
    if (size := sum(map(len, parts))) > MAX_BYTES:
        raise ProtocolError(f"a message of {size} bytes in {len(parts)} frames; at most {MAX_BYTES} can go")


def _configure(sock: Any, name: bytes | None = None) -> None:
    if name is not None:
        sock.setsockopt(zmq.IDENTITY, name)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER)
    sock.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
    sock.setsockopt(zmq.LINGER, LINGER)
