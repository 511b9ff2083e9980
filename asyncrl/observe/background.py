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

    def __init__(self, name: str, most: int) -> None:
        self.lost = 0
        self._counting = threading.Lock()  # `lost`, which callers and the thread increase
        self._began: float | None = None  # the call under way
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> bool:
        """Make a call in the thread, behind those before it. False where it is lost, as too many wait."""
        try:
            self._calls.put_nowait(function)
        except queue.Full:
            self._lose()
            return False
        return True

    def ask(self, function: Callable[[], T], seconds: float) -> T:
        """Make a call in its turn, and return or raise what it does. TimeoutError after `seconds`; at once
        where too many calls wait."""
        asked: Future[T] = Future()
        if not self.call(partial(fulfil, asked, function)):
            raise TimeoutError("earlier calls have no answer yet")
        try:
            return asked.result(self._left(seconds))
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
            self._calls.put(None, timeout=self._left(seconds))
        except queue.Full:
            return False
        while self._thread.is_alive():
            if (left := min(deadline - time.monotonic(), self._left(seconds))) <= 0:
                return False
            self._thread.join(left)
        return True

    def _left(self, seconds: float) -> float:
        """Seconds that are left of `seconds` for the call under way; all of them where there is none."""
        began = self._began
        return seconds if began is None else max(0.0, began + seconds - time.monotonic())

    def _lose(self) -> None:
        with self._counting:
            self.lost += 1

    def _serve(self) -> None:
        told = False
        while (function := self._calls.get()) is not None:
            self._began = time.monotonic()
            try:
                function()
            except BaseException as error:  # SystemExit would end the thread, and lose the calls behind it
                self._lose()
                if not told:
                    log.warning("%s: %s", self._thread.name, one_line(error))
                told = True
            self._began = None
            self._calls.task_done()
