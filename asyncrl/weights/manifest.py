"""The name of a published policy version, and what a manifest says about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import xxhash

from asyncrl.errors import AsyncrlError


class WeightsError(AsyncrlError):
    """Published weights are missing, damaged or not this model's."""


class WeightsRef(msgspec.Struct, frozen=True):
    """A published version: which, and where. Ordered by (trainer_epoch, version)."""

    trainer_epoch: int
    version: int
    path: str

    @property
    def order(self) -> tuple[int, int]:
        return self.trainer_epoch, self.version


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    xxh3: str


class Manifest(msgspec.Struct, frozen=True):
    """All tensors of a version, in file order. `checksum` is the xxh3 of all entries."""

    trainer_epoch: int
    version: int
    tensors: tuple[TensorEntry, ...]
    checksum: str


def xxh3(data: Any) -> str:
    """64-bit xxh3 of anything with a buffer, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def overall_checksum(tensors: Iterable[TensorEntry]) -> str:
    """One checksum over the names, shapes, types and checksums of all tensors, in order."""
    return xxh3(msgspec.json.encode(tuple(tensors)))
