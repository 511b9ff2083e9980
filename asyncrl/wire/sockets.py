"""ZeroMQ between the processes of a run: a ROUTER for the coordinator, DEALERs for all peers.

| socket | when full                   | lost messages are resent by  | may block |
|--------|-----------------------------|------------------------------|-----------|
| Hub    | `send` returns False        | the peer (no ack)            | nobody    |
| Link   | `send` raises DeadlineError | the coordinator (heartbeats) | the peer  |

Every connection is encrypted and authenticated both ways (CURVE, RFC 26). The launcher makes a key pair for
each role; a process gets the pair of the own role, and no secret half of another role. A Gate admits only
owners of these keys (ZAP, RFC 27), and a Hub accepts from a role only the messages that this role sends.

Identities are `role/index/incarnation`: a restarted peer is a new peer, so ROUTER never delivers a message
for the old peer. Messages are typed, and all frames of a message together are bounded by MAX_BYTES. Any other
message is never sent (ProtocolError); a Hub counts and drops it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from asyncrl.errors import UNDECODABLE, DeadlineError, ProtocolError, vital_thread
from asyncrl.wire.addresses import EVERY_ADDRESS, Listeners, hold_ports, own_address, reserve_ports
from asyncrl.wire.messages.shared import WireMessage

log = logging.getLogger("asyncrl.wire")

MAX_BYTES = 256 << 20  # maximum size of a message: header and frames
MAX_DROPPED = 256  # unreadable messages that a Hub drops in a call of `receive`
HIGH_WATER_MARK = 4096  # queued messages of a socket
LARGE_HIGH_WATER_MARK = 64  # queued large messages: bounds memory
SEND_DEADLINE = 10.0  # seconds; a peer sends fewer than HIGH_WATER_MARK messages in this time
ENVELOPE_BYTES = 1024  # upper bound of the bytes that encryption adds to a frame
COORDINATOR = "coordinator"
OBSERVER = "observer"
TOKEN = "token"
PEER_ROLES = ("engine", "rollout", "scorer", "trainer", OBSERVER)  # peers of the coordinator
# An option of the context, with which an unread message of 100 bytes keeps a receive buffer of 8 KB alive.
ZERO_COPY_RECV = 10
REDIAL_MILLISECONDS = 100  # time in which ZeroMQ reports that a lost connection is dialled again
HANDSHAKE_MILLISECONDS = 3000  # time in which a connection must show a key
LINGER_MILLISECONDS = 500  # time in which a closed socket goes on sending

# Flags as plain ints, because combining zmq's enums takes longer than sending.
LAST_PART_FLAGS = int(zmq.DONTWAIT)
MORE_PARTS_FLAGS = LAST_PART_FLAGS | int(zmq.SNDMORE)
_encoder = msgspec.msgpack.Encoder()


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, in Z85. The `public` half alone does not let anybody pass for the owner."""

    public: str
    secret: str = ""

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"  # the secret half belongs in no log


def new_key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


class Endpoints(msgspec.Struct, frozen=True):
    """The addresses at which the coordinator is dialled, and the key pair of every role, including the
    coordinator's."""

    control: str
    bulk: str
    keys: dict[str, KeyPair] = {}
    versions: str = ""

    def for_role(self, role: str) -> Endpoints:
        """Return the part that a process of this role may know: no secret key of another role."""
        keys = {name: key if name == role else KeyPair(key.public) for name, key in self.keys.items()}
        return msgspec.structs.replace(self, keys=keys)


def choose_endpoints(host: str, port: int) -> Endpoints:
    """Return three ports on `host`, from `port` on, or free ports for 0, and new keys; this process holds the
    ports. ConfigError if a port is taken. As nobody can dial 0.0.0.0 from elsewhere, the endpoints then have
    this machine's address."""
    dialled_host = own_address() if host == EVERY_ADDRESS else host
    reserved_sockets = reserve_ports(host, port, 3)
    hold_ports(reserved_sockets)
    control, bulk, versions = (f"tcp://{dialled_host}:{one.getsockname()[1]}" for one in reserved_sockets)
    keys = {role: new_key_pair() for role in (COORDINATOR, *PEER_ROLES)}
    return Endpoints(control, bulk, keys, versions)


