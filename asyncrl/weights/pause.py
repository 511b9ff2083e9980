"""Lets a thread that pushes weights have the device to itself, between two micro-batches of training.

    a pushing thread:  entered() ── waits ──► │ inside │ ──► goes on
    training:          micro-batch, allow() ──► waits  ──► next micro-batch

Two communicators of NCCL on one device may wait for each other for ever: a new communicator needs the device,
which the collectives of the other occupy until other ranks take part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrl.weights.manifest import Postponed


class TrainingPause:
    def __init__(self, device: torch.device) -> None:
        self._device_module = torch.get_device_module(device)
        self._state_changed = threading.Condition()
        self._waiting_threads = 0  # that wait for a pause, or use a pause
        self._is_paused = False

    @contextmanager
    def entered(self, seconds: float) -> Iterator[None]:
        """Hold the training thread during the body. Raises Postponed if training does not pause in time."""
        with self._state_changed:
            self._waiting_threads += 1
            self._state_changed.notify_all()

        try:
            with self._state_changed:
                if not self._state_changed.wait_for(lambda: self._is_paused, seconds):
                    raise Postponed(f"training did not pause within {seconds:.3g} s for a server to join")
            yield
        finally:
            with self._state_changed:
                self._waiting_threads -= 1
                self._state_changed.notify_all()

    def allow_pause(self) -> None:
        """Pause training while pushing threads want it: called by the training thread outside of collectives.
        Returns at once if no thread wants a pause. Threads in a pause have their own deadlines."""
        if not self._waiting_threads:
            return

        self._device_module.synchronize()
        with self._state_changed:
            self._is_paused = True
            self._state_changed.notify_all()
            self._state_changed.wait_for(lambda: not self._waiting_threads)
            self._is_paused = False
