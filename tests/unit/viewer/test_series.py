from __future__ import annotations

import pytest

from asyncrl.store.launches import differences
from asyncrl.viewer.series import POINTS, series, wilson


def row(step: float, time_s: float, **more: float) -> dict[str, float]:
    return {"training/step": step, "time_s": time_s, **more}


def test_a_step_counts_as_it_was_last_with_its_validation() -> None:
    step, held_out = {"timing_s/step": 1.0, "trainer/model_tokens": 100.0}, {"val-aux/episodes": 10.0}
    success, entropy, lag = "val-core/all/sampled/success", "actor/entropy", "staleness/lag_tokens/"
    found = series(
        [
            row(1.0, 5.0, **step, **{entropy: 0.9, f"{lag}0": 70.0}),
            row(0.0, 6.0, **held_out, **{success: 0.5}),
            row(2.0, 7.0, **step, **{entropy: 0.8, f"{lag}1": 30.0}),
            row(2.0, 9.0, **step, **{entropy: 0.7, f"{lag}0": 10.0}),
            row(2.0, 11.0, **held_out, **{success: 1.0}),
            row(1.0, 13.0, **held_out, **{success: 0.75}),  # it was over after the last step
        ]
    )
    assert found["step"] == [0, 1, 2] and found["tokens"] == [0, 100, 200] and found["seconds"] == [6, 5, 9]
    assert found["columns"]["actor/entropy"] == [None, 0.9, 0.7]
    assert found["columns"]["val-core/all/sampled/success"] == [0.5, 0.75, 1.0]
    assert found["columns"]["val-core/all/sampled/success/low"][0] == pytest.approx(0.2366, abs=1e-4)
    assert found["lags"] == {0: 80.0, 1: 30.0}


def test_a_long_run_is_thinned_and_keeps_its_end_and_its_validations() -> None:
    rows = [{"training/step": float(step), "timing_s/step": 1.0} for step in range(3 * POINTS + 2)]
    found = series([*rows, {"training/step": 1001.0, "val-core/all/sampled/success": 0.5}])
    assert len(found["step"]) <= POINTS + 2
    assert found["step"][-1] == 3 * POINTS + 1 and 1001.0 in found["step"]


def test_wilson_is_the_interval_of_textbooks() -> None:
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(1.0, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert wilson(None, 10) == wilson(0.5, 0) == (None, None)


def test_configurations_differ_in_these_keys() -> None:
    one = {"name": "a", "trainer": {"lr": 1.0, "ranks": 1}, "data": {"columns": {}}}
    other = {"name": "b", "trainer": {"lr": 2.0, "ranks": 1}, "data": {"columns": {"prompt": "p"}}}
    assert differences([one, other]) == {
        "trainer.lr": [1.0, 2.0],
        "data.columns": [{}, None],
        "data.columns.prompt": [None, "p"],
    }
    assert differences([one]) == {}
