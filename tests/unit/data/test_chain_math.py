"""The generator of the example's data (tools/prepare_chain_math.py)."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

from asyncrl.data import load_samples
from tests.fakes.scripts import script

chain_math = script("prepare_chain_math")


def value_of(question: str) -> int:
    """What a reader of the question computes."""
    start, *operations = re.findall(r"(\w+) (\d+)", question)
    value = int(start[1])
    for op, operand in operations:
        b = int(operand)
        value = {"plus": value + b, "minus": value - b, "times": value * b}[op]
        assert 0 <= value <= 9999
    return value


def test_chains_are_right_different_and_long_tailed() -> None:
    chains = chain_math.make_chains(random.Random(1), 2000)
    assert all(value_of(chain.question) == chain.values[-1] for chain in chains)
    assert len({chain.question for chain in chains}) == 2000
    counts = [sum(len(chain.values) == length for chain in chains) for length in range(1, 7)]
    assert counts == sorted(counts, reverse=True)
    assert min(counts) > 50


def test_the_script_is_deterministic_and_its_splits_are_disjoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        options = [f"--out={tmp_path / name}", "--train=40", "--test=20", "--seed=3"]
        monkeypatch.setattr(sys, "argv", ["prepare_chain_math.py", *options])
        chain_math.main()
    splits = {
        (run, part): load_samples(tmp_path / run / f"{part}.parquet")
        for run in "ab"
        for part in ("train", "test")
    }
    assert splits["a", "train"] == splits["b", "train"]
    assert splits["a", "test"] == splits["b", "test"]
    train, test = ({sample.prompt for sample in splits["a", part]} for part in ("train", "test"))
    assert (len(train), len(test)) == (40, 20)
    assert not train & test
