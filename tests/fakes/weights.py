"""Versions of tensors at hand, as a trainer would publish them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from torch import Tensor

from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.manifest import ITEM_BYTES, TensorSpec, WeightsRef
from asyncrl.weights.snapshot import Snapshot, Tensors

BUCKET_BYTES = 256 << 20


def snapshot_of(tensors: Mapping[str, Tensor], version: PolicyVersion) -> Snapshot:
    """Of tensors that share their storage (tied weights) the first name is taken."""
    kept: Tensors = {}
    seen = set[tuple[object, ...]]()
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if not tensor.numel() or place not in seen:
            kept[name] = tensor.detach().cpu().contiguous()
        seen.add(place)
    types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in kept.items()}
    specs = [TensorSpec(name, tuple(tensor.shape), types[name]) for name, tensor in kept.items()]
    layout = tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))  # so all are aligned in a file

    def read(part: slice) -> Tensors:
        return {spec.name: kept[spec.name] for spec in layout[part]}

    return Snapshot(version, layout, 0.0, lambda: nullcontext(read))


def publish(tensors: Mapping[str, Tensor], directory: Path, version: PolicyVersion) -> WeightsRef:
    """Write a version to files."""
    return disk.write(snapshot_of(tensors, version), directory, BUCKET_BYTES)
