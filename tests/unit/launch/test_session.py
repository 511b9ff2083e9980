"""How a session ends, over a real socket and processes that obey the test."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import LaunchConfig
from asyncrl.launch import session
from asyncrl.launch.placement import PlannedProcess, Unit
from asyncrl.launch.process import ProcessSpec
from asyncrl.launch.session import Session
from asyncrl.launch.supervisor import RunOutcome, Supervisor
from asyncrl.wire.messages.channels import ToCoordinatorControl
from asyncrl.wire.messages.shared import ObserverHello, Replace, RunEnd, Status, StepReport, Stop
from asyncrl.wire.sockets import Gate, Hub, Poller, choose_endpoints

DEADLINE = 60.0


class Process:
    def __init__(self, name: str, polled: Callable[[], None]) -> None:
        self.name = name
        self.code = None
        self.polled = polled

    def poll(self) -> int | None:
        self.polled()
        return self.code

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code


class Play:
    """A session in this thread; the coordinator's part is played by another."""

    def __init__(self, run_dir: Path, *more: str, trains: bool = True, **launch: Any) -> None:
        self.endpoints = choose_endpoints("127.0.0.1", 0)
        self.hub = Hub(self.endpoints.control, ToCoordinatorControl, Gate(self.endpoints))
        self.processes: dict[str, Process] = {}
        self.shown: list[tuple[Any, ...]] = []
        units = [Unit(role, (PlannedProcess(role, 0, 1, "t"),)) for role in ("coordinator", "rollout", *more)]
        self.polled: Callable[[], None] = lambda: None  # in the session's thread, between its messages
        self.supervisor = Supervisor(units, self.spawn, run_dir, 0, lambda unit, name: "")
        self.session = Session(
            LaunchConfig(**launch), run_dir, self.endpoints, self.supervisor, self, self.on_step, trains
        )
        self.tracked: list[int] = []
        self._stepped = threading.Event()

    def spawn(self, process_spec: ProcessSpec) -> Process:
        process = Process(process_spec.process.name, lambda: self.polled())
        return self.processes.setdefault(process_spec.process.name, process)

    def show_status(self, status: Status) -> None:
        self.shown.append(("status", status))

    def show_step(self, step: int, metrics: dict[str, float]) -> None:
        self.shown.append(("step", step))

    def print_note(self, text: str) -> None:
        self.shown.append(("note", text))

    def drop_steps_after(self, step: int) -> None:
        """Drop nothing: no curve is drawn."""

    def on_step(self, report: StepReport) -> None:
        self.tracked.append(report.step)
        self._stepped.set()

    # -- the coordinator's side, in a thread -----------------------------------------------------------

    def hear(self, kind: type) -> tuple[bytes, Any]:
        poller = Poller(self.hub)
        while True:
            received = self.hub.receive()
            if received is None:
                poller.wait(DEADLINE)
            elif isinstance(received[1], kind):
                return received[0], received[1]

    def begin(self, phase: str = "running") -> bytes:
        """The run has begun, and the session has heard of it: it has handled a step report."""
        peer, _ = self.hear(ObserverHello)
        self.hub.send(peer, Status(phase, 1, 9, {}, ()))
        self.hub.send(peer, StepReport(1, {}))
        assert self._stepped.wait(DEADLINE)
        return peer

    def run(self, part: Any) -> RunOutcome:
        errors: list[BaseException] = []

        def act() -> None:
            try:
                part()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=act)
        thread.start()
        ending = self.session.run()
        thread.join(DEADLINE)
        assert not errors
        return ending


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    play = Play(tmp_path)
    yield play
    play.hub.close()


