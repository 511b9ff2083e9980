"""Answers for the tab Overview of a run: its outcome in one sentence, before and after, what is wrong, who
waits for whom, the flow of its episodes, figures and configuration. The page writes the figures in their
units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from asyncrl.buffer.records import Flow
from asyncrl.config import leaves, parse, without_defaults
from asyncrl.errors import UNDECODABLE, ConfigError
from asyncrl.observe import metrics as metric
from asyncrl.observe.alerts import WINDOW, Alert, alerts
from asyncrl.observe.files import read_status, read_summary, some_rows
from asyncrl.observe.machine import recorded_machine
from asyncrl.observe.metrics import Row, label, shown
from asyncrl.observe.summary import (
    failures_line,
    flow_of,
    held_out_line,
    identity_line,
    latest,
    mean,
    outcome_line,
    summarize,
)
from asyncrl.observe.table import DIAGNOSTICS, NUMBERS
from asyncrl.store.launches import LaunchRecord, differences, launches_of, tree
from asyncrl.viewer.series import wilson

TASK = "val-task/"  # in evaluation.json
NO_MACHINE = "machine.json is missing or cannot be read: on which machine the run was made is not known"
CELL = 300  # characters of a value of the configuration; a chat template is longer
MOST_ROWS = 400  # of a longer run they are chosen
POINTS = 120  # of a small curve
JUDGED = {"success": metric.SAMPLED, "success, greedy": metric.GREEDY, "score": metric.SAMPLED_SCORE,
          "score, greedy": metric.GREEDY_SCORE, "loss per token": metric.NLL_HELD_OUT}  # fmt: skip
FIGURES = {  # metric: label and unit
    metric.REWARD: ("reward", ""),
    metric.NLL: ("loss per token", ""),
    metric.LAG: ("lag of the tokens", "steps"),
    metric.MASKED: ("tokens masked", "share"),
    metric.ZERO_ADVANTAGE: ("episodes with advantage 0", "share"),
    metric.ENTROPY: ("entropy", "nats"),
    metric.LENGTH: ("response", "tokens"),
    "tool_call_counts/mean": ("tool calls an episode", ""),
    metric.STEP_SECONDS: ("a step", "s"),
    "rollout/tokens_per_s": ("tokens sampled", "/s"),
}
ROLES = {"trainer": "trainer", "worker": "workers", "server": "engines", "engine": "engines"}


def overview(run_dir: Path, ended: str) -> dict[str, Any]:
    """Read a run that is over (`ended` says how) or goes on. ConfigError for a file that cannot be read."""
    rows, status = some_rows(run_dir, WINDOW, MOST_ROWS), read_status(run_dir)
    steps = latest(row for row in rows if metric.STEP_SECONDS in row)
    judged = [row for row in rows if any(name in row for name in JUDGED.values())]
    gauges = status.get("gauges") or next(
        (row for row in reversed(rows) if metric.FLOW + "issued" in row), {}
    )
    flow = flow_of(gauges)
    saved = read_summary(run_dir)
    summary = saved or summarize(rows, asdict(flow), flow.conserved)
    known = (*NUMBERS, *DIAGNOSTICS) if saved or summary["steps"] == len(steps) else ()  # they are sums
    launches, configuration = _configuration(run_dir)
    found = list(_judged(judged))
    machine = recorded_machine(run_dir)
    notes = [
        held_out_line(summary.get("held_out", {})),
        str(status.get("failed", ""))
        or failures_line(summary.get("attempts_failed", {}), summary.get("newest_failure", "")),
        NO_MACHINE * (machine is None),
    ]
    return {
        "outcome": _outcome(ended, status, summary),
        "conserved": summary["conserved"],
        "before_after": found,
        "figures": list(_figures(steps)),
        "components": list(_components(summary, steps)),
        "alerts": _alerts(launches, rows, status),
        "waits": list(_waits(steps if ended else steps[-1:], gauges, status, ended)),
        "flow": {**dict.fromkeys(Flow.__struct_fields__, 0), **summary["flow"]},
        "running": int(gauges.get("async/running", 0)),
        "reasons": summary.get("reasons", {}),
        "identity": identity_line(summary["flow"], summary["conserved"]),
        "configuration": configuration,
        "launches": list(_launches(launches)),
        "tables": {
            "All numbers": {name: shown(summary[key], form) for name, key, form in known
                            if summary.get(key) is not None},
            "Evaluation by task": _by_task(run_dir),
            "Machine of the newest launch": machine or {},
        },
        "notes": [note for note in notes if note],
    }  # fmt: skip


def _alerts(launches: Sequence[LaunchRecord], rows: Sequence[Row], status: Mapping[str, Any]) -> list[Alert]:
    return alerts(rows, status, dict(leaves(launches[-1].config)) if launches else {})


def _outcome(ended: str, status: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    if not status and not ended and not summary["steps"]:
        return "It starts: its coordinator has not reported yet"
    share = 0.0 if ended or summary["steps"] else status.get("gauges", {}).get(metric.BATCH, 0.0)
    line = outcome_line(summary, ended, status.get("total_steps", 0))
    return line + f"; {share:.0%} of the first batch is there" * (share > 0)


def _judged(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Say what validations found before training and last. A score that is the success is left out."""
    curves = {
        name: [[row["training/step"], row[key]] for row in rows if key in row] for name, key in JUDGED.items()
    }
    for name, key in JUDGED.items():
        found = [row for row in rows if key in row]
        same = name.startswith("score") and curves[name] == curves[name.replace("score", "success")]
        if not found or same:
            continue
        before = found[0] if not found[0]["training/step"] else None
        after = found[-1] if found[-1] is not before else None
        unit = "share" if key in (metric.SAMPLED, metric.GREEDY) else ""
        one = {"label": name, "unit": unit, "curve": curves[name]}
        yield one | _one("before", before, key) | _one("after", after, key)


