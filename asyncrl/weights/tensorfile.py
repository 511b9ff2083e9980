"""A safetensors file, written range by range and read in place.

Its header follows from the layout alone, so a file whose header is another one is not that version's. There
is no torch here: processes that only keep and check files do not need it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from asyncrl.weights.manifest import ITEM_BYTES, Layout, WeightsError

Arrays = dict[str, np.ndarray]  # by tensor: its bytes, [n] of uint8
_CODES = {"bfloat16": "BF16", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def write(file: Any, layout: Layout, data: Iterable[np.ndarray]) -> None:
    """Write all of a file, of the bytes of each tensor."""
    file.write(header(layout))
    for _, one in zip(layout, data, strict=True):
        file.write(one.data)


def starts(layout: Layout) -> Iterator[tuple[str, int]]:
    """The tensors by name, and where in the file their bytes begin."""
    at = len(header(layout))
    for spec in layout:
        yield spec.name, at
        at += spec.nbytes


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
    places = dict(starts(layout))
    return {spec.name: data[places[spec.name] :][: spec.nbytes] for spec in layout}


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
