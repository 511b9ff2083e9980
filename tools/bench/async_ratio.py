"""Asynchronous against synchronous training: the same work, and the time that generation and training alone
would take.

    python tools/bench/async_ratio.py                                  # all workloads, about 50 minutes
    python tools/bench/async_ratio.py --workloads tail --repeats 1     # 9 minutes
    python tools/bench/async_ratio.py --workloads tail --mode wide=rollout.slots=256,buffer.stale_budget=0.05

All runs play the same episodes: the learning rate is 1e-30, so the weights stay what they are, each token is
drawn by (seed, episode, position), and delays of tools and forced lengths by (seed, episode) (replayed.py).
Modes take turns; the runs of a turn are compared with each other, and medians and ranges are of the turns.
All turns play the same delays: what a heavy tail is on average shows in many steps, not in many turns. Delays
and deadlines are in units of the first g that is measured, so that a workload is equally hard on any machine.

T is seconds per step, corrected for masked tokens: the time in which so many unmasked tokens are trained as a
batch has tokens on average. The first two fifths of the steps are left out (the pipeline fills, flow control
settles), and the last fifth (it empties); a synchronous run has half as many steps. g and t are seconds
per step of one more run of the same episodes without delays: its trainer is stopped (SIGSTOP) until all
episodes have landed (g: the middle of that time, with all slots taken), then it trains with everything ready,
publishing after each step (t). CPU seconds are of the same spans. `life x G / live`: mean seconds of
a group from the start of its first member to the end of its last, times groups per batch, divided by the
groups with a member under way when a batch commits: by Little's law no step can be shorter on average.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
from common import ROOT, rows, table, train

from tests.fakes.processes import role_processes

HERE = ROOT / "tools" / "bench"
TOOL = f"{HERE / 'replayed.py'}:slow_calculator"
# Episodes of a batch and of a group.
GROUPS = 8
MEMBERS = 8
BATCH = GROUPS * MEMBERS
COMMON = [
    *(f"buffer.groups_per_batch={GROUPS}", f"buffer.episodes_per_group={MEMBERS}", "rollout.workers=1"),
    *("trainer.lr=1e-30", "trainer.lr_schedule=constant", "rollout.retries=0", f"rollout.tools=[{TOOL}]"),
    *("validation.samples=0", "data.test=''", "checkpoint.every=0"),
]
SYNC = "buffer.max_staleness=0"
MODES: dict[str, list[str]] = {"sync": [SYNC], "async": []}
ALONE_KEYS = ("rollout.", "engine.", "model.", "trainer.")  # overrides of a mode that change g or t
STEP = b'"timing_s/step"'  # in the row of a committed step

Figures = dict[str, float]


@dataclass(frozen=True)
class Workload:
    """A call takes LN(log(`median`), `sigma`) and an episode at most `deadline`, in units of g; 0: no time,
    and no limit. Workloads of one `work` play the same episodes, but for what a deadline cuts off."""

    meaning: str
    steps: int
    median: float = 0.0
    sigma: float = 0.0
    deadline: float = 0.0
    overrides: tuple[str, ...] = ()
    work: str = "calculator"

    def delay(self, g: float) -> str:
        return f"mu: {math.log(self.median * g):.4f}, sigma: {self.sigma}" if self.median else ""

    def limit(self, g: float) -> list[str]:
        return [f"rollout.episode_timeout={self.deadline * g:.2f}"] * bool(self.deadline)


def forced(name: str, longest: int) -> tuple[str, ...]:
    """Return the workload of single responses whose lengths an engine of replayed.py sets, up to a number
    of tokens."""
    return (
        *(f"engine.name={HERE / 'replayed.py'}:forced_{name}", "rollout.max_turns=1"),
        *(f"rollout.max_new_tokens={longest}", f"rollout.max_tokens={longest + 192}"),
    )


WORKLOADS = {
    "zero": Workload("a tool that answers at once", 60),
    "tail": Workload("calls of 0.5 g in the median, log-normal, sigma 1.5", 120, 0.5, 1.5),
    "harder": Workload("calls of 1.5 g in the median, log-normal, sigma 1.5", 60, 1.5, 1.5),
    "real": Workload(
        "calls of 0.5 g in the median, log-normal, sigma 2.42; episodes of at most 32 g", 24, 0.5, 2.42, 32.0
    ),
    "lengths": Workload(
        "responses of 64 tokens, log-normal, sigma 1; no calls",
        30,
        overrides=forced("lengths", 832),
        work="lengths",
    ),
    "answers": Workload(
        "responses of 24 tokens, log-normal, sigma 2, 1,536 at most; no calls: with a bound of 4 a tenth of "
        "the tokens lie in turns that outlast it (as with 128 and 8,192, but the demo's model ends at 2,048)",
        30,
        overrides=forced("answers", 1536),
        work="answers",
    ),
}


@dataclass
class Watch:
    """What a run's processes have used, ten times a second: (time, committed steps, CPU seconds by role).
    `hold`: the trainer is stopped from the first episode's end until so many have ended."""

    folder: Path
    lives: Path
    hold: int = 0
    samples: list[tuple[float, int, dict[str, float]]] = field(default_factory=list)
    _roles: dict[str, psutil.Process] = field(default_factory=dict)

    def __call__(self, launcher: int) -> None:
        if len(self._roles) < 4:
            self._roles = role_processes(launcher) | {"launcher": psutil.Process(launcher)}
        cpu = {}
        for role, process in self._roles.items():
            with suppress(psutil.Error):
                times = process.cpu_times()
                cpu[role] = times.user + times.system

        self.samples.append((time.time(), _count(self.folder / "metrics.jsonl", STEP), cpu))
        if self.hold and "trainer-0" in self._roles and (landed := _count(self.lives, b"\n")):
            over = landed >= self.hold
            self._roles["trainer-0"].send_signal(signal.SIGCONT if over else signal.SIGSTOP)
            self.hold = 0 if over else self.hold

    def cpu(self, begin: Callable[[float, int], bool], end: Callable[[float, int], bool]) -> Figures:
        """CPU seconds of each process between the first samples for which these hold."""
        first, last = (
            next(cpu for at, steps, cpu in self.samples if edge(at, steps)) for edge in (begin, end)
        )
        return {role: seconds - first.get(role, 0.0) for role, seconds in last.items()}


