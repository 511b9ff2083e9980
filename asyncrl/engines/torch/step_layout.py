"""Lays out what one step computes: host bookkeeping in, the tensors of one forward and one sampling out."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from asyncrl.engines.base import Sampling
from asyncrl.engines.torch.sampler import Params, mix_key
from asyncrl.engines.torch.slots import KVCache, Layout, SlotGroup

# Slots are ordered by classes of lengths: up to 256 ids, up to 512, and so on.
_SHORT_LENGTH = 256
# Slots are moved or split into groups if this saves a step so many cells.
_WORTHWHILE_CELLS = 4096


class Chunk(NamedTuple):
    """Prompt tokens [start, end) of a slot to prefill. `is_last`: the prompt ends with this chunk, after
    which the first id is sampled."""

    slot: int
    start: int
    end: int
    is_last: bool


class StepLayout(NamedTuple):
    """Describes one step: the tokens to forward, and how to sample from the logits of some of them."""

    layout: Layout
    logit_indices: torch.Tensor  # [samples] indices of the tokens sampled from
    slots: list[int]  # [samples]
    is_live: torch.Tensor  # [samples] int64: 1, or 0 on a slot that sits out
    params: Params
    stops: torch.Tensor  # [samples, most stop ids of a request], -1 where there are fewer
    limits: torch.Tensor  # [samples] length at which the slot ends
    steps_left: int  # how often the layout can be advanced: 0 with chunks

    def advance(self) -> StepLayout:
        """Return the layout of the next step: the same decoding slots, one token further."""
        self.layout.cells.add_(self.is_live)
        self.layout.positions.add_(self.is_live)  # the positions of the groups are views of this tensor
        return self._replace(steps_left=self.steps_left - 1)


class SlotSampling:
    """Holds the sampling parameters of every slot, as arrays."""

    def __init__(self, slot_count: int) -> None:
        self.seed = np.zeros(slot_count, dtype=np.int64)
        self.temperature = np.ones(slot_count, dtype=np.float32)
        self.greedy = np.zeros(slot_count, dtype=np.bool_)
        self.limits = np.zeros(slot_count, dtype=np.int64)
        self.stops = np.full((slot_count, 1), -1, dtype=np.int64)

    def set_slot(self, slot: int, key: int, sampling: Sampling, limit: int) -> None:
        is_greedy = sampling.temperature == 0
        self.seed[slot] = mix_key(key)
        self.limits[slot] = limit
        self.greedy[slot] = is_greedy
        self.temperature[slot] = 1.0 if is_greedy else sampling.temperature
        missing_columns = len(sampling.stop_ids) - self.stops.shape[1]
        if missing_columns > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing_columns)), constant_values=-1)

        self.stops[slot] = -1
        self.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids

    def reorder_slots(self, source_slots: np.ndarray) -> None:
        """Renumber the slots: slot number i becomes the former number source_slots[i]."""
        for name, values in vars(self).items():
            setattr(self, name, values[source_slots])


def reordered_slots(lengths: np.ndarray) -> np.ndarray | None:
    """Return the slot [slots] whose content each slot should get, or None while the order is good.

    `lengths` [slots] counts the ids of slots that decode, or soon will, and is 0 for other slots. Slots are
    read in place, each as far as the longest slot at or behind its position: long sequences belong in front.
    """
    # k where the length is at most _SHORT_LENGTH · 2^k; -1 where it is 0.
    length_classes = np.ceil(np.log2(np.maximum(lengths, _SHORT_LENGTH) / _SHORT_LENGTH)).astype(np.int64)
    length_classes[lengths == 0] = -1
    cells = _SHORT_LENGTH * 2.0**length_classes * (length_classes >= 0)
    if (_largest_behind(cells) - cells).sum() < _WORTHWHILE_CELLS:
        return None

    sorted_classes = np.sort(length_classes)[::-1]
    misplaced = np.flatnonzero(length_classes != sorted_classes)
    source_slots = np.arange(len(lengths))
    source_slots[misplaced] = misplaced[np.argsort(-length_classes[misplaced], kind="stable")]

    return source_slots


def _largest_behind(values: np.ndarray) -> np.ndarray:
    """Return the largest value at or behind each position."""
    return np.maximum.accumulate(values[::-1])[::-1]


def build_layout(
    cache: KVCache, sampling: SlotSampling, lengths: np.ndarray, chunks: list[Chunk]
) -> StepLayout:
    """Lay out one token for every decoding slot, and the chunks. `lengths` [slots] counts the known ids of
    decoding slots, the last of which is to be forwarded, and is 0 for other slots."""
    decoding_spans = _decoding_spans(lengths, cache.scratch)
    decoding_count = sum(len(span.slots) for span in decoding_spans)
    spans = list(decoding_spans)
    is_decoding = (lengths[:decoding_count] > 0).astype(np.int64)
    last_chunks = [chunk for chunk in chunks if chunk.is_last]
    sampled_slots = np.concatenate(
        [np.arange(decoding_count), np.array([chunk.slot for chunk in last_chunks], dtype=np.int64)]
    )

    last_indices: list[int] = []
    if chunks:
        chunk_starts = np.array([[chunk.start] for chunk in chunks])
        chunk_ends = np.array([[chunk.end] for chunk in chunks])
        prompt_positions = chunk_starts + np.arange(int((chunk_ends - chunk_starts).max()))
        prompt_positions = np.where(prompt_positions < chunk_ends, prompt_positions, cache.scratch)  # padded
        longest = max(chunk.end for chunk in chunks)
        spans.append(_Span(np.array([chunk.slot for chunk in chunks]), prompt_positions, longest))

        width = prompt_positions.shape[1]
        for index, chunk in enumerate(chunks):
            if chunk.is_last:
                last_indices.append(decoding_count + index * width + chunk.end - chunk.start - 1)

    # The spans are packed one after another.
    positions = _tensor(np.concatenate([span.positions.reshape(-1) for span in spans]), cache.device)
    cells = np.concatenate(
        [(span.slots[:, None] * cache.columns + span.positions).reshape(-1) for span in spans]
    )

    groups = []
    start = 0
    for span in spans:
        group_positions = positions[start : start + span.positions.size].view(span.positions.shape)
        columns = cache.columns_for(span.longest)
        groups.append(SlotGroup(_tensor(span.slots, cache.device), group_positions, columns))
        start += span.positions.size

    layout = Layout(_tensor(cells, cache.device), positions, tuple(groups), len(decoding_spans))
    room_left = [
        len(group.columns) - span.longest
        for group, span in zip(layout.groups, spans, strict=True)
        if len(span.slots)
    ]
    logit_indices = np.array([*range(decoding_count), *last_indices], dtype=np.int64)
    is_live = np.concatenate([is_decoding, np.ones(len(last_chunks), dtype=np.int64)])

    params = Params(
        seed=_tensor(sampling.seed[sampled_slots], cache.device),
        temperature=_tensor(sampling.temperature[sampled_slots], cache.device),
        greedy=_tensor(sampling.greedy[sampled_slots], cache.device),
        any_greedy=bool(sampling.greedy[sampled_slots].any()),
    )

    return StepLayout(
        layout=layout,
        logit_indices=_tensor(logit_indices, cache.device),
        slots=sampled_slots.tolist(),
        is_live=_tensor(is_live, cache.device),
        params=params,
        stops=_tensor(sampling.stops[sampled_slots], cache.device),
        limits=_tensor(sampling.limits[sampled_slots], cache.device),
        steps_left=0 if chunks else min(room_left),
    )


class _Span(NamedTuple):
    """A group of a layout, on the host."""

    slots: np.ndarray  # [r]
    positions: np.ndarray  # [r, width]
    longest: int  # number of ids that the tokens attend to


def _decoding_spans(lengths: np.ndarray, scratch: int) -> list[_Span]:
    """Return the slots up to the last decoding slot, in one group or in four."""
    used_lengths = np.trim_zeros(lengths, "b")
    if not len(used_lengths):
        return []

    reach_lengths = _largest_behind(used_lengths)
    middle, saved_cells = _best_split(reach_lengths)
    group_starts = [0]

    # Four groups, of which some may be empty: each number of groups is another kind of step to record.
    if saved_cells >= _WORTHWHILE_CELLS:
        first_quarter = _best_split(reach_lengths[:middle])[0]
        last_quarter = middle + _best_split(reach_lengths[middle:])[0]
        group_starts = [0, first_quarter, middle, last_quarter]

    positions = np.where(used_lengths > 0, used_lengths - 1, scratch)[:, None]
    return [
        _Span(np.arange(start, end), positions[start:end], int(used_lengths[start:end].max(initial=0)))
        for start, end in pairwise([*group_starts, len(used_lengths)])
    ]


def _best_split(reach_lengths: np.ndarray) -> tuple[int, int]:
    """Return the first slot of the second of two groups, and how many cells two groups save. `reach_lengths`
    [r], not empty, does not rise."""
    saved_cells = (reach_lengths[0] - reach_lengths) * np.arange(len(reach_lengths), 0, -1)
    second_start = int(saved_cells.argmax())
    return second_start, int(saved_cells[second_start])


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