def identity(role: str, index: int, incarnation: str = "") -> bytes:
    """Return the name of a process on both channels, never used twice."""
    return f"{role}/{index}/{incarnation or secrets.token_hex(6)}".encode()


def role_of(name: bytes) -> str:
    """Return the role that an identity names."""
    return name.partition(b"/")[0].decode()


def encode_message(message: WireMessage, frames: Sequence[bytes]) -> list[bytes]:
    """Return header and opaque frames as a multipart message. ProtocolError for more than MAX_BYTES."""
    message_parts = [_encoder.encode(message), *frames]
    _check_size(message_parts)
    return message_parts


class Codec:
    """Decodes the typed messages of a direction."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, parts: list[bytes]) -> tuple[Any, list[bytes]]:
        """Return (message, frames). ProtocolError for a message outside the union."""
        if not parts:
            raise ProtocolError("empty message")
        _check_size(parts)
        try:
            return self._decoder.decode(parts[0]), parts[1:]
        except UNDECODABLE as error:
            raise ProtocolError(f"undecodable message: {error}") from None


class Gate:
    """Admits peers with a key of the run: the ZAP handler of a process's Hubs, in a thread.

    `owner`: the role of this process. `role_by_key`: public key -> role: the known keys of the launch and
    the `enrolled_keys`. A removed member is no longer heard, even on an open connection.
    """

    def __init__(
        self, endpoints: Endpoints, enrolled_keys: Mapping[str, str] = {}, owner: str = COORDINATOR
    ) -> None:
        self.key_pair = endpoints.keys[owner]
        key_pairs = endpoints.keys
        launch_members = {key_pairs[role].public: role for role in PEER_ROLES if role in key_pairs}
        self.role_by_key = launch_members | dict(enrolled_keys)

        self.context = zmq.Context(2)  # threads: encrypting large messages does not delay small messages
        self.context.set(ZERO_COPY_RECV, 0)
        self.listeners = Listeners()
        zap_socket: zmq.Socket = self.context.socket(zmq.REP)
        zap_socket.bind("inproc://zeromq.zap.01")
        zap_socket.setsockopt(zmq.LINGER, 0)
        vital_thread("gate", partial(self._serve, zap_socket))

    def _serve(self, zap_socket: zmq.Socket) -> None:
        refused_count = 0
        with zap_socket, suppress(zmq.ContextTerminated):
            while True:
                if not zap_socket.poll(self.listeners.watch_descriptors()):
                    continue

                version, request, _, address, _, _, *credentials = zap_socket.recv_multipart()
                key = zmq.utils.z85.encode(b"".join(credentials)).decode()
                is_member = key in self.role_by_key
                refused_count += not is_member
                if not is_member and _is_power_of_two(refused_count):
                    log.warning(
                        "refused connection %d from %s: its key does not belong to this launch; give a "
                        "worker on another machine a new token",
                        refused_count,
                        address.decode(errors="replace"),
                    )

                zap_answer = (b"200", b"OK", key.encode()) if is_member else (b"400", b"unknown key", b"")
                zap_socket.send_multipart([version, request, *zap_answer, b""])

    def secure_socket(self, sock: zmq.Socket) -> None:
        """Secure a socket before binding: from then on, nobody connects without a key of the run."""
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt_string(zmq.CURVE_SECRETKEY, self.key_pair.secret)
        sock.setsockopt(zmq.ZAP_DOMAIN, b"run")
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer of the handler no peer is admitted

    def role_of_key(self, peer: bytes, key: str) -> str:
        """Return the role of the key's owner. ProtocolError unless `peer` names this role, and for a token
        this key."""
        role = self.role_by_key.get(key)
        if role is None or role_of(peer) != role or (role == TOKEN and peer != identity(TOKEN, 0, key)):
            raise ProtocolError(f"its key has {'no role' if role is None else f'the role {role!r}'}")
        return role

    def close(self) -> None:
        """Close after the Hubs: returns when the queues are sent (LINGER_MILLISECONDS at most) and ports are
        free."""
        self.context.term()


class Hub:
    """The server's end of a channel. Never blocks. `unions`: the messages that each role may send.
    `large`: messages are encrypted by a separate thread, apart from smaller channels."""

    def __init__(self, endpoint: str, unions: Mapping[str, Any], gate: Gate, large: bool = False) -> None:
        # First, as opening may fail, and an open ZeroMQ socket keeps the context alive.
        listening_socket = gate.listeners.open_listener(endpoint)
        self.socket: zmq.Socket = gate.context.socket(zmq.ROUTER)
        _configure(self.socket)
        if large:
            self.socket.setsockopt(zmq.SNDHWM, LARGE_HIGH_WATER_MARK)

        self.socket.setsockopt(zmq.AFFINITY, 2 if large else 1)
        gate.secure_socket(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer may dial again before the old connection is gone.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.USE_FD, listening_socket)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)  # includes the chosen port
        self._gate = gate
        self._codecs = {role: Codec(union) for role, union in unions.items()}
        self.refused_count = 0  # unreadable messages

    def send(self, peer: bytes, message: WireMessage, frames: Sequence[bytes] = ()) -> bool:
        """Send a message; False when the peer is unknown or the queue is full; the caller's protocol
        resends."""
        try:
            *parts, last_part = [peer, *encode_message(message, frames)]
            for part in parts:
                self.socket.send(part, MORE_PARTS_FLAGS)
            self.socket.send(last_part, LAST_PART_FLAGS)
        except (zmq.Again, zmq.ZMQError):
            return False

        return True

    def receive(self) -> tuple[bytes, Any, list[bytes]] | None:
        """Return the next readable message, or None when there is none now."""
        for _ in range(MAX_DROPPED):
            try:
                identity_frame = self.socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return None

            peer = identity_frame.bytes
            parts = self.socket.recv_multipart(zmq.DONTWAIT)
            try:
                peer.decode()  # identities are text, which handlers use as a name
                role = self._gate.role_of_key(peer, str(identity_frame.get("User-Id")))
                if role not in self._codecs:
                    raise ProtocolError(f"the role {role!r} must not send on this channel")
                return peer, *self._codecs[role].decode(parts)
            except (ProtocolError, UnicodeDecodeError) as error:
                self.refused_count += 1
                if _is_power_of_two(self.refused_count):
                    log.warning("dropped message %d from %r: %s", self.refused_count, peer, error)

        return None

    def close(self) -> None:
        self.socket.close(linger=LINGER_MILLISECONDS)


class Poller:
    """Waits on several sockets at once."""

    def __init__(self, *ends: Hub | Link) -> None:
        self._poller = zmq.Poller()
        for end in ends:
            self._poller.register(end.socket, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        self._poller.poll(int(max(0.0, seconds) * 1000))


class Dial:
    """Keeps a peer's end connected. ZeroMQ dials again by itself, unless bytes were damaged on the way: then
    ZeroMQ gives up the connection and the queued messages, which are sent again as after any loss."""

    EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def __init__(self, sock: Any, endpoint: str) -> None:
        self._socket = sock
        self._endpoint = endpoint
        self.key_refused = False  # the coordinator does not know the key of this end
        monitor_endpoint = f"inproc://{secrets.token_hex(8)}"
        sock.monitor(monitor_endpoint, self.EVENTS)
        self._monitor_socket: zmq.Socket = zmq.Context.shadow(sock.context.underlying).socket(zmq.PAIR)
        # No limit: a full queue, unread, would block the thread of all sockets.
        self._monitor_socket.setsockopt(zmq.RCVHWM, 0)
        self._monitor_socket.connect(monitor_endpoint)

        try:
            sock.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def redial_if_lost(self) -> None:
        """Dial again if ZeroMQ does not. Blocks for REDIAL_MILLISECONDS at most, and only after a
        disconnection."""
        last_event = 0
        while self._monitor_socket.poll(REDIAL_MILLISECONDS if last_event == zmq.EVENT_DISCONNECTED else 0):
            last_event = recv_monitor_message(self._monitor_socket)["event"]
            self.key_refused |= last_event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

        if last_event == zmq.EVENT_DISCONNECTED and not self.key_refused:
            log.warning("reconnecting to %s after receiving corrupted data", self._endpoint)
            with suppress(zmq.ZMQError):  # no such connection any more
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def close(self) -> None:
        self._socket.monitor(None, 0)
        self._monitor_socket.close(linger=0)
        self._socket.close(linger=LINGER_MILLISECONDS)


class Link:
    """A peer's blocking end of a channel (ranks, console). ProtocolError for a bad endpoint or key."""

    def __init__(self, endpoint: str, union: Any, name: bytes, keys: Mapping[str, KeyPair]) -> None:
        self.socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.SNDTIMEO, int(SEND_DEADLINE * 1000))
        try:
            set_identity(self.socket, name, keys)
            self._dial = Dial(self.socket, endpoint)
            self._codec = Codec(union)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise ProtocolError(f"cannot connect to {endpoint}: {error}") from None

    def send(self, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        """Queue a message. DeadlineError when the queue stays full for SEND_DEADLINE seconds."""
        self._dial.redial_if_lost()
        try:
            self.socket.send_multipart(encode_message(message, frames))
        except zmq.Again:
            raise _send_timeout(message) from None

    def receive(self, timeout: float) -> tuple[Any, list[bytes]] | None:
        """Return the next message, or None after `timeout` seconds."""
        if not self.socket.poll(int(max(0.0, timeout) * 1000)):
            return None
        return self._codec.decode(self.socket.recv_multipart())

    @property
    def refused(self) -> bool:
        """Return True if the coordinator has refused the key of this end, which is then not dialled again."""
        self._dial.redial_if_lost()
        return self._dial.key_refused

    def close(self) -> None:
        self._dial.close()


class AsyncLink:
    """A peer's asyncio end of a channel (rollout workers)."""

    def __init__(self, endpoint: str, union: Any, name: bytes, keys: Mapping[str, KeyPair]) -> None:
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _configure(self._socket)
        set_identity(self._socket, name, keys)
        self._dial = Dial(self._socket, endpoint)
        self._codec = Codec(union)

    async def send(self, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        """Queue a message. DeadlineError when the queue stays full for SEND_DEADLINE seconds."""
        self._dial.redial_if_lost()
        send_future: Any = self._socket.send_multipart(encode_message(message, frames))
        try:
            async with asyncio.timeout(SEND_DEADLINE) if not send_future.done() else nullcontext():
                await send_future
        except TimeoutError:
            raise _send_timeout(message) from None

    async def receive(self) -> tuple[Any, list[bytes]]:
        """Return the next message; callers race it against their own deadlines."""
        return self._codec.decode(await self._socket.recv_multipart())

    def close(self) -> None:
        self._dial.close()


def _send_timeout(message: WireMessage) -> DeadlineError:
    return DeadlineError(
        f"the coordinator has accepted no {type(message).__name__} message for {SEND_DEADLINE:g} s"
    )


def flush_sockets() -> None:
    """Wait for closed sockets to send queued messages, at most LINGER_MILLISECONDS. Afterwards no socket
    exists any more."""
    zmq.Context.instance().term()
    zmq.asyncio.Context.instance().term()


def _check_size(parts: Sequence[bytes]) -> None:
    if (message_bytes := sum(map(len, parts))) > MAX_BYTES:
        raise ProtocolError(
            f"a message has {message_bytes} bytes in {len(parts)} frames, but at most {MAX_BYTES} bytes "
            "can be sent"
        )


def _is_power_of_two(count: int) -> bool:
    """Return True for the 1st, 2nd, 4th, 8th … repetition of a problem, which are logged."""
    return count & (count - 1) == 0


def set_identity(sock: Any, name: bytes, keys: Mapping[str, KeyPair]) -> None:
    """Set identity and keys of a peer's end before connecting: the key of the own role, and the coordinator's
    public key."""
    key_pair = keys[role_of(name)]
    sock.setsockopt(zmq.IDENTITY, name)
    sock.setsockopt_string(zmq.CURVE_SERVERKEY, keys[COORDINATOR].public)
    sock.setsockopt_string(zmq.CURVE_PUBLICKEY, key_pair.public)
    sock.setsockopt_string(zmq.CURVE_SECRETKEY, key_pair.secret)


def _configure(sock: Any) -> None:
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES + ENVELOPE_BYTES)
    sock.set_hwm(HIGH_WATER_MARK)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
    sock.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
