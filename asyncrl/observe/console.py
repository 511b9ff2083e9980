"""Console output: a live view on a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.observe.progress import BATCH, Progress
from asyncrl.observe.summary import (
    GREEDY,
    GREEDY_SCORE,
    NLL,
    REWARD,
    SAMPLED,
    SAMPLED_SCORE,
    VALIDATED,
    ZERO_ADVANTAGE,
    failures_line,
    identity_line,
)

LINE_EVERY = 5.0  # seconds between plain lines
IDLE_SHARE = 0.25  # of a step's episodes without advantage, from which on it is worth a line


class PipeSafeTerminal(Terminal):
    """A terminal for `asyncrl train | head`, and one that may be closed: rich would end the program."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()  # discards all output from here on

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*objects, **options)


@dataclass
class ConsoleState:
    """What was last reported of a run."""

    title: str
    total: int
    phase: str = "starting"
    step: int = 0
    gauges: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    waits: tuple[str, ...] = ()
    failed: str = ""  # failed attempts and the newest cause
    progress: Progress = field(default_factory=lambda: Progress(time.monotonic()))

    @property
    def times(self) -> str:
        return self.progress.line(self.total, time.monotonic())

    @property
    def steps(self) -> str:
        """Of the first batch, its share: until it is done, that is all that moves."""
        share = self.gauges.get(BATCH, 0.0)
        first = f" ({share:.0%} of the first batch)" if not self.step and share else ""
        return f"step {self.step}/{self.total}{first}"

    def get(self, name: str) -> float | None:
        """A gauge or a metric, whichever is newer."""
        for source in (self.gauges, self.metrics, self.validation):
            if name in source:
                return source[name]
        return None


