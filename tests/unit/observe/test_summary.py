"""The summary, against rows small enough to do by hand."""

from __future__ import annotations

import json

import pytest

from asyncrl.observe.metrics import GREEDY, SAMPLED, SAMPLED_SCORE
from asyncrl.observe.summary import identity_line, summarize
from asyncrl.observe.table import before_and_after

FLOW = {
    "issued": 12,
    "trained": 4,
    "filtered": 3,
    "dropped": 1,
    "failed": 1,
    "taken": 1,
    "ready": 1,
    "in_flight": 1,
}
KEYS = (
    "steps seconds reward_first reward_last success_before success_after greedy_after policy_version "
    "tokens_trained tokens_per_s lag_mean lag_max masked_token_frac trajectories_multi_version "
    "trainer_idle_frac rollout_idle_frac weights_stall_s_mean logprob_diff_max_same_version "
    "logprob_tokens_compared k3_same_version flow conserved"
)


def step(number: int, **more: float) -> dict[str, float]:
    names = {name.replace("__", "/"): value for name, value in more.items()}
    return {"training/step": number, "timing_s/step": 2.0, "time_s": 2.0 * number} | names


def test_every_promised_key_is_there_even_for_a_run_without_steps() -> None:
    summary = summarize([], FLOW, True)
    assert set(KEYS.split()) <= summary.keys()
    assert summary["steps"] == 0 and summary["reward_first"] is None and summary["tokens_trained"] == 0


def test_numbers_are_weighted_as_they_should_be() -> None:
    rows = [
        {"training/step": 0, "time_s": 1.0, SAMPLED: 0.2, SAMPLED_SCORE: -4.0, GREEDY: 0.0},
        step(1, rollout__score__mean=0.25, staleness__lag__mean=0.0, trainer__model_tokens=100),
        step(2, rollout__score__mean=0.75, staleness__lag__mean=2.0, trainer__model_tokens=300),
        {
            "training/step": 2,
            "time_s": 9.0,
            SAMPLED: 0.9,
            SAMPLED_SCORE: 7.0,
            GREEDY: 0.8,
            "val-aux/policy_version": 2,
        },
    ]
    summary = summarize(rows, FLOW, False)
    assert summary["steps"] == 2 and summary["seconds"] == 9.0
    assert (summary["reward_first"], summary["reward_last"]) == (0.25, 0.75)
    assert (summary["success_before"], summary["success_after"]) == (0.2, 0.9)
    assert (summary["greedy_before"], summary["greedy_after"]) == (0.0, 0.8)
    assert (summary["score_before"], summary["score_after"]) == (-4.0, 7.0)
    assert summary["lag_mean"] == pytest.approx(1.5)  # by tokens, not by steps
    assert summary["tokens_trained"] == 400 and summary["tokens_per_s"] == 100
    assert summary["policy_version"] == 2 and summary["conserved"] is False


def test_skipped_steps_are_counted() -> None:
    rows = [step(n, actor__skipped_steps=skipped) for n, skipped in enumerate((1.0, 0.0, 2.0))]
    assert summarize(rows, FLOW, True)["skipped_steps"] == 3


def test_rewards_at_the_ends_are_means_over_a_tenth_of_the_steps() -> None:
    rows = [step(n, rollout__score__mean=float(n)) for n in range(1, 21)]
    summary = summarize(rows, FLOW, True)
    assert (summary["reward_first"], summary["reward_last"]) == (1.5, 19.5)


def test_a_step_repeated_after_a_crash_counts_once() -> None:
    rows = [
        step(1, trainer__model_tokens=5),
        step(2, trainer__model_tokens=7),
        step(2, trainer__model_tokens=9),
    ]
    summary = summarize(rows, FLOW, True)
    assert summary["steps"] == 2 and summary["tokens_trained"] == 14


def test_one_validation_is_before_and_not_after() -> None:
    summary = summarize([{"training/step": 0, "time_s": 0.0, SAMPLED: 0.5}], FLOW, True)
    assert summary["success_before"] == 0.5 and summary["success_after"] is None


