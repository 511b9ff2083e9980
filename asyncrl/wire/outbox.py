"""A worker's records on their way to the coordinator: in sequence, kept until acknowledged, bounded in bytes.

Records that wait go together in one message. Full: `post` waits. Lost (a restarted coordinator, a dropped
answer): everything unacknowledged is sent again, in order; the receiver skips what it has. Reordered: never,
one task sends. May block: `post`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from asyncrl.errors import DeadlineError, ProtocolError
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import MOST_RECORDS, Record, Records
from asyncrl.wire.sockets import MAX_BYTES

log = logging.getLogger("asyncrl.worker")

Send = Callable[[Records, Sequence[bytes]], Awaitable[None]]

WINDOW = 32 << 20
RESEND = 5.0  # seconds without an ack; doubled up to RESEND_MOST until there is one
RESEND_MOST = 60.0
_HEADER = 256  # bytes a record counts for beside its frame
_BUNDLE = 1 << 20  # bytes of the records in one message; a larger one goes alone


@dataclass(frozen=True)
class _Entry:
    record: Record
    frames: tuple[bytes, ...]
    size: int
    durable: asyncio.Future[None]


class Outbox:
    """Numbers the records of one incarnation from 1, sends them in order, and again if no ack comes."""

    def __init__(
        self,
        send: Send,
        window: int = WINDOW,
        clock: Callable[[], float] = time.monotonic,
        most: int = MAX_BYTES,
    ) -> None:
        self._send = send
        self._window = window
        self._clock = clock
        self._most = most
        self._unacked: deque[_Entry] = deque()
        self._next = 0  # index in _unacked of the next one to send
        self._seq = 0
        self._bytes = 0
        self.paused = False
        self._changed = asyncio.Event()
        self._moved = 0.0  # when the oldest was first sent, an ack came or all was sent again
        self._patience = RESEND

    @property
    def acked(self) -> int:
        """Highest sequence number known to be durable."""
        return self._seq - len(self._unacked)

    @property
    def full(self) -> bool:
        """A record that is larger than the window still goes out alone."""
        return bool(self._unacked) and self._bytes >= self._window

    @property
    def attempts(self) -> set[Attempt]:
        """Attempts with a record that could still be lost."""
        return {entry.record.attempt for entry in self._unacked}

    async def post(self, record: Record, *frames: bytes) -> asyncio.Future[None]:
        """Number a record and queue it, once the window has room. The future is done when it is durable.
        ProtocolError when the record is too large ever to be received."""
        size = _HEADER + sum(map(len, frames))
        if size > self._most:
            raise ProtocolError(f"a {type(record).__name__} of {size} bytes; at most {self._most} can go")
        while self.full:
            await self._change()
        if not self._unacked:
            self._moved = self._clock()
        self._seq += 1
        durable = asyncio.get_running_loop().create_future()
        numbered = msgspec.structs.replace(record, seq=self._seq)
        self._unacked.append(_Entry(numbered, frames, size, durable))
        self._bytes += size
        self._fire()
        return durable

    def ack(self, seq: int) -> None:
        """Everything up to `seq` is durable. Old and repeated acks are fine."""
        while self._unacked and self._unacked[0].record.seq <= seq:
            entry = self._unacked.popleft()
            self._bytes -= entry.size
            self._next = max(0, self._next - 1)
            self._moved = self._clock()
            self._patience = RESEND
            if not entry.durable.done():  # a waiter that was cancelled has cancelled it
                entry.durable.set_result(None)
        self._fire()

    def pause(self) -> None:
        """Send nothing until `rewind`: a coordinator that does not know this worker would take a later record
        for the first one."""
        self.paused = True

    def rewind(self) -> None:
        """Send everything unacknowledged again, oldest first."""
        self._next, self.paused, self._moved = 0, False, self._clock()
        self._fire()

    def check(self) -> None:
        """Rewind when no ack has come for too long. Called with each heartbeat."""
        overdue = self._next > 0 and self._clock() - self._moved > self._patience
        if overdue and not self.paused:
            log.warning("no ack for record %d in %.0f s: sending again", self.acked + 1, self._patience)
            self._patience = min(2 * self._patience, RESEND_MOST)
            self.rewind()

    async def run(self) -> None:
        """Send, one message at a time, for ever."""
        while True:
            while self.paused or self._next >= len(self._unacked):
                await self._change()
            entries = self._waiting()
            self._next += len(entries)  # before the await, during which an ack or a rewind moves it
            records = Records(tuple((entry.record, len(entry.frames)) for entry in entries))
            try:
                await self._send(records, [frame for entry in entries for frame in entry.frames])
            except DeadlineError as error:
                log.warning("%s", error)
                self.rewind()

    def _waiting(self) -> list[_Entry]:
        """The next ones to send, at least one and as many as go together."""
        found: list[_Entry] = []
        size = 0
        for entry in islice(self._unacked, self._next, self._next + MOST_RECORDS):
            size += entry.size
            if found and size > _BUNDLE:
                break
            found.append(entry)
        return found

    async def flushed(self) -> None:
        """Wait until everything posted is durable."""
        while self._unacked:
            await self._change()

    async def _change(self) -> None:
        await self._changed.wait()

    def _fire(self) -> None:
        event = self._changed
        self._changed = asyncio.Event()
        event.set()
