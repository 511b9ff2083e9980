"""Supervision on a clock of the test's, with processes that die on command."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from asyncrl.isolation.child import describe_exit
from asyncrl.launch.placement import PlannedProcess, Unit
from asyncrl.launch.process import TRY_AGAIN, ProcessSpec
from asyncrl.launch.supervisor import BACKOFF_MAX, LEAVE_SECONDS, SOUND_SECONDS, Supervisor
from asyncrl.wire.addresses import is_older


class Fake:
    """A process; `kill` takes effect at once unless it `lingers`."""

    def __init__(self, process_spec: ProcessSpec) -> None:
        self.name = process_spec.process.name
        self.process_spec = process_spec
        self.code = None
        self.lingers = False
        self.killed = False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed = True
        if not self.lingers and self.code is None:
            self.code = -9


class World:
    def __init__(self, run_dir: Path, restarts: int = 2) -> None:
        self.started: list[Fake] = []
        self.notes: list[str] = []
        units = [
            Unit("coordinator", (PlannedProcess("coordinator", 0, 1, "t"),)),
            *(Unit("rollout", (PlannedProcess("rollout", index, 1, "t"),)) for index in (0, 1)),
            Unit("trainer", (PlannedProcess("trainer", 0, 1, "t"), PlannedProcess("trainer", 1, 1, "t"))),
        ]
        self.supervisor = Supervisor(
            units, self.spawn, run_dir, restarts, lambda unit, name: f"at-{name}", self.notes.append
        )
        self.supervisor.start()

    def spawn(self, process_spec: ProcessSpec) -> Fake:
        self.started.append(Fake(process_spec))
        return self.started[-1]

    def newest(self, name: str) -> Fake:
        return [process for process in self.started if process.name == name][-1]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_nothing_happens_while_all_run(world: World) -> None:
    assert world.supervisor.poll_processes(0) is None and len(world.started) == 5


def test_a_worker_is_restarted_after_its_back_off_as_a_new_peer(world: World) -> None:
    dead = world.newest("rollout-0")
    dead.code = -9
    world.supervisor.poll_processes(0)
    world.supervisor.poll_processes(0.4)
    assert world.newest("rollout-0") is dead
    world.supervisor.poll_processes(0.6)
    assert is_older(dead.process_spec.incarnation, world.newest("rollout-0").process_spec.incarnation)
    assert not world.newest("trainer-0").killed
    assert world.notes == ["rollout-0 was killed by SIGKILL; restarting rollout-0 in 0.5 s (1 of 2)"]


@pytest.mark.parametrize(
    ("who", "killed"),
    [("", ["rollout-0", "rollout-1"]), ("rollout-1", ["rollout-1"]), ("its predecessor", [])],
)
def test_what_hangs_is_ended_and_nothing_else(world: World, who: str, killed: list[str]) -> None:
    incarnation = world.newest(who).process_spec.incarnation if who == "rollout-1" else who
    world.supervisor.kill_role("rollout", incarnation)
    assert [process.name for process in world.started if process.killed] == killed


def test_a_process_is_killed_once_and_the_end_of_the_run_says_why(tmp_path: Path) -> None:
    """The reason concerns the killed process alone, not its successor."""
    world = World(tmp_path, restarts=0)
    incarnation = world.newest("rollout-0").process_spec.incarnation
    world.newest("rollout-0").lingers = True
    requests = [("rollout", incarnation, f"v{number} of worker 0 is wrong") for number in range(2)]
    assert [world.supervisor.kill_role(*request) for request in requests] == [True, False]
    world.newest("rollout-0").code = -9
    outcome = world.supervisor.poll_processes(0)
    assert outcome is not None and outcome.error.startswith(
        "rollout-0 was killed by SIGKILL; no restarts are left (launch.restarts=0): v0 of worker 0 is wrong"
    )

    again = World(tmp_path, restarts=1)
    incarnation = again.newest("rollout-0").process_spec.incarnation
    assert again.supervisor.kill_role("rollout", incarnation, "it was wrong")
    for now in (0, 1):
        assert again.supervisor.poll_processes(now) is None
    assert not again.supervisor.kill_role("rollout", incarnation, "it was wrong"), "it has a successor"
    again.newest("rollout-0").code = -9
    outcome = again.supervisor.poll_processes(2)
    assert outcome is not None and "it was wrong" not in outcome.error


def test_all_ranks_go_together_and_wait_for_the_last_of_the_old(world: World) -> None:
    first = world.newest("trainer-0")
    second = world.newest("trainer-1")
    first.lingers = True
    second.code = 1
    world.supervisor.poll_processes(0)
    assert first.killed
    world.supervisor.poll_processes(100)
    assert world.newest("trainer-0") is first  # still there, in the old rendezvous
    first.code = -9
    world.supervisor.poll_processes(101)
    process_specs = [world.newest(f"trainer-{rank}").process_spec for rank in (0, 1)]
    assert process_specs[0].incarnation == process_specs[1].incarnation
    assert is_older(first.process_spec.incarnation, process_specs[0].incarnation)
    assert process_specs[0].rendezvous == process_specs[1].rendezvous != first.process_spec.rendezvous


def test_ranks_that_will_try_with_less_memory_do_not_use_up_restarts(tmp_path: Path) -> None:
    """The other rank may be seen to have died first, of the lost connection."""
    world = World(tmp_path, restarts=1)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-1.log").write_text("out of memory: 512 tokens\n")
    for now in range(4):
        world.newest("trainer-0").code = 70
        world.newest("trainer-1").code = TRY_AGAIN
        assert world.supervisor.poll_processes(now) is None
        world.supervisor.poll_processes(now)
        assert world.newest("trainer-1").code is None
    assert world.notes == ["trainer-1: out of memory: 512 tokens; restarting trainer (all ranks)"] * 4


def test_a_crashed_coordinator_comes_back_under_its_name(world: World) -> None:
    dead = world.newest("coordinator-0")
    dead.code = 70
    assert world.supervisor.poll_processes(0) is None
    world.supervisor.poll_processes(10)
    assert world.newest("coordinator-0") is not dead
    assert world.newest("coordinator-0").process_spec.incarnation == dead.process_spec.incarnation


@pytest.mark.parametrize("code", [0, 1])
def test_the_coordinators_own_word_ends_the_run(world: World, code: int) -> None:
    world.newest("coordinator-0").code = code
    ending = world.supervisor.poll_processes(0)
    assert ending is not None and ending.code == code


def test_a_role_that_ends_in_order_is_left_alone(world: World) -> None:
    world.newest("rollout-0").code = 0  # at the end of a run the coordinator follows at once
    assert world.supervisor.poll_processes(0) is None
    world.supervisor.poll_processes(LEAVE_SECONDS)
    assert len(world.started) == 5 and not world.notes


def test_the_budget_is_each_units_own_and_its_end_shows_the_log(tmp_path: Path) -> None:
    world = World(tmp_path, restarts=1)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rollout-0.log").write_text("what went wrong\n")
    world.newest("trainer-0").code = 70
    world.newest("rollout-0").code = 70
    assert world.supervisor.poll_processes(0) is None
    assert world.supervisor.poll_processes(1) is None
    world.newest("rollout-0").code = 70
    ending = world.supervisor.poll_processes(2)
    assert ending is not None and ending.code == 1
    assert "launch.restarts" in ending.error and "what went wrong" in ending.error


def test_the_budget_is_whole_again_after_a_while_with_a_step(tmp_path: Path) -> None:
    """Deaths that are far apart, in a run that makes steps, are not a role that cannot live."""
    world = World(tmp_path, restarts=1)
    now = 0.0
    for _ in range(5):
        world.newest("rollout-0").code = 70
        assert world.supervisor.poll_processes(now) is None
        world.supervisor.poll_processes(now + 1)
        world.supervisor.run_step += 1
        now += SOUND_SECONDS + 1
    assert all("0.5 s (1 of 1)" in note for note in world.notes)


@pytest.mark.parametrize(("steps", "seconds"), [(0, SOUND_SECONDS + 1), (1, SOUND_SECONDS - 1)])
def test_time_alone_or_a_step_alone_is_no_new_budget(tmp_path: Path, steps: int, seconds: float) -> None:
    world = World(tmp_path, restarts=1)
    world.newest("rollout-0").code = 70
    assert world.supervisor.poll_processes(0) is None
    world.supervisor.poll_processes(1)
    world.supervisor.run_step += steps
    world.newest("rollout-0").code = 70
    ending = world.supervisor.poll_processes(seconds)
    assert ending is not None and "no restarts are left" in ending.error


def test_a_role_that_ended_by_itself_is_quoted(world: World, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("rollout-0", "trainer-0"):
        (tmp_path / "logs" / f"{name}.log").write_text("starts\nEngineError: no room for the KV cache\n")
    world.newest("rollout-0").code = 70
    world.newest("trainer-0").code = -9  # its last line does not say why
    world.supervisor.poll_processes(0)
    assert world.notes[0].endswith("(1 of 2): EngineError: no room for the KV cache")
    assert world.notes[1].endswith("(1 of 2)")


def test_ranks_that_nccl_has_ended_are_quoted(world: World, tmp_path: Path) -> None:
    """Its watchdog ends a process by SIGABRT, and writes stacks after the line that says why."""
    timeout = "WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds"
    lines = f"""starts
