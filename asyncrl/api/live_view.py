"""Shows a run while its caller waits, drawn from the run's files.

on a terminal     the live view of the command (launch/console.py), below the printed lines
in a notebook     one output, updated in place: a chart, phase, step, times, lag, alerts and waits
elsewhere         lines alone: with `show=…`, without a terminal, with observe.console=plain or off
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asyncrl.errors import ConfigError, one_line, recorded
from asyncrl.observe.metrics import (
    LAG,
    NLL,
    NLL_HELD_OUT,
    REWARD,
    SAMPLED,
    SAMPLED_SCORE,
    STEP_SECONDS,
    VALIDATED,
    figures,
    label,
    value_of,
)
from asyncrl.values import printable

if TYPE_CHECKING:
    from asyncrl.launch.console import Console
    from asyncrl.launch.console_view import ConsoleState

Show = Callable[[str], None]
Points = dict[int, float]  # a value by step

TERMINAL_SECONDS = 0.25  # Seconds between two looks at the files, on a terminal.
NOTEBOOK_SECONDS = 1.0  # The same in a notebook, where each new picture is stored and sent.
VIEWED_MODES = ("auto", "live")  # values of observe.console
STATUS_LOCK = threading.Lock()  # msgspec crashes where two threads use a type for the first time

# The chart, in pixels; the browser scales it to the width of the page.
CHART_WIDTH = 640
CHART_HEIGHT = 200
LEFT_MARGIN = 52  # for the labels of the y axis
MARGIN = 20
MAX_POINTS = 300  # Most points of a curve; in longer runs a point is the mean of several steps.
MAX_MARKED_POINTS = 40  # A curve of more points has no dots.
# Metrics that share the chart: of training, and held out. The pair with more values is drawn.
CURVE_PAIRS = ((NLL, NLL_HELD_OUT), (REWARD, SAMPLED), (REWARD, SAMPLED_SCORE))
CURVE_COLORS = ("#3b82f6", "#f97316")  # Of training, and held out; legible on white and on black.


class RunView(Protocol):
    """Shows what happens in a run to its caller. Both methods are called in the thread that waits."""

    def print_line(self, line: str) -> None:
        """Show a line that the launcher has printed."""

    def update(self) -> None:
        """Look for news in the run's files. Called about ten times a second."""


class LineView:
    """Passes the launcher's lines to a function, and draws nothing. A line that cannot be written (a closed
    file, a pipe without a reader, a full disk) is dropped, as training is worth more than its output."""

    def __init__(self, show: Show) -> None:
        self._show = show

    def print_line(self, line: str) -> None:
        try:
            with suppress(OSError):
                self._show(line)
        except ValueError as error:
            if "closed file" not in str(error):  # an error of the caller's own function
                raise

    def update(self) -> None:
        pass


def can_draw(show: Show) -> bool:
    """Return whether a caller that shows lines with `show` draws the view; the launcher then prints notes,
    warnings and the summary, and no line for each step."""
    return show is print and (_in_notebook() or _has_terminal())


@contextmanager
def open_view(run_dir: Path, show: Show, started_at: float, caller_draws: bool) -> Iterator[RunView]:
    """Yield the view of a run. `started_at`: the monotonic time of its start; `caller_draws`: what `can_draw`
    returned then."""
    lines = LineView(show)
    with ExitStack() as stack:
        yield GuardedView(run_dir, show, started_at, stack) if caller_draws else lines


class GuardedView:
    """Draws a run, and shows lines alone before the first update and once drawing has failed: a fault of the
    view stops no run. The view opens in `update`, where a Ctrl-C finds a caller that stops the run."""

    def __init__(self, run_dir: Path, show: Show, started_at: float, stack: ExitStack) -> None:
        self._run_dir = run_dir
        self._show = show
        self._started_at = started_at
        self._stack = stack  # closes the drawn view
        self._lines = LineView(show)
        self._view: RunView | None = None

    def print_line(self, line: str) -> None:
        (self._view or self._lines).print_line(line)

    def update(self) -> None:
        try:
            if self._view is None:
                drawn_view = _draw_run(self._run_dir, self._show, self._started_at)
                self._view = self._stack.enter_context(drawn_view)
            self._view.update()
        except Exception as error:
            self._view = self._lines
            with recorded():
                self._stack.close()
            self._lines.print_line(
                f"the live view failed ({one_line(error)}), but the run continues; to see it, run "
                f"`asyncrl status {self._run_dir}`"
            )