def test_a_validation_that_is_over_after_the_last_step_is_the_one_after() -> None:
    """Its row names the step that it judged, and is the last one."""
    rows = [{"training/step": 0, SAMPLED: 0.25}, step(1), step(2), step(3)]
    late = {"training/step": 2, "time_s": 30.0, SAMPLED: 0.75, "val-aux/policy_version": 2}
    summary = summarize([*rows, late], FLOW, True)
    assert (summary["steps"], summary["seconds"], summary["tokens_per_s"]) == (3, 30.0, 0.0)
    assert (summary["success_before"], summary["success_after"]) == (0.25, 0.75)
    assert summary["policy_version"] == 2


def test_extremes_are_of_the_whole_run() -> None:
    rows = [
        step(1, staleness__lag__max=3.0, rollout_corr__logprob_diff_max=1e-3),
        step(
            2,
            staleness__lag__max=1.0,
            rollout_corr__logprob_diff_tokens=10.0,
            rollout_corr__k3_kl_same_version=1e-9,
        ),
    ]
    summary = summarize(rows, FLOW, True)
    assert summary["k3_same_version"] == pytest.approx(1e-9)
    assert summary["lag_max"] == 3 and summary["logprob_diff_max_same_version"] == 1e-3
    assert summary["logprob_tokens_compared"] == 10


def test_the_wait_for_weights_is_a_share_of_the_steps_that_tell_it() -> None:
    assert summarize([step(1)], FLOW, True)["weights_stall_frac"] is None
    rows = [step(1), step(2, timing_s__update_weights=0.1), step(3, timing_s__update_weights=0.3)]
    assert summarize(rows, FLOW, True)["weights_stall_frac"] == pytest.approx(0.1)


def test_components_of_a_reward_stand_beside_the_score_in_training_and_held_out() -> None:
    """Partial credit is seen before anything succeeds: success stays 0 here."""
    name, held_out = "rollout/component/near/mean", "val-aux/all/sampled/near/mean@1"
    rows = [
        {"training/step": 0, SAMPLED: 0.0, held_out: 0.1},
        step(1, rollout__score__mean=0.25) | {name: 0.5, "rollout/component/near/max": 1.0},
        step(2, rollout__score__mean=0.5) | {name: 0.75},
        {"training/step": 2, SAMPLED: 0.0, held_out: 0.875},
    ]
    summary = summarize(rows, FLOW, True)
    assert summary["components"] == {"near": (0.5, 0.75, 0.1, 0.875)}
    table = before_and_after(json.loads(json.dumps(summary)))  # as `asyncrl runs show` reads it
    assert ("near (training)", "0.500", "0.750") in table and ("near (held out)", "0.100", "0.875") in table
    assert summarize(rows[1:3], FLOW, True)["components"] == {"near": (0.5, 0.75, None, None)}


def test_the_identity_line_shows_the_audit_and_not_a_sum() -> None:
    line = identity_line(FLOW, True)
    assert line.startswith("12 issued = 4 trained + 3 filtered + 1 dropped + 1 failed + 1 taken + 1 ready")
    assert line.endswith("1 in flight ✓")
    assert "NOT CONSERVED" in identity_line(FLOW, False)


def test_a_step_in_which_no_episode_landed_is_left_out_of_the_rewards() -> None:
    rows = [{"training/step": k, "timing_s/step": 1.0, "rollout/score/mean": k / 4} for k in (1, 2)]
    found = summarize([*rows, {"training/step": 3, "timing_s/step": 1.0}], {}, True)
    assert (found["reward_first"], found["reward_last"]) == (0.25, 0.5)


def test_a_last_validation_that_was_abandoned_has_no_success_of_an_earlier_one() -> None:
    rows = [
        {"training/step": 0.0, SAMPLED: 0.5},
        {"training/step": 5.0, SAMPLED: 0.6},
        {"training/step": 9.0, "val-aux/failed": 40.0},
    ]
    summary = summarize(rows, FLOW, True)
    assert summary["success_before"] == 0.5 and summary["success_after"] is None