def test_what_the_coordinator_tells_is_shown_and_its_end_is_the_end(play: Play) -> None:
    status = Status("running", 1, 9, {"a": 1.0}, ("x waits for y",), "3 failed")

    def part() -> None:
        peer, _ = play.hear(ObserverHello)
        play.hub.send(peer, status)
        play.hub.send(peer, StepReport(1, {"b": 2.0}))
        play.hub.send(peer, RunEnd("completed"))
        play.processes["rollout-0"].code = 0
        play.processes["coordinator-0"].code = 0

    assert play.run(part) == RunOutcome(0)
    assert play.shown == [("status", status), ("step", 1)]
    assert play.tracked == [1]


def test_a_role_that_crashes_while_the_coordinator_takes_last_words_changes_nothing(play: Play) -> None:
    polls = list[int]()
    looked = threading.Event()

    def polled() -> None:
        polls.extend([1] * (play.processes["rollout-0"].code is not None))
        if len(polls) > 10:
            looked.set()

    def part() -> None:
        peer, _ = play.hear(ObserverHello)
        play.hub.send(peer, RunEnd("completed"))
        play.hub.send(peer, StepReport(1, {}))
        assert play._stepped.wait(DEADLINE)
        play.processes["rollout-0"].code = -11
        assert looked.wait(DEADLINE)
        play.processes["coordinator-0"].code = 0

    play.polled = polled
    assert play.run(part) == RunOutcome(0)


def test_a_failed_run_gives_the_coordinators_reason(play: Play) -> None:
    def part() -> None:
        peer, _ = play.hear(ObserverHello)
        play.hub.send(peer, RunEnd("failed", "ProtocolError: nothing has moved"))
        play.processes["coordinator-0"].code = 1

    assert play.run(part) == RunOutcome(1, "ProtocolError: nothing has moved")
    assert play.processes["rollout-0"].code == -9


