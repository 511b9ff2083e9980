"""Keeps the processes of a run alive: local children and Ray actors alike.

A unit that dies is started again after a back-off, as often as its restarts allow; the count starts anew when
a unit has lived for a while and the run has made a step meanwhile. A worker restarts alone. Trainer ranks
restart together, as a lost rank leaves the other ranks in a collective. The coordinator restarts on the same
endpoints. Restarted processes are new peers with a new incarnation, later in order. Only the coordinator
keeps its incarnation, which names the launch.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.isolation.child import describe_exit
from asyncrl.launch.placement import COORDINATOR, Unit
from asyncrl.launch.process import (
    BAD_INPUT,
    COMPLETED,
    FAILED,
    TRY_AGAIN,
    ProcessHandle,
    ProcessSpec,
    Spawn,
    log_path,
)
from asyncrl.observe.files import cause_of_death, log_tail
from asyncrl.wire.addresses import incarnation_of

log = logging.getLogger("asyncrl.launch")

BACKOFF_FIRST = 0.5
BACKOFF_MAX = 8.0
# Seconds between two deaths of a unit, after which earlier deaths do not count any more.
SOUND_SECONDS = 600.0
LEAVE_SECONDS = 5.0  # Seconds for the coordinator to end after a process has left in order.


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run as its processes show it. `error` may have several lines (a log tail)."""

    code: int
    error: str = ""


@dataclass
class SupervisedUnit:
    """A planned unit and its current processes."""

    plan: Unit
    handles: list[ProcessHandle] = field(default_factory=list)
    incarnation: str = ""
    restart_count: int = 0
    last_death: tuple[float, int] = (-math.inf, -1)  # time of the unit's last death, and the step of the run
    restart_at: float | None = None
    kill_reason: str = ""  # why the current processes were killed; '' unless the coordinator requested it
    first_left_at: float | None = None  # when a process of the unit was first seen to have exited with 0

    @property
    def alive(self) -> list[ProcessHandle]:
        return [handle for handle in self.handles if handle.poll() is None]

    def find_dead(self, now: float) -> tuple[ProcessHandle, int] | None:
        """Return a process that crashed, with its exit code.

        Exit code 0 is correct at the end of a run; it counts as a crash if the run goes on for LEAVE_SECONDS
        afterwards.
        """
        ended_handles = [(handle, code) for handle in self.handles if (code := handle.poll()) is not None]
        crashed_handles = [(handle, code) for handle, code in ended_handles if code != COMPLETED]

        if crashed_handles or not ended_handles:
            self.first_left_at = None
            # A rank that gave up is the cause; the other ranks end because of it.
            gave_up = [crashed for crashed in crashed_handles if crashed[1] == TRY_AGAIN]
            return next(iter(gave_up or crashed_handles), None)

        self.first_left_at = now if self.first_left_at is None else self.first_left_at
        return ended_handles[0] if now - self.first_left_at > LEAVE_SECONDS else None


