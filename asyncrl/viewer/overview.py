"""Answers for the tab Overview of a run: its outcome in one sentence, before and after, what is wrong, who
waits for whom, the flow of its episodes, figures and configuration. The page writes the figures in their
units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from asyncrl.config import leaves, parse
from asyncrl.observe import metrics as metric
from asyncrl.observe.alerts import WINDOW, Alert, alerts, unless_quoted
from asyncrl.observe.files import read_status, read_summary, some_rows
from asyncrl.observe.held_out import wilson
from asyncrl.observe.machine import recorded_machine
from asyncrl.observe.metrics import Row, label, matching
from asyncrl.observe.summary import JUDGED, edges, flow_of, latest, mean, notes, outcome_line, summarize
from asyncrl.observe.table import numbers
from asyncrl.store.launches import described, differences, launches_of, tree
from asyncrl.viewer.compare import ALL, measures

NO_MACHINE = "machine.json is missing or cannot be read: on which machine the run was made is not known"
MOST_ROWS = 400  # of a longer run they are chosen
POINTS = 120  # of a small curve
RESUMED = 3  # launches with other keys that are shown
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
SHARES = (metric.SAMPLED, metric.GREEDY)
SCORES = {metric.SAMPLED_SCORE: metric.SAMPLED, metric.GREEDY_SCORE: metric.GREEDY}
ENGINES = dict.fromkeys(("server", "engine", "scorer"), "engines")
ROLES = {"trainer": "trainer", **ENGINES, "worker": "workers"}


def overview(run_dir: Path, ended: str) -> dict[str, Any]:
    """Read a run that is over (`ended` says how) or goes on. ConfigError for a file that cannot be read."""
    # Twice: steps that were repeated after a crash are read, and the row of the end.
    rows = some_rows(run_dir, 2 * WINDOW, MOST_ROWS)
    status = read_status(run_dir)
    steps = latest(row for row in rows if metric.STEP_SECONDS in row)
    gauges = status.get("gauges") or next(
        (row for row in reversed(rows) if metric.FLOW + "issued" in row), {}
    )
    flow = flow_of(gauges)
    saved = read_summary(run_dir)
    summary = saved or summarize(rows, asdict(flow), flow.conserved)
    whole = saved or summary["steps"] == len(steps)  # else its sums are of some of the steps
    launches = launches_of(run_dir)
    config = launches[-1].config if launches else {}
    changes = [(new.step + 1, described(old.config, new.config)) for old, new in pairwise(launches)]
    resumed = [
        Alert(f"resumed with other keys, from step {step}", "advice", text, "", link={"tab": "charts"})
        for step, text in changes
        if text
    ]
    needed = {"name": "-", "model": {"path": "-"}, "data": {"train": "-"}}
    keys = dict(leaves(config))
    differing = differences([config, tree(parse(needed))]).items() if config else ()
    machine = recorded_machine(run_dir)
    trains = bool(keys.get("total_steps", 1))
    shown_alerts = alerts(rows, status, keys)
    told = notes(summary) if saved else [unless_quoted(status.get("failed", ""), shown_alerts)]
    return {
        "outcome": _outcome(ended, status, summary, trains),
        "trains": trains,
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "conserved": summary["conserved"],
        "held_out": list(measures(run_dir)) or list(_held_out(rows) if trains else _evaluated(rows)),
        "figures": list(_figures(steps)),
        "alerts": [*shown_alerts, *resumed[-RESUMED:]],
        "waits": list(_waits(steps if ended else steps[-1:], gauges, status, ended)),
        "flow": summary["flow"],
        "running": int(gauges.get("async/running", 0)),
        "reasons": summary.get("reasons", {}),
        "configuration": [(key, own, usual) for key, (own, usual) in differing if own is not None],
        "tables": {
            "All numbers": dict(numbers(summary, everything=True)) if whole else {},
            "Machine of the newest launch": machine or {},
        },
        "notes": [note for note in (*told, NO_MACHINE * (machine is None)) if note],
    }


def _outcome(ended: str, status: Mapping[str, Any], summary: Mapping[str, Any], trains: bool) -> str:
    if not status and not ended and not summary["steps"]:
        return "It starts: its coordinator has not reported yet"
    evaluated = any(summary.get(f"{key}_before") is not None for key in JUDGED)
    if not (trains or evaluated):
        if ended in ("", "completed"):
            return "Evaluated without a reward" if ended else "It evaluates: no result is there yet"
        return f"{ended.partition(':')[0].capitalize()}: nothing was evaluated"
    share = 0.0 if ended or summary["steps"] else status.get("gauges", {}).get(metric.BATCH, 0.0)
    line = outcome_line(summary, ended, status.get("total_steps", 0))
    return line + f"; {share:.0%} of the first batch is there" * (share > 0)


def _held_out(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """What validations found before training, last, and by step, components of the score included. A score
    that is the success is left out."""
    parts = matching(metric.COMPONENT_HELD_OUT, set[str]().union(*rows))
    for named, name in [*JUDGED.values(), *parts.items()]:
        curve = _curve(rows, name)
        known = [row for row in rows if name in row]
        if not known or (name in SCORES and curve == _curve(rows, SCORES[name])):
            continue
        ends = {} if known[0]["training/step"] else {"before": known[0]}
        if len(known) > len(ends):
            ends["after"] = known[-1]
        found = {"label": named, "unit": "share" if name in SHARES else "", "curve": curve}
        yield found | {"part": named in parts} | {when: _found(row, name) for when, row in ends.items()}


def _evaluated(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield what an evaluation found, under the names of evaluation.json, before there is one."""
    row = next((row for row in reversed(rows) if metric.ASKED in row), {})
    for name in sorted(name for name in row if name.startswith(ALL)):
        unit = "share" if name in SHARES else ""
        label = name.removeprefix(ALL)
        yield {"label": label, "unit": unit, "curve": [], "after": _found(row, name), "tasks": {}}


