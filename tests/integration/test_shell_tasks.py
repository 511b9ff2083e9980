"""The shell's tasks: made from nothing, solved by what reads and by nothing else, and a model begins to learn
them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.data.harbor import read_tasks
from asyncrl.observe.metrics import REWARD
from tests.fakes.scripts import bench_script
from tests.integration.runs import ROOT, Run
from tests.integration.test_cheats import Bench, scores, written


def make_tasks(path: Path, train: int, test: int) -> Path:
    command = [sys.executable, str(ROOT / "tools/make_shell_tasks.py"), f"--out={path}"]
    counts = [f"--train={train}", f"--test={test}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *counts], env=environment, check=True, capture_output=True)
    return path


def test_only_what_reads_and_edits_the_right_line_solves_them(tmp_path: Path, images: Path) -> None:
    bench = bench_script("shell_policies")
    folders = list(read_tasks(make_tasks(tmp_path, 1, 3) / "test"))
    lines = {name: share for name, share, *_ in asyncio.run(bench.run(folders))}
    assert lines.pop("reads both and edits the line").startswith("100.0%")
    every_line = lines.pop("reads both and edits every line")
    assert lines.keys() == {"edits the test", "ignores replies"}
    assert all(share.startswith("0.0%") for share in lines.values()), lines
    assert every_line.startswith(("33.3%", "66.7%"))


FORGE = 'echo "$report" > /logs/verifier/report.xml'
CODE = {
    "ends its shell": "exit 0",
    "reads what is expected": "for name in $names; do\n"
    'eval "$name() { sed -n s/^$name.//p /tests/expected; }"; done',
    "writes the report": FORGE,
    "writes the report later": f"(while :; do {FORGE}; done) >/dev/null 2>&1 </dev/null &",
    "writes the report and ends the test": f"{FORGE}; kill -9 $PPID",
}
"""What the code under test does."""
FILES = {
    "the test": "echo 'exit 0' > test.sh",
    "programs": "for name in sh cat sed rm mkdir env grep; do echo 'exit 0' > $name; chmod +x $name; done",
    "files of shells": "for name in .profile .env .shrc .bashrc; do echo 'exit 0' > $name; done",
}


async def test_cheats_solve_none(tmp_path: Path, images: Path) -> None:
    (folder,) = read_tasks(make_tasks(tmp_path, 1, 1) / "train")
    package = Path(folder.task.directory).name
    functions = [name.partition("::")[2] for name in folder.tests.named]
    cases = "".join(f"<testcase classname='{package}' name='{function}'/>" for function in functions)
    variables = f"names='{' '.join(functions)}'\nreport=\"<a>{cases}</a>\"\n"
    code = {name: written(f"{package}.sh", variables + text) for name, text in CODE.items()}
    solution = {"the solution": (folder.path / "solution/solve.sh").read_text()}
    verdicts = await Bench(folder.task, folder.tests).all(solution | code | FILES)
    assert scores(verdicts) == {"the solution": 1.0} | dict.fromkeys(code | FILES, 0.0), verdicts


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_model_begins_to_learn_them(tmp_path: Path, images: Path) -> None:
    tasks = make_tasks(tmp_path / "tasks", 64, 8)
    data = (f"data.train={tasks}/train/", f"data.test={tasks}/test/", "validation.samples=0")
    batch = ("buffer.groups_per_batch=8", "buffer.episodes_per_group=8", "rollout.slots=64")
    with Run(tmp_path, *data, *batch, "total_steps=16", experiment="shell_tasks") as run:
        run.wait(800)
        summary = run.completed(16)
        rewards = [row[REWARD] for row in run.rows() if REWARD in row]
    assert not {*summary["reasons"]} - {"dropped/end_of_data"}, "every attempt ended as it should"
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15, rewards
