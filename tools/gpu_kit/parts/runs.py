"""Runs of `asyncrl` that parts start: what they must reach, and what they leave behind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from parts.common import EXACT, Context, Finding

TAIL = 25  # lines of each log
STOP_S = 15.0  # for a run that is told to stop
# Of 128 questions 14.5% succeed before training, by 3.1% (standard deviation): 30% is five of them away. Ten
# steps made 90% on a CPU.
BEFORE = 0.3
AFTER = 0.6
# nats a token; times what rounding makes of the trainer's own log-probs
K3 = 0.05
NOISES = 3.0


class Way(NamedTuple):
    """A run. `samples`: of each of its two validations; 0: none."""

    name: str
    steps: int
    samples: int
    overrides: tuple[str, ...] = ()

    @property
    def small(self) -> Way:
        return self._replace(steps=2, samples=min(2, self.samples))


def stop_run(process: subprocess.Popen[bytes]) -> int:
    """Tell a run to stop, unless it has ended: it still writes its summary. Return its exit code; -9 if it
    had to be killed."""
    process.terminate()
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def summary(run_dir: Path) -> dict[str, Any]:
    """The run's summary; empty where it has written none."""
    with suppress(OSError, ValueError):
        written: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
        return written
    return {}


def step_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of metrics of the steps so far."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return []
    return [row for row in map(json.loads, lines) if "timing_s/step" in row]


def ends_of_logs(run_dir: Path, *other_logs: Path) -> str:
    """The last lines of everything that the run said."""
    ends = []
    for file in (*other_logs, *sorted(run_dir.glob("logs/*"))):
        if file.is_file():
            lines = file.read_text(errors="replace").splitlines()[-TAIL:]
            ends.append("\n".join([f"--- {file.name}", *lines]))
    return "\n".join(ends)


def account(flow: dict[str, int]) -> str:
    """The account of episodes in words: "96 issued, 90 trained, …"."""
    return ", ".join(f"{value} {name}" for name, value in flow.items() if value)


def mean_of(rows: Iterable[dict[str, Any]], name: str) -> float | None:
    """The mean of a metric over the rows that have it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def judged(context: Context, way: Way, written: dict[str, Any]) -> Iterator[Finding]:
    """What the run must have reached. That it learned is not judged on a CPU, where it takes two steps."""
    if way.samples:
        before = written["success_before"]
        after = written["success_after"]
        if before is not None and after is not None:
            learned = before <= BEFORE and after >= AFTER
            value = f"{before:.1%} → {after:.1%} sampled, {written['greedy_before']:.1%} → "
            value += f"{written['greedy_after']:.1%} greedy, {way.steps} steps"
            goal = f"from at most {BEFORE:.0%} to {AFTER:.0%} sampled"
            yield Finding(f"{way.name}: held out", value, goal, context.judged(learned))
        else:
            yield Finding(f"{way.name}: held out", f"{before} → {after}", "both validations", False)
    flow = written["flow"]
    exact = written["conserved"] and flow["issued"] == sum(flow.values()) - flow["issued"]
    yield Finding(f"{way.name}: account of episodes", account(flow), "exact", exact)
    done = written["steps"] == way.steps and not written["skipped_steps"]
    value = f"{written['steps']}, {written['skipped_steps']} skipped"
    yield Finding(f"{way.name}: steps", value, f"{way.steps}, none skipped", done)
    gap = written["logprob_diff_max_same_version"]
    compared = written["logprob_tokens_compared"]
    k3, probe, noise = (
        written[key] or 0.0 for key in ("k3_same_version", "probe_logprob_diff_max", "probe_noise_floor")
    )
    if context.small:
        goal = f"{EXACT:g} (float32)"
        near = gap is not None and max(gap, probe) <= EXACT
    else:
        goal = f"k3 {K3:g}, probe {NOISES:g} x noise"
        near = k3 <= K3 and probe <= NOISES * noise
    value = f"at most {gap} nats, k3 {k3:.2g}, of {compared} tokens; probe {probe:.2g}, noise {noise:.2g}"
    yield Finding(f"{way.name}: log-probs at one version", value, goal, near and compared > 0)
