"""Starts processes on this machine, and defines processes as the supervisor sees them; `ray` starts processes
on others."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from asyncrl.isolation import wrapper
from asyncrl.isolation.child import wrapped_command
from asyncrl.launch.placement import PlannedProcess, Unit, process_environment
from asyncrl.observe.files import bound_log
from asyncrl.wire.sockets import Endpoints

# Exit codes of a role's process. Any other code, or a signal, is a crash.
COMPLETED = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
CRASHED = 70
# A trainer rank gave up a batch: with a smaller batch, or without the batch, the run may go on.
TRY_AGAIN = 75


@dataclass(frozen=True)
class ProcessSpec:
    """A request to start `process`. Ranks that start together share `incarnation` and `rendezvous`."""

    process: PlannedProcess
    incarnation: str
    rendezvous: str = ""


class ProcessHandle(Protocol):
    """A started process. `poll` returns None while the process runs, afterwards its exit code (negative: a
    signal)."""

    name: str

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


Spawn = Callable[[ProcessSpec], ProcessHandle]


def log_path(run_dir: Path, name: str) -> Path:
    return run_dir / "logs" / f"{name}.log"


class LocalProcess:
    """A role in a wrapper process, which kills all descendants when the role or the launcher has ended."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._process = process
        self._log_path = log

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs. Also bound the size of its log, as the
        supervisor polls often."""
        bound_log(self._log_path)
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Pass a signal on to the role."""
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.poll() is None:
            wrapper.kill(self._process.pid)


@contextmanager
def full_pipe(content: bytes) -> Iterator[int]:
    """Yield the end of a pipe from which a child reads this content, which must fit into a pipe (64 KiB)."""
    read_end, write_end = os.pipe()
    try:
        with os.fdopen(write_end, "wb") as file:
            file.write(content)
        yield read_end
    finally:
        os.close(read_end)


class LocalSpawner:
    """Starts roles as local processes. `config_dir`: the directory of their config.yaml, if not the run
    directory."""

    def __init__(self, run_dir: Path, endpoints: Endpoints, config_dir: Path | None = None) -> None:
        self._run_dir = run_dir
        self._endpoints = endpoints
        self._config_dir = config_dir or run_dir

    def __call__(self, process_spec: ProcessSpec) -> LocalProcess:
        """Start a process that appends its output to its log. The process has a session of its own, so that a
        Ctrl-C in the terminal reaches only the launcher, which stops all processes in order. On a signal to
        all processes of a job (Slurm's) workers leave, and all other roles wait for the launcher
        (`role.main`)."""
        log_file = log_path(self._run_dir, process_spec.process.name)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        role_endpoints = self._endpoints.for_role(process_spec.process.role)

        with log_file.open("ab") as log, full_pipe(msgspec.msgpack.encode(role_endpoints)) as endpoints_pipe:
            process = subprocess.Popen(
                wrapped_command(self._role_command(process_spec), grace_seconds=math.inf),
                stdin=endpoints_pipe,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._role_environment(process_spec),
                start_new_session=True,
            )

        return LocalProcess(process_spec.process.name, process, log_file)

    def _role_environment(self, process_spec: ProcessSpec) -> dict[str, str]:
        """Keep the working directory off the import path: `role.main` adds it behind Python's own modules."""
        return os.environ | process_environment(process_spec.process) | {"PYTHONSAFEPATH": "1"}

    def rendezvous(self, unit: Unit, incarnation: str) -> str:
        """Return the path of a new file where the ranks of one start meet; '' for a single process."""
        if len(unit.processes) == 1:
            return ""
        path = (self._run_dir / "rendezvous" / incarnation).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path)

    def _role_command(self, process_spec: ProcessSpec) -> list[str]:
        planned = process_spec.process
        return [
            *(sys.executable, "-m", "asyncrl.launch.role", planned.role),
            *("--index", str(planned.index)),
            *("--run-dir", str(self._config_dir)),
            *("--incarnation", process_spec.incarnation),
            *("--rendezvous", process_spec.rendezvous),
            *("--target", planned.target),
        ]
