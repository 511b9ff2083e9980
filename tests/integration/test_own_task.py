"""The commands of docs/start/own_task.md work in a copy of examples/own_task. In `make full` their runs have
one step; in `make long` the commands are those of the page, and the model learns."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.observe.files import read_rows
from tests.fakes.forked import asyncrl

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/start/own_task.md").read_text()
COPY = ["cp -r examples/own_task inventory", "cd inventory"]
SMALL = {
    "train": ["total_steps=1", "validation.samples=0", "buffer.groups_per_batch=1"],
    "sft": ["total_steps=1", "validation.samples=0", "buffer.groups_per_batch=1"],
    "eval": ["samples=2", "episodes=2"],
}  # overrides of each command, so that it takes seconds
VARIABLES = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
}


def commands() -> list[str]:
    """The lines of the page's blocks of commands, those that end with a backslash joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    assert lines[: len(COPY)] == COPY
    return lines[len(COPY) :]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The copy that the page's first commands make."""
    return shutil.copytree(ROOT / "examples/own_task", tmp_path / "inventory")


def run_small(command: str, folder: Path) -> None:
    """Run a command of the page. Runs have one step."""
    words = shlex.split(command, comments=True)
    if words[0] != "asyncrl":
        subprocess.run(["bash", "-euc", command], cwd=folder, env=VARIABLES, check=True, timeout=60)
        return

    arguments = [re.sub(r"step-\d+", "step-1", word) for word in words[1:]]
    arguments += SMALL.get(arguments[0], [])
    out = folder.parent / "out"
    process = asyncrl(arguments, out, folder, VARIABLES)
    try:
        assert process.wait(300) == 0, f"{command}\n{out.read_text()[-3000:]}"
    finally:
        process.kill()


def test_the_task_trains_from_its_warm_start(folder: Path) -> None:
    """A part of the next test, for each change."""
    for command in commands():
        if re.match(r"python|head|asyncrl tools|.* name=(warm|learned)\b", command):
            run_small(command, folder)
    assert (folder / "runs/learned/checkpoints/step-1/hf").is_dir()


@pytest.mark.full
def test_each_command_works_with_one_step(folder: Path) -> None:
    for command in commands():
        run_small(command, folder)


def success_of_validations(run: Path) -> list[float]:
    """The held-out success of sampled answers, for each validation of a run."""
    name = "val-core/all/sampled/success"
    return [row[name] for row in read_rows(run) if name in row]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_model_learns_as_the_page_says(folder: Path) -> None:
    for command in commands():
        subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=VARIABLES, check=True)

    runs = folder / "runs"
    assert success_of_validations(runs / "cold")[-1] == 0.0
    assert success_of_validations(runs / "fast")[-1] < 0.02
    first, *_, last = success_of_validations(runs / "learned")
    assert first < 0.5 and last > first + 0.2
