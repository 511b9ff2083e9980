"""What is kept of pi/mu, and which of several files counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.observe import ratios
from asyncrl.observe.ratios import TokenRatios, read, save


def noted(value: float, uid: str = "8.0") -> list[TokenRatios]:
    return [TokenRatios(uid, [value], [False])]


@pytest.mark.parametrize(("before", "now"), [(3, 0), (0, 3), (3, 3)])
def test_a_step_that_is_repeated_with_other_ranks_counts_as_it_was_last(
    tmp_path: Path, before: int, now: int
) -> None:
    for rank, value in ((before, 0.5), (now, 0.25)):
        save(tmp_path, 7, rank, noted(value))
    found = read(tmp_path, 7, "8.0")
    assert found is not None and found.log_ratio == [0.25]
    assert read(tmp_path, 7, "8.1") is None and read(tmp_path, 70, "8.0") is None


def test_the_newest_steps_are_kept_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratios, "STEPS", 3)
    for step in range(1, 6):
        for rank in (0, 1) if step < 3 else (0,):  # resumed with one rank
            save(tmp_path, step, rank, noted(0.5) if step < 5 else [])
    left = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "ratios").iterdir())
    assert left == ["step-3-0", "step-4-0"]
