"""Answers for the tab Overview of a run: the outcome in a sentence, before and after, alerts, waits by role,
the flow of episodes, figures and configuration. The page formats the figures with units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from asyncrl.config import leaves, parse
from asyncrl.observe import metrics as metric
from asyncrl.observe.alerts import Alert, find_alerts, unless_quoted
from asyncrl.observe.evidence import WINDOW_STEPS
from asyncrl.observe.files import read_some_rows, read_status, read_summary
from asyncrl.observe.held_out import wilson_interval
from asyncrl.observe.machine import recorded_machine
from asyncrl.observe.metrics import Row, figures, label, names_matching
from asyncrl.observe.summary import (
    HELD_OUT_RESULTS,
    account_of,
    edge_means,
    latest_steps,
    mean,
    outcome_line,
    summarize,
    summary_notes,
)
from asyncrl.observe.table import summary_numbers
from asyncrl.store.launches import config_tree, describe_differences, differences, launches_of
from asyncrl.viewer.compare import ALL_PREFIX, evaluation_measures, measure_title

NO_MACHINE = "machine.json is missing or unreadable, so the machine of this run is unknown"
MAX_ROWS = 400  # metrics rows; of a longer run some rows are chosen
CURVE_POINTS = 120  # points of a small curve
SHOWN_RESUMES = 3  # newest launches with changed keys
FIGURE_UNITS = {  # metrics of the figures, in the order of the page, with their units
    metric.REWARD: "",
    metric.NLL: "",
    metric.LAG: "steps",
    metric.MASKED: "share",
    metric.ZERO_ADVANTAGE: "share",
    metric.ENTROPY: "nats",
    metric.LENGTH: "tokens",
    "tool_call_counts/mean": "",
    metric.STEP_SECONDS: "",
    "rollout/tokens_per_s": "",
}
FRACTION_METRICS = (metric.SAMPLED, metric.GREEDY)
SUCCESS_OF_SCORE = {metric.SAMPLED_SCORE: metric.SAMPLED, metric.GREEDY_SCORE: metric.GREEDY}
ENGINE_PROCESSES = dict.fromkeys(("server", "engine", "scorer"), "engines")
ROLE_OF_PROCESS = {"trainer": "trainer", **ENGINE_PROCESSES, "worker": "workers"}


def overview(run_dir: Path, ending: str) -> dict[str, Any]:
    """Summarize a run that is over (`ending` says how) or goes on. ConfigError for an unreadable file."""
    # Twice the window, because repeated steps after a crash and the row of the end are read, too.
    rows = read_some_rows(run_dir, 2 * WINDOW_STEPS, MAX_ROWS)
    status = read_status(run_dir)
    steps = latest_steps(row for row in rows if metric.STEP_SECONDS in row)
    gauges = status.get("gauges") or next(
        (row for row in reversed(rows) if metric.FLOW + "issued" in row), {}
    )

    episode_account = account_of(gauges)
    saved_summary = read_summary(run_dir)
    summary = saved_summary or summarize(rows, asdict(episode_account), episode_account.conserved)
    is_complete = saved_summary or summary["steps"] == len(steps)  # otherwise sums cover only some steps

    launches = launches_of(run_dir)
    config = launches[-1].config if launches else {}
    key_changes = [
        (new_launch.first_step, describe_differences(old_launch.config, new_launch.config))
        for old_launch, new_launch in pairwise(launches)
    ]
    resume_alerts = [
        Alert(f"resumed with changed keys at step {step}", "advice", text, "", link={"tab": "charts"})
        for step, text in key_changes
        if text
    ]

    required_keys = {"name": "-", "model": {"path": "-"}, "data": {"train": "-"}}
    config_values = dict(leaves(config))
    differing_keys = differences([config, config_tree(parse(required_keys))]).items() if config else ()

    machine = recorded_machine(run_dir)
    is_training = bool(config_values.get("total_steps", 1))
    shown_alerts = find_alerts(rows, status, config_values)
    run_notes = (
        summary_notes(summary) if saved_summary else [unless_quoted(status.get("failed", ""), shown_alerts)]
    )
    if machine is None:
        run_notes = [*run_notes, NO_MACHINE]

    return {
        "outcome": _outcome(ending, status, summary, is_training),
        "trains": is_training,
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "conserved": summary["conserved"],
        "held_out": list(evaluation_measures(run_dir))
        or list(_validation_results(rows) if is_training else _evaluation_results(rows)),
        "figures": list(_figures(steps)),
        "alerts": [*shown_alerts, *resume_alerts[-SHOWN_RESUMES:]],
        "waits": list(_waits(steps if ending else steps[-1:], gauges, status, ending)),
        "flow": summary["flow"],
        "running": int(gauges.get("async/running", 0)),
        "reasons": summary.get("reasons", {}),
        "configuration": [
            (key, value, default) for key, (value, default) in differing_keys if value is not None
        ],
        "tables": {
            "All numbers": dict(summary_numbers(summary, everything=True)) if is_complete else {},
            "Machine of the newest launch": machine or {},
        },
        "notes": [note for note in run_notes if note],
    }


def _outcome(ending: str, status: Mapping[str, Any], summary: Mapping[str, Any], is_training: bool) -> str:
    if not status and not ending and not summary["steps"]:
        return "Starting: the coordinator has not reported yet"

    evaluated = any(summary.get(f"{key}_before") is not None for key in HELD_OUT_RESULTS)
    if not (is_training or evaluated):
        if ending in ("", "completed"):
            return "Evaluated without a reward" if ending else "Evaluating: no results yet"
        return f"{ending.partition(':')[0].capitalize()}: nothing was evaluated"

    batch_fraction = 0.0 if ending or summary["steps"] else status.get("gauges", {}).get(metric.BATCH, 0.0)
    outcome_text = outcome_line(summary, ending, status.get("total_steps", 0))
    if batch_fraction > 0:
        outcome_text += f"; {batch_fraction:.0%} of the first batch is ready"

    return outcome_text


def _validation_results(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the results of validations before training, last, and by step, including score components. A
    score that equals the success is left out."""
    component_metrics = names_matching(metric.COMPONENT_HELD_OUT, set[str]().union(*rows))
    results = [(label(name), name) for name in HELD_OUT_RESULTS.values()]
    for display_name, name in [*results, *component_metrics.items()]:
        curve = _curve(rows, name)
        measured_rows = [row for row in rows if name in row]
        if not measured_rows or (name in SUCCESS_OF_SCORE and curve == _curve(rows, SUCCESS_OF_SCORE[name])):
            continue

        result_rows = {} if measured_rows[0]["training/step"] else {"before": measured_rows[0]}
        if len(measured_rows) > len(result_rows):
            result_rows["after"] = measured_rows[-1]

        result = {"label": display_name, "unit": "share" if name in FRACTION_METRICS else "", "curve": curve}
        yield (
            result
            | {"part": display_name in component_metrics}
            | {position: _validation_result(row, name) for position, row in result_rows.items()}
        )


