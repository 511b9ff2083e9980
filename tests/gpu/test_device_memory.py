"""On a GPU: memory that is page-locked as it is, also at addresses that were locked before; and a device that
has nothing to do while training stands still."""

from __future__ import annotations

import threading

import pytest
import torch

from asyncrl.weights.memory import allocate_page_locked
from asyncrl.weights.pause import TrainingPause

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

LONG = 60.0


def test_page_locked_memory_is_copied_from_and_to_without_the_host() -> None:
    memory = allocate_page_locked(5_000_000)
    assert memory.is_pinned() and memory[1_000_000:].is_pinned()
    memory.copy_(torch.arange(len(memory)).to(torch.uint8))
    there = memory.to("cuda", non_blocking=True)
    memory_of_result = allocate_page_locked(len(memory))
    memory_of_result.copy_(there + 1, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory_of_result, memory + 1)


@pytest.mark.parametrize("size", [5_000, 5_000_000])  # from the heap, and mapped
def test_addresses_are_locked_anew_after_their_memory_was_freed(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock that outlived its memory would be an error at the next one, or copy from pages of the past."""
    addresses = list[int]()
    for value in range(50):
        memory = allocate_page_locked(size)
        addresses.append(memory.data_ptr())
        memory.fill_(value)
        assert memory.is_pinned() and bool((memory.to("cuda", non_blocking=True) == value).all())
        del memory
    assert len(set(addresses)) < len(addresses), "no address was used twice: this shows nothing"
    assert "cannot be pinned" not in caplog.text


def test_the_device_is_idle_while_training_stands_still() -> None:
    pause = TrainingPause(torch.device("cuda"))
    kernels_done = torch.cuda.Event()
    idle = list[bool]()

    def push() -> None:
        with pause.entered(LONG):
            idle.append(kernels_done.query())

    def train() -> None:
        with pause._state_changed:
            assert pause._state_changed.wait_for(lambda: pause._waiting_threads, LONG)
        torch.cuda._sleep(500_000_000)  # cycles
        kernels_done.record()
        assert not kernels_done.query()
        pause.allow_pause()

    pushing = threading.Thread(target=push)
    pushing.start()
    train()
    pushing.join(LONG)
    assert idle == [True]
