"""What one step computes: host bookkeeping in, the tensors of one forward and one sampling out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncrl.engines.base import Sampling
from asyncrl.engines.torch.sampler import Params, mixed
from asyncrl.engines.torch.slots import KVCache, Layout, SlotGroup

_SPARSE = 2  # slots are read in place up to the highest one, if at least 1/2 of those decode


class Chunk(NamedTuple):
    """Prompt tokens [start, end) of a slot to prefill; after the `last` chunk the first id is sampled."""

    slot: int
    start: int
    end: int
    last: bool


class DecodePlan(NamedTuple):
    """One step: the tokens to forward, and how to sample from the logits of some of them."""

    layout: Layout
    keep: torch.Tensor  # [samples] indices of the tokens sampled from
    slots: list[int]  # [samples]
    live: torch.Tensor  # [samples] int64: 1, or 0 on a slot that sits out
    params: Params
    stops: torch.Tensor  # [samples, most stop ids of a request], -1 where there are fewer
    limits: torch.Tensor  # [samples] length at which the slot ends

    def advance(self, columns: torch.Tensor) -> DecodePlan:
        """The same decoding slots one token further; attention now spans these columns."""
        layout = self.layout
        layout.cells.add_(self.live)
        layout.positions.add_(self.live)
        group = layout.groups[0]._replace(columns=columns)  # its positions are a view of the layout's
        return self._replace(layout=layout._replace(groups=(group,)))


class SlotSampling:
    """The sampling parameters of every slot, as arrays."""

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

    def params(self, slots: np.ndarray, device: torch.device) -> Params:
        return Params(
            seed=_tensor(self.seed[slots], device),
            temperature=_tensor(self.temperature[slots], device),
            greedy=_tensor(self.greedy[slots], device),
            any_greedy=bool(self.greedy[slots].any()),
        )


def build(
    cache: KVCache, sampling: SlotSampling, lengths: np.ndarray, live: np.ndarray, chunks: list[Chunk]
) -> DecodePlan:
    """One token for every live slot (`live` [slots] is 1), and the chunks. `lengths` [slots] counts the known
    ids of live slots; the last of them is the one to forward."""
    slots = _decode_slots(live)
    active = live[slots]
    spans = [(slots, np.where(active == 1, lengths[slots] - 1, cache.scratch)[:, None])]
    last = [chunk for chunk in chunks if chunk.last]
    samples = np.concatenate([slots, np.array([chunk.slot for chunk in last], dtype=np.int64)])
    ends: list[int] = []
    if chunks:
        filling = _fill_positions(chunks, cache.scratch)
        spans.append((np.array([chunk.slot for chunk in chunks]), filling))
        width = filling.shape[1]
        ends = [len(slots) + i * width + c.end - c.start - 1 for i, c in enumerate(chunks) if c.last]
    return DecodePlan(
        layout=_layout(cache, [span for span in spans if len(span[0])]),
        keep=_tensor(np.array([*range(len(slots)), *ends], dtype=np.int64), cache.device),
        slots=samples.tolist(),
        live=_tensor(np.concatenate([active, np.ones(len(last), dtype=np.int64)]), cache.device),
        params=sampling.params(samples, cache.device),
        stops=_tensor(sampling.stops[samples], cache.device),
        limits=_tensor(sampling.limits[samples], cache.device),
    )


def _decode_slots(live: np.ndarray) -> np.ndarray:
    """The live slots, filled up with the slots below the highest one where few are missing: that saves a copy
    of the KV, which costs more than computing the slots that sit out."""
    slots = np.flatnonzero(live)
    top = int(slots[-1]) + 1 if len(slots) else 0
    return np.arange(top) if top <= _SPARSE * len(slots) else slots


def _fill_positions(chunks: list[Chunk], scratch: int) -> np.ndarray:
    """[chunks, longest]: positions of each chunk, padded with the scratch position."""
    start = np.array([[chunk.start] for chunk in chunks])
    end = np.array([[chunk.end] for chunk in chunks])
    positions = start + np.arange(int((end - start).max()))
    return np.where(positions < end, positions, scratch)


def _layout(cache: KVCache, spans: list[tuple[np.ndarray, np.ndarray]]) -> Layout:
    """Pack (slots [r], positions [r, width]) one after another."""
    flat = _tensor(np.concatenate([at.reshape(-1) for _, at in spans]), cache.device)
    cells = np.concatenate([(slots[:, None] * cache.columns + at).reshape(-1) for slots, at in spans])
    groups, start = [], 0
    for slots, positions in spans:
        longest = int(positions[positions < cache.scratch].max()) + 1
        at = flat[start : start + positions.size].view(positions.shape)
        groups.append(SlotGroup(_tensor(slots, cache.device), at, cache.reach(longest)))
        start += positions.size
    dense = bool((spans[0][0] == np.arange(len(spans[0][0]))).all())
    return Layout(_tensor(cells, cache.device), flat, tuple(groups), dense)


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