def _count(file: Path, pattern: bytes) -> int:
    return file.read_bytes().count(pattern) if file.exists() else 0


@dataclass(frozen=True)
class Plan:
    """The settings that all runs of the program share."""

    folder: Path
    overrides: Sequence[str]
    steps: int  # 0: each workload's own
    seed: int
    unit: dict[str, float] = field(default_factory=dict)  # the first g of each `work`

    def mode(self, name: str, label: str, overrides: Sequence[str]) -> Figures:
        """A run of a workload in a mode."""
        work = WORKLOADS[name]
        steps = (self.steps or work.steps) // (2 if SYNC in overrides else 1)
        g = self.unit[work.work]
        watch = self._run(f"{name}-{label}", steps, work, work.delay(g), [*work.limit(g), *overrides])
        committed = _committed(watch.folder)
        begin = 2 * steps // 5
        end = steps - max(1, steps // 5)
        window = committed[begin:end]
        seconds = (window[-1]["time_s"] - committed[begin - 1]["time_s"]) / len(window)
        tokens = [row["trainer/model_tokens"] for row in window]
        useful = sum(
            n * (1 - row["staleness/masked_token_frac"]) for n, row in zip(tokens, window, strict=True)
        )
        batch = statistics.mean(row["trainer/model_tokens"] for row in committed)
        lives = _group_lives(watch.lives)
        live = statistics.mean(row["async/live_groups"] for row in window) + GROUPS  # before the commit
        cpu = watch.cpu(lambda _, n: n >= begin, lambda _, n: n >= end)
        return {
            "s": seconds,
            "T": seconds * len(window) * batch / useful,
            "cpu": sum(cpu.values()) / len(window),
            **{f"cpu of {role}": seconds / len(window) for role, seconds in cpu.items()},
            "masked": 1 - useful / sum(tokens),
            "lag": sum(n * row["staleness/lag/mean"] for n, row in zip(tokens, window, strict=True))
            / sum(tokens),
            "lag_max": max(row["staleness/lag/max"] for row in window),
            "littles": statistics.mean(lives) * GROUPS / live,
            "tokens": batch,
        }

    def alone(self, name: str, label: str, overrides: Sequence[str]) -> Figures:
        """g and t of a workload's episodes, without delays."""
        work = WORKLOADS[name]
        steps = self.steps or work.steps
        free = [f"buffer.max_staleness={steps}", f"buffer.target_staleness={steps}"]
        watch = self._run(f"{name}-{label}", steps, work, "", [*overrides, *free], hold=steps * BATCH)
        ends = sorted(end for *_, end in _lives(watch.lives))
        slots = yaml.safe_load((watch.folder / "config.yaml").read_text())["rollout"]["slots"]
        first = len(ends) // 4
        last = len(ends) - slots
        if last <= first:
            sys.exit(f"{steps} steps are too few to measure g with {slots} slots; --steps {slots // 32 + 1}")
        scale = BATCH / (last - first - 1)
        tokens = statistics.mean(row["trainer/model_tokens"] for row in _committed(watch.folder))
        committed = _committed(watch.folder)[:-1]
        g_cpu = watch.cpu(lambda at, _: at >= ends[first], lambda at, _: at >= ends[last - 1])
        t_cpu = watch.cpu(lambda _, n: n >= 1, lambda _, n: n >= len(committed))
        return {
            "batch": tokens,
            "g": (ends[last - 1] - ends[first]) * scale,
            "t": (committed[-1]["time_s"] - committed[0]["time_s"]) / (len(committed) - 1),
            "g_cpu": sum(g_cpu.values()) * scale,
            "t_cpu": sum(t_cpu.values()) / (len(committed) - 1),
        }

    def _run(
        self, name: str, steps: int, work: Workload, delay: str, overrides: Sequence[str], hold: int = 0
    ) -> Watch:
        """Run to the end. SystemExit: the run failed."""
        watch = Watch(self.folder / name, self.folder / f"{name}.lives", hold)
        shutil.rmtree(watch.folder, ignore_errors=True)
        watch.lives.unlink(missing_ok=True)
        options = ", ".join(filter(None, (f"log: {watch.lives}", f"seed: {self.seed}", delay)))
        arguments = f"rollout.tool_args={{{TOOL.replace(':', chr(92) + ':')}: {{{options}}}}}"
        run = [f"seed={self.seed}", f"total_steps={steps}", arguments]
        result = train(
            name, self.folder, [*COMMON, *work.overrides, *run, *self.overrides, *overrides], watch=watch
        )
        if result["exit_code"]:
            sys.exit(f"{name} failed; see {self.folder / name}.out")

        return watch


def _committed(folder: Path) -> list[dict[str, float]]:
    return [row for row in rows(folder) if "timing_s/step" in row]


def _lives(file: Path) -> list[tuple[int, int, float, float]]:
    """Read (sample, member, begin, end) of each episode."""
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def _group_lives(file: Path) -> list[float]:
    groups = defaultdict(list)
    for sample, member, begin, end in _lives(file):
        groups[sample, member // MEMBERS].append((begin, end))
    return [max(end for _, end in group) - min(begin for begin, _ in group) for group in groups.values()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = "; ".join(f"{name}: {workload.meaning}" for name, workload in WORKLOADS.items())
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], help=names)

    parser.add_argument(
        "--mode",
        action="append",
        default=[],
        type=mode,
        metavar="NAME=OVERRIDE,OVERRIDE",
        help="one more mode",
    )

    parser.add_argument("--steps", type=int, default=0, help="10 or more, instead of each workload's own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "async-ratio")
    parser.add_argument("overrides", nargs="*", help="of all runs")
    options = parser.parse_args()

    plan = Plan(options.run_dir.resolve(), options.overrides, options.steps, options.seed)
    figures_by_mode: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    modes = MODES | dict(options.mode)
    for _ in range(options.repeats):
        turn(plan, options.workloads, modes, figures_by_mode)
    for name in options.workloads:
        report(name, {label: figures_by_mode[name, label] for label in modes})


def mode(text: str) -> tuple[str, list[str]]:
    """`wide=rollout.slots=256,buffer.max_staleness=8`: a name, and overrides; commas in a value stay."""
    name, equals, overrides = text.partition("=")
    if not name or not equals or "=" not in overrides:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=OVERRIDE,OVERRIDE")
    return name, re.split(r",(?=[\w.+]+=)", overrides)


def turn(
    plan: Plan,
    names: Sequence[str],
    modes: dict[str, list[str]],
    figures_by_mode: dict[tuple[str, str], list[Figures]],
) -> None:
    """Every mode of every workload once, and g and t once for all runs that have the same."""
    alone: dict[tuple[str, tuple[str, ...]], Figures] = {}
    for name in names:
        for label, overrides in modes.items():
            alone_overrides = tuple(override for override in overrides if override.startswith(ALONE_KEYS))
            key = WORKLOADS[name].work, alone_overrides
            if key not in alone:
                alone[key] = plan.alone(name, f"{label}-alone", alone_overrides)
                plan.unit.setdefault(key[0], alone[key]["g"])

            figures = plan.mode(name, label, overrides) | alone[key]
            figures["T"] *= figures["batch"] / figures["tokens"]  # the same batch in all modes
            figures_by_mode[name, label].append(figures)
            print(name, label, {key: round(value, 4) for key, value in figures.items()}, flush=True)


HEADER = ["mode", "s/step", "T", "max(g, t)", "g + t", "life x G / live", "max(g, t)/T", "CPU s/step",
          "g CPU", "t CPU", "masked", "lag mean, max", "tokens/step"]  # fmt: skip


def report(name: str, runs: dict[str, list[Figures]]) -> None:
    print(f"\n{name}: {WORKLOADS[name].meaning}\n")
    print(table(HEADER, [line(label, turns) for label, turns in runs.items()]))
    base, *other_runs = runs
    for label in other_runs:
        ratios = [a["T"] / b["T"] for a, b in zip(runs[base], runs[label], strict=True)]
        print(f"T_{base} / T_{label} = {spread(ratios)}")


def line(label: str, turns: list[Figures]) -> list[str]:
    """Return the medians of the turns, with their range."""

    def of(figure: Callable[[Figures], float], form: str = ".2f") -> str:
        return spread([figure(figures) for figures in turns], form)

    return [
        label,
        of(lambda f: f["s"]),
        of(lambda f: f["T"]),
        of(lambda f: max(f["g"], f["t"])),
        of(lambda f: f["g"] + f["t"]),
        of(lambda f: f["littles"]),
        of(lambda f: max(f["g"], f["t"]) / f["T"]),
        of(lambda f: f["cpu"]),
        of(lambda f: f["g_cpu"]),
        of(lambda f: f["t_cpu"]),
        of(lambda f: f["masked"], ".2%"),
        f"{of(lambda f: f['lag'])}, {max(f['lag_max'] for f in turns):.0f}",
        of(lambda f: f["tokens"], ".0f"),
    ]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and the range of several."""
    low = min(values)
    high = max(values)
    return f"{statistics.median(values):{form}}" + (
        f" ({low:{form}}–{high:{form}})" if len(values) > 1 else ""
    )


if __name__ == "__main__":
    main()
