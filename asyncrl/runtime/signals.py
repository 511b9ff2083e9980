"""The signals that ask a process to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable


def on_signals(end: Callable[[str], None]) -> None:
    """Call `end` with a reason, within the running loop, when SIGTERM or SIGINT comes. In a thread other
    than the main one, which gets no signals, nothing is set up."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, end, f"signal {number}")
