"""Shows a run on the terminal while it goes on: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape

from asyncrl.launch.console_view import ConsoleState, plain_line, render
from asyncrl.observe.alerts import Alert, newest_cause, unless_quoted
from asyncrl.observe.background import BackgroundCalls
from asyncrl.observe.metrics import BATCH, HELD_OUT, HIGHEST, VALIDATED, figures
from asyncrl.observe.table import PipeSafeTerminal
from asyncrl.observe.transcripts import Transcript, newest_transcript
from asyncrl.observe.wrapping import fit_terminal
from asyncrl.values import printable
from asyncrl.wire.messages.shared import Status

# Seconds between plain lines while no step ends; six times as long once a step has ended.
LINE_INTERVAL = 5.0
MAX_PENDING_TEXTS = 1000  # Texts that may wait for a terminal; further texts are lost.
KEY_QUALITIES = {"g": "good", "b": "bad"}  # Quality of the transcript that a key shows.
CLOSE_TIMEOUT = 2.0  # Seconds at the end for texts that still wait.


class Console:
    """Shows a run on the terminal. Errors of the terminal do not reach the caller."""

    def __init__(
        self,
        mode: Literal["live", "plain", "off"],
        state: ConsoleState,
        terminal: Terminal,
    ) -> None:
        self.mode = mode
        self.state = state
        self.terminal = terminal
        self._last_line_at = 0.0
        self._printed_alerts: dict[str, Alert] = {}  # alerts by name: a bad one that returns is printed again
        self._printed_cause = ""  # cause of the first failed attempt, which alerts do not repeat

    def show_status(self, status: Status) -> None:
        """Show the state of the run, as reported a few times a second."""
        previous_status = self.state.status
        self.state.status = status

        new_lines = [f"phase: {status.phase}"] if status.phase != previous_status.phase else []
        failure_text = unless_quoted(status.failed, status.alerts)
        if failure_text and not previous_status.failed:
            new_lines.append(failure_text)
            self._printed_cause = newest_cause(failure_text)

        # Alerts that have not been printed yet, or that were bad and have returned.
        alerts = {alert.name: alert for alert in status.alerts}
        alert_lines = [alert.line for name, alert in alerts.items() if name not in self._printed_alerts]
        if self._printed_cause:
            alert_lines = [line.replace(f": {self._printed_cause}", "") for line in alert_lines]
        new_lines += alert_lines
        lasting_alerts = {name: alert for name, alert in self._printed_alerts.items() if alert.level != "bad"}
        self._printed_alerts = lasting_alerts | alerts

        now = time.monotonic()
        # A full batch is not yet a committed step.
        steps_done = status.step + min(0.999, status.gauges.get(BATCH, 0.0))
        self.state.progress.update_steps(steps_done, status.phase == "running", now)

        for line in new_lines:
            self._print_plain(line)

        is_frequent = not status.step or status.phase in ("starting", "stopping")
        if not new_lines and now - self._last_line_at > (LINE_INTERVAL if is_frequent else 6 * LINE_INTERVAL):
            self._print_plain(plain_line(self.state))

    def show_step(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics row of a committed step, or of a validation."""
        if VALIDATED in metrics:
            self.state.validation = metrics
            reason = (
                "without a reward"
                if HIGHEST in metrics
                else "no result, because the validation missed its deadline"
            )
            self._print_plain(f"validation at step {step}: {', '.join(figures(HELD_OUT, metrics)) or reason}")
            return

        self.state.record_step(step, metrics)
        self._print_plain(plain_line(self.state, with_waits=False))

    def drop_steps_after(self, step: int) -> None:
        """Drop the points of the curves beyond the step from which a run continues."""
        self.state.drop_steps_after(step)

    def print_note(self, text: str) -> None:
        """Print an event that is worth a line in every mode but `off`."""
        if self.mode != "off":
            self._print(text)

    def print_error(self, text: str) -> None:
        """Print on standard error, in every mode, why the run failed."""
        with suppress(OSError):
            error_text = fit_terminal(printable(f"asyncrl: {text}"), sys.stderr)
            print(error_text, file=sys.stderr, flush=True)

    def _print_plain(self, text: str) -> None:
        if self.mode == "plain":
            self._last_line_at = time.monotonic()
            self._print(text)

    def _print(self, text: str) -> None:
        lines = fit_terminal(text, self.terminal.file)
        self.terminal.print(escape(lines), highlight=False, soft_wrap=True)


