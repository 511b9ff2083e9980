"""Shared by the benchmarks and the chaos tools: running `asyncrl train`, delays of loops, statistics, tables.

The import puts the repository on the path: tools use the fakes of the tests (`tests.fakes`).
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from asyncrl.observe.files import read_rows as rows
from asyncrl.observe.files import read_summary as summary
from asyncrl.observe.metrics import ASKED

__all__ = ["ROOT", "loop_delays", "questions", "rows", "start", "summary", "table", "train", "wilson"]

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
TICK = 0.001  # seconds between two wake-ups that `loop_delays` times


def start(
    name: str, run_dir: Path, overrides: list[str], experiment: str = "calculator", stage: str = "train"
) -> subprocess.Popen[bytes]:
    """`asyncrl train` (or, as the `stage`, `sft`) of an experiment, output to `<run_dir>/<name>.out`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "asyncrl.cli", stage, f"experiment={experiment}"),
        *(f"name={name}", f"run_dir={run_dir}", "observe.console=plain", *overrides),
    ]

    out = (run_dir / f"{name}.out").open("wb")
    return subprocess.Popen(
        command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=os.environ | SINGLE_THREAD
    )


def train(
    name: str,
    run_dir: Path,
    overrides: list[str],
    deadline: float = 1200.0,
    experiment: str = "calculator",
    watch: Callable[[int], None] = lambda launcher: None,
    stage: str = "train",
) -> dict[str, Any]:
    """Run to the end; the summary, with `exit_code` and `wall_s` of the whole command. `watch` is called with
    the launcher's id ten times a second while it runs."""
    begin = time.monotonic()
    process = start(name, run_dir, overrides, experiment, stage)
    try:
        while (code := process.poll()) is None:
            watch(process.pid)
            if time.monotonic() - begin > deadline:
                raise subprocess.TimeoutExpired(process.args, deadline)
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()  # ends the launcher's processes, too

    result = summary(run_dir / name) | {"exit_code": code, "wall_s": time.monotonic() - begin}
    if code:
        tail = (run_dir / f"{name}.out").read_text().splitlines()[-15:]
        print(f"{name} ended with {code}:", *tail, sep="\n  ", file=sys.stderr)

    return result


@asynccontextmanager
async def loop_delays(delays_ms: list[float] | None = None) -> AsyncIterator[list[float]]:
    """Note by how many milliseconds the loop is late while the body runs, in a list that may be given."""
    if delays_ms is None:
        delays_ms = []

    async def tick() -> None:
        while True:
            since = time.perf_counter()
            await asyncio.sleep(TICK)
            delays_ms.append(1e3 * (time.perf_counter() - since - TICK))

    ticking = asyncio.create_task(tick())
    try:
        yield delays_ms
    finally:
        ticking.cancel()


def questions(folder: Path) -> int:
    """Return how many held-out questions the run's validations asked, each once sampled and once greedily."""
    return int(max((row.get(ASKED, 0.0) for row in rows(folder)), default=0.0))


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95% Wilson interval of a success rate."""
    if not trials:
        return 0.0, 1.0
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, ready for docs."""
    return "\n".join([table_line(header), "|" + "---|" * len(header), *map(table_line, lines)])


def table_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
