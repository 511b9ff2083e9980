"""The live view at the sizes that terminals have, progress, and keys of a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console as Terminal

from asyncrl.coordinator.reporting import save_transcripts
from asyncrl.launch.console_view import ConsoleState, Progress, render, sparkline
from asyncrl.observe.alerts import Alert, Level
from asyncrl.observe.metrics import (
    ENTROPY,
    FIGURES,
    LAG,
    LENGTH,
    NLL,
    NLL_HELD_OUT,
    REWARD,
    clock_text,
    label,
    value_of,
)
from asyncrl.observe.transcripts import Transcript
from asyncrl.wire.messages.shared import Status

FAILED = "attempts failed: 123,456 reward_error, 7,890 worker_lost; latest: KeyError: 'b' (bad.py:41)"
SIZES = [(60, 20), (200, 60)]


def state(steps: int = 300) -> ConsoleState:
    """Of a long run with large numbers, each of them recognisable."""
    waits = tuple(f"rollout {index}: credits of the coordinator (1234{index} s)" for index in range(9))
    console_state = ConsoleState("a-long-name-" * 5, Status("running", 0, 100_000, {}, waits, FAILED))
    plain = (REWARD, LAG, ENTROPY, LENGTH, NLL, NLL_HELD_OUT)
    figures = {name: 1234.0 + at for at, name in enumerate(FIGURES) if name not in plain}
    for step in range(1, steps + 1):
        row = {REWARD: step / 7, LAG: step % 5, ENTROPY: 12345.678, LENGTH: 98765.0}
        console_state.record_step(step, figures | row)
    console_state.progress.began_at = time.monotonic() - 360_000
    console_state.progress.training_start = (time.monotonic() - 3000, 0)
    return console_state


def drawn(shown: ConsoleState, width: int, height: int) -> list[str]:
    out = io.StringIO()
    terminal = Terminal(file=out, width=width, height=height + 1, force_terminal=True, color_system=None)
    terminal.print(render(shown, terminal, has_keyboard=True), end="")
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_no_line_is_wider_and_no_number_is_cut(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1e6)
    shown = state()
    lines = drawn(shown, width, height)
    assert len(lines) <= height and max(map(cell_len, lines)) <= width
    known = [value_of(name, shown.metrics[name]) for name in FIGURES if name in shown.metrics]
    known += [*map(label, FIGURES), shown.steps_text, shown.times_text, FAILED, *shown.status.waits]
    assert numbers("\n".join(lines[1:])) <= numbers("\n".join(known))
    text = "\n".join(lines)
    for part in (
        "step 300/100000",
        "elapsed 100:00:00, ETA 276:",
        "reward          ▁",
        "123,456 reward_error",
    ):
        assert part in text
    for name in (LAG, ENTROPY, LENGTH):
        assert sum(line.startswith(f"{label(name):<16}") for line in lines) == 1
    assert ("version acked" in text) == (width > 60)  # the least important figures go first
    assert lines[-1] == "g: newest good transcript, b: newest bad transcript"


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("steps", [9, 500])
def test_a_curve_ends_with_the_newest_step(width: int, steps: int) -> None:
    """A value of another curve is wider than its own."""
    shown = state(steps)
    shown.history[LAG] |= dict.fromkeys(range(1, steps), 0.0) | {steps: 1.0}
    lines = drawn(shown, width, 40)
    (curve,) = [line for line in lines if line.startswith(label(LAG))]
    assert re.search(r"▁█ 1.00 *$", curve)


def test_faults_stand_above_the_curves_and_a_hint_below_them() -> None:
    shown = state(9)
    levels: tuple[Level, ...] = ("advice", "bad")
    alerts = tuple(Alert(name=f"one that is {level}", level=level, what="", do="") for level in levels)
    shown.status = replace(shown.status, alerts=alerts)
    text = "\n".join(drawn(shown, 100, 40))
    assert text.index("one that is bad") < text.index(label(REWARD)) < text.index("one that is advice")


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.:/]*\d|\d", text))


@pytest.mark.parametrize(("width", "height"), [*SIZES, (20, 5), (1, 1)])
def test_a_transcript_has_the_whole_room_and_shows_its_end(width: int, height: int) -> None:
    shown = state(3)
    shown.transcript = Transcript(
        "newest good", "x" * 500 + "\n\x1b[2J 漢字" + "word " * 500 + "\n\nthe end 42"
    )
    lines = drawn(shown, width, height)
    assert len(lines) <= height and max(map(cell_len, lines)) <= width and "\x1b" not in "".join(lines)
    if width >= 60:
        assert len(lines) == height or width == 200
        assert lines[-2:] == ["the end 42", "press any key to go back"]


CHILD = """
import os, sys
from pathlib import Path
from asyncrl.launch.console import open_console
with open_console("auto", "demo", 10, 1.0, Path(sys.argv[1])):
    os.read(int(sys.argv[2]), 1)
