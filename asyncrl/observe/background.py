"""Calls to what may block: a terminal that nobody reads, a tracker whose service does not answer."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from asyncrl.errors import fulfil, one_line

T = TypeVar("T")
log = logging.getLogger("asyncrl.observe")


class Background:
    """A daemon thread that runs one call after another. `call` never waits: with `most` calls waiting the
    next one is not made, and counted as `lost`, as one that raises is: the first of these is logged. A call
    that hangs is waited for once: later waits count from its beginning."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self.lost = 0
        self._lost_lock = threading.Lock()  # `lost`, which callers and the thread increase
        self._call_started: float | None = None  # the call under way
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> bool:
        """Make a call in the thread, behind those before it. False where it is lost, as too many wait."""
        try:
            self._calls.put_nowait(function)
        except queue.Full:
            self._count_lost()
            return False
        return True

    def ask(self, function: Callable[[], T], seconds: float) -> T:
        """Make a call in its turn, and return or raise what it does. TimeoutError after `seconds`; at once
        where too many calls wait."""
        answer: Future[T] = Future()
        if not self.call(partial(fulfil, answer, function)):
            raise TimeoutError("earlier calls have no answer yet")
        try:
            return answer.result(self._seconds_left(seconds))
        except TimeoutError:
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    @property
    def idle(self) -> bool:
        """All calls were made."""
        return not self._calls.unfinished_tasks

    def close(self, seconds: float) -> bool:
        """End the thread behind the last call. False where calls take longer: then it is left alone."""
        deadline = time.monotonic() + seconds
        try:
            self._calls.put(None, timeout=self._seconds_left(seconds))
        except queue.Full:
            return False

        while self._thread.is_alive():
            if (seconds_left := min(deadline - time.monotonic(), self._seconds_left(seconds))) <= 0:
                return False

            self._thread.join(seconds_left)

        return True

    def _seconds_left(self, seconds: float) -> float:
        """Seconds that are left of `seconds` for the call under way; all of them where there is none."""
        started = self._call_started
        return seconds if started is None else max(0.0, started + seconds - time.monotonic())

    def _count_lost(self) -> None:
        with self._lost_lock:
            self.lost += 1

    def _serve(self) -> None:
        failure_logged = False
        while (function := self._calls.get()) is not None:
            self._call_started = time.monotonic()
            try:
                function()
            except BaseException as error:  # SystemExit would end the thread, and lose the calls behind it
                self._count_lost()
                if not failure_logged:
                    log.warning("%s: %s", self._thread.name, one_line(error))

                failure_logged = True

            self._call_started = None
            self._calls.task_done()