[rank1]:[E1128 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: {timeout}
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception
"""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-1.log").write_text(lines)
    world.newest("trainer-1").code = -signal.SIGABRT
    world.supervisor.poll_processes(0)
    (note,) = world.notes
    assert (
        "trainer-1 was killed by SIGABRT" in note
        and "a collective operation among the trainer ranks timed out" in note
    )
    assert note.endswith(timeout)


def test_the_back_off_grows_up_to_its_limit(tmp_path: Path) -> None:
    world = World(tmp_path, restarts=9)
    now = 0.0
    for _ in range(9):
        world.newest("rollout-0").code = 70
        world.supervisor.poll_processes(now)
        now += 100
        world.supervisor.poll_processes(now)
    delays = [float(note.split(" in ")[1].split()[0]) for note in world.notes]
    assert delays[:4] == [0.5, 1, 2, 4] and set(delays[4:]) == {BACKOFF_MAX}


def test_bad_input_is_not_tried_again(world: World) -> None:
    world.newest("trainer-1").code = 2
    ending = world.supervisor.poll_processes(0)
    assert ending is not None and ending.code == 2


def test_nobody_is_restarted_while_stopping(world: World) -> None:
    world.newest("rollout-0").code = -9
    world.supervisor.poll_processes(0)
    world.supervisor.stopping = True
    world.newest("trainer-0").code = -9
    assert world.supervisor.poll_processes(100) is None
    assert len(world.started) == 5
    world.newest("coordinator-0").code = -9
    ending = world.supervisor.poll_processes(101)
    assert ending is not None and ending.code == 1 and "while stopping" in ending.error


def test_how_others_end_is_no_matter_once_the_run_is_over(tmp_path: Path) -> None:
    world = World(tmp_path, restarts=0)
    world.supervisor.run_over = True  # the coordinator takes last words
    world.newest("rollout-0").code = -11
    world.newest("rollout-1").code = 0
    world.newest("trainer-1").code = 70
    for now in (0.0, LEAVE_SECONDS + 1.0):
        assert world.supervisor.poll_processes(now) is None and len(world.started) == 5 and not world.notes
    assert not world.newest("trainer-0").killed, "it ends by itself"
    world.newest("coordinator-0").code = 0
    outcome = world.supervisor.poll_processes(7.0)
    assert outcome is not None and outcome.code == 0


def test_a_coordinator_that_is_killed_as_it_takes_last_words_needs_the_others_again(world: World) -> None:
    world.supervisor.run_over = True
    world.newest("coordinator-0").code = -9
    world.newest("rollout-0").code = 1
    for now in (0.0, 1.0, 2.0, 3.0):
        world.supervisor.poll_processes(now)
    assert len(world.started) == 7 and world.newest("rollout-0").code is None


def test_a_coordinator_that_was_about_to_be_restarted_is_so_for_a_stop(world: World) -> None:
    dead = world.newest("coordinator-0")
    dead.code = 70
    world.supervisor.poll_processes(0)
    world.supervisor.stopping = True
    world.supervisor.poll_processes(10)
    assert world.newest("coordinator-0") is not dead


def test_exits_are_described() -> None:
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-99) == "was killed by signal 99"
    assert describe_exit(3) == "exited with code 3"


def test_a_worker_that_leaves_while_the_run_goes_on_is_replaced(world: World) -> None:
    """Without this the run would wait for it for ever."""
    world.newest("rollout-0").code = 0
    assert world.supervisor.poll_processes(0.0) is None
    assert world.supervisor.poll_processes(LEAVE_SECONDS + 1) is None
    assert "rollout-0 exited with code 0" in world.notes[-1]
    world.supervisor.poll_processes(LEAVE_SECONDS + 2)
    assert world.newest("rollout-0").code is None
