"""What a policy learns from a teacher: a model beside it, or what servers told of the tokens of each turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.kl import divergence, lumped
from asyncrl.types import TokenScores, Turn

UNTOLD = -1e30  # a log-prob that nobody told


@dataclass(frozen=True)
class Teacher:
    """What the policy is compared with, and how: a name of DIVERGENCES, over the whole vocabulary or classes
    (`top_k` > 0). `features` [N, ·] of the tokens that a rank scores, and their logits, without gradient;
    without them, it is compared with what was told of the tokens."""

    name: str
    top_k: int
    features: Tensor | None = None
    logits_of: Callable[[Tensor], Tensor] | None = None


class Told(NamedTuple):
    """What servers told of each token [N]: the likeliest ids [N, k], their log-probs, and that of the token
    itself."""

    ids: Tensor
    top: Tensor
    sampled: Tensor

    @classmethod
    def of(cls, likeliest: Sequence[tuple[np.ndarray, np.ndarray]], reference: Tensor) -> Told:
        """Those of some episodes. A token of which nothing was told, and which is not fresh, has zeros."""
        ids, top = (torch.from_numpy(np.concatenate(column)) for column in zip(*likeliest, strict=True))
        return cls(ids.long(), top.to(reference.dtype).nan_to_num(nan=UNTOLD), reference.nan_to_num())


def distances(table: Tensor, labels: Tensor, other: Tensor | Told, teacher: Teacher) -> dict[str, Tensor]:
    """The divergence between one's own log-probs [N, V] and a teacher's table, or what it told; and the
    teacher's log-probs of the labels."""
    sampled = labels[:, None]
    if isinstance(other, Tensor):
        reference = other.gather(1, sampled)[:, 0]
        if not teacher.top_k:
            return {"divergence": divergence(table, other, teacher.name), "reference": reference}
        known = other[:, : table.shape[1]]  # vocabularies may be filled up to different sizes
        top, ids = known.topk(min(teacher.top_k, known.shape[1]))
        other = Told(ids, top, reference)
    twice = other.ids == sampled
    own = lumped(table.gather(1, other.ids), table.gather(1, sampled)[:, 0], twice)
    found = divergence(own, lumped(other.top, other.sampled, twice), teacher.name)
    return {"divergence": found.to(table.dtype), "reference": other.sampled}


def scores_of(turns: Sequence[Turn]) -> np.ndarray:
    """Returns what the first scorer of each turn makes of its tokens: the reference, or else a teacher."""
    told = [
        np.frombuffer(turn.scores[0].logprobs, "<f4") if turn.scores else np.full(len(turn.ids), np.nan)
        for turn in turns
    ]
    return np.concatenate([np.empty(0), *told])


def likeliest(turns: Sequence[Turn], top: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens [T, top] that this scorer finds likeliest, and their log-probs; zeros where it tells
    nothing."""
    ids, logs = [np.empty((0, top), "<i4")], [np.empty((0, top), "<f4")]
    for turn in turns:
        told = turn.scores[0] if turn.scores else TokenScores("", b"")
        nothing = bytes(4 * top * len(turn.ids))
        ids.append(np.frombuffer(told.ids or nothing, "<i4").reshape(len(turn.ids), -1))
        logs.append(np.frombuffer(told.top or nothing, "<f4").reshape(len(turn.ids), -1))
    return np.concatenate(ids), np.concatenate(logs)


def taught_rows(rows: Sequence[Sequence[int]], turns: Sequence[Turn]) -> tuple[np.ndarray, ...]:
    """The rows with the prompts that a teacher reads; none where these are the same."""
    begun = {turn.row: turn for turn in turns if turn.taught}
    if not begun:
        return ()
    ids = ([*begun[i].taught, *row[len(begun[i].context) :]] for i, row in enumerate(rows))
    return tuple(np.asarray(row, dtype=np.int32) for row in ids)
