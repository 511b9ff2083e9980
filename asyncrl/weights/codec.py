"""Encodes the change between two versions of a tensor in few bytes.

A fine-tuning step changes a few percent of the bfloat16 numbers, mostly in their low bits. A tensor is cut
into blocks of BLOCK numbers, and each block is stored in one of three ways:

    same:   nothing changed, nothing is stored
    sparse: the distance of each changed number to the one before it, and old XOR new of each changed number
    dense:  old XOR new of all numbers, where so many changed that positions would cost more than zeros

A distance takes one byte. WIDE (255) stands for a longer one, which follows after all distances in 4 bytes.
Example: numbers 3, 10 and 1010 changed; stored are 3, 7, 255, then 1000, then three XOR words.

XOR words are regrouped before compression: the first bytes of all words, then the second bytes, and so on.
The high bytes are mostly zero, and a run of zeros compresses well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
import zstandard

from asyncrl.errors import UNDECODABLE
from asyncrl.weights.manifest import WeightsError

BLOCK = 1 << 22  # numbers; memory in use beside the tensors is a few times this
DENSE = 0.25  # share of changed numbers above which a block is dense
LEVEL = 1  # of zstandard; higher levels take longer and save nothing here
WIDE = 255  # see above


class Block(msgspec.Struct, frozen=True, array_like=True):
    """`changed`: how many numbers changed. `wide`: how many distances take 4 bytes. `data`: compressed."""

    kind: Literal["same", "sparse", "dense"]
    changed: int = 0
    wide: int = 0
    data: bytes = b""


_decoder = msgspec.msgpack.Decoder(list[Block])


def encode(old: np.ndarray, new: np.ndarray, item: int) -> bytes:
    """The changes from `old` to `new`, two byte arrays of equal length that hold numbers of `item` bytes."""
    pairs = zip(_blocks(old, item), _blocks(new, item), strict=True)
    return msgspec.msgpack.encode([_encode(before, after) for before, after in pairs])


def apply(target: np.ndarray, piece: bytes, item: int) -> None:
    """Apply what `encode` returned to the bytes `target`, in place. WeightsError when the piece cannot be
    read; a piece with wrong values is noticed only by the checksum of the whole version."""
    try:
        found = _decoder.decode(piece)
        for words, block in zip(_blocks(target, item), found, strict=True):
            _apply(words, block)
    except (*UNDECODABLE, zstandard.ZstdError, ValueError, IndexError) as error:
        raise WeightsError(f"a damaged delta ({error})") from error


def _blocks(data: np.ndarray, item: int) -> Iterator[np.ndarray]:
    words = data.view(f"<u{item}")
    return (words[start : start + BLOCK] for start in range(0, len(words), BLOCK))


def _encode(old: np.ndarray, new: np.ndarray) -> Block:
    differs = old != new
    changed = int(np.count_nonzero(differs))
    if not changed:
        return Block("same")
    if changed > DENSE * len(old):
        return Block("dense", changed, 0, _compress(_planes(old ^ new)))
    at = np.flatnonzero(differs)
    gaps = np.diff(at, prepend=0)
    wide = gaps[gaps >= WIDE].astype("<u4")
    narrow = np.minimum(gaps, WIDE).astype(np.uint8)
    data = narrow.tobytes() + wide.tobytes() + _planes(old[at] ^ new[at])
    return Block("sparse", changed, len(wide), _compress(data))


def _apply(words: np.ndarray, block: Block) -> None:
    item = words.itemsize
    if block.kind == "dense":
        words ^= _unplanes(_decompress(block.data, len(words) * item), item)
    elif block.kind == "sparse":
        narrow = block.changed
        wide = 4 * block.wide
        data = _decompress(block.data, narrow * (1 + item) + wide)
        gaps = data[:narrow].astype(np.int64)
        gaps[gaps == WIDE] = data[narrow : narrow + wide].view("<u4")
        words[np.cumsum(gaps)] ^= _unplanes(data[narrow + wide :], item)


def _planes(words: np.ndarray) -> bytes:
    """Return the first bytes of all words, then the second ones, and so on."""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.tobytes()


def _unplanes(data: np.ndarray, item: int) -> np.ndarray:
    return np.ascontiguousarray(data.reshape(item, -1).T).view(f"<u{item}")[:, 0]


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def _decompress(data: bytes, size: int) -> np.ndarray:
    if zstandard.frame_content_size(data) != size:
        raise ValueError(f"a frame does not hold {size} bytes")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
