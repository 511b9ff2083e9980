"""Watches one launch of a run from its parent: its processes, signals, and the coordinator's messages.

`run` starts the supervisor, then loops: `_listen` (messages of the coordinator, at most POLL seconds),
signals, `Supervisor.tick` (exits and restarts), the deadline of a stop, `_watch` (a silent coordinator).
At the end `_wind_down` waits for the other processes, then kills them.

The first Ctrl-C, SIGTERM or SIGHUP asks the coordinator to stop: the trainer ends its micro-batch and writes
a checkpoint, all within `launch.stop_timeout`. Without that checkpoint the run counts as failed. The second
signal kills at once.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import assert_never

from asyncrl.config import LaunchConfig
from asyncrl.errors import ConfigError, ProtocolError, one_line
from asyncrl.launch.console import Console
from asyncrl.launch.placement import COORDINATOR, TRAINER
from asyncrl.launch.process import COMPLETED, FAILED, INTERRUPTED, log_path
from asyncrl.launch.supervisor import RunOutcome, Supervisor
from asyncrl.observe.files import log_tail
from asyncrl.observe.metrics import duration
from asyncrl.runtime.process import ENDING
from asyncrl.wire.enrolment import invitation
from asyncrl.wire.messages.channels import ToObserver
from asyncrl.wire.messages.shared import ObserverHello, Replace, RunEnd, Status, StepReport, Stop, Welcome
from asyncrl.wire.sockets import OBSERVER, Endpoints, Link, identity

POLL = 0.1
HELLO_EVERY = 1.0
KILL_RESERVE = 1.0  # of the stop timeout: for what is killed to be gone
LEAVE_SECONDS = 5.0  # for the other roles to follow a coordinator that has ended
TOKEN_SECONDS = 600.0  # in which a token must be used
ANSWER_SECONDS = 10.0  # for the launcher, which looks ten times a second
TOKEN_BYTES = 4096  # what a FIFO takes at once
WITH_CHECKPOINT = " after the micro-batch under way, with a checkpoint"
GOES_ON = {
    True: "resume=auto goes on from the last checkpoint",
    False: "the same command goes on with the rest",
}


class Session:
    """`run` once. `on_step` also gets every report (trackers). `trains`: it is no evaluation, where
    each episode is stored once it is over."""

    def __init__(
        self,
        config: LaunchConfig,
        run_dir: Path,
        endpoints: Endpoints,
        supervisor: Supervisor,
        view: Console,
        on_step: Callable[[StepReport], None],
        trains: bool = True,
    ) -> None:
        self._goes_on = GOES_ON[trains]
        self._how = WITH_CHECKPOINT if trains else ""
        self._config = config
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._view = view
        self._on_step = on_step
        self._link = Link(endpoints.control, ToObserver, identity(OBSERVER, 0), endpoints.keys)
        self._admit = partial(admit, run_dir, endpoints)

        self._heard_at: float | None = None  # the coordinator's last message; None before the first
        self._began_at = 0.0
        self._signals = 0
        self._running = False  # the coordinator has left its start phase: there is something to save
        self._hello_at = 0.0
        self._outcome: RunOutcome | None = None  # decided here; the coordinator may still be saving
        self._stop_at = 0.0  # when the stop began
        self._stop_by: float | None = None
        self._asked = False  # the coordinator was asked to stop, or stops by itself
        self._save = True  # the trainer can still write a checkpoint
        self._reason = ""  # for the coordinator to stop
        self._end: RunEnd | None = None

    def run(self) -> RunOutcome:
        """Start everything, watch until it ends, and leave no process behind."""
        with self._catch_signals():
            try:
                self._began_at = time.monotonic()
                self._supervisor.start()
                ending = self._loop()
                self._wind_down(ending)
            finally:
                self._supervisor.kill()
                self._link.close()

        own = ending is self._outcome  # of a role that was lost: the coordinator does not know why
        if ending.code == FAILED and not own and self._end is not None and self._end.error:
            return RunOutcome(FAILED, self._end.error)
        return ending

    # -- the loop --------------------------------------------------------------------------------------

    def _loop(self) -> RunOutcome:
        while True:
            self._listen(POLL)
            now = time.monotonic()

            if self._signals > 1:
                self._supervisor.kill()
                return RunOutcome(INTERRUPTED, f"killed by a second interrupt; {self._goes_on}")
            if self._signals and self._stop_by is None:
                self._stop(RunOutcome(INTERRUPTED), "interrupted", now)

            ended = self._supervisor.tick(now)
            if ended is not None:
                if self._outcome is None and ended.code != COMPLETED and self._coordinator_lives():
                    self._stop(ended, ended.error.partition("\n")[0], now)
                elif self._outcome is None or not self._coordinator_lives():
                    return self._final_outcome(ended)

            self._check_trainer()
            self._admit(self._link)

            if self._stop_by is not None and now > self._stop_by:
                if self._outcome is not None and not (self._asked and self._outcome.code == INTERRUPTED):
                    return self._outcome
                limit = f"launch.stop_timeout ({self._config.stop_timeout:g} s)"
                return RunOutcome(FAILED, f"not stopped within {limit}; killed")

            if self._stop_by is None and (overdue := self._watch(now)):
                return overdue

    def _listen(self, seconds: float) -> None:
        """Handle the messages of `seconds`. Hello is repeated: a restarted coordinator does not know us."""
        now = time.monotonic()
        if now >= self._hello_at:
            self._greet()
            self._hello_at = now + HELLO_EVERY

        try:
            received = self._link.receive(seconds)
            while received is not None:
                self._hello_at = time.monotonic() + 2 * HELLO_EVERY
                self._handle(received[0])
                received = self._link.receive(0.0)
        except ProtocolError as error:
            self._view.note(one_line(error))

    def _greet(self) -> None:
        """Hello, and the stop that was asked for: a coordinator that was just restarted knows neither."""
        self._link.send(ObserverHello())
        if self._reason:
            self._link.send(Stop(self._reason, self._save))

    def _handle(self, message: ToObserver) -> None:
        now = self._heard_at = time.monotonic()

        match message:
            case Status():
                self._running = self._running or message.phase != "starting"
                self._supervisor.step = message.step
                if message.phase == "stopping" and self._stop_by is None:  # nothing moves in it any more
                    limit = self._config.stop_timeout
                    self._begin_stop(now, limit)
                    self._view.note(f"the run is stopped{self._how} (at most {limit:g} s)")
                self._view.status(message)
            case StepReport():
                self._running = True
                self._view.step(message.step, message.metrics)
                self._on_step(message)
            case Replace():
                self._view.note(f"{message.reason}: replacing it")
                self._supervisor.kill_role(message.role, message.incarnation)
            case RunEnd():
                self._end = message
                self._supervisor.over = True
            case Welcome() | Stop():
                pass
            case _:
                assert_never(message)

    # -- endings ---------------------------------------------------------------------------------------

    def _stop(self, outcome: RunOutcome, reason: str, now: float) -> None:
        """Ask for an orderly end; a run that has not begun has nothing to save and is ended at once."""
        self._outcome = outcome
        self._begin_stop(now, self._config.stop_timeout if self._running else 0.0)

        if self._asked:
            self._save = not self._supervisor.lost(TRAINER)
            how = self._how if self._save else ""
            limit = f"at most {self._config.stop_timeout:g} s; Ctrl-C again kills at once"
            self._view.note(f"{reason}: stopping{how} ({limit})")
            self._reason = reason
            self._greet()

    def _begin_stop(self, now: float, seconds: float) -> None:
        self._supervisor.stopping = True
        self._asked = seconds > 0
        self._stop_at = now
        self._stop_by = now + max(0.0, seconds - KILL_RESERVE)

    def _check_trainer(self) -> None:
        """A trainer that is lost during a stop will write no checkpoint, and nobody waits for it."""
        if self._asked and self._save and (lost := self._supervisor.lost(TRAINER)):
            self._save = False
            self._view.note(f"no checkpoint: {lost}")
            self._reason = lost
            self._greet()

    def _final_outcome(self, ended: RunOutcome) -> RunOutcome:
        """The coordinator has ended: its outcome counts, unless we had decided on another one before."""
        self._listen(0.2)  # its last message may be on the way

        if self._outcome is None or ended.code not in (COMPLETED, FAILED):
            return ended
        if self._outcome.code == INTERRUPTED and ended.code != COMPLETED:
            return ended
        if self._asked and ended.code == COMPLETED:
            self._view.note(f"the stop took {duration(time.monotonic() - self._stop_at)}; {self._goes_on}")
        return self._outcome

    def _watch(self, now: float) -> RunOutcome | None:
        """A coordinator that never was heard of ends the run; one that fell silent is replaced."""
        if self._heard_at is None:
            if (silent := now - self._began_at) <= self._config.start_timeout:
                return None
            path = log_path(self._run_dir, f"{COORDINATOR}-0")
            limit = f"{self._config.start_timeout:g} s (launch.start_timeout)"
            waited = f"no status of the coordinator after {silent:.0f} s, limit {limit}"
            return RunOutcome(FAILED, f"{waited}\n{path}:\n{log_tail(path)}")

        if (silent := now - self._heard_at) > self._config.stall_timeout:
            self._view.note(f"the coordinator has been silent for {duration(silent)}: replacing it")
            self._heard_at = now
            self._supervisor.kill_role(COORDINATOR)
        return None

    def _coordinator_lives(self) -> bool:
        return any(handle.name.startswith(COORDINATOR) for handle in self._supervisor.alive)

    def _wind_down(self, ending: RunOutcome) -> None:
        """Let the others end by themselves, if the coordinator has told them to; then kill."""
        self._supervisor.stopping = True
        told = self._end is not None or ending.code in (COMPLETED, INTERRUPTED)
        if told and self._running and self._signals < 2 and not self._coordinator_lives():
            room = LEAVE_SECONDS if self._stop_by is None else max(0.0, self._stop_by - time.monotonic())
            self._await_exits(min(LEAVE_SECONDS, room))

        self._supervisor.kill()
        self._await_exits(KILL_RESERVE)

    def _await_exits(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._supervisor.alive and time.monotonic() < deadline and self._signals < 2:
            self._listen(POLL / 2)

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        def count(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        before = {number: signal.getsignal(number) for number in ENDING}
        if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup
            del before[signal.SIGHUP]
        for number in before:
            signal.signal(number, count)

        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def admit(run_dir: Path, endpoints: Endpoints, link: Link) -> None:
    """Answer all who `asyncrl invite`: each makes a FIFO that only its user may open, and reads a token from
    it, which is of use once the coordinator has read the Invite. Only the launcher has the keys of the run,
    and they are in no file."""
    for path in run_dir.glob("invite-*"):
        with suppress(OSError):  # nobody reads any more
            fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            path.unlink()
            with os.fdopen(fifo, "w") as asking:
                invite, token = invitation(endpoints, path.name.split("-")[1], TOKEN_SECONDS)
                link.send(invite)
                asking.write(token)


def ask_for_token(run_dir: Path, role: str, seconds: float = ANSWER_SECONDS) -> str:
    """The side of `asyncrl invite`. ConfigError when no launcher answers in time."""
    path = run_dir / f"invite-{role}-{secrets.token_hex(4)}"  # others may ask at the same time
    os.mkfifo(path, 0o600)
    fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    try:
        ready, _, _ = select.select([fifo], [], [], seconds)
        if token := os.read(fifo, TOKEN_BYTES) if ready else b"":
            return token.decode()
    finally:
        os.close(fifo)
        path.unlink(missing_ok=True)
    raise ConfigError(
        f"{run_dir}: its launcher does not answer within {seconds:g} s: is the run up, here, and yours?"
    )