class Supervisor:
    """Starts and restarts the processes of a run. Call `poll_processes` often; it returns the RunOutcome
    once. `stopping`: the run is being ended, so only a coordinator that was about to be restarted is
    restarted. `run_over`: the coordinator has ended the run and takes last messages, so the exit codes of
    other processes do not matter."""

    def __init__(
        self,
        units: Iterable[Unit],
        spawn: Spawn,
        run_dir: Path,
        max_restarts: int,
        rendezvous: Callable[[Unit, str], str],
        on_restart: Callable[[str], None] = log.warning,
    ) -> None:
        self.units = [SupervisedUnit(unit) for unit in units]
        self.stopping = False
        self.run_over = False
        self.run_step = 0  # step of the run, as last reported

        self._spawn = spawn
        self._run_dir = run_dir
        self._max_restarts = max_restarts
        self._rendezvous = rendezvous
        self._on_restart = on_restart
        self._launch_id = secrets.token_hex(6)
        self._start_numbers = itertools.count(1)

    def start(self) -> None:
        for unit in self.units:
            self._start_unit(unit)

    def poll_processes(self, now: float) -> RunOutcome | None:
        """Check every process, and restart units that may be restarted."""
        for unit in self.units:
            is_coordinator = unit.plan.role == COORDINATOR
            if unit.restart_at is not None:
                # A unit restarts once its back-off is over and all processes of the last start have ended; at
                # the end of the run only the coordinator, which a stop needs.
                is_wanted = is_coordinator or not (self.stopping or self.run_over)
                if now >= unit.restart_at and not unit.alive and is_wanted:
                    self._start_unit(unit)
                continue

            # The coordinator's exit codes 0 and 1 are the result of the run; any other code is a crash.
            exit_code = unit.handles[0].poll() if is_coordinator and unit.handles else None
            if exit_code == COMPLETED:
                return RunOutcome(COMPLETED)
            if exit_code == FAILED:
                return RunOutcome(FAILED, self._describe_log(unit.handles[0].name))

            dead = unit.find_dead(now)
            if dead and (outcome := self._handle_death(unit, *dead, now)):
                return outcome
        return None

    @property
    def alive(self) -> list[ProcessHandle]:
        return [handle for unit in self.units for handle in unit.alive]

    def kill_all(self) -> None:
        for handle in self.alive:
            handle.kill()

    def kill_role(self, role: str, incarnation: str = "", reason: str = "") -> bool:
        """Kill the processes of a role that are to be replaced: all, or those with this incarnation. The
        next polls restart their units, or end the run with the reason if no restarts are left.

        Returns True if a process was alive and had not been killed before.
        """
        any_killed = False
        for unit in self.units:
            if unit.plan.role == role and incarnation in ("", unit.incarnation):
                if unit.alive and not unit.kill_reason:
                    any_killed = True
                    unit.kill_reason = reason
                for handle in unit.alive:
                    handle.kill()
        return any_killed

    def describe_lost(self, role: str) -> str:
        """Describe a crashed process of the role that is not started again yet; '' if there is none."""
        handles = [handle for unit in self.units if unit.plan.role == role for handle in unit.handles]
        ended_processes = [(handle.name, code) for handle in handles if (code := handle.poll())]
        return f"{ended_processes[0][0]} {describe_exit(ended_processes[0][1])}" if ended_processes else ""

    # -- one unit --------------------------------------------------------------------------------------

    def _start_unit(self, unit: SupervisedUnit) -> None:
        """Start new processes for a unit; ranks of one start share incarnation and rendezvous."""
        incarnation = incarnation_of(self._launch_id, next(self._start_numbers))
        unit.incarnation = self._launch_id if unit.plan.role == COORDINATOR else incarnation
        self.run_over = self.run_over and unit.plan.role != COORDINATOR

        rendezvous = self._rendezvous(unit.plan, unit.incarnation)
        unit.handles = [
            self._spawn(ProcessSpec(planned, unit.incarnation, rendezvous)) for planned in unit.plan.processes
        ]

        unit.restart_at = None
        unit.kill_reason = ""
        unit.first_left_at = None

    def _handle_death(
        self, unit: SupervisedUnit, dead_process: ProcessHandle, exit_code: int, now: float
    ) -> RunOutcome | None:
        """Kill the other processes of a unit in which a process died, and plan a restart while restarts are
        left."""
        if self.run_over and unit.plan.role != COORDINATOR:
            return None

        for handle in unit.alive:
            handle.kill()

        exit_text = describe_exit(exit_code)
        log_file = log_path(self._run_dir, dead_process.name)
        cause_text = ""
        # After other signals the log does not tell the cause.
        if exit_code > 0 or exit_code == -signal.SIGABRT:
            cause_text = cause_of_death(log_file, unit.incarnation, crashed=True)

        if exit_code == BAD_INPUT:
            return RunOutcome(BAD_INPUT, f"{log_file}:\n{cause_text}" if cause_text else "")

        if self.stopping:
            if unit.plan.role == COORDINATOR:
                ended_text = (
                    f"{dead_process.name} {exit_text} while stopping{cause_text and f': {cause_text}'}"
                )
                return RunOutcome(FAILED, f"{ended_text}\n{self._describe_log(dead_process.name)}")
            return None

        if exit_code == TRY_AGAIN:  # Each try uses a smaller batch, so the tries end by themselves
            unit.restart_at = now
            self._on_restart(f"{dead_process.name}: {cause_text}; restarting {unit.plan.name}")
            return None

        previous_death, previous_step = unit.last_death
        unit.last_death = (now, self.run_step)
        if now - previous_death > SOUND_SECONDS and self.run_step > previous_step:
            unit.restart_count = 0

        if unit.restart_count >= self._max_restarts:
            cause_text = unit.kill_reason or cause_text
            spent_text = (
                f"{dead_process.name} {exit_text}; no restarts are left "
                f"(launch.restarts={self._max_restarts})"
            )
            return RunOutcome(
                FAILED,
                f"{spent_text}{cause_text and f': {cause_text}'}\n{self._describe_log(dead_process.name)}",
            )

        delay = min(BACKOFF_MAX, BACKOFF_FIRST * 2**unit.restart_count)
        unit.restart_count += 1
        unit.restart_at = now + delay
        self._on_restart(
            f"{dead_process.name} {exit_text}; restarting {unit.plan.name} in {delay:g} s "
            f"({unit.restart_count} of {self._max_restarts}){cause_text and f': {cause_text}'}"
        )
        return None

    def _describe_log(self, name: str) -> str:
        path = log_path(self._run_dir, name)
        tail = log_tail(path)
        return f"{path}:\n{tail}" if tail else ""
