"""Bugs are put into single lines of functions, and images are searched for the lines that they replace."""

from __future__ import annotations

import ast
import bz2
import gzip
import io
import json
import os
import py_compile
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from asyncrl.isolation.images import find_image
from asyncrl.isolation.sandbox.base import SandboxLimits
from asyncrl.isolation.sandbox.jail import Jail
from tests.fakes.images import small_image
from tools.swe_tasks.leaks import BaseImage, contents, leak
from tools.swe_tasks.mutations import mutations

TOOL = Path(__file__).resolve().parents[2] / "tools/make_swe_tasks.py"


@pytest.mark.parametrize(
    ("line", "kind", "after"),
    [
        ("if first < second: pass", "off by one", "if first <= second: pass"),
        ("if first < second: pass", "flipped comparison", "if first > second: pass"),
        ("if first not in second: pass", "flipped comparison", "if first in second: pass"),
        ("if (first) is None: pass", "flipped comparison", "if (first) is not None: pass"),
        ("total = first - second", "wrong operator", "total = first + second"),
        ("total //= first_part", "wrong operator", "total /= first_part"),
        ("return first and second", "wrong operator", "return first or second"),
        ("return first and second", "missing condition", "return first"),
        ("return first or second", "dropped return", "first or second"),
        ("while not finished: pass", "inverted condition", "while finished: pass"),
        ("if finished(first): pass", "inverted condition", "if not finished(first): pass"),
        ("flag_of_it = True", "wrong constant", "flag_of_it = False"),
        ("return first[10:]", "off by one", "return first[11:]"),
        ("return first[10:]", "off by one", "return first[9:]"),
        ("return first[10:]", "wrong slice", "return first[:]"),
        ("return divide(first, second)", "swapped arguments", "return divide(second, first)"),
        ("return first.lstrip('x')", "wrong function", "return first.rstrip('x')"),
        ("return max(first, 'é')", "wrong function", "return min(first, 'é')"),
        ("return ('é', first + 1)", "wrong operator", "return ('é', first - 1)"),
        ("raise ValueError(first)", "dropped statement", "pass"),
        ("first.clear_all()", "dropped statement", "pass"),
    ],
)
def test_a_line_gets_a_bug(line: str, kind: str, after: str) -> None:
    source = f"class Some:\n    def method(self, first):\n        {line}  # why\n\n\nx = 1   # untouched\n"
    found = [one for one in mutations(source.encode()) if one.kind == kind]
    assert after in [one.after.strip().removesuffix("  # why") for one in found]
    for one in found:
        lines = source.split("\n")
        assert (one.line, one.before, one.function) == (3, lines[2], "Some.method")
        lines[2] = one.after
        ast.parse("\n".join(lines))


@pytest.mark.parametrize(
    "source",
    [
        "def f(x: List[10] = 10):\n    'a text of 10 words'\n",  # headings and texts
        "def f():\n    first: Literal[10]\n",  # annotations
        "TABLE_OF_ALL = [1, 2, max(3, 4)]\n",  # no test is known to run it
        "def f():\n    return first(\n        second)\n",  # over more than a line
        "def f():\n    i = 1\n",  # in every program
    ],
)
def test_what_gets_none(source: str) -> None:
    assert [one for one in mutations(source.encode()) if one.kind != "dropped return"] == []


def test_a_line_of_an_image_is_found_however_it_is_packed(tmp_path: Path) -> None:
    (bug, *_) = mutations(b"def scaled(value):\n    return value * 37 if value else None\n")
    root = tmp_path / "root"
    root.mkdir()
    (root / "innocent.py").write_text(bug.after)
    (root / "link").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe")
    assert leak(contents(root), bug) == ""
    source = tmp_path / "module.py"
    source.write_text(f"def scaled(value):\n{bug.before}\n")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.write(source, "toy/module.py")
    for name, data in {
        "module.py": source.read_bytes(),
        "notes.diff": b"-" + source.read_bytes().split(b"\n")[1],
        "a.gz": gzip.compress(bz2.compress(source.read_bytes())),
        "toy.whl": archive.getvalue(),
        "module.pyc": Path(py_compile.compile(str(source), str(tmp_path / "c")) or "").read_bytes(),
    }.items():
        (root / name).write_bytes(data)
        assert leak(contents(root), bug).startswith(str(root / name)), name
        (root / name).unlink()


