"""A version as a map of byte ranges: each process has its own bytes of each tensor, and says what is in them.

    a tensor, on a grid of blocks:    |--------|--------|--------|----|
    bytes of rank 0, then of rank 1:   000000000000000111111111111111

Its checksum is that of its blocks' checksums. A block across a border is completed by the process that
collects the shares. The grid does not depend on the ranks, so the same weights have the same checksums
however many ranks there are. There is no torch here: processes that only keep and check files need none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from asyncrl.weights.manifest import ITEM_BYTES, Layout, TensorEntry, TensorSpec, WeightsError

GRID = 1 << 16  # bytes of a block
MOST = 1 << 30  # bytes that msgpack is given at once: it takes less than 4 GiB
NOTHING = memoryview(b"")


class RangeShare(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of one tensor: how many, the checksums of the blocks within them, the bytes of blocks
    that others have a part of, and what goes into a version's file for them, cut into MOST bytes each."""

    count: int
    head: bytes
    blocks: bytes
    tail: bytes
    data: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Return bytes of `data`."""
        return sum(map(len, self.data))


def share(spec: TensorSpec, own: np.ndarray, start: int = 0, data: memoryview = NOTHING) -> RangeShare:
    """The share that `own` bytes of a tensor are, [n] of uint8, from its byte `start` on."""
    first = min(-start % GRID, own.size)
    open_end = (own.size - first) % GRID if start + own.size < spec.nbytes else 0  # the last block is short
    end = own.size - open_end
    blocks = (xxhash.xxh3_64_digest(own[at : min(at + GRID, end)].data) for at in range(first, end, GRID))
    cut = tuple(data[at : at + MOST] for at in range(0, len(data), MOST))
    return RangeShare(own.size, own[:first].tobytes(), b"".join(blocks), own[end:].tobytes(), cut)


def joined(spec: TensorSpec, shares: Iterable[RangeShare]) -> TensorEntry:
    """A tensor with its checksum, of shares that make it up in this order."""
    blocks = []
    begun = b""
    end = 0
    for one in shares:
        begun = begun + one.head
        end = end + one.count
        if begun and (len(begun) == GRID or end == spec.nbytes):
            blocks.append(xxhash.xxh3_64_digest(begun))
            begun = b""
        blocks.append(one.blocks)
        begun += one.tail
    assert not begun and end == spec.nbytes, f"shares of {spec.name} are missing"
    return TensorEntry(*spec, xxhash.xxh3_64_hexdigest(b"".join(blocks)))


def entry(spec: TensorSpec, data: np.ndarray) -> TensorEntry:
    """Return a tensor with the checksum of its bytes, [n] of uint8."""
    return joined(spec, (share(spec, data),))


# -- a safetensors file, written range by range and read in place ----------------------------------------
#
# Its header follows from the layout alone, so a file with another header is not that version's.

Arrays = dict[str, np.ndarray]  # by tensor: its bytes, [n] of uint8
_CODES = {"bfloat16": "BF16", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def write_file(file: Any, layout: Layout, data: Iterable[np.ndarray]) -> None:
    """Write all of a file, of the bytes of each tensor."""
    file.write(file_header(layout))
    for _, one in zip(layout, data, strict=True):
        file.write(one.data)


def starts(layout: Layout) -> Iterator[tuple[str, int]]:
    """The tensors by name, and where in the file their bytes begin."""
    at = len(file_header(layout))
    for spec in layout:
        yield spec.name, at
        at += spec.nbytes


def map_file(path: Path, layout: Layout, mode: Literal["c", "r+"]) -> Arrays:
    """The file's bytes by tensor, mapped into memory: writes stay in this process ("c") or go to the file
    ("r+"). Raises WeightsError for a file that does not hold exactly this layout."""
    expected = file_header(layout)
    with WeightsError.instead_of(OSError, ValueError, text=f"weights {path.parent}: no usable {path.name}"):
        data = np.memmap(path, np.uint8, mode)
    size = len(expected) + sum(spec.nbytes for spec in layout)
    if data[: len(expected)].tobytes() != expected or data.size != size:
        problem = f"{path.name} and its manifest name different tensors"
        raise WeightsError(f"weights {path.parent}: {problem}, or it is cut off")
    places = dict(starts(layout))
    return {spec.name: data[places[spec.name] :][: spec.nbytes] for spec in layout}


def file_header(layout: Layout) -> bytes:
    """The header before the data, which starts at a multiple of 8."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for spec in layout:
        start = end
        end = end + spec.nbytes
        code = _CODES.get(spec.dtype) or f"{spec.dtype[0].upper()}{8 * ITEM_BYTES[spec.dtype]}"
        fields[spec.name] = {"dtype": code, "shape": spec.shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(fields)
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text
