"""Real runs as Ray actors: a lost actor, a signal, a cluster that is not there."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
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


@pytest.mark.parametrize("role", ["rollout-0", "trainer-0", "coordinator-0"])
def test_a_killed_actor_is_replaced_and_the_run_completes(tmp_path: Path, role: str) -> None:
    with Run(tmp_path, *RAY, "total_steps=6") as run:
        run.until_step(2)
        (first,) = pids(run, role)
        os.kill(first, signal.SIGKILL)
        run.completed(6)
        assert pids(run, role)[1:] and first not in pids(run, role)[1:]
        assert f"{role} was killed by SIGKILL" in run.text()


def test_a_signal_ends_a_ray_run_in_time(tmp_path: Path) -> None:
    with Run(tmp_path, *RAY, "total_steps=1000") as run:
        run.until_step(1)
        processes = psutil.Process(run.process.pid).children(recursive=True)
        begin = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(30) == 130
        assert time.monotonic() - begin < 10
        assert run.summary()["outcome"] == "stopped" and run.summary()["conserved"]
        assert not psutil.wait_procs(processes, timeout=5)[1]


def test_a_cluster_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        for address in ("auto", f"127.0.0.1:{port}", "nonsense"):
            with Run(tmp_path, *RAY, f"launch.ray_address='{address}'") as run:
                assert run.wait(90) == 2, run.text()
                assert f"$.launch.ray_address '{address}'" in run.text()
                assert len(run.text().strip().splitlines()) == 1
