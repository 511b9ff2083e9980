"""A worker's records on the way to the coordinator: in sequence, kept until acknowledged, bounded in bytes.

Waiting records travel together in a message. Full: `post_record` waits. Lost (a restarted coordinator, a
dropped answer): everything unacknowledged is sent again, in order; the receiver skips known records.
Reordered: never, a single task sends. May block: `post_record`.
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

WINDOW_BYTES = 32 << 20  # maximum size of unacknowledged records
RESEND_SECONDS = 5.0  # wait for an ack before sending again; doubled up to MAX_RESEND_SECONDS
MAX_RESEND_SECONDS = 60.0
_RECORD_OVERHEAD = 256  # bytes of a record beside the frames
_BUNDLE_BYTES = 1 << 20  # maximum size of the records in a message; a larger record travels alone


@dataclass(frozen=True)
class _Entry:
    record: Record
    frames: tuple[bytes, ...]
    size: int
    durable: asyncio.Future[None]


class Outbox:
    """Numbers the records of an incarnation from 1, sends the records in order, and again if no ack comes."""

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
        self._max_record_bytes = max_record_bytes
        self._unacked: deque[_Entry] = deque()
        self._next_index = 0  # position in _unacked of the next record to send
        self._last_seq = 0
        self._unacked_bytes = 0
        self.is_paused = False
        self._changed = asyncio.Event()
        self._progress_at = 0.0  # time of the last ack, of sending everything again, or of the oldest record
        self._resend_after = RESEND_SECONDS

    @property
    def acked_seq(self) -> int:
        """Return the highest sequence number that is durable."""
        return self._last_seq - len(self._unacked)

    @property
    def is_full(self) -> bool:
        """Return True if the window is full. A record that is larger than the window still goes out alone."""
        return bool(self._unacked) and self._unacked_bytes >= self._window_bytes

    @property
    def attempts(self) -> set[Attempt]:
        """Return the attempts with a record that could still be lost."""
        return {entry.record.attempt for entry in self._unacked}

    async def post_record(self, record: Record, *frames: bytes) -> asyncio.Future[None]:
        """Number a record and queue it, once the window has room. The future is done when the record is
        durable. ProtocolError when the record is too large ever to be received."""
        record_bytes = _RECORD_OVERHEAD + sum(map(len, frames))
        if record_bytes > self._max_record_bytes:
            raise ProtocolError(
                f"a record of type {type(record).__name__} has {record_bytes} bytes, but at most "
                f"{self._max_record_bytes} bytes can be sent"
            )

        while self.is_full:
            await self._changed.wait()
        if not self._unacked:
            self._progress_at = self._clock()
        self._last_seq += 1
        durable = asyncio.get_running_loop().create_future()
        numbered_record = msgspec.structs.replace(record, seq=self._last_seq)
        self._unacked.append(_Entry(numbered_record, frames, record_bytes, durable))
        self._unacked_bytes += record_bytes
        self._notify_change()

        return durable

    def acknowledge(self, seq: int) -> None:
        """Mark everything up to `seq` as durable. Old and repeated acks are fine."""
        while self._unacked and self._unacked[0].record.seq <= seq:
            entry = self._unacked.popleft()
            self._unacked_bytes -= entry.size
            self._next_index = max(0, self._next_index - 1)
            self._progress_at = self._clock()
            self._resend_after = RESEND_SECONDS
            if not entry.durable.done():  # a cancelled waiter cancels the future, too
                entry.durable.set_result(None)

        self._notify_change()

    def pause_sending(self) -> None:
        """Send nothing until `send_again`: a coordinator that does not know this worker would take a later
        record for the first."""
        self.is_paused = True

    def send_again(self) -> None:
        """Send everything unacknowledged again, oldest first."""
        self._next_index = 0
        self.is_paused = False
        self._progress_at = self._clock()
        self._notify_change()

    def resend_overdue(self) -> None:
        """Send again when no ack has come for too long. Called with each heartbeat."""
        is_overdue = self._next_index > 0 and self._clock() - self._progress_at > self._resend_after
        if is_overdue and not self.is_paused:
            log.warning(
                "no ack for record %d within %.0f s; sending it again", self.acked_seq + 1, self._resend_after
            )
            self._resend_after = min(2 * self._resend_after, MAX_RESEND_SECONDS)
            self.send_again()

    async def run_sender(self) -> None:
        """Send for ever, a single message at a time."""
        while True:
            while self.is_paused or self._next_index >= len(self._unacked):
                await self._changed.wait()

            # The next records: at least one, and as many as fit into a bundle.
            bundle: list[_Entry] = []
            bundle_bytes = 0
            for entry in islice(self._unacked, self._next_index, self._next_index + MAX_RECORDS):
                bundle_bytes += entry.size
                if bundle and bundle_bytes > _BUNDLE_BYTES:
                    break
                bundle.append(entry)

            self._next_index += len(bundle)  # before the await, because acks change the index
            records = Records(tuple((entry.record, len(entry.frames)) for entry in bundle))
            try:
                await self._send(records, [frame for entry in bundle for frame in entry.frames])
            except DeadlineError as error:
                log.warning("%s", error)
                self.send_again()

    async def wait_until_flushed(self) -> None:
        """Wait until everything posted is durable."""
        while self._unacked:
            await self._changed.wait()

    def _notify_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
