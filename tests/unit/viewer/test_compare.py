from __future__ import annotations

from pathlib import Path

from asyncrl.observe.held_out import interval
from asyncrl.viewer.compare import compare, paired
from tests.fakes.planted import save_run


def test_a_paired_difference_by_hand() -> None:
    found = paired("greedy", [(0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
    assert (found["means"], found["difference"]) == ([0.5, 0.75], 0.25)
    assert (found["wins"], found["losses"], found["questions"]) == (2, 1, 4)
    assert found["interval"] == interval([1.0, 0.0, -1.0, 1.0])


def test_without_a_validation_nothing_is_compared(tmp_path: Path) -> None:
    runs = save_run(tmp_path / "a"), save_run(tmp_path / "b")
    found = compare(runs, [None, None])
    assert (found["modes"], found["flipped"], found["validations"]) == ([], [], [[], []])
