"""The report of one run or several: what one sends to a colleague. Each run is a column of the tables."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from asyncrl.errors import ConfigError
from asyncrl.observe.document import Block, Grid, Heading, Paragraph, Picture, Texts
from asyncrl.observe.files import read_lines, read_rows, read_summary
from asyncrl.observe.machine import describe_machine, recorded_machine
from asyncrl.observe.plot import figure
from asyncrl.observe.summary import (
    FLOW,
    Row,
    failures_line,
    flow_of,
    identity_line,
    lags,
    latest,
    success_line,
    summarize,
)
from asyncrl.observe.table import NUMBERS, before_and_after, shown
from asyncrl.observe.timeline import files, union

STEP, PHASE = "timing_s/step", "timing_s/"
PHASES = {  # of the trainer, in the order in which they happen; they do not overlap
    "wait_data": "wait for data",
    "ref": "forward of the reference",
    "values": "forward of the critic",
    "adv": "advantages",
    "update_actor": "forward and backward of the policy",
    "update_critic": "step of the critic",
    "update_weights": "new version for the engines",
    "save_checkpoint": "checkpoint",
}
BAR = 30  # characters of a whole


@dataclass(frozen=True)
class RunFiles:
    """What a report reads of a run. `steps`: one row per committed step."""

    name: str
    run_dir: Path
    rows: list[dict[str, float]]
    summary: Mapping[str, Any]
    config: Mapping[str, str]  # what differs from the defaults, by key
    steps: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, run_dir: Path, name: str, config: Mapping[str, str]) -> RunFiles:
        """Of a run that is over or goes on, to be called `name`. ConfigError for what cannot be read, or
        without a row of metrics yet."""
        rows = read_rows(run_dir)
        if not rows:
            raise ConfigError(f"{run_dir / 'metrics.jsonl'}: has no row yet; wait for the first step")
        steps = latest(row for row in rows if STEP in row)
        return cls(name, run_dir, rows, _summary(run_dir, rows), config, steps)


def report(runs: Sequence[RunFiles], picture: str) -> list[Block]:
    """The document; `picture` is the name of the curves' file."""
    names = [run.name for run in runs]
    return [
        Heading(", ".join(names), 1),
        *_results(runs, names),
        Heading("Curves"),
        Picture(picture, _curves(runs), "curves of " + ", ".join(names)),
        Heading("Configuration: what differs from the defaults"),
        _columns(
            "key", names, [{"": "nothing"} if not run.config else run.config for run in runs], "default"
        ),
        *(block for run in runs for block in _transcripts(run, len(runs) > 1)),
        Heading("Flow: what became of the episodes"),
        *(Paragraph(f"{run.name}: {line}") for run in runs for line in _flow(run)),
        Heading("Lag of the tokens taken for training, in steps"),
        _columns("lag", names, [_lag(run) for run in runs]),
        Heading("Time by phase"),
        _columns("of the trainer, between steps", names, [_phases(run.steps) for run in runs]),
        _columns("of all processes, start and validations included", names, [_spans(run) for run in runs]),
        Heading("Machine"),
        *_machine(runs, names),
    ]