def test_a_lost_role_lets_the_coordinator_write_down_where_it_was(play: Play) -> None:
    def part() -> None:
        peer, _ = play.hear(ObserverHello)
        play.hub.send(peer, Status("running", 1, 9, {}, ()))
        play.processes["rollout-0"].code = 70
        _, stop = play.hear(Stop)
        assert "rollout-0 exited with code 70" in stop.reason
        play.processes["coordinator-0"].code = 0

    ending = play.run(part)
    assert ending.code == 1 and "launch.restarts" in ending.error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_an_interrupt_before_the_run_began_waits_for_nobody(play: Play, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored

    def part() -> None:
        play.hear(ObserverHello)
        signal.raise_signal(number)  # handlers run in the main thread

    try:
        assert play.run(part).code == 130
    finally:
        signal.signal(number, before)
    assert {process.code for process in play.processes.values()} == {-9}


def test_a_coordinator_that_was_being_restarted_is_asked_to_stop_as_well(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing for a while, and knows nobody: hello and stop are repeated."""
    monkeypatch.setattr(session, "HELLO_INTERVAL", 0.05)

    def part() -> None:
        play.begin()
        signal.raise_signal(signal.SIGINT)
        play.hear(Stop)
        play.hear(ObserverHello)
        play.hear(Stop)
        play.processes["rollout-0"].code = play.processes["coordinator-0"].code = 0

    assert play.run(part) == RunOutcome(130)


def test_nohup_is_respected(play: Play) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)

    def part() -> None:
        play.begin()
        signal.raise_signal(signal.SIGHUP)
        play.processes["rollout-0"].code = play.processes["coordinator-0"].code = 0

    try:
        assert play.run(part) == RunOutcome(0)
    finally:
        assert signal.signal(signal.SIGHUP, before[0]) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is before[1]


@pytest.mark.parametrize(
    ("trains", "said", "then"),
    [
        (
            True,
            "interrupted: stopping after the current part of the plan, with a checkpoint (at most 600 s; ",
            "resume=auto",
        ),
        (False, "interrupted: stopping (at most 600 s; ", "run the same command to continue"),
    ],
)
def test_a_stop_says_how_long_it_may_take_and_what_goes_on(
    tmp_path: Path, trains: bool, said: str, then: str
) -> None:
    play = Play(tmp_path, trains=trains)

    def part() -> None:
        play.begin()
        signal.raise_signal(signal.SIGINT)
        assert play.hear(Stop)[1].save
        play.processes["rollout-0"].code = play.processes["coordinator-0"].code = 0

    assert play.run(part) == RunOutcome(130)
    first, last = [text for kind, text in play.shown[2:] if kind == "note"]
    assert first.startswith(said) and last.startswith(f"stopping took 0 s; {then}")
    assert trains or "checkpoint" not in first + last
    play.hub.close()


def test_a_trainer_that_dies_during_a_stop_is_not_waited_for(tmp_path: Path) -> None:
    play = Play(tmp_path, "trainer")

    def part() -> None:
        peer = play.begin()
        signal.raise_signal(signal.SIGINT)
        assert play.hear(Stop)[1].save
        play.processes["trainer-0"].code = -9
        _, second = play.hear(Stop)
        assert not second.save and second.reason == "trainer-0 was killed by SIGKILL"
        play.hub.send(peer, RunEnd("failed", "stopped without a checkpoint"))
        play.processes["rollout-0"].code = 0  # otherwise it is waited for
        play.processes["coordinator-0"].code = 1

    assert play.run(part) == RunOutcome(1, "stopped without a checkpoint")
    play.hub.close()


def test_a_role_that_hangs_is_replaced(tmp_path: Path) -> None:
    play = Play(tmp_path, "trainer")

    def part() -> None:
        peer, _ = play.hear(ObserverHello)
        play.hub.send(peer, Status("running", 1, 9, {}, ()))
        for _ in range(2):
            play.hub.send(peer, Replace("trainer", "no sign of life"))
        play.hear(Stop)  # here with a budget of no restarts
        play.processes["coordinator-0"].code = 1

    error = play.run(part).error
    assert (
        "trainer-0 was killed by SIGKILL; no restarts are left (launch.restarts=0): no sign of life" in error
    )
    assert play.shown.count(("note", "no sign of life: replacing the process")) == 1
    play.hub.close()


def test_a_coordinator_that_stops_by_itself_is_given_the_same_time(play: Play) -> None:
    def part() -> None:
        peer = play.begin("stopping")
        play.processes["rollout-0"].code = -9  # nobody is restarted any more
        play.hub.send(peer, RunEnd("failed", "no sign of life"))
        play.processes["coordinator-0"].code = 1

    assert play.run(part) == RunOutcome(1, "no sign of life")


def test_a_run_that_begins_behind_an_interrupt_was_not_asked_to_stop(play: Play) -> None:
    """It was not waited for, then, and did not fail to stop in time."""
    peers: list[bytes] = []
    signals = [signal.SIGINT]
    messages = [Status("running", 1, 9, {}, ())]

    def polled() -> None:
        if peers and signals:
            signal.raise_signal(signals.pop())
        elif play.supervisor.stopping and messages:
            play.hub.send(peers[0], messages.pop())

    play.polled = polled
    assert play.run(lambda: peers.append(play.hear(ObserverHello)[0])) == RunOutcome(130)


def test_a_coordinator_that_never_comes_is_named(tmp_path: Path) -> None:
    play = Play(tmp_path, start_timeout=0.01)
    ending = play.run(lambda: None)
    assert ending.code == 1 and "the coordinator sent no status for" in ending.error
    play.hub.close()


def test_a_silent_coordinator_is_replaced(tmp_path: Path) -> None:
    play = Play(tmp_path, stall_timeout=0.3)

    def part() -> None:
        peer, _ = play.hear(ObserverHello)
        play.hub.send(peer, Status("running", 1, 9, {}, ()))

    ending = play.run(part)  # with a budget of no restarts
    assert play.processes["coordinator-0"].code == -9
    assert ending.code == 1 and "coordinator-0 was killed" in ending.error
    assert ("note", "the coordinator has been silent for 0 s: replacing it") in play.shown
    play.hub.close()
