"""Summarizes a run in a few numbers, from the rows of metrics.jsonl and the flow counters. Pure.

A row with `timing_s/step` is a committed step; a row with `val-core/all/…` is a validation. None means
that the run has no such number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from asyncrl.buffer.records import EpisodeAccount
from asyncrl.observe import metrics as metric
from asyncrl.observe.held_out import SuccessShare, clearly_below
from asyncrl.observe.metrics import Row, label, names_matching

QUESTION_KEYS = "questions_before", "questions_after"  # keys of the summary
NOT_CONSERVED = "✗ NOT CONSERVED"  # the audit does not agree: exit code 1
EDGE_SHARE = 0.1  # fraction of the steps that `edges` averages over
# Held-out results, the most telling first: key of the summary without `_before` and `_after` → metric.
HELD_OUT_RESULTS = {
    "success": metric.SAMPLED,
    "greedy": metric.GREEDY,
    "score": metric.SAMPLED_SCORE,
    "greedy_score": metric.GREEDY_SCORE,
    "nll_held_out": metric.NLL_HELD_OUT,
}
SUCCESS_KEYS = ("success", "greedy")  # of HELD_OUT_RESULTS: shares of episodes, shown in percent
# Results of training: key of the summary without `_first` and `_last` → metric.
TRAINING_RESULTS = {"nll": metric.NLL, "reward": metric.REWARD, "kl_loss": metric.KL_LOSS}


def summarize(rows: Sequence[Row], account: Mapping[str, int], conserved: bool) -> dict[str, Any]:
    """Return the summary. `conserved` is the coordinator's audit, not a sum over `flow`."""
    steps = latest_steps(row for row in rows if metric.STEP_SECONDS in row)
    validations = [row for row in rows if any(name.startswith("val-") for name in row)]
    reward = edge_means(steps, metric.REWARD)
    nll = edge_means(steps, metric.NLL)
    kl = edge_means(steps, metric.KL_LOSS)

    components = {
        component: (
            *edge_means(steps, name),
            *_before_and_after(validations, metric.COMPONENT_HELD_OUT.replace("*", component)),
        )
        for component, name in names_matching(metric.COMPONENT, set[str]().union(*steps)).items()
    }

    tokens = _sum(steps, metric.MODEL_TOKENS)
    busy_s = _sum(steps, metric.STEP_SECONDS)
    return {
        "steps": int(steps[-1]["training/step"]) if steps else 0,
        "skipped_steps": int(_sum(steps, "actor/skipped_steps")),
        "seconds": round(rows[-1].get("time_s", 0.0), 3) if rows else 0.0,
        "reward_first": reward[0],
        "reward_last": reward[1],
        "components": components,
        "nll_first": nll[0],
        "nll_last": nll[1],
        "kl_loss_first": kl[0],
        "kl_loss_last": kl[1],
        **{
            f"{key}_{when}": value
            for key, name in HELD_OUT_RESULTS.items()
            for when, value in zip(("before", "after"), _before_and_after(validations, name), strict=True)
        },
        **dict(zip(QUESTION_KEYS, _before_and_after(validations, metric.ASKED), strict=True)),
        "policy_version": int(max(_max(rows, "weights/pushed") or 0, _max(rows, metric.VALIDATED) or 0)),
        "tokens_trained": int(tokens),
        "tokens_abandoned": int(_last(rows, "rollout/abandoned_tokens") or 0) or None,
        "tokens_per_s": tokens / busy_s if busy_s else None,
        "zero_advantage_frac": mean(steps, metric.ZERO_ADVANTAGE, weight="trainer/trajectories"),
        "lag_mean": mean(steps, metric.LAG, weight=metric.MODEL_TOKENS),
        "lag_max": _max(steps, metric.LAG_MAX),
        "masked_token_frac": mean(steps, metric.MASKED, weight=metric.MODEL_TOKENS),
        "trajectories_multi_version": _last(steps, "rollout/multi_version_frac"),
        "trainer_idle_frac": mean(steps, metric.TRAINER_IDLE, weight=metric.STEP_SECONDS),
        "rollout_idle_frac": mean(steps, metric.ROLLOUT_IDLE, weight=metric.STEP_SECONDS),
        "weights_stall_s_mean": mean(steps, "weights/stall_s"),
        "weights_stall_frac": _share(steps, metric.UPDATE, metric.STEP_SECONDS),
        "logprob_diff_max_same_version": _max(steps, "rollout_corr/logprob_diff_max"),
        "k3_same_version": mean(
            steps, "rollout_corr/k3_kl_same_version", weight="rollout_corr/logprob_diff_tokens"
        ),
        "logprob_tokens_compared": int(_sum(steps, "rollout_corr/logprob_diff_tokens")),
        "probe_logprob_diff_max": _max(rows, "weights/probe_logprob_diff_max"),
        "probe_tokens_compared": int(_last(rows, "weights/probe_tokens") or 0),
        "probe_noise_floor": _last(rows, "weights/probe_noise_floor"),
        "flow": dict(account),
        "conserved": conserved,
    }


