"""What launchers promise, for local processes and for Ray actors alike."""

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


def pids(run: Run, role: str) -> list[int]:
    """The processes that `role` has had, oldest first."""
    log = log_path(run.path, role)
    return [int(pid) for pid in re.findall(rf"{role} starts, pid (\d+)", log.read_text())]


@pytest.mark.parametrize("launch", [pytest.param("local", marks=pytest.mark.long), "ray"])
def test_who_is_killed_is_replaced_and_a_signal_ends_all_in_time(tmp_path: Path, launch: str) -> None:
    """One of each role in one run: a worker and the trainer at once, then the coordinator."""
    victims = {2: ("rollout-0", "trainer-0"), 4: ("coordinator-0",)}
    keys = (f"launch={launch}", "data.test=''", "total_steps=1000", "launch.stop_timeout=60")
    with Run(tmp_path, *keys) as run:
        killed = {}
        for step, roles in victims.items():
            run.until_step(step)
            for role in roles:
                killed[role] = pids(run, role)[-1]
                os.kill(killed[role], signal.SIGKILL)
        run.until_step(6)
        for role, first in killed.items():
            later = pids(run, role)[pids(run, role).index(first) + 1 :]
            assert later and first not in later
            assert f"{role} was killed by SIGKILL" in run.text()
        processes = psutil.Process(run.process.pid).children(recursive=True)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 130  # who exceeds the stop timeout ends with another code
        assert run.summary()["outcome"] == "stopped" and run.summary()["conserved"]
        assert not psutil.wait_procs(processes, timeout=60)[1]
