"""Lets a thread that pushes weights have the device to itself, between two micro-batches of training.

    a pushing thread:  entered() ── waits ──► │ inside │ ──► goes on
    training:          micro-batch, allow() ──► waits  ──► next micro-batch

Two communicators of NCCL on one device may wait for each other: one is being made, which needs the device,
while collectives of the other are under way on it, which need other ranks.
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
        self._waiting_threads = 0  # threads that wait for a pause, or are in one
        self._is_paused = False

    @contextmanager
    def entered(self, seconds: float) -> Iterator[None]:
        """Inside, the training thread stands still. Postponed if it does not come to that in time."""
        with self._state_changed:
            self._waiting_threads += 1
            self._state_changed.notify_all()

        try:
            with self._state_changed:
                if not self._state_changed.wait_for(lambda: self._is_paused, seconds):
                    raise Postponed(f"training came to no pause within {seconds:.3g} s, for a server to join")
            yield
        finally:
            with self._state_changed:
                self._waiting_threads -= 1
                self._state_changed.notify_all()

    def allow(self) -> None:
        """Stand still while others want it: called by the training thread, where it is in no collective. At
        once where nobody does. What waits in a pause has a deadline of its own."""
        if not self._waiting_threads:
            return

        self._device_module.synchronize()
        with self._state_changed:
            self._is_paused = True
            self._state_changed.notify_all()
            self._state_changed.wait_for(lambda: not self._waiting_threads)
            self._is_paused = False
