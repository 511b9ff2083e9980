"""A tool for episodes.py, in a file that imports nothing slow: each of its processes imports it."""

import time

from asyncrl.tools import tool


@tool(timeout=1.0, process=True, concurrency=2)
def hung_process(seconds: float) -> str:
    """Never end, in a process."""
    while True:
        time.sleep(0.01)
