"""A packed micro-batch in parts: together they are the whole, whatever is selected of it."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncrl.trainer.scores import Selected, in_parts
from asyncrl.trainer.world import SequenceRanks


@pytest.mark.parametrize("count", [2, 3, 5])
def test_parts_hold_what_they_predict_and_all_are_given_all(count: int) -> None:
    """13 tokens; of the first row only the last is selected, so the first of five parts predicts nothing."""
    rows = [np.arange(6), np.arange(10, 17)]
    row, position = np.array([1, 0, 1, 1, 1]), np.array([6, 5, 1, 3, 2])
    routes = [np.stack([ids, ids], axis=1).astype(np.int32) for ids in (rows[0], rows[1][:-1])]
    tokens = Selected.of(rows, row, position, torch.linspace(0.5, 1.5, 5), "packed", routes)
    assert tokens.routes is not None and tokens.positions is not None
    parts, pieces = list[Selected](), list[Tensor]()

    def run(part: Selected) -> tuple[Tensor, None]:
        parts.append(part)
        return part.labels, None

    def exchange(ranks: SequenceRanks, mine: Tensor, most: int) -> Tensor:
        """What each rank has, once all of them have run."""
        pieces.append(pad(mine, (0, most - len(mine))))
        return torch.cat((pieces * count)[:count])

    with mock.patch.object(SequenceRanks, "gather", exchange):
        for index in range(count):
            found = in_parts(run, tokens, SequenceRanks(mock.Mock(), index, count))
    assert found[1] is None and found[0] is not None and torch.equal(found[0], tokens.labels)
    for name in ("ids", "positions"):
        together = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(together[:, :13], getattr(tokens, name)) and not together[:, 13:].any()
    laid = torch.cat([part.routes for part in parts if part.routes is not None])
    assert torch.equal(laid[:13], tokens.routes) and (laid[13:] == -1).all()
    assert len({part.ids.shape for part in parts}) == 1
    for part in parts:
        assert torch.equal(part.ids[0, part.predictor] + 1, part.labels)  # ids of a row count up
    assert count < 5 or len(parts[0].labels) == 0


def test_padded_rows_are_run_whole_by_each() -> None:
    tokens = Selected.of([np.arange(4)], np.array([0]), np.array([2]), torch.ones(1))
    assert in_parts(lambda part: (part.ids,), tokens, SequenceRanks(mock.Mock(), 1, 2))[0] is tokens.ids
