"""Tools that tests run in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from asyncrl.tools import Rewarded, Tool, ToolError, tool

if "PROCESS_TOOLS_GATE" in os.environ:
    with open(os.environ["PROCESS_TOOLS_GATE"], "rb", buffering=0) as gate:
        gate.read(1)


def keep_stopped(pid: int) -> None:
    while True:
        os.kill(pid, signal.SIGSTOP)


@tool(process=True, timeout=20, concurrency=2, env=("PROCESS_TOOLS_GATE", "SEARCH_KEY"))
def work(what: str) -> Rewarded:
    """Do what is said, some of it bad."""
    print("tools may print")
    match what:
        case "hang":
            time.sleep(60)
        case "die":
            os._exit(7)
        case "child":
            return Rewarded(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, 0.0)
        case "variables":
            return Rewarded(" ".join(os.environ), 0.0)
        case "stop":  # the wrapper around this process
            os.kill(os.getppid(), signal.SIGSTOP)
            return Rewarded(os.getppid(), 0.0)
        case "stop always":
            threading.Thread(target=keep_stopped, args=(os.getppid(),), daemon=True).start()
            return Rewarded(os.getppid(), 0.0)
        case "large":
            return Rewarded("x" * 10_000_000, 0.0)
    if what.startswith("polite"):
        with open(what.split()[1], "a") as calls:
            calls.write("x")
        raise ToolError("No city is called so.")
    if what.endswith(".txt") and not Path(what).exists():
        Path(what).touch()
        os._exit(7)
    return Rewarded(os.getpid(), 0.5)


def scaled(*, by: int = 2) -> Tool:
    @tool(process=True, timeout=20, concurrency=1)
    def scale(x: int) -> int:
        """Multiply."""
        return by * x

    return scale
