"""Bugs are put into single lines of functions, and images are searched for the lines that they replace."""

from __future__ import annotations

import ast
import asyncio
import bz2
import gzip
import io
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.isolation.images import find_image
from asyncrl.isolation.sandbox.base import SandboxLimits
from asyncrl.isolation.sandbox.jail import Jail
from tests.fakes.images import small_image
from tests.fakes.scripts import script
from tests.fakes.tasks import bare_image
from tools.swe_tasks.leaks import BaseImage, contents, leak
from tools.swe_tasks.mutations import mutations
from tools.swe_tasks.packages import (
    Package,
    PackageError,
    candidates,
    installed_copies,
    learn,
    try_bug,
    unpack,
)

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
    mutations_of_kind = [one for one in mutations(source.encode()) if one.kind == kind]
    assert after in [one.after.strip().removesuffix("  # why") for one in mutations_of_kind]
    for one in mutations_of_kind:
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


def test_an_image_below_is_searched_for_lines(tmp_path: Path) -> None:
    bugs = mutations(
        b"def scaled(value):\n    return value * 37\n\ndef other(value):\n    return value * 38\n"
    )
    (tmp_path / "lib/toy").mkdir(parents=True)
    (tmp_path / "lib/toy/__init__.py").write_text(bugs[0].before)
    below = BaseImage([str(tmp_path)])
    assert (below.has_mutation(bugs[0]), below.has_mutation(bugs[-1])) == (True, False)


def tree_of(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def sdist_of(path: Path, files: dict[str, str], kind: str = "gztar") -> Path:
    """Pack files as the source distribution of `path`, such as DIRECTORY/toy-1.0."""
    tree_of(path, files)
    return Path(shutil.make_archive(str(path), kind, path.parent, path.name))


async def test_a_copy_is_what_the_images_python_imports(images: Path) -> None:
    small_image(images, "python-pytest", python=True, packages=["pytest"])
    site = f"usr/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    root = bare_image(images, "installed", site, "opt/vendored/toy", over="python-pytest").root
    places = ("single.py", "toy.py.txt", "space/inner/__init__.py", "data/utils.py", "bin/tool.py")
    tree_of(Path(root), {f"{site}/{place}": "" for place in places})
    tree_of(Path(root), {"opt/vendored/toy/__init__.py": "", f"{site}/more.pth": "/opt/linked\n"})
    tree_of(Path(root), {"opt/linked/linked.py": ""})

    installed = [
        "pluggy",
        "json",
        "_struct",
        "sys",
        "single",
        "space.inner",
        "linked",
    ]  # _struct: by the machine
    others = ["parse", "decoder", "utils", "toy", "space", "space.other", "bin", "data", "gone.inner", "text"]
    copies = await installed_copies(find_image("installed"), [*installed, *others])
    assert list(copies) == installed
    assert copies["single"] == f"/{site}/single.py"


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        (("toy/__init__.py", "toy/inner/__init__.py", "docs/__init__.py", "setup.py"), ["toy"]),
        (("src/toy/__init__.py", "src/single.py", "tests/__init__.py"), ["toy", "single"]),
        (("space/toy/__init__.py", "space/more/__init__.py"), ["space.more", "space.toy"]),
        (("single.py", "test_single.py", "conftest.py", "a-script.py"), ["single"]),
    ],
)
def test_what_a_package_installs(tmp_path: Path, files: tuple[str, ...], modules: list[str]) -> None:
    package = Package("toy-1.0", tree_of(tmp_path, dict.fromkeys(files, "")), tmp_path / "tests")
    assert sorted(package.modules) == sorted(modules)


def test_what_solutions_may_change(tmp_path: Path) -> None:
    places = ("toy/__init__.py", "toy/checks/test_it.py", "toy.cfg", "helpers.py", "notes.md", "src/other.py")
    package = Package("toy-1.0", tree_of(tmp_path, dict.fromkeys(places, "")), tmp_path / "tests")
    imported = {f"/testbed/{root}{name}" for root in ("", "src/") for name in ("helpers", "helpers.*")}
    others = {f"/testbed/{name}" for name in ("toy/checks", "toy.cfg", "helpers.py", "notes.md")}
    in_src = {
        f"/testbed/{name}" for name in ("src", "src/other.py", "other", "other.*", "src/other", "src/other.*")
    }
    assert {*package.protected("toy/__init__.py")} == imported | others | in_src
    assert "/testbed/src" not in package.protected("src/other.py")


@pytest.mark.parametrize("kind", ["gztar", "xztar", "zip"])
def test_a_package_without_tests_is_an_error_that_lists_what_was_looked_for(
    tmp_path: Path, kind: str
) -> None:
    sdist = sdist_of(tmp_path / "toy-1.0", {"toy/__init__.py": "", "toy/testing.py": ""}, kind)
    with pytest.raises(
        PackageError, match=r"toy-1\.0 has no tests: none of its files is named test_\*\.py, \*_t"
    ):
        unpack(str(sdist), tmp_path / "scratch")
    sdist.write_bytes(sdist.read_bytes()[:40])
    with pytest.raises(PackageError, match=rf"{sdist.name} cannot be unpacked: "):
        unpack(str(sdist), tmp_path / "more")


