"""Commits the passes of the loop, and waits while the store cannot be written: a full disk, a lock."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.coordinator.state import RunState, log
from asyncrl.store.schema import StoreError, StorePaused

CONTACT_EVERY = 0.5


class Journal:
    """`commit_pass` is called after each pass of the loop, and again before the next. `keep_contact` is
    called now and then during a pause, with its reason: the peers must not give the coordinator up."""

    def __init__(self, state: RunState, keep_contact: Callable[[str], None]) -> None:
        self._state, self._keep_contact = state, keep_contact
        self._paused_at: float | None = None
        self._contact_at = 0.0

    @property
    def paused(self) -> bool:
        """The last pass is not written yet."""
        return self._paused_at is not None

    def commit_pass(self, now: float) -> bool:
        """True when the pass is durable and its messages are sent. Until then the next one must not begin.
        StoreError after launch.stall_timeout."""
        try:
            self._state.persist()
        except StorePaused as error:
            self._pause(error, now)
            return False
        if self._paused_at is not None:
            log.info("the run store can be written again, after %.1f s", now - self._paused_at)
            self._paused_at = None
            self._state.liveness.progress(now)
        return True

    def _pause(self, error: StorePaused, now: float) -> None:
        if self._paused_at is None:
            self._paused_at = now
            log.error("%s", error)
        limit = self._state.config.launch.stall_timeout
        if now - self._paused_at > limit:
            raise StoreError(f"not written within {limit:g} s: {error}")
        if now >= self._contact_at:
            self._contact_at = now + CONTACT_EVERY
            self._keep_contact(str(error))