def _evaluation_results(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the results of an evaluation so far, under the names of evaluation.json, before that file
    exists."""
    newest_row = next((row for row in reversed(rows) if metric.ASKED in row), {})
    for name in sorted(name for name in newest_row if name.startswith(ALL_PREFIX)):
        unit = "share" if name in FRACTION_METRICS else ""
        yield {
            "label": name.removeprefix(ALL_PREFIX),
            "title": measure_title(name),
            "unit": unit,
            "curve": [],
            "after": _validation_result(newest_row, name),
            "tasks": {},
        }


def _validation_result(row: Row, name: str) -> dict[str, Any]:
    """Return a validation's number, for a fraction with Wilson's interval: over questions, as the episodes of
    a question are alike."""
    question_count = row.get(metric.ASKED, 0.0)
    interval = (
        wilson_interval(row[name], question_count) if name in FRACTION_METRICS and question_count else None
    )
    return {
        "value": row[name],
        "interval": interval,
        "step": row["training/step"],
        "questions": question_count,
    }


def _figures(steps: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield each figure's mean over the first and the last tenth of the steps, and a small curve."""
    metric_names = set[str]().union(*steps)
    components = {
        name: component for component, name in names_matching(metric.COMPONENT, metric_names).items()
    }
    figure_names = dict.fromkeys((metric.REWARD, *components, *FIGURE_UNITS))  # components come second
    for name in figure_names:
        if name in metric_names:
            first_mean, last_mean = edge_means(steps, name)
            yield {
                "label": components.get(name) or label(name),
                "metric": name,
                "part": name in components,
                "unit": FIGURE_UNITS.get(name, ""),
                "first": first_mean,
                "last": last_mean,
                "curve": _curve(steps, name),
            }


def _curve(steps: Sequence[Row], name: str) -> list[list[float]]:
    """Return the (step, value) points of a small curve; each value is the mean of equally many steps."""
    measured_rows = [row for row in steps if name in row]
    rows_per_point = -(-len(measured_rows) // CURVE_POINTS) or 1
    row_groups = [
        measured_rows[start : start + rows_per_point]
        for start in range(0, len(measured_rows), rows_per_point)
    ]
    return [[row_group[-1]["training/step"], mean(row_group, name) or 0.0] for row_group in row_groups]


def _waits(
    steps: Sequence[Row], gauges: Row, status: Mapping[str, Any], ending: str
) -> Iterator[dict[str, Any]]:
    """Yield for each role the use of time in these steps, and the current waits."""
    current_waits = defaultdict[str, list[str]](list)
    for wait in [] if ending else status.get("waits", []):
        role = ROLE_OF_PROCESS.get(wait.partition(" ")[0], "coordinator")
        current_waits[role].append(wait.partition(": ")[2] if role in ROLE_OF_PROCESS.values() else wait)

    worker_note = "" if ending else ", ".join(figures(("async/workers", "async/running"), gauges))
    shares = _time_shares(steps)
    for role in dict.fromkeys((*ROLE_OF_PROCESS.values(), "coordinator")):
        if (role_parts := shares.get(role, {})) or role in current_waits:
            note = worker_note if role == "workers" else ""
            yield {"role": role, "parts": role_parts, "now": current_waits[role], "note": note}


def _time_shares(steps: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return, by role, parts of the trainer's and the engines' time, and for workers parts of an episode's
    time."""
    total_seconds = sum(row[metric.STEP_SECONDS] for row in steps) or 1.0
    trainer_shares = {
        label(name): sum(row.get(name, 0.0) for row in steps) / total_seconds for name in metric.PHASES
    }
    shares_by_role = {"trainer": {name: share for name, share in trainer_shares.items() if share}}
    if (idle_share := mean(steps, metric.ROLLOUT_IDLE, weight=metric.STEP_SECONDS)) is not None:
        shares_by_role["engines"] = {"sampling": 1 - idle_share, "wait": idle_share}

    if episode_seconds := mean(steps, "timing_s/episode/mean"):
        tool_seconds = mean(steps, "timing_s/tools/mean")
        reward_seconds = mean(steps, "timing_s/reward/mean")
        worker_parts = {
            label("timing_s/tools/mean"): (tool_seconds or 0.0) / episode_seconds,
            label("timing_s/reward/mean"): (reward_seconds or 0.0) / episode_seconds,
        }
        sampling_label = "sampling" if reward_seconds is not None else "sampling and reward"
        shares_by_role["workers"] = {sampling_label: max(0.0, 1 - sum(worker_parts.values()))} | worker_parts

    return shares_by_role