class Console:
    """Shows a run; errors of the terminal do not reach the caller."""

    def __init__(
        self, mode: Literal["live", "plain", "off"], state: ConsoleState, terminal: Terminal
    ) -> None:
        self.mode, self.state, self.terminal = mode, state, terminal
        self._line_at = 0.0
        self._advised = False

    def status(
        self,
        phase: str,
        step: int,
        total: int,
        gauges: dict[str, float],
        waits: tuple[str, ...],
        failed: str = "",
    ) -> None:
        """The state of the run, a few times a second."""
        state = self.state
        news = [f"phase: {phase}"] if phase != state.phase else []
        news += [failed] if failed and not state.failed else []
        state.phase, state.step, state.total = phase, step, total
        state.gauges, state.waits, state.failed = gauges, waits, failed
        now = time.monotonic()
        state.progress.update(step + gauges.get(BATCH, 0.0), phase == "running", now)
        for line in news:
            self._line(line)
        late = now - self._line_at > (6 * LINE_EVERY if step else LINE_EVERY)
        if not news and (late or phase in ("starting", "stopping")):
            self._progress_line()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics row of a committed step, or of a validation."""
        if VALIDATED in metrics:
            self.state.validation = metrics
            self._line(f"validation at step {step}: {_validation(metrics)}")
            return
        self.state.step, self.state.metrics = step, metrics
        self.state.progress.update(step, True, time.monotonic())
        self._advise(step, metrics.get(ZERO_ADVANTAGE, 0.0))
        if step in (1, self.state.total) or time.monotonic() - self._line_at > LINE_EVERY:
            self._progress_line(force=True)

    def _advise(self, step: int, share: float) -> None:
        """Once: why a large part of a batch teaches nothing."""
        if share >= IDLE_SHARE and not self._advised:
            self._advised = True
            self.note(
                f"step {step}: {share:.0%} of the episodes have advantage 0 and teach nothing (rewards of "
                "their group are equal): use easier or harder samples or a larger buffer.episodes_per_group; "
                "buffer.filter_zero_variance draws others in their place, buffer.max_refill at most"
            )

    def note(self, text: str) -> None:
        """An event worth a line in every mode but off."""
        if self.mode != "off":
            self._print(text)

    def fail(self, text: str) -> None:
        """Why the run failed, on standard error, in every mode."""
        with suppress(OSError):
            print(f"asyncrl: {text}", file=sys.stderr, flush=True)

    def _progress_line(self, force: bool = False) -> None:
        if force or time.monotonic() - self._line_at > LINE_EVERY:
            self._line(plain_line(self.state))

    def _line(self, text: str) -> None:
        if self.mode == "plain":
            self._line_at = time.monotonic()
            self._print(text)

    def _print(self, text: str) -> None:
        self.terminal.print(escape(text), highlight=False, soft_wrap=True)


@contextmanager
def open_console(mode: Literal["auto", "live", "plain", "off"], title: str, total: int) -> Iterator[Console]:
    """A console; a live one gives the terminal back at the end."""
    terminal = PipeSafeTerminal()
    chosen = ("live" if terminal.is_terminal else "plain") if mode == "auto" else mode
    console = Console(chosen, ConsoleState(title, total), terminal)
    live = Live(
        console=terminal, get_renderable=lambda: render(console.state), refresh_per_second=4, transient=True
    )
    if chosen == "live":
        live.start()
    try:
        yield console
    finally:
        with suppress(OSError):
            live.stop()


# -- what is shown ---------------------------------------------------------------------------------

FIGURES = (
    ("reward", REWARD, ".3f"),
    ("loss per token", NLL, ".4f"),
    ("success (sampled)", SAMPLED, ".1%"),
    ("success (greedy)", GREEDY, ".1%"),
    ("score (sampled)", SAMPLED_SCORE, ".3f"),
    ("score (greedy)", GREEDY_SCORE, ".3f"),
    ("advantage 0", ZERO_ADVANTAGE, ".0%"),
    ("tool calls/episode", "tool_call_counts/mean", ".2f"),
    ("tokens/s", "perf/throughput", ",.0f"),
    ("trainer idle", "async/trainer_idle_frac", ".0%"),
    ("rollout idle", "async/rollout_idle_frac", ".0%"),
    ("lag p50", "staleness/lag/p50", ".0f"),
    ("lag p95", "staleness/lag/p95", ".0f"),
    ("lag max", "staleness/lag/max", ".0f"),
    ("ready", "async/ready", ".0f"),
    ("running", "async/running", ".0f"),
    ("credits", "async/credits", ".0f"),
    ("version pushed", "weights/pushed", ".0f"),
    ("version acked", "weights/acked", ".0f"),
    ("workers", "async/workers", ".0f"),
)


def render(state: ConsoleState) -> RenderableType:
    """The live view: progress, figures, who waits on whom."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(f"{state.title}  {state.phase}", style="bold"),
        ProgressBar(total=max(1, state.total), completed=state.progress.steps, width=40),
        state.steps,
        state.times,
    )
    figures = Table.grid(padding=(0, 3))
    cells = [f"[dim]{label}[/] {_shown(state.get(name), form)}" for label, name, form in _figures(state)]
    for start in range(0, len(cells), 4):
        figures.add_row(*cells[start : start + 4])
    waits = [Text(f"  {wait}", style="yellow") for wait in state.waits[:6]]
    failed = [Text(state.failed, style="red")] if state.failed else []
    return Group(bar, figures, *failed, *([Text("waiting:"), *waits] if waits else []))


def plain_line(state: ConsoleState) -> str:
    """The same on one line; figures that are unknown are left out."""
    known = [
        f"{label} {_shown(value, form)}"
        for label, name, form in _figures(state)
        if (value := state.get(name)) is not None and not name.startswith("val-core/")
    ]
    parts = [f"[{state.phase}] {state.steps}", state.times]
    if known and state.phase != "starting":
        parts.append(", ".join(known))
    if state.failed:
        parts.append(state.failed)
    if state.waits:
        parts.append(f"waits: {'; '.join(state.waits[:3])}")
    return " | ".join(parts)


def _figures(state: ConsoleState) -> list[tuple[str, str, str]]:
    """Those of this kind of run: a supervised one has a loss, all others rewards."""
    other = (REWARD, ZERO_ADVANTAGE) if NLL in state.metrics else (NLL,)
    return [figure for figure in FIGURES if figure[1] not in other]


