"""Console output of a run under way: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace
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
    HIGHEST,
    NLL,
    NLL_HELD_OUT,
    REWARD,
    SAMPLED,
    SAMPLED_SCORE,
    VALIDATED,
    ZERO_ADVANTAGE,
    success_line,
)
from asyncrl.observe.table import PipeSafeTerminal, shown
from asyncrl.wire.messages.observer import Status

LINE_EVERY = 5.0  # seconds between plain lines
IDLE_SHARE = 0.25  # of a step's episodes without advantage, from which on it is worth a line


@dataclass
class ConsoleState:
    """What was last reported of a run."""

    title: str
    status: Status
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    progress: Progress = field(default_factory=lambda: Progress(time.monotonic()))

    @property
    def times(self) -> str:
        return self.progress.line(self.status.total_steps, time.monotonic())

    @property
    def steps(self) -> str:
        """Of the first batch, its share: until it is done, that is all that moves."""
        step, share = self.status.step, self.status.gauges.get(BATCH, 0.0)
        first = f" ({share:.0%} of the first batch)" if not step and share else ""
        return f"step {step}/{self.status.total_steps}{first}"

    def get(self, name: str) -> float | None:
        """A gauge or a metric, whichever is newer."""
        for source in (self.status.gauges, self.metrics, self.validation):
            if name in source:
                return source[name]
        return None


class Console:
    """Shows a run; errors of the terminal do not reach the caller. `threshold`: `validation.success`."""

    def __init__(
        self,
        mode: Literal["live", "plain", "off"],
        state: ConsoleState,
        terminal: Terminal,
        threshold: float = 1.0,
    ) -> None:
        self.mode, self.state, self.terminal, self.threshold = mode, state, terminal, threshold
        self._line_at = 0.0
        self._advised: set[str] = set()

    def status(self, status: Status) -> None:
        """The state of the run, a few times a second."""
        before, self.state.status = self.state.status, status
        news = [f"phase: {status.phase}"] if status.phase != before.phase else []
        news += [status.failed] if status.failed and not before.failed else []
        now = time.monotonic()
        done = status.step + status.gauges.get(BATCH, 0.0)
        self.state.progress.update(done, status.phase == "running", now)
        for line in news:
            self._line(line)
        late = now - self._line_at > (6 * LINE_EVERY if status.step else LINE_EVERY)
        if not news and (late or status.phase in ("starting", "stopping")):
            self._progress_line()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics row of a committed step, or of a validation."""
        if VALIDATED in metrics:
            self.state.validation = metrics
            self._line(f"validation at step {step}: {_validation(metrics)}")
            self._advise("success", success_line(metrics.get(HIGHEST), self.threshold))
            return
        self.state.status, self.state.metrics = replace(self.state.status, step=step), metrics
        self.state.progress.update(step, True, time.monotonic())
        if (share := metrics.get(ZERO_ADVANTAGE, 0.0)) >= IDLE_SHARE:
            self._advise(
                "idle",
                f"step {step}: {share:.0%} of the episodes have advantage 0 and teach nothing (rewards of "
                "their group are equal): use easier or harder samples or a larger buffer.episodes_per_group; "
                "buffer.filter_zero_variance draws others in their place, buffer.max_refill at most",
            )
        if step in (1, self.state.status.total_steps) or time.monotonic() - self._line_at > LINE_EVERY:
            self._progress_line(force=True)

    def _advise(self, about: str, text: str) -> None:
        """Once in a launch."""
        if text and about not in self._advised:
            self._advised.add(about)
            self.note(text)

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
def open_console(
    mode: Literal["auto", "live", "plain", "off"], title: str, total: int, threshold: float = 1.0
) -> Iterator[Console]:
    """A console; a live one gives the terminal back at the end."""
    terminal = PipeSafeTerminal()
    chosen = ("live" if terminal.is_terminal else "plain") if mode == "auto" else mode
    console = Console(chosen, ConsoleState(title, Status("starting", 0, total, {}, ())), terminal, threshold)
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
    ("loss per token (held out)", NLL_HELD_OUT, ".4f"),
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
    status = state.status
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(f"{state.title}  {status.phase}", style="bold"),
        ProgressBar(total=max(1, status.total_steps), completed=state.progress.steps, width=40),
        state.steps,
        state.times,
    )
    figures = Table.grid(padding=(0, 3))
    cells = [f"[dim]{label}[/] {shown(state.get(name), form)}" for label, name, form in _figures(state)]
    for start in range(0, len(cells), 4):
        figures.add_row(*cells[start : start + 4])
    waits = [Text(f"  {wait}", style="yellow") for wait in status.waits[:6]]
    failed = [Text(status.failed, style="red")] if status.failed else []
    return Group(bar, figures, *failed, *([Text("waiting:"), *waits] if waits else []))


def plain_line(state: ConsoleState) -> str:
    """The same on one line; figures that are unknown are left out."""
    status = state.status
    known = [
        f"{label} {shown(value, form)}"
        for label, name, form in _figures(state)
        if (value := state.get(name)) is not None and not name.startswith("val-core/")
    ]
    parts = [f"[{status.phase}] {state.steps}", state.times]
    if known and status.phase != "starting":
        parts.append(", ".join(known))
    if status.failed:
        parts.append(status.failed)
    if status.waits:
        parts.append(f"waits: {'; '.join(status.waits[:3])}")
    return " | ".join(parts)


def _figures(state: ConsoleState) -> list[tuple[str, str, str]]:
    """Those of this kind of run: a supervised one has a loss, all others rewards."""
    other = (REWARD, ZERO_ADVANTAGE) if NLL in state.metrics else (NLL, NLL_HELD_OUT)
    return [figure for figure in FIGURES if figure[1] not in other]


def _validation(metrics: Mapping[str, float]) -> str:
    """Of one that was not over by its deadline there are no numbers."""
    found = [
        f"{mode}: success {metrics[success]:.1%}, score {metrics[score]:.3f}"
        for mode, success, score in (("sampled", SAMPLED, SAMPLED_SCORE), ("greedy", GREEDY, GREEDY_SCORE))
        if success in metrics and score in metrics
    ]
    found += [f"loss per token {metrics[NLL_HELD_OUT]:.4f}"] if NLL_HELD_OUT in metrics else []
    return "; ".join(found) or "no result, as it was not done by its deadline"