HIDDEN = {
    "toy/__init__.py": "STATE = []\ndef clamped(value, high):\n    return high if value > high else value\n",
    "tests/test_first.py": "import toy\n\ndef test_other_file():\n    toy.STATE.append(1)\n",
    "tests/test_toy.py": """\
import os
import toy
AT_IMPORT = toy.clamped(5, 3)  # runs the line, but no test is seen to do so

def test_high():
    assert toy.clamped(4, 3) == 3

def test_inside():
    assert toy.clamped(3, 3) == 3

def test_at_import():
    assert AT_IMPORT == 3

def test_order_of_a_set():
    assert AT_IMPORT == 3 or os.environ["PYTHONHASHSEED"] == "0"

def test_after_the_other_file():
    assert toy.STATE

def test_without_the_line():
    assert toy.__name__ == "toy"
""",
}


async def test_tests_that_must_stay_green_have_run_with_the_bug(images: Path, tmp_path: Path) -> None:
    """Not those that fail with the bug though no line of theirs is changed, fail with another hash seed, or
    need tests that are not named."""
    image = small_image(images, "python-pytest", python=True, packages=["pytest"])
    os.chmod(tmp_path, 0o755)  # for the user of the sandbox
    package = unpack(str(sdist_of(tmp_path / "toy-1.0", HIDDEN)), tmp_path / "scratch")
    await learn(image, package)
    named = [test.partition("::")[2] for test in package.covering["toy/__init__.py", 3]]
    assert named == ["test_high", "test_inside"]
    (mutation,) = (one for _, one in candidates(package, 0) if "value < high" in one.after)
    bug = await try_bug(image, package, "toy/__init__.py", mutation)
    assert bug is not None
    assert {test.partition("::")[2] for test in bug.messages} == {"test_high", "test_at_import"}
    assert {test.partition("::")[2] for test in bug.stay_green} == {"test_inside", "test_without_the_line"}


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


async def test_after_an_error_no_other_bug_is_tried() -> None:
    tool = script("make_swe_tasks")
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def fails() -> None:
        raise PackageError("no sandbox")

    with pytest.raises(PackageError, match="no sandbox"):
        await asyncio.wait_for(tool.all_or_none([waits(), fails()]), 10)
    assert ended == ["waits"]


def make_tasks(sdist: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the tool. `words`: more packages, then options."""
    command = [sys.executable, str(TOOL), str(sdist), *words, "--base", "python-pytest", "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
async def test_tasks_are_made_of_a_package(tmp_path: Path, images: Path) -> None:
    small_image(images, "python-pytest", python=True, packages=["pytest"])
    sdist = sdist_of(tmp_path / "toy-1.0", TOY)
    task_count = make_tasks(sdist, tmp_path / "one", "--count", "3", "--hold-out", "toy", "--prefix", "x")
    assert "3 tasks in" in task_count.stdout, task_count.stderr
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
        ends = [
            f"echo 'import {end}(0)' >> /testbed/toy/__init__.py" for end in ("os; os._exit", "sys; sys.exit")
        ]
        commands = {"true": "0", f"sh {folder}/solution/solve.sh": "1", **dict.fromkeys(ends, "0")}
        for command, reward in commands.items():
            async with Jail(SandboxLimits(memory=1024), show=[str(folder)], image=image) as box:
                tests = f"cp -r {folder}/tests /tests && {command} && sh /tests/test.sh"
                ended = await box.run("shell", tests, 60)
                assert (await box.read_file("/logs/verifier/reward.txt")).decode().strip() == reward, ended


INSIDE = {  # tests in the package, beside one another's names and the library's; a package in a namespace
    "space/parse/__init__.py": "from .parts import doubled\n",
    "space/parse/parts.py": "def doubled(number):\n    return number * 2 if number else 0\n",
    "space/parse/tests/helpers.py": "EXPECTED = 4\n",
    "space/parse/tests/test_parts.py": "from space.parse import doubled\n"
    "from space.parse.tests.helpers import EXPECTED\n\n"
    "def test_doubled():\n    assert doubled(2) == EXPECTED\n\n"
    "def test_nothing():\n    assert doubled(0) == 0\n",
    "space/parse/more/tests/test_parts.py": "from space.parse import doubled\n\n"
    "def test_one():\n    assert doubled(1) == 2\n",
}
BAD = {
    "pluggy": (
        {"pluggy/__init__.py": "", "test_it.py": ""},
        r"the base image already has pluggy \(/.*\); use a base image without it",
    ),
    "silent": (
        {"silent/__init__.py": "", "silent/test_it.py": ""},
        "the tests of silent-1.0 do not run: no tests",
    ),
    "broken": (
        {"broken/__init__.py": "", "test_it.py": "import gone\n\ndef test_it(): pass\n"},
        "broken-1.0 has no test that passes and runs its lines: 0 of 0 pass; the most frequent error: .*No "
        "module named 'gone'",
    ),
    "none": ({"none/__init__.py": ""}, "none-1.0 has no tests: none of its files is named"),
}


@pytest.mark.full
def test_bad_packages_do_not_stop_the_others(tmp_path: Path, images: Path) -> None:
    small_image(images, "python-pytest", python=True, packages=["pytest"])
    sdists = [str(sdist_of(tmp_path / f"{name}-1.0", files)) for name, (files, _) in BAD.items()]
    sdists += [str(tmp_path / "gone.tar.gz")]
    made = make_tasks(sdist_of(tmp_path / "inside-1.0", INSIDE), tmp_path / "out", *sdists, "--count", "2")
    assert made.returncode == 1 and "2 tasks in" in made.stdout, made
    lines = made.stderr.splitlines()
    for line, sdist, why in zip(
        lines, sdists, (*(why for _, why in BAD.values()), "pip has no source"), strict=True
    ):
        assert re.match(f"make_swe_tasks.py: {sdist}: no tasks: {why}", line), line
    assert cli.main(["tasks", "check", str(tmp_path / "out/train")]) == 0