def _one(when: str, row: Row | None, key: str) -> dict[str, Any]:
    """A validation's number, with Wilson's interval where that is a share of episodes."""
    if row is None:
        return {when: None, f"{when}_ci": None, f"{when}_step": None, f"{when}_episodes": 0}
    modes = (metric.SAMPLED in row) + (metric.GREEDY in row)
    count = row.get("val-aux/episodes", 0.0) / max(1, modes)
    ci = wilson(row[key], count) if key in (metric.SAMPLED, metric.GREEDY) and count else None
    step = int(row["training/step"])
    return {when: row[key], f"{when}_ci": ci, f"{when}_step": step, f"{when}_episodes": int(count)}


def _figures(steps: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The first and the last tenth of the steps, and a small curve."""
    edge = max(1, len(steps) // 10)
    for name, (named, unit) in FIGURES.items():
        if any(name in row for row in steps):
            first, last = mean(steps[:edge], name), mean(steps[-edge:], name)
            yield {"label": named, "metric": name, "unit": unit, "first": first, "last": last,
                   "curve": _curve(steps, name)}  # fmt: skip


def _components(summary: Mapping[str, Any], steps: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for name, (first, last, before, after) in summary.get("components", {}).items():
        curve = _curve(steps, metric.COMPONENT.replace("*", name))
        yield {"label": name, "unit": "", "first": first, "last": last, "before": before, "after": after,
               "curve": curve}  # fmt: skip


def _curve(steps: Sequence[Row], name: str) -> list[list[float]]:
    """(step, value) of a small curve: the means of as many steps each."""
    known = [row for row in steps if name in row]
    size = -(-len(known) // POINTS) or 1
    parts = [known[at : at + size] for at in range(0, len(known), size)]
    return [[part[-1]["training/step"], mean(part, name) or 0.0] for part in parts]


def _waits(
    steps: Sequence[Row], gauges: Row, status: Mapping[str, Any], ended: str
) -> Iterator[dict[str, Any]]:
    """Say of each role where its time went in these steps, and what it waits for now."""
    now: dict[str, list[str]] = {}
    for wait in [] if ended else status.get("waits", []):
        role = ROLES.get(wait.partition(" ")[0], "coordinator")
        now.setdefault(role, []).append(wait.partition(": ")[2] if role != "coordinator" else wait)
    known = {"async/workers": "connected", "async/running": "episodes run"}
    note = ", ".join(f"{gauges[name]:.0f} {of}" for name, of in known.items() if name in gauges and not ended)
    shares = _shares(steps)
    for role in ("trainer", "engines", "workers", "coordinator"):
        parts = [{"what": what, "share": share} for what, share in shares.get(role, {}).items()]
        if parts or role in now:
            more = note if role == "workers" else ""
            yield {"role": role, "parts": parts, "now": now.get(role, []), "note": more}


def _shares(steps: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By role: parts of the trainer's and the engines' time, and for workers of an episode's."""
    whole = sum(row[metric.STEP_SECONDS] for row in steps) or 1.0
    trainer = {label(name): sum(row.get(name, 0.0) for row in steps) / whole for name in metric.PHASES}
    found = {"trainer": {name: share for name, share in trainer.items() if share}}
    if (idle := mean(steps, metric.ROLLOUT_IDLE, weight=metric.STEP_SECONDS)) is not None:
        found["engines"] = {"sampling": 1 - idle}
    if episode := mean(steps, "timing_s/episode/mean"):
        tools, reward = (mean(steps, f"timing_s/{name}/mean") for name in ("tools", "reward"))
        parts = {"tools": (tools or 0.0) / episode, "the reward function": (reward or 0.0) / episode}
        rest = "sampling" if reward is not None else "sampling and reward"
        found["workers"] = {rest: max(0.0, 1 - sum(parts.values()))} | parts
    return found


def _configuration(run_dir: Path) -> tuple[list[LaunchRecord], list[dict[str, str]]]:
    """Return the launches, and the keys that differ from the defaults in the newest one."""
    launches = launches_of(run_dir)
    if not launches:
        return [], []
    needed = {"name": "-", "model": {"path": "-"}, "data": {"train": "-"}}
    try:
        given = dict(leaves(without_defaults(parse(launches[-1].config))))
        defaults = dict(leaves(tree(parse(needed))))
    except ConfigError as error:
        return launches, [
            {"key": "config.yaml", "value": f"cannot be read by this version ({error})", "default": ""}
        ]
    own = {key: value for key, value in given.items() if key not in ("name", "run_dir", "resume")}
    return launches, [
        {"key": key, "value": _cell(value), "default": _cell(defaults.get(key))} for key, value in own.items()
    ]


def _launches(launches: Sequence[LaunchRecord]) -> Iterator[dict[str, Any]]:
    """The keys that later launches changed."""
    for before, launch in pairwise(launches):
        if not (changes := differences([before.config, launch.config]).items()):
            continue
        yield {
            "step": launch.step + 1,
            "changes": [{"key": key, "before": _cell(a), "after": _cell(b)} for key, (a, b) in changes],
        }


def _cell(value: Any) -> str:
    text = "–" if value in (None, "-", "") else str(value)
    return f"{text[:CELL]}… ({len(text)} characters)" if len(text) > CELL else text


def _by_task(run_dir: Path) -> dict[str, str]:
    """Return what `asyncrl eval` found of each task."""
    found: dict[str, str] = {}
    with suppress(FileNotFoundError, *UNDECODABLE):
        for name, numbers in msgspec.json.decode((run_dir / "evaluation.json").read_bytes()).items():
            if name.startswith(TASK):
                task, mode, measure = name.removeprefix(TASK).rsplit("/", 2)
                text = f"{mode}/{measure} {numbers['mean']:.2f}"
                found[task] = f"{found[task]}, {text}" if task in found else text
    return found