@contextmanager
def open_console(
    mode: Literal["auto", "live", "plain", "off"],
    title: str,
    total_steps: int,
    success_threshold: float,
    run_dir: Path,
) -> Iterator[Console]:
    """Yield a console; a live one restores the terminal at the end. `run_dir`: the run whose transcripts the
    keys show."""
    with ExitStack() as stack:
        terminal = stack.enter_context(open_terminal())
        has_screen = _has_screen(terminal)
        chosen_mode = ("live" if has_screen else "plain") if mode == "auto" else mode
        state = ConsoleState(title, Status("starting", 0, total_steps, {}, ()))
        console = Console(chosen_mode, state, terminal)
        read_keys = stack.enter_context(_keyboard(chosen_mode == "live"))

        def render_frame() -> RenderableType:
            for key in read_keys():
                state.transcript = None  # Any other key shows the figures again
                if key in KEY_QUALITIES:
                    quality = KEY_QUALITIES[key]
                    transcript = newest_transcript(run_dir, quality == "good", success_threshold)
                    state.transcript = transcript or Transcript(f"no {quality} transcript yet", "")
            return render(state, terminal, has_keyboard=read_keys is not _no_keys)

        live_view = LiveView(
            console=terminal, get_renderable=render_frame, refresh_per_second=4, transient=True
        )
        try:
            if chosen_mode == "live" and has_screen:
                live_view.start()
            yield console
        finally:
            with suppress(OSError):
                live_view.stop()


def _has_screen(terminal: Terminal) -> bool:
    """Return whether a picture can be drawn. FORCE_COLOR, as in notebooks and CI, makes no screen of a
    file."""
    try:
        return terminal.file.isatty() and not terminal.is_dumb_terminal
    except ValueError:  # standard output is closed
        return False


# -- keys ------------------------------------------------------------------------------------------


def _no_keys() -> str:
    return ""


@contextmanager
def _keyboard(enabled: bool) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the keys pressed since its last call. Ctrl-C stays a signal. A process in
    the background gets no keys: reading the terminal there would stop the process (SIGTTIN)."""
    try:
        stdin_fd = sys.stdin.fileno()
        terminal_settings = termios.tcgetattr(stdin_fd) if enabled and _is_foreground(stdin_fd) else None
        if terminal_settings is not None:
            tty.setcbreak(stdin_fd, termios.TCSANOW)
    except (OSError, ValueError, AttributeError, termios.error):
        terminal_settings = None

    if terminal_settings is None:
        yield _no_keys
        return

    def read_keys() -> str:
        with suppress(OSError):
            if _is_foreground(stdin_fd) and select.select([stdin_fd], [], [], 0)[0]:
                return os.read(stdin_fd, 64).decode(errors="replace")
        return ""

    try:
        yield read_keys
    finally:
        with suppress(OSError, termios.error):
            if _is_foreground(stdin_fd):
                termios.tcsetattr(stdin_fd, termios.TCSANOW, terminal_settings)


def _is_foreground(terminal_fd: int) -> bool:
    return os.tcgetpgrp(terminal_fd) == os.getpgrp()


class BackgroundFile:
    """A text file for rich whose content a separate thread writes to `file`, so that the launcher never waits
    for a terminal that nobody reads (Ctrl-S, a full pipe, a stalled connection): a waiting launcher restarts
    no process. A closed terminal is no error. Raises OSError if `file` is not a file of the operating
    system."""

    def __init__(self, file: TextIO) -> None:
        self._fd = file.fileno()
        self.encoding = file.encoding
        file.flush()

        self._unflushed_texts: list[str] = []
        self.writer = BackgroundCalls("terminal", MAX_PENDING_TEXTS)

    def write(self, text: str) -> int:
        self._unflushed_texts.append(text)
        return len(text)

    def flush(self) -> None:
        data = "".join(self._unflushed_texts).encode(self.encoding, "replace")
        self._unflushed_texts.clear()
        if data:
            self.writer.call(partial(self._write_all, data))

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd

    def _write_all(self, data: bytes) -> None:
        with suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # Another program has made the terminal non-blocking
                    select.select([], [self._fd], [])


@contextmanager
def open_terminal() -> Iterator[Terminal]:
    """Yield standard output as a terminal. At the end, texts that still wait are written for up to
    CLOSE_TIMEOUT seconds."""
    try:
        file = BackgroundFile(sys.stdout)
    except (OSError, ValueError, AttributeError):  # Standard output is closed, missing, or replaced by a test
        yield PipeSafeTerminal()
        return

    try:
        yield PipeSafeTerminal(file=file)  # type: ignore[arg-type]
    finally:
        file.writer.close(CLOSE_TIMEOUT)


class LiveView(Live):
    """Skips pictures while the terminal has not accepted the previous picture."""

    def refresh(self) -> None:
        file = self.console.file
        if not isinstance(file, BackgroundFile) or file.writer.idle:
            super().refresh()
