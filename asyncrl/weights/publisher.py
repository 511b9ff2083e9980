"""Publishing in the background: the trainer hands over a snapshot and goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.weights.disk import prune, publish
from asyncrl.weights.manifest import Probe, WeightsRef

log = logging.getLogger("asyncrl.weights")


@dataclass(frozen=True)
class Snapshot:
    """A version in host memory. `seconds`: what the trainer waited for it."""

    tensors: dict[str, torch.Tensor]
    trainer_epoch: int
    version: int
    seconds: float
    probe: Probe | None = None


class Publisher:
    """A thread with a mailbox of one: a newer snapshot replaces one that is still waiting.

    `announce(ref, snapshot_s, write_s)` is called on this thread when a version is in place. A failed
    write is kept in `error` for the owner to raise: the thread ends.
    """

    def __init__(
        self, directory: Path, keep: int, announce: Callable[[WeightsRef, float, float], None]
    ) -> None:
        self.directory, self.keep, self._announce = directory, keep, announce
        self.error: Exception | None = None
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

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending is not None or self._closing)
                snapshot, self._pending = self._pending, None
            if snapshot is None:
                return
            try:
                self._write(snapshot)
            except Exception as error:  # the owner raises it at its next submit
                log.exception("publishing v%d failed", snapshot.version)
                self.error = error
                return

    def _write(self, snapshot: Snapshot) -> None:
        start = time.monotonic()
        ref = publish(
            snapshot.tensors, self.directory, snapshot.trainer_epoch, snapshot.version, snapshot.probe
        )
        self._announce(ref, snapshot.seconds, time.monotonic() - start)
        prune(self.directory, self.keep, in_use=[ref])
