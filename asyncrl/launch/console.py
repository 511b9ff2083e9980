"""Console output of a run under way: a live view on a terminal, plain lines elsewhere."""

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
from asyncrl.observe.background import Background
from asyncrl.observe.metrics import BATCH, HELD_OUT, HIGHEST, VALIDATED, figures
from asyncrl.observe.table import PipeSafeTerminal
from asyncrl.observe.transcripts import Transcript, newest
from asyncrl.values import printable
from asyncrl.wire.messages.shared import Status

LINE_EVERY = 5.0  # seconds between plain lines where no step ends; six times as many once there was one
MOST = 1000  # texts that may wait for a terminal; what is printed beyond them is lost
PATIENCE = 2.0  # seconds, at the end


class Console:
    """Shows a run; errors of the terminal do not reach the caller."""

    def __init__(
        self,
        mode: Literal["live", "plain", "off"],
        state: ConsoleState,
        terminal: Terminal,
    ) -> None:
        self.mode = mode
        self.state = state
        self.terminal = terminal
        self._line_at = 0.0
        self._printed: dict[str, Alert] = {}  # alerts by name: a bad one that returns is printed again
        self._cause = ""  # of the first failed attempt, once printed: alerts do not repeat it

    def status(self, status: Status) -> None:
        """The state of the run, a few times a second."""
        before = self.state.status
        self.state.status = status

        news = [f"phase: {status.phase}"] if status.phase != before.phase else []
        failed = unless_quoted(status.failed, status.alerts)
        if failed and not before.failed:
            news.append(failed)
            self._cause = newest_cause(failed)
        news += self._new_alerts(status)

        now = time.monotonic()
        done = status.step + min(0.999, status.gauges.get(BATCH, 0.0))  # a whole batch is not yet a step
        self.state.progress.update(done, status.phase == "running", now)

        for line in news:
            self._line(line)

        often = not status.step or status.phase in ("starting", "stopping")
        if not news and now - self._line_at > (LINE_EVERY if often else 6 * LINE_EVERY):
            self._line(plain_line(self.state))

    def _new_alerts(self, status: Status) -> list[str]:
        """Return the lines of alerts that are to be printed now."""
        alerts = {alert.name: alert for alert in status.alerts}
        lines = [alert.line for name, alert in alerts.items() if name not in self._printed]
        lasting = {name: alert for name, alert in self._printed.items() if alert.level != "bad"}
        self._printed = lasting | alerts

        return [line.replace(f": {self._cause}", "") for line in lines] if self._cause else lines

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics row of a committed step, or of a validation."""
        if VALIDATED in metrics:
            self.state.validation = metrics
            why = (
                "without a reward" if HIGHEST in metrics else "no result, as it was not done by its deadline"
            )
            self._line(f"validation at step {step}: {', '.join(figures(HELD_OUT, metrics)) or why}")
            return

        self.state.committed(step, metrics)
        self._line(plain_line(self.state, waits=False))

    def note(self, text: str) -> None:
        """An event worth a line in every mode but off."""
        if self.mode != "off":
            self._print(text)

    def fail(self, text: str) -> None:
        """Prints why the run failed on standard error, in every mode."""
        with suppress(OSError):
            print(printable(f"asyncrl: {text}"), file=sys.stderr, flush=True)

    def _line(self, text: str) -> None:
        if self.mode == "plain":
            self._line_at = time.monotonic()
            self._print(text)

    def _print(self, text: str) -> None:
        self.terminal.print(escape(text), highlight=False, soft_wrap=True)


@contextmanager
def open_console(
    mode: Literal["auto", "live", "plain", "off"], title: str, total: int, threshold: float, run_dir: Path
) -> Iterator[Console]:
    """A console; a live one gives the terminal back. `run_dir`: where transcripts are, which keys show."""
    with ExitStack() as stack:
        terminal = stack.enter_context(open_terminal())
        chosen = ("live" if terminal.is_terminal else "plain") if mode == "auto" else mode
        state = ConsoleState(title, Status("starting", 0, total, {}, ()))
        console = Console(chosen, state, terminal)
        pressed = stack.enter_context(_keyboard(chosen == "live"))

        def picture() -> RenderableType:
            for key in pressed():
                state.transcript = _chosen(key, run_dir, threshold)
            return render(state, terminal, keys=pressed is not _nothing)

        live = LiveView(console=terminal, get_renderable=picture, refresh_per_second=4, transient=True)
        if chosen == "live":
            live.start()
        try:
            yield console
        finally:
            with suppress(OSError):
                live.stop()


# -- keys ------------------------------------------------------------------------------------------


def _chosen(key: str, run_dir: Path, threshold: float) -> Transcript | None:
    """Return the transcript that a key asks for; None: the figures again."""
    if key not in "gb":
        return None
    found = newest(run_dir, key == "g", threshold)
    return found or Transcript(f"no {'good' if key == 'g' else 'bad'} transcript yet", "")


def _nothing() -> str:
    return ""


@contextmanager
def _keyboard(wanted: bool) -> Iterator[Callable[[], str]]:
    """Yields a function that returns the keys pressed since its last call. Ctrl-C stays a signal. No keys in
    the background: reading the terminal there would stop this process (SIGTTIN)."""
    try:
        file = sys.stdin.fileno()
        before = termios.tcgetattr(file) if wanted and _in_front(file) else None
        if before is not None:
            tty.setcbreak(file, termios.TCSANOW)
    except (OSError, ValueError, AttributeError, termios.error):
        before = None

    if before is None:
        yield _nothing
        return

    def pressed() -> str:
        with suppress(OSError):
            if _in_front(file) and select.select([file], [], [], 0)[0]:
                return os.read(file, 64).decode(errors="replace")
        return ""

    try:
        yield pressed
    finally:
        with suppress(OSError, termios.error):
            if _in_front(file):
                termios.tcsetattr(file, termios.TCSANOW, before)


def _in_front(file: int) -> bool:
    return os.tcgetpgrp(file) == os.getpgrp()


class BackgroundFile:
    """Takes what rich writes to `file`: a thread of its own writes it, so that nothing waits while nobody
    reads (Ctrl-S, a full pipe, a stalled connection). A launcher that waits restarts no process. A terminal
    that is closed is no error. OSError where `file` is not one of the operating system."""

    def __init__(self, file: TextIO) -> None:
        self._fd = file.fileno()
        self.encoding = file.encoding
        file.flush()

        self._held: list[str] = []
        self.writer = Background("terminal", MOST)

    def write(self, text: str) -> int:
        self._held.append(text)
        return len(text)

    def flush(self) -> None:
        data = "".join(self._held).encode(self.encoding, "replace")
        self._held.clear()
        if data:
            self.writer.call(partial(self._put, data))

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd

    def _put(self, data: bytes) -> None:
        with suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # another program has set the terminal so
                    select.select([], [self._fd], [])


@contextmanager
def open_terminal() -> Iterator[Terminal]:
    """Standard output. At the end what waits is written, for PATIENCE seconds."""
    try:
        file = BackgroundFile(sys.stdout)
    except (OSError, ValueError, AttributeError):  # closed, none, or a test's
        yield PipeSafeTerminal()
        return

    try:
        yield PipeSafeTerminal(file=file)  # type: ignore[arg-type]
    finally:
        file.writer.close(PATIENCE)


class LiveView(Live):
    """Leaves out pictures while the terminal has not taken the one before."""

    def refresh(self) -> None:
        file = self.console.file
        if not isinstance(file, BackgroundFile) or file.writer.idle:
            super().refresh()
