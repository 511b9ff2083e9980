"""Bad input through the real command line: exit code 2, one line that helps, nothing started. What each check
finds: tests/unit/launch/test_checks.py."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from asyncrl import cli
from tests.fakes.checked import Given
from tests.fakes.forked import FORKED

ROOT = Path(__file__).resolve().parents[2]
MARK = "ASYNCRL_TEST_MARK"


def train(
    folder: Path, *arguments: str, cwd: Path = ROOT, command: str = "train"
) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """`asyncrl train`, and what it left running; in a fork of a process that has the imports behind it, which
    are most of a refusal's time."""
    arguments = (command, *arguments)
    mark = uuid.uuid4().hex
    files = (folder / "stdout", folder / "stderr")
    process = FORKED.Process(target=_run, args=(arguments, mark, files, cwd))
    process.start()
    process.join(240)
    assert process.exitcode is not None, "it did not end"
    out, err = (file.read_text() for file in files)
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err), left_by(mark)


def _run(arguments: tuple[str, ...], mark: str, files: tuple[Path, Path], cwd: Path) -> NoReturn:
    os.environ[MARK] = mark
    os.chdir(cwd)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.exit(cli.main(list(arguments)))


def left_by(mark: str) -> list[int]:
    return [p.pid for p in psutil.process_iter() if _environment(p).get(MARK) == mark]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def refused(given: Given, says: str, *overrides: str) -> None:
    done, left = train(given.folder, *given.overrides, *overrides)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and lines[0].startswith("asyncrl: "), done.stderr
    assert says in lines[0] and "Traceback" not in done.stdout + done.stderr
    assert not left and not (given.runs / "x" / "logs").exists()


def begun(given: Given) -> None:
    (given.runs / "x").mkdir(parents=True)
    (given.runs / "x" / "config.yaml").write_text("{}")


def raising_reward(given: Given) -> None:
    (given.folder / "reward.py").write_text("raise RuntimeError('import fails')")
    given.keys["rollout.reward"] = f"{given.folder}/reward.py:f"


def no_run(given: Given) -> None: ...


CASES: dict[str, tuple[Callable[[Given], object], str, str]] = {
    "unknown key": (no_run, "trainer.lrr=1", "unknown key trainer.lrr; did you mean"),
    "no configuration directory": (no_run, "--config-dir=nowhere", "nowhere"),
    "existing run": (begun, "", "resume=auto"),
    "no such place": (no_run, "run_dir=/proc/asyncrl", "run_dir"),
    "unwritable run directory": (lambda given: given.runs.write_text("a file"), "", "run_dir"),
    "no model": (no_run, "model.path=nowhere", "nowhere"),
    "raising reward": (raising_reward, "", "import fails"),
    "less than a batch": (no_run, "buffer.groups_per_batch=5", "too few samples (4)"),
    "no Ray cluster": (
        no_run,
        "launch.ray_address=auto",
        "launch.ray_address: cannot connect to a Ray cluster at 'auto'",
    ),
    "nobody at the Ray address": (no_run, "launch.ray_address='127.0.0.1:9'", "Ray cluster at '127.0.0.1:9'"),
    "no Ray address": (no_run, "launch.ray_address=nonsense", "Ray cluster at 'nonsense'"),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_in_one_line(given: Given, case: str) -> None:
    spoil, override, says = CASES[case]
    spoil(given)
    refused(given, says, *filter(None, [override, "launch=ray" * ("Ray" in case)]))


def test_a_port_in_use(given: Given) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        refused(given, "launch.port=0", f"launch.port={listener.getsockname()[1]}")


def test_a_run_in_use(given: Given) -> None:
    run = given.runs / "x"
    run.mkdir(parents=True)
    with (run / "lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(given, "4711")


def test_a_dry_run_starts_nothing_and_writes_nothing(given: Given) -> None:
    done, left = train(given.folder, *given.overrides, "--dry-run", "rollout.workers=2", cwd=given.folder)
    assert done.returncode == 0 and not left and not given.runs.exists()
    assert "max_staleness" not in done.stdout, "a default"
    assert any(line.split()[:3] == ["rollout", "2", "1"] for line in done.stdout.splitlines())


def test_the_doctor_of_good_input_starts_nothing_and_writes_nothing(given: Given) -> None:
    done, left = train(given.folder, *given.overrides, cwd=given.folder, command="doctor")
    assert done.returncode == 0 and not left and not given.runs.exists(), done.stdout
