"""Encodes the change between two versions of a tensor in few bytes.

A fine-tuning step changes a few percent of the bfloat16 numbers, mostly in their low bits. A tensor is cut
into blocks of BLOCK_NUMBERS numbers, and each block is stored in one of three ways:

    same:   nothing changed, nothing is stored
    sparse: the distance of each changed number to the one before it, and old XOR new of each changed number
    dense:  old XOR new of all numbers, where so many changed that positions would cost more than zeros

A distance takes one byte. WIDE_GAP (255) stands for a longer distance, which follows after all distances in 4
bytes.
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

BLOCK_NUMBERS = 1 << 22  # numbers; memory in use beside the tensors is a few times this
DENSE_FRACTION = 0.25  # of changed numbers, above which a block is dense
COMPRESSION_LEVEL = 1  # zstandard; higher levels take longer and save nothing here
WIDE_GAP = 255  # see above


class Block(msgspec.Struct, frozen=True, array_like=True):
    """One encoded block. `changed`: how many numbers changed. `wide`: how many distances take 4 bytes.
    `data`: compressed."""

    kind: Literal["same", "sparse", "dense"]
    changed: int = 0
    wide: int = 0
    data: bytes = b""


_decoder = msgspec.msgpack.Decoder(list[Block])


def encode_changes(old: np.ndarray, new: np.ndarray, item_bytes: int) -> bytes:
    """Encode the changes from `old` to `new`, two byte arrays of equal length with numbers of `item_bytes`
    bytes."""
    pairs = zip(_split_blocks(old, item_bytes), _split_blocks(new, item_bytes), strict=True)
    return msgspec.msgpack.encode([_encode_block(before, after) for before, after in pairs])


def apply_changes(target: np.ndarray, piece: bytes, item_bytes: int) -> None:
    """Apply a piece that `encode_changes` returned to the bytes `target`, in place. Raises WeightsError for a
    piece that cannot be read; only the checksum of the whole version shows wrong values."""
    try:
        blocks = _decoder.decode(piece)
        for words, block in zip(_split_blocks(target, item_bytes), blocks, strict=True):
            _apply_block(words, block)
    except (*UNDECODABLE, zstandard.ZstdError, ValueError, IndexError) as error:
        raise WeightsError(f"the delta is damaged ({error})") from error


def _split_blocks(data: np.ndarray, item_bytes: int) -> Iterator[np.ndarray]:
    words = data.view(f"<u{item_bytes}")
    return (words[start : start + BLOCK_NUMBERS] for start in range(0, len(words), BLOCK_NUMBERS))


def _encode_block(old: np.ndarray, new: np.ndarray) -> Block:
    differs = old != new
    changed = int(np.count_nonzero(differs))
    if not changed:
        return Block("same")
    if changed > DENSE_FRACTION * len(old):
        return Block("dense", changed, 0, _compress(_byte_planes(old ^ new)))

    changed_positions = np.flatnonzero(differs)
    gaps = np.diff(changed_positions, prepend=0)
    wide_gaps = gaps[gaps >= WIDE_GAP].astype("<u4")
    narrow_gaps = np.minimum(gaps, WIDE_GAP).astype(np.uint8)
    data = (
        narrow_gaps.tobytes()
        + wide_gaps.tobytes()
        + _byte_planes(old[changed_positions] ^ new[changed_positions])
    )

    return Block("sparse", changed, len(wide_gaps), _compress(data))


def _apply_block(words: np.ndarray, block: Block) -> None:
    item_bytes = words.itemsize
    if block.kind == "dense":
        words ^= _join_planes(_decompress(block.data, len(words) * item_bytes), item_bytes)
    elif block.kind == "sparse":
        narrow_bytes = block.changed
        wide_bytes = 4 * block.wide
        data = _decompress(block.data, narrow_bytes * (1 + item_bytes) + wide_bytes)
        gaps = data[:narrow_bytes].astype(np.int64)
        gaps[gaps == WIDE_GAP] = data[narrow_bytes : narrow_bytes + wide_bytes].view("<u4")
        words[np.cumsum(gaps)] ^= _join_planes(data[narrow_bytes + wide_bytes :], item_bytes)


def _byte_planes(words: np.ndarray) -> bytes:
    """Return the first bytes of all words, then the second bytes, and so on."""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.tobytes()


def _join_planes(data: np.ndarray, item_bytes: int) -> np.ndarray:
    return np.ascontiguousarray(data.reshape(item_bytes, -1).T).view(f"<u{item_bytes}")[:, 0]


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(data)


def _decompress(data: bytes, size: int) -> np.ndarray:
    if zstandard.frame_content_size(data) != size:
        raise ValueError(f"a frame does not contain {size} bytes")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
