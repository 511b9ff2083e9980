"""Make tasks of repair from packages with tests, in Harbor's format: one bug each that tests find.

    python tools/make_swe_tasks.py --base debian-pytest --out tasks --count 100 \
        inflection==0.5.1 toolz==1.2.0 boltons==26.2.0 more-itertools==11.2.1 --hold-out toolz

A package is the path of a source distribution, or what pip downloads. `--base` is an image with Python, git
and pytest (docs/guides/tasks.md). Every bug is tried in sandboxes with that image; each task gets an image
over it, named `PREFIX-PACKAGE-NUMBER`. The same seed makes the same tasks. A package that gives no tasks is
named at the end, with the reason, and the exit code is 1; the tasks of the others are there.

    sdist ──► all tests, twice ──► bugs in covered lines ──► covering tests ──► image, search ──► task
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import io
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from swe_tasks.leaks import BaseImage, contents, leak
from swe_tasks.packages import (
    PER_FUNCTION,
    TESTBED,
    Bug,
    Package,
    PackageError,
    candidates,
    installed_copies,
    lay_out,
    learn,
    restore,
    try_bug,
    unpack,
)

from asyncrl.errors import AsyncrlError, reason
from asyncrl.isolation.images import Image, find_image
from asyncrl.isolation.importing import import_image, remove_image
from asyncrl.values import printable, shorten_to_line

T = TypeVar("T")

AHEAD = 2  # bugs that are tried at once, for each sandbox
REASON = 600  # characters of why there are no tasks of a package
SHOWN = 5  # failures in an instruction
PROBLEMS = (AsyncrlError, OSError, subprocess.CalledProcessError)  # errors that concern a single package
VERIFIER_SECONDS = 60.0  # at least
WHEN = 1_700_000_000  # time of every commit and file, in seconds
AUTHOR = {"NAME": "Maintainer", "EMAIL": "maintainer@example.org", "DATE": f"@{WHEN} +0000"}
GIT = {
    **{f"GIT_{person}_{field}": text for person in ("AUTHOR", "COMMITTER") for field, text in AUTHOR.items()},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "PATH": os.environ.get("PATH", ""),
}
TEST_SH = f"""#!/bin/sh
# Runs the tests that decide, as they were, on what is in {TESTBED}.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
mkdir -p /logs/verifier
rm -f /logs/verifier/report.xml
cd {TESTBED}
reward=0
python3 -I /tests/run_pytest.py -c /tests/pytest.ini --rootdir /tests -q \\
    --junitxml /logs/verifier/report.xml @/tests/selected.txt \\
    && [ -s /logs/verifier/report.xml ] && reward=1  # code under test may have ended with 0
echo $reward > /logs/verifier/reward.txt
"""
TASK_TOML = """schema_version = "1.4"

[task]
name = "asyncrl/{name}"

[metadata]
package = "{package}"
bug = "{bug}"
protected = {protected}

[environment]
docker_image = "{image}"
workdir = "/testbed"
network_mode = "no-network"
memory_mb = 2048
storage_mb = 256

[agent]
timeout_sec = 1800.0

[verifier]
timeout_sec = {seconds:.1f}
"""
DOCKERFILE = """FROM python:{python}-slim
RUN apt-get update && apt-get install -y git && pip install pytest=={pytest}
ADD testbed.tar.gz /
WORKDIR /testbed
"""


def testbed(package: Package, bug: Bug) -> bytes:
    """Pack the package with the bug, and a repository whose only commit has the bug, too."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, TESTBED[1:])
        shutil.copytree(package.tree, root)
        path = root / bug.path
        number = bug.mutation.line - 1
        lines = path.read_bytes().split(b"\n")
        lines[number] = bug.mutation.after.encode()

        path.write_bytes(b"\n".join(lines))
        for words in (
            ("init", "-q", "-b", "main", "--template="),
            ("add", "-A", "-f"),
            ("commit", "-q", "-m", package.name),
            ("-c", "pack.threads=1", "repack", "-a", "-d", "-q"),
            ("read-tree", "HEAD"),  # an index without this machine's times
        ):
            if words[0] == "read-tree":
                (root / ".git/index").unlink()
            subprocess.run(["git", *words], cwd=root, env=GIT, check=True)

        shutil.rmtree(root / ".git/logs")
        (root / ".git/info").mkdir(exist_ok=True)
        (root / ".git/info/exclude").write_text("__pycache__/\n.pytest_cache/\n")

        packed = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=packed, mode="wb", mtime=WHEN) as file,
            tarfile.open(fileobj=file, mode="w") as archive,
        ):
            archive.add(root, TESTBED[1:], filter=plain)

        return packed.getvalue()