def outcome_line(summary: Mapping[str, Any], ended: str = "completed", total: int = 0) -> str:
    """Return one sentence, for example "held-out success 27% → 98% in 120 steps", as far as known. `ended`:
    how the run ended, '' while it is running; `total`: planned steps."""
    steps_done = summary["steps"]
    of_total = "" if ended == "completed" or total <= steps_done else f" of {total}"
    steps_word = "step" if max(steps_done, total) == 1 else "steps"
    steps_text = f"{'in' if ended == 'completed' else 'after'} {steps_done}{of_total} {steps_word}"

    held_out = [
        (label(name), [text_of(key, summary.get(f"{key}_{when}")) for when in ("before", "after")])
        for key, name in HELD_OUT_RESULTS.items()
    ]

    changed_results = [(name, values) for name, values in held_out if values[1] and values[0] != values[1]]
    known_results = [(name, values) for name, values in held_out if values[1]]
    before = [f"{name} {values[0]}" for name, values in held_out if values[0]]
    if shown_results := changed_results or known_results:
        name, values = shown_results[0]
        text = f"{name} {' → '.join(filter(None, values))} {steps_text}{_unclear_note(summary, name)}"
    elif steps_done:
        key = "reward" if summary.get("nll_first") is None else "nll"
        name = label(TRAINING_RESULTS[key])
        values = [text_of(key, summary.get(f"{key}_{when}")) for when in ("first", "last")]
        change = f"{name} {' → '.join(dict.fromkeys(values))}" if all(values) else "no reward recorded"
        text = f"{change} {steps_text}; {f'{before[0]} before' if before else 'no validation was run'}"
    else:
        text = f"{before[0]}{' before training' if total else ''}" if before else ""

    ending = "" if ended in ("", "completed") else ended.partition(":")[0]
    if not text:
        text = f"{ending} before the first step finished" if ending else "no step has finished"
    elif ending:
        text = f"{ending}: {text}"

    return text[0].upper() + text[1:]


def newest_number(summary: Mapping[str, Any]) -> str:
    """Return the newest held-out number of a run, as "held-out success 31.2%"; before the first validation in
    training the reward or the loss; '' while nothing is known."""
    results = [
        *((key, name, f"{key}_after") for key, name in HELD_OUT_RESULTS.items()),
        *((key, TRAINING_RESULTS[key], f"{key}_last") for key in ("nll", "reward")),
        *((key, name, f"{key}_before") for key, name in HELD_OUT_RESULTS.items()),
    ]
    for key, name, summary_key in results:
        if (value := summary.get(summary_key)) is not None:
            return f"{label(name)} {value:{'.1%' if key in SUCCESS_KEYS else '.3g'}}"
    return ""


def _unclear_note(summary: Mapping[str, Any], name: str) -> str:
    """Return a note if success before and after may differ by chance alone, as the intervals meet."""
    counts = [summary.get(count) or 0 for count in QUESTION_KEYS]
    for key in SUCCESS_KEYS:
        reported_values = [summary.get(f"{key}_{when}") for when in ("before", "after")]
        values = [value for value in reported_values if value is not None]
        if name != label(HELD_OUT_RESULTS[key]) or len(values) < 2 or not all(counts):
            continue

        before, after = (SuccessShare(value, count) for value, count in zip(values, counts, strict=True))
        if not clearly_below(before, after) and not clearly_below(after, before):
            return f": no clear change ({counts[1]:,.0f} questions)"

    return ""


def text_of(key: str, value: float | None) -> str:
    """Write a number with at most three digits: success as 7%, 0.4%, 99.6%, others as 0.0123; None as ''."""
    if value is None:
        return ""
    if key not in SUCCESS_KEYS:
        return f"{value:.3g}"
    return f"{value:.0%}" if 0.01 <= value <= 0.99 else f"{100 * value:.{1 if value < 0.5 else 3}g}%"


