"""The launcher with real child processes and fake roles: restarts, budgets, no orphans, prompt endings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.launch import placement
from asyncrl.launch.process import LocalSpawner
from asyncrl.launch.run_directory import prepare_and_lock
from asyncrl.launch.supervisor import RunOutcome, Supervisor
from asyncrl.wire.sockets import choose_endpoints
from tests.fakes.launching import DEADLINE, Events, all_gone, config, only

ROOT = Path(__file__).resolve().parents[2]
LATER = 1000.0  # seconds of the supervisor's clock: past every back-off


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # children import tests.fakes


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    mailbox = Events(tmp_path)
    yield mailbox
    mailbox.close()


class SupervisedRun:
    """A supervisor over real children, with a clock of the test's."""

    def __init__(self, tmp_path: Path, units: tuple[placement.Unit, ...], restarts: int = 2) -> None:
        settings = config(tmp_path)
        self.run_dir = tmp_path / settings.name
        self._lock = prepare_and_lock(settings)
        self._lock.__enter__()
        self.spawner = LocalSpawner(self.run_dir, choose_endpoints("127.0.0.1", 0))
        self.notes: list[str] = []
        self.supervisor = Supervisor(
            units, self.spawner, self.run_dir, restarts, self.spawner.rendezvous, self.notes.append
        )
        self.supervisor.start()
        self.now = 0.0

    def tick(self) -> RunOutcome | None:
        """Look at the processes, and again after every back-off."""
        ending = self.supervisor.poll_processes(self.now)
        if ending is None:
            if any(unit.restart_at is not None for unit in self.supervisor.units):
                self.wait_exits()
            self.now += LATER
            ending = self.supervisor.poll_processes(self.now)
        return ending

    def wait_exits(self) -> None:
        """Until every process has ended, by itself or killed."""
        for process in self.processes():
            process.wait(DEADLINE)

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [handle._process for handle in self.supervisor.alive]  # type: ignore[attr-defined]

    def kill(self, pid: int) -> None:
        wrapper = psutil.Process(pid).ppid()
        (process,) = (p for p in self.processes() if p.pid == wrapper)
        os.kill(pid, signal.SIGKILL)
        process.wait(DEADLINE)

    def end(self) -> None:
        self.supervisor.kill_all()
        self.wait_exits()
        self._lock.__exit__(None, None, None)


def pid(event: list[str]) -> int:
    return int(event[-1])


def test_a_killed_worker_comes_back_as_a_new_peer(tmp_path: Path, events: Events) -> None:
    run = SupervisedRun(tmp_path, only("rollout"))
    _, _, incarnation, first = events.next()
    run.kill(int(first))
    assert run.tick() is None
    _, _, again, second = events.next()
    assert (again, second) != (incarnation, first) and again != incarnation
    assert "was killed by SIGKILL" in run.notes[0]
    run.end()


def test_a_lost_rank_takes_all_ranks_to_a_new_rendezvous(tmp_path: Path, events: Events) -> None:
    run = SupervisedRun(tmp_path, only("trainer", ranks="2"))
    before = [events.next(), events.next()]
    run.kill(pid(before[1]))
    assert run.tick() is None
    after = [events.next(), events.next()]
    incarnations = [{event[2] for event in start} for start in (before, after)]
    meetings = [{event[3] for event in start} for start in (before, after)]
    assert all(len(names) == 1 for names in incarnations + meetings)
    assert incarnations[0] != incarnations[1] and meetings[0] != meetings[1]
    assert Path(meetings[0].pop()).parent == run.run_dir.absolute() / "rendezvous"
    run.end()


def test_a_spent_budget_ends_the_run_with_the_end_of_the_log(tmp_path: Path, events: Events) -> None:
    run = SupervisedRun(tmp_path, only("rollout", rollout="crashing_worker"), restarts=1)
    run.wait_exits()
    assert run.tick() is None
    run.wait_exits()
    ending = run.tick()
    assert ending is not None and ending.code == 1
    assert "rollout-0 exited with code 70; no restarts are left" in ending.error
    assert "the worker's own reason" in ending.error and str(run.run_dir / "logs") in ending.error
    run.end()


def test_bad_input_found_late_is_not_tried_again(tmp_path: Path, events: Events) -> None:
    run = SupervisedRun(tmp_path, only("rollout", rollout="refusing_worker"))
    run.wait_exits()
    ending = run.tick()
    assert ending is not None and ending.code == 2 and "found late; correct it" in ending.error
    run.end()


def test_the_coordinators_verdict_is_the_end(tmp_path: Path, events: Events) -> None:
    run = SupervisedRun(tmp_path, only("coordinator", coordinator="failing_coordinator"))
    run.wait_exits()
    ending = run.tick()
    assert ending is not None and ending.code == 1 and not run.notes
    run.end()


def launcher(tmp_path: Path, *pairs: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fakes.launching", str(tmp_path), *pairs]
    return subprocess.Popen(command, cwd=ROOT)


def test_no_orphan_when_the_parent_is_killed(tmp_path: Path, events: Events) -> None:
    parent = launcher(tmp_path, "ranks=2")
    started = events.wait_for("coordinator", "rollout", "trainer")
    children = {child.pid for child in psutil.Process(parent.pid).children(recursive=True)}
    assert {pid(event) for event in started.values()} <= children
    parent.kill()
    parent.wait(DEADLINE)
    assert all_gone(list(children))


@pytest.mark.parametrize(  # SIGTERM ends whole runs in test_recovery and test_launchers
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGINT], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_ends_everything_in_time(tmp_path: Path, events: Events, number: signal.Signals) -> None:
    parent = launcher(tmp_path, "ranks=2", "stop_timeout=60")
    started = events.wait_for("running", "rollout", "trainer", "trainer")
    children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    parent.send_signal(number)
    assert parent.wait(DEADLINE) == 130
    assert all_gone(children) and len(children) == 2 * 4 and started
    assert events.wait_for("stop")


def test_a_coordinator_that_does_not_stop_is_killed_in_time(tmp_path: Path, events: Events) -> None:
    parent = launcher(tmp_path, "coordinator=deaf_coordinator", "stop_timeout=3")
    events.wait_for("running", "rollout", "trainer")
    children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(DEADLINE) == 1  # no clean stop, so no 130
    assert all_gone(children)


def test_a_second_interrupt_kills_at_once(tmp_path: Path, events: Events) -> None:
    parent = launcher(tmp_path, "coordinator=deaf_coordinator", "stop_timeout=600")
    events.wait_for("running", "rollout", "trainer")
    children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    parent.send_signal(signal.SIGINT)
    events.wait_for("stop")
    parent.send_signal(signal.SIGINT)
    assert parent.wait(DEADLINE) == 130
    assert all_gone(children)


def test_a_killed_coordinator_is_replaced_on_its_endpoints(tmp_path: Path, events: Events) -> None:
    parent = launcher(tmp_path)
    first = events.wait_for("coordinator", "running", "rollout", "trainer")
    psutil.Process(pid(first["coordinator"])).kill()
    second = events.wait_for("coordinator")
    assert second["coordinator"][2] == first["coordinator"][2]  # it names the launch
    assert pid(second["coordinator"]) != pid(first["coordinator"])
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(DEADLINE) == 130
