"""The live view of a run, in the size of the terminal, and its plain line. Pure but for the clock."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace
from rich.columns import Columns
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from asyncrl.observe.alerts import Alert, unless_quoted
from asyncrl.observe.metrics import (
    BATCH,
    FIGURES,
    FILTERED,
    NLL,
    NLL_HELD_OUT,
    REWARD,
    TRACED,
    ZERO_ADVANTAGE,
    clock,
    figures,
    label,
    value_of,
)
from asyncrl.observe.transcripts import Transcript
from asyncrl.wire.messages.shared import Status

GAP = 3  # columns between figures
# columns
LEAST_BAR = 8
MOST_BAR = 60
MOST_CURVE = 120
# lines of the picture, at most
WAITS = 4
FAILED = 3
HINT = 2
WRONG = ("bad", "warn")  # levels of alerts that stand above the curves; others are hints, below them
HUES = {"bad": "red", "warn": "yellow", "good": "green", "advice": "cyan"}  # of alerts
KEYS = "g: newest good transcript, b: newest bad one"
LEVELS = "▁▂▃▄▅▆▇█"
# characters of a plain line, and of its alert
WIDEST = 160
SAID = 60


@dataclass
class Progress:
    """`steps` are those done and the share of the next one, so that something is known before the first."""

    began: float
    steps: float = 0.0
    origin: tuple[float, float] | None = None  # (time, steps) at which this launch began to train

    def update(self, steps: float, training: bool, now: float) -> None:
        self.steps = steps
        if training and self.origin is None:
            self.origin = now, steps

    def remaining(self, total: int, now: float) -> float | None:
        """Seconds to the last step, at the mean speed of this launch; None before its first step is done. For
        example 1.5 of 10 steps in 30 s leave 8.5 of them for 170 s."""
        since, before = self.origin or (now, self.steps)
        done = self.steps - before
        return (total - self.steps) * (now - since) / done if done >= 1 else None

    def line(self, total: int, now: float) -> str:
        left = self.remaining(total, now)
        eta = "" if left is None or self.steps >= total else f", ETA {clock(left)}"
        return f"elapsed {clock(now - self.began)}{eta}"


@dataclass
class ConsoleState:
    """The newest report about a run."""

    title: str
    status: Status
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)  # of `TRACED`, a value for each step
    transcript: Transcript | None = None  # that is shown in place of the figures
    progress: Progress = field(default_factory=lambda: Progress(time.monotonic()))

    @property
    def times(self) -> str:
        return self.progress.line(self.status.total_steps, time.monotonic())

    @property
    def steps(self) -> str:
        """Steps done; until the first one is, also the share of its batch: that is all that moves. An
        evaluation has none."""
        if not self.status.total_steps:
            return "evaluation"

        step = self.status.step
        share = self.status.gauges.get(BATCH, 0.0)
        first = f" ({share:.0%} of the first batch)" if not step and share else ""
        return f"step {step}/{self.status.total_steps}{first}"

    def committed(self, step: int, metrics: dict[str, float]) -> None:
        """A step with its row, which is newer than the gauges."""
        gauges = {name: value for name, value in self.status.gauges.items() if name not in metrics}
        self.status = replace(self.status, step=step, gauges=gauges)

        self.metrics = metrics
        self.progress.update(step, True, time.monotonic())
        for name in metrics.keys() & TRACED:
            self.history.setdefault(name, []).append(metrics[name])

    @property
    def known(self) -> dict[str, float]:
        """Gauges and metrics; of two values of a name the newer one."""
        return self.validation | self.metrics | self.status.gauges


def render(state: ConsoleState, terminal: Terminal, keys: bool = False) -> Segments:
    """Make the live view, one line less than the terminal has: progress; then what is wrong, curves, a hint,
    figures and who waits on whom, or a transcript. What has no room is left out. `keys`: there is a
    keyboard."""
    width = terminal.width
    height = terminal.height - 1

    def lines(*parts: RenderableType) -> list[list[Segment]]:
        return terminal.render_lines(Group(*parts), terminal.options.update(width=width), pad=False)

    top = lines(*_progress(state, width))
    room = max(0, height - len(top))

    if found := state.transcript:
        title = lines(_text([found.title], "bold"))[:2]
        end = max(0, room - len(title) - 1)  # of the text: that is where the answer is
        text = lines(_text(found.text.splitlines()))[-end:] if end else []
        rest = [*title, *text, *lines(Text("any other key: back", "dim"))]
    else:
        status = state.status
        known = (figure for figure in _figures(state) if figure not in state.history)
        curves = lines(_curves(state, width))
        cells = lines(Columns(figures(known, state.known), padding=(0, GAP, 0, 0), equal=True))

        wrong = lines(*(_alert(alert) for alert in status.alerts if alert.level in WRONG))
        failed = unless_quoted(status.failed, status.alerts)
        wrong += lines(_text([failed], "red")) if failed else []
        wrong = wrong[:FAILED]
        hints = lines(*(_alert(alert) for alert in status.alerts if alert.level not in WRONG))[:HINT]

        below = [*lines("waiting:"), *lines(_text(status.waits, "yellow"))[:WAITS]] if status.waits else []
        below += lines(Text(KEYS, "dim")) if keys else []

        fixed = len(wrong) + len(curves) + len(hints) + len(below)
        rest = [*wrong, *curves, *hints, *cells[: max(0, room - fixed)], *below]

    shown = [*top, *rest[:room]][:height]
    return Segments([part for line in shown for part in (*line, Segment.line())])


def _progress(state: ConsoleState, width: int) -> list[RenderableType]:
    """Name and phase; bar, steps and times, on two lines where one has no room for them."""
    name = Text(f"{state.title}  {state.status.phase}", "bold", no_wrap=True, overflow="ellipsis")
    for words in ([f"{state.steps} {state.times}"], [state.steps, state.times]):
        if (bar := width - len(words[0]) - 1) >= LEAST_BAR:
            line = Table.grid(padding=(0, 1, 0, 0))
            total = max(1, state.status.total_steps)
            line.add_row(ProgressBar(total, state.progress.steps, min(bar, MOST_BAR)), words[0])
            return [name, line, *words[1:]]
    return [name, *words]


def _curves(state: ConsoleState, width: int) -> Table:
    """Label, curve of all steps so far, newest value."""
    table = Table.grid(padding=(0, 1, 0, 0))
    traced = [name for name in TRACED if state.history.get(name)]
    newest = {name: value_of(name, state.history[name][-1]) for name in traced}
    gaps = 2  # columns between the three of the table
    taken = max(map(len, map(label, traced)), default=0) + max(map(len, newest.values()), default=0) + gaps

    for name in traced:
        curve = sparkline(state.history[name], max(1, min(MOST_CURVE, width - taken)))
        table.add_row(Text(label(name), "dim"), Text(curve, "cyan"), newest[name])
    return table


def _alert(alert: Alert) -> Text:
    return _text([alert.line], HUES[alert.level])


def _text(lines: Iterable[str], style: str = "") -> Text:
    """Lines of what a model or a tool may have written, without control characters."""
    return Text("\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines), style)


def plain_line(state: ConsoleState, waits: bool = True) -> str:
    """The same on one line of at most WIDEST characters: figures that are unknown, or beyond that, are left
    out. `waits`: with failures and who waits for what."""
    status = state.status
    line = f"[{state.status.phase}] {state.steps} | {state.times}"

    said = [f"{alert.name}: {alert.what}" for alert in status.alerts if alert.level != "advice"][:1]
    line += "".join(f" | {text[:SAID]}" for text in said)
    names = (name for name in _figures(state) if not name.startswith("val-core/"))
    known = [*figures(names, state.known)] if status.phase != "starting" else []
    named = f"waits: {'; '.join(status.waits)}" if status.waits else ""
    texts = (unless_quoted(status.failed, status.alerts), named) if waits else ()
    ends = list(filter(None, texts))

    each = 2 * (WIDEST - len(line)) // (2 * len(ends) + bool(known) or 1) - 3  # twice the figures' share
    kept = sum(min(len(text), each) + 3 for text in ends)
    for at, figure in enumerate(known):
        longer = f"{line}{', ' if at else ' | '}{figure}"
        line = longer if len(longer) + kept <= WIDEST else line

    each = (WIDEST - len(line)) // (len(ends) or 1) - 3
    return line + "".join(f" | {text if len(text) <= each else text[: each - 1] + '…'}" for text in ends)


def _figures(state: ConsoleState) -> list[str]:
    """The figures of this kind of run: a supervised one has a loss, all others rewards."""
    other = (REWARD, FILTERED, ZERO_ADVANTAGE) if NLL in state.metrics else (NLL, NLL_HELD_OUT)
    return [name for name in FIGURES if name not in other]


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters, each the mean of as many values as the others (within one), between the
    least and the largest of these means. Values that are not finite are left out."""
    known = [value for value in values if math.isfinite(value)]
    count = min(width, len(known))
    edges = [len(known) * at // count for at in range(count + 1)] if count else []
    means = [sum(known[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]

    least = min(means, default=0.0)
    most = max(means, default=0.0)
    span = most - least

    return "".join(
        LEVELS[min(len(LEVELS) - 1, int((mean - least) / span * len(LEVELS)))] if span else LEVELS[0]
        for mean in means
    )
