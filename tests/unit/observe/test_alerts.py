from __future__ import annotations

from typing import Any

import pytest

from asyncrl.observe.alerts import ALERT_RULES, find_alerts, rule_texts
from asyncrl.observe.evidence import WINDOW_STEPS, rows_for_rules

SUCCESS = "val-core/all/sampled/success"
GAP = "rollout_corr/logprob_diff_mean"
DISCARDED = "rollout/discarded_group_frac"
FAILED = "rollout/attempts_failed/"

HEALTHY = {
    "timing_s/step": 1.0,
    "rollout/landed": 64.0,
    "rollout/score/mean": 0.4,
    "rollout/score/min": 0.0,
    "rollout/score/max": 1.0,
    DISCARDED: 0.3,
    "rollout/end/length": 0.1,
    "rollout/tool_failed_frac": 0.05,
    "critic/zero_advantage_frac": 0.2,
    "actor/entropy": 0.8,
    GAP: 1e-3,
    "response_length/clip_ratio": 0.1,
    "actor/skipped_steps": 0.0,
    "staleness/masked_token_frac": 0.0,
    "async/trainer_idle_frac": 0.2,
    "async/rollout_idle_frac": 0.1,
    "timing_s/episode/mean": 10.0,
    "timing_s/tools/mean": 2.0,
    "timing_s/reward/mean": 1.0,
}
KEYS = {
    "buffer.groups_per_batch": 8, "buffer.episodes_per_group": 8, "validation.success": 1.0,
    "rollout.workers": 2, "rollout.slots": 64, "rollout.reward": "math", "trainer.lr": 1e-5,
    "rollout.max_turns": 4,
}  # fmt: skip


def run(last: dict[str, float], success: float | None = 0.5) -> list[dict[str, float]]:
    """Healthy steps, a validation, and as many steps with other numbers."""
    steps = [HEALTHY] * WINDOW_STEPS + [HEALTHY | last] * WINDOW_STEPS
    rows = [{**row, "training/step": float(at + 1), "time_s": at + 1.0} for at, row in enumerate(steps)]
    held_out = [] if success is None else [{"training/step": 10.0, SUCCESS: success}]
    return [*rows[:WINDOW_STEPS], *held_out, *rows[WINDOW_STEPS:]]


