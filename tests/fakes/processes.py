"""Whether processes live, for tests that start some."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """A zombie that nobody has reaped is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(reached: Callable[[], bool], complaint: str) -> None:
    """Return once it is reached, or fail after 10 s."""
    limit = time.monotonic() + 10.0
    while not reached():
        assert time.monotonic() < limit, complaint
        await asyncio.sleep(0.005)


async def gone(pid: int) -> None:
    await until(lambda: not alive(pid), f"process {pid} lives")
