"""Calls to what may block: a terminal that nobody reads, a tracker whose service does not answer."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from asyncrl.errors import recorded

T = TypeVar("T")
log = logging.getLogger("asyncrl.observe")


class Background:
    """A daemon thread that runs one call after another. `call` never waits: with `most` calls waiting the
    next one is not made, and counted as `lost`, as one that raises is: the first of these is logged."""

    def __init__(self, name: str, most: int) -> None:
        self.lost = 0
        self._counting = threading.Lock()  # `lost`, which callers and the thread increase
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Make it in the thread, behind those before it."""
        try:
            self._calls.put_nowait(function)
        except queue.Full:
            self._lose()

    def ask(self, function: Callable[[], T], seconds: float) -> T:
        """Make a call in its turn, and return or raise what it does. TimeoutError after `seconds`."""
        asked: Future[T] = Future()

        def make() -> None:
            try:
                asked.set_result(function())
            except Exception as error:
                asked.set_exception(error)

        self.call(make)
        try:
            return asked.result(seconds)
        except TimeoutError:
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    @property
    def idle(self) -> bool:
        """All calls were made."""
        return not self._calls.unfinished_tasks

    def close(self, seconds: float) -> bool:
        """End the thread behind the last call; False where that takes longer, and it is left alone."""
        deadline = time.monotonic() + seconds
        try:
            self._calls.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _lose(self) -> None:
        with self._counting:
            self.lost += 1

    def _serve(self) -> None:
        told = False
        while (function := self._calls.get()) is not None:
            with recorded() as failure:
                function()
            if failure:
                self._lose()
                if not told:
                    log.warning("%s: %s", self._thread.name, failure.line)
                told = True
            self._calls.task_done()
