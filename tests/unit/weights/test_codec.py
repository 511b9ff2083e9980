"""Old bytes and what changed make new bytes, whatever changed; damage is a WeightsError or shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights import codec
from asyncrl.weights.manifest import WeightsError


def changed(size: int, item: int, where: np.ndarray | list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of random numbers, and the same with those at `where` changed in their last bit."""
    rng = np.random.default_rng(size)
    old = rng.integers(0, 256, size * item, np.uint8)
    new = old.copy()
    new.view(f"<u{item}")[where] ^= 1
    return old, new


def round_trip(old: np.ndarray, new: np.ndarray, item: int) -> bytes:
    piece = codec.encode_changes(old, new, item)
    target = old.copy()
    codec.apply_changes(target, piece, item)
    assert np.array_equal(target, new)
    return piece


@pytest.mark.parametrize("item", [2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.24, 0.26, 1.0])
def test_round_trip(item: int, share: float):
    where = np.flatnonzero(np.random.default_rng(1).random(20_000) < share)
    old, new = changed(20_000, item, where)
    piece = round_trip(old, new, item)
    assert len(piece) < 100 + 1.2 * share * len(new)


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 70_000])
def test_gaps_around_what_a_byte_holds(gap: int):
    round_trip(*changed(4 * gap + 1, 2, [0, gap, 2 * gap, 4 * gap]), 2)


@given(st.binary(max_size=600), st.data())
@settings(max_examples=60, deadline=None)
def test_any_bytes(data: bytes, draw: st.DataObject):
    old = np.frombuffer(data[: len(data) // 2 * 2], np.uint8)
    new = np.frombuffer(draw.draw(st.binary(min_size=len(old), max_size=len(old))), np.uint8)
    round_trip(old, new, 2)


def test_tensors_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(codec, "BLOCK_NUMBERS", 100)
    kinds = [*range(100, 110), *range(200, 300)]  # of 350: nothing, some, all, nothing
    piece = round_trip(*changed(350, 2, kinds), 2)
    assert [block.kind for block in codec._decoder.decode(piece)] == ["same", "sparse", "dense", "same"]


@pytest.mark.parametrize("where", [slice(0, 500, 50), slice(None)])
def test_damage_is_no_other_error(where: slice):
    old, new = changed(500, 2, np.arange(500)[where])
    piece = codec.encode_changes(old, new, 2)
    refused = 0
    for at in range(len(piece)):
        flipped = piece[:at] + bytes([piece[at] ^ 0x55]) + piece[at + 1 :]
        for damaged in (flipped, piece[:at]):
            try:
                codec.apply_changes(old.copy(), damaged, 2)
            except WeightsError:
                refused += 1
    assert refused > len(piece)  # every one that is cut off, and some others


def test_a_piece_of_another_size_is_refused():
    piece = codec.encode_changes(*changed(100, 2, slice(None)), 2)
    with pytest.raises(WeightsError, match="delta is damaged"):
        codec.apply_changes(np.zeros(2 * 99, np.uint8), piece, 2)
