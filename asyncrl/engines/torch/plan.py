"""What one step computes: host bookkeeping in, the tensors of one forward and one sampling out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncrl.engines.base import Sampling
from asyncrl.engines.torch.sampler import Params, mixed
from asyncrl.engines.torch.slots import Board, Layout, SlotGroup, reach

_SPARSE = 2  # rows are read in place up to the highest one, if at least 1/2 of those decode


class Chunk(NamedTuple):
    """Prompt tokens [start, end) of a row to prefill; after the `last` chunk the first id is sampled."""

    row: int
    start: int
    end: int
    last: bool


class DecodePlan(NamedTuple):
    """One step: the tokens to forward, and how to sample from the logits of some of them."""

    layout: Layout
    keep: torch.Tensor | None  # [samples] indices of the tokens sampled from; None: all
    rows: list[int]  # [samples]
    live: torch.Tensor  # [samples] int64: 1, or 0 on a row that sits out
    params: Params
    stops: torch.Tensor  # [samples, most stop ids of a request], -1 where there are fewer
    limits: torch.Tensor  # [samples] length at which the row ends

    def advance(self, reach: int) -> DecodePlan:
        """The same decoding rows one token further; attention now spans `reach` keys."""
        layout = self.layout
        layout.cells.add_(self.live)
        layout.positions.add_(self.live)
        group = layout.groups[0]._replace(reach=reach)  # its positions are a view of the layout's
        return self._replace(layout=layout._replace(groups=(group,)))


class Knobs:
    """The sampling parameters of every row, as arrays."""

    def __init__(self, slots: int) -> None:
        self.seed = np.zeros(slots, dtype=np.int64)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.greedy = np.zeros(slots, dtype=np.bool_)
        self.limits = np.zeros(slots, dtype=np.int64)
        self.stops = np.full((slots, 1), -1, dtype=np.int64)

    def set(self, row: int, key: int, sampling: Sampling, limit: int) -> None:
        greedy = sampling.temperature == 0
        self.seed[row], self.limits[row] = mixed(key), limit
        self.greedy[row], self.temperature[row] = greedy, 1.0 if greedy else sampling.temperature
        missing = len(sampling.stop_ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(sampling.stop_ids)] = sampling.stop_ids

    def params(self, rows: np.ndarray, device: torch.device) -> Params:
        return Params(
            seed=_tensor(self.seed[rows], device),
            temperature=_tensor(self.temperature[rows], device),
            greedy=_tensor(self.greedy[rows], device),
            any_greedy=bool(self.greedy[rows].any()),
        )


def build(
    board: Board, knobs: Knobs, lengths: np.ndarray, live: np.ndarray, chunks: list[Chunk]
) -> DecodePlan:
    """One token for every live row (`live` [slots] is 1), and the chunks. `lengths` [slots] counts the known
    ids of live rows; the last of them is the one to forward."""
    rows = _decode_rows(live)
    active = live[rows]
    spans = [(rows, np.where(active == 1, lengths[rows] - 1, board.scratch)[:, None])]
    last = [chunk for chunk in chunks if chunk.last]
    samples = np.concatenate([rows, np.array([chunk.row for chunk in last], dtype=np.int64)])
    keep = None
    if chunks:
        filling = _fill_positions(chunks, board.scratch)
        spans.append((np.array([chunk.row for chunk in chunks]), filling))
        width = filling.shape[1]
        ends = [len(rows) + i * width + c.end - c.start - 1 for i, c in enumerate(chunks) if c.last]
        keep = _tensor(np.array([*range(len(rows)), *ends], dtype=np.int64), board.device)
    return DecodePlan(
        layout=_layout(board, [span for span in spans if len(span[0])]),
        keep=keep,
        rows=samples.tolist(),
        live=_tensor(np.concatenate([active, np.ones(len(last), dtype=np.int64)]), board.device),
        params=knobs.params(samples, board.device),
        stops=_tensor(knobs.stops[samples], board.device),
        limits=_tensor(knobs.limits[samples], board.device),
    )


def _decode_rows(live: np.ndarray) -> np.ndarray:
    """The live rows, filled up with the rows below the highest one: that saves a copy of the KV, and pays for
    the rows that sit out."""
    rows = np.flatnonzero(live)
    top = int(rows[-1]) + 1 if len(rows) else 0
    return np.arange(top) if top <= _SPARSE * len(rows) else rows


def _fill_positions(chunks: list[Chunk], scratch: int) -> np.ndarray:
    """[chunks, longest]: positions of each chunk, padded with the scratch position."""
    start = np.array([[chunk.start] for chunk in chunks])
    end = np.array([[chunk.end] for chunk in chunks])
    positions = start + np.arange(int((end - start).max()))
    return np.where(positions < end, positions, scratch)


def _layout(board: Board, spans: list[tuple[np.ndarray, np.ndarray]]) -> Layout:
    """Pack (rows [r], positions [r, width]) one after another. Adjacent rows are read in place."""
    flat = _tensor(np.concatenate([at.reshape(-1) for _, at in spans]), board.device)
    cells = np.concatenate([(rows[:, None] * board.columns + at).reshape(-1) for rows, at in spans])
    groups, start = [], 0
    for rows, positions in spans:
        adjacent = bool((np.diff(rows) == 1).all())
        index = slice(int(rows[0]), int(rows[-1]) + 1) if adjacent else _tensor(rows, board.device)
        longest = int(positions[positions < board.scratch].max()) + 1
        at = flat[start : start + positions.size].view(positions.shape)
        groups.append(SlotGroup(start, index, at, reach(longest, board.max_len)))
        start += positions.size
    return Layout(_tensor(cells, board.device), flat, tuple(groups))


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
