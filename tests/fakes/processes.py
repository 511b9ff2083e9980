"""Find the processes of a run, and wait for processes to start or to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def role_processes(launcher_pid: int) -> dict[str, psutil.Process]:
    """Return the live processes that a launcher has started, by `role-index`, without their wrappers."""
    processes: dict[str, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher_pid).children(recursive=True):
            with suppress(psutil.Error, ValueError):
                arguments = child.cmdline()
                if arguments[1:3] == ["-m", "asyncrl.launch.role"]:
                    index = arguments[arguments.index("--index") + 1]
                    processes[f"{arguments[3]}-{index}"] = child

    return processes


def alive(pid: int) -> bool:
    """Tell whether a process is alive. A zombie is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Return the first true value of `condition`, or fail once `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds:g} s"
        time.sleep(0.05)
    return value


async def until(reached: Callable[[], bool], complaint: str) -> None:
    """Return once the condition holds, or fail after 30 s."""
    limit = time.monotonic() + 30.0
    while not reached():
        assert time.monotonic() < limit, complaint
        await asyncio.sleep(0.005)


async def written_line(path: Path) -> str:
    """Return the line that a program is about to write to a file. Reading a named pipe would never end when
    the program does not start."""
    texts = [""]

    def is_written() -> bool:
        texts[0] = path.read_text() if path.is_file() else ""
        return texts[0].endswith("\n")

    await until(is_written, f"{path} has no line")
    return texts[0]


async def wait_until_gone(pid: int) -> None:
    await until(lambda: not alive(pid), f"process {pid} lives")
