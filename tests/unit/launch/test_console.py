"""What a person sees, as text."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console as Terminal

from asyncrl.errors import AsyncrlError, describe, one_line
from asyncrl.launch import console as console_module
from asyncrl.launch.console import Console, open_console
from asyncrl.launch.console_view import ConsoleState, plain_line, render
from asyncrl.observe.alerts import Alert
from asyncrl.observe.metrics import (
    BATCH,
    FIGURES,
    FILTERED,
    GREEDY,
    GREEDY_SCORE,
    HIGHEST,
    REWARD,
    SAMPLED,
    SAMPLED_SCORE,
    VALIDATED,
    ZERO_ADVANTAGE,
)
from asyncrl.observe.summary import failures_line, summarize
from asyncrl.observe.table import PipeSafeTerminal, print_summary
from asyncrl.wire.messages.shared import Status

GAUGES = {"async/ready": 12.0, "async/running": 64.0, "weights/pushed": 5.0, "weights/acked": 4.0}
START = Status("starting", 0, 10, {}, ())
METRICS = {REWARD: 0.5, "tool_call_counts/mean": 2.25, "staleness/lag/p95": 2.0}


def console(mode: str = "plain") -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(mode, ConsoleState("demo", START), Terminal(file=out, width=120)), out  # type: ignore[arg-type]


def test_plain_lines_carry_figures_and_who_waits_on_whom() -> None:
    shown, out = console()
    shown.show_status(Status("running", 1, 10, GAUGES, ("trainer 0: trajectories of step 1",)))
    shown.show_step(1, METRICS)
    line = out.getvalue().splitlines()[-1]
    assert line.startswith("[running] step 1/10")
    for part in (
        "reward 0.500",
        "tool calls/episode 2.25",
        "lag p95 2",
        "episodes ready 12",
        "version pushed 5",
    ):
        assert part in line
    line = plain_line(shown.state)
    assert "reward 0.500" in line and line.endswith("waits: trainer 0: trajectories of step 1")
    wait = "trainer 0: trying the largest micro-batch [x] (12 s)"  # not cut where there is room
    gauges = {REWARD: 0.0, FILTERED: 0.0, "async/ready": 0.0, "async/running": 35.0, BATCH: 0.2}
    state = ConsoleState("demo", Status("running", 0, 2, gauges, (wait,)), {}, {SAMPLED: 0.5})
    line = plain_line(state)
    assert "reward 0.000, groups filtered 0%" in line and line.endswith(f" | waits: {wait}")
    shown.terminal.print(render(state, shown.terminal))
    for part in ("step 0/2 (20% of the first batch)", "reward 0.000", "held-out success 50.0%", wait):
        assert part in out.getvalue()
    assert plain_line(ConsoleState("demo", START)) == "[starting] step 0/10 | elapsed 0:00:00"


ALERT = Alert("constant reward", "bad", "all 512 episodes scored 0", "read episodes", 0, {"trainer.lr": "1"})
FAILED = "attempts failed: 1,234 reward_error, 2 worker_lost; latest: [x] (bad.py:41)"


@pytest.mark.parametrize(
    ("problems", "shorter"),
    [
        (
            [{"alerts": (ALERT,)}, {"alerts": (replace(ALERT, what="all 520 episodes scored 0"),)}],
            "constant reward: all 520 episodes scored 0",
        ),
        ([{"failed": FAILED}, {"failed": FAILED}], FAILED),
    ],
)
def test_what_is_wrong_is_said_once_and_stays_in_view(problems: list[dict[str, Any]], shorter: str) -> None:
    """With the score before any step."""
    shown, out = console()
    for more in ({}, *problems):
        shown.show_status(Status("running", 0, 10, {REWARD: 0.0, FILTERED: 0.98}, (), **more))
    said = problems[0].get("failed") or ALERT.line
    assert out.getvalue().splitlines() == ["phase: running", said]
    line = plain_line(shown.state)
    assert "reward 0.000, groups filtered 98%" in line and line.count(f" | {shorter}") == 1
    shown.terminal.print(render(shown.state, shown.terminal))
    assert shorter in "\n".join(out.getvalue().splitlines()[2:])


@pytest.mark.parametrize(("level", "printed"), [("bad", 2), ("warn", 1)])
def test_a_bad_alert_that_was_gone_is_printed_again(level: Any, printed: int) -> None:
    """Checkpoints fail, one is written, and they fail again."""
    shown, out = console()
    for alerts in ((ALERT,), (ALERT,), (), (ALERT,)):
        alerts = tuple(replace(alert, level=level) for alert in alerts)
        shown.show_status(Status("running", 0, 10, {}, (), alerts=alerts))
    assert out.getvalue().count(ALERT.line) == printed


def test_failed_attempts_are_counted_by_kind() -> None:
    assert failures_line({"worker_lost": 2, "reward_error": 1234}, "[x] (bad.py:41)") == FAILED


FAIL = Alert(name="attempts fail", level="bad", what="9 of 9, most with x: no such tool", do="name it")


@pytest.mark.parametrize("together", [False, True])
def test_why_attempts_fail_is_printed_once(together: bool) -> None:
    """By the line of the first failure, or by the alert if that comes with it; live, too."""
    shown, out = console()
    first = Status("running", 0, 10, {}, (), "attempts failed: 1 x; latest: no such tool")
    if not together:
        shown.show_status(first)
    last = replace(first, failed="attempts failed: 9 x; latest: no such tool", alerts=(FAIL,))
    shown.show_status(last)
    shown.show_status(last)
    text = out.getvalue()
    assert text.count("no such tool") == 1 and text.count("attempts fail: 9 of 9, most with x") == 1
    assert "no such tool" in plain_line(shown.state) and plain_line(shown.state).count("no such tool") == 1
    terminal = Terminal(file=io.StringIO(), width=120, height=40)
    terminal.print(render(shown.state, terminal))
    assert terminal.file.getvalue().count("no such tool") == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("failed", ["", "attempts failed: " + 9 * "1,234 reward_error, "])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_plain_line_is_never_long(failed: str, count: int) -> None:
    """Of figures, failures and waits each has some of it."""
    waits = tuple(f"worker {at}: weights v7: engine has v5 (123 s, 32 episodes)" for at in range(count))
    figures = dict.fromkeys(FIGURES, 1234.5)
    state = ConsoleState("demo", Status("running", 12, 100, figures, waits, failed))
    state.progress.training_start = 0.0, 0
    line = plain_line(state)
    assert len(line) <= 160 and "reward 1234.500" in line
    assert ("waits: worker 0" in line) == bool(count) and ("attempts failed: 1,234" in line) == bool(failed)
    assert (plain_line(state, with_waits=False) == line) == (not failed and not count)
    assert all(name in plain_line(state, with_waits=False) for name in ("lag mean", "advantage 0", "reward"))


def test_there_is_a_line_for_each_step_and_each_validation() -> None:
    shown, out = console()
    for step in range(1, 11):
        shown.show_step(step, METRICS)
    shown.show_step(10, {VALIDATED: 10, SAMPLED: 0.5, SAMPLED_SCORE: -3.5, GREEDY: 0.25, GREEDY_SCORE: 200.0})
    lines = out.getvalue().splitlines()
    assert [line.split()[2] for line in lines[:-1]] == [f"{step}/10" for step in range(1, 11)]
    assert lines[-1] == (
        "validation at step 10: held-out success 50.0%, held-out score -3.500, "
        "held-out success (greedy) 25.0%, held-out score (greedy) 200.000"
    )


def test_a_validation_without_a_result_is_no_step() -> None:
    shown, out = console()
    shown.show_step(1, METRICS)
    shown.show_step(4, {VALIDATED: 3, "val-aux/failed": 2.0})
    assert out.getvalue().splitlines()[-1].startswith("validation at step 4: no result")
    shown.show_step(8, {VALIDATED: 7, HIGHEST: 0.0})
    assert out.getvalue().splitlines()[-1] == "validation at step 8: without a reward"
    assert (shown.state.status.step, shown.state.metrics) == (1, METRICS)


def test_off_says_nothing_but_why_a_run_failed(capsys: pytest.CaptureFixture[str]) -> None:
    shown, out = console("off")
    shown.show_status(Status("running", 1, 10, GAUGES, ()))
    shown.show_step(1, METRICS)
    shown.print_note("restarted")
    shown.print_error("no reason")
    assert out.getvalue() == "" and capsys.readouterr().err == "asyncrl: no reason\n"


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_terminal_that_was_closed_does_not_matter(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is to be stopped in order then, with all that this prints."""
    ours, theirs = os.openpty()
    with open(theirs, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        with open_console(mode, "demo", 10, 1.0, Path()) as shown:  # type: ignore[arg-type]
            shown.print_note("hello")
            os.close(ours)
            shown.print_note("hello")
            shown.show_status(Status("stopping", 1, 10, GAUGES, ()))
            shown.print_error("why")
        monkeypatch.undo()
        with suppress(OSError):
            out.close()


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_terminal_that_nobody_reads_stops_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gets what was printed meanwhile once it is read again."""
    monkeypatch.setattr(console_module, "CLOSE_TIMEOUT", 60.0)
    ours, theirs = os.openpty()
    seen = bytearray()

    def read() -> None:
        with suppress(OSError):  # the other side is closed
            while b"line 299 " not in seen:
                seen.extend(os.read(ours, 1 << 16))

    reader = threading.Thread(target=read, daemon=True)
    with open(theirs, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with open_console(mode, "demo", 10, 1.0, Path()) as shown:  # type: ignore[arg-type]
            lines = (f"line {n} {'x' * 500}" for n in range(300))
            writer = threading.Thread(target=lambda: [*map(shown.print_note, lines)], daemon=True)
            writer.start()
            writer.join(60)
            waited = writer.is_alive()
            reader.start()
        monkeypatch.undo()
    reader.join(60)
    os.close(ours)
    assert not waited
    assert [n for n in range(300) if b"line %d " % n not in seen] == []


def test_a_reader_that_has_gone_away_does_not_matter() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom asyncrl.launch.console import open_console\n"
        "with open_console('plain', 'demo', 10, 1.0, Path()) as shown:\n"
        "    sys.stdin.read()\n"
        "    for step in range(1, 11): shown.print_note('hello')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 0


def test_a_stranger_to_terminals_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks and CI set FORCE_COLOR, for colors in what is no terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with open_console("auto", "demo", 10, 1.0, Path()) as shown:
        assert shown.mode == "plain"


def test_a_closed_standard_output_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed_file = io.StringIO()
    closed_file.close()
    monkeypatch.setattr(sys, "stdout", closed_file)
    with open_console("auto", "demo", 10, 1.0, Path()) as shown:
        assert shown.mode == "plain"


def test_time_and_no_estimate_are_shown_while_the_first_batch_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now)
    shown, out = console()
    shown.show_status(Status("starting", 0, 10, {}, ()))
    now += 20
    shown.show_status(Status("running", 0, 10, {BATCH: 0.0}, ()))
    now += 6
    shown.show_status(Status("running", 0, 10, {BATCH: 0.25}, ()))
    text = out.getvalue().splitlines()[-1]
    assert text == "[running] step 0/10 (25% of the first batch) | elapsed 0:00:26"
    shown.show_status(Status("running", 0, 10, {BATCH: 1.0}, ()))  # it is trained now, for who knows how long
    assert shown.state.times_text == "elapsed 0:00:26"
    shown.show_step(10, METRICS)
    assert " step 10/10 | elapsed 0:00:26 | " in out.getvalue().splitlines()[-1]
    shown.show_status(Status("running", 0, 10, {BATCH: 0.25}, ()))
    picture = io.StringIO()
    terminal = Terminal(file=picture, width=150)
    terminal.print(render(shown.state, terminal))
    assert "step 0/10 (25% of the first batch) elapsed 0:00:26\n" in picture.getvalue()


def test_escape_sequences_of_agents_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest cause of failed attempts is an agent's last line; components of rewards have names of its
    choice."""
    said = "\x1b]0;t\x07\x9b2J"
    shown = "^[]0;t^G^[2J"
    error = describe(AsyncrlError(f"agent ended with code 1: {said}"))
    assert (
        error == f"agent ended with code 1: {shown}" and one_line(ValueError(said)) == f"ValueError: {shown}"
    )
    rows = [{"training/step": 1, "time_s": 2.0, "timing_s/step": 2.0, REWARD: 0.5}]
    summary = summarize(rows, {"issued": 8, "trained": 8}, True)
    summary |= {"alerts": [f"attempts failed: {said}"], "components": {f"{said}[b]": (0.1, 0.2, None, None)}}
    print_summary(summary, tmp_path)
    lines = Console("plain", ConsoleState("demo", START), PipeSafeTerminal())
    lines.print_note(f"attempts failed: {said}")
    lines.print_error(f"all attempts failed: {said}")
    captured = capsys.readouterr()
    texts = captured.out + captured.err
    assert "\x1b" not in texts and "\x07" not in texts and "\x9b" not in texts
    assert texts.count(f"failed: {shown}") == 3 and f"{shown}[b] (training)" in texts


def test_the_final_table(tmp_path: Path) -> None:
    rows = [
        {"training/step": 0, "time_s": 0.0, SAMPLED: 0.25, GREEDY: 0.0},
        {"training/step": 1, "time_s": 2.0, "timing_s/step": 2.0, REWARD: 0.5},
        {"training/step": 1, "time_s": 3.0, SAMPLED: 0.75, GREEDY: 1.0},
    ]
    rows[0] |= {SAMPLED_SCORE: -0.5, GREEDY_SCORE: 0.0}
    rows[2] |= {SAMPLED_SCORE: 12.25, GREEDY_SCORE: 1.0}
    rows[1] |= {"weights/probe_logprob_diff_max": 2e-7, "weights/probe_tokens": 640.0}
    rows[1] |= {"weights/probe_noise_floor": 3e-7, ZERO_ADVANTAGE: 0.25, "trainer/trajectories": 8.0}
    flow = {"issued": 8, "trained": 8}
    out = io.StringIO()
    summary = summarize(rows, flow, True) | {"busy_at_once": 0.625, "success_threshold": 10.0}
    export = tmp_path / "checkpoints" / f"step-{summary['steps']}" / "hf"
    export.mkdir(parents=True)
    summary["alerts"] = ["solved: held-out success [x] 75%"]
    print_summary(summary, tmp_path, Terminal(file=out, width=200))
    short = out.getvalue()
    assert (
        f"{tmp_path.name}: Held-out success 25% → 75% in 1 step\n  solved: held-out success [x] 75%\n"
        in short
    )
    assert "busy at once" not in short and f"runs show {tmp_path.name} --all" in short
    print_summary(summary, tmp_path, Terminal(file=out, width=200), everything=True)
    text = out.getvalue()
    assert f"model: {export}\n" in text and ": –" not in text  # what is unknown is left out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert ["held-out success, ≥ 10", "25.0%", "75.0%"] in cells
    assert ["held-out score", "-0.5", "12.2"] in cells
    assert "trainer and all workers busy at once: 62%" in text
    assert "the probe, max: 2.0e-07\n" in text and "compared in the probe: 640" in text
    assert "the probe by rounding alone, max: 3.0e-07" in text and "advantage 0: 25.0%" in text
    assert "attempts failed" not in text
    more = {"probe_logprob_diff_max": 0.46, "attempts_failed": {"reward_error": 3}}
    summary |= more | {"newest_failure": "b [x]"}
    print_summary(summary, tmp_path, Terminal(file=out, width=200), everything=True)
    assert "\n  attempts failed: 3 reward_error; latest: b [x]\n" in out.getvalue()
    assert (
        "the probe, max: 4.6e-01 (with bfloat16 rounding, a gap of 0.1 to 1.2 is normal, but several times"
        in out.getvalue()
    )
    for part in ("25.0%", "75.0%", "100.0%", "8 issued = 8 trained", "✓", str(tmp_path)):
        assert part in text
    out.truncate(0)
    print_summary(summary | {"agents": ["planner"]}, tmp_path, Terminal(file=out, width=200))
    assert "merge" in out.getvalue() and "model: " not in out.getvalue(), "it lacks their adapters"
