"""The teacher of a policy: a model beside the policy, or the scores of servers for the tokens of each
turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.kl import divergence, lumped
from asyncrl.types import TokenScores, Turn


@dataclass(frozen=True)
class Teacher:
    """Says how the policy is compared with a teacher: by a name of DIVERGENCES, over the whole vocabulary or
    over classes (`top_k` > 0). `features` [N, ·] of the tokens that a rank scores, and `logits_of` for their
    logits, without gradient; None: the policy is compared with TeacherScores."""

    name: str
    top_k: int
    features: Tensor | None = None
    logits_of: Callable[[Tensor], Tensor] | None = None


class TeacherScores(NamedTuple):
    """Holds the scores of servers for each token [N]: the likeliest ids [N, k], their log-probs, and the
    log-prob of the token itself."""

    ids: Tensor
    top_logprobs: Tensor
    sampled_logprobs: Tensor

    @classmethod
    def concatenate(cls, topk: Sequence[tuple[np.ndarray, np.ndarray]], reference: Tensor) -> TeacherScores:
        """Join the scores of episodes. A token without scores, which is not trainable, has zeros."""
        ids, top = (torch.from_numpy(np.concatenate(column)) for column in zip(*topk, strict=True))
        return cls(ids.long(), top.to(reference.dtype).nan_to_num(nan=-math.inf), reference.nan_to_num())


def distances(
    table: Tensor, labels: Tensor, teacher_table: Tensor | TeacherScores, teacher: Teacher
) -> dict[str, Tensor]:
    """Return the divergence between the policy's log-probs [N, V] and a teacher's table or scores, and the
    teacher's log-probs of the labels."""
    sampled_ids = labels[:, None]
    if isinstance(teacher_table, Tensor):
        reference = teacher_table.gather(1, sampled_ids)[:, 0]
        if not teacher.top_k:
            return {"divergence": divergence(table, teacher_table, teacher.name), "reference": reference}
        # Vocabularies may be filled up to different sizes.
        known_logprobs = teacher_table[:, : table.shape[1]]
        top_logprobs, ids = known_logprobs.topk(min(teacher.top_k, known_logprobs.shape[1]))
        teacher_table = TeacherScores(ids, top_logprobs, reference)

    ids = teacher_table.ids.clamp(0, table.shape[1] - 1)
    is_repeated = (ids[:, :, None] == ids[:, None]).sum(-1) > 1  # SGLang calls its last id 0
    is_excluded = is_repeated | (ids != teacher_table.ids) | (ids == sampled_ids)
    policy_classes = lumped(table.gather(1, ids), table.gather(1, sampled_ids)[:, 0], is_excluded)
    divergences = divergence(
        policy_classes,
        lumped(teacher_table.top_logprobs, teacher_table.sampled_logprobs, is_excluded),
        teacher.name,
    )

    return {"divergence": divergences.to(table.dtype), "reference": teacher_table.sampled_logprobs}


def scores_of(turn: Turn, topk: int) -> TokenScores:
    """Return the scorer's results for a turn; NaN and zeros without a scorer, or if it was asked for another
    number of likeliest tokens."""
    generation = turn.generation
    id_bytes = 4 * len(generation.ids)
    if generation.scores and (not topk or len(generation.scores.ids) == topk * id_bytes):
        return generation.scores
    unknown_logprobs = np.full(len(generation.ids), np.nan, "<f4").tobytes()
    return TokenScores(unknown_logprobs, bytes(topk * id_bytes), bytes(topk * id_bytes))


def references(turns: Sequence[Turn], topk: int) -> np.ndarray:
    """Return the scorer's log-probs of the turns' tokens."""
    encoded_logprobs = b"".join(scores_of(turn, topk).logprobs for turn in turns)
    return np.frombuffer(encoded_logprobs, "<f4").astype(np.float64)


def topk_of_turns(turns: Sequence[Turn], topk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scorer's likeliest tokens [T, topk], and their log-probs."""
    scores = [scores_of(turn, topk) for turn in turns]
    ids = np.frombuffer(b"".join(score.ids for score in scores), "<i4")
    logprobs = np.frombuffer(b"".join(score.top for score in scores), "<f4")
    return ids.reshape(-1, topk), logprobs.reshape(-1, topk)


def teacher_sequences_of(sequences: Sequence[Sequence[int]], turns: Sequence[Turn]) -> tuple[np.ndarray, ...]:
    """Return the sequences behind the teacher's prompts; none where these are the policy's."""
    turn_by_sequence = {turn.row: turn for turn in turns if turn.taught}
    if not turn_by_sequence:
        return ()
    teacher_ids = (
        [*turn_by_sequence[index].taught, *sequence[len(turn_by_sequence[index].context) :]]
        for index, sequence in enumerate(sequences)
    )
    return tuple(np.asarray(sequence, dtype=np.int32) for sequence in teacher_ids)
