"""Versions of tensors at hand, as a trainer would publish them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.types import PolicyVersion
from asyncrl.weights import codec
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.manifest import ITEM_BYTES, AdapterSpec, Layout, TensorSpec, WeightsRef, split_buckets
from asyncrl.weights.ranges import RangePart, make_range_part
from asyncrl.weights.snapshot import BucketBuffers, Snapshot, Tensors, tensor_as_bytes

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class PinnedTensors:
    """Whole tensors of a process, as a `HeldCopy`."""

    layout: Layout
    tensors: Tensors

    def collect_parts(
        self, part: slice, file: str = "", base: PinnedTensors | None = None
    ) -> list[Sequence[RangePart]]:
        tensor_shares: list[Sequence[RangePart]] = []
        for spec in self.layout[part]:
            own_bytes = tensor_as_bytes(self.tensors[spec.name])
            data = own_bytes.data
            if base is not None and own_bytes.size:
                old = tensor_as_bytes(base.tensors[spec.name])
                data = memoryview(codec.encode_changes(old, own_bytes, ITEM_BYTES[spec.dtype]))
            tensor_shares.append([make_range_part(spec, own_bytes, 0, data)])

        return tensor_shares

    def contiguous_bytes(self, part: slice) -> Tensor | None:
        return None


def snapshot_of(tensors: Mapping[str, Tensor], version: PolicyVersion) -> Snapshot:
    """Return a snapshot of tensors.

    Tensors that share their storage (tied weights) go by their first name.
    """
    copies: Tensors = {}
    seen = set[tuple[object, ...]]()
    for name, tensor in tensors.items():
        storage_key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if not tensor.numel() or storage_key not in seen:
            copies[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        seen.add(storage_key)

    types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in copies.items()}
    specs = [TensorSpec(name, tuple(tensor.shape), types[name]) for name, tensor in copies.items()]
    layout = tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))  # so all are aligned in a file

    return Snapshot(version, layout, lambda: nullcontext(PinnedTensors(layout, copies)))


def concat_parts(range_parts: Iterable[RangePart]) -> Tensor:
    """Return the bytes of some parts one behind the other, [n] of uint8."""
    range_parts = list(range_parts)
    return BucketBuffers(page_locked=False).fill_next(range_parts, sum(part.size for part in range_parts))


def buckets(snapshot: Snapshot, bucket_bytes: int) -> Iterator[Tensors]:
    """Yield the snapshot's tensors in groups of at most so many bytes (a larger tensor alone)."""
    with snapshot.hold_copy() as pinned:
        for part in split_buckets(snapshot.layout, bucket_bytes):
            shares = zip(snapshot.layout[part], pinned.collect_parts(part), strict=True)
            yield {
                spec.name: concat_parts(tensor_shares).view(getattr(torch, spec.dtype)).view(spec.shape)
                for spec, tensor_shares in shares
            }


def whole_tensors(snapshot: Snapshot) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Return the snapshot's tensors, and copies of their bytes."""
    with snapshot.hold_copy() as pinned:
        for index, spec in enumerate(snapshot.layout):
            yield spec, concat_parts(pinned.collect_parts(slice(index, index + 1))[0])


def publish(
    tensors: Mapping[str, Tensor],
    directory: Path,
    version: PolicyVersion,
    adapters: Mapping[str, AdapterSpec] | None = None,
) -> WeightsRef:
    """Write a version to files."""
    return VersionWriter(directory, BUCKET_BYTES, adapters=adapters).write_version(
        snapshot_of(tensors, version)
    )
