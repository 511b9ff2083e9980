"""Training stands still while another thread has the device."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from asyncrl.errors import DeadlineError
from asyncrl.weights.pause import TrainingPause

LONG = 60.0


def test_training_waits_with_an_idle_device_until_the_pause_is_over() -> None:
    events: list[str] = []
    pause = TrainingPause(torch.device("cpu"))
    wanted, synchronized = threading.Event(), threading.Event()

    class Device:
        def synchronize(self) -> None:
            events.append("the device is idle")
            synchronized.set()

    module: Any = Device()
    pause._module = module

    def push() -> None:
        with pause.entered(LONG):
            assert synchronized.is_set()
            events.append("a server joins")
        events.append("it has joined")

    thread = threading.Thread(target=push)
    pause.allow()  # nobody wants it
    thread.start()
    while not pause._wanted:
        wanted.wait(0.001)
    pause.allow()
    events.append("the next micro-batch")
    thread.join(LONG)
    assert events[:2] == ["the device is idle", "a server joins"]
    assert set(events[2:]) == {"it has joined", "the next micro-batch"}


def test_training_that_comes_to_no_pause_is_a_deadline_error() -> None:
    pause = TrainingPause(torch.device("cpu"))
    with pytest.raises(DeadlineError, match=r"no pause within 0\.01 s"), pause.entered(0.01):
        raise AssertionError("training has not paused")
    pause.allow()  # and it does not wait for who has given up
