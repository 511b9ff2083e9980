from __future__ import annotations

import pytest

from asyncrl.store.launches import differences
from asyncrl.viewer.series import POINTS, RULES, WINDOW, alerts, series, wilson


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


HEALTHY = {
    "timing_s/step": 1.0,
    "rollout/score/min": 0.0,
    "rollout/score/max": 1.0,
    "rollout/discarded_group_frac": 0.3,
    "critic/zero_advantage_frac": 0.2,
    "actor/entropy": 0.8,
    "rollout_corr/logprob_diff_mean": 1e-3,
    "response_length/clip_ratio": 0.1,
    "actor/skipped_steps": 0.0,
    "staleness/masked_token_frac": 0.0,
}


def run(last: dict[str, float]) -> list[dict[str, float]]:
    """Healthy steps, a validation, and as many steps with other numbers."""
    steps = [HEALTHY] * WINDOW + [HEALTHY | last] * WINDOW
    rows = [{**row, "training/step": float(at + 1)} for at, row in enumerate(steps)]
    return [*rows[:WINDOW], {"training/step": 10.0, "val-core/all/sampled/success": 0.5}, *rows[WINDOW:]]


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("constant reward", {"rollout/score/max": 0.0}),
        ("all groups filtered", {"rollout/discarded_group_frac": 0.95}),
        ("nothing to learn", {"critic/zero_advantage_frac": 1.0}),
        ("entropy collapse", {"actor/entropy": 0.01}),
        ("growing log-prob gap", {"rollout_corr/logprob_diff_mean": 0.05}),
        ("everything truncated", {"response_length/clip_ratio": 0.97}),
        ("skipped optimizer steps", {"actor/skipped_steps": 1.0}),
        ("much is masked", {"staleness/masked_token_frac": 0.4}),
    ],
)
def test_what_is_wrong_is_named_alone(name: str, last: dict[str, float]) -> None:
    (found,) = alerts(run(last))
    assert (found.name, found.step) == (name, 2 * WINDOW) and found.what and found.do


def test_a_healthy_run_a_young_one_and_one_without_metrics_have_none() -> None:
    assert not alerts(run({}))
    assert not alerts(run({"actor/skipped_steps": 1.0})[: WINDOW - 1])
    assert not alerts([{"training/step": float(step), "timing_s/step": 1.0} for step in range(20)])


def test_a_reward_that_is_always_the_same_is_said_before_the_first_step() -> None:
    (found,) = alerts([], "64 groups: every episode scored 0")
    assert (found.name, found.what) == ("constant reward", "64 groups: every episode scored 0") and found.do


@pytest.mark.parametrize(("score", "highest"), [(0.97, 1.0), (0.01, 0.1)])
def test_a_solved_run_is_told_from_a_stuck_one_by_its_scores(score: float, highest: float) -> None:
    """0.097 of 0.1 may be the reward of a form alone: what is a solved sample is not guessed."""
    scores = {"rollout/score/mean": score, "rollout/score/max": highest, "rollout/score/min": 0.0}
    (found,) = alerts(run({"critic/zero_advantage_frac": 0.99, **scores}))
    assert found.name == "nothing to learn" and "solved" in found.do
    assert found.what.endswith(f"mean score {score:g}, highest {highest:g}")


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
