"""The messages between the trainer's and the keepers' ends of the collective weight plane.

A message is its length and msgpack. Keepers write and read within their event loop, the trainer in threads.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import TypeVar

import msgspec

from asyncrl.errors import UNDECODABLE, ProtocolError
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import Layout, Manifest

T = TypeVar("T")

QUESTION_BYTES = 1 << 16  # a message of a receiver is at most this long
ANSWER_BYTES = 1 << 26  # and one of the sender, which lists all tensors
_LENGTH = struct.Struct("!I")


class VersionRequest(msgspec.Struct, frozen=True, tag="version_request"):
    """Send this version to an engine of `ranks` ranks, which waits until `seconds` from now. `here`: it runs
    on the sender's machine."""

    engine: str
    version: PolicyVersion
    ranks: int
    seconds: float
    here: bool


class BucketRequest(msgspec.Struct, frozen=True, tag="bucket_request"):
    """Send this bucket; all before it have arrived. The number of buckets asks for the manifest. Through
    memory, 0 asks for all of them, and for the manifest."""

    bucket: int


class Plan(msgspec.Struct, frozen=True):
    """Says that it is the engine's turn."""

    buckets: tuple[Layout, ...]


class BroadcastPlan(Plan, frozen=True, tag="broadcast_plan"):
    """`port`: rank 0 of a new group is listening there; 0: the group is the one that the engine is in."""

    group: str
    port: int
    backend: str


class MemoryPlan(Plan, frozen=True, tag="memory_plan"):
    """`sockets`: the address where a rank of the engine is told of the memory to read, by its GPU."""

    sockets: dict[str, str]


class BucketReady(msgspec.Struct, frozen=True, tag="bucket_ready"):
    """The broadcast of this bucket begins now."""

    bucket: int


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """All buckets were sent. The manifest has the checksums of what was broadcast."""

    manifest: Manifest


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The push has ended. `superseded`: the version does not exist any more."""

    reason: str
    superseded: bool = False


Question = VersionRequest | BucketRequest
Answer = BroadcastPlan | MemoryPlan | BucketReady | Sent | Refused
_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: Question) -> Answer:
    """A keeper's question, answered. Raises OSError, EOFError when the sender is gone, ProtocolError."""
    writer.write(_framed(question))
    await writer.drain()
    size = _checked(await reader.readexactly(_LENGTH.size), ANSWER_BYTES)
    return _decoded(await reader.readexactly(size), _answer)


def send_answer(connection: socket.socket, answer: Answer, deadline: float) -> None:
    """The sender's answer. Raises TimeoutError at `deadline` (monotonic), OSError when the keeper left."""
    connection.settimeout(seconds_left(deadline))
    connection.sendall(_framed(answer))


def receive_question(connection: socket.socket, kind: type[T], deadline: float) -> T:
    """A keeper's next question, waited for until `deadline`. Raises EOFError when the keeper
    left, TimeoutError, ProtocolError when it is another one."""
    size = _checked(_read(connection, _LENGTH.size, deadline), QUESTION_BYTES)
    question = _decoded(_read(connection, size, deadline), _question)
    if not isinstance(question, kind):
        raise ProtocolError(f"weights: a {type(question).__name__} where a {kind.__name__} is due")
    return question


def seconds_left(deadline: float) -> float:
    """Seconds, more than none: a socket takes 0 for not waiting at all."""
    return max(0.001, deadline - time.monotonic())


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(seconds_left(deadline))
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the keeper closed the connection")
        data += more
    return data


def _framed(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def _checked(header: bytes, limit: int) -> int:
    size: int = _LENGTH.unpack(header)[0]
    if size > limit:
        raise ProtocolError(f"weights: a message of {size} bytes; at most {limit} are taken")
    return size


def _decoded(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(data)
    except UNDECODABLE as error:
        raise ProtocolError(f"weights: a message that is not understood: {error}") from error
