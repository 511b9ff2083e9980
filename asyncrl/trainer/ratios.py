"""Saves pi/mu of a step's tokens, and what the correction dropped, for the viewer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from asyncrl.observe import ratios
from asyncrl.observe.transcripts import is_kept
from asyncrl.trainer.batch import Example


class Ratios:
    """The ratios of one rank: `note` in each micro-batch, `save` after the step."""

    def __init__(self, run_dir: Path, rank: int, groups_per_batch: int) -> None:
        self._run_dir, self._rank, self._groups = run_dir, rank, groups_per_batch
        self._found: dict[str, ratios.TokenRatios] = {}

    def note(self, examples: Sequence[Example], log_ratio: Tensor, dropped: Tensor) -> None:
        """Tensors are [N], over the model tokens of all examples in order. What was noted of an episode
        earlier in the step stays: the policy had not moved."""
        edges = np.cumsum([0, *(e.tokens for e in examples)]).tolist()
        for e, (start, end) in zip(examples, pairwise(edges), strict=True):
            uid, member = e.planned.uid, int(e.planned.uid[len(e.group) + 1 :])
            if uid not in self._found and is_kept(int(e.group), member, self._groups):
                own = slice(start, min(end, start + ratios.MOST_TOKENS))
                values = [round(value, 5) for value in log_ratio[own].tolist()]
                self._found[uid] = ratios.TokenRatios(uid, values, dropped[own].tolist())

    def save(self, step: int) -> None:
        """Write what was noted, as of this step (counted from 1), and forget it."""
        ratios.save(self._run_dir, step, self._rank, self._found.values())
        self._found = {}
