"""A version as a map of byte ranges: each process has its own bytes of each tensor, and reports checksums.

    a tensor, on a grid of blocks:    |--------|--------|--------|----|
    bytes of rank 0, then of rank 1:   000000000000000111111111111111

A tensor's checksum is that of its blocks' checksums. A block across a border is completed by the process that
collects the parts. The grid does not depend on the ranks, so the same weights have the same checksums however
many ranks there are. There is no torch here: processes that only keep and check files need none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from asyncrl.weights.manifest import Layout, RawTensorSpec, TensorEntry, TensorSpec, WeightsError

GRID_BYTES = 1 << 16  # bytes of a block
MAX_FIELD_BYTES = 1 << 30  # bytes of one msgpack field, which can hold less than 4 GiB
NO_BYTES = memoryview(b"")


class RangePart(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of one tensor. `count`: how many. `blocks`: the checksums of the complete blocks.
    `head`, `tail`: bytes of the blocks that other processes have a part of. `data`: the bytes for a version's
    file, cut into pieces of MAX_FIELD_BYTES."""

    count: int
    head: bytes
    blocks: bytes
    tail: bytes
    data: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Return bytes of `data`."""
        return sum(map(len, self.data))


def make_range_part(
    spec: TensorSpec, tensor_bytes: np.ndarray, start: int = 0, data: memoryview = NO_BYTES
) -> RangePart:
    """Return the part of a tensor that `tensor_bytes` is, [n] of uint8, from the tensor's byte `start` on."""
    head_end = min(-start % GRID_BYTES, tensor_bytes.size)
    tail_size = 0  # a tensor's last block may be short: it is complete
    if start + tensor_bytes.size < spec.nbytes:
        tail_size = (tensor_bytes.size - head_end) % GRID_BYTES
    end = tensor_bytes.size - tail_size
    blocks = (
        xxhash.xxh3_64_digest(tensor_bytes[offset : min(offset + GRID_BYTES, end)].data)
        for offset in range(head_end, end, GRID_BYTES)
    )

    data_pieces = tuple(
        data[offset : offset + MAX_FIELD_BYTES] for offset in range(0, len(data), MAX_FIELD_BYTES)
    )
    return RangePart(
        tensor_bytes.size,
        tensor_bytes[:head_end].tobytes(),
        b"".join(blocks),
        tensor_bytes[end:].tobytes(),
        data_pieces,
    )


def join_parts(spec: TensorSpec, range_parts: Iterable[RangePart]) -> TensorEntry:
    """Return a tensor with its checksum, from the parts that make up the tensor, in order."""
    blocks = []
    open_block = b""
    end = 0
    for range_part in range_parts:
        open_block = open_block + range_part.head
        end = end + range_part.count
        if open_block and (len(open_block) == GRID_BYTES or end == spec.nbytes):
            blocks.append(xxhash.xxh3_64_digest(open_block))
            open_block = b""

        blocks.append(range_part.blocks)
        open_block += range_part.tail

    assert not open_block and end == spec.nbytes, f"parts of {spec.name} are missing"
    return TensorEntry(*spec, xxhash.xxh3_64_hexdigest(b"".join(blocks)))


def tensor_entry(spec: TensorSpec, data: np.ndarray) -> TensorEntry:
    """Return a tensor with the checksum of its bytes, [n] of uint8."""
    return join_parts(spec, (make_range_part(spec, data),))


# -- a safetensors file, written range by range and read in place ----------------------------------------
#
# The header follows from the layout alone, so a file with another header belongs to another version.

Arrays = dict[str, np.ndarray]  # by tensor: its bytes, [n] of uint8


def write_file(file: Any, layout: Sequence[TensorSpec | RawTensorSpec], data: Iterable[np.ndarray]) -> None:
    """Write a whole file from the bytes of each tensor."""
    file.write(file_header(layout))
    for _, tensor_bytes in zip(layout, data, strict=True):
        file.write(tensor_bytes.data)


def tensor_offsets(layout: Layout) -> Iterator[tuple[str, int]]:
    """Yield the tensors' names, and where in the file their bytes begin."""
    offset = len(file_header(layout))
    for spec in layout:
        yield spec.name, offset
        offset += spec.nbytes


def map_file(path: Path, layout: Layout, mode: Literal["c", "r+"]) -> Arrays:
    """Map a file into memory and return the bytes by tensor: writes stay in this process ("c") or go to the
    file ("r+"). Raises WeightsError for a file that does not hold exactly this layout."""
    expected_header = file_header(layout)
    with WeightsError.instead_of(OSError, ValueError, text=f"weights {path.parent}: no usable {path.name}"):
        data = np.memmap(path, np.uint8, mode)

    size = len(expected_header) + sum(spec.nbytes for spec in layout)
    if data[: len(expected_header)].tobytes() != expected_header or data.size != size:
        problem = f"{path.name} and its manifest name different tensors"
        raise WeightsError(f"weights {path.parent}: {problem}, or the file is truncated")

    offsets = dict(tensor_offsets(layout))
    return {spec.name: data[offsets[spec.name] :][: spec.nbytes] for spec in layout}


def file_header(layout: Iterable[TensorSpec | RawTensorSpec]) -> bytes:
    """Return the header before the data; the data start at a multiple of 8."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for spec in layout:
        start = end
        end = end + spec.nbytes
        fields[spec.name] = {"dtype": spec.dtype_code, "shape": spec.shape, "data_offsets": (start, end)}

    header_text = msgspec.json.encode(fields)
    header_text = header_text.ljust(-(-len(header_text) // 8) * 8)
    return struct.pack("<Q", len(header_text)) + header_text
