"""Keeps the processes of a run alive. One supervisor for local children and Ray actors.

A unit that dies is started again after a back-off, as often as its budget allows (it is whole again when a
unit has lived for a while and the run has made a step meanwhile): a worker alone, the
trainer ranks all together (a lost rank leaves the others in a collective), the coordinator on the same
endpoints. Restarted processes are new peers: they get a new incarnation, later in order. The coordinator
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
SOUND_SECONDS = 600.0  # between two deaths of a unit, after which the earlier ones do not count any more
LEAVE_SECONDS = 5.0  # seconds for the coordinator to follow a process that left in order


@dataclass(frozen=True)
class RunOutcome:
    """Says how the run ended, as processes see it. `error` may have several lines (a log tail)."""

    code: int
    error: str = ""


@dataclass
class SupervisedUnit:
    """Holds a planned unit and its current processes."""

    plan: Unit
    handles: list[ProcessHandle] = field(default_factory=list)
    incarnation: str = ""
    restarts: int = 0
    died: tuple[float, int] = (-math.inf, -1)  # when it died last, and at which step of the run
    retry_at: float | None = None
    left_at: float | None = None  # when a process of it was first seen to have left with 0

    @property
    def alive(self) -> list[ProcessHandle]:
        return [handle for handle in self.handles if handle.poll() is None]

    def dead(self, now: float) -> tuple[ProcessHandle, int] | None:
        """Return a process that crashed, with its exit code.

        Exit code 0 is correct at the end of a run; it counts as a crash when the run goes on for
        LEAVE_SECONDS afterwards.
        """
        ended = [(handle, code) for handle in self.handles if (code := handle.poll()) is not None]
        crashed = [(handle, code) for handle, code in ended if code != COMPLETED]

        if crashed or not ended:
            self.left_at = None
            said = [one for one in crashed if one[1] == TRY_AGAIN]  # of ranks: the others end because of it
            return next(iter(said or crashed), None)

        self.left_at = now if self.left_at is None else self.left_at
        return ended[0] if now - self.left_at > LEAVE_SECONDS else None


class Supervisor:
    """Call `tick` often; it returns the RunOutcome once. `stopping`: the run is being ended, so nothing is
    restarted, but for a coordinator that was about to be. `over`: its coordinator has ended the run and takes
    last words, so how the others end is no matter."""

    def __init__(
        self,
        units: Iterable[Unit],
        spawn: Spawn,
        run_dir: Path,
        restarts: int,
        rendezvous: Callable[[Unit, str], str],
        on_restart: Callable[[str], None] = log.warning,
    ) -> None:
        self.units = [SupervisedUnit(unit) for unit in units]
        self.stopping = self.over = False
        self.step = 0  # of the run, as last reported

        self._spawn = spawn
        self._run_dir = run_dir
        self._restarts = restarts
        self._rendezvous = rendezvous
        self._on_restart = on_restart
        self._launch = secrets.token_hex(6)
        self._starts = itertools.count(1)

    def start(self) -> None:
        for unit in self.units:
            self._start(unit)

    def tick(self, now: float) -> RunOutcome | None:
        """Look at every process; restart what may be restarted."""
        for unit in self.units:
            ending = self._coordinator_ended(unit)
            if ending is None and unit.retry_at is not None:
                self._retry(unit, now)
            elif ending is None and (died := unit.dead(now)):
                ending = self._died(unit, *died, now)
            if ending is not None:
                return ending
        return None

    @property
    def alive(self) -> list[ProcessHandle]:
        return [handle for unit in self.units for handle in unit.alive]

    def kill(self) -> None:
        for handle in self.alive:
            handle.kill()

    def kill_role(self, role: str, incarnation: str = "") -> None:
        """End a role that does not answer, or one of its processes; the next tick restarts it."""
        for unit in self.units:
            if unit.plan.role == role and incarnation in ("", unit.incarnation):
                for handle in unit.alive:
                    handle.kill()

    def lost(self, role: str) -> str:
        """A process of the role that crashed and is not started again yet, and how it ended; '' if none."""
        handles = [handle for unit in self.units if unit.plan.role == role for handle in unit.handles]
        ended = [(handle.name, code) for handle in handles if (code := handle.poll())]
        return f"{ended[0][0]} {describe_exit(ended[0][1])}" if ended else ""

    # -- one unit --------------------------------------------------------------------------------------

    def _start(self, unit: SupervisedUnit) -> None:
        """New processes for a unit; ranks of one start share incarnation and rendezvous."""
        started = incarnation_of(self._launch, next(self._starts))
        unit.incarnation = self._launch if unit.plan.role == COORDINATOR else started
        self.over = self.over and unit.plan.role != COORDINATOR

        rendezvous = self._rendezvous(unit.plan, unit.incarnation)
        unit.handles = [
            self._spawn(ProcessSpec(place, unit.incarnation, rendezvous)) for place in unit.plan.places
        ]

        unit.retry_at = unit.left_at = None

    def _coordinator_ended(self, unit: SupervisedUnit) -> RunOutcome | None:
        """Exit codes 0 and 1 are the result of the run; with any other its process has crashed."""
        if unit.plan.role != COORDINATOR or not unit.handles or unit.retry_at is not None:
            return None
        code = unit.handles[0].poll()
        if code == FAILED:
            return RunOutcome(FAILED, self._tail(unit.handles[0].name))
        return RunOutcome(COMPLETED) if code == COMPLETED else None

    def _died(self, unit: SupervisedUnit, dead: ProcessHandle, code: int, now: float) -> RunOutcome | None:
        """A process of the unit died: end the others too, and plan a restart while the budget lasts."""
        if self.over and unit.plan.role != COORDINATOR:
            return None

        for handle in unit.alive:
            handle.kill()

        how = describe_exit(code)
        log_file = log_path(self._run_dir, dead.name)
        said = ""
        if code > 0 or code == -signal.SIGABRT:  # of other signals its log does not say why
            said = cause_of_death(log_file, unit.incarnation, crashed=True)

        if code == BAD_INPUT:
            return RunOutcome(BAD_INPUT, f"{log_file}:\n{said}" if said else "")

        if self.stopping:
            if unit.plan.role == COORDINATOR:
                ended = f"{dead.name} {how} while stopping{said and f': {said}'}"
                return RunOutcome(FAILED, f"{ended}\n{self._tail(dead.name)}")
            return None

        if code == TRY_AGAIN:  # each time with less: it ends by itself
            unit.retry_at = now
            self._on_restart(f"{dead.name}: {said}; {unit.plan.name} is restarted")
            return None

        (before, step), unit.died = unit.died, (now, self.step)
        if now - before > SOUND_SECONDS and self.step > step:
            unit.restarts = 0

        if unit.restarts >= self._restarts:
            spent = f"{dead.name} {how}; its {self._restarts} restarts (launch.restarts) are spent"
            return RunOutcome(FAILED, f"{spent}{said and f': {said}'}\n{self._tail(dead.name)}")

        delay = min(BACKOFF_MAX, BACKOFF_FIRST * 2**unit.restarts)
        unit.restarts += 1
        unit.retry_at = now + delay
        self._on_restart(
            f"{dead.name} {how}; {unit.plan.name} is restarted in {delay:g} s "
            f"({unit.restarts} of {self._restarts}){said and f': {said}'}"
        )
        return None

    def _retry(self, unit: SupervisedUnit, now: float) -> None:
        """Start again once the back-off is over and all processes of the last start have ended."""
        assert unit.retry_at is not None
        ending = self.stopping or self.over
        wanted = not ending or unit.plan.role == COORDINATOR  # a stop needs the coordinator
        if now >= unit.retry_at and not unit.alive and wanted:
            self._start(unit)

    def _tail(self, name: str) -> str:
        path = log_path(self._run_dir, name)
        tail = log_tail(path)
        return f"{path}:\n{tail}" if tail else ""
