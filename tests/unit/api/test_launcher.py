"""The launcher's process, from the side of its caller."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.api import launcher as launcher_module
from asyncrl.api.calls import train
from asyncrl.api.launcher import LauncherProcess, LauncherRequest, RunError
from asyncrl.api.live_view import LineView
from asyncrl.errors import ConfigError
from asyncrl.registry import INSIDE_RUN

REQUEST = LauncherRequest(command="train", overrides=["experiment=calculator"])


class InterruptingView(LineView):
    """Raises KeyboardInterrupt at the first update, as Ctrl-C does."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(lines.append)
        self._was_interrupted = False

    def update(self) -> None:
        if not self._was_interrupted:
            self._was_interrupted = True
            raise KeyboardInterrupt


@contextmanager
def hanging_launcher() -> Iterator[LauncherProcess]:
    """Yield a launcher whose process does nothing any more."""
    launcher = LauncherProcess(REQUEST)
    process_id = launcher._process.pid
    os.kill(process_id, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher_module, "KILL_SECONDS", 0.2)
        try:
            yield launcher
        finally:
            launcher.kill()


def test_a_launcher_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "STOP_MARGIN_SECONDS", 0.2)
    text = r"the launcher did not exit within \d+ s of the stop .* was killed, with all processes of the run"

    with hanging_launcher() as launcher:
        launcher.stop()
        with pytest.raises(RunError, match=text) as raised:
            launcher.wait(LineView(print))
        assert "\n" not in str(raised.value)
        assert not launcher.is_running

    lines: list[str] = []
    with hanging_launcher() as launcher:
        with pytest.raises(KeyboardInterrupt):
            launcher.wait(InterruptingView(lines))
        assert not launcher.is_running
    assert len(lines) == 1
    assert lines[0].startswith("the launcher did not exit within ")


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(RunError, match=r"the launcher process could not be started .*; make sure") as raised:
        LauncherProcess(REQUEST)
    assert "\n" not in str(raised.value)


def test_lines_have_no_codes_of_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook sets FORCE_COLOR, which a list of lines or the live view cannot show."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with hanging_launcher() as launcher:
        environment = Path(f"/proc/{launcher._process.pid}/environ").read_bytes()
    assert b"FORCE_COLOR" not in environment and INSIDE_RUN.encode() in environment


def test_a_forked_child_of_the_caller_neither_waits_nor_stops() -> None:
    launcher = LauncherProcess(REQUEST)
    try:
        forked_pid = os.fork()
        if not forked_pid:
            refusals = 0
            for call in (lambda: launcher.wait(LineView(print)), launcher.stop, launcher.kill):
                try:
                    call()
                except ConfigError as error:
                    refusals += "only that process can wait for or stop the run" in str(error)
            os._exit(refusals)
        assert os.waitstatus_to_exitcode(os.waitpid(forked_pid, 0)[1]) == 3
        assert launcher.is_running
    finally:
        launcher.kill()


def test_a_run_starts_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools, rewards and their children, those of multiprocessing too, have the variable."""
    monkeypatch.setenv(INSIDE_RUN, "1")
    with pytest.raises(
        ConfigError, match=r"asyncrl.train\(\) was called in a process of a run, .*; call it in"
    ):
        train("experiment=calculator")