@contextmanager
def _draw_run(run_dir: Path, show: Show, started_at: float) -> Iterator[RunView]:
    """Yield the view of a run on a terminal or in a notebook; a view of lines, if `observe.console` draws
    nothing."""
    from asyncrl.config import read_config

    config = read_config(run_dir)
    if config.observe.console not in VIEWED_MODES:
        yield LineView(show)
        return

    from asyncrl.launch.console import Console, open_console
    from asyncrl.launch.console_view import ConsoleState
    from asyncrl.observe.table import PipeSafeTerminal
    from asyncrl.wire.messages.shared import Status

    if _in_notebook():
        state = ConsoleState(run_dir.name, Status("starting", 0, config.total_steps, {}, ()))
        silent_console = Console("off", state, PipeSafeTerminal())
        notebook_view = NotebookView(RunFeed(run_dir, silent_console, started_at), show)
        try:
            yield notebook_view
        finally:
            with recorded():
                notebook_view.draw()
        return

    # Another thread may not take the keys and the last lines of a terminal where a prompt may wait.
    in_main_thread = threading.current_thread() is threading.main_thread()
    with open_console(
        mode="auto" if in_main_thread else "plain",
        title=run_dir.name,
        total_steps=config.total_steps,
        success_threshold=config.validation.success,
        run_dir=run_dir,
    ) as console:
        yield TerminalView(RunFeed(run_dir, console, started_at))


def _in_notebook() -> bool:
    """Return whether this process is a kernel of Jupyter or its like, which shows HTML."""
    ipython = sys.modules.get("IPython")  # a kernel has imported IPython
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


def _has_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # there is no standard output, or a closed one
        return False


class RunFeed:
    """Feeds a console with what is new in a run's files."""

    def __init__(self, run_dir: Path, console: Console, started_at: float) -> None:
        self.console = console
        self._run_dir = run_dir
        self._started_at = started_at
        self._has_looked = False
        self._written_status: dict[str, Any] = {}  # the newest
        self._rows_end = 0  # bytes of metrics.jsonl that are read

    def update(self) -> list[dict[str, float]]:
        """Read the files, and return the new rows of metrics.jsonl. The first rows may be of earlier launches
        and of the time before the caller waits: they are in the curves, and no line is printed for them."""
        from asyncrl.launch.console_view import Progress
        from asyncrl.observe.files import MAX_ADDED_BYTES, read_added_rows

        start = self._rows_end
        rows, self._rows_end = read_added_rows(self._run_dir, start)
        for row in rows:
            self._add_row(row, is_silent=not self._has_looked)

        # The rows of a long run take several looks; a last one that is cut is left to the next look.
        read_all = self._rows_end - start < MAX_ADDED_BYTES // 2
        if read_all and not self._has_looked:
            self._has_looked = True
            self.console.state.progress = Progress(self._started_at)

        self._read_status()
        return rows

    def _add_row(self, row: dict[str, float], is_silent: bool) -> None:
        if VALIDATED not in row and STEP_SECONDS not in row:
            return  # the last row of a launch, which is of no step
        if not is_silent:
            self.console.show_step(step_of(row), row)
        elif VALIDATED in row:
            self.console.state.validation = row
        else:
            self.console.state.record_step(step_of(row), row)

    def _read_status(self) -> None:
        import msgspec

        from asyncrl.commands.status import describe_ending
        from asyncrl.observe.files import read_status
        from asyncrl.wire.messages.shared import Status

        with suppress(ConfigError, msgspec.ValidationError):  # the next status may be whole
            written_status = read_status(self._run_dir)
            if written_status == self._written_status or "phase" not in written_status:
                return

            self._written_status = written_status
            with STATUS_LOCK:
                status = msgspec.convert(written_status, Status)
            if "code" not in written_status:
                self.console.show_status(status)
            else:  # of a launcher that has ended: its summary has said how
                ending_text = describe_ending(self._run_dir)
                self.console.state.status = msgspec.structs.replace(status, phase=ending_text, waits=())


def step_of(row: Mapping[str, float]) -> int:
    return int(row.get("training/step", 0))


