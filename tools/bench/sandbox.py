"""What a sandbox costs: its start, a call, its end; alone, and with others at the same time.

    python tools/bench/sandbox.py --times 50 --together 1 16
    python tools/bench/sandbox.py --times 200 --together 1 16 64 --image NAME

Times are medians in milliseconds, `p99` beside them. `memory` is what one sandbox with a started interpreter
holds for itself (USS of its processes), `CPU` what one costs from its start to its end, of the owner too.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyncrl.isolation.images import Image, find_image
from asyncrl.isolation.sandbox.jail import Jail

STEPS: dict[str, Callable[[Jail], Awaitable[object]]] = {
    "open": lambda box: box.start(),
    "first cell": lambda box: box.run("cell", "x = 1", 20),
    "cell": lambda box: box.run("cell", "x + 1", 20),
    "cell that imports json and re": lambda box: box.run("cell", "import json, re", 20),
    "shell `true`": lambda box: box.run("shell", "true", 20),
    "program": lambda box: box.run("program", "print(1)", 20),
    "close": lambda box: box.close(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--image", help="the name of an image that has python3")
    options = parser.parse_args()

    image = find_image(options.image) if options.image else None
    before = seconds_of_cpu()
    measurements = [asyncio.run(measure(options.times, options.together[0], image))]
    cpu = (seconds_of_cpu() - before) / options.times
    measurements += [
        asyncio.run(measure(options.times, together, image)) for together in options.together[1:]
    ]
    print("| ms |" + "".join(f" {together} at once | p99 |" for together in options.together))
    print("|---|" + "---|---|" * len(measurements))

    for name in STEPS:
        cells = [f"{number:.1f}" for times in measurements for number in summary(times[name])]
        print(f"| {name} | " + " | ".join(cells) + " |")

    print(f"\nCPU: {1e3 * cpu:.0f} ms; memory: {asyncio.run(memory(image)):.1f} MiB")


async def measure(times: int, together: int, image: Image | None) -> dict[str, list[float]]:
    """Return the milliseconds of each step, from `times` sandboxes, `together` at any moment."""
    durations_ms: dict[str, list[float]] = {name: [] for name in STEPS}
    room = asyncio.Semaphore(together)

    async def time_one_sandbox() -> None:
        async with room:
            box = Jail(require=(), image=image)
            for name, step in STEPS.items():
                started = time.perf_counter()
                await step(box)
                durations_ms[name].append(1e3 * (time.perf_counter() - started))

    await asyncio.gather(*(time_one_sandbox() for _ in range(times)))
    return durations_ms


async def memory(image: Image | None) -> float:
    async with Jail(require=(), image=image) as box:
        await box.run("cell", "1", 20)
        assert box.pid is not None
        return sum(map(own_memory, family(box.pid))) / 1024


def seconds_of_cpu() -> float:
    used = [resource.getrusage(processes) for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def family(pid: int) -> list[int]:
    """Return a process with all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


def own_memory(pid: int) -> int:
    """Return the KiB that no other process shares; 0 for a process whose memory may not be read."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except PermissionError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def summary(numbers: list[float]) -> tuple[float, float]:
    ordered = sorted(numbers)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]


if __name__ == "__main__":
    main()
