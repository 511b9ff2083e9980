"""Training stands still while another thread has the device."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch

from asyncrl.weights.manifest import Postponed
from asyncrl.weights.pause import TrainingPause

LONG = 60.0


def test_training_waits_with_an_idle_device_until_the_pause_is_over() -> None:
    pause = TrainingPause(torch.device("cpu"))
    synchronized = threading.Event()
    pause._device_module = mock.Mock(synchronize=synchronized.set)
    inside = threading.Event()
    joined = threading.Event()
    goes_on = threading.Event()
    device_was_idle = list[bool]()

    def push() -> None:
        with pause.entered(LONG):
            device_was_idle.append(synchronized.is_set())
            inside.set()
            joined.wait(LONG)

    def train() -> None:
        with pause._state_changed:
            assert pause._state_changed.wait_for(lambda: pause._waiting_threads, LONG)
        pause.allow_pause()
        goes_on.set()

    pause.allow_pause()  # nobody wants it
    assert not synchronized.is_set()
    pushing = threading.Thread(target=push)
    training = threading.Thread(target=train)
    pushing.start()
    training.start()
    assert inside.wait(LONG) and device_was_idle == [True]
    assert not goes_on.wait(0.05), "training goes on beside a server that joins"
    joined.set()
    assert goes_on.wait(LONG)
    pushing.join(LONG)
    training.join(LONG)


def test_training_that_comes_to_no_pause_is_waited_for_another_time() -> None:
    pause = TrainingPause(torch.device("cpu"))
    with pytest.raises(Postponed, match=r"did not pause within 0\.01 s"), pause.entered(0.01):
        raise AssertionError("training has not paused")
    pause.allow_pause()  # and it does not wait for who has given up
