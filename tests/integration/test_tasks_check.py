"""`asyncrl tasks check`: which tasks can be trained on, and why the others cannot."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main
from tests.fakes.images import small_image
from tests.fakes.tasks import SOLVE, TEST, bare_image, task_folder

TOML = '[environment]\ndocker_image = "{}"\nworkdir = "/app"\n[solution]\nenv = {{ANSWER = "42"}}\n'
TRIES = "(exec 3<>/dev/tcp/192.0.2.1/80) 2>/dev/null\n"  # bash's
NAMED = {"FAIL_TO_PASS": ["t.py::test_answer"], "PASS_TO_PASS": ["t.py::test_old"]}
REPORT = """#!/bin/sh
[ "$(cat answer.txt)" = 42 ] || red='<failure/>'
echo "<a><testcase classname='t' name='test_answer'>$red</testcase>" > /logs/verifier/report.xml
echo "<testcase classname='t' name='{}'/></a>" >> /logs/verifier/report.xml
"""
RANDOM = (
    "read id < /proc/sys/kernel/random/uuid; echo 0.$(echo $id | tr -dc 0-9) > /logs/verifier/reward.txt\n"
)
TASKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a-good": ({"solve": "#!/bin/sh\necho $ANSWER > answer.txt\n"}, []),
    "b-named": ({"test": REPORT.format("test_old"), "config": NAMED}, []),
    "c-lost": (
        {"test": REPORT.format("test_new"), "config": NAMED},
        [
            *("untouched: stay_green is 0, not 1", "solved: score is 0, not 1"),
            *("solved: stay_green is 0, not 1", r"1 broken: t\.py::test_old"),
        ],
    ),
    "d-easy": ({"test": "echo 1 > /logs/verifier/reward.txt\n"}, ["untouched: score is 1, not 0"]),
    "e-wrong": ({"solve": "#!/bin/sh\necho 41 > answer.txt\n"}, ["solved: score is 0, not 1"]),
    "f-fails": (
        {"solve": f"{SOLVE}echo no such thing >&2; exit 3\n"},
        [r"solve.sh did not succeed \(failed, exit status 3\): no such thing"],
    ),
    "g-silent": ({"test": "exit 0\n"}, ["untouched: task g-silent fails even without changes: no verdict"]),
    "h-tries": ({"test": f"#!/bin/bash\n{TRIES}{TEST}", "solve": f"#!/bin/bash\n{TRIES}{SOLVE}"}, []),
    "i-unsolved": ({"solve": ""}, [r"solved: solution/solve\.sh is missing"]),
    "j-shown": ({}, ["agents can see /solution"]),
}


@pytest.fixture
def tasks(images: Path, tmp_path: Path) -> Path:
    small_image(images)
    bare_image(images, "small-app", "app", over="small")
    bare_image(images, "shown-app", "app", "solution", over="small")
    for name, (texts, _) in TASKS.items():
        task_folder(tmp_path / name, TOML.format("shown-app" if name == "j-shown" else "small-app"), **texts)
    return tmp_path


def test_each_task_has_its_faults(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", str(tasks), "--json", "--jobs", "2"]) == 1
    trials_by_task = {trial["task"]: trial for trial in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(trials_by_task) == list(TASKS)
    for name, (_, expected) in TASKS.items():
        assert len(trials_by_task[name]["faults"]) == len(expected), trials_by_task[name]
        for said, pattern in zip(trials_by_task[name]["faults"], expected, strict=True):
            assert re.search(pattern, said), said
    good = trials_by_task["a-good"]
    assert (good["untouched"], good["solved"], good["network"]) == ([0], [1], [])
    assert 0 < good["tests_seconds"] < 10 and 0 < good["solution_seconds"] < 10
    assert {name for name, one in trials_by_task.items() if one["network"]} == {"h-tries"}
    assert sorted(trials_by_task["h-tries"]["network"]) == ["solution", "tests"]


NOISE = "printf '\\033[31m\\033]0;title\\a\\b\\rred\\177\\302\\233A\\377\\342\\200\\250last\\n'"
"""Colours, the title of a window, control characters of one byte and of two, no UTF-8, a line separator."""
NOISY = {
    "tests": {"test": f"{NOISE}\n"},
    "a solution": {"solve": f"#!/bin/sh\n{NOISE}; {NOISE} >&2; exit 3\n"},
    "named tests": {"test": REPORT.format("x"), "config": {"FAIL_TO_PASS": ["t.py::test[\x1b[31mred\x9b]"]}},
    "a name": {"toml": f'[task]\nname = "\\u001B[31mred"\n{TOML.format("small-app")}', "solve": ""},
}


@pytest.mark.parametrize("noisy", NOISY)
def test_no_control_character_reaches_the_terminal(
    tasks: Path, noisy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = {"toml": TOML.format("small-app")} | NOISY[noisy]
    folder = task_folder(tasks / "noisy", **texts)
    for words in ([], ["--json"]):
        assert main(["tasks", "check", str(folder), *words]) == 1
        printed = "".join(capfd.readouterr())
        assert "red" in printed and "[31m" in printed
        assert re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", printed) is None, repr(printed)
        assert all(map(json.loads, printed.splitlines())) if words else True


def test_tasks_without_named_tests_are_warned_of(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*TASKS,):
        if name not in ("a-good", "b-named"):
            shutil.rmtree(tasks / name)
    assert main(["tasks", "check", str(tasks)]) == 0
    *_, good, named, end, warning = capsys.readouterr().out.splitlines()
    assert (good.split()[6:], named.split()[6:]) == (["ok,", "with", "a", "warning"], ["ok"])
    assert end == "2 of 2 tasks passed"
    assert warning.startswith(
        "warning: 1 of 2 tasks name no tests (a-good): their score is whatever test.sh reports"
    )
    assert "name the tests in tests/config.json" in warning

    assert main(["tasks", "check", str(tasks), "--json"]) == 0
    good, named = map(json.loads, capsys.readouterr().out.splitlines())
    assert good["faults"] == named["faults"] == named["warnings"] == []
    assert len(good["warnings"]) == 1 and "the task names no tests: " in good["warnings"][0]


def test_tests_that_run_twice_are_found_flaky(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flaky = task_folder(tasks / "flaky", TOML.format("small-app"), test=RANDOM)
    assert main(["tasks", "check", str(flaky), "--json", "--repeats", "2"]) == 1
    trial = json.loads(capsys.readouterr().out)
    assert len({*trial["untouched"]}) == 2
    for fault, what in zip(trial["faults"], ("untouched", "solved"), strict=True):
        assert re.match(f"flaky, {what}: score is [\\d.e-]+ and [\\d.e-]+, not", fault)


def test_a_table_is_for_people(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", str(tasks / "b-named")]) == 0
    header, line, end = capsys.readouterr().out.splitlines()
    assert header.split() == ["task", "untouched", "solved", "solution", "s", "tests", "s", "network"]
    assert line.split()[:3] == ["b-named", "0", "1"] and line.split()[5:] == ["-", "ok"]
    assert end == "1 of 1 tasks passed"
    assert main(["tasks", "check", str(tasks / "none")]) == 2
    assert "none: no such directory; correct the path" in capsys.readouterr().err
