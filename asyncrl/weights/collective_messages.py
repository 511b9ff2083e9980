"""The messages between the trainer's and the supervisors' ends of the collective weight plane.

A message is its length and msgpack. Supervisors write and read within their event loop, the
trainer in threads.
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

MAX_QUESTION_BYTES = 1 << 16  # longest message of a receiver
MAX_ANSWER_BYTES = 1 << 26  # longest message of a sender, which lists all tensors
_LENGTH = struct.Struct("!I")


class VersionRequest(msgspec.Struct, frozen=True, tag="version_request"):
    """Asks for this version on behalf of an engine of `ranks` ranks, which waits `seconds` from now on."""

    engine: str
    version: PolicyVersion
    ranks: int
    seconds: float


class BucketRequest(msgspec.Struct, frozen=True, tag="bucket_request"):
    """Asks for this bucket; all earlier buckets have arrived. The number of buckets asks for the manifest."""

    bucket: int


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """Says that the engine is served now. `port`: of rank 0 of a new group; 0: the engine is in the group
    already. `nccl`: the version of NCCL at rank 0, "2.29.7"; "" for another backend."""

    buckets: tuple[Layout, ...]
    group: str
    port: int
    backend: str
    nccl: str = ""


class BucketReady(msgspec.Struct, frozen=True, tag="bucket_ready"):
    """The broadcast of this bucket begins now."""

    bucket: int


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """All buckets were sent. The manifest has the checksums of what was broadcast."""

    manifest: Manifest


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Ends the push. `postponed`: without a fault of the engine, which asks again: a newer version has
    replaced the requested version, or training came to no pause."""

    reason: str
    postponed: bool = False


Question = VersionRequest | BucketRequest
Answer = Plan | BucketReady | Sent | Refused
_question_decoder: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


async def ask_question(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: Question
) -> Answer:
    """Send a supervisor's question and return the answer. Raises OSError, EOFError when the sender is gone,
    ProtocolError."""
    writer.write(_frame_message(question))
    await writer.drain()
    size = _checked_size(await reader.readexactly(_LENGTH.size), MAX_ANSWER_BYTES)
    return _decode_message(await reader.readexactly(size), _answer_decoder)


def send_answer(connection: socket.socket, answer: Answer, deadline: float) -> None:
    """Send the sender's answer. Raises TimeoutError at `deadline` (monotonic), OSError when the supervisor
    left."""
    connection.settimeout(seconds_left(deadline))
    connection.sendall(_frame_message(answer))


def receive_question(connection: socket.socket, kind: type[T], deadline: float) -> T:
    """Return a supervisor's next question, at the latest at `deadline`. Raises EOFError when the supervisor
    left, TimeoutError, and ProtocolError for a question of another kind."""
    size = _checked_size(_read_exactly(connection, _LENGTH.size, deadline), MAX_QUESTION_BYTES)
    question = _decode_message(_read_exactly(connection, size, deadline), _question_decoder)
    if not isinstance(question, kind):
        raise ProtocolError(f"weights: expected {kind.__name__}, received {type(question).__name__}")
    return question


def seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline, at least 1 ms: a timeout of 0 makes a socket non-blocking."""
    return max(0.001, deadline - time.monotonic())


def _read_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(seconds_left(deadline))
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise EOFError("the supervisor closed the connection")
        received += chunk

    return received


def _frame_message(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def _checked_size(header: bytes, limit: int) -> int:
    size: int = _LENGTH.unpack(header)[0]
    if size > limit:
        raise ProtocolError(f"weights: a message has {size} bytes, but the limit is {limit}")
    return size


def _decode_message(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    with ProtocolError.instead_of(*UNDECODABLE, text="weights: malformed message"):
        return decoder.decode(data)