def print_summary(summary: Mapping[str, Any], run_dir: Path, terminal: Terminal | None = None) -> None:
    """The table before and after, the numbers that are known, the conservation identity, and where model and
    run are."""
    terminal = terminal or PipeSafeTerminal()
    terminal.print(_before_and_after(summary, run_dir.name))
    for label, key, form in (
        ("steps", "steps", "d"),
        ("optimizer steps skipped", "skipped_steps", "d"),
        ("seconds", "seconds", ".1f"),
        ("tokens trained", "tokens_trained", ",d"),
        ("tokens/s", "tokens_per_s", ",.0f"),
        ("episodes with advantage 0", "zero_advantage_frac", ".1%"),
        ("lag mean", "lag_mean", ".2f"),
        ("lag max", "lag_max", ".0f"),
        ("tokens masked", "masked_token_frac", ".2%"),
        ("trajectories of several versions", "trajectories_multi_version", ".1%"),
        ("trainer idle", "trainer_idle_frac", ".0%"),
        ("rollout idle", "rollout_idle_frac", ".0%"),
        ("trainer and all workers busy at once", "busy_at_once", ".0%"),
        ("weights: the trainer's wait, mean s", "weights_stall_s_mean", ".4f"),
        ("weights: the trainer's wait, share of time", "weights_stall_frac", ".2%"),
        ("log-prob gap of one version, max", "logprob_diff_max_same_version", ".1e"),
        ("engine mismatch of one version, k3", "k3_same_version", ".1e"),
        ("tokens compared for these", "logprob_tokens_compared", ",d"),
        ("log-prob gap of the fixed probe, max", "probe_logprob_diff_max", ".1e"),
        ("tokens compared for that", "probe_tokens_compared", ",d"),
        ("log-prob gap by rounding alone, on that probe, max", "probe_noise_floor", ".1e"),
    ):
        if summary.get(key) is not None:
            terminal.print(f"  {label}: {_shown(summary[key], form)}", highlight=False)
    if failed := failures_line(summary.get("attempts_failed", {}), summary.get("newest_failure", "")):
        terminal.print(f"  {escape(failed)}", highlight=False, soft_wrap=True)
    terminal.print(identity_line(summary["flow"], summary["conserved"]), highlight=False, soft_wrap=True)
    export = run_dir.absolute() / "checkpoints" / f"step-{summary['steps']}" / "hf"
    if export.is_dir():
        terminal.print(f"model: {export}", highlight=False, soft_wrap=True)
    terminal.print(f"run: {run_dir.absolute()}", highlight=False, soft_wrap=True)


def _before_and_after(summary: Mapping[str, Any], name: str) -> Table:
    """Training reward, and what validations found; `≥`: the threshold that makes an episode a success."""
    threshold = _shown(summary.get("success_threshold"), "g")
    table = Table("", "before", "after", title=f"{name}: {summary.get('outcome', '')}")
    if summary.get("nll_first") is None:
        table.add_row("reward (training)", *_pair(summary, "reward_first", "reward_last", ".3f"))
    else:
        table.add_row("loss per token (training)", *_pair(summary, "nll_first", "nll_last", ".4f"))
    for mode, success, score in (
        ("sampled", "success", "score"),
        ("greedy", "greedy", "greedy_score"),
    ):
        if summary.get(f"{success}_before") is None and summary.get(f"{success}_after") is None:
            continue
        pair = _pair(summary, f"{success}_before", f"{success}_after", ".1%")
        table.add_row(f"success, {mode} (held out, ≥ {threshold})", *pair)
        pair = _pair(summary, f"{score}_before", f"{score}_after", ".3f")
        table.add_row(f"score, {mode} (held out)", *pair)
    return table


def _validation(metrics: Mapping[str, float]) -> str:
    """Of one that was not over by its deadline there are no numbers."""
    found = [
        f"{mode}: success {metrics[success]:.1%}, score {metrics[score]:.3f}"
        for mode, success, score in (("sampled", SAMPLED, SAMPLED_SCORE), ("greedy", GREEDY, GREEDY_SCORE))
        if success in metrics and score in metrics
    ]
    return "; ".join(found) or "no result, as it was not done by its deadline"


def _pair(summary: Mapping[str, Any], before: str, after: str, form: str) -> tuple[str, str]:
    return _shown(summary.get(before), form), _shown(summary.get(after), form)


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
