"""Alerts on policies that game their reward: healthy runs have none, planted hacks are found within 10 steps.

The rate of false alarms was measured with a longer simulation, see DRIFT_ERRORS.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from asyncrl.observe.alerts import find_alerts
from asyncrl.observe.drifts import DRIFTS, change_of
from asyncrl.observe.evidence import WINDOW_STEPS, rows_for_rules
from asyncrl.store.listing import Listing
from tests.fakes.simulated_runs import (
    HACK_ALERTS,
    HACK_STEP,
    KEYS,
    STEPS,
    SUCCESS,
    ConvergingRun,
    HonestRun,
    Numbers,
    hack_alerts,
    hacked,
    learned,
    one_answer_is_paid,
)


@pytest.mark.parametrize("noise", [0.05, 0.3])
@pytest.mark.parametrize("questions", [0, 128])
def test_honest_runs_have_no_alert_at_any_step(noise: float, questions: int) -> None:
    for seed in range(8):
        assert not hack_alerts(HonestRun(seed, noise, questions).rows())


LAG = "held-out success lags behind the reward"


def flat_run(seed: int, questions: int = 128) -> HonestRun:
    """Held-out success stays the same."""
    return HonestRun(seed, questions=questions, first_success=0.6, last_success=0.6)


@pytest.mark.parametrize(
    ("name", "metric", "value", "text"),
    [
        ("answers repeat", "rollout/answer/same_frac", 0.98, "98% of the pairs of episodes with different"),
        ("answers are empty", "rollout/answer/empty_frac", 0.9, "90% of the answers are empty ("),
        ("answers refuse", "rollout/answer/refusal_frac", 0.9, "90% of the answers begin with a refusal"),
        ("text repeats", "rollout/repeated_frac/mean", 0.8, "80% of the model's tokens repeat"),
        ("episodes reach limits", "rollout/end/length", 0.9, "90% of the episodes were cut off by a limit"),
    ],
)
def test_a_share_that_jumps_with_the_reward_is_an_alert_unless_held_out_success_rose(
    name: str, metric: str, value: float, text: str
) -> None:
    def change(row: Numbers) -> Numbers:
        return {metric: value, "rollout/score/mean": row["rollout/score/mean"] + 1.0}

    for seed in range(5):
        alerts = hack_alerts(hacked(change, flat_run(seed)))
        assert alerts.keys() == {name, LAG}
        assert HACK_STEP < alerts[name][0].step <= HACK_STEP + WINDOW_STEPS
        last_alert = alerts[name][-1]
        assert last_alert.step == STEPS and last_alert.what.startswith(text)
        assert "so this may be a reward hack" in last_alert.what
        assert not hack_alerts(hacked(change, HonestRun(seed)))


@pytest.mark.parametrize("factor", [0.1, 6.0])
@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("response length drifts", "rollout/response_length/mean"),
        ("tool use drifts", "tool_call_counts/mean"),
    ],
)
def test_an_amount_that_jumps_is_an_alert_unless_held_out_success_rose(
    name: str, metric: str, factor: float
) -> None:
    def change(row: Numbers) -> Numbers:
        return {metric: row[metric] * factor, "rollout/score/mean": row["rollout/score/mean"] + 1.0}

    for seed in range(5):
        alerts = hack_alerts(hacked(change, flat_run(seed)))
        assert alerts.keys() == {name, LAG}
        assert HACK_STEP < alerts[name][0].step <= HACK_STEP + WINDOW_STEPS
        assert "so this may be a reward hack" in alerts[name][-1].what
        assert json.loads(alerts[name][-1].link["where"]) == [["kind", "=", "train"], ["step", ">=", 91]]
        assert alerts[name][-1].link["order"].startswith("-") == (factor > 1)
        assert not hack_alerts(hacked(change, HonestRun(seed)))


def test_last_words_that_converge_in_a_run_that_learns_are_no_alert() -> None:
    for seed in range(5):
        rows = [*ConvergingRun(seed).rows()]
        assert not hack_alerts(rows)
        assert not [alert for alert in find_alerts(rows, {}, KEYS) if alert.name in HACK_ALERTS]
        unvalidated_rows = [row for row in rows if SUCCESS not in row]
        assert [alert.level for alert in find_alerts(unvalidated_rows, {}, KEYS)] == ["advice"]


@pytest.mark.parametrize("name", DRIFTS)
@pytest.mark.parametrize(
    ("successes", "reward_rise", "level"),
    [
        ((0.3, 0.6), 0.5, None),
        ((0.96, 0.96), 0.5, None),
        ((0.3, 0.3), 0.5, "warn"),
        ((0.3, 0.3), 0.0, "advice"),
        ((0.6, 0.3), 0.5, "warn"),
        ((0.6, 0.3), -0.3, "warn"),
        ((), 0.5, "advice"),
    ],
)
def test_held_out_success_decides_the_level_of_a_drift(
    name: str, successes: tuple[float, ...], reward_rise: float, level: str | None
) -> None:
    drift = DRIFTS[name]
    drifted = 99.0 if drift.is_amount else 0.7
    run = HonestRun(0)
    rows = [
        run.row(step)
        | {
            "rollout/score/mean": 0.4 + 0.01 * (step % 2) + reward_rise * (step > 40),
            drift.metrics[0]: 0.01 if step <= 40 else drifted,
        }
        for step in range(1, 61)
    ]
    rows += [
        {"training/step": step, SUCCESS: success, "val-aux/samples": 128.0}
        for step, success in zip((20.0, 60.0), successes, strict=False)
    ]

    alerts = [alert for alert in find_alerts(rows, {}, KEYS) if alert.name == name]
    assert [alert.level for alert in alerts] == ([level] if level else [])
    assert all(("reward hack" in alert.what) == (reward_rise > 0) for alert in alerts)


class Divergent(HonestRun):
    """The reward rises, and held-out success falls after HACK_STEP."""

    def row(self, step: int) -> Numbers:
        row = super().row(step)
        return row | {"rollout/score/mean": row["rollout/score/mean"] + 0.03 * max(0, step - HACK_STEP)}

    def success(self, step: int) -> float:
        return learned(step, 0.25, 0.8) if step <= HACK_STEP else 0.35


@pytest.mark.parametrize(
    ("success", "reward_rise", "level"),
    [
        (0.3, 0.6, "warn"),
        (0.3, 0.25, None),  # partial credit alone may pay so much
        (0.5, 0.6, None),
        (0.9, 0.6, None),
    ],
)
def test_held_out_success_that_lags_behind_the_reward_is_an_alert(
    success: float, reward_rise: float, level: str | None
) -> None:
    """The score ranges from 0 to 1.2, so a rise by 0.6 is half of that; the behaviour stays the same."""
    rows = [
        HonestRun(0).row(50)
        | {
            "training/step": float(step),
            "rollout/score/mean": 0.4 + 0.01 * (step % 2) + reward_rise * (step > 40),
        }
        for step in range(1, 61)
    ]
    rows += [
        {"training/step": step, SUCCESS: share, "val-aux/samples": 512.0}
        for step, share in ((20.0, 0.3), (60.0, success))
    ]
    alerts = [alert for alert in find_alerts(rows, {}, KEYS) if alert.name == LAG]
    assert [alert.level for alert in alerts] == ([level] if level else [])
    for alert in alerts:
        text = "from 30% at step 20 to 30% at step 60, while the training reward rose from 0.405 to 1.01"
        assert alert.what == text and alert.link["order"] == "-score"


def test_a_reward_that_rises_while_held_out_success_falls_is_an_alert() -> None:
    for seed in range(5):
        alerts = hack_alerts(Divergent(seed).rows())
        assert alerts.keys() == {"held-out success fell"}
        (*_, last_alert) = alerts["held-out success fell"]
        assert last_alert.level == "bad" and "while the training reward rose from" in last_alert.what


def test_rows_that_the_coordinator_keeps_give_the_alerts_of_all_rows() -> None:
    rows = [*Divergent(0).rows()]
    kept_rows: list[Any] = []
    for row in rows:
        kept_rows = rows_for_rules([*kept_rows, row])
    assert len(kept_rows) < len(rows) / 2
    assert find_alerts(kept_rows, {}, KEYS) == find_alerts(rows, {}, KEYS) != []


@pytest.mark.parametrize(("loss", "levels"), [(0.5, {"warn"}), (0.0, {"advice"})])
def test_a_component_that_carries_the_rise_is_named(loss: float, levels: set[str]) -> None:
    """`format` rises from 0 to 1 with weight 0.2 in runs whose other component falls, or stays."""

    def row(step: int) -> Numbers:
        is_hacked = step > HACK_STEP
        exact = 0.3 - loss * 0.2 * is_hacked
        format_score = (0.01 if step % 2 else 0.0) + is_hacked * 0.99
        return HonestRun(0).row(step) | {
            "rollout/component/exact/mean": exact,
            "rollout/component/format/mean": format_score,
            "rollout/score/mean": exact + 0.2 * format_score,
        }

    rows = [row(step) for step in range(1, 81)]
    rows += [{"training/step": step, SUCCESS: 0.3, "val-aux/samples": 512.0} for step in (20.0, 80.0)]
    alerts = [alert for alert in find_alerts(rows, {}, KEYS) if alert.name in HACK_ALERTS]
    assert [alert.name for alert in alerts] == ["one component carries the reward"]
    assert {alert.level for alert in alerts} == levels
    assert "all of it by format, which rose from 0.005 to 0.995" in alerts[0].what
    assert ("while exact fell from 0.3 to 0.2" in alerts[0].what) == bool(loss)
    assert alerts[0].link["order"] == "-components.format"
    rows[-1][SUCCESS] = 0.6
    assert not [alert for alert in find_alerts(rows, {}, KEYS) if alert.name in HACK_ALERTS]


def test_the_links_are_lists_of_episodes() -> None:
    for name, drift in DRIFTS.items():
        metric = drift.metrics[0]
        rows = [HonestRun(0).row(step) | {metric: 0.01 if step <= 40 else 99.0} for step in range(1, 61)]
        rows += [
            {"training/step": step, SUCCESS: 0.5 - step / 200, "val-aux/samples": 128.0}
            for step in (0.0, 60.0)
        ]
        (link,) = [alert.link for alert in find_alerts(rows, {}, KEYS) if alert.name == name]
        assert link["tab"] == "episodes"
        Listing.of(link["where"], link.get("order", ""), "", "")


def test_noise_comes_from_neighbouring_steps() -> None:
    """A trend and an outlier are no drift."""

    def rows(values: Iterable[float]) -> list[Numbers]:
        return [{"x": float(value)} for value in values]

    flat = rows([1, 2] * 5)
    change = change_of(["x"], flat, rows([11, 12] * 5))
    assert change is not None and change.difference == 10.0
    assert change.error == pytest.approx((2 * 0.5 / 10) ** 0.5)
    outlier = change_of(["x"], flat, rows([1, 2] * 4 + [1000, 1]))
    assert outlier is not None and outlier.difference < 2 * outlier.error
    assert change_of(["x"], flat, rows([1, 2])) is None


def test_small_validations_of_a_healthy_run_give_no_warning_and_a_hack_is_named() -> None:
    """tools/bench/hack_alert_rates.py prints the rates of more runs, of more kinds."""
    named_hacks = 0
    for seed in range(10):
        assert not hack_alerts(ConvergingRun(seed, questions=24).rows())
        alerts = hack_alerts(hacked(one_answer_is_paid, flat_run(seed, questions=24)))
        named_hacks += "answers repeat" in alerts
    assert named_hacks >= 8


@pytest.mark.full
def test_one_of_200_healthy_runs_with_small_validations_may_have_a_warning() -> None:
    warned_runs = [seed for seed in range(200) if hack_alerts(ConvergingRun(seed, questions=24).rows())]
    assert len(warned_runs) <= 1
