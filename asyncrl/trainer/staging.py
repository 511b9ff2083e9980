"""Brings tensors of main memory to a GPU without waiting for the GPU.

    tensors ──copied──► one page-locked buffer ──one transfer──► one buffer of the GPU ──► views of the buffer

A transfer from memory that is not page-locked waits until the GPU has finished all earlier work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: the largest number has as many


class Mappable(Protocol):
    """Has tensors, and can be copied with other tensors in their places."""

    def with_tensors(self, convert: Callable[[Tensor], Tensor], device: torch.device) -> Self: ...


M = TypeVar("M", bound=Mappable)


def moved_to_device(value: M, device: torch.device) -> M:
    """Return the value with all tensors on this device, by one transfer."""
    tensors = list[Tensor]()

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    value.with_tensors(collect, device)
    on_device = iter(to_device(tensors, device))
    return value.with_tensors(lambda _: next(on_device), device)


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on this device, as views of one buffer; on a CPU, the tensors themselves."""
    if device.type == "cpu" or not tensors:
        return list(tensors)

    ends = np.cumsum([-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]).tolist()
    buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for view, tensor in zip(_tensor_views(buffer, tensors, ends), tensors, strict=True):
        view.copy_(tensor)
    return _tensor_views(buffer.to(device, non_blocking=True), tensors, ends)


def _tensor_views(buffer: Tensor, tensors: Sequence[Tensor], ends: Sequence[int]) -> list[Tensor]:
    """Return the parts of the buffer, each with type and shape of its tensor."""
    starts = [0, *ends[:-1]]
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
