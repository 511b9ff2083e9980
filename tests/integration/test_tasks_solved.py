"""A scripted policy solves a known half of some tasks, by a shell and by coding agents as people run them: by
the tests of the tasks it earns 0.50, exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asyncrl.data.harbor import read_tasks
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.rewards.loading import load_rewards
from asyncrl.rollout.episode_run import EpisodeRun
from asyncrl.rollout.episode_runner import Player
from asyncrl.rollout.turn_player import TurnPlayer
from asyncrl.tools import Toolbox, load_tools
from asyncrl.types import Message, Sample
from tests.fakes import episodes
from tests.fakes.chat import call, read
from tests.fakes.episodes import Bench
from tests.fakes.images import small_image
from tests.fakes.tasks import bare_image, task_folder
from tests.integration.test_harnesses import CLIENTS, bench_of

OPERATORS = {"add": "+", "sub": "-", "mul": "*", "power": "**"}
WRONG = "//"
LIBRARIES = ("librt.so.1", "libpthread.so.0", "libdl.so.2", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6")
"""Parts of any Debian that coding agents need."""
TEST = """\
cd /repo
python3 -I -c "import pytest, sys; sys.path.append('/repo'); sys.exit(pytest.main())" \\
    -q -c /tests/pytest.ini --rootdir /tests --junitxml=/logs/verifier/report.xml /tests/test_hidden.py
"""
PYTEST_INI = "[pytest]\nxfail_strict = true\naddopts = -p no:cacheprovider --import-mode=importlib\n"


@pytest.fixture(autouse=True)
def time_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "SECONDS", 200.0)


def tasks(path: Path, images: Path, count: int, libraries: Sequence[str] = ()) -> list[Sample]:
    """Make tasks, each with an image over one that they share, in which a function is wrong. `libraries`: of
    this machine, that the images have, too."""
    small_image(images, "small-python", python=True, packages=("pytest",))
    for name, sign in list(OPERATORS.items())[:count]:
        root = Path(bare_image(images, f"repo-{name}", "repo", over="small-python", directory="/repo").root)
        for library in libraries:
            (library_file,) = Path("/usr/lib").glob(f"*-linux-gnu/{library}")
            (root / library_file.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
            shutil.copy(library_file, root / library_file.relative_to("/"))
        (root / "repo/calc.py").write_text(f"def {name}(a, b):\n    return a {WRONG} b\n")
        folder = task_folder(
            path / name,
            f'[environment]\ndocker_image = "repo-{name}"\n',
            instruction=f"The function {name} of calc.py is wrong. Correct it.",
            test=TEST,
            config={"FAIL_TO_PASS": ["test_hidden.py::test_it"]},
        )
        (folder / "tests/pytest.ini").write_text(PYTEST_INI)
        code = f"from calc import {name}\n\ndef test_it():\n    assert {name}(7, 3) == 7 {sign} 3\n"
        (folder / "tests/test_hidden.py").write_text(code)
    rows = [folder.row for folder in read_tasks(path)]
    return [
        Sample(
            number,
            row["data_source"],
            (Message("user", row["prompt"]),),
            json.dumps(row["ground_truth"]),
            extra_info_json=json.dumps(row["extra_info"]),
        )
        for number, row in enumerate(rows)
    ]


def solves_half(runs: Callable[[str], str], end: str) -> Callable[[str], str]:
    """Look, then correct the functions whose names sort first; leave the others wrong."""
    half = sorted(OPERATORS)[: len(OPERATORS) // 2]

    def script(prompt: str) -> str:
        if "CHANGED" in prompt.replace("echo CHANGED", ""):
            return end
        if "return a //" not in prompt:
            return "I look. " + runs("cat calc.py")
        name = next(name for name in OPERATORS if f"def {name}(" in prompt)
        sign = OPERATORS[name] if name in half else "%"
        return "I change it. " + runs(f"sed -i 's,{WRONG},{sign},' calc.py; echo CHANGED")

    return script


class ShellBench(Bench):
    def __init__(self, sample: Sample) -> None:
        script = solves_half(lambda line: call("shell", json.dumps({"command": line})), "done")
        super().__init__(lambda request: script(read(request.ids)), lambda **_: 0.0)
        self.sample = sample

    def player(self, run: EpisodeRun) -> Player:
        return TurnPlayer(run, Toolbox(load_tools(["shell"], {}), 30.0))


def scores(benches: list[Bench]) -> list[float]:
    """Play them one after the other, judged by the tests of their tasks."""
    for bench in benches:
        bench.context.reward = EpisodeReward(load_rewards("tests"), 60.0)
    return [bench.finished().result.score for bench in benches]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.full)])
def test_half_of_the_tasks_are_solved_by_a_shell(tmp_path: Path, images: Path, count: int) -> None:
    task_scores = scores([ShellBench(sample) for sample in tasks(tmp_path, images, count)])
    assert sum(task_scores) / len(task_scores) == 0.5
    assert set(task_scores) == {0.0, 1.0}


@pytest.mark.full
@pytest.mark.parametrize("name", ["claude_code", "mini_swe_agent"])
def test_half_of_the_tasks_are_solved_by_a_coding_agent(tmp_path: Path, images: Path, name: str) -> None:
    client = CLIENTS[name]
    benches = list[Bench]()
    for sample in tasks(tmp_path, images, 4, LIBRARIES):
        bench = bench_of(name, solves_half(client.runs, client.end), memory_mb=1024)
        bench.sample = sample
        benches.append(bench)
    assert scores(benches) == [1.0, 1.0, 0.0, 0.0]