def identity_line(account: Mapping[str, int], conserved: bool) -> str:
    """Return the conservation identity with its numbers, and whether the audit agrees."""
    names = ("trained", "filtered", "dropped", "failed", "taken", "ready", "in_flight")
    parts = " + ".join(f"{account.get(name, 0)} {label(metric.FLOW + name)}" for name in names)
    issued = f"{account.get('issued', 0)} {label(metric.FLOW + 'issued')}"
    return f"{issued} = {parts} {'✓' if conserved else NOT_CONSERVED}"


def account_of(metrics: Row) -> EpisodeAccount:
    """Read the counters of episodes from the metrics `flow/NAME`."""
    return EpisodeAccount(
        *(int(metrics.get(metric.FLOW + name, 0)) for name in EpisodeAccount.__struct_fields__)
    )


def account_line(metrics: Row) -> str:
    """Show the counters of a row as `identity_line` does; '' before there are counters."""
    flow = account_of(metrics)
    return identity_line(asdict(flow), flow.conserved) if metric.FLOW + "issued" in metrics else ""


def tokens_per_lag(rows: Iterable[Row]) -> dict[int, int]:
    """Count the tokens that were taken for training at each lag, the lowest lag first."""
    tokens_by_lag = Counter[int]()
    for row in rows:
        for name in filter(lambda name: name.startswith(metric.LAG_TOKENS), row):
            tokens_by_lag[int(name.removeprefix(metric.LAG_TOKENS))] += int(row[name])
    return dict(sorted(tokens_by_lag.items()))


def failures_line(counts: Mapping[str, int], newest: str) -> str:
    """Return failed attempts by kind, and the newest cause; '' without failures. Retries may have landed."""
    if not counts:
        return ""
    kinds = ", ".join(
        f"{count:,} {kind}" for kind, count in sorted(counts.items(), key=lambda item: -item[1])
    )
    return f"attempts failed: {kinds}" + (f"; latest: {newest}" if newest else "")


def summary_notes(summary: Mapping[str, Any]) -> list[str]:
    """Return the summary's lines on failed attempts and on the account of held-out episodes."""
    lines = [failures_line(summary.get("attempts_failed", {}), summary.get("newest_failure", ""))]
    if (account := summary.get("held_out", {})).get("issued"):
        names = ["scored", "failed", "in_flight"]
        if account.get("begun_anew"):
            names.append("begun_anew")
        words = {"in_flight": "in flight", "begun_anew": "started again"}
        parts = (f"{account.get(name, 0)} {words.get(name, name)}" for name in names)
        lines.append(f"held out: {account['issued']} issued = {' + '.join(parts)}")
    return [line for line in lines if line]


def latest_steps(rows: Iterable[Row]) -> list[Row]:
    """Return a row per step, in order; of a step repeated after a crash the last row counts."""
    by_step = {row["training/step"]: row for row in rows}
    return [by_step[step] for step in sorted(by_step)]


def edge_means(steps: Sequence[Row], name: str) -> tuple[float | None, float | None]:
    """Return the means over the first and the last tenth of the steps that have the number; a step of few
    episodes may have none."""
    known_rows = [row for row in steps if name in row]
    edge = max(1, round(EDGE_SHARE * len(known_rows)))
    return mean(known_rows[:edge], name), mean(known_rows[-edge:], name)


def _before_and_after(validations: Sequence[Row], name: str) -> tuple[float | None, float | None]:
    """Return the values of the validation before training and of the last later validation, or None."""
    before = next((row[name] for row in validations if name in row and row["training/step"] == 0), None)
    has_later = len(validations) > 1 or any(row["training/step"] for row in validations)
    return before, validations[-1].get(name) if has_later else None


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _sum(rows: Sequence[Row], name: str) -> float:
    return sum(_values(rows, name))


def _max(rows: Sequence[Row], name: str) -> float | None:
    return max(_values(rows, name), default=None)


def _last(rows: Sequence[Row], name: str) -> float | None:
    values = _values(rows, name)
    return values[-1] if values else None


def _share(rows: Sequence[Row], part_name: str, total_name: str) -> float | None:
    """Return the sum of one number divided by the sum of another, over the rows that have both."""
    complete_rows = [row for row in rows if part_name in row and total_name in row]
    total = _sum(complete_rows, total_name)
    return _sum(complete_rows, part_name) / total if total else None


def mean(rows: Sequence[Row], name: str, weight: str = "") -> float | None:
    """Return the mean over the rows that have the number, weighted by the rows' number `weight`."""
    pairs = [(row[name], row.get(weight, 0.0) if weight else 1.0) for row in rows if name in row]
    total = sum(row_weight for _, row_weight in pairs)
    return sum(value * row_weight for value, row_weight in pairs) / total if total else None
