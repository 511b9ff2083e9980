"""A run that faults are done to: its processes, its files, and the proxies between them."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from common import ROOT, SINGLE_THREAD, rows

from asyncrl.weights.disk import weights_directory
from tests.fakes.processes import role_processes
from tests.fakes.proxy import Proxy

LAUNCHER = ROOT / "tools" / "faults" / "launcher.py"
HANGING = ROOT / "tools" / "faults" / "hanging.py"
DEMO = (f"rollout.reward={HANGING}:hanging", "rollout.reward_timeout=4")


class Target:
    """`launch` starts it. Use as a context: what is left at the end is killed, by pid.

    Args:
        run: the run directory; beside it is written what is not the run's.
        lease: `launch.lease`, in seconds.
    """

    def __init__(
        self,
        run: Path,
        *overrides: str,
        experiment: str = "calculator",
        lease: float = 5.0,
        deadline: float = 240.0,
        seed: int = 0,
    ) -> None:
        self.run = run
        self.lease = lease
        self.deadline = deadline
        self.dice = random.Random(seed)

        run.parent.mkdir(parents=True, exist_ok=True)
        self.flag = run.parent / f"{run.name}.hang"
        self.out = run.parent / f"{run.name}.out"
        self.weights = weights_directory("auto", run, run.name, 0)
        port = _three_ports()
        self.proxies = [Proxy(port, seed), Proxy(port + 1, seed + 1)]
        self._dial = ",".join(f"{proxy.target}={proxy.port}" for proxy in self.proxies)

        self._config = [
            *(f"experiment={experiment}", f"name={run.name}", f"run_dir={run.parent}", "resume=auto"),
            *(f"launch.port={port}", f"launch.lease={lease:g}", "launch.restarts=1000"),
            "observe.console=plain",
            *(DEMO if experiment == "calculator" else ()),
            *overrides,
        ]

        self.environment = (
            os.environ | SINGLE_THREAD | {"PYTHONPATH": str(ROOT), "CHAOS_HANG": str(self.flag)}
        )
        self.seen: set[psutil.Process] = set()  # all processes of it that there ever were

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait(60)
        for process in self.left(30):
            process.kill()
        for proxy in self.proxies:
            proxy.close()

    def command(self, *more: str) -> list[str]:
        return [sys.executable, str(LAUNCHER), self._dial, "train", *self._config, *more]

    def launch(self, *more: str) -> None:
        self.launcher = self.start(self.command(*more), self.out)

    def again(self, *more: str) -> tuple[int, str]:
        """Give the command once more; exit code and output."""
        out = self.out.with_suffix(".again")
        return self.start(self.command(*more), out).wait(120), out.read_text()

    def start(self, command: list[str], out: Path) -> subprocess.Popen[bytes]:
        with out.open("ab") as file:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment,
                process_group=0,  # Ctrl-C is for the tool, which then ends the run
            )

    # -- what there is ---------------------------------------------------------------------------------

    def roles(self) -> dict[str, psutil.Process]:
        """Live role processes by `role-index`."""
        processes = role_processes(self.launcher.pid)
        self.seen |= set(processes.values())
        return processes

    def process(self, role: str) -> psutil.Process:
        """Return a process of this role; wait while the process is being restarted."""
        self.until(lambda: self._of(role), f"a live {role}")
        return self.dice.choice(self._of(role))

    def _of(self, role: str) -> list[psutil.Process]:
        if role == "server":
            with suppress(psutil.NoSuchProcess):
                wrappers = [child for supervisor in self._of("engine") for child in supervisor.children()]
                return [server for wrapper in wrappers for server in wrapper.children()]
            return []
        return [process for name, process in sorted(self.roles().items()) if name.rpartition("-")[0] == role]

    @property
    def step(self) -> int:
        """Committed batches."""
        return max((int(row["training/step"]) for row in rows(self.run) if "timing_s/step" in row), default=0)

    def shift(self) -> str:
        """Return the current shift as the coordinator has logged it; empty in a run without shifts."""
        log = self.run / "logs" / "coordinator-0.log"
        return (["", *re.findall(r"shift: (\w+)", log.read_text())] if log.exists() else [""])[-1]

    def text(self) -> str:
        return self.out.read_text()

    def left(self, seconds: float) -> list[psutil.Process]:
        """Return the run's processes that are still there after so many seconds."""
        return list(psutil.wait_procs(self.seen, seconds)[1])

    def until(self, condition: Callable[[], object], description: str, pause: float = 0.02) -> None:
        """Wait for an event of the run; AssertionError with the output at its end, or the deadline."""
        end = time.monotonic() + self.deadline
        while not condition():
            assert self.launcher.poll() is None, f"ended before {description}:\n{self.text()[-3000:]}"
            assert time.monotonic() < end, f"no {description} in {self.deadline:g} s:\n{self.text()[-3000:]}"
            time.sleep(pause)


def _three_ports() -> int:
    """Return a free port whose two successors are free, too, below the ports that the kernel gives to
    programs."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        try:
            with ExitStack() as stack:
                for offset in range(3):
                    stack.enter_context(socket.create_server(("127.0.0.1", port + offset)))
            return port
        except OSError:
            continue
