"""Real runs as Ray actors: a lost actor, a signal."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from asyncrl.launch.process import log_path
from tests.integration.runs import Run

pytestmark = pytest.mark.slow
RAY = ("launch=ray", "data.test=''")


def pids(run: Run, role: str) -> list[int]:
    """The processes that `role` has had, oldest first."""
    log = log_path(run.path, role)
    return [int(pid) for pid in re.findall(rf"{role} starts, pid (\d+)", log.read_text())]


def test_a_killed_actor_is_replaced_and_the_run_completes(tmp_path: Path) -> None:
    """One of each role, one after another in one run."""
    victims = {2: "rollout-0", 4: "trainer-0", 6: "coordinator-0"}
    with Run(tmp_path, *RAY, "total_steps=9") as run:
        killed = {}
        for step, role in victims.items():
            run.until_step(step)
            killed[role] = pids(run, role)[-1]
            os.kill(killed[role], signal.SIGKILL)
        summary = run.completed(9)
        assert summary["flow"]["trained"] == 9 * 16
        for role, first in killed.items():
            later = pids(run, role)[pids(run, role).index(first) + 1 :]
            assert later and first not in later
            assert f"{role} was killed by SIGKILL" in run.text()


def test_a_signal_ends_a_ray_run_in_time(tmp_path: Path) -> None:
    with Run(tmp_path, *RAY, "total_steps=1000", "launch.stop_timeout=60") as run:
        run.until_step(1)
        processes = psutil.Process(run.process.pid).children(recursive=True)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 130  # who exceeds the stop timeout ends with another code
        assert run.summary()["outcome"] == "stopped" and run.summary()["conserved"]
        assert not psutil.wait_procs(processes, timeout=60)[1]
