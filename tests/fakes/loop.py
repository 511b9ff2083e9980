"""Small stand-ins for tests of asyncio code."""

from __future__ import annotations

import asyncio


async def settle() -> None:
    """Let every runnable task run."""
    for _ in range(20):
        await asyncio.sleep(0)


class Intervals:
    """A timeline that only remembers."""

    def __init__(self) -> None:
        self.records: list[tuple[str, float, float]] = []

    def record(self, name: str, start: float, end: float, **details: object) -> None:
        self.records.append((name, start, end))
