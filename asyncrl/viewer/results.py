"""The tab Summary of a run: its numbers, configuration, transcripts, flow, lag, time, machine, as texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from asyncrl.config import leaves, parse, without_defaults
from asyncrl.errors import UNDECODABLE, ConfigError
from asyncrl.observe.files import read_lines, read_rows, read_summary
from asyncrl.observe.machine import recorded_machine
from asyncrl.observe.metrics import FLOW, PHASES, STEP_SECONDS, Row, label, shown
from asyncrl.observe.summary import (
    failures_line,
    flow_of,
    identity_line,
    lags,
    latest,
    success_line,
    summarize,
)
from asyncrl.observe.table import NUMBERS, before_and_after
from asyncrl.observe.timeline import files, union
from asyncrl.store.launches import differences, launches_of

TASK = "val-task/"  # in evaluation.json
BAR = 30  # characters of a whole
NO_MACHINE = "machine.json is missing or cannot be read: on which machine the run was made is not known"
CELL = 300  # characters of a value of the configuration; a chat template is longer


class Table(msgspec.Struct):
    """Rows of key and text; the page joins those of several runs. `default`: what an absent text means."""

    title: str
    rows: Mapping[str, str]
    default: str = ""


def results(run_dir: Path) -> dict[str, Any]:
    """Read a run that is over or goes on. ConfigError for a file that cannot be read."""
    rows = read_rows(run_dir)
    steps, summary = latest(row for row in rows if STEP_SECONDS in row), _summary(run_dir, rows)
    machine = recorded_machine(run_dir)
    tokens = {str(lag): count for lag, count in lags(steps).items()}
    lag = _shares(tokens, sum(tokens.values()), ",d")
    return {
        "conserved": summary["conserved"],
        "notes": [*filter(None, _notes(summary)), *[NO_MACHINE] * (machine is None)],
        "tables": [
            Table("Results", _numbers(summary)),
            Table("Evaluation by task", _by_task(run_dir)),
            Table("Configuration: what differs from the defaults", _configuration(run_dir), "default"),
            Table("Lag of the tokens taken for training, in steps", lag),
            Table("Time of the trainer, between steps", _phases(steps)),
            Table("Time of all processes, start and validations included", _spans(run_dir)),
            Table("Machine of the newest launch; others are not described", machine or {}),
        ],
        "transcripts": list(_transcripts(run_dir)),
    }


def _summary(run_dir: Path, rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return the summary, or that of the rows so far, with the flow of the last one."""
    if found := read_summary(run_dir):
        return found
    flow = flow_of(next((row for row in reversed(rows) if FLOW + "issued" in row), {}))
    return summarize(rows, asdict(flow), flow.conserved)


def _notes(summary: Mapping[str, Any]) -> Iterator[str]:
    yield str(summary.get("error", ""))
    yield success_line(summary.get("validation_score_max"), summary.get("success_threshold"))
    yield identity_line(summary["flow"], summary["conserved"])
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary.get("reasons", {}).items())
    yield reasons and f"reasons: {reasons}"
    yield failures_line(summary.get("attempts_failed", {}), summary.get("newest_failure", ""))


def _numbers(summary: Mapping[str, Any]) -> dict[str, str]:
    found = {"outcome": str(summary.get("outcome", "not over, or killed"))}
    found |= {label: f"{before} → {after}" for label, before, after in before_and_after(summary)}
    known = ((label, summary.get(key), form) for label, key, form in NUMBERS)
    return found | {label: shown(value, form) for label, value, form in known if value is not None}


def _by_task(run_dir: Path) -> dict[str, str]:
    """Return what `asyncrl eval` found of each task."""
    found: dict[str, str] = {}
    with suppress(FileNotFoundError, *UNDECODABLE):
        for name, numbers in msgspec.json.decode((run_dir / "evaluation.json").read_bytes()).items():
            if name.startswith(TASK):
                task, mode, metric = name.removeprefix(TASK).rsplit("/", 2)
                text = f"{mode}/{metric} {numbers['mean']:.2f}"
                found[task] = f"{found[task]}, {text}" if task in found else text
    return found


def _configuration(run_dir: Path) -> dict[str, str]:
    """Return the keys that differ from the defaults now, and those that each later launch has changed."""
    try:
        launches = launches_of(run_dir)
        found = dict(leaves(without_defaults(parse(launches[-1].config)))) if launches else {}
        for before, launch in pairwise(launches):
            for key, values in differences([before.config, launch.config]).items():
                found[f"{key}, from step {launch.step + 1}"] = " → ".join(map(str, values))
    except ConfigError as error:
        return {"config.yaml": f"cannot be read by this version ({error})"}
    texts = {key: str(value) for key, value in found.items()}
    return {key: f"{t[:CELL]}… ({len(t)} characters)" if len(t) > CELL else t for key, t in texts.items()}


def _transcripts(run_dir: Path) -> Iterator[dict[str, Any]]:
    """All that were kept of the first and the last validation: none is chosen by what it shows."""
    paths = (run_dir / "transcripts" / "validation").glob("step-*.jsonl")
    steps = {int(path.stem.partition("-")[2]): path for path in paths}
    chosen = sorted({min(steps), max(steps)}) if steps else []
    kept: dict[tuple[str, str, int], list[tuple[int, Mapping[str, Any]]]] = {}
    for step in chosen:
        seen = Counter[tuple[str, str]]()  # several episodes of a sample are followed one by one
        for entry in read_lines(steps[step]):
            which = str(entry.get("sample")), str(entry.get("mode"))
            kept.setdefault((*which, seen[which]), []).append((step, entry))
            seen[which] += 1
    for (sample, mode, _), entries in kept.items():
        yield {
            "title": f"sample {sample}, {mode}: " + " → ".join(_outcome(entry) for _, entry in entries),
            "texts": [
                (f"step {step}; ground truth {entry.get('ground_truth')}", str(entry.get("text", "")))
                for step, entry in entries
            ],
        }


def _outcome(entry: Mapping[str, Any]) -> str:
    if "score" in entry:
        return f"score {entry['score']:g}"
    return f"failed ({entry['failed']})" if "failed" in entry else "no score"


def _phases(steps: Sequence[Row]) -> dict[str, str]:
    seconds = {label(name): sum(row.get(name, 0.0) for row in steps) for name in PHASES}
    whole = sum(row[STEP_SECONDS] for row in steps)
    known = {name: value for name, value in seconds.items() if value}
    return _shares(known | {"other": max(0.0, whole - sum(known.values()))}, whole, ",.1f", " s")


def _spans(run_dir: Path) -> dict[str, str]:
    """Add up spans by process and name; time that is in several spans of a name counts once."""
    edges: list[float] = []
    seconds: dict[str, float] = {}
    for file in files(run_dir):
        spans: dict[str, list[tuple[float, float]]] = {}
        for span in file.added():
            spans.setdefault(span.name, []).append((span.start, span.end))
            edges += (span.start, span.end)
        for name, found in sorted(spans.items()):
            seconds[f"{file.path.stem}: {name}"] = sum(end - start for start, end in union(found))
    return _shares(seconds, max(edges) - min(edges) if edges else 0.0, ",.1f", " s")


def _shares(parts: Mapping[str, float], whole: float, form: str, unit: str = "") -> dict[str, str]:
    """Each part with its share of the whole, and a bar."""
    return {
        name: f"{value:{form}}{unit} ({value / whole:.1%}) {'█' * round(BAR * value / whole)}".rstrip()
        for name, value in parts.items()
        if whole
    }
