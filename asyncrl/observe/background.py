"""Makes calls that may block: to a terminal that nobody reads, or a tracker whose service is silent."""

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


class BackgroundCalls:
    """Runs one call after another in a daemon thread. `call` never waits: while `max_waiting` calls wait, the
    next call is dropped. Dropped calls and calls that raise are counted as `lost_calls`; the first exception
    is logged. A hanging call delays only one waiter: later waits count from the beginning of that call."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self.lost_calls = 0
        self._lost_lock = threading.Lock()  # guards `lost_calls`, which callers and the thread increase
        self._call_started: float | None = None  # monotonic time of the start of the call under way
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> bool:
        """Make a call in the thread, after earlier calls. False if the call is lost, as too many wait."""
        try:
            self._calls.put_nowait(function)
        except queue.Full:
            self._count_lost()
            return False
        return True

    def ask(self, function: Callable[[], T], seconds: float) -> T:
        """Make a call after earlier calls, and return the result or raise the exception. TimeoutError after
        `seconds`, or at once if too many calls wait."""
        answer: Future[T] = Future()
        if not self.call(partial(fulfil, answer, function)):
            raise TimeoutError("earlier calls are still waiting for an answer")
        try:
            return answer.result(self._seconds_left(seconds))
        except TimeoutError:
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    @property
    def idle(self) -> bool:
        """Tell whether all calls were made."""
        return not self._calls.unfinished_tasks

    def close(self, seconds: float) -> bool:
        """End the thread after the last call. False if calls take longer; the thread is then left running."""
        deadline = time.monotonic() + seconds
        try:
            self._calls.put(None, timeout=self._seconds_left(seconds))
        except queue.Full:
            return False

        while self._thread.is_alive():
            seconds_left = min(deadline - time.monotonic(), self._seconds_left(seconds))
            if seconds_left <= 0:
                return False
            self._thread.join(seconds_left)

        return True

    def _seconds_left(self, seconds: float) -> float:
        """Return how many of `seconds` are left for the call under way; all if no call is under way."""
        started = self._call_started
        return seconds if started is None else max(0.0, started + seconds - time.monotonic())

    def _count_lost(self) -> None:
        with self._lost_lock:
            self.lost_calls += 1

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
