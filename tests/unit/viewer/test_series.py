from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from asyncrl.observe.alerts import WINDOW_STEPS
from asyncrl.observe.columns import MetricColumns
from asyncrl.observe.held_out import wilson_interval
from asyncrl.store.launches import differences
from asyncrl.viewer.series import MAX_POINTS, curve_series, run_marks


def row(step: float, time_s: float, **more: float) -> dict[str, float]:
    return {"training/step": step, "time_s": time_s, **more}


def written(run_dir: Path, rows: Iterable[Mapping[str, float]]) -> MetricColumns:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    columns = MetricColumns(run_dir / "metrics.jsonl")
    columns.update()
    return columns


def test_a_step_counts_as_it_was_last_with_its_validation(tmp_path: Path) -> None:
    step = {"timing_s/step": 1.0, "trainer/model_tokens": 100.0}
    held_out = {"val-aux/samples": 10.0}
    success = "val-core/all/sampled/success"
    entropy = "actor/entropy"
    lag = "staleness/lag_tokens/"
    rows = [
        row(1.0, 5.0, **step, **{entropy: 0.9, f"{lag}0": 70.0}),
        row(0.0, 6.0, **held_out, **{success: 0.5}),
        row(2.0, 7.0, **step, **{entropy: 0.8, f"{lag}1": 30.0}),
        row(2.0, 9.0, **step, **{entropy: 0.7, f"{lag}0": 10.0}),
        row(2.0, 11.0, **held_out, **{success: 1.0}),
        row(1.0, 13.0, **held_out, **{success: 0.75}),  # it was over after the last step
    ]
    curves = curve_series(written(tmp_path, rows))
    assert (
        curves["step"] == [0, 1, 2] and curves["tokens"] == [0, 100, 200] and curves["seconds"] == [6, 5, 9]
    )
    assert curves["columns"]["actor/entropy"] == [None, 0.9, 0.7]
    assert curves["columns"]["val-core/all/sampled/success"] == [0.5, 0.75, 1.0]
    assert curves["columns"]["val-core/all/sampled/success/low"][0] == pytest.approx(0.2366, abs=1e-4)
    assert curves["bands"][success] == [(f"{success}/low", f"{success}/high")]


def test_tokens_of_a_long_run_are_added_up_exactly(tmp_path: Path) -> None:
    """In single precision each of the last sums is rounded to 64 tokens or more."""
    rows = [row(float(at), at, **{"trainer/model_tokens": 300_001.0}) for at in range(1, 3001)]
    assert curve_series(written(tmp_path, rows))["tokens"][-1] == pytest.approx(3000 * 300_001, rel=1e-5)


def test_columns_grow_with_their_file(tmp_path: Path) -> None:
    columns = MetricColumns(tmp_path / "metrics.jsonl")
    file = tmp_path / "metrics.jsonl"
    columns.update()
    assert curve_series(columns)["step"] == []
    file.write_text('{"training/step": 1.0, "a": NaN}\n{"training/step": 2.0, "a"')
    columns.update()
    assert curve_series(columns)["columns"] == {"a": [None]}
    with file.open("a") as more:
        more.write(': 5.0, "b": 6.0}\n{broken}\n')
    columns.update()
    assert curve_series(columns)["columns"] == {"a": [None, 5.0], "b": [None, 6.0]}


def test_a_long_run_is_thinned_and_keeps_extremes_its_end_and_its_validations(tmp_path: Path) -> None:
    last = 6 * MAX_POINTS + 2
    success = "val-core/all/sampled/success"
    loss = "actor/pg_loss"
    rows = [row(float(step), 2.0 * step, **{"timing_s/step": 1.0, loss: 0.0}) for step in range(last + 1)]
    rows[1234][loss], rows[4321][loss] = 9.0, -7.0
    columns = written(tmp_path, [*rows, {"training/step": 1001.0, success: 0.5}])
    curves = curve_series(columns)
    assert len(curves["step"]) <= MAX_POINTS + 1 and curves["steps"] == last + 1
    assert curves["step"] == sorted({*curves["step"]}) and (curves["step"][0], curves["step"][-1]) == (
        0,
        last,
    )
    loss_by_step = dict(zip(curves["step"], curves["columns"][loss], strict=True))
    assert {9.0, -7.0} <= {*loss_by_step.values()} and loss_by_step[1001.0] is None
    assert all(abs(step - 1234) <= 12 for step, value in loss_by_step.items() if value == 9.0)
    assert dict(zip(curves["step"], curves["columns"][success], strict=True))[1001.0] == 0.5
    near = curve_series(
        columns, "step", 1200, 1300
    )  # a stretch has each of its steps, and goes on to both sides
    assert near["step"] == list(range(1199, 1302)) and near["columns"][loss][35] == 9.0
    assert curve_series(columns, "seconds", 2400.0, 2600.0)["step"] == near["step"]


def test_bands_are_around_a_mean_the_widest_first_and_none_is_constant(tmp_path: Path) -> None:
    ends = {"min": 0.0, "p05": 1.0, "p25": 2.0, "p75": 4.0, "p95": 5.0, "max": 9.0}
    rows = [{"training/step": float(n), "x/mean": 3.0} for n in (1, 2)]
    for n, row in enumerate(rows):
        row |= {f"x/{end}": value + n * (end not in ("min", "max")) for end, value in ends.items()}
    assert curve_series(written(tmp_path, rows))["bands"] == {
        "x/mean": [("x/p05", "x/p95"), ("x/p25", "x/p75")]
    }


def test_what_happened_is_marked_where_it_did(tmp_path: Path) -> None:
    lost = "rollout/attempts_failed/worker_lost"
    rows = list[dict[str, float]]()
    for step in range(1, 3 * WINDOW_STEPS + 1):
        skipped = float(WINDOW_STEPS < step <= 2 * WINDOW_STEPS)
        counted = {lost: 5.0 if step > 7 else 0.0, "actor/skipped_steps": skipped}
        rows.append(row(float(step), 2.0 * step, **{"timing_s/step": 1.0}, **counted))

    rows.append(row(4.0, 99.0, **{"val-core/all/sampled/success": 0.5}))
    marks = run_marks(tmp_path, written(tmp_path, rows))
    kinds = [
        (mark["step"], mark["kind"]) for mark in marks if "skipped" in mark["text"] or mark["kind"] != "alert"
    ]
    assert kinds == [(4, "validation"), (8, "lost"), (11, "alert")]
    assert "50.0%" in marks[0]["text"] and marks[1]["text"].endswith("a worker: 5")
    assert marks[-1]["text"].startswith("skipped optimizer steps: 1 of the last 10")


def test_wilson_is_the_interval_of_textbooks() -> None:
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(1.0, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert wilson_interval(None, 10) == wilson_interval(0.5, 0) == (None, None)


def test_configurations_differ_in_these_keys() -> None:
    first_config = {"name": "a", "trainer": {"lr": 1.0, "ranks": 1}, "data": {"columns": {}}}
    second_config = {"name": "b", "trainer": {"lr": 2.0, "ranks": 1}, "data": {"columns": {"prompt": "p"}}}
    assert differences([first_config, second_config]) == {
        "trainer.lr": [1.0, 2.0],
        "data.columns": [{}, None],
        "data.columns.prompt": [None, "p"],
    }
    assert differences([first_config]) == {}
