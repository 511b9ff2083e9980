from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainer import prefix_tree
from asyncrl.trainer.prefix_tree import LEAST_SHARED, Forest, plant_forest

rows_of_few_ids = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row) for row in rows]


def distinct_beginnings(rows: list[list[int]]) -> int:
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def check(forest: Forest, rows: list[list[int]]) -> None:
    """Every row can be read along its path; every token sees exactly the beginning of its row."""
    assert [forest.ids[path].tolist() for path in forest.sequences] == rows
    for path in (*forest.sequences, *forest.paths):
        assert forest.positions[path].tolist() == list(range(len(path)))
    ends = np.cumsum(forest.sizes)
    for path, size, end in zip(forest.paths, forest.sizes, ends, strict=True):
        assert path[-size:].tolist() == list(range(end - size, end))
        assert all(a < b for a, b in pairwise(path))
    assert ends[-1] == len(forest.ids) == len(forest.positions)


@settings(deadline=None)
@given(rows_of_few_ids)
def test_rows_that_share_nothing_on_purpose_are_nodes_of_their_own(rows: list[list[int]]) -> None:
    forest = plant_forest(arrays(rows), share_prefixes=False)
    check(forest, rows)
    assert len(forest.ids) == sum(map(len, rows)) and len(forest.sizes) == len(rows)


@settings(deadline=None)
@given(rows_of_few_ids)
def test_what_rows_share_at_their_beginning_is_there_once(rows: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "LEAST_SHARED", 1)
        forest = plant_forest(arrays(rows), share_prefixes=True)
    check(forest, rows)
    assert len(forest.ids) == distinct_beginnings(rows)


@settings(deadline=None)
@given(rows_of_few_ids, st.integers(2, 5))
def test_short_beginnings_are_not_worth_a_node(rows: list[list[int]], least: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "LEAST_SHARED", least)
        forest = plant_forest(arrays(rows), share_prefixes=True)
    check(forest, rows)
    assert distinct_beginnings(rows) <= len(forest.ids) <= sum(map(len, rows))
    for path, size in zip(forest.paths, forest.sizes, strict=True):
        sharing_sequences = [sequence for sequence in forest.sequences if path[-1] in sequence]
        assert len(sharing_sequences) == 1 or size >= least


def test_a_prompt_its_answers_and_a_fork_of_one_of_them() -> None:
    prompt = list(range(40))
    answer = [50] * 30
    rows = [[*prompt, *answer], [*prompt, 60], [*prompt, *answer[:20], 61], [70]]
    forest = plant_forest(arrays(rows), share_prefixes=True)
    check(forest, rows)
    assert len(forest.ids) == 40 + 20 + 10 + 1 + 1 + 1
    assert LEAST_SHARED <= 20
