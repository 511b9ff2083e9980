"""Unpack a package with tests, learn which of them cover which lines, and try bugs, all in sandboxes."""

from __future__ import annotations

import glob
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

from asyncrl.errors import AsyncrlError, one_line
from asyncrl.isolation.images import Image
from asyncrl.isolation.sandbox.base import RunEnding, SandboxLimits
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.values import shorten_to_line

from . import watch
from .mutations import Mutation, mutations

TESTBED = "/testbed"
LIMITS = SandboxLimits(memory=2048, processes=64, open_files=256, file=64, disk=128, output=15 << 20)
LEFT_OUT = ("*.egg-info", "__pycache__", "*.pyc", ".git", "PKG-INFO")
PYTEST_INI = "[pytest]\nxfail_strict = true\naddopts = -p no:cacheprovider --import-mode=importlib\n"
RUN_PYTEST = """\
# Runs pytest on the tests beside this file. Of the workspace only the names of the package can be imported:
# the library, pytest and tests ask for others that this image lacks, such as `winreg` or an optional package.
import importlib
import sys
from contextlib import suppress
from importlib.machinery import PathFinder

import pytest

NAMES = {names}


class Workspace:
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, {workspace}) if path is None and name in NAMES else None
        if spec is not None and spec.loader is None:  # a namespace: without directories of sys.path
            spec.submodule_search_locations = [*spec.submodule_search_locations]
        return spec


def main(arguments, plugins=()):
    sys.meta_path.insert(0, Workspace)
    sys.path += {path}
    # import these first, or test directories of the same name would be taken for the packages
    for package in {packages}:
        with suppress(Exception, SystemExit):  # tests that need it fail by themselves
            importlib.import_module(package)
    return pytest.main(arguments, list(plugins))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
FIND_MODULES = """
import json, sys
from importlib.util import find_spec
copies = {}
for name in sys.argv[1:]:
    try:
        spec = find_spec(name)
    except Exception:  # what is around it cannot be imported
        continue
    if spec is not None and spec.origin:
        copies[name] = spec.origin
print(json.dumps(copies))
"""
PYTEST = ("-c", "/tests/pytest.ini", "--rootdir", "/tests", "-q")
BASE_SECONDS = 60.0  # CPU seconds that a test may take in the unchanged package
SECONDS = 5.0  # CPU seconds that each test may take, in addition to three times its own
BUSY = 20  # seconds of a run for one of CPU
NO_MODULES = ("src", "tests", "test", "docs", "setup", "conftest", "noxfile")
PER_FUNCTION = 2  # tasks
EXAMPLE = 300  # characters of what a test said, in an error
PADDING = 20  # tests that must stay green beside those that cover the changed line
TEST_FILE = re.compile(r"test_.*\.py|.*_test\.py|tests?\.py")
TEST_DIRECTORY = re.compile(r"(.*_)?tests?|testing")
TEST_FILES = "test_*.py, *_test.py, test.py or tests.py"  # the same in words


class PackageError(AsyncrlError):
    """No tasks can be made of a package: the package has no passing tests, or cannot be fetched."""


@dataclass
class Package:
    """A package.

    `tree`: its files. `tests`: its tests as they lie in /tests of a sandbox. `passing`: the CPU seconds of
    each test that always passes. `covering`: the tests that run a line.
    """

    name: str
    tree: Path
    tests: Path
    passing: dict[str, float] = field(default_factory=dict)
    covering: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Name what can be imported from the workspace: the first parts of `modules`."""
        return sorted({name.partition(".")[0] for name in self.modules})

    def protected(self, path: str) -> list[str]:
        """List globs of what no solution of a bug in the file `path` may change: all else at the top and in
        src/, modules and packages that would be imported instead, and directories of tests in packages."""
        changed = PurePosixPath(path)
        tops = [*self.tree.glob("*"), *self.tree.glob("src/*")]

        directories = {PurePosixPath(top.relative_to(self.tree)) for top in tops}
        for file in self.tree.rglob("*.py"):
            if is_test(file):
                directories.add(directory_of_tests(PurePosixPath(file.relative_to(self.tree))))

        other_directories = sorted(directories - {changed, *changed.parents})

        globs = {f"{TESTBED}/{glob.escape(str(directory))}" for directory in other_directories}
        top = changed.relative_to("src") if changed.is_relative_to("src") else changed

        importable = {
            directory.name.removesuffix(".py")
            for directory in other_directories
            if directory.parent.name in ("", "src")
        }
        for name in importable & {*self.names} - {top.parts[0].removesuffix(".py")}:
            for root in (TESTBED, f"{TESTBED}/src"):
                globs |= {f"{root}/{name}", f"{root}/{name}.*"}

        return sorted(globs)

    @property
    def modules(self) -> list[str]:
        """Name the packages and modules that the package installs, with a dot for modules of a namespace."""
        names: list[str] = []
        for root in (self.tree, self.tree / "src"):
            for pattern in ("*/__init__.py", "*/*/__init__.py"):
                names += [".".join(path.parent.relative_to(root).parts) for path in root.glob(pattern)]
            names += [path.stem for path in root.glob("*.py") if not is_test(path)]

        outermost = [name for name in names if name.partition(".")[0] not in {*names} - {name}]
        dotted = [name for name in outermost if all(part.isidentifier() for part in name.split("."))]
        return [name for name in dotted if not {*NO_MODULES} & {*name.split(".")}]


