"""Workers that join a run under way, leave it, or die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.forked import Forked, asyncrl
from tests.integration.runs import ROOT, Run

pytestmark = pytest.mark.slow
COMMAND = (sys.executable, "-m", "asyncrl.cli")


def invitation_text(run: Run, role: str) -> str:
    command = [*COMMAND, "invite", str(run.path), "--role", role]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "only local processes can join" in done.stderr
    return done.stdout


def refused(run: Run, *more: str) -> str:
    command = [*COMMAND, "invite", str(run.path), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    return done.stderr


@contextmanager
def joined(run: Run, directory: Path, *more: str, role: str = "rollout") -> Iterator[Forked]:
    directory.mkdir(exist_ok=True)
    command = ["worker", "--join", "-", "--run-dir", str(directory), *more]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    process = asyncrl(command, directory / "out", ROOT, variables, stdin_text=invitation_text(run, role))
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def test_workers_join_leave_and_die_and_nothing_is_lost(tmp_path: Path) -> None:
    with Run(tmp_path, "total_steps=1000", "data.test=''", "launch.lease=5") as run:
        log = run.path / "logs/coordinator-0.log"
        run.until_step(1)
        with joined(run, tmp_path / "w1") as first, joined(run, tmp_path / "w2") as second:
            for index in (1, 2):
                timeline = run.path / f"timeline/rollout-{index}.jsonl"
                run.until(lambda: timeline.exists() and b"decode" in timeline.read_bytes(), "it samples")  # noqa: B023
            first.send_signal(signal.SIGTERM)
            second.send_signal(signal.SIGKILL)
            assert first.wait(30) == 0, (tmp_path / "w1/out").read_text()
            words = (run.path / "logs/rollout-1.log").read_text()
            assert "rollout-1 ends with 0" in words and words in (tmp_path / "w1/out").read_text()
            assert not any((tmp_path / "w1/run/elsewhere").iterdir()), "all of it was sent"
            run.until(lambda: "worker 1 lost (it leaves)" in log.read_text(), "it is gone")
            run.until(lambda: "worker 2 lost (silent for 5 s)" in log.read_text(), "it is gone, too")
        run.until_step(run.step + 2)
        assert "engine.name is not sglang" in refused(run, "--role", "engine")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 130 and run.summary()["conserved"]
        assert "the run is not active" in refused(run)
