"""Lays out the sequences of a micro-batch as a forest: a prefix that sequences share is one node, computed
once.

    sequences  a b c d      nodes  [a b] ─┬─ [c d]      flat  a b c d e f g
               a b e               [f g]  └─ [e]        every node attends to its ancestors and itself
               f g
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 16  # shared ids; fewer are computed once per sequence


class Forest(NamedTuple):
    """Holds T tokens, node after node, a parent before its children.

    `ids` and `positions` [T]: positions within a sequence. `paths`: for each node the indices of the tokens
    that its last token sees, in order: its ancestors' tokens, then its own `sizes` tokens. `sequences`: for
    each sequence the indices of its tokens.
    """

    ids: np.ndarray
    positions: np.ndarray
    paths: list[np.ndarray]
    sizes: list[int]
    sequences: list[np.ndarray]


def plant_forest(sequences: Sequence[np.ndarray], *, share_prefixes: bool) -> Forest:
    """Make a forest of these sequences (ids, at least one each). Without `share_prefixes` every sequence is a
    separate node."""
    forest = Forest(np.empty(0), np.empty(0), [], [], [np.empty(0, dtype=np.int64)] * len(sequences))
    ids: list[np.ndarray] = []
    token_count = 0
    sequence_indices = range(len(sequences))
    empty_path = np.empty(0, dtype=np.int64)
    pending = [([index], empty_path) for index in reversed(sequence_indices)]
    if share_prefixes and sequences:
        pending = [(sorted(sequence_indices, key=lambda index: sequences[index].tolist()), empty_path)]

    while pending:
        # The members are sorted sequences that agree on the path, and may agree on more.
        members, path = pending.pop()
        first_sequence = sequences[members[0]]
        common_end = common_prefix(first_sequence, sequences[members[-1]])
        if len(members) == 1 or common_end - len(path) >= LEAST_SHARED:
            node_size = common_end - len(path)
            ids.append(first_sequence[len(path) : common_end])
            path = np.concatenate([path, np.arange(token_count, token_count + node_size)])
            token_count += node_size
            forest.paths.append(path)
            forest.sizes.append(node_size)

        # By the next id, or none at the end of a sequence.
        for next_ids, branch in groupby(members, key=lambda index: [*sequences[index][common_end:][:1]]):
            if next_ids:
                pending.append((list(branch), path))
            elif len(path) < common_end:
                pending += [([index], path) for index in branch]
            else:
                for index in branch:
                    forest.sequences[index] = path

    positions = np.empty(token_count, dtype=np.int64)
    for path in forest.paths:
        positions[path] = np.arange(len(path))

    return forest._replace(ids=np.concatenate(ids).astype(np.int64), positions=positions)


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Return how many ids two sequences share at their beginning."""
    length = min(len(left), len(right))
    differences = np.flatnonzero(left[:length] != right[:length])
    return int(differences[0]) if len(differences) else length
