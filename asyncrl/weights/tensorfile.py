"""A safetensors file, written tensor by tensor and read in place.

Its header follows from the layout alone, so a file whose header is another one is not that version's. There
is no torch here: processes that only keep and check files do not need it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np

from asyncrl.weights.manifest import ITEM_BYTES, Layout, TensorEntry, TensorSpec, WeightsError, entry

Arrays = dict[str, np.ndarray]  # by tensor: its bytes, [n] of uint8
_CODES = {"bfloat16": "BF16", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


class Earlier(NamedTuple):
    """A copy of the weights that was read before: its number, and its bytes."""

    copied: int
    arrays: Arrays


def write(
    file: BinaryIO | io.RawIOBase, layout: Layout, chunks: Iterable[tuple[TensorSpec, np.ndarray]]
) -> tuple[TensorEntry, ...]:
    """Write the tensors of `layout`, whose bytes come in its order; returns them with their checksums."""
    entries = []
    file.write(header(layout))
    for spec, data in chunks:
        file.write(data.data)
        entries.append(entry(spec, data))
    assert tuple(found.spec for found in entries) == layout, "tensors came in another order"
    return tuple(entries)


def mapped(path: Path, layout: Layout, mode: Literal["c", "r+"]) -> Arrays:
    """The file's bytes by tensor, mapped into memory: writes stay in this process ("c") or go to the file
    ("r+"). Raises WeightsError for a file that does not hold exactly this layout."""
    expected = header(layout)
    try:
        data = np.memmap(path, np.uint8, mode)
    except (OSError, ValueError) as error:
        raise WeightsError(f"weights {path.parent}: no usable {path.name} ({error})") from error
    size = len(expected) + sum(spec.nbytes for spec in layout)
    if data[: len(expected)].tobytes() != expected or data.size != size:
        problem = f"{path.name} and its manifest name different tensors"
        raise WeightsError(f"weights {path.parent}: {problem}, or it is cut off")
    arrays, end = {}, len(expected)
    for spec in layout:
        start, end = end, end + spec.nbytes
        arrays[spec.name] = data[start:end]
    return arrays


def header(layout: Layout) -> bytes:
    """The header before the data, which starts at a multiple of 8."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for spec in layout:
        start, end = end, end + spec.nbytes
        code = _CODES.get(spec.dtype) or f"{spec.dtype[0].upper()}{8 * ITEM_BYTES[spec.dtype]}"
        fields[spec.name] = {"dtype": code, "shape": spec.shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(fields)
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text