"""


def test_keys_show_a_transcript_and_the_terminal_is_given_back(tmp_path: Path) -> None:
    save_transcripts(tmp_path, "training", 1, [{"uid": "u", "score": 1.0, "text": "so it is 42"}])
    end, begin = os.pipe()
    os.set_inheritable(end, True)
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        os.execv(sys.executable, [sys.executable, "-c", CHILD, str(tmp_path), str(end)])
    try:
        seen = until(terminal, b"b: newest bad transcript")
        assert not termios.tcgetattr(terminal)[3] & (termios.ECHO | termios.ICANON)
        for key, part in (
            (b"g", b"so it is 42"),
            (b"b", b"no bad transcript yet"),
            (b"x", b"b: newest bad transcript"),
        ):
            os.write(terminal, key)
            seen = until(terminal, part)
        assert b"so it is 42" not in seen
        os.write(begin, b".")
        until(terminal, b"\x1b[?25h")  # the cursor is back
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = 0
        assert termios.tcgetattr(terminal)[3] & termios.ECHO
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for file in (terminal, end, begin):
            os.close(file)


def until(terminal: int, part: bytes, seconds: float = 120.0) -> bytes:
    """What is written up to `part`."""
    deadline = time.monotonic() + seconds
    seen = b""
    while part not in seen:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([terminal], [], [], left)[0], seen
        seen += os.read(terminal, 65536)
    return seen


def test_the_first_step_that_is_done_gives_the_first_estimate() -> None:
    progress = Progress(began_at=0.0)
    progress.update_steps(0.0, training=False, now=20.0)
    assert progress.format_times(10, now=20.0) == "elapsed 0:00:20"
    progress.update_steps(0.0, training=True, now=30.0)
    assert progress.remaining_seconds(10, now=35.0) is None
    progress.update_steps(0.5, training=True, now=40.0)  # how fast a batch lands says little of a whole step
    assert progress.remaining_seconds(10, now=40.0) is None
    progress.update_steps(1.0, training=True, now=40.0)
    assert progress.remaining_seconds(10, now=40.0) == pytest.approx(90.0)
    progress.update_steps(2.0, training=True, now=50.0)
    assert progress.format_times(10, now=50.0) == "elapsed 0:00:50, ETA 0:01:20"
    progress.update_steps(10.0, training=False, now=90.0)
    assert progress.format_times(10, now=90.0) == "elapsed 0:01:30"


def test_steps_of_earlier_launches_say_nothing_of_the_speed_of_this_one() -> None:
    progress = Progress(began_at=0.0)
    progress.update_steps(100.0, training=True, now=10.0)
    progress.update_steps(101.0, training=True, now=20.0)
    assert progress.remaining_seconds(111, now=20.0) == pytest.approx(100.0)


def test_clock() -> None:
    assert [clock_text(0.9), clock_text(59.0), clock_text(3723.0), clock_text(100 * 3600.0)] == [
        *("0:00:00", "0:00:59", "1:02:03", "100:00:00")
    ]


def test_a_sparkline_has_the_means_of_equal_parts() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 4, 4, 8, 8], 3) == "▁▅█"
    assert sparkline([1, 1, float("nan"), float("inf")], 5) == "▁▁"
    assert sparkline([], 5) == ""
    assert len(sparkline(list(range(1000)), 37)) == 37
