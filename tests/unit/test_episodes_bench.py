"""Bad tools do not disturb good episodes: the benchmark of a worker's episodes, in small."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

from tests.fakes.scripts import bench_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> Any:
    return bench_script("episodes")


def test_good_episodes_do_not_wait_for_bad_tools(bench: Any) -> None:
    """One that hangs (in three ways), crashes, ignores cancellation, replies 10 MB: all episodes end, and the
    turns of the good ones end long before the deadline of the bad tools."""
    bad = len(bench.BAD)
    load = bench.Load(episodes=12 + bad, turns=3, tool_seconds=0.02, turn_seconds=0.05, bad=bad)
    figures = asyncio.run(bench.run(load))
    assert not figures.failed
    assert figures.turns == 2 * 3 * (12 + len(bench.BAD))
    assert len(figures.overhead) == 2 * 2 * 12
    assert statistics.median(figures.overhead) < bench.BAD_SECONDS / 2
    assert figures.row("good").count("|") == 6
