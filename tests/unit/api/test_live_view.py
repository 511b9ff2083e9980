"""What a caller from Python sees of a run: lines, the state read from the run's files, and HTML."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl.api import live_view
from asyncrl.api.live_view import (
    MAX_POINTS,
    LineView,
    RunFeed,
    add_points,
    can_draw,
    open_view,
    run_html,
    thinned,
)
from asyncrl.config.composition import compose
from asyncrl.launch.console import Console
from asyncrl.launch.console_view import ConsoleState, plain_line
from asyncrl.observe.alerts import Alert
from asyncrl.observe.files import write_status
from asyncrl.observe.metrics import LAG, NLL, NLL_HELD_OUT, REWARD, SAMPLED, SAMPLED_SCORE, VALIDATED
from asyncrl.observe.table import PipeSafeTerminal
from asyncrl.wire.messages.shared import Status

NO_POINTS: dict[str, dict[int, float]] = {
    name: {} for name in (REWARD, SAMPLED, SAMPLED_SCORE, NLL, NLL_HELD_OUT)
}
HOSTILE = '<script>alert("x")</script> & \x1b[2J'


def state_of(**fields: Any) -> ConsoleState:
    return ConsoleState(HOSTILE, Status("running", 3, 10, {LAG: 0.5}, (HOSTILE,), **fields))


def step_row(step: int) -> dict[str, float]:
    return {"training/step": step, "timing_s/step": 1.0, REWARD: step / 10}


def silent_console() -> Console:
    return Console("off", ConsoleState("a", Status("starting", 0, 9, {}, ())), PipeSafeTerminal())


def test_texts_of_a_run_are_no_html() -> None:
    alert = Alert(name=HOSTILE, level="bad", what=HOSTILE, do=HOSTILE)
    html = run_html(state_of(failed=HOSTILE, alerts=(alert,)), NO_POINTS)
    assert "<script" not in html and "\x1b" not in html
    assert html.count("&lt;script&gt;") >= 5
    for text in ("running", "step 3/10", "elapsed 0:00:00", "lag mean 0.50", "waiting: "):
        assert text in html
    assert "<svg" not in html


@pytest.mark.parametrize(
    ("points", "labels"),
    [
        ({REWARD: {1: 0.1, 2: 0.4}, SAMPLED: {0: 0.25, 2: 0.5}}, ["reward 0.400", "held-out success 50.0%"]),
        ({SAMPLED: {0: 0.25}}, ["held-out success 25.0%"]),
        ({REWARD: {1: 0.5}, SAMPLED_SCORE: {1: 0.5}}, ["reward 0.500", "held-out score 0.500"]),
        ({NLL: {1: 2.0}, NLL_HELD_OUT: {1: 3.0}}, ["loss per token 2.0000", "held-out loss per token"]),
        ({REWARD: {1: float("nan"), 2: 0.5, 3: float("inf")}}, ["step 2"]),
    ],
)
def test_the_chart_has_the_curves_of_the_run(points: dict[str, dict[int, float]], labels: list[str]) -> None:
    html = run_html(state_of(), NO_POINTS | points)
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + len("</svg>")])
    texts = [element.text or "" for element in svg.iter("text")]
    for label in labels:
        assert any(text.startswith(label) for text in texts), texts
    assert {element.get("fill") for element in svg.iter("text")} == {"currentColor"}
    assert len(list(svg.iter("polyline"))) == len(points)


def test_a_long_curve_has_means() -> None:
    points = thinned({step: float(step) for step in range(1, 10 * MAX_POINTS + 1)})
    assert len(points) == MAX_POINTS
    assert points[0] == (5.5, 5.5)
    assert points[-1] == (10 * MAX_POINTS - 4.5, 10 * MAX_POINTS - 4.5)


def test_the_files_of_a_run_become_the_state_of_the_view(tmp_path: Path) -> None:
    """Rows of an earlier launch are in the curves, and say nothing of the speed of this one."""
    metrics_path = tmp_path / "metrics.jsonl"
    metrics_path.write_text("".join(json.dumps(step_row(step)) + "\n" for step in (1, 2)))
    console = silent_console()
    state = console.state
    feed = RunFeed(tmp_path, console, started_at=0.0)
    assert [row["training/step"] for row in feed.update()] == [1, 2]
    assert state.history[REWARD] == {1: 0.1, 2: 0.2}
    assert state.progress.training_start is None

    status = {"phase": "running", "step": 2, "total_steps": 9, "gauges": {LAG: 0.5}, "waits": ["a: b"]}
    write_status(tmp_path, status | {"time": 1.0, "alerts": [], "failed": ""})
    validation = {"training/step": 3, VALIDATED: 3, SAMPLED: 0.75}
    with metrics_path.open("a") as file:
        file.write(json.dumps(step_row(3)) + "\n" + json.dumps(validation) + '\n{"training/step": 4, "tim')
    assert len(feed.update()) == 2
    assert feed.update() == []
    assert "step 2/9" in plain_line(state)  # as the newest status says
    assert state.history[REWARD] == {1: 0.1, 2: 0.2, 3: 0.3}
    assert state.validation[SAMPLED] == 0.75
    assert state.status.waits == ("a: b",)

    write_status(tmp_path, status | {"time": 1.0, "failed": "", "code": 1, "error": "no more memory"})
    feed.update()
    assert state.status.phase == "failed: no more memory"
    assert state.status.waits == ()


def test_a_repeated_step_drops_the_old_curve_from_there_on(tmp_path: Path) -> None:
    """A run with an older copy of run.db goes on from step 2: its old steps 3 and 4 are gone."""
    rows = [step_row(step) for step in (1, 2, 3, 4)]
    rows.insert(2, {"training/step": 2, VALIDATED: 2, SAMPLED: 0.5})
    rows.append({"training/step": 4, VALIDATED: 4, SAMPLED: 0.9})
    metrics_path = tmp_path / "metrics.jsonl"
    metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    console = silent_console()
    feed = RunFeed(tmp_path, console, started_at=0.0)
    points: dict[str, dict[int, float]] = {REWARD: {}, SAMPLED: {}}
    for row in feed.update():
        add_points(points, row)
    assert console.state.history[REWARD] == points[REWARD] == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}

    with metrics_path.open("a") as file:
        file.write(json.dumps(step_row(3) | {REWARD: 0.7}) + "\n")
    for row in feed.update():
        add_points(points, row)
    assert console.state.history[REWARD] == points[REWARD] == {1: 0.1, 2: 0.2, 3: 0.7}
    assert points[SAMPLED] == {2: 0.5}


def test_the_console_of_a_resumed_run_begins_with_the_earlier_steps(tmp_path: Path) -> None:
    rows = [step_row(1), step_row(2), step_row(3), step_row(2) | {REWARD: 0.9}, step_row(3) | {LAG: 1.5}]
    lines = [json.dumps(row) for row in rows] + ['{"training/step": 4, "tim']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    state = silent_console().state
    state.load_earlier_steps(tmp_path)
    assert state.history[REWARD] == pytest.approx({1: 0.1, 2: 0.9, 3: 0.3})
    assert state.history[LAG] == {3: 1.5}
    assert state.progress.training_start is None

    state.drop_steps_after(2)  # what the coordinator says once it trains
    state.record_step(3, step_row(3) | {REWARD: 0.5})
    assert state.history[REWARD] == pytest.approx({1: 0.1, 2: 0.9, 3: 0.5})
    assert state.history[LAG] == {}

    state.load_earlier_steps(tmp_path / "no run")


def test_a_status_that_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    console = silent_console()
    feed = RunFeed(tmp_path, console, started_at=0.0)
    for content in ("{", '{"code": 0}', '{"phase": 3, "step": "x"}'):
        (tmp_path / "status.json").write_text(content)
        assert feed.update() == []
    assert console.state.status == replace(silent_console().state.status)


def test_lines_that_nobody_can_read_are_dropped(tmp_path: Path) -> None:
    file = (tmp_path / "lines").open("w")
    view = LineView(lambda line: print(line, file=file))
    view.print_line("a")
    file.close()
    view.print_line("b")
    assert (tmp_path / "lines").read_text() == "a\n"

    read_end, write_end = os.pipe()
    os.close(read_end)
    LineView(lambda line: print(os.write(write_end, line.encode()))).print_line("a")
    os.close(write_end)

    with pytest.raises(ValueError, match="invalid literal"):
        LineView(lambda line: print(int(line))).print_line("a")


def test_only_a_terminal_or_a_notebook_has_a_view(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not can_draw([].append)
    closed_file = (tmp_path / "closed").open("w")
    closed_file.close()
    for stdout in (None, closed_file):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            assert not can_draw(print)


def write_config(run_dir: Path) -> None:
    config = compose(["name=a", "model.path=m", "data.train=t"])
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(config))


def test_a_view_that_fails_leaves_the_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot be opened, as the run has no configuration; and it fails at an update."""
    with open_view(tmp_path, print, 0.0, caller_draws=True) as view:
        for line in ("a", "b"):
            view.print_line(line)
            view.update()
    failure_line = "the live view failed (ConfigError: "
    printed_lines = capsys.readouterr().out.splitlines()
    assert [line[: len(failure_line)] for line in printed_lines] == ["a", failure_line, "b"]

    def fail(feed: RunFeed) -> None:
        raise TypeError("no number")

    write_config(tmp_path)
    monkeypatch.setattr(RunFeed, "update", fail)
    with open_view(tmp_path, print, 0.0, caller_draws=True) as view:
        view.update()
        view.update()
    (printed_line,) = capsys.readouterr().out.splitlines()
    assert printed_line.startswith("the live view failed (TypeError: no number), but the run continues; ")


def test_ctrl_c_while_the_view_opens_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The caller then stops the run, and goes on to show it."""
    write_config(tmp_path)
    with open_view(tmp_path, print, 0.0, caller_draws=True) as view:
        with monkeypatch.context() as patch:
            patch.setattr(live_view, "_in_notebook", lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                view.update()
        view.update()
        assert isinstance(view, live_view.GuardedView)
        assert isinstance(view._view, live_view.TerminalView)


THREADS = """
import sys, threading
from pathlib import Path
from asyncrl.config import read_config

sys.setswitchinterval(1e-5)
barrier = threading.Barrier(4)
def read() -> None:
    barrier.wait()
    read_config(Path(sys.argv[1]))
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_several_threads_may_wait_for_runs(tmp_path: Path) -> None:
    """The first use of a type by two threads at once is a segmentation fault in msgspec."""
    write_config(tmp_path)
    subprocess.run([sys.executable, "-c", THREADS, tmp_path], check=True, timeout=60)