def _results(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[Block]:
    yield _columns("", names, [_numbers(run) for run in runs])
    for run in runs:
        summary = run.summary
        for line in (
            str(summary.get("error", "")),
            success_line(summary.get("validation_score_max"), summary.get("success_threshold")),
        ):
            if line:
                yield Paragraph(f"{run.name}: {line}")


def _numbers(run: RunFiles) -> dict[str, str]:
    found = {"outcome": str(run.summary.get("outcome", "not over, or killed"))}
    found |= {label: f"{before} → {after}" for label, before, after in before_and_after(run.summary)}
    known = ((label, run.summary.get(key), form) for label, key, form in NUMBERS)
    return found | {label: shown(value, form) for label, value, form in known if value is not None}


def _summary(run_dir: Path, rows: Sequence[Row]) -> Mapping[str, Any]:
    """Of a run that is not over, from its rows so far: the flow then is what its last row says."""
    if found := read_summary(run_dir):
        return found
    flow = flow_of(next((row for row in reversed(rows) if FLOW + "issued" in row), {}))
    return summarize(rows, asdict(flow), flow.conserved)


def _curves(runs: Sequence[RunFiles]) -> bytes:
    file = io.BytesIO()
    figure({run.name: run.rows for run in runs}).savefig(file, format="png", dpi=110)
    return file.getvalue()


def _columns(
    title: str, names: Sequence[str], columns: Sequence[Mapping[str, str]], default: str = ""
) -> Grid:
    """A table with a column for each run. `default`: what an absent value means."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *(column.get(key, default) for column in columns)] for key in keys]
    return Grid([title, *names], rows)


# -- transcripts -----------------------------------------------------------------------------------


def _transcripts(run: RunFiles, several: bool) -> Iterator[Block]:
    """All that were kept of the first and the last validation: none is chosen by what it shows."""
    yield Heading(f"Transcripts{f' of {run.name}' if several else ''}: first and last validation")
    paths = (run.run_dir / "transcripts" / "validation").glob("step-*.jsonl")
    steps = {int(path.stem.partition("-")[2]): path for path in paths}
    if not steps:
        yield Paragraph("none: no validation has kept any")
        return
    chosen = sorted({min(steps), max(steps)})
    entries = {step: {_asked(entry): entry for entry in read_lines(steps[step])} for step in chosen}
    for key in entries[chosen[-1]]:
        kept = [(step, entries[step][key]) for step in chosen if key in entries[step]]
        sample, mode = key
        scores = " → ".join(_outcome(entry) for _, entry in kept)
        truth = kept[-1][1].get("ground_truth")
        yield Texts(
            f"sample {sample}, {mode}: {scores}",
            [(f"step {step}; ground truth {truth}", str(entry.get("text", ""))) for step, entry in kept],
        )


def _asked(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    return entry.get("sample"), entry.get("mode")


def _outcome(entry: Mapping[str, Any]) -> str:
    if "score" in entry:
        return f"score {entry['score']:g}"
    return f"failed ({entry['failed']})" if "failed" in entry else "no score"


# -- flow, lag, time, machine ----------------------------------------------------------------------


def _flow(run: RunFiles) -> Iterator[str]:
    summary = run.summary
    yield identity_line(summary["flow"], summary["conserved"])
    if reasons := summary.get("reasons"):
        yield "reasons: " + ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    if line := failures_line(summary.get("attempts_failed", {}), summary.get("newest_failure", "")):
        yield line


def _lag(run: RunFiles) -> dict[str, str]:
    tokens = lags(run.steps)
    return _shares({str(lag): count for lag, count in tokens.items()}, sum(tokens.values()), ",d")


def _phases(steps: Sequence[Row]) -> dict[str, str]:
    seconds = {label: sum(row.get(PHASE + name, 0.0) for row in steps) for name, label in PHASES.items()}
    whole = sum(row[STEP] for row in steps)
    known = {label: value for label, value in seconds.items() if value}
    return _shares(known | {"other": max(0.0, whole - sum(known.values()))}, whole, ",.1f", " s")


def _spans(run: RunFiles) -> dict[str, str]:
    """By process and name; time that is in several spans of a name counts once."""
    first_and_last: list[float] = []
    seconds: dict[str, float] = {}
    for file in files(run.run_dir):
        spans: dict[str, list[tuple[float, float]]] = {}
        for span in file.added():
            spans.setdefault(span.name, []).append((span.start, span.end))
            first_and_last += (span.start, span.end)
        for name, found in sorted(spans.items()):
            seconds[f"{file.path.stem}: {name}"] = sum(end - start for start, end in union(found))
    whole = max(first_and_last) - min(first_and_last) if first_and_last else 0.0
    return _shares(seconds, whole, ",.1f", " s")


def _shares(parts: Mapping[str, float], whole: float, form: str, unit: str = "") -> dict[str, str]:
    """Each with its share of the whole, and a bar."""
    return {
        name: f"{value:{form}}{unit} ({value / whole:.1%}) {'█' * round(BAR * value / whole)}".rstrip()
        for name, value in parts.items()
        if whole
    }


def _machine(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[Block]:
    found = {run.name: recorded_machine(run.run_dir) for run in runs}
    if any(found.values()):
        yield Paragraph("As recorded by the newest launch; processes on other machines are not described.")
    missing = [name for name, machine in found.items() if machine is None]
    here = describe_machine() if missing else {}
    if missing:
        yield Paragraph(
            f"{', '.join(missing)}: no record; described instead is the machine that wrote this report."
        )
    yield _columns("", names, [here if machine is None else machine for machine in found.values()])
