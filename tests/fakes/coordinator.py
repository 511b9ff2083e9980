"""The coordinator's end of a worker's sockets, played by a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncrl.types import Sample, Turn
from asyncrl.wire.messages.channels import ToCoordinatorBulk, ToCoordinatorControl
from asyncrl.wire.messages.shared import Attempt, Welcome, WireMessage
from asyncrl.wire.messages.worker import (
    Ack,
    Assign,
    Failed,
    Finished,
    Generated,
    Records,
    Replied,
    Sampled,
    WorkerHeartbeat,
    WorkerHello,
)
from asyncrl.wire.sockets import Gate, Hub, Poller, choose_endpoints

Record = Generated | Sampled | Replied | Finished | Failed


class FakeCoordinator:
    """`until` pumps both sockets. Hellos are welcomed, records acknowledged but for kinds in `withheld`."""

    def __init__(self, deadline: float = 60.0) -> None:
        self.endpoints = replace(
            choose_endpoints("127.0.0.1", 0), versions=""
        )  # this coordinator serves no versions
        self.deadline = deadline
        self.epoch = 1
        self.welcoming = True
        self.withheld: tuple[type, ...] = ()
        self.peer = b""
        self.beat: WorkerHeartbeat | None = None
        self.beats = 0
        self.hellos = 0
        self.hello: WorkerHello | None = None  # the newest
        self.arrived: list[Any] = []  # everything but heartbeats and hellos, in order
        self.frames: dict[int, list[bytes]] = {}  # frames of records, by seq
        self.assigned = 0
        self._read = 0

        self._open()

    def _open(self) -> None:
        self._gate = Gate(self.endpoints)
        self.control = Hub(self.endpoints.control, ToCoordinatorControl, self._gate)
        self.bulk = Hub(self.endpoints.bulk, ToCoordinatorBulk, self._gate)
        self.poller = Poller(self.control, self.bulk)

    def restart(self) -> None:
        """Start another coordinator on the same ports, which knows no peer."""
        self.close()
        self.epoch += 1
        self._open()

    def close(self) -> None:
        """Returns when the ports are free again."""
        self.control.close()
        self.bulk.close()
        self._gate.close()

    # -- sending -----------------------------------------------------------------------------------

    def send(self, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        assert self.control.send(self.peer, message, frames), message

    def send_bulk(self, message: WireMessage) -> None:
        assert self.bulk.send(self.peer, message), message

    def assign(
        self,
        uid: str,
        sample: Sample,
        frames: Sequence[bytes] = (),
        lane: str = "train",
        attempt: int = 0,
        **fields: Any,
    ) -> Attempt:
        self.assigned += 1
        tried = Attempt(uid, attempt)
        assignment = {"key": self.assigned, "transcript": lane == "eval", **fields}
        self.send(Assign(self.assigned, tried, sample, lane, 1.0, **assignment), frames)
        return tried

    # -- receiving ---------------------------------------------------------------------------------

    def until(self, wanted: Callable[[], Any], description: str) -> Any:
        """Pump until `wanted` returns a true value.

        AssertionError, naming `description`: the deadline has passed.
        """
        end = time.monotonic() + self.deadline
        while not (result := wanted()):
            assert time.monotonic() < end, f"no {description}; arrived: {self.arrived}; beat: {self.beat}"
            self.poller.wait(0.1)
            self._drain()
        return result

    def expect(self, kind: type, **fields: Any) -> Any:
        """Return the next message of this kind, after the messages already expected."""

        def find() -> Any:
            for index in range(self._read, len(self.arrived)):
                message = self.arrived[index]
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                    self._read = index + 1
                    return message
            return None

        return self.until(find, f"{kind.__name__} {fields}")

    def turn(self, record: Generated) -> Turn:
        return msgspec.msgpack.decode(self.frames[record.seq][0], type=Turn)

    def join(self) -> None:
        self.until(lambda: self.hellos, "hello")

    def pump(self, beats: int = 2) -> None:
        """Let the worker run for some heartbeats."""
        until = self.beats + 1 + beats  # the first may have been on its way
        self.until(lambda: self.beats >= until, "heartbeats")

    def seen(self, kind: type) -> list[Any]:
        return [message for message in self.arrived if isinstance(message, kind)]

    def _drain(self) -> None:
        for hub in (self.control, self.bulk):
            while (received := hub.receive()) is not None:
                peer, message, frames = received
                both = message.with_frames(frames) if isinstance(message, Records) else [(message, frames)]
                for record, record_frames in both:
                    self._handle(peer, record, record_frames)

    def _handle(self, peer: bytes, message: Any, frames: list[bytes]) -> None:
        self.peer = peer
        match message:
            case WorkerHello():
                self.hello = message
                self.hellos = self.hellos + 1
                if self.welcoming:
                    self.control.send(peer, Welcome(self.epoch, 0, 0))
            case WorkerHeartbeat():
                self.beat = message
                self.beats = self.beats + 1
            case _:
                self.arrived.append(message)
                if isinstance(message, Record):
                    self.frames[message.seq] = frames
                    if not isinstance(message, self.withheld):
                        self.bulk.send(peer, Ack(message.seq))
