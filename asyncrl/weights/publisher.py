"""Publishing in the background: the trainer hands over a snapshot and goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from asyncrl.errors import disk_full, one_line
from asyncrl.weights.manifest import Superseded, WeightsRef
from asyncrl.weights.snapshot import Snapshot

FULL_RETRY = 5.0  # seconds after which a write is tried again that the full disk made fail

log = logging.getLogger("asyncrl.weights")


class Publisher:
    """A thread with a mailbox of one: a newer snapshot replaces one that is still waiting.

    It calls `write`, which puts a version where engines find it, and then `announce(ref, snapshot_s,
    write_s)`. A failed write is kept in `error` for the owner to raise: the thread ends. On a full disk the
    newest version waits, and `full` is the error.
    """

    def __init__(
        self,
        write: Callable[[Snapshot], WeightsRef],
        announce: Callable[[WeightsRef, float, float], None],
    ) -> None:
        self._write, self._announce = write, announce
        self.error: Exception | None = None
        self.full = ""
        self._pending: Snapshot | None = None
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        """Never blocks. Raises the error that ended an earlier write."""
        if self.error is not None:
            raise self.error
        with self._wake:
            self._pending = snapshot
            self._wake.notify()

    def close(self, timeout: float) -> bool:
        """Write what is pending and end; False when that took longer than `timeout` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _next(self) -> Snapshot | None:
        """None: there is none any more."""
        with self._wake:
            self._wake.wait_for(lambda: self._pending is not None or self._closing)
            snapshot, self._pending = self._pending, None
            return snapshot

    def _run(self) -> None:
        while (snapshot := self._next()) is not None:
            try:
                start = time.monotonic()
                ref = self._write(snapshot)
                self.full = ""
                self._announce(ref, snapshot.seconds, time.monotonic() - start)
            except Superseded:
                log.info("v%d was replaced by a newer version before it was written", snapshot.version.step)
            except Exception as error:
                if disk_full(error):
                    self._try_later(snapshot, error)
                    continue
                log.exception("publishing v%d failed", snapshot.version.step)
                self.error = error  # the owner raises it at its next submit
                return

    def _try_later(self, snapshot: Snapshot, error: Exception) -> None:
        log.warning("v%d is not written: %s", snapshot.version.step, error)
        with self._wake:
            self.full = one_line(error)
            if not self._wake.wait_for(lambda: self._closing, FULL_RETRY):
                self._pending = self._pending or snapshot