def _found(row: Row, name: str) -> dict[str, Any]:
    """Return a validation's number, with Wilson's interval where it is a share: over questions, as the
    episodes of one are alike."""
    count = row.get(metric.ASKED, 0.0)
    interval = wilson(row[name], count) if name in SHARES and count else None
    return {"value": row[name], "interval": interval, "step": row["training/step"], "questions": count}


def _figures(steps: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield each figure's mean over the first and the last tenth of the steps, and a small curve."""
    names = set[str]().union(*steps)
    parts = {name: (named, "") for named, name in matching(metric.COMPONENT, names).items()}
    for name, (named, unit) in ({metric.REWARD: FIGURES[metric.REWARD]} | parts | FIGURES).items():
        if name in names:
            first, last = edges(steps, name)
            yield {"label": named, "part": name in parts, "unit": unit, "first": first, "last": last,
                   "curve": _curve(steps, name)}  # fmt: skip


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
    now = defaultdict[str, list[str]](list)
    for wait in [] if ended else status.get("waits", []):
        role = ROLES.get(wait.partition(" ")[0], "coordinator")
        now[role].append(wait.partition(": ")[2] if role in ROLES.values() else wait)
    known = {"async/workers": "connected", "async/running": "episodes run"}
    note = ", ".join(f"{gauges[name]:.0f} {of}" for name, of in known.items() if name in gauges and not ended)
    shares = _shares(steps)
    for role in dict.fromkeys((*ROLES.values(), "coordinator")):
        if (parts := shares.get(role, {})) or role in now:
            more = note if role == "workers" else ""
            yield {"role": role, "parts": parts, "now": now[role], "note": more}


def _shares(steps: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return, by role, parts of the trainer's and the engines' time, and for workers of an episode's."""
    whole = sum(row[metric.STEP_SECONDS] for row in steps) or 1.0
    trainer = {label(name): sum(row.get(name, 0.0) for row in steps) / whole for name in metric.PHASES}
    found = {"trainer": {name: share for name, share in trainer.items() if share}}
    if (idle := mean(steps, metric.ROLLOUT_IDLE, weight=metric.STEP_SECONDS)) is not None:
        found["engines"] = {"sampling": 1 - idle, "wait": idle}
    if episode := mean(steps, "timing_s/episode/mean"):
        tools, reward = (mean(steps, f"timing_s/{name}/mean") for name in ("tools", "reward"))
        parts = {"tools": (tools or 0.0) / episode, "the reward function": (reward or 0.0) / episode}
        rest = "sampling" if reward is not None else "sampling and reward"
        found["workers"] = {rest: max(0.0, 1 - sum(parts.values()))} | parts
    return found
