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


class Probe(msgspec.Struct, frozen=True):
    """A fixed text as the trainer scored it: `logprobs[i]` is that of `ids[i + 1]`, at temperature 1. An
    engine that loaded the version must agree; whatever is wrong with it shows before it samples a token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tensors of a version, in file order. `checksum` is the xxh3 of all entries and the probe."""

    trainer_epoch: int
    version: int
    tensors: tuple[TensorEntry, ...]
    checksum: str
    probe: Probe | None = None


def xxh3(data: Any) -> str:
    """64-bit xxh3 of anything with a buffer, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def overall_checksum(tensors: Iterable[TensorEntry], probe: Probe | None) -> str:
    """One checksum over the names, shapes, types and checksums of all tensors, in order, and the probe."""
    return xxh3(msgspec.json.encode((tuple(tensors), probe)))
