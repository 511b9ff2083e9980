"""Makes each pass of the loop durable, and only then tells the peers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.coordinator.ledger import Ledger
from asyncrl.observe.timeline import START_EVENT, Timeline
from asyncrl.runtime.liveness import Liveness
from asyncrl.store.runstore import RunStore
from asyncrl.store.schema import StoreError, StorePaused
from asyncrl.wire.messages.shared import WireMessage
from asyncrl.wire.sockets import Hub

CONTACT_INTERVAL = 0.5  # seconds between two signs of life to the peers, while the store cannot be written

log = logging.getLogger("asyncrl.coordinator")


@dataclass
class TransactionalOutbox:
    """Messages of a pass of the loop, sent after the store's commit.

    So a kill -9 cannot undo anything that a peer knows of.
    """

    control: Hub
    bulk: Hub
    _queue: list[tuple[Hub, bytes, WireMessage, Sequence[bytes]]] = field(default_factory=list)
    unreachable: set[bytes] = field(default_factory=set)  # peers that a message did not reach

    @property
    def refused(self) -> int:
        """Number of received messages that could not be read."""
        return self.control.refused_count + self.bulk.refused_count

    def to_control(self, peer: bytes, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        self._queue.append((self.control, peer, message, frames))

    def to_bulk(self, peer: bytes, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        self._queue.append((self.bulk, peer, message, frames))

    def clear(self) -> None:
        """Discard the messages of a pass that was undone."""
        self._queue = []

    def flush(self) -> None:
        """Send all messages. A peer that misses a message requests the message again, by its protocol."""
        queue = self._queue
        self._queue = []
        for hub, peer, message, frames in queue:
            if not hub.send(peer, message, frames):
                self.unreachable.add(peer)
                log.warning(
                    "could not deliver %s to %s", type(message).__name__, peer.decode(errors="replace")
                )


class Journal:
    """Commits each pass of the loop, and waits while the store cannot be written.

    Args:
        ledger: its changes are written.
        liveness: the end of a pause counts as progress.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        ledger: Ledger,
        liveness: Liveness,
        store: RunStore,
        outbox: TransactionalOutbox,
    ) -> None:
        self._stall_timeout = config.launch.stall_timeout
        self._ledger = ledger
        self._liveness = liveness
        self.store = store
        self.outbox = outbox
        self.timeline = Timeline(run_dir / "timeline" / "coordinator-0.jsonl")
        self.timeline.record_past(START_EVENT, 0.0)

        self.damage = ""  # why the store could not be read again, so that memory and store differ
        self._paused_at: float | None = None
        self._next_contact_at = 0.0

    @property
    def paused(self) -> bool:
        """True while the last pass is not written."""
        return self._paused_at is not None

    def commit_pass(self, now: float, keep_contact: Callable[[str], None]) -> bool:
        """Return True once the pass is durable and its messages are sent. Until then no other pass may begin.

        Raises StoreError after launch.stall_timeout.

        Args:
            keep_contact: called from time to time during a pause with the reason, as peers must not give the
                coordinator up.
        """
        try:
            self.persist()
        except StorePaused as error:
            if self._paused_at is None:
                self._paused_at = now
                log.error("%s", error)

            if now - self._paused_at > self._stall_timeout:
                raise StoreError(
                    f"the run store was not writable for {self._stall_timeout:g} s: {error}"
                ) from error

            if now >= self._next_contact_at:
                self._next_contact_at = now + CONTACT_INTERVAL
                keep_contact(str(error))
            return False

        if self._paused_at is not None:
            log.info("the run store is writable again after %.1f s", now - self._paused_at)
            self._paused_at = None
            self._liveness.note_progress(now)

        return True

    def persist(self) -> None:
        """Write all changes in a transaction, then send the messages of this pass.

        After StorePaused neither has happened, and `persist` must be called again before any further change.
        """
        self._ledger.put_changes()
        self.store.commit()
        self.outbox.flush()
        self.store.copies.start_copy(self._ledger.buffer.state_counts())

    def roll_back(self) -> None:
        """Forget all uncommitted changes, and read the ledger from the store again, as far as possible."""
        self.outbox.clear()
        self.store.rollback()
        try:
            self._ledger.restore()
        except StoreError as error:
            log.error("%s", error)
            self.damage = str(error)