class TerminalView:
    """Draws the live view of the command; see `open_console`."""

    def __init__(self, feed: RunFeed) -> None:
        self._feed = feed
        self._next_look = 0.0

    def print_line(self, line: str) -> None:
        self._feed.console.print_note(line)

    def update(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + TERMINAL_SECONDS
            self._feed.update()


class NotebookView(LineView):
    """Draws a run as one output of a notebook, which is updated in place."""

    def __init__(self, feed: RunFeed, show: Show) -> None:
        super().__init__(show)
        self._feed = feed
        self._points: dict[str, Points] = {name: {} for pair in CURVE_PAIRS for name in pair}
        self._next_look = 0.0
        self._drawn_html = ""
        self._display: Any = None  # IPython's handle of the output

    def update(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + NOTEBOOK_SECONDS
            self.draw()

    def draw(self) -> None:
        """Read the files, and draw the run if anything has changed. A notebook that takes no output stops
        nothing."""
        from IPython.display import display

        from asyncrl.launch.console_view import plain_line

        for row in self._feed.update():
            add_points(self._points, row)

        state = self._feed.console.state
        drawn_html = run_html(state, self._points)
        if drawn_html == self._drawn_html:
            return

        self._drawn_html = drawn_html
        contents = {"text/html": drawn_html, "text/plain": printable(plain_line(state))}
        with recorded():
            if self._display is None:
                self._display = display(contents, raw=True, display_id=True)
            else:
                self._display.update(contents, raw=True)


def add_points(points_by_name: Mapping[str, Points], row: Mapping[str, float]) -> None:
    """Add a metrics row to the curves. A run that was resumed from an earlier step repeats steps: what the
    curves had from this step on is dropped."""
    step = step_of(row)
    if STEP_SECONDS in row:
        for points in points_by_name.values():
            while points and (newest_step := next(reversed(points))) >= step:
                del points[newest_step]

    for name in points_by_name.keys() & row.keys():
        points_by_name[name][step] = row[name]


# -- HTML ----------------------------------------------------------------------------------------------


def run_html(state: ConsoleState, points: Mapping[str, Points]) -> str:
    """Return a run as HTML, in the text color of the page. All texts, some of which a model or a tool may
    have written, are escaped, control characters too. `points`: values by step, of the metrics in
    CURVE_PAIRS."""
    status = state.status
    lag_texts = figures((LAG,), state.newest_values)
    facts = " · ".join([status.phase, state.steps_text, state.times_text, *lag_texts])
    problems = [*(alert.line for alert in status.alerts), *filter(None, [status.failed])]
    waits = [f"waiting: {wait}" for wait in status.waits]

    lines = [f"<b>{escape(printable(state.title))}</b> {escape(printable(facts))}"]
    pair = max(CURVE_PAIRS, key=lambda names: sum(bool(points[name]) for name in names))
    curves = [
        Curve(name, color, thinned_points, newest=points[name][max(points[name])])
        for name, color in zip(pair, CURVE_COLORS, strict=True)
        if (thinned_points := thinned(points[name]))
    ]
    if curves:
        lines.append(chart_svg(curves))
    lines += [escape(printable(text)) for text in (*problems, *waits)]

    body = "".join(f"<div>{line}</div>" for line in lines)
    return f'<div style="max-width: {CHART_WIDTH}px; font-size: 13px; line-height: 1.5">{body}</div>'


class Curve(NamedTuple):
    """A metric in the chart. `points`: (step, value), at least one; `newest`: the value that the legend
    shows."""

    name: str
    color: str
    points: list[tuple[float, float]]
    newest: float


def chart_svg(curves: Sequence[Curve]) -> str:
    """Return a chart of metrics by step, at least one. The first and the last step, the lowest and the
    highest value label the axes."""
    steps, values = zip(*(point for curve in curves for point in curve.points), strict=True)
    first_step = min(steps)
    step_range = max(steps) - first_step or 1.0
    lowest = min(values)
    value_range = max(values) - lowest or 1.0
    bottom = CHART_HEIGHT - MARGIN

    def position(step: float, value: float) -> tuple[float, float]:
        x = LEFT_MARGIN + (step - first_step) / step_range * (CHART_WIDTH - LEFT_MARGIN - MARGIN)
        y = bottom - (value - lowest) / value_range * (bottom - 2 * MARGIN)
        return round(x, 1), round(y, 1)

    def text(x: float, y: float, content: str, anchor: str = "start") -> str:
        return f'<text x="{x}" y="{y}" fill="currentColor" text-anchor="{anchor}">{escape(content)}</text>'

    parts = [
        f'<line x1="{LEFT_MARGIN}" y1="{y}" x2="{CHART_WIDTH - MARGIN}" y2="{y}" stroke="currentColor" '
        'opacity="0.3"/>'
        for y in (2 * MARGIN, bottom)
    ]
    parts += [
        text(LEFT_MARGIN - 6, bottom + 4, value_of(curves[0].name, lowest), "end"),
        text(LEFT_MARGIN - 6, 2 * MARGIN + 4, value_of(curves[0].name, max(values)), "end"),
        text(LEFT_MARGIN, CHART_HEIGHT - 4, f"step {first_step:.0f}"),
        text(CHART_WIDTH - MARGIN, CHART_HEIGHT - 4, f"{max(steps):.0f}", "end"),
    ]

    legend_x = LEFT_MARGIN
    for name, color, points, newest in curves:
        newest_text = f"{label(name)} {value_of(name, newest)}"
        parts.append(f'<circle cx="{legend_x + 4}" cy="14" r="4" fill="{color}"/>')
        parts.append(text(legend_x + 14, 18, newest_text))
        legend_x += CHART_WIDTH // 2

        positions = [position(step, value) for step, value in points]
        line_points = " ".join(f"{x},{y}" for x, y in positions)
        parts.append(f'<polyline points="{line_points}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(positions) <= MAX_MARKED_POINTS:
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in positions]

    return (
        f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" style="width: 100%; font: 12px sans-serif" '
        f'role="img">{"".join(parts)}</svg>'
    )


def thinned(points: Points) -> list[tuple[float, float]]:
    """Return at most MAX_POINTS points (step, value) in the order of their steps, each the mean of equally
    many (within one). Values that are not finite are left out."""
    finite_points = [(step, value) for step, value in sorted(points.items()) if math.isfinite(value)]
    count = min(MAX_POINTS, len(finite_points))
    means: list[tuple[float, float]] = []
    for index in range(count):
        part = finite_points[len(finite_points) * index // count : len(finite_points) * (index + 1) // count]
        steps, values = zip(*part, strict=True)
        means.append((sum(steps) / len(part), sum(values) / len(part)))
    return means
