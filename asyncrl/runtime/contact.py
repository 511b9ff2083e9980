"""When a worker or a keeper last heard from its coordinator, and what it must do about that."""

from __future__ import annotations

import enum

QUIET_SECONDS = 5.0  # without a message, after which the coordinator may have restarted


class ContactState(enum.Enum):
    """What to do at a tick."""

    FINE = "fine"  # send a heartbeat
    QUIET = "quiet"  # send a hello: the coordinator may have restarted, or lost us
    EXPIRED = "expired"  # as QUIET, and our episodes have been given to others
    GONE = "gone"  # the coordinator does not come back: leave


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

    def message_arrived(self, now: float) -> None:
        """A message of the coordinator arrived."""
        self._heard = now

    def tick(self, now: float) -> ContactState:
        """To be called every `interval`. A gap in the calls means that this process did not run (stopped,
        swapped out), perhaps with messages unread: it does not count as silence of the coordinator."""
        gap = now - self._ticked - self.interval
        if gap > self.seconds / 4:
            self._heard += gap
        self._ticked = now
        silent = now - self._heard
        if silent > self.give_up:
            return ContactState.GONE
        if silent > self.seconds:
            return ContactState.EXPIRED
        if silent > min(self.seconds / 2, QUIET_SECONDS) or not self.welcomed:
            return ContactState.QUIET
        return ContactState.FINE
