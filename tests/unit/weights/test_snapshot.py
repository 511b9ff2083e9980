"""Copies in host memory: what is read does not change, and a newer copy needs no older reader's leave."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from asyncrl.weights import memory
from asyncrl.weights.manifest import Superseded
from asyncrl.weights.memory import allocate_page_locked
from asyncrl.weights.ranges import RangePart
from asyncrl.weights.snapshot import BucketBuffers, Buffers


def copy(buffers: Buffers, value: float) -> int:
    index = buffers.claim_buffer(buffers.begin_claim())
    buffers.copy_tensors(index, [(torch.full(shape, value), torch.bfloat16) for shape in ((2, 3), (4,))])
    return index


def value(memory: Tensor) -> float:
    (stored_value,) = memory.view(torch.bfloat16).unique().tolist()
    return float(stored_value)


@pytest.fixture
def buffers() -> Buffers:
    return Buffers(20, page_locked=False)


def test_two_buffers_take_turns_and_their_memory_stays(buffers: Buffers):
    assert [copy(buffers, i) for i in range(4)] == [0, 1, 0, 1]
    with buffers.reading(0, 3, wait_seconds=0) as memory:
        place = memory.data_ptr()
    copy(buffers, 5)
    with buffers.reading(0, 5, wait_seconds=0) as memory:
        assert memory.data_ptr() == place and value(memory) == 5


def test_a_gpu_s_buffers_are_pinned_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own pinned memory comes in powers of two, and memory estimates count bytes. A rank that has no
    part of the weights pins nothing: CUDA would refuse it."""
    registered = dict[int, int]()
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: registered.update({address: size}) or 0,
        cudaHostUnregister=lambda address: None,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffers = Buffers(5_000_000, page_locked=True)
    assert registered == {buffer.memory.data_ptr(): 5_000_000 for buffer in buffers._buffers}
    registered.clear()
    Buffers(0, page_locked=True)
    assert not registered


def test_pages_are_unlocked_when_the_last_tensor_goes_and_before_they_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What gets the address next would be taken for locked, and a GPU would copy from the old pages."""
    contents = list[bytes]()

    def unregister(address: int) -> None:
        with open("/proc/self/mem", "rb") as process_memory:
            process_memory.seek(address)
            contents.append(process_memory.read(3))  # OSError, had the pages been given back

    runtime = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 0, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pages = allocate_page_locked(5_000_000)
    pages[:3] = torch.tensor([7, 8, 9])
    last = pages[4_000_000:].view(torch.bfloat16)
    del pages
    assert not contents
    del last
    assert contents == [bytes([7, 8, 9])]


def test_buckets_of_several_ranks_are_put_together_in_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are pinned once. One is filled while the other is sent."""
    sizes = list[int]()
    monkeypatch.setattr(
        memory, "allocate_page_locked", lambda size: sizes.append(size) or torch.zeros(size).byte()
    )
    buckets = BucketBuffers(page_locked=True)

    def shares(*values: bytes) -> list[RangePart]:
        return [RangePart(len(data), b"", b"", b"", (memoryview(data),)) for data in values]

    first = buckets.fill_next(shares(b"ab", b"", b"c"), 10)
    second = buckets.fill_next(shares(b"0123456789"), 10)
    assert bytes(first.tolist()) == b"abc" and bytes(second.tolist()) == b"0123456789"
    third = buckets.fill_next(shares(b"de"), 10)
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    assert bytes(third.tolist()) == b"de" and bytes(second.tolist()) == b"0123456789"
    assert sizes == [10, 10]


def test_a_newer_copy_replaces_one_that_nobody_reads(buffers: Buffers):
    first = copy(buffers, 1)
    second = copy(buffers, 2)
    with buffers.reading(first, 1, wait_seconds=0) as memory:
        assert copy(buffers, 3) == second
        with pytest.raises(Superseded), buffers.reading(second, 2, wait_seconds=0):
            pass
        assert copy(buffers, 4) == second
        assert value(memory) == 1
    with buffers.reading(second, 4, wait_seconds=0) as memory:
        assert value(memory) == 4


def test_a_claimed_buffer_holds_nothing(buffers: Buffers):
    copy(buffers, 1)
    copy(buffers, 2)
    buffers.claim_buffer(buffers.begin_claim())
    with pytest.raises(Superseded, match="copy 1"), buffers.reading(0, 1, wait_seconds=0):
        pass


def test_readers_of_both_buffers_cost_a_third(buffers: Buffers):
    first = copy(buffers, 1)
    second = copy(buffers, 2)
    with buffers.reading(first, 1, wait_seconds=0) as one, buffers.reading(second, 2, wait_seconds=0) as two:
        third = copy(buffers, 3)
        assert third not in (first, second)
        assert (value(one), value(two)) == (1, 2)
    assert copy(buffers, 4) == first


def test_a_copy_that_comes_late_is_waited_for(buffers: Buffers):
    found = []

    def read() -> None:
        with buffers.reading(1, 1, wait_seconds=30) as memory:
            found.append(value(memory))

    reader = threading.Thread(target=read)
    reader.start()
    buffers.copy_tensors(1, [(torch.full((10,), 7.0), torch.bfloat16)])
    reader.join(30)
    assert found == [7.0]


def test_what_is_read_elsewhere_is_not_claimed(buffers: Buffers):
    copy(buffers, 1)
    copy(buffers, 2)
    assert buffers.begin_claim() == [] and buffers.claim_buffer([0]) == 1
    assert buffers.begin_claim() == [] and buffers.claim_buffer([0, 1]) == 2


def test_nobody_begins_to_read_between_telling_and_claiming(buffers: Buffers):
    """Or the buffer that it begins to read would be written to by ranks that have heard of no reader."""
    first = copy(buffers, 1)
    started = threading.Event()
    copy(buffers, 2)
    busy = buffers.begin_claim()
    found = list[str]()

    def read() -> None:
        started.set()
        try:
            with buffers.reading(first, 1, wait_seconds=0):
                found.append("read")
        except Superseded:
            found.append("superseded")

    reader = threading.Thread(target=read)
    reader.start()
    started.wait(30)
    reader.join(0.05)
    assert found == [] and buffers.claim_buffer(busy) == first
    reader.join(30)
    assert found == ["superseded"]
