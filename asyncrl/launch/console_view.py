"""Renders the live view of a run in the size of the terminal, and its plain line. Pure except for the
clock."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace
from rich.columns import Columns
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from asyncrl.observe.alerts import Alert, unless_quoted
from asyncrl.observe.columns import MetricColumns
from asyncrl.observe.metrics import (
    BATCH,
    FIGURES,
    FILTERED,
    NLL,
    NLL_HELD_OUT,
    REWARD,
    TRACED,
    ZERO_ADVANTAGE,
    clock_text,
    figures,
    label,
    value_of,
)
from asyncrl.observe.transcripts import Transcript
from asyncrl.observe.wrapping import HANGING_INDENT, shorten, wrap_text
from asyncrl.wire.messages.shared import Status

FIGURE_GAP = 3  # columns between figures
# Width of progress bar and curves, in columns.
MIN_BAR_WIDTH = 8
MAX_BAR_WIDTH = 60
MAX_CURVE_WIDTH = 120
# Most lines of each part of the picture.
MAX_WAIT_LINES = 4
MAX_FAILURE_LINES = 3
MAX_HINT_LINES = 4
# Levels of alerts that stand above the curves; alerts of other levels are hints below them.
ALARM_LEVELS = ("bad", "warn")
ALERT_COLORS = {"bad": "red", "warn": "yellow", "good": "green", "advice": "cyan"}  # by level of the alert
KEYS_HELP = "g: newest good transcript, b: newest bad transcript"
BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
# Most characters of a plain line, and of the alert in it.
PLAIN_LINE_WIDTH = 160
PLAIN_ALERT_WIDTH = 60


@dataclass
class Progress:
    """Counts the finished steps, plus the fraction of the step under way, so that progress shows before the
    first step has ended."""

    began_at: float
    steps_done: float = 0.0
    training_start: tuple[float, float] | None = None  # (time, steps) at which this launch began to train

    def update_steps(self, steps_done: float, training: bool, now: float) -> None:
        self.steps_done = steps_done
        if training and self.training_start is None:
            self.training_start = now, steps_done

    def remaining_seconds(self, total_steps: int, now: float) -> float | None:
        """Return the seconds to the last step at the mean speed of this launch; None before the first step of
        this launch has ended. Example: 1.5 of 10 steps in 30 s leave 8.5 steps, hence 170 s."""
        start_time, start_steps = self.training_start or (now, self.steps_done)
        steps_done = self.steps_done - start_steps
        return (total_steps - self.steps_done) * (now - start_time) / steps_done if steps_done >= 1 else None

    def format_times(self, total_steps: int, now: float) -> str:
        seconds_left = self.remaining_seconds(total_steps, now)
        eta_text = (
            ""
            if seconds_left is None or self.steps_done >= total_steps
            else f", ETA {clock_text(seconds_left)}"
        )
        return f"elapsed {clock_text(now - self.began_at)}{eta_text}"


@dataclass
class ConsoleState:
    """The newest report about a run."""

    title: str
    status: Status
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    # Values by step, in the order of the steps, for each metric of `TRACED`; see `record_step`.
    history: dict[str, dict[int, float]] = field(default_factory=dict)
    transcript: Transcript | None = None  # shown in place of the figures
    progress: Progress = field(default_factory=lambda: Progress(time.monotonic()))

    @property
    def times_text(self) -> str:
        return self.progress.format_times(self.status.total_steps, time.monotonic())

    @property
    def steps_text(self) -> str:
        """Return the finished steps. Before the first step has ended, add how full its batch is, the only
        number that moves by then. An evaluation has no steps."""
        if not self.status.total_steps:
            return "evaluation"

        step = self.status.step
        batch_fraction = self.status.gauges.get(BATCH, 0.0)
        first_batch_text = (
            f" ({batch_fraction:.0%} of the first batch)" if not step and batch_fraction else ""
        )
        return f"step {step}/{self.status.total_steps}{first_batch_text}"

    def record_step(self, step: int, metrics: dict[str, float]) -> None:
        """Record a committed step and its metrics row, which is newer than the gauges. A run that was resumed
        from an earlier step repeats steps: what the curves had from this step on is dropped.

        Example: steps 1 to 40, then 31, leave a curve of steps 1 to 31.
        """
        gauges = {name: value for name, value in self.status.gauges.items() if name not in metrics}
        self.status = replace(self.status, step=step, gauges=gauges)

        self.metrics = metrics
        self.progress.update_steps(step, True, time.monotonic())
        self.drop_steps_after(step - 1)
        for name in metrics.keys() & TRACED:
            self.history.setdefault(name, {})[step] = metrics[name]

    def drop_steps_after(self, last_step: int) -> None:
        """Drop the points of the curves beyond a step."""
        for name, points in self.history.items():
            if points and next(reversed(points)) > last_step:
                self.history[name] = {step: value for step, value in points.items() if step <= last_step}

    def load_earlier_steps(self, run_dir: Path) -> None:
        """Read the curves of the earlier launches of a run that is resumed."""
        columns = MetricColumns(run_dir / "metrics.jsonl")
        columns.update()
        for name in TRACED:
            step_indexes = columns.steps_having(name)
            steps = columns.steps[step_indexes].astype(int).tolist()
            values = columns.values(name)[step_indexes].tolist()
            points = {step: value for step, value in zip(steps, values, strict=True) if math.isfinite(value)}
            if points:
                self.history[name] = points

    @property
    def newest_values(self) -> dict[str, float]:
        """Return gauges and metrics; of two values with the same name the newer one."""
        return self.validation | self.metrics | self.status.gauges


def render(state: ConsoleState, terminal: Terminal, has_keyboard: bool = False) -> Segments:
    """Make the live view, one line shorter than the terminal: progress; then alarms, curves, hints, figures
    and waits, or a transcript. Parts without room are left out. `has_keyboard`: show which keys there are."""
    width = terminal.width
    height = terminal.height - 1

    def render_lines(*renderables: RenderableType) -> list[list[Segment]]:
        return terminal.render_lines(Group(*renderables), terminal.options.update(width=width), pad=False)

    progress_lines = render_lines(*_progress_header(state, width))
    free_lines = max(0, height - len(progress_lines))

    if transcript := state.transcript:
        title_lines = render_lines(_text([transcript.title], width, "bold"))[:2]
        # The end of the text is shown, as the answer is there.
        text_height = max(0, free_lines - len(title_lines) - 1)
        text = _text(transcript.text.splitlines(), width, hanging_indent=0)
        text_lines = render_lines(text)[-text_height:] if text_height else []
        body_lines = [*title_lines, *text_lines, *render_lines(Text("press any key to go back", "dim"))]
    else:
        status = state.status
        newest_values = state.newest_values
        figure_texts = [
            Text.assemble((f"{label(name)} ", "dim"), value_of(name, newest_values[name]))
            for name in _figure_names(state)
            if name in newest_values and name not in state.history
        ]
        curve_lines = render_lines(_curve_table(state, width))
        figure_lines = render_lines(Columns(figure_texts, padding=(0, FIGURE_GAP, 0, 0), equal=True))

        alarm_lines = render_lines(
            *(_alert_text(alert, width) for alert in status.alerts if alert.level in ALARM_LEVELS)
        )
        failure_text = unless_quoted(status.failed, status.alerts)
        alarm_lines += render_lines(_text([failure_text], width, "red")) if failure_text else []
        alarm_lines = alarm_lines[:MAX_FAILURE_LINES]
        hint_lines = render_lines(
            *(_alert_text(alert, width) for alert in status.alerts if alert.level not in ALARM_LEVELS)
        )[:MAX_HINT_LINES]

        footer_lines = (
            [*render_lines("waiting:"), *render_lines(_text(status.waits, width, "yellow"))[:MAX_WAIT_LINES]]
            if status.waits
            else []
        )
        footer_lines += render_lines(Text(KEYS_HELP, "dim")) if has_keyboard else []

        fixed_height = len(alarm_lines) + len(curve_lines) + len(hint_lines) + len(footer_lines)
        body_lines = [
            *alarm_lines,
            *curve_lines,
            *hint_lines,
            *figure_lines[: max(0, free_lines - fixed_height)],
            *footer_lines,
        ]

    picture_lines = [*progress_lines, *body_lines[:free_lines]][:height]
    return Segments([segment for line in picture_lines for segment in (*line, Segment.line())])


def _progress_header(state: ConsoleState, width: int) -> list[RenderableType]:
    """Return the name and phase, then bar, steps and times: on two lines if one line is too narrow."""
    name = Text(f"{state.title}  {state.status.phase}", "bold", no_wrap=True, overflow="ellipsis")
    for layout in ([f"{state.steps_text} {state.times_text}"], [state.steps_text, state.times_text]):
        if (bar_width := width - len(layout[0]) - 1) >= MIN_BAR_WIDTH:
            grid = Table.grid(padding=(0, 1, 0, 0))
            total_steps = max(1, state.status.total_steps)
            grid.add_row(
                ProgressBar(total_steps, state.progress.steps_done, min(bar_width, MAX_BAR_WIDTH)), layout[0]
            )
            return [name, grid, *layout[1:]]
    return [name, *layout]


def _curve_table(state: ConsoleState, width: int) -> Table:
    """Return a table with a row per traced metric: label, curve of all steps so far, newest value."""
    table = Table.grid(padding=(0, 1, 0, 0))
    traced_names = [name for name in TRACED if state.history.get(name)]
    newest_texts = {
        name: value_of(name, next(reversed(state.history[name].values()))) for name in traced_names
    }
    gap_columns = 2  # between the three columns of the table
    taken_width = (
        max(map(len, map(label, traced_names)), default=0)
        + max(map(len, newest_texts.values()), default=0)
        + gap_columns
    )

    for name in traced_names:
        curve = sparkline([*state.history[name].values()], max(1, min(MAX_CURVE_WIDTH, width - taken_width)))
        table.add_row(Text(label(name), "dim"), Text(curve, "cyan"), newest_texts[name])
    return table


def _alert_text(alert: Alert, width: int) -> Text:
    return _text([alert.line], width, ALERT_COLORS[alert.level])


def _text(lines: Iterable[str], width: int, style: str = "", hanging_indent: int = HANGING_INDENT) -> Text:
    """Join lines that a model or a tool may have written, without their control characters, and wrap them."""
    plain_text = "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)
    return Text(wrap_text(plain_text, width, hanging_indent), style)


def plain_line(state: ConsoleState, with_waits: bool = True) -> str:
    """Return the state on one line of at most PLAIN_LINE_WIDTH characters. Figures that are unknown, or that
    have no room, are left out. `with_waits`: add failures and waits."""
    status = state.status
    line = f"[{state.status.phase}] {state.steps_text} | {state.times_text}"

    alert_texts = [f"{alert.name}: {alert.what}" for alert in status.alerts if alert.level != "advice"][:1]
    line += "".join(f" | {shorten(text, PLAIN_ALERT_WIDTH)}" for text in alert_texts)
    figure_names = (name for name in _figure_names(state) if not name.startswith("val-core/"))
    figure_texts = [*figures(figure_names, state.newest_values)] if status.phase != "starting" else []
    waits_text = f"waits: {'; '.join(status.waits)}" if status.waits else ""
    ending_texts = (unless_quoted(status.failed, status.alerts), waits_text) if with_waits else ()
    endings = list(filter(None, ending_texts))

    # The figures together get half the share of each ending.
    ending_width = 2 * (PLAIN_LINE_WIDTH - len(line)) // (2 * len(endings) + bool(figure_texts) or 1) - 3
    reserved_width = sum(min(len(text), ending_width) + 3 for text in endings)
    for index, figure in enumerate(figure_texts):
        longer_line = f"{line}{', ' if index else ' | '}{figure}"
        line = longer_line if len(longer_line) + reserved_width <= PLAIN_LINE_WIDTH else line

    ending_width = (PLAIN_LINE_WIDTH - len(line)) // (len(endings) or 1) - 3
    return line + "".join(f" | {shorten(text, ending_width)}" for text in endings)


def _figure_names(state: ConsoleState) -> list[str]:
    """Return the figures of this kind of run: a supervised run has a loss, all other runs have rewards."""
    hidden_names = (REWARD, FILTERED, ZERO_ADVANTAGE) if NLL in state.metrics else (NLL, NLL_HELD_OUT)
    return [name for name in FIGURES if name not in hidden_names]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` characters. Each character is the mean of equally many values (within
    one), scaled between the lowest and the highest of these means. Values that are not finite are left
    out."""
    finite_values = [value for value in values if math.isfinite(value)]
    column_count = min(width, len(finite_values))
    column_edges = (
        [len(finite_values) * column // column_count for column in range(column_count + 1)]
        if column_count
        else []
    )
    means = [sum(finite_values[start:end]) / (end - start) for start, end in itertools.pairwise(column_edges)]

    lowest = min(means, default=0.0)
    highest = max(means, default=0.0)
    value_range = highest - lowest

    return "".join(
        BAR_CHARACTERS[min(len(BAR_CHARACTERS) - 1, int((mean - lowest) / value_range * len(BAR_CHARACTERS)))]
        if value_range
        else BAR_CHARACTERS[0]
        for mean in means
    )