@pytest.mark.parametrize("packed", [False, True])
def test_the_history_of_a_repository_is_searched(tmp_path: Path, packed: bool) -> None:
    (bug, *_) = mutations(b"def scaled(value):\n    return value * 37 if value else None\n")
    name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    steps = [("init", "-q"), ("add", "-A"), (*name, "commit", "-qm", "one"), *[("repack", "-adq")] * packed]
    for words in steps:
        (tmp_path / "module.py").write_text(bug.before)
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "module.py").write_text(bug.after)
    assert leak(contents(tmp_path), bug) == str(tmp_path / ".git")


def test_an_image_below_is_searched_for_copies(tmp_path: Path) -> None:
    bugs = mutations(
        b"def scaled(value):\n    return value * 37\n\ndef other(value):\n    return value * 38\n"
    )
    (tmp_path / "lib/toy").mkdir(parents=True)
    (tmp_path / "lib/toy/__init__.py").write_text(bugs[0].before)
    (tmp_path / "lib/single.py").write_text("")
    below = BaseImage([str(tmp_path)])
    assert below.copy_of("toy") == "/lib/toy/__init__.py"
    assert below.copy_of("single") == "/lib/single.py"
    assert below.copy_of("other") == ""
    assert (below.has(bugs[0]), below.has(bugs[-1])) == (True, False)


TOY = {
    "toy/__init__.py": "from toy.numbers import average, clamped\n",
    "toy/numbers.py": """\
def clamped(value, low, high):
    if value < low:
        return low
    return high if value > high else value


def average(values):
    total = sum(float(value) for value in values)
    return total / len(values)


def unused(values):
    return max(values[10], 20)
""",
    "tests/__init__.py": "",
    "tests/data.txt": "1 2 6",
    "tests/test_numbers.py": """\
import pathlib, sys
import toy

def test_low():
    assert toy.clamped(1, 2, 3) == 2

def test_high():
    assert toy.clamped(4, 2, 3) == 3

def test_inside():
    assert toy.clamped(2, 1, 3) == 2

def test_average():
    assert toy.average(pathlib.Path(__file__).with_name("data.txt").read_text().split()) == 3

def test_that_depends_on_the_run():
    assert sys.gettrace() is None and toy.average([1]) == 1
""",
    "build/__pycache__/old.pyc": "",
}


def make_tasks(sdist: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), str(sdist), "--base", "python-pytest", "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
async def test_tasks_are_made_of_a_package(tmp_path: Path, images: Path) -> None:
    small_image(images, "python-pytest", python=True, packages=["pytest"])
    sdist = tmp_path / "toy-1.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in TOY.items():
            (tmp_path / "toy-1.0" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "toy-1.0" / name).write_text(text)
        archive.add(tmp_path / "toy-1.0", "toy-1.0")
    made = make_tasks(sdist, tmp_path / "one", "--count", "3", "--hold-out", "toy", "--prefix", "x")
    assert "3 tasks in" in made.stdout, made.stderr
    again = make_tasks(sdist, tmp_path / "two", "--count", "3", "--jobs", "1", "--prefix", "x")
    assert "3 tasks in" in again.stdout, again.stderr
    folders = sorted((tmp_path / "one/test").iterdir())
    assert [folder.name for folder in folders] == ["toy-001", "toy-002", "toy-003"]
    for folder in folders:
        for path in filter(Path.is_file, folder.rglob("*")):
            other = tmp_path / "two/train" / folder.name / path.relative_to(folder)
            assert path.read_bytes() == other.read_bytes(), path
        named = json.loads((folder / "tests/config.json").read_text())
        assert named["FAIL_TO_PASS"] and named["PASS_TO_PASS"]
        assert "test_that_depends" not in str(named) + (folder / "instruction.md").read_text()
        assert named["FAIL_TO_PASS"][0] in (folder / "instruction.md").read_text()
        image = find_image(tomllib.loads((folder / "task.toml").read_text())["environment"]["docker_image"])
        assert not any(path.endswith(".pyc") for path, _ in contents(image.root))
        for command, reward in (("true", "0"), (f"sh {folder}/solution/solve.sh", "1")):
            async with Jail(SandboxLimits(memory=1024), show=[str(folder)], image=image) as box:
                tests = f"cp -r {folder}/tests /tests && {command} && sh /tests/test.sh"
                ended = await box.run("shell", tests, 60)
                assert (await box.read_file("/logs/verifier/reward.txt")).decode().strip() == reward, ended
    (tmp_path / "toy-1.0/toy").rename(tmp_path / "toy-1.0/pluggy")  # as pytest brings it
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "toy-1.0", "toy-1.0")
    assert "the base image has a copy of pluggy: " in make_tasks(sdist, tmp_path / "three").stderr
