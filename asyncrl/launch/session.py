"""Watches one launch of a run from its parent: the processes, signals, and the coordinator's messages.

`run` starts the supervisor, then loops: `_listen` (messages of the coordinator, at most POLL_SECONDS),
signals, `Supervisor.poll_processes` (exits and restarts), the deadline of a stop, `_check_coordinator` (a
silent coordinator). At the end `_wind_down` waits for the other processes, then kills them.

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
from asyncrl.observe.metrics import duration_text
from asyncrl.runtime.process import END_SIGNALS
from asyncrl.wire.enrolment import invitation
from asyncrl.wire.messages.channels import ToObserver
from asyncrl.wire.messages.shared import ObserverHello, Replace, RunEnd, Status, StepReport, Stop, Welcome
from asyncrl.wire.sockets import OBSERVER, Endpoints, Link, identity

POLL_SECONDS = 0.1
HELLO_INTERVAL = 1.0
KILL_RESERVE = 1.0  # Seconds of the stop timeout that are kept for killing.
LEAVE_SECONDS = 5.0  # Seconds for other roles to end after the coordinator has ended.
TOKEN_LIFETIME = 600.0  # Seconds in which a token must be used.
ANSWER_TIMEOUT = 10.0  # Seconds for the launcher to answer, which looks ten times a second.
TOKEN_BYTES = 4096  # Bytes that a FIFO takes at once.
WITH_CHECKPOINT = " after the current part of the plan, with a checkpoint"
RESUME_ADVICE = {
    True: "resume=auto continues from the last checkpoint",
    False: "run the same command to continue",
}


class Session:
    """Watches one launch; `run` may be called once. `on_report` also receives every step report (trackers).
    `is_training`: False for an evaluation, which stores each episode when the episode is over."""

    def __init__(
        self,
        config: LaunchConfig,
        run_dir: Path,
        endpoints: Endpoints,
        supervisor: Supervisor,
        console: Console,
        on_report: Callable[[StepReport], None],
        is_training: bool = True,
    ) -> None:
        self._resume_advice = RESUME_ADVICE[is_training]
        self._stop_manner = WITH_CHECKPOINT if is_training else ""
        self._config = config
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._console = console
        self._on_report = on_report
        self._link = Link(endpoints.control, ToObserver, identity(OBSERVER, 0), endpoints.keys)
        self._endpoints = endpoints

        self._last_message_at: float | None = None  # None before the coordinator's first message
        self._started_at = 0.0
        self._signal_count = 0
        self._has_started = False  # the coordinator has left its start phase: there is something to save
        self._next_hello_at = 0.0
        # Outcome that the session has decided; the coordinator may still be saving.
        self._decided_outcome: RunOutcome | None = None
        self._stop_began_at = 0.0
        self._stop_deadline: float | None = None
        self._coordinator_stops = False  # the coordinator was asked to stop, or stops by itself
        self._can_save = True  # the trainer can still write a checkpoint
        self._stop_reason = ""  # why the coordinator was asked to stop
        self._run_end: RunEnd | None = None

    def run(self) -> RunOutcome:
        """Start all processes, watch them until the run ends, and leave no process behind."""
        with self._catch_signals():
            try:
                self._started_at = time.monotonic()
                self._supervisor.start()
                outcome = self._loop()
                self._wind_down(outcome)
            finally:
                self._supervisor.kill_all()
                self._link.close()

        # After the loss of a role only the session knows the cause.
        is_decided_here = outcome is self._decided_outcome
        if (
            outcome.code == FAILED
            and not is_decided_here
            and self._run_end is not None
            and self._run_end.error
        ):
            return RunOutcome(FAILED, self._run_end.error)
        return outcome

    # -- the loop --------------------------------------------------------------------------------------

    def _loop(self) -> RunOutcome:
        while True:
            self._listen(POLL_SECONDS)
            now = time.monotonic()

            if self._signal_count > 1:
                self._supervisor.kill_all()
                return RunOutcome(INTERRUPTED, f"killed by a second interrupt; {self._resume_advice}")
            if self._signal_count and self._stop_deadline is None:
                self._request_stop(RunOutcome(INTERRUPTED), "interrupted", now)

            process_outcome = self._supervisor.poll_processes(now)
            if process_outcome is not None:
                if (
                    self._decided_outcome is None
                    and process_outcome.code != COMPLETED
                    and self._coordinator_lives()
                ):
                    self._request_stop(process_outcome, process_outcome.error.partition("\n")[0], now)
                elif self._decided_outcome is None or not self._coordinator_lives():
                    return self._final_outcome(process_outcome)

            self._check_trainer()
            admit_invited(self._run_dir, self._endpoints, self._link)

            if self._stop_deadline is not None and now > self._stop_deadline:
                if self._decided_outcome is not None and not (
                    self._coordinator_stops and self._decided_outcome.code == INTERRUPTED
                ):
                    return self._decided_outcome
                limit_text = f"launch.stop_timeout ({self._config.stop_timeout:g} s)"
                return RunOutcome(FAILED, f"the run did not stop within {limit_text} and was killed")

            if self._stop_deadline is None and (silent_outcome := self._check_coordinator(now)):
                return silent_outcome

    def _listen(self, seconds: float) -> None:
        """Handle messages for `seconds`. ObserverHello is repeated, as a restarted coordinator does not know
        the launcher."""
        now = time.monotonic()
        if now >= self._next_hello_at:
            self._send_hello()
            self._next_hello_at = now + HELLO_INTERVAL

        try:
            received = self._link.receive(seconds)
            while received is not None:
                self._next_hello_at = time.monotonic() + 2 * HELLO_INTERVAL
                self._handle(received[0])
                received = self._link.receive(0.0)
        except ProtocolError as error:
            self._console.print_note(one_line(error))

    def _send_hello(self) -> None:
        """Send ObserverHello, and the requested stop if there is one: a coordinator that was just restarted
        knows neither."""
        self._link.send(ObserverHello())
        if self._stop_reason:
            self._link.send(Stop(self._stop_reason, self._can_save))

    def _handle(self, message: ToObserver) -> None:
        now = self._last_message_at = time.monotonic()

        match message:
            case Status():
                if not self._has_started and message.phase != "starting":
                    self._has_started = True
                    self._console.drop_steps_after(message.step)
                self._supervisor.run_step = message.step
                # A stopping coordinator issues no more work.
                if message.phase == "stopping" and self._stop_deadline is None:
                    limit = self._config.stop_timeout
                    self._begin_stop(now, limit)
                    self._console.print_note(f"the run is stopping{self._stop_manner} (at most {limit:g} s)")
                self._console.show_status(message)
            case StepReport():
                self._has_started = True
                self._console.show_step(message.step, message.metrics)
                self._on_report(message)
            case Replace():
                if self._supervisor.kill_role(message.role, message.incarnation, message.reason):
                    self._console.print_note(f"{message.reason}: replacing the process")
            case RunEnd():
                self._run_end = message
                self._supervisor.run_over = True
            case Welcome() | Stop():
                pass
            case _:
                assert_never(message)

    # -- endings ---------------------------------------------------------------------------------------

    def _request_stop(self, outcome: RunOutcome, reason: str, now: float) -> None:
        """Ask for an orderly end. A run that has not begun has nothing to save and ends at once."""
        self._decided_outcome = outcome
        self._begin_stop(now, self._config.stop_timeout if self._has_started else 0.0)

        if self._coordinator_stops:
            self._can_save = not self._supervisor.describe_lost(TRAINER)
            manner = self._stop_manner if self._can_save else ""
            limit_text = (
                f"at most {self._config.stop_timeout:g} s; press Ctrl-C again to kill the run at once"
            )
            self._console.print_note(f"{reason}: stopping{manner} ({limit_text})")
            self._stop_reason = reason
            self._send_hello()

    def _begin_stop(self, now: float, seconds: float) -> None:
        self._supervisor.stopping = True
        self._coordinator_stops = seconds > 0
        self._stop_began_at = now
        self._stop_deadline = now + max(0.0, seconds - KILL_RESERVE)

    def _check_trainer(self) -> None:
        """Tell the coordinator if the trainer is lost during a stop: a lost trainer writes no checkpoint."""
        if (
            self._coordinator_stops
            and self._can_save
            and (lost_trainer := self._supervisor.describe_lost(TRAINER))
        ):
            self._can_save = False
            self._console.print_note(f"no checkpoint will be written: {lost_trainer}")
            self._stop_reason = lost_trainer
            self._send_hello()

    def _final_outcome(self, process_outcome: RunOutcome) -> RunOutcome:
        """Return the outcome after the coordinator has ended: the coordinator's, unless the session decided
        on another outcome before."""
        self._listen(0.2)  # The coordinator's last message may be on the way.

        if self._decided_outcome is None or process_outcome.code not in (COMPLETED, FAILED):
            return process_outcome
        if self._decided_outcome.code == INTERRUPTED and process_outcome.code != COMPLETED:
            return process_outcome
        if self._coordinator_stops and process_outcome.code == COMPLETED:
            self._console.print_note(
                f"stopping took {duration_text(time.monotonic() - self._stop_began_at)}; "
                f"{self._resume_advice}"
            )
        return self._decided_outcome

    def _check_coordinator(self, now: float) -> RunOutcome | None:
        """End the run if the coordinator was never heard of; replace a coordinator that has fallen silent."""
        if self._last_message_at is None:
            if (silent_seconds := now - self._started_at) <= self._config.start_timeout:
                return None
            log_file = log_path(self._run_dir, f"{COORDINATOR}-0")
            limit_text = f"{self._config.start_timeout:g} s (launch.start_timeout)"
            waited_text = (
                f"the coordinator sent no status for {silent_seconds:.0f} s; the limit is {limit_text}"
            )
            return RunOutcome(FAILED, f"{waited_text}\n{log_file}:\n{log_tail(log_file)}")

        if (silent_seconds := now - self._last_message_at) > self._config.stall_timeout:
            self._console.print_note(
                f"the coordinator has been silent for {duration_text(silent_seconds)}: replacing it"
            )
            self._last_message_at = now
            self._supervisor.kill_role(COORDINATOR)
        return None

    def _coordinator_lives(self) -> bool:
        return any(handle.name.startswith(COORDINATOR) for handle in self._supervisor.alive)

    def _wind_down(self, outcome: RunOutcome) -> None:
        """Let the remaining processes end by themselves, if the coordinator has told them to; then kill
        all."""
        self._supervisor.stopping = True
        asked_to_end = self._run_end is not None or outcome.code in (COMPLETED, INTERRUPTED)
        if asked_to_end and self._has_started and self._signal_count < 2 and not self._coordinator_lives():
            seconds_left = (
                LEAVE_SECONDS
                if self._stop_deadline is None
                else max(0.0, self._stop_deadline - time.monotonic())
            )
            self._await_exits(min(LEAVE_SECONDS, seconds_left))

        self._supervisor.kill_all()
        self._await_exits(KILL_RESERVE)

    def _await_exits(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._supervisor.alive and time.monotonic() < deadline and self._signal_count < 2:
            self._listen(POLL_SECONDS / 2)

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        def count_signal(number: int, frame: FrameType | None) -> None:
            self._signal_count += 1

        previous_handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
        if previous_handlers[signal.SIGHUP] is signal.SIG_IGN:  # ignored, as under nohup
            del previous_handlers[signal.SIGHUP]
        for number in previous_handlers:
            signal.signal(number, count_signal)

        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)


def admit_invited(run_dir: Path, endpoints: Endpoints, link: Link) -> None:
    """Answer every `asyncrl invite`. An invited process makes a FIFO that only its user may open, and reads a
    token from the FIFO; the token is valid once the coordinator has read the Invite. Only the launcher has
    the keys of the run, which are in no file."""
    for fifo_path in run_dir.glob("invite-*"):
        with suppress(OSError):  # Nobody reads the FIFO any more
            fifo = os.open(fifo_path, os.O_WRONLY | os.O_NONBLOCK)
            fifo_path.unlink()
            with os.fdopen(fifo, "w") as fifo_file:
                invite, token = invitation(endpoints, fifo_path.name.split("-")[1], TOKEN_LIFETIME)
                link.send(invite)
                fifo_file.write(token)


def ask_for_token(run_dir: Path, role: str, seconds: float = ANSWER_TIMEOUT) -> str:
    """Ask the launcher of a run for a token, as `asyncrl invite` does. Raises ConfigError if no launcher
    answers in time."""
    fifo_path = run_dir / f"invite-{role}-{secrets.token_hex(4)}"  # other commands may ask at the same time
    os.mkfifo(fifo_path, 0o600)
    fifo = os.open(fifo_path, os.O_RDONLY | os.O_NONBLOCK)

    try:
        ready_fds, _, _ = select.select([fifo], [], [], seconds)
        if token := os.read(fifo, TOKEN_BYTES) if ready_fds else b"":
            return token.decode()
    finally:
        os.close(fifo)
        fifo_path.unlink(missing_ok=True)
    raise ConfigError(
        f"{run_dir}: the launcher did not answer within {seconds:g} s; check that the run is active on this "
        "machine and belongs to you"
    )
