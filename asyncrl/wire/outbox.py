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
from asyncrl.wire.messages.worker import MAX_RECORDS, Record, Records
from asyncrl.wire.sockets import MAX_BYTES

log = logging.getLogger("asyncrl.worker")

Send = Callable[[Records, Sequence[bytes]], Awaitable[None]]

WINDOW_BYTES = 32 << 20
RESEND_SECONDS = 5.0  # seconds without an ack; doubled up to RESEND_MOST until there is one
MAX_RESEND_SECONDS = 60.0
_RECORD_OVERHEAD = 256  # bytes a record counts for beside its frame
_BUNDLE_BYTES = 1 << 20  # bytes of the records in one message; a larger one goes alone


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
        window: int = WINDOW_BYTES,
        clock: Callable[[], float] = time.monotonic,
        max_record_bytes: int = MAX_BYTES,
    ) -> None:
        self._send = send
        self._window_bytes = window
        self._clock = clock
        self._most = max_record_bytes
        self._unacked: deque[_Entry] = deque()
        self._next_index = 0  # index in _unacked of the next one to send
        self._last_seq = 0
        self._unacked_bytes = 0
        self.paused = False
        self._changed = asyncio.Event()
        self._progress_at = 0.0  # when the oldest was first sent, an ack came or all was sent again
        self._resend_after = RESEND_SECONDS

    @property
    def acked(self) -> int:
        """Highest sequence number known to be durable."""
        return self._last_seq - len(self._unacked)

    @property
    def full(self) -> bool:
        """A record that is larger than the window still goes out alone."""
        return bool(self._unacked) and self._unacked_bytes >= self._window_bytes

    @property
    def attempts(self) -> set[Attempt]:
        """Attempts with a record that could still be lost."""
        return {entry.record.attempt for entry in self._unacked}

    async def post(self, record: Record, *frames: bytes) -> asyncio.Future[None]:
        """Number a record and queue it, once the window has room. The future is done when it is durable.
        ProtocolError when the record is too large ever to be received."""
        record_bytes = _RECORD_OVERHEAD + sum(map(len, frames))
        if record_bytes > self._most:
            raise ProtocolError(
                f"a {type(record).__name__} of {record_bytes} bytes; at most {self._most} can go"
            )
        while self.full:
            await self._wait_for_change()
        if not self._unacked:
            self._progress_at = self._clock()
        self._last_seq += 1
        durable = asyncio.get_running_loop().create_future()
        numbered_record = msgspec.structs.replace(record, seq=self._last_seq)
        self._unacked.append(_Entry(numbered_record, frames, record_bytes, durable))
        self._unacked_bytes += record_bytes
        self._notify_change()
        return durable

    def ack(self, seq: int) -> None:
        """Everything up to `seq` is durable. Old and repeated acks are fine."""
        while self._unacked and self._unacked[0].record.seq <= seq:
            entry = self._unacked.popleft()
            self._unacked_bytes -= entry.size
            self._next_index = max(0, self._next_index - 1)
            self._progress_at = self._clock()
            self._resend_after = RESEND_SECONDS
            if not entry.durable.done():  # a waiter that was cancelled has cancelled it
                entry.durable.set_result(None)
        self._notify_change()

    def pause(self) -> None:
        """Send nothing until `rewind`: a coordinator that does not know this worker would take a later record
        for the first one."""
        self.paused = True

    def rewind(self) -> None:
        """Send everything unacknowledged again, oldest first."""
        self._next_index, self.paused, self._progress_at = 0, False, self._clock()
        self._notify_change()

    def check(self) -> None:
        """Rewind when no ack has come for too long. Called with each heartbeat."""
        is_overdue = self._next_index > 0 and self._clock() - self._progress_at > self._resend_after
        if is_overdue and not self.paused:
            log.warning("no ack for record %d in %.0f s: sending again", self.acked + 1, self._resend_after)
            self._resend_after = min(2 * self._resend_after, MAX_RESEND_SECONDS)
            self.rewind()

    async def run(self) -> None:
        """Send, one message at a time, for ever."""
        while True:
            while self.paused or self._next_index >= len(self._unacked):
                await self._wait_for_change()
            entries = self._next_bundle()
            self._next_index += len(entries)  # before the await, during which an ack or a rewind moves it
            records = Records(tuple((entry.record, len(entry.frames)) for entry in entries))
            try:
                await self._send(records, [frame for entry in entries for frame in entry.frames])
            except DeadlineError as error:
                log.warning("%s", error)
                self.rewind()

    def _next_bundle(self) -> list[_Entry]:
        """The next ones to send, at least one and as many as go together."""
        bundle: list[_Entry] = []
        bundle_bytes = 0
        for entry in islice(self._unacked, self._next_index, self._next_index + MAX_RECORDS):
            bundle_bytes += entry.size
            if bundle and bundle_bytes > _BUNDLE_BYTES:
                break
            bundle.append(entry)
        return bundle

    async def flushed(self) -> None:
        """Wait until everything posted is durable."""
        while self._unacked:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        await self._changed.wait()

    def _notify_change(self) -> None:
        event = self._changed
        self._changed = asyncio.Event()
        event.set()
