"""A policy version in host memory, read bucket by bucket: what every way of publishing starts from.

The tensors of a version may lie in pieces on many ranks. A collector reads them a bucket at a time, so the
whole model is never in one process because of a publish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import Layout, TensorSpec
from asyncrl.weights.tensorfile import Earlier

Tensors = dict[str, Tensor]
Bytes = np.ndarray  # [n], uint8
Read = Callable[[slice], Tensors]  # the whole tensors of a slice of the layout


@dataclass(frozen=True)
class Snapshot:
    """A version in host memory. `seconds`: what the trainer waited for it; `copied`: number of the copy, or 0
    if it cannot be read as changes of another one. Of ranks that collect."""

    version: PolicyVersion
    layout: Layout  # in the order in which `buckets` yields
    seconds: float
    pin: Callable[..., AbstractContextManager[Read]]  # entering raises Superseded; of an Earlier, or nothing
    copied: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.layout)

    def buckets(self, bucket_bytes: int, earlier: Earlier | None = None) -> Iterator[Tensors]:
        """All tensors, whole and on the CPU, in groups of at most `bucket_bytes` (a larger tensor alone). Of
        an `earlier` copy ranks need to deliver only what has changed since.

        May be read again, from any thread. While an iterator is open the memory behind it is not written
        over; close one that is left early. A bucket may be a view of that memory: not to be written to, nor
        kept for longer. Raises Superseded, at the start only, when a newer version has taken its place, and
        WeightsError when a rank does not deliver.
        """
        with self.pin(earlier) if earlier is not None and self.copied else self.pin() as read:
            for part in split(self.layout, bucket_bytes):
                yield read(part)

    def chunks(self, bucket_bytes: int, earlier: Earlier | None = None) -> Iterator[tuple[TensorSpec, Bytes]]:
        """`buckets`, tensor by tensor and as bytes."""
        specs = iter(self.layout)
        for bucket in self.buckets(bucket_bytes, earlier):
            for tensor in bucket.values():
                yield next(specs), as_bytes(tensor)


def as_bytes(tensor: Tensor) -> Bytes:
    """The bytes of a CPU tensor, not copied if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def split(layout: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[slice]:
    """Consecutive tensors of at most `bucket_bytes` together; a larger one alone."""
    start, size = 0, 0
    for index, spec in enumerate(layout):
        if index > start and size + spec.nbytes > bucket_bytes:
            yield slice(start, index)
            start, size = index, 0
        size += spec.nbytes
    if layout:
        yield slice(start, len(layout))
