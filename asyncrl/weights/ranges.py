"""A version as a map of byte ranges: each process has its own bytes of each tensor, and says what is in them.

    a tensor, on a grid of blocks:    |--------|--------|--------|----|
    bytes of rank 0, then of rank 1:   000000000000000111111111111111

Its checksum is that of its blocks' checksums. A block across a border is completed by the process that
collects the shares. The grid does not depend on the ranks, so the same weights have the same checksums
however many ranks there are. There is no torch here: processes that only keep and check files need none.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import xxhash

from asyncrl.weights.manifest import TensorEntry, TensorSpec

GRID = 1 << 16  # bytes of a block
NOTHING = memoryview(b"")


class RangeShare(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of one tensor: how many, the checksums of the blocks within them, the bytes of blocks
    that others have a part of, and what goes into a version's file for them."""

    count: int
    head: bytes
    blocks: bytes
    tail: bytes
    data: memoryview


def share(spec: TensorSpec, own: np.ndarray, start: int = 0, data: memoryview = NOTHING) -> RangeShare:
    """The share that `own` bytes of a tensor are, [n] of uint8, from its byte `start` on."""
    first = min(-start % GRID, own.size)
    open_end = (own.size - first) % GRID if start + own.size < spec.nbytes else 0  # the last block is short
    end = own.size - open_end
    blocks = (xxhash.xxh3_64_digest(own[at : min(at + GRID, end)].data) for at in range(first, end, GRID))
    return RangeShare(own.size, own[:first].tobytes(), b"".join(blocks), own[end:].tobytes(), data)


def joined(spec: TensorSpec, shares: Iterable[RangeShare]) -> TensorEntry:
    """A tensor with its checksum, of shares that make it up in this order."""
    blocks, begun, end = [], b"", 0
    for one in shares:
        begun, end = begun + one.head, end + one.count
        if begun and (len(begun) == GRID or end == spec.nbytes):
            blocks.append(xxhash.xxh3_64_digest(begun))
            begun = b""
        blocks.append(one.blocks)
        begun += one.tail
    assert not begun and end == spec.nbytes, f"shares of {spec.name} are missing"
    return TensorEntry(*spec, xxhash.xxh3_64_hexdigest(b"".join(blocks)))


def entry(spec: TensorSpec, data: np.ndarray) -> TensorEntry:
    """A tensor with the checksum of its bytes, [n] of uint8."""
    return joined(spec, (share(spec, data),))
