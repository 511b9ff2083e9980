"""Real SGLang servers as processes: started, watched, stopped by pid."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil

from asyncrl.observe.files import log_tail
from asyncrl.wire.addresses import reserve_port

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "tools/sglang_cpu/launch.py"
ENVIRONMENT = ROOT / os.environ.get("ASYNCRL_SGLANG_ENV", ".venv-sglang")
PYTHON = ENVIRONMENT / "bin/python"
START_SECONDS = 240.0  # 32 of one core's: 107 measured for two at once beside other work
STOP_SECONDS = 60.0  # 3 alone
GONE_SECONDS = 60.0
# Streams carry what is new, a few tokens at a time: what the project asks of servers that it starts.
STREAMING = ("--incremental-streaming-output", "--stream-interval=2")


_libc = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def command(model: Path, port: int, *arguments: str) -> list[str]:
    paths = [str(PYTHON), str(LAUNCHER), "--model-path", str(model), "--port", str(port)]
    return [*paths, *STREAMING, *arguments]


class SGLangServer:
    """One server and all its processes. RuntimeError, with the end of its log, if it does not get ready."""

    def __init__(self, model: Path, log: Path, *arguments: str, wait: bool = True) -> None:
        self.log = log
        self.model = model
        self._port = reserve_port("127.0.0.1")
        port = int(self._port.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self._family: dict[int, psutil.Process] = {}
        self._started = time.monotonic()

        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command(model, port, *arguments),
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )

        if wait:
            self.wait_ready()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, seconds: float = START_SECONDS) -> float:
        """Until `/ready` says so; returns the seconds since the start. Leaves nothing behind on failure."""
        deadline = self._started + seconds
        while not self.ready():
            if not self.alive or time.monotonic() > deadline:
                code = self.process.poll()
                self.kill()
                problem = f"was not ready after {seconds:g} s" if code is None else f"ended with {code}"
                raise RuntimeError(f"server {self.url} {problem}; the end of {self.log}:\n{self.tail()}")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)  # an end wakes this call; readiness can only be polled

        self._port.close()
        self.processes()
        return time.monotonic() - self._started

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=20) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def tail(self) -> str:
        return log_tail(self.log, 25)

    def processes(self) -> list[psutil.Process]:
        """All of the server's processes seen so far that are still there, the first one first."""
        try:
            first = psutil.Process(self.pid)
            for process in (first, *first.children(recursive=True)):
                self._family.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass
        return [process for process in self._family.values() if _exists(process)]

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """SIGTERM to the first process, SIGKILL to whatever is left of them after that."""
        self.processes()
        if self.alive:
            self.process.terminate()
        self._reap(time.monotonic() + seconds)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the server."""
        self._port.close()
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._reap(time.monotonic() + GONE_SECONDS)

    def has_gone(self, seconds: float = GONE_SECONDS) -> bool:
        """Whether all its processes end by themselves within `seconds`."""
        self._reap(time.monotonic() + seconds)
        return not self.processes()

    def _reap(self, deadline: float) -> None:
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return
        psutil.wait_procs(self.processes(), max(0.0, deadline - time.monotonic()))


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exists(process: psutil.Process) -> bool:
    """A zombie that its parent has not buried yet counts as gone."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
