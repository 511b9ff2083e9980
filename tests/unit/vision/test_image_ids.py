"""Image ids: a row spells which images it has, and where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.vision.image_ids import (
    DIGEST_BITS,
    DIGEST_DIGITS,
    FIRST_IMAGE_ID,
    MIN_RUN_IDS,
    ImageRun,
    collapse_runs,
    find_runs,
    find_whole_runs,
    has_image_ids,
    image_ids,
    largest_token_id,
    with_placeholders,
)

PLACEHOLDER = 7
digests = st.integers(0, (1 << DIGEST_BITS) - 1).map(lambda number: f"{number:0{DIGEST_DIGITS}x}")
texts = st.lists(st.integers(0, 200_000), max_size=6)
images = st.tuples(digests, st.integers(MIN_RUN_IDS, 40))
rows = st.lists(st.one_of(texts, images), max_size=8)


def lay_out(parts: list[list[int] | tuple[str, int]]) -> tuple[list[int], list[ImageRun]]:
    """The ids of texts and images, and the runs that are expected among them."""
    ids: list[int] = []
    runs = []
    for part in parts:
        if isinstance(part, tuple):
            runs.append(ImageRun(len(ids), len(ids) + part[1], part[0]))
            ids += image_ids(*part)
        else:
            ids += part
    return ids, runs


@given(rows)
def test_a_row_spells_its_images(parts: list[list[int] | tuple[str, int]]) -> None:
    ids, runs = lay_out(parts)
    assert find_runs(ids) == runs
    assert find_whole_runs(ids) == runs
    assert find_runs(np.array(ids, dtype=np.int32)) == runs
    assert has_image_ids(ids) == bool(runs)
    assert all(token < 1 << 31 for token in ids)


@given(rows)
def test_placeholders_replace_image_ids(parts: list[list[int] | tuple[str, int]]) -> None:
    ids, runs = lay_out(parts)
    texts_alone = [token for part in parts if isinstance(part, list) for token in part]

    filled = with_placeholders(np.array(ids, dtype=np.int64), PLACEHOLDER)
    assert len(filled) == len(ids)
    assert all(PLACEHOLDER in filled[run.start : run.end] for run in runs)
    assert filled.max(initial=0) < FIRST_IMAGE_ID

    collapsed = [token for part in parts for token in ([PLACEHOLDER] if isinstance(part, tuple) else part)]
    assert list(collapse_runs(ids, PLACEHOLDER)) == collapsed
    assert largest_token_id(ids) == max(texts_alone, default=-1)


def test_rows_with_other_images_differ_from_the_first_id_on() -> None:
    first = image_ids("0" * DIGEST_DIGITS, 6)
    second = image_ids("0" * (DIGEST_DIGITS - 1) + "1", 6)
    assert first[0] != second[0]
    # Digests may differ in their last digits only: then a later quarter differs.
    third = image_ids("1" + "0" * (DIGEST_DIGITS - 1), 6)
    assert first[:MIN_RUN_IDS] != third[:MIN_RUN_IDS]


def test_images_side_by_side_are_two_runs() -> None:
    digest = "a" * DIGEST_DIGITS
    ids = image_ids(digest, 4) + image_ids(digest, 5)
    assert find_runs(ids) == [ImageRun(0, 4, digest), ImageRun(4, 9, digest)]


def test_a_run_without_its_beginning_is_no_image() -> None:
    ids = image_ids("b" * DIGEST_DIGITS, 8)
    assert find_runs((5, *ids[3:])) == []
    assert find_runs((5, *ids[:3])) == []
    assert find_runs((5, *ids[:6])) == [ImageRun(1, 7, "b" * DIGEST_DIGITS)]


def test_ids_that_spell_no_image_are_refused() -> None:
    ids = image_ids("b" * DIGEST_DIGITS, 8)
    for without_beginning in (ids[1:], (*ids, 5, *ids[3:]), (*ids, *ids[:3])):
        with pytest.raises(ValueError, match="must begin with the first 4 ids of an image"):
            find_whole_runs(without_beginning)
    for too_large in (1 << 31, 1 << 63):
        with pytest.raises(ValueError, match=f"{too_large} is not a valid token ID"):
            find_whole_runs((*ids, too_large))