def status(gauges: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    return {"phase": "running", "seconds": 30.0, "gauges": {"async/workers": 2.0} | (gauges or {}), **more}


@pytest.mark.parametrize(("questions", "fell"), [(24.0, True), (4.0, False), (0.0, False)])
def test_a_held_out_success_that_falls_by_more_than_chance_is_an_alert(questions: float, fell: bool) -> None:
    rows = [
        {"training/step": step, SUCCESS: share, "val-aux/samples": questions}
        for step, share in ((0.0, 0.9), (10.0, 1.0), (20.0, 0.5))
    ]
    fall_alerts = [
        alert for alert in find_alerts(run({}, None) + rows, status(), KEYS) if "fell" in alert.name
    ]
    assert [alert.what for alert in fall_alerts] == ["from 95% at steps 0 to 10 to 50% at step 20"] * fell


@pytest.mark.parametrize(
    ("name", "last", "less"),
    [
        ("constant reward", {"rollout/score/max": 0.0}, {"rollout/score/max": 0.1}),
        ("all groups filtered", {DISCARDED: 0.95}, {DISCARDED: 0.8}),
        ("nothing to learn", {"critic/zero_advantage_frac": 1.0}, {"critic/zero_advantage_frac": 0.2}),
        ("entropy collapse", {"actor/entropy": 0.01}, {"actor/entropy": 0.2}),
        ("growing log-prob gap", {GAP: 0.05}, {GAP: 0.01}),
        ("everything truncated", {"response_length/clip_ratio": 0.97}, {"response_length/clip_ratio": 0.5}),
        ("everything truncated", {"rollout/end/max_turns": 1.0}, {"rollout/end/answered": 1.0}),
        ("skipped optimizer steps", {"actor/skipped_steps": 1.0}, {"actor/skipped_steps": 0.0}),
        ("many tokens masked", {"staleness/masked_token_frac": 0.4}, {"staleness/masked_token_frac": 0.1}),
        (
            "many tokens masked",
            {"staleness/masked_token_frac": 0.1, "rollout_corr/rollout_rs_masked_fraction": 0.15},
            {"staleness/masked_token_frac": 0.1, "rollout_corr/rollout_rs_masked_fraction": 0.05},
        ),
        (
            "many tokens masked",
            {"staleness/by_length/512/masked_frac": 0.8, "staleness/masked_token_frac": 0.03},
            {"staleness/by_length/512/masked_frac": 0.2},
        ),
        ("tools fail", {"rollout/tool_failed_frac": 0.5}, {"rollout/tool_failed_frac": 0.1}),
        ("tools decline", {"rollout/tool_declined_frac": 0.95}, {"rollout/tool_declined_frac": 0.6}),
        ("little to learn", {"critic/zero_advantage_frac": 0.5}, {"critic/zero_advantage_frac": 0.2}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_alone(name: str, last: dict[str, float], less: dict[str, float]) -> None:
    (found_alert,) = find_alerts(run(last), status(), KEYS)
    assert (
        (found_alert.name, found_alert.step) == (name, 2 * WINDOW_STEPS)
        and found_alert.what
        and found_alert.do
        and found_alert.link
    )
    assert not find_alerts(run(less), status(), KEYS)


@pytest.mark.parametrize(
    ("name", "gauges", "more", "said"),
    [
        (
            "attempts fail", {FAILED + "reward_error": 37.0, "flow/issued": 3.0, "flow/trained": 3.0},
            {"failed": "attempts failed: 37 reward_error; latest: KeyError: 'answer' (mine.py:41)"},
            "37 of 40, mostly reward_error: KeyError: 'answer' (mine.py:41)",
        ),
        ("a process was lost", {"async/workers": 1.0}, {}, "only 1 of 2 workers is connected"),
        (
            "a process was lost", {FAILED + "worker_lost": 12.0}, {"lost": "worker 1 in step 5 (silent)"},
            "12 attempts were lost with a worker and restarted, latest: worker 1 in step 5 (silent)",
        ),
        (
            "episode counts do not add up", {"flow/issued": 8.0, "flow/trained": 7.0}, {},
            "8 episodes were issued",
        ),
        (
            "no progress", {}, {"seconds": 400.0, "waits": ("trainer 0: trajectories of step 0",)},
            "no episode has finished for 0:06:40: trainer 0: trajectories of step 0",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_any_step(
    name: str, gauges: dict[str, float], more: dict[str, Any], said: str
) -> None:
    (found_alert,) = find_alerts([], status(gauges, **more), KEYS)
    assert found_alert.name == name and found_alert.what.startswith(said)
    assert not find_alerts([], status({}), KEYS)


def test_a_reward_that_is_always_the_same_is_said_once_two_batches_have_landed() -> None:
    same = {"rollout/score/min": 0.0, "rollout/score/max": 0.0, "rollout/landed": 128.0}
    (found_alert,) = find_alerts([], status(same), KEYS)
    assert (found_alert.name, found_alert.what) == ("constant reward", "all 128 episodes scored 0")
    assert found_alert.keys == {"rollout.reward": "math"} and "rollout.reward=math" in found_alert.line
    assert not find_alerts([], status(same | {"rollout/landed": 127.0}), KEYS)


@pytest.mark.parametrize(
    ("keys", "rows", "alerted"),
    [
        ({"rollout.agent": "mine.py:solve"}, 2.1, True),
        ({"rollout.agent.command.line": "gptme"}, 2.1, True),
        ({"rollout.agent.mine.py:solve.option": 1}, 2.1, True),
        ({"rollout.agent.command.line": "gptme"}, 1.1, False),
        ({"rollout.agent.codex.sandbox": "jail"}, 2.1, False),
        ({"rollout.agent.mini_swe_agent": {}}, 2.1, False),
        ({"rollout.agent.command.line": "gptme", "rollout.untrained_agents": ["small"]}, 2.1, False),
        ({"rollout.agent": None}, 2.1, False),  # rows of a folded history
    ],
)
def test_rows_of_an_agent_beside_the_main_one_are_an_alert(
    keys: dict[str, Any], rows: float, alerted: bool
) -> None:
    keys = {"rollout.untrained_agents": [], **KEYS, **keys}
    alert_lines = [alert.line for alert in find_alerts(run({"rollout/rows/mean": rows}), status(), keys)]
    assert len(alert_lines) == alerted
    for line in alert_lines:
        assert line.startswith("extra rows per episode: 2.1 rows per episode, all trained with the episode's")
        assert line.endswith("(now rollout.untrained_agents=[])")


def test_the_cause_has_an_advice_of_its_own() -> None:
    (found_alert,) = find_alerts(run({"rollout/end/max_turns": 1.0}), status(), KEYS)
    assert found_alert.what == "100% of the episodes ended with max_turns" and found_alert.keys == {
        "rollout.max_turns": "4"
    }


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ({"timing_s/reward/mean": 7.0}, "the reward function (7 s of the 10 s that an episode takes; the"),
        ({"timing_s/tools/mean": 6.0}, "tools (6 s of"),
        ({"timing_s/tools/mean": 1.0}, "sampling (8 s of"),
        ({"async/trainer_idle_frac": 0.01, "async/rollout_idle_frac": 0.7}, "the trainer (waiting 1%"),
        ({"async/trainer_idle_frac": 0.3, "timing_s/reward/mean": 7.0}, ""),
    ],
)
def test_advice_names_what_limits_the_run(last: dict[str, float], said: str) -> None:
    found_alerts = find_alerts(run({"async/trainer_idle_frac": 0.9} | last), status(), KEYS)
    assert [alert.level for alert in found_alerts] == ["advice"] * bool(said)
    assert all(alert.what.startswith(said) for alert in found_alerts)


def test_advice_waits_until_nothing_is_wrong() -> None:
    slow = {"async/trainer_idle_frac": 0.9, "timing_s/reward/mean": 7.0}
    assert [alert.name for alert in find_alerts(run(slow), status(), KEYS)] == ["bottleneck"]
    assert not find_alerts(run(slow)[-4:], status(), KEYS), "a start is no measure"
    found_alerts = find_alerts(run(slow | {"actor/skipped_steps": 1.0}), status(), KEYS)
    assert [alert.name for alert in found_alerts] == ["skipped optimizer steps"]


def test_a_run_that_stands_still_is_distinguished_from_one_that_validates() -> None:
    (found_alert,) = find_alerts(run({}), status(seconds=400.0), KEYS)
    assert found_alert.name == "no progress" and found_alert.what == "no step has finished for 0:06:20"
    assert not find_alerts(run({}), status(seconds=300.0), KEYS)
    assert not find_alerts(
        run({}), status(seconds=400.0, waits=("the validation of step 10: 3 of 8 …",)), KEYS
    )
    assert not find_alerts(run({}), status(seconds=400.0) | {"phase": "closed"}, KEYS)


def test_the_start_of_a_launch_is_no_silence_and_its_workers_come_one_after_another() -> None:
    """Models were read for 400 s; then the first of two workers has connected."""
    one_worker = {"async/workers": 1.0}
    for rows in ([], run({})):
        assert not find_alerts(rows, status(one_worker, seconds=450.0, running=30.0), KEYS)
        found_alerts = find_alerts(rows, status(one_worker, seconds=900.0, running=480.0), KEYS)
        assert [alert.name for alert in found_alerts] == ["no progress", "a process was lost"]
        assert found_alerts[0].what.endswith("for 0:08:00")


def test_a_loss_that_is_over_is_no_more_than_a_remark() -> None:
    lost = {FAILED + "worker_lost": 5.0}
    (found_alert,) = find_alerts(run(lost), status(lost), KEYS)
    assert (found_alert.name, found_alert.level) == ("a process was lost", "advice")
    (found_alert,) = find_alerts(run({}), status(lost), KEYS)
    assert found_alert.level == "warn"


@pytest.mark.parametrize(
    ("success", "score", "highest", "name"),
    [
        (0.99, 0.97, 1.0, "solved"),
        (None, 0.97, 1.0, "solved"),
        (0.02, 0.01, 1.0, "nothing to learn"),
        (None, 0.097, 0.1, "nothing to learn"),  # may be the reward of a form alone
    ],
)
def test_a_solved_run_is_distinguished_from_a_stuck_one(
    success: float | None, score: float, highest: float, name: str
) -> None:
    """A solved one has the same symptoms: no advantage, little entropy."""
    scores = {"rollout/score/mean": score, "rollout/score/max": highest, "rollout/score/min": 0.0}
    last = {"critic/zero_advantage_frac": 0.99, "actor/entropy": 0.01 if name == "solved" else 0.5, **scores}
    (found_alert,) = find_alerts(run(last, success), status(), KEYS)
    assert found_alert.name == name and (found_alert.level == "good") == (name == "solved")


def test_where_most_is_solved_nothing_to_learn_is_no_more_than_an_advice() -> None:
    (alerts,) = find_alerts(run({"critic/zero_advantage_frac": 0.95}, 0.85), status(), KEYS)
    assert (alerts.name, alerts.level) == ("nothing to learn", "advice")


def test_since_when_a_run_is_solved() -> None:
    rows = run({"critic/zero_advantage_frac": 0.5}, 0.97)
    rows += [{"training/step": 20.0, SUCCESS: 0.98}]
    found_alerts = find_alerts(
        [{"training/step": 0.0, SUCCESS: 1.0}, {"training/step": 5.0, SUCCESS: 0.5}, *rows], {}, KEYS
    )
    assert (
        found_alerts[0].what
        == "held-out success is 98%, and the task has been solved since step 10; 50% of the episodes teach "
        "nothing new"
    )


def test_scores_beyond_the_default_of_success_are_said() -> None:
    rows = [{"training/step": 0.0, SUCCESS: 0.5, "val-aux/score/max": 3.5}]
    (found_alert,) = find_alerts(rows, status(), KEYS)
    assert found_alert.name == "success threshold is low" and found_alert.what.startswith("scores reach 3.5")
    assert not find_alerts(rows, status(), KEYS | {"validation.success": 3.0})


def test_a_supervised_run_has_no_rewards_to_miss() -> None:
    assert not find_alerts(
        run({"actor/nll": 1.0, "rollout/score/max": 0.0, "critic/zero_advantage_frac": 1.0}), {}, KEYS
    )


def test_a_healthy_run_and_one_without_metrics_have_none() -> None:
    assert not find_alerts(run({}), status(), KEYS)
    assert not find_alerts(
        [{"training/step": float(step), "timing_s/step": 1.0} for step in range(20)], {}, {}
    )
    assert not find_alerts([], {}, {})


def test_rows_in_the_middle_of_a_run_change_nothing() -> None:
    rows = [*run({}), *run({"actor/entropy": 0.01})]
    assert (
        len(rows_for_rules(rows)) == 3 * WINDOW_STEPS + 2
        and find_alerts(rows_for_rules(rows), {}, KEYS) == find_alerts(rows, {}, KEYS) != []
    )


def test_every_rule_has_its_text() -> None:
    assert rule_texts().keys() == ALERT_RULES.keys()


def test_rewards_that_tie_are_no_fault_where_a_teacher_teaches() -> None:
    rows = run({"rollout/score/max": 0.0, "rollout/score/min": 0.0, "critic/zero_advantage_frac": 1.0})
    penalty = KEYS | {"kl.where": "loss", "kl.reference": "m", "kl.coef": 0.1, "scorers.reference.path": "m"}
    assert find_alerts(rows, status(), penalty)
    assert not find_alerts(rows, status(), penalty | {"kl.coef": 1.0})
    assert not find_alerts(rows, status(), penalty | {"kl.coef": 0.05, "scorers.teacher.path": "t"})


def learning(steps: int, held_out: dict[int, float], last: dict[str, float]) -> list[dict[str, float]]:
    """Return steps of a run whose last WINDOW have other numbers, and the success of 256 questions."""
    rows = [
        {**HEALTHY, **(last if step > steps - WINDOW_STEPS else {}), "training/step": step, "time_s": step}
        for step in range(1, steps + 1)
    ]
    rows += [
        {"training/step": step, SUCCESS: share, "val-aux/samples": 256} for step, share in held_out.items()
    ]
    return [{name: float(value) for name, value in row.items()} for row in rows]


COLLAPSED = {"actor/entropy": 0.01}
POOR = COLLAPSED | {"rollout/score/mean": 0.1}


@pytest.mark.parametrize(
    ("steps", "held_out", "last", "names"),
    [
        (38, {0: 0.28, 20: 0.6}, COLLAPSED, []),
        (59, {0: 0.28, 20: 0.6, 40: 0.75}, COLLAPSED, []),
        (59, {0: 0.28, 20: 0.6, 40: 0.75}, {"critic/zero_advantage_frac": 0.5}, []),
        (59, {0: 0.28, 20: 0.3, 40: 0.31}, COLLAPSED, ["entropy collapse"]),
        (400, {0: 0.28, 20: 0.6, 200: 0.62, 380: 0.61}, COLLAPSED, ["entropy collapse"]),
        (38, {0: 0.28, 20: 0.6}, POOR, ["entropy collapse"]),
        (38, {0: 0.6, 20: 0.28}, COLLAPSED, ["held-out success fell", "entropy collapse"]),
    ],
    ids=["rises", "still rises", "hint", "flat", "flat again", "fell since", "fell"],
)  # fmt: skip
def test_nothing_about_learning_is_wrong_while_held_out_success_rises(
    steps: int, held_out: dict[int, float], last: dict[str, float], names: list[str]
) -> None:
    rows = learning(steps, held_out, last)
    assert [alert.name for alert in find_alerts(rows_for_rules(rows), status(), KEYS)] == names


@pytest.mark.parametrize(("steps", "names"), [(30, []), (60, ["entropy collapse"])])
def test_before_the_first_validation_the_score_in_training_tells_that_a_young_run_learns(
    steps: int, names: list[str]
) -> None:
    rows = learning(steps, {0: 0.28}, COLLAPSED)
    for step, row in enumerate(rows[:-1]):
        row["rollout/score/mean"] = 0.2 + 0.6 * step / steps + 0.05 * (step % 2)
    assert [alert.name for alert in find_alerts(rows_for_rules(rows), status(), KEYS)] == names


def test_there_is_one_hint_at_a_time_and_none_on_the_speed_of_a_short_run() -> None:
    rows = run({"async/trainer_idle_frac": 0.9, "critic/zero_advantage_frac": 0.5})
    assert [alert.name for alert in find_alerts(rows, status(), KEYS)] == ["bottleneck"]
    short = KEYS | {"total_steps": 60}  # of a second each
    assert [alert.name for alert in find_alerts(rows, status(), short)] == ["little to learn"]
    assert [alert.name for alert in find_alerts(rows, status(), KEYS | {"total_steps": 600})] == [
        "bottleneck"
    ]
