"""The summary, against rows small enough to do by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.observe.metrics import CHARTS, GREEDY, SAMPLED, SAMPLED_SCORE, catalogue, known_charts
from asyncrl.observe.summary import identity_line, outcome_line, summarize
from asyncrl.observe.table import (
    DIAGNOSTICS,
    SUMMARY_NUMBERS,
    asynchrony_line,
    before_and_after,
    summary_numbers,
)

STATES = ["issued", "trained", "filtered", "dropped", "failed", "taken", "ready", "in_flight"]
FLOW = dict(zip(STATES, (12, 4, 3, 1, 1, 1, 1, 1), strict=True))
KEYS = (
    "steps seconds reward_first reward_last success_before success_after greedy_after policy_version "
    "tokens_trained tokens_per_s lag_mean lag_max masked_token_frac trajectories_multi_version "
    "trainer_idle_frac rollout_idle_frac weights_stall_s_mean logprob_diff_max_same_version "
    "logprob_tokens_compared k3_same_version flow conserved"
)
SCORE = "rollout/score/mean"
LAG = "staleness/lag/mean"
LAST = "val-aux/policy_version"
TOKENS = "trainer/model_tokens"
PAUSE = "timing_s/update_weights"
DIFF, COMPARED, K3 = (
    f"rollout_corr/{name}" for name in ("logprob_diff_max", "logprob_diff_tokens", "k3_kl_same_version")
)


def step(number: int, **more: float) -> dict[str, float]:
    return {"training/step": number, "timing_s/step": 2.0, "time_s": 2.0 * number} | more


def held_out(number: float, success: float, **more: float) -> dict[str, float]:
    return {"training/step": number, SAMPLED: success} | more


def figures_of(**figures: float) -> dict[str, float]:
    return figures


# By what is shown: the rows of metrics.jsonl, and what the summary has.
CASES: dict[str, tuple[list[dict[str, float]], dict[str, Any]]] = {
    "a run without steps": ([], {"steps": 0, "reward_first": None, "tokens_trained": 0, "flow": FLOW}),
    "numbers are weighted as they should be": (
        [
            held_out(0, 0.2, time_s=1.0, **{SAMPLED_SCORE: -4.0, GREEDY: 0.0}),
            step(1, **{SCORE: 0.25, LAG: 0.0, TOKENS: 100}),
            step(2, **{SCORE: 0.75, LAG: 2.0, TOKENS: 300}),
            held_out(2, 0.9, time_s=9.0, **{SAMPLED_SCORE: 7.0, GREEDY: 0.8, LAST: 2}),
        ],
        figures_of(steps=2, seconds=9.0, reward_first=0.25, reward_last=0.75)
        | figures_of(success_before=0.2, success_after=0.9, greedy_before=0.0, greedy_after=0.8)
        | figures_of(score_before=-4.0, score_after=7.0, policy_version=2)
        | figures_of(tokens_trained=400, tokens_per_s=100, lag_mean=1.5),  # by tokens, not by steps
    ),
    "skipped steps are counted": (
        [step(n, **{"actor/skipped_steps": skipped}) for n, skipped in enumerate((1.0, 0.0, 2.0))],
        {"skipped_steps": 3},
    ),
    "rewards at the ends are means over a tenth of the steps": (
        [step(n, **{SCORE: float(n)}) for n in range(1, 21)],
        {"reward_first": 1.5, "reward_last": 19.5},
    ),
    "a step in which no episode landed has no reward": (
        [step(1, **{SCORE: 0.25}), step(2, **{SCORE: 0.5}), step(3)],
        {"reward_first": 0.25, "reward_last": 0.5},
    ),
    "a step repeated after a crash counts once": (
        [step(1, **{TOKENS: 5}), step(2, **{TOKENS: 7}), step(2, **{TOKENS: 9})],
        {"steps": 2, "tokens_trained": 14},
    ),
    "one validation is before and not after": (
        [held_out(0, 0.5)],
        {"success_before": 0.5, "success_after": None},
    ),
    "a validation that is over after the last step is the one after": (
        [held_out(0, 0.25), step(1), step(2), step(3), held_out(2, 0.75, time_s=30.0, **{LAST: 2})],
        figures_of(steps=3, seconds=30.0, tokens_per_s=0.0, policy_version=2)
        | figures_of(success_before=0.25, success_after=0.75),
    ),
    "an abandoned validation has no success of an earlier one": (
        [held_out(0, 0.5), held_out(5, 0.6), {"training/step": 9.0, "val-aux/failed": 40.0}],
        {"success_before": 0.5, "success_after": None},
    ),
    "extremes are of the whole run": (
        [
            step(1, **{"staleness/lag/max": 3.0, DIFF: 1e-3}),
            step(2, **{"staleness/lag/max": 1.0, COMPARED: 10.0, K3: 1e-9}),
        ],
        figures_of(lag_max=3, logprob_diff_max_same_version=1e-3)
        | figures_of(logprob_tokens_compared=10, k3_same_version=1e-9),
    ),
    "no step tells the wait for weights": ([step(1)], {"weights_stall_frac": None}),
    "the wait for weights is a share of the steps that tell it": (
        [step(1), step(2, **{PAUSE: 0.1}), step(3, **{PAUSE: 0.3})],
        {"weights_stall_frac": 0.1},
    ),
}


@pytest.mark.parametrize(("rows", "expected"), CASES.values(), ids=CASES)
def test_what_rows_add_up_to(rows: list[dict[str, float]], expected: dict[str, Any]) -> None:
    summary = summarize(rows, FLOW, False)
    assert set(KEYS.split()) <= summary.keys() and summary["conserved"] is False
    assert {key: summary[key] for key in expected} == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in expected.items()
    }


def test_components_of_a_reward_stand_beside_the_score_in_training_and_held_out() -> None:
    """Partial credit is seen before anything succeeds: success stays 0 here."""
    name = "rollout/component/near/mean"
    tested = "val-aux/all/sampled/near/mean@1"
    rows = [
        held_out(0, 0.0, **{tested: 0.1}),
        step(1, **{SCORE: 0.25, name: 0.5, "rollout/component/near/max": 1.0}),
        step(2, **{SCORE: 0.5, name: 0.75}),
        held_out(2, 0.0, **{tested: 0.875}),
    ]
    summary = summarize(rows, FLOW, True)
    assert summary["components"] == {"near": (0.5, 0.75, 0.1, 0.875)}
    table = before_and_after(json.loads(json.dumps(summary)))  # as `asyncrl runs show` reads it
    assert ("near (training)", "0.5", "0.75") in table and ("near (held out)", "0.1", "0.875") in table
    assert summarize(rows[1:3], FLOW, True)["components"] == {"near": (0.5, 0.75, None, None)}


def test_how_far_a_student_is_from_its_teacher_is_in_the_table() -> None:
    """Without a reward nothing else tells whether it learns."""
    summary = summarize([step(1, **{"actor/kl_loss": 0.25}), step(2, **{"actor/kl_loss": 0.125})], FLOW, True)
    assert ("KL to the reference (training)", "0.25", "0.125") in before_and_after(summary)
    assert before_and_after(summarize([step(1)], FLOW, True)) == []


def test_the_identity_line_shows_the_audit_and_not_a_sum() -> None:
    line = identity_line(FLOW, True)
    assert line.startswith("12 issued = 4 trained + 3 filtered + 1 dropped + 1 failed + 1 taken + 1 ready")
    assert line.endswith("1 in flight ✓")
    assert "NOT CONSERVED" in identity_line(FLOW, False)


def test_the_numbers_of_the_promises_are_in_one_line() -> None:
    stall, spanning = "weights/stall_s", "rollout/multi_version_frac"
    rows = [
        step(1, **{"staleness/lag/max": 3.0, spanning: 0.5, stall: 0.001, DIFF: 1e-6}),
        step(2, **{"staleness/lag/max": 1.0, spanning: 0.69, stall: 0.003, DIFF: 2e-6}),
        {"time_s": 5.0, "weights/probe_logprob_diff_max": 0.0},
    ]
    assert asynchrony_line(summarize(rows, FLOW, True)) == (
        "asynchrony: lag ≤ 3, 69% of episodes span several versions, log-prob gap ≤ 2e-06, "
        "weights gap ≤ 0, a weight push stalls the trainer for 0.002 s"
    )
    line = asynchrony_line({"logprob_diff_max_same_version": 0.3})
    assert line.endswith("docs/guides/gpus.md)"), "bfloat16"
    assert asynchrony_line(summarize([], FLOW, True)) == "", "nothing is claimed that was not measured"


NOTHING = {"steps": 0}


@pytest.mark.parametrize(
    ("summary", "ended", "total", "text"),
    [
        ({"steps": 120, "success_before": 0.271, "success_after": 0.984}, "completed", 120,
         "Held-out success 27% → 98% in 120 steps"),
        ({"steps": 12, "success_before": 0.0664, "success_after": 0.0039}, "", 60,
         "Held-out success 7% → 0.4% after 12 of 60 steps"),
        ({"steps": 12, "success_before": 0.125, "success_after": 0.0625, "questions_before": 16.0,
          "questions_after": 16.0}, "completed", 12,
         "Held-out success 12% → 6% in 12 steps: no clear change (16 questions)"),
        ({"steps": 12, "success_before": 0.125, "success_after": 0.75, "questions_before": 16.0,
          "questions_after": 16.0}, "completed", 12, "Held-out success 12% → 75% in 12 steps"),
        ({"steps": 12, "success_before": 0.5, "success_after": 0.4, "questions_before": 256.0,
          "questions_after": 512.0}, "failed: KeyError", 60,
         "Failed: held-out success 50% → 40% after 12 of 60 steps: no clear change (512 questions)"),
        ({"steps": 12, "greedy_before": 0.0, "greedy_after": 0.0, "questions_before": 8.0,
          "questions_after": 8.0}, "", 60,
         "Held-out success (greedy) 0% → 0% after 12 of 60 steps: no clear change (8 questions)"),
        ({"steps": 1, "greedy_before": 0.5, "greedy_after": 1.0}, "completed", 1,
         "Held-out success (greedy) 50% → 100% in 1 step"),
        ({"steps": 9, "success_before": 0.0, "success_after": 0.0, "score_before": 0.1, "score_after": 0.34},
         "completed", 9, "Held-out score 0.1 → 0.34 in 9 steps"),
        ({"steps": 9, "success_before": 0.0, "success_after": 0.0}, "completed", 9,
         "Held-out success 0% → 0% in 9 steps"),
        ({"steps": 9, "nll_held_out_before": 1.2345, "nll_held_out_after": 0.5}, "completed", 9,
         "Held-out loss per token 1.23 → 0.5 in 9 steps"),
        ({"steps": 3, "success_before": 0.3, "reward_first": 0.2, "reward_last": 0.4}, "", 9,
         "Reward 0.2 → 0.4 after 3 of 9 steps; held-out success 30% before"),
        ({"steps": 3, "nll_first": 2.0, "nll_last": 1.5}, "completed", 3,
         "Loss per token 2 → 1.5 in 3 steps; no validation was run"),
        ({"steps": 3}, "completed", 3, "No reward recorded in 3 steps; no validation was run"),
        ({"steps": 3, "success_after": 0.5}, "failed: KeyError", 9,
         "Failed: held-out success 50% after 3 of 9 steps"),
        (NOTHING | {"success_before": 0.3}, "", 9, "Held-out success 30% before training"),
        (NOTHING | {"success_before": 0.3}, "completed", 0, "Held-out success 30%"),
        (NOTHING, "killed: its launcher is gone", 9, "Killed before the first step finished"),
    ],
)  # fmt: skip
def test_the_outcome_in_one_sentence(summary: dict[str, Any], ended: str, total: int, text: str) -> None:
    assert outcome_line(summary, ended, total) == text


def test_no_label_stands_for_two_metrics() -> None:
    """Neither in the catalogue, which alone names labels, nor in the table of numbers or on the page."""
    catalogue_labels = [row.label for row in {*catalogue().values()} if row.label]
    assert sorted(catalogue_labels) == sorted({*catalogue_labels})
    numbers = {number.key: 1 for number in (*SUMMARY_NUMBERS, *DIAGNOSTICS)}
    printed_labels = [name for name, _ in summary_numbers(numbers, everything=True)]
    assert sorted(printed_labels) == sorted({*printed_labels}) and len(printed_labels) == len(numbers)
    charted = {name for charts in CHARTS.values() for names in charts.values() for name in names}
    for chart in known_charts(charted, charted):
        assert len({*chart.metrics.values()}) == len(chart.metrics), chart.title