def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the parts of a message that differ from machine to machine."""
    mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member.replace(mtime=WHEN, uid=0, gid=0, uname="", gname="", mode=mode, deep=False)


def instruction(package: Package, bug: Bug) -> str:
    functions = {test.partition("[")[0]: test for test in reversed(bug.messages)}  # the first of each
    listed_tests = sorted(functions.values())[:SHOWN]
    failures = "\n".join(f"    {test}\n{shortened(bug.messages[test])}" for test in listed_tests)

    more = (
        f"\n    … and {len(bug.messages) - len(listed_tests)} more\n"
        if len(bug.messages) > len(listed_tests)
        else ""
    )

    files = " ".join(sorted({test.partition("::")[0] for test in listed_tests}))
    return f"""Tests of {package.name} fail that passed before:

{failures}{more}
The repository is {TESTBED}; there `python3 -m pytest {files}` runs them.
Find what is wrong in the package and correct it. The tests are right: a copy of them decides, and those that
pass now must still pass.
"""


def shortened(message: str) -> str:
    lines = [line for line in re.sub(r"x[0-9a-f]{8,}", "x…", message).splitlines() if line.strip()]
    return "".join(f"        {line if len(line) < 160 else line[:160] + '…'}\n" for line in lines[:3])


def write_task(folder: Path, image: str, package: Package, bug: Bug) -> None:
    tests = sorted((*bug.messages, *bug.stay_green))  # the order in which they were tried
    seconds = VERIFIER_SECONDS * (1 + sum(package.passing[test] for test in tests) // 6)  # ten times
    task = {"name": folder.name, "package": package.name, "bug": bug.mutation.kind, "image": image}
    protected = json.dumps(package.protected(bug.path), indent=1, ensure_ascii=False)
    fix = restore(bug.path, bug.mutation.line, bug.mutation.before)

    lay_out(package, {test.partition("::")[0] for test in tests}, folder / "tests")
    for name, text in {
        "instruction.md": instruction(package, bug),
        "task.toml": TASK_TOML.format(**task, protected=protected, seconds=seconds),
        "environment/Dockerfile": DOCKERFILE.format(**package.versions),
        "tests/test.sh": TEST_SH,
        "tests/config.json": json.dumps(
            {"FAIL_TO_PASS": [*bug.messages], "PASS_TO_PASS": bug.stay_green}, indent=1
        ),
        "tests/selected.txt": "".join(f"/tests/{test}\n" for test in tests),
        "solution/solve.sh": f"#!/bin/sh\n# Restores the line as it was.\ncd {TESTBED} && {fix}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    (folder / "environment/testbed.tar.gz").write_bytes(testbed(package, bug))


class Maker:
    """Makes tasks of one package after another. `out`: the directory of train/ and test/."""

    def __init__(self, base: Image, out: Path, prefix: str, jobs: int) -> None:
        self.base = base
        self.out = out
        self.prefix = prefix
        self.jobs = jobs
        self.below = BaseImage(base.layers)
        self.kinds: Counter[str] = Counter()
        self.gate = asyncio.Semaphore(jobs)

    async def in_turn(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        async with self.gate:
            return await work(*arguments)

    async def make(self, package: Package, max_tasks: int, seed: int, split: str) -> int:
        """Make up to `most` tasks. Some bugs are tried at once, and taken in the order of candidates."""
        ahead = candidates(package, seed)

        functions: Counter[tuple[str, str]] = Counter()
        task_count = tried = 0
        while ahead and task_count < max_tasks:
            chunk: list[Coroutine[Any, Any, Bug | None]] = []
            while ahead and len(chunk) < AHEAD * self.jobs:
                path, mutation = ahead.pop(0)
                if functions[path, mutation.function] < PER_FUNCTION and not self.below.has_mutation(
                    mutation
                ):
                    chunk.append(self.in_turn(try_bug, self.base, package, path, mutation))

            tried += len(chunk)
            for bug in await all_or_none(chunk):
                function = (bug.path, bug.mutation.function) if bug else ("", "")
                if bug and task_count < max_tasks and functions[function] < PER_FUNCTION:
                    folder = self.out / split / f"{plain_name(package)}-{task_count + 1:03}"
                    functions[function] += 1
                    if await self.keep(folder, package, bug):
                        task_count += 1
                        self.kinds[bug.mutation.kind] += 1

        print(f"  {task_count} tasks from {tried} bugs", flush=True)
        return task_count

    async def keep(self, folder: Path, package: Package, bug: Bug) -> bool:
        """Write a task, import its image, and search the image.

        A task whose image has the line is removed.
        """
        name = f"{self.prefix}-{folder.name}"
        write_task(folder, name, package, bug)
        image = await asyncio.to_thread(
            import_image, str(folder / "environment/testbed.tar.gz"), name, self.base.digest
        )

        if copy := leak(contents(image.root), bug.mutation):
            print(f"  {folder.name}: {copy} contains the line that was changed; the task is left out")
            remove_image(name)
            shutil.rmtree(folder)
            return False

        return True


async def all_or_none(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together. After the first error the other coroutines are cancelled, and have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def plain_name(package: Package) -> str:
    return re.sub(r"-[0-9].*", "", package.name).replace("_", "-").lower()


async def prepare(maker: Maker, requirement: str, directory: Path) -> Package:
    """Fetch, unpack and learn a package. PackageError: no tasks can be made of the package."""
    package = await maker.in_turn(asyncio.to_thread, unpack, requirement, directory)
    if copies := await maker.in_turn(installed_copies, maker.base, package.modules):
        module, path = next(iter(copies.items()))
        raise PackageError(f"the base image already has {module} ({path}); use a base image without it")
    await maker.in_turn(learn, maker.base, package)
    return package


async def make_all(maker: Maker, scratch: Path, arguments: argparse.Namespace) -> dict[str, str]:
    """Make the tasks of all packages. Returns what went wrong, by the requirement or path of the package."""
    started = time.monotonic()
    total = 0
    requirements: list[str] = arguments.packages
    preparing = (prepare(maker, name, scratch / str(number)) for number, name in enumerate(requirements))
    prepared = await asyncio.gather(*preparing, return_exceptions=True)

    problems: dict[str, str] = {}
    packages: list[tuple[str, Package]] = []
    for requirement, package in zip(requirements, prepared, strict=True):
        if isinstance(package, PROBLEMS):
            problems[requirement] = f"no tasks: {reason(package)}"
        elif isinstance(package, BaseException):
            raise package
        else:
            packages.append((requirement, package))

    print(f"{len(packages)} packages learned in {time.monotonic() - started:.0f} s", flush=True)

    packages.sort(key=lambda entry: len(entry[1].covering))

    for number, (requirement, package) in enumerate(packages):
        split = "test" if plain_name(package) in arguments.hold_out else "train"
        print(
            f"{package.name}: {len(package.passing)} tests, {len(package.covering)} covered lines", flush=True
        )
        wanted = math.ceil((arguments.count - total) / (len(packages) - number))
        before = sum(maker.kinds.values())

        if wanted == 0:
            print("  0 tasks: --count is reached", flush=True)
            continue

        try:
            if not await maker.make(package, wanted, arguments.seed, split):
                problems[requirement] = "no tasks: no bug makes some of its tests fail and others pass"
        except PROBLEMS as error:
            problems[requirement] = f"only {sum(maker.kinds.values()) - before} tasks: {reason(error)}"

        total += sum(maker.kinds.values()) - before

    children = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    cpu_seconds = sum(sum(resource.getrusage(processes)[:2]) for processes in children)
    kinds = ", ".join(f"{count} {kind}" for kind, count in maker.kinds.most_common())
    print(
        f"{total} tasks in {time.monotonic() - started:.0f} s, {cpu_seconds:.0f} s of CPU: {kinds or 'none'}"
    )

    return problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="+", metavar="PACKAGE", help="a path, or a requirement for pip")
    parser.add_argument("--base", required=True, help="image with Python, git and pytest")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument(
        "--count", type=int, default=100, help="number of tasks, spread evenly over the packages"
    )
    parser.add_argument(
        "--hold-out",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="package whose tasks go to OUT/test",
    )
    parser.add_argument("--prefix", default="", help="prefix of the images' names (default: the name of OUT)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="number of sandboxes that run at the same time")
    arguments = parser.parse_args()

    if arguments.out.exists():
        parser.error(f"--out {arguments.out} already exists; name a new directory")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            Path(scratch).chmod(0o755)  # for the user of the sandboxes
            base = find_image(arguments.base)
            maker = Maker(base, arguments.out, arguments.prefix or arguments.out.name, arguments.jobs)
            problems = asyncio.run(make_all(maker, Path(scratch), arguments))
    except AsyncrlError as error:
        sys.exit(f"make_swe_tasks.py: {error}")

    if problems:
        for requirement, why in problems.items():
            line = printable(shorten_to_line(f"{requirement}: {why}", REASON))
            print(f"make_swe_tasks.py: {line}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
