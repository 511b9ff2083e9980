"""Real runs of `asyncrl train` (or `sft`, `eval MODEL`) for the tests: small, with processes in view."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from asyncrl.observe.files import read_rows, read_summary
from asyncrl.weights.disk import weights_directory
from tests.fakes.audit import manifests, trained_uids
from tests.fakes.forked import Forked, asyncrl
from tests.fakes.processes import role_processes

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "buffer.groups_per_batch=4",
    "buffer.episodes_per_group=4",
    "rollout.slots=32",
    "validation.samples=8",
    "checkpoint.every=3",
    "launch.lease=4",
    "observe.console=plain",
]


class Run:
    """One launch. Use as a context: whatever is left at the end is killed, by pid."""

    def __init__(
        self,
        run_dir: Path,
        *overrides: str,
        name: str = "run",
        experiment: str = "calculator",
        command: str = "train",
        program: Sequence[str] = (),
    ) -> None:
        self.path = run_dir / name
        self.out = run_dir / f"{name}-{time.monotonic_ns()}.out"
        arguments = [*command.split(), f"experiment={experiment}", f"name={name}", f"run_dir={run_dir}"]
        self.process = self.start(program, [*arguments, *SMALL, *overrides])

    def start(self, program: Sequence[str], arguments: Sequence[str]) -> Forked | subprocess.Popen[bytes]:
        """Launcher and roles are forked with their imports done, unless Python is to run a `program`."""
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        if not program:
            return asyncrl(arguments, self.out, ROOT, variables)
        command = [sys.executable, *program, *arguments]
        with self.out.open("wb") as out:
            return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=variables)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        children = self.children()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        for child in children.values():
            if child.is_running():
                child.kill()
        shutil.rmtree(weights_directory("auto", self.path, self.path.name, 0), ignore_errors=True)

    def wait(self, seconds: float = 240.0) -> int:
        """Exit code; the output is in the error when it takes too long."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"not over after {seconds} s:\n{self.text()[-3000:]}\n{self.logs()}"
            ) from None

    def until(self, condition: Callable[[], object], description: str, seconds: float = 240.0) -> None:
        """Wait for an event of the run, with a deadline."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, (
                f"ended before {description}:\n{self.text()[-3000:]}\n{self.logs()}"
            )
            assert time.monotonic() < deadline, (
                f"no {description} within {seconds} s:\n{self.text()[-3000:]}\n{self.logs()}"
            )
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step >= step, f"step {step}")

    @property
    def step(self) -> int:
        return max((int(row["training/step"]) for row in self.rows() if "timing_s/step" in row), default=0)

    def children(self) -> dict[str, psutil.Process]:
        """Role processes by `role-index`."""
        return role_processes(self.process.pid)

    def kill(self, name: str) -> None:
        """kill -9 a role."""
        os.kill(self.children()[name].pid, signal.SIGKILL)

    def text(self) -> str:
        return self.out.read_text()

    def logs(self) -> str:
        logs = sorted((self.path / "logs").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def rows(self) -> list[dict[str, float]]:
        return read_rows(self.path)

    def summary(self) -> dict[str, Any]:
        run_summary = read_summary(self.path)
        assert run_summary, f"no summary:\n{self.text()[-3000:]}\n{self.logs()}"
        return run_summary

    def completed(self, steps: int, *, honest_engine: bool = True) -> dict[str, Any]:
        """The summary of a run that must have completed with everything accounted for. `honest_engine`: the
        engine's log-probs are real, so that no mismatch may be reported."""
        code = self.wait()
        summary = self.summary()
        assert code == 0, f"{self.text()[-3000:]}\n{self.logs()}"
        assert summary["outcome"] == "completed" and summary["steps"] == steps
        assert summary["conserved"], summary["flow"]
        flow = summary["flow"]
        assert flow["taken"] == flow["ready"] == flow["in_flight"] == 0
        if honest_engine:
            assert self.rows()[-1]["weights/mismatches"] == 0, "an honest engine was called a liar"
        assert "was left open" not in self.logs(), "a process waited for a socket that it had not closed"
        return summary


def is_forked(run: Run, role: str) -> bool:
    """False: it comes from no forker, and its imports are made anew."""
    return len(run.children()[role].parents()) - len(psutil.Process(run.process.pid).parents()) == 3


def once(run: Path, steps: int, trained: int = 0) -> None:
    """No trajectory is in two batches; the last checkpoint counts as many as the batches held."""
    assert max(trained_uids(run).values(), default=1) == 1
    last = max(manifests(run), key=lambda manifest: manifest.step)
    assert last.step == steps and last.trained_total == (trained or steps * 16)
    assert len(set(last.trained)) == len(last.trained)


# In place of `-m asyncrl.cli`: the launcher writes down the secret keys that it makes.
TELLING = """
import sys
from pathlib import Path
from asyncrl.wire import sockets
make, place = sockets.new_key_pair, Path(sys.argv.pop(1))

def told():
    key = make()
    with place.open("a") as file:
        print(key.secret, file=file)
    return key

sockets.new_key_pair = told
from asyncrl.cli import main
sys.exit(main())
"""


def leaks(run: Run, secrets: Sequence[str]) -> Iterator[str]:
    """Where one of these can be read: arguments and variables of the run's processes, and all its files."""
    files = [run.out, *(path for path in run.path.rglob("*") if path.is_file())]
    running = run.process.poll() is None
    for process in psutil.Process(run.process.pid).children(recursive=True) if running else []:
        files += [Path(f"/proc/{process.pid}/{name}") for name in ("cmdline", "environ")]
    assert len(files) > 10
    for file in files:
        with suppress(OSError):  # of a process that has just ended
            content = file.read_bytes()
            yield from (str(file) for secret in secrets if secret.encode() in content)