@dataclass(frozen=True)
class Bug:
    """A mutation of a file that tests detect. `messages`: the last words of each failing test."""

    path: str
    mutation: Mutation
    messages: dict[str, str]
    stay_green: tuple[str, ...]


def fetch(requirement: str, directory: Path) -> Path:
    """Download a source distribution by pip, unless `requirement` is the path of a distribution."""
    if Path(requirement).is_file():
        return Path(requirement)
    words = ("download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(directory), requirement)
    pip = subprocess.run(
        [sys.executable, "-m", "pip", *words], stderr=subprocess.PIPE, text=True, check=False
    )
    archives = [path for path in sorted(directory.iterdir()) if path.is_file()]
    if pip.returncode or not archives:
        raise PackageError(f"pip has no source distribution of {requirement}: {pip.stderr.strip()[-300:]}")

    return archives[0]


def unpack(requirement: str, directory: Path) -> Package:
    """Fetch a source distribution, unpack it in a new directory, and lay out its tests.

    PackageError: the package has no tests.
    """
    directory.mkdir()
    sdist = fetch(requirement, directory)
    try:
        if zipfile.is_zipfile(sdist):
            with zipfile.ZipFile(sdist) as archive:
                archive.extractall(directory / "all")
        else:
            with tarfile.open(sdist) as archive:
                archive.extractall(directory / "all", filter="data")
    except Exception as error:  # modules of archives raise ten kinds for one that is broken
        raise PackageError(f"{sdist.name} cannot be unpacked: {one_line(error)}") from error

    tops = [*(directory / "all").iterdir()]
    if len(tops) != 1 or not tops[0].is_dir():
        raise PackageError(
            f"{sdist.name} is no source distribution: it must have exactly one top-level directory"
        )

    tree = directory / "tree"
    tests = directory / "tests"
    shutil.copytree(tops[0], tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
    package = Package(tops[0].name, tree, tests)
    files = {str(path.relative_to(tree)) for path in tree.rglob("*.py") if is_test(path)}
    if not files:
        raise PackageError(f"{package.name} has no tests: none of its files is named {TEST_FILES}")

    lay_out(package, files, tests)
    return package


def is_test(path: Path | PurePosixPath) -> bool:
    return bool(TEST_FILE.fullmatch(path.name))


def directory_of_tests(file: PurePosixPath) -> PurePosixPath:
    """Return the outermost directory around a test file with a name for tests, or the directory of the
    file."""
    around = [directory for directory in file.parents if TEST_DIRECTORY.fullmatch(directory.name)]
    return around[-1] if around else file.parent


def lay_out(package: Package, files: set[str], target: Path) -> None:
    """Copy test files, and the files beside them, to `target`, as modules of no package.

    Of the files beside tests at the top, which the package has, too, only conftest.py is copied.
    """
    target.mkdir(parents=True, exist_ok=True)
    (target / "pytest.ini").write_text(PYTEST_INI)

    copied = {package.tree / file for file in files}
    directories = {"/tests"}
    for file in map(PurePosixPath, files):
        top = directory_of_tests(file)
        if top != PurePosixPath():
            copied |= {*(package.tree / top).rglob("*")}
        copied |= {package.tree / directory / "conftest.py" for directory in file.parents}
        inside = [directory for directory in file.parents if directory.is_relative_to(top)]
        directories |= {str("/tests" / directory) for directory in inside}

    tops = {PurePosixPath(file).parts[0] for file in files}
    run_pytest = RUN_PYTEST.format(
        names=package.names,
        workspace=[TESTBED, f"{TESTBED}/src"],
        path=sorted(directories, reverse=True),
        packages=sorted(name for name in package.modules if name.partition(".")[0] in tops),
    )

    (target / "run_pytest.py").write_text(run_pytest)
    for path in copied:
        name = path.relative_to(package.tree)
        if path.is_file() and path.name != "__init__.py" and (not is_test(path) or str(name) in files):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)


def restore(path: str, line: int, text: str) -> str:
    """Return the shell command that gives a file such a line."""
    escaped = re.sub(r"([\\/&])", r"\\\1", text)
    return f"LC_ALL=C sed -i {shlex.quote(f'{line}s/.*/{escaped}/')} {shlex.quote(path)}"


async def installed_copies(image: Image, modules: list[str]) -> dict[str, str]:
    """Return the modules and packages that the image's own Python imports, with their paths.

    Such a module would be tested instead of the package. A directory without `__init__.py` does not count.
    """
    async with Jail(LIMITS, image=image) as box:
        run_result = await box.run(
            "shell", f"python3 -I -c {shlex.quote(FIND_MODULES)} {shlex.join(modules)}", 60
        )

    if run_result.ending is not RunEnding.DONE:
        raise PackageError(
            f"python3 does not run in the base image: {shorten_to_line(run_result.output, EXAMPLE)}"
        )
    copies: dict[str, str] = json.loads(run_result.output.splitlines()[-1])
    return copies


async def run_tests(
    image: Image,
    package: Package,
    tests: list[str],
    seconds: float,
    seed: int,
    *,
    lines: bool = False,
    change: str = "",
) -> dict[str, Any]:
    """Run tests (empty: all) on the package in a sandbox, changed by a command.

    `seed` orders hashed values. Returns nothing if the tests do not end, or a test takes too many seconds of
    CPU. PackageError: pytest finds no tests.
    """
    result = "/tmp/result.json"
    names = "/tmp/names"
    chosen = [f"@{names}"] if tests else ["--continue-on-collection-errors", "/tests"]
    words = [watch.__file__, result, str(seconds), TESTBED if lines else "", *PYTEST, *chosen]
    copies = f"cp -r {package.tree} {TESTBED} && cp -r {package.tests} /tests && cd {TESTBED}"
    variables = f"PYTHONHASHSEED={seed} PYTHONPATH= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"  # else as in test.sh
    command = f"{copies} && {change or ':'} && {variables} exec python3 -s {shlex.join(words)}"

    longest = BUSY * (seconds + sum(package.passing.get(test, 0) for test in tests))
    shown_paths = [str(package.tree), str(package.tests), watch.__file__]
    async with Jail(LIMITS, show=shown_paths, image=image) as box:
        await box.write_file(names, "".join(f"/tests/{test}\n" for test in tests).encode())
        run_result = await box.run("shell", command, longest)
        if run_result.ending not in (RunEnding.DONE, RunEnding.FAILED):
            return {}

        if run_result.status not in (0, 1):
            if not tests:
                output = run_result.output.strip()[-EXAMPLE:] or f"pytest ended with {run_result.status}"
                raise PackageError(f"the tests of {package.name} do not run: {output}")
            return {}

        return json.loads(await box.read_file(result))


async def learn(image: Image, package: Package) -> None:
    """Run all tests twice: tests that pass both times count, and the second run gives their lines."""
    runs = [await run_tests(image, package, [], BASE_SECONDS, seed, lines=seed == 1) for seed in (0, 1)]
    if not all(runs):
        raise PackageError(f"a test of {package.name} takes more than {BASE_SECONDS:.0f} s")

    for test in sorted(runs[0]["outcomes"]):
        if all(run["outcomes"].get(test, [""])[0] == "passed" for run in runs):
            package.passing[test] = runs[0]["seconds"][test]

    covering = defaultdict(list)
    for test in package.passing:
        for path, numbers in runs[-1]["lines"].get(test, {}).items():
            for number in numbers:
                covering[path, number].append(test)

    package.covering = dict(covering)
    package.versions = runs[0]["versions"]

    if not package.covering:
        outcomes = runs[0]["outcomes"]
        failures = Counter(
            [*runs[0]["errors"].values(), *(message for _, message in outcomes.values() if message)]
        )
        example = "".join(f"; the most frequent error: {message}" for message, _ in failures.most_common(1))
        raise PackageError(
            f"{package.name} has no test that passes and runs its lines: {len(package.passing)} of "
            f"{len(outcomes)} pass{shorten_to_line(example, EXAMPLE)}"
        )


def candidates(package: Package, seed: int) -> list[tuple[str, Mutation]]:
    """List mutations of lines that tests run and that are unique in the package, all kinds in turn.

    A line more or less, as of a test that depends on the time, leaves the order of the other mutations
    unchanged.
    """
    everything = b"\n".join(path.read_bytes() for path in sorted(package.tree.rglob("*")) if path.is_file())
    kinds: dict[str, list[tuple[str, Mutation]]] = defaultdict(list)
    for path in sorted({path for path, _ in package.covering}):
        if is_test(PurePosixPath(path)) or {"test", "tests"} & {*PurePosixPath(path).parts}:
            continue
        with suppress(SyntaxError, UnicodeDecodeError):  # the source of another Python version, or not UTF-8
            for mutation in mutations((package.tree / path).read_bytes()):
                is_covered = (path, mutation.line) in package.covering
                if is_covered and everything.count(mutation.before.strip().encode()) == 1:
                    kinds[mutation.kind].append((path, mutation))

    for of_kind in kinds.values():
        of_kind.sort(key=lambda candidate: random.Random(f"{seed} {candidate}").random())
    in_turn = zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [candidate for turn in in_turn for candidate in turn if candidate]


async def try_bug(image: Image, package: Package, path: str, mutation: Mutation) -> Bug | None:
    """Run the tests that cover a line, and other tests of their files, twice with the bug, then the tests
    to be named once without the bug. Returns a Bug if some covering tests fail each time with the bug, and
    some tests pass."""
    covering = package.covering[path, mutation.line]
    files = {test.partition("::")[0] for test in covering}
    unrelated_tests = [
        test for test in package.passing if test not in covering and test.partition("::")[0] in files
    ]
    padding = random.Random(str(mutation)).sample(unrelated_tests, min(PADDING, len(unrelated_tests)))
    tests = sorted((*covering, *padding))

    seconds = SECONDS + 3 * max(package.passing[test] for test in tests)

    change = restore(path, mutation.line, mutation.after)
    runs: list[dict[str, tuple[str, str]]] = []
    for seed in (0, 1):
        run = await run_tests(image, package, tests, seconds, seed, change=change)
        runs.append(run.get("outcomes", {}))
        if not any(outcome == "failed" for outcome, _ in runs[-1].values()):
            return None

    if any(test not in run for test in tests for run in runs):
        return None

    named = [test for test in tests if runs[0][test][0] == runs[1][test][0] in ("failed", "passed")]
    solved = (await run_tests(image, package, named, seconds, seed=2)).get("outcomes", {})
    named = [test for test in named if solved.get(test, ("", ""))[0] == "passed"]  # without other tests, too
    red = [test for test in named if runs[0][test][0] == "failed"]
    green = [test for test in named if runs[0][test][0] == "passed"]
    if not {*red} & {*covering} or not green:
        return None

    return Bug(path, mutation, {test: runs[0][test][1] for test in red}, tuple(green))
