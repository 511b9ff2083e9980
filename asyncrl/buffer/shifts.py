"""Decides which side has the devices, where engines and trainer share them, one side at a time.

    ROLLOUT ──► SLEEPING ──► TRAIN ──► WAKING ──► ROLLOUT
       engines fall asleep    ranks offload, engines load the newest version

The trainer gets the devices when its next request can be answered at once and enough of the batch is ready,
and gives the devices back when its next request cannot be answered. So a shift of the trainer trains
something, and a shift of the engines lasts until an episode has landed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


class Shift(enum.StrEnum):
    """The four states of the devices."""

    ROLLOUT = "rollout"
    SLEEPING = "sleeping"
    TRAIN = "train"
    WAKING = "waking"


@dataclass(frozen=True)
class Outlook:
    """The answer that the trainer's next request would get.

    ready: the request would be answered now.
    group_fraction: fraction of the batch's groups that are in the batch, or could be.
    batch_complete: nothing more can enter the batch before the batch is trained.
    """

    ready: bool
    group_fraction: float
    batch_complete: bool


NO_REQUEST = Outlook(False, 0.0, False)


@dataclass(frozen=True)
class Situation:
    """The reports of engines and trainer by which the next shift is decided.

    outlook: outlook of the trainer's request; NO_REQUEST without a request, or while the trainer trains.
    ranks_starting: ranks that have loaded nothing wait for the devices.
    trainer_waits: the trainer waits for an answer, or for the end of the run.
    validation_waits: held-out episodes need the engines, and the batch under way has no episode yet.
    engines_asleep: all engines are asleep; a missing process counts as awake.
    engine_awake: an engine has loaded a version since it slept.
    ranks_offloaded: no rank holds anything on the devices.
    idle_seconds: seconds since an engine last sampled.
    """

    outlook: Outlook = NO_REQUEST
    ranks_starting: bool = False
    trainer_waits: bool = False
    validation_waits: bool = False
    engines_asleep: bool = False
    engine_awake: bool = False
    ranks_offloaded: bool = False
    idle_seconds: float = 0.0


class Shifts:
    """Decides which side has the devices. Times are seconds of a monotonic clock.

    Args:
        min_fraction: fraction of a batch's groups that must be ready for the trainer's shift. "auto": all
            groups, or any once no engine has sampled for as long as two changes take, as waiting longer could
            cost more.
    """

    def __init__(self, min_fraction: float | Literal["auto"], now: float, shift: Shift = Shift.TRAIN) -> None:
        self.shift = shift
        self.entered_at = now
        self.clock = EngineClock(now, stopped=shift is not Shift.ROLLOUT)
        self.change_seconds = {Shift.SLEEPING: 0.0, Shift.WAKING: 0.0}  # duration of the newest change
        self.train_shifts = 0  # number of the trainer's shifts
        self._min_fraction = min_fraction

    def enter_next(self, now: float, situation: Situation) -> bool:
        """Enter the next state if it is time. Return True if a state was entered."""
        next_shift = self._next_shift(situation)
        if next_shift is self.shift:
            return False

        if self.shift in self.change_seconds:
            self.change_seconds[self.shift] = now - self.entered_at
        self.train_shifts += next_shift is Shift.TRAIN

        if next_shift is Shift.ROLLOUT:
            self.clock.go(now)
        else:
            self.clock.stop(now)

        self.shift = next_shift
        self.entered_at = now
        return True

    def gauges(self) -> dict[str, float]:
        return {
            "shift/train": float(self.shift is Shift.TRAIN),
            "shift/count": float(self.train_shifts),
            "shift/sleep_s": self.change_seconds[Shift.SLEEPING],
            "shift/wake_s": self.change_seconds[Shift.WAKING],
        }

    def _next_shift(self, situation: Situation) -> Shift:
        outlook = situation.outlook
        if self._min_fraction == "auto":
            filled = outlook.group_fraction >= 1 or situation.idle_seconds > sum(self.change_seconds.values())
        else:
            filled = outlook.group_fraction >= self._min_fraction
        enough_ready = outlook.ready and (outlook.batch_complete or filled)

        match self.shift:
            case Shift.ROLLOUT if not situation.validation_waits and (
                situation.ranks_starting or enough_ready
            ):
                return Shift.SLEEPING
            case Shift.SLEEPING if situation.engines_asleep:
                return Shift.TRAIN
            case Shift.TRAIN if (
                situation.trainer_waits
                and not situation.ranks_starting
                and (situation.validation_waits or not outlook.ready)
            ):
                return Shift.WAKING
            case Shift.WAKING if situation.ranks_starting:
                return Shift.SLEEPING
            case Shift.WAKING if situation.ranks_offloaded and situation.engine_awake:
                return Shift.ROLLOUT
        return self.shift


class EngineClock:
    """A clock that stands still while engines sleep, for the ages and deadlines of groups.

    Example: engines sleep from second 10 to 14. Second 9 is 9, 12 is 10, and 15 is 11.
    """

    def __init__(self, now: float, stopped: bool = False) -> None:
        self._slept_seconds = 0.0
        self._stopped_at: float | None = now if stopped else None

    def stop(self, now: float) -> None:
        if self._stopped_at is None:
            self._stopped_at = now

    def go(self, now: float) -> None:
        if self._stopped_at is not None:
            self._slept_seconds += now - self._stopped_at
            self._stopped_at = None

    def __call__(self, now: float) -> float:
        return (now if self._stopped_at is None else min(now, self._stopped_at)) - self._slept_seconds
