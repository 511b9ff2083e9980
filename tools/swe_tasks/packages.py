"""Unpack a package with tests, learn which of them cover which lines, and try bugs, all in sandboxes."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

from asyncrl.isolation.images import Image
from asyncrl.isolation.sandbox.base import RunEnding, SandboxLimits
from asyncrl.isolation.sandbox.jail import Jail

from . import watch
from .mutations import Mutation, mutations

TESTBED = "/testbed"
LIMITS = SandboxLimits(memory=2048, processes=64, open_files=256, file=64, disk=128, output=15 << 20)
LEFT_OUT = ("*.egg-info", "__pycache__", "*.pyc", ".git", "PKG-INFO")
PYTEST_INI = f"[pytest]\npythonpath = {TESTBED} {TESTBED}/src\naddopts = -p no:cacheprovider\n"
PYTEST = ("-c", "/tests/pytest.ini", "--rootdir", "/tests", "-q")
BASE_SECONDS = 60.0  # of CPU that a test may take in the package as it is
SECONDS = 5.0  # of CPU that each test may take, and three times what it took
BUSY = 20  # seconds of a run for one of CPU
NO_MODULES = ("tests", "test", "docs", "setup", "conftest", "noxfile")
PER_FUNCTION = 2  # tasks


class PackageError(Exception):
    """A package has no tests that pass, or cannot be had."""


@dataclass
class Package:
    """Describes a package. `tree`: its files. `tests`: its tests as they lie in /tests of a sandbox.
    `passing`: the CPU seconds of each test that always passes. `covering`: those that run a line."""

    name: str
    tree: Path
    tests: Path
    passing: dict[str, float] = field(default_factory=dict)
    covering: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        """Name the packages and modules that it installs."""
        places = [place for place in (self.tree, self.tree / "src") if place.is_dir()]
        packages = [path.parent.name for place in places for path in place.glob("*/__init__.py")]
        modules = [path.stem for place in places for path in place.glob("*.py") if not is_test(path)]
        return [name for name in (*packages, *modules) if name not in NO_MODULES]


@dataclass(frozen=True)
class Bug:
    """Describes a mutation of a file that tests found. `messages`: the last words of each that fails."""

    path: str
    mutation: Mutation
    messages: dict[str, str]
    stay_green: tuple[str, ...]


def fetch(requirement: str, directory: Path) -> Path:
    """Have pip download a source distribution, unless `requirement` is the path of one."""
    if Path(requirement).is_file():
        return Path(requirement)
    words = ("download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(directory), requirement)
    made = subprocess.run(
        [sys.executable, "-m", "pip", *words], stderr=subprocess.PIPE, text=True, check=False
    )
    found = sorted(directory.glob("*.tar.gz"))
    if made.returncode or not found:
        raise PackageError(f"pip has no source distribution of {requirement}: {made.stderr.strip()[-300:]}")
    return found[0]


def unpack(sdist: Path, directory: Path) -> Package:
    """Unpack a source distribution, and lay out its tests."""
    with tarfile.open(sdist) as archive:
        archive.extractall(directory / "all", filter="data")
    (top,) = (directory / "all").iterdir()
    tree, tests = directory / "tree", directory / "tests"
    shutil.copytree(top, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
    package = Package(top.name, tree, tests)
    lay_out(package, {str(path.relative_to(tree)) for path in tree.rglob("*.py") if is_test(path)}, tests)
    return package


def is_test(path: Path | PurePosixPath) -> bool:
    return bool(re.fullmatch(r"test_.*\.py|.*_test\.py|tests?\.py", path.name))


def lay_out(package: Package, files: set[str], target: Path) -> None:
    """Copy test files, and what lies beside them, to their places in `target`, as modules of no package."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "pytest.ini").write_text(PYTEST_INI)
    for directory in {Path(file).parent for file in files}:
        beside = {
            path for path in (package.tree / directory).rglob("*") if directory.name in ("test", "tests")
        }
        beside |= set(package.tree.glob("conftest.py"))
        for path in (package.tree / file for file in files):
            beside.add(path)
        for path in beside:
            name = path.relative_to(package.tree)
            if path.is_file() and path.name != "__init__.py" and (not is_test(path) or str(name) in files):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / name)


