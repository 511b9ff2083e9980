"""Draws of an epoch: shares of weighted sources, hooks, and the same order after a restart."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import DataConfig, WeightedSource
from asyncrl.data import EpochOrder, Samples
from asyncrl.data.order import draw_counts
from asyncrl.errors import ConfigError
from asyncrl.types import Message, Sample
from tests.fakes.data import rows, stored


def mixed(tmp_path: Path, *sizes: int) -> Samples:
    with (tmp_path / "samples").open("w+b") as file:
        return Samples.write(file, [rows(size) for size in sizes])


def weighted(*weights: float, **keys: Any) -> DataConfig:
    return DataConfig([WeightedSource("x", weight) for weight in weights], **keys)


def test_without_weights_an_epoch_is_every_sample_once_in_an_order_of_its_own() -> None:
    order = EpochOrder(stored(rows(20)), DataConfig("d"), seed=3)
    expected = list(range(20))
    random.Random("3/1").shuffle(expected)  # of runs before there were weights, which may be resumed
    assert order(1) == expected != order(0)
    assert EpochOrder(stored(rows(3)), DataConfig("d", shuffle=False), seed=3)(7) == [0, 1, 2]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_weight_is_the_share_of_draws(tmp_path: Path, shuffle: bool) -> None:
    samples = mixed(tmp_path, 90, 10)
    order = EpochOrder(samples, weighted(1, 3, shuffle=shuffle), seed=0)
    epochs = [order(epoch) for epoch in range(4)]
    for drawn in epochs:
        assert Counter(number >= 90 for number in drawn) == {False: 25, True: 75}
    everything = Counter(number for drawn in epochs for number in drawn)
    assert {everything[number] for number in range(90)} == {1, 2}  # 100 draws of 90
    assert {everything[number] for number in range(90, 100)} == {30}  # 300 draws of 10
    assert [EpochOrder(samples, weighted(1, 3, shuffle=shuffle), seed=0)(at) for at in range(4)] == epochs
    if not shuffle:
        assert all(sum(number >= 90 for number in epochs[0][at : at + 4]) == 3 for at in range(0, 100, 4))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 9), st.integers(5, 500)), min_size=1, max_size=6))
def test_shares_are_exact_up_to_one_draw(sources: list[tuple[float, int]]) -> None:
    weights, sizes = zip(*sources, strict=True)
    try:
        counts = draw_counts(weights, sizes)
    except ConfigError:
        assert min(weights) / sum(weights) * sum(sizes) < 1
        return
    assert sum(counts) == sum(sizes)
    exact = [weight / sum(weights) * sum(sizes) for weight in weights]
    assert all(abs(count - value) < 1 for count, value in zip(counts, exact, strict=True))


def test_a_weight_that_gives_no_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source 1 has a weight of 0.001 .* less than one of the 20 draws"):
        EpochOrder(mixed(tmp_path, 10, 10), weighted(1, 0.001), seed=0)


HOOK = """
import json
calls = []

def easy_first(samples, drawn, epoch, *, reverse: bool = False):
    calls.append(epoch)
    return sorted(drawn, key=lambda at: len(samples[at].prompt[0].content), reverse=reverse)

def first_only(samples, drawn, epoch):
    return drawn[:1] * len(drawn)

def breaks(samples, drawn, epoch):
    return samples["a"]

def short(samples):
    return []
"""


def test_a_hook_orders_the_samples_of_an_epoch(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(HOOK)
    samples = stored([Sample(at, "s", (Message("user", "x" * (7 * at % 5)),), "1") for at in range(5)])
    name = f"{tmp_path}/hook.py:easy_first"
    assert EpochOrder(samples, DataConfig("d", order=name), seed=0)(0) == [0, 3, 1, 4, 2]
    reverse = DataConfig("d", order={name: {"reverse": True}})
    assert EpochOrder(samples, reverse, seed=0)(0) == [2, 4, 1, 3, 0]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("first_only", "returned 5 numbers that are not a reordering of the 5 numbers in `drawn`"),
        ("breaks", r"epoch 0: TypeError: .* \(hook.py:13\)"),
        ("short", r"short \(hook.py:15\) cannot be called .*write def order\(samples, drawn, epoch\)"),
    ],
)
def test_a_hook_that_cannot_be_used_is_named(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "hook.py").write_text(HOOK)
    with pytest.raises(ConfigError, match=complaint):
        EpochOrder(stored(rows(5)), DataConfig("d", order=f"{tmp_path}/hook.py:{name}"), seed=0)(0)


def test_an_order_that_cannot_be_kept_ends_the_run_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(HOOK)
    order = EpochOrder(stored(rows(5)), DataConfig("d", order=f"{tmp_path}/hook.py:easy_first"), 0, tmp_path)
    (tmp_path / "order-0.tmp").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"order-0: the order of the data cannot be saved .*No space left"):
        order(0)


def test_the_order_of_an_epoch_outlives_a_change_of_the_hook(tmp_path: Path) -> None:
    """Otherwise samples would be drawn twice, and others not at all, after a restart within the epoch."""
    (tmp_path / "hook.py").write_text(HOOK)
    (tmp_path / "run").mkdir()
    name = f"{tmp_path}/hook.py:easy_first"
    samples = stored(rows(15))
    before = EpochOrder(samples, DataConfig("d", order=name), 0, tmp_path / "run")
    orders = [list(before(epoch)) for epoch in range(4)]
    changed = EpochOrder(samples, DataConfig("d", order={name: {"reverse": True}}), 0, tmp_path / "run")
    assert [list(changed(epoch)) for epoch in (2, 3)] == orders[2:]
    assert list(changed(4)) != list(before._compute_order(4))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["order-3", "order-4"]
