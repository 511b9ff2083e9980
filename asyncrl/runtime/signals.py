"""The signals that ask a run to end. Slurm sends them to every process of a job."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed


def ignore_endings() -> None:
    """In a process of a role, which the launcher stops in order: they would end it without the last
    checkpoint. A handler, as programs that it starts would inherit SIG_IGN."""
    for number in ENDING:
        signal.signal(number, lambda *_: None)


def at_ending(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call this in the loop at such a signal, where the loop is of the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            loop.add_signal_handler(number, call)