def restore(path: str, line: int, text: str) -> str:
    """The shell command that gives a file such a line."""
    escaped = re.sub(r"([\\/&])", r"\\\1", text)
    return f"LC_ALL=C sed -i {shlex.quote(f'{line}s/.*/{escaped}/')} {shlex.quote(path)}"


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
    """Run tests (none: all) on the package in a sandbox, changed by a command. `seed` orders what is hashed.
    Empty when they do not end, or one takes so many seconds of CPU."""
    result, names = "/tmp/result.json", "/tmp/names"
    chosen = [f"@{names}"] if tests else ["--continue-on-collection-errors", "/tests"]
    words = [watch.__file__, result, str(seconds), TESTBED if lines else "", *PYTEST, *chosen]
    copies = f"cp -r {package.tree} {TESTBED} && cp -r {package.tests} /tests && cd {TESTBED}"
    command = f"{copies} && {change or ':'} && PYTHONHASHSEED={seed} exec python3 -s {shlex.join(words)}"
    longest = BUSY * (seconds + sum(package.passing.get(test, 0) for test in tests))
    shown = [str(package.tree), str(package.tests), watch.__file__]
    async with Jail(LIMITS, show=shown, image=image) as box:
        await box.write_file(names, "".join(f"/tests/{test}\n" for test in tests).encode())
        ended = await box.run("shell", command, longest)
        if ended.ending not in (RunEnding.DONE, RunEnding.FAILED):
            return {}
        if ended.status not in (0, 1):
            if not change:
                raise PackageError(f"the tests of {package.name} do not run: {ended.output[-2000:]}")
            return {}
        return json.loads(await box.read_file(result))


async def learn(image: Image, package: Package) -> None:
    """Run all tests twice: those that pass both times count, and the second run tells their lines."""
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
    package.covering, package.versions = dict(covering), runs[0]["versions"]
    if not package.covering:
        raise PackageError(f"{package.name} has no tests that pass and cover its lines")


def candidates(package: Package, seed: int) -> list[tuple[str, Mutation]]:
    """List mutations of lines that tests run, and that the package has once, all kinds in turn. A line more
    or less, as of a test that depends on the time, leaves the others in their order."""
    everything = b"\n".join(path.read_bytes() for path in sorted(package.tree.rglob("*")) if path.is_file())
    kinds: dict[str, list[tuple[str, Mutation]]] = defaultdict(list)
    for path in sorted({path for path, _ in package.covering}):
        if is_test(PurePosixPath(path)) or {"test", "tests"} & {*PurePosixPath(path).parts}:
            continue
        for one in mutations((package.tree / path).read_bytes()):
            if (path, one.line) in package.covering and everything.count(one.before.strip().encode()) == 1:
                kinds[one.kind].append((path, one))
    for found in kinds.values():
        found.sort(key=lambda one: random.Random(f"{seed} {one}").random())
    return [one for turn in zip_longest(*(kinds[kind] for kind in sorted(kinds))) for one in turn if one]


async def try_bug(image: Image, package: Package, path: str, mutation: Mutation) -> Bug | None:
    """Run the tests that cover a line, twice with the bug. A Bug if some of the package's fail each time."""
    tests = package.covering[path, mutation.line]
    seconds = SECONDS + 3 * max(package.passing[test] for test in tests)
    change = restore(path, mutation.line, mutation.after)
    runs: list[dict[str, tuple[str, str]]] = []
    for seed in (0, 1):
        run = await run_tests(image, package, tests, seconds, seed, change=change)
        runs.append(run.get("outcomes", {}))
        if not any(outcome == "failed" for outcome, _ in runs[-1].values()):
            return None
    ended = [[run.get(test, ("", ""))[0] for run in runs] for test in tests]
    red = [test for test, outcomes in zip(tests, ended, strict=True) if outcomes == ["failed"] * 2]
    green = [test for test, outcomes in zip(tests, ended, strict=True) if outcomes == ["passed"] * 2]
    files = {test.partition("::")[0] for test in red}
    others = [test for test in package.passing if test not in tests and test.partition("::")[0] in files]
    green += random.Random(str(mutation)).sample(others, min(20, len(others)))
    if not red or not green or any("" in outcomes for outcomes in ended):
        return None
    return Bug(path, mutation, {test: runs[0][test][1] for test in red}, tuple(sorted(green)))
