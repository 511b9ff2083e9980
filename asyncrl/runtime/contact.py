"""A worker's view of its coordinator: is it there, and do we still own what it gave us?"""

from __future__ import annotations

import enum


class ContactState(enum.Enum):
    """What to do at a tick."""

    FINE = "fine"  # send a heartbeat
    QUIET = "quiet"  # say hello: the coordinator may have restarted, or lost us
    EXPIRED = "expired"  # as quiet, and our episodes belong to others by now
    GONE = "gone"  # nobody is coming back: leave


class Contact:
    """Pure: times are passed in, in seconds of one monotonic clock.

    Args:
        seconds: silence after which the coordinator, and so this worker too, counts our episodes as lost.
        give_up: silence after which the worker leaves.
    """

    def __init__(self, seconds: float, give_up: float, now: float) -> None:
        self.seconds, self.give_up = seconds, max(give_up, seconds)
        self.interval = min(seconds / 5, 0.5)
        self.welcomed = False
        self._heard = self._ticked = now

    def heard(self, now: float) -> None:
        """The coordinator said something."""
        self._heard = now

    def tick(self, now: float) -> ContactState:
        """To be called every `interval`. A gap in the calls means that this process was away (stopped,
        swapped out), with mail perhaps unread: it is not held against the coordinator."""
        gap = now - self._ticked - self.interval
        if gap > self.seconds / 4:
            self._heard += gap
        self._ticked = now
        silent = now - self._heard
        if silent > self.give_up:
            return ContactState.GONE
        if silent > self.seconds:
            return ContactState.EXPIRED
        if silent > self.seconds / 2 or not self.welcomed:
            return ContactState.QUIET
        return ContactState.FINE
