"""The signals that ask a process to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed


def on_signals(end: Callable[[str], None]) -> None:
    """Call `end` with a reason, within the running loop, when one of ENDING comes. In a thread other than the
    main one, which gets no signals, nothing is set up."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, end, f"signal {number}")
