"""Rows of a micro-batch as nodes of a forest: what rows share at their beginning is one node, computed once.

rows  a b c d      nodes  [a b] ─┬─ [c d]      flat  a b c d e f g
      a b e               [f g]  └─ [e]        every node attends to its ancestors and itself
      f g
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

LEAST = 16  # shared ids; fewer are computed once per row


class Forest(NamedTuple):
    """Holds T tokens, node after node, a parent before its children.

    `ids` and `positions` [T]: positions are those within a row. `paths`: of each node the indices of the
    tokens that its last token sees, in order: its ancestors', then its own `sizes` ones. `rows`: of each row
    the index of each of its tokens.
    """

    ids: np.ndarray
    positions: np.ndarray
    paths: list[np.ndarray]
    sizes: list[int]
    rows: list[np.ndarray]


def plant(rows: Sequence[np.ndarray], *, shared: bool) -> Forest:
    """A forest of these rows (ids, at least one each). Without `shared` every row is a node of its own."""
    forest = Forest(np.empty(0), np.empty(0), [], [], [np.empty(0, dtype=np.int64)] * len(rows))
    ids: list[np.ndarray] = []
    size = 0
    every = range(len(rows))
    nothing = np.empty(0, dtype=np.int64)
    waiting = [([index], nothing) for index in reversed(every)]
    if shared and rows:
        waiting = [(sorted(every, key=lambda index: rows[index].tolist()), nothing)]
    while waiting:
        members, path = waiting.pop()  # rows in order that agree on the path, and may on more
        first = rows[members[0]]
        end = common(rows[members[0]], rows[members[-1]])
        if len(members) == 1 or end - len(path) >= LEAST:
            own = end - len(path)
            ids.append(first[len(path) : end])
            path = np.concatenate([path, np.arange(size, size + own)])
            size += own
            forest.paths.append(path)
            forest.sizes.append(own)
        for token, part in groupby(members, key=lambda index: _at(rows[index], end)):
            if token is None and len(path) == end:
                for index in part:
                    forest.rows[index] = path
            elif token is None:
                waiting += [([index], path) for index in part]
            else:
                waiting.append((list(part), path))
    positions = np.empty(size, dtype=np.int64)
    for path in forest.paths:
        positions[path] = np.arange(len(path))
    return forest._replace(ids=np.concatenate(ids).astype(np.int64), positions=positions)


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Ids that two rows share at their beginning."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _at(row: np.ndarray, position: int) -> int | None:
    return int(row[position]) if position < len(row) else None
