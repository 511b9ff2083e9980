"""Lays out what one step computes: host bookkeeping in, the tensors of one forward and one sampling out."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from asyncrl.engines.base import Sampling
from asyncrl.engines.torch.sampler import Params, mixed
from asyncrl.engines.torch.slots import KVCache, Layout, SlotGroup

_SHORT = 256  # slots are ordered by length: up to this one, up to twice of it, and so on
_WORTH = 4096  # cells that a step reads needlessly, for which slots are moved or cut into groups


class Chunk(NamedTuple):
    """Prompt tokens [start, end) of a slot to prefill; after the `last` chunk the first id is sampled."""

    slot: int
    start: int
    end: int
    last: bool


class StepLayout(NamedTuple):
    """Describes one step: the tokens to forward, and how to sample from the logits of some of them."""

    layout: Layout
    keep: torch.Tensor  # [samples] indices of the tokens sampled from
    slots: list[int]  # [samples]
    live: torch.Tensor  # [samples] int64: 1, or 0 on a slot that sits out
    params: Params
    stops: torch.Tensor  # [samples, most stop ids of a request], -1 where there are fewer
    limits: torch.Tensor  # [samples] length at which the slot ends
    further: int  # how many times it can be advanced: 0 with chunks

    def advance(self) -> StepLayout:
        """Return the same decoding slots one token further."""
        self.layout.cells.add_(self.live)
        self.layout.positions.add_(self.live)  # those of its groups are views of them
        return self._replace(further=self.further - 1)


class SlotSampling:
    """Holds the sampling parameters of every slot, as arrays."""

    def __init__(self, slots: int) -> None:
        self.seed = np.zeros(slots, dtype=np.int64)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.greedy = np.zeros(slots, dtype=np.bool_)
        self.limits = np.zeros(slots, dtype=np.int64)
        self.stops = np.full((slots, 1), -1, dtype=np.int64)

    def set(self, slot: int, key: int, sampling: Sampling, limit: int) -> None:
        greedy = sampling.temperature == 0
        self.seed[slot], self.limits[slot] = mixed(key), limit
        self.greedy[slot], self.temperature[slot] = greedy, 1.0 if greedy else sampling.temperature
        missing = len(sampling.stop_ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids

    def move(self, sources: np.ndarray) -> None:
        """Slot number i becomes the one that was number sources[i]."""
        for name, values in vars(self).items():
            setattr(self, name, values[sources])

    def params(self, slots: np.ndarray, device: torch.device) -> Params:
        return Params(
            seed=_tensor(self.seed[slots], device),
            temperature=_tensor(self.temperature[slots], device),
            greedy=_tensor(self.greedy[slots], device),
            any_greedy=bool(self.greedy[slots].any()),
        )


def reordered(lengths: np.ndarray) -> np.ndarray | None:
    """`lengths` [slots] counts the ids of slots that decode, or soon will, and is 0 for others. Slots are
    read in place, each as far as the longest one at or behind it: long rows belong in front, others at the
    end. Returns the slot [slots] whose content each slot should get, or None while the order is good."""
    # k where the length is at most _SHORT · 2^k; -1 where it is 0.
    classes = np.ceil(np.log2(np.maximum(lengths, _SHORT) / _SHORT)).astype(np.int64)
    classes[lengths == 0] = -1
    cells = _SHORT * 2.0**classes * (classes >= 0)
    if (_behind(cells) - cells).sum() < _WORTH:
        return None
    order = np.sort(classes)[::-1]
    wrong = np.flatnonzero(classes != order)
    sources = np.arange(len(lengths))
    sources[wrong] = wrong[np.argsort(-classes[wrong], kind="stable")]
    return sources


def _behind(values: np.ndarray) -> np.ndarray:
    """Return the largest value at or behind each place."""
    return np.maximum.accumulate(values[::-1])[::-1]


def build(cache: KVCache, sampling: SlotSampling, lengths: np.ndarray, chunks: list[Chunk]) -> StepLayout:
    """Lay out one token for every decoding slot, and the chunks. `lengths` [slots] counts the known ids of
    decoding slots, the last of which is the one to forward, and is 0 for others."""
    decoding = _decoding(lengths, cache.scratch)
    count = sum(len(span.slots) for span in decoding)
    spans = list(decoding)
    active = (lengths[:count] > 0).astype(np.int64)
    last = [chunk for chunk in chunks if chunk.last]
    samples = np.concatenate([np.arange(count), np.array([chunk.slot for chunk in last], dtype=np.int64)])
    ends: list[int] = []
    if chunks:
        start = np.array([[chunk.start] for chunk in chunks])
        end = np.array([[chunk.end] for chunk in chunks])
        filling = start + np.arange(int((end - start).max()))
        filling = np.where(filling < end, filling, cache.scratch)  # padded
        longest = max(chunk.end for chunk in chunks)
        spans.append(_Span(np.array([chunk.slot for chunk in chunks]), filling, longest))
        width = filling.shape[1]
        ends = [count + i * width + c.end - c.start - 1 for i, c in enumerate(chunks) if c.last]
    layout = _layout(cache, spans, len(decoding))
    room = [len(g.columns) - s.longest for g, s in zip(layout.groups, spans, strict=True) if len(s.slots)]
    return StepLayout(
        layout=layout,
        keep=_tensor(np.array([*range(count), *ends], dtype=np.int64), cache.device),
        slots=samples.tolist(),
        live=_tensor(np.concatenate([active, np.ones(len(last), dtype=np.int64)]), cache.device),
        params=sampling.params(samples, cache.device),
        stops=_tensor(sampling.stops[samples], cache.device),
        limits=_tensor(sampling.limits[samples], cache.device),
        further=0 if chunks else min(room),
    )


class _Span(NamedTuple):
    """A group of a layout, on the host."""

    slots: np.ndarray  # [r]
    positions: np.ndarray  # [r, width]
    longest: int  # ids that its tokens attend to


def _decoding(lengths: np.ndarray, scratch: int) -> list[_Span]:
    """The slots up to the last one that decodes, in one group or in four."""
    used = np.trim_zeros(lengths, "b")
    if not len(used):
        return []
    reach = _behind(used)
    half, saved = _cut(reach)
    cuts = [0]
    if saved >= _WORTH:  # four, of which some may be empty: each number of groups is a kind of step to record
        cuts = [0, _cut(reach[:half])[0], half, half + _cut(reach[half:])[0]]
    positions = np.where(used > 0, used - 1, scratch)[:, None]
    return [
        _Span(np.arange(start, end), positions[start:end], int(used[start:end].max(initial=0)))
        for start, end in pairwise([*cuts, len(used)])
    ]


def _cut(reach: np.ndarray) -> tuple[int, int]:
    """Return where to cut slots in two, and how many cells that saves. `reach` [r], not empty, does not
    rise."""
    saved = (reach[0] - reach) * np.arange(len(reach), 0, -1)
    at = int(saved.argmax())
    return at, int(saved[at])


def _layout(cache: KVCache, spans: list[_Span], decoding: int) -> Layout:
    """Pack the spans one after another; the first `decoding` ones decode."""
    flat = _tensor(np.concatenate([span.positions.reshape(-1) for span in spans]), cache.device)
    cells = np.concatenate([(s.slots[:, None] * cache.columns + s.positions).reshape(-1) for s in spans])
    groups = []
    start = 0
    for slots, positions, longest in spans:
        at = flat[start : start + positions.size].view(positions.shape)
        groups.append(SlotGroup(_tensor(slots, cache.device), at, cache.reach(longest)))
        start += positions.size
    return Layout(_tensor(cells, cache.device), flat, tuple(groups), decoding)


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
