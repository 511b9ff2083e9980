"""A micro-batch on the ranks that share its sequence: each scores what its part predicts, and all get all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncrl.trainer.routes import UNKNOWN
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.ulysses import SequenceRanks

Run = Callable[[Selected], Iterable[Tensor | None]]


def in_parts(run: Run, tokens: Selected, ranks: SequenceRanks | None) -> list[Tensor | None]:
    """Returns what `run` computes of the selected tokens, columns of [N]. With `ranks` a packed sequence is
    cut into as many equal parts, of which each rank runs its own; padded rows are run whole by every rank."""
    if ranks is None or tokens.forest is None:
        return list(run(tokens))
    owner = tokens.predictor // ranks.width(tokens.ids.numel())
    counts = np.bincount(owner, minlength=ranks.count)
    starts, most = np.cumsum(counts) - counts, int(counts.max())
    order = np.argsort(owner, kind="stable")  # rank by rank
    place = np.empty_like(order)  # of each token, where all are gathered
    place[order] = owner[order] * most + np.arange(len(order)) - starts[owner[order]]
    mine = order[starts[ranks.index] :][: counts[ranks.index]]
    there = torch.from_numpy(place).to(tokens.ids.device)
    found = run(_part(tokens, mine, ranks))
    return [None if column is None else ranks.gather(column, most)[there] for column in found]


def _part(tokens: Selected, mine: np.ndarray, ranks: SequenceRanks) -> Selected:
    """This rank's part of a sequence, filled up with id 0, and the selected tokens that it predicts."""
    assert tokens.positions is not None, "packed rows have positions"
    size = tokens.ids.numel()
    width = ranks.width(size)
    start, short = ranks.index * width, ranks.count * width - size
    own = slice(start, start + width)
    ids, positions = (pad(x, (0, short))[:, own] for x in (tokens.ids, tokens.positions))
    routes = tokens.routes
    if routes is not None:
        routes = pad(routes, (0, 0, 0, short), value=UNKNOWN)[own]
    chosen = torch.from_numpy(mine).to(ids.device)
    labels, temperature = tokens.labels[chosen], tokens.temperature[chosen]
    predictor = tokens.predictor[mine] - start
    return Selected(ids, labels, predictor, temperature, positions, tokens.forest, routes, ranks)
