from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.packing import bucket, fill, units

lengths = st.lists(st.integers(1, 300), max_size=40)


def at(values: list[int], rows: list[int]) -> list[int]:
    return [values[row] for row in rows]


@settings(deadline=None)
@given(lengths, st.integers(50, 1000))
def test_buckets_fit_the_budget_or_are_one_row(values: list[int], budget: int) -> None:
    batches = bucket(values, budget)
    assert sorted(chain(*batches)) == list(range(len(values)))
    for rows in batches:
        padded = len(rows) * max(at(values, rows))
        assert padded <= budget or len(rows) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4)), max_size=40), st.integers(50, 1000))
def test_buckets_count_every_row_of_an_episode(values: list[tuple[int, int]], budget: int) -> None:
    lengths, rows = [length for length, _ in values], [count for _, count in values]
    batches = bucket(lengths, budget, rows)
    assert sorted(chain(*batches)) == list(range(len(values)))
    for part in batches:
        assert sum(at(rows, part)) * max(at(lengths, part)) <= budget or len(part) == 1


@settings(deadline=None)
@given(lengths)
def test_rows_of_like_length_share_a_bucket(values: list[int]) -> None:
    """No row of one bucket is longer than a row of the bucket before."""
    batches = bucket(values, 600)
    for longer, shorter in pairwise(batches):
        assert min(at(values, longer)) >= max(at(values, shorter))


members = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300), st.integers(0, 200)), max_size=40)


@settings(deadline=None)
@given(members, st.integers(50, 1000))
def test_units_are_of_one_key_and_fit_the_budget_or_are_one_member(
    drawn: list[tuple[int, int, int]], budget: int
) -> None:
    keys, tokens = [key for key, _, _ in drawn], [count for _, count, _ in drawn]
    shared = [min(count, start) for _, count, start in drawn]
    found = units(keys, tokens, shared, budget)
    assert sorted(chain(*(unit.members for unit in found))) == list(range(len(drawn)))
    for unit in found:
        assert len({keys[index] for index in unit.members}) == 1
        first, *others = unit.members
        assert unit.tokens == tokens[first] + sum(
            tokens[index] - min(shared[index], shared[first]) for index in others
        )
        assert unit.tokens <= budget or not others
    batches = fill(found, budget)
    assert sorted(chain(*batches)) == list(range(len(drawn)))
    sizes = {unit.members[0]: unit for unit in found}
    for part in batches:
        own = [sizes[index] for index in part if index in sizes]
        assert sorted(part) == sorted(chain(*(unit.members for unit in own)))
        assert sum(unit.tokens for unit in own) <= budget or len(own) == 1


@settings(deadline=None)
@given(members, st.integers(50, 1000), st.integers(0, 40))
def test_whole_units_come_out_the_same_again(
    drawn: list[tuple[int, int, int]], budget: int, kept: int
) -> None:
    """A plan is cut once when it is made, and again, from its uids alone, when it is dealt."""
    found = units(*map(list, zip(*drawn, strict=True)), budget) if drawn else []  # type: ignore[arg-type]
    taken = list(chain(*(unit.members for unit in found[:kept])))
    again = units(
        [drawn[i][0] for i in taken], [drawn[i][1] for i in taken], [drawn[i][2] for i in taken], budget
    )
    assert [([taken[i] for i in unit.members], unit.tokens) for unit in again] == [
        tuple(u) for u in found[:kept]
    ]
