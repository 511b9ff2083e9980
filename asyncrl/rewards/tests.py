"""Tests of a task as the reward. They judge what an agent changed, in a clean sandbox of the task's image.

    image ─► + the changes, but for protected names ─► + /tests, an empty /logs ─► /tests/test.sh ─► verdict

The verdict is that of named tests in a report, as pytest's `--junitxml` writes it, and no exit code. Where
there is none, the same runs without the changes, which tells whose fault it is.
"""

from __future__ import annotations

import asyncio
import base64
import glob
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from xml.parsers import expat

import msgspec
from msgspec import Meta

from asyncrl.data.task_sandboxes import TaskSandbox
from asyncrl.data.tasks import Task, TaskTests, task_of
from asyncrl.errors import SetupError, one_line
from asyncrl.isolation.calls import in_thread
from asyncrl.isolation.sandbox.base import ISOLATION, MOST_CHANGES, Program, RunEnding, SandboxError
from asyncrl.isolation.sandbox.base import SandboxLimits as Limits
from asyncrl.isolation.sandbox.changes import DIRECTORY, FILE, LINK, OPAQUE, Entry, packed, read_entries
from asyncrl.isolation.sandbox.detection import check_isolation
from asyncrl.rewards.base import RewardError, RewardInput, rewards
from asyncrl.types import FailReason
from asyncrl.values import finite

PROTECTED = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml"),
    *("tox.ini", "setup.cfg", ".git", "*.pyc", "__pycache__", ".pytest_cache", "*.pth", "*.dist-info"),
    *("*.egg-info", "*.egg-link", "sitecustomize*", "usercustomize*", "site-packages", "dist-packages"),
    "pyvenv.cfg",
)
"""Names that decide how tests run, or which code: as the image has them, and not as the agent left them. Also
in capitals, as Python reads the metadata of `a.DIST-INFO`, too."""
OF_TESTS = ("tests", "test", "testing")  # directories whose helpers decide, too
LOGS = "/logs/verifier"
EMPTY_LOGS = Entry(DIRECTORY, "logs", 0o755), Entry(OPAQUE, "logs/verifier", 0o755)
SCRIPT = f"exec /tests/test.sh > {LOGS}/test-stdout.txt 2>&1"
LARGEST = 4 << 20  # bytes of a report
SAID = 300  # characters of the output that a note has
LOOK_SECONDS = 10.0
ILLEGAL = re.compile("[^\t\n\r -~\x80-\ud7ff\ue000-\ufffd]")  # in XML, as pytest sees it


class NoVerdict(Exception):
    """Tests ended without a verdict."""


@dataclass(frozen=True)
class Verdict:
    """`notes`: the tests that did not pass, or why there is no verdict."""

    score: float
    components: Mapping[str, float]
    notes: str = ""


@rewards.register("tests")
class JudgedByTests:
    """1.0 if all tests that must turn green do, and all that must stay green do; with `partial` the share of
    the former if the latter do. Components: both shares, the seconds that the tests took, and how often they
    tried to reach a `network`.

    `at_once`: sandboxes of one worker; `setup_seconds`: to make one. `memory_mb`, `disk_mb`: where the task
    says nothing. `require`: see docs/sandbox.md.
    """

    needs_truth = True
    own_deadline = math.inf  # each step has a limit; those who wait for a place are no slower than the tests

    def __init__(
        self,
        *,
        partial: bool = False,
        at_once: Annotated[int, Meta(ge=1)] = 4,
        setup_seconds: Annotated[float, Meta(gt=0)] = 60.0,
        memory_mb: Annotated[int, Meta(ge=1)] = 2048,
        disk_mb: Annotated[int, Meta(ge=1)] = 1024,
        require: str = " ".join(ISOLATION),
    ) -> None:
        self._partial = partial
        self._setup_seconds = setup_seconds
        sizes = {"file": disk_mb, "disk": disk_mb, "resident": memory_mb, "output": LARGEST}
        self._limits = Limits(memory=0, processes=256, open_files=4096, **sizes)
        self._require = check_isolation(require)
        self._places = asyncio.Semaphore(at_once)

    async def __call__(self, given: RewardInput) -> dict[str, Any]:
        task = task_of(given.sample)
        if task is None:
            raise RewardError("the sample is no task: it has no extra_info.task with an image")
        tests = msgspec.json.decode(given.sample.ground_truth, type=TaskTests)
        verdict = await self._verdict(task, tests, given.result)
        ended = given.result.get("ended") if isinstance(given.result, dict) else None
        notes = "; ".join(str(note) for note in (verdict.notes, ended) if note)
        return {"score": verdict.score, "components": verdict.components, "tests": notes or None}

    async def _verdict(self, task: Task, tests: TaskTests, result: Any) -> Verdict:
        shares = ("turn_green", "stay_green") if tests.named else ()
        nothing = dict.fromkeys((*shares, "seconds", "network"), 0.0)
        if isinstance(result, dict) and (why := result.get("failed")):
            return Verdict(0.0, nothing, f"its changes cannot be judged: {why}")
        changes = await in_thread(partial(read_changes, result), "tests")
        async with self._places:
            try:
                return await self._judged(task, tests, changes)
            except NoVerdict as error:
                fault = str(error)
            try:
                await self._judged(task, tests, None)
            except NoVerdict as error:
                why = f"task {task.name}, also without changes: {error}"
                raise RewardError(why, FailReason.TESTS_FAILED_TO_RUN) from None
        return Verdict(0.0, nothing, fault)

    async def _judged(self, task: Task, tests: TaskTests, changes: list[Entry] | None) -> Verdict:
        """Run the tests in a sandbox of their own, with the changes. NoVerdict when they do not end with one,
        or the changes do not fit into the sandbox. RewardError when it cannot be made."""
        sandbox = None
        try:
            async with asyncio.timeout(self._setup_seconds):
                sandbox = TaskSandbox(task, self._limits, self._require)
                files = await in_thread(partial(pack, Path(tests.tests), "tests/test.sh"), "tests")
                await sandbox.start()
                if changes is not None:
                    keep = (*map(in_any_case, with_modules(PROTECTED)), *protected(sandbox, tests))
                    await sandbox.jail.apply(packed(within(sandbox.workspace, changes, keep)), keep)
                await sandbox.jail.apply(packed((*files, *EMPTY_LOGS)))
            return await self._run(sandbox, tests)
        except (SetupError, SandboxError, TimeoutError, OSError) as error:
            started = sandbox is not None and sandbox.jail.pid is not None
            if started and changes is not None and isinstance(error, SandboxError):
                raise NoVerdict(one_line(error)) from error
            why = f"task {task.name}: {one_line(error) or f'not set up in {self._setup_seconds:g} s'}"
            raise RewardError(why, FailReason.SETUP_FAILED) from error
        finally:
            if sandbox is not None:
                await sandbox.jail.close()

    async def _run(self, sandbox: TaskSandbox, tests: TaskTests) -> Verdict:
        """Run the tests and read their verdict. NoVerdict where there is none."""
        box = sandbox.jail
        null = os.open(os.devnull, os.O_RDWR)
        environment = {"HOME": box.home, **sandbox.environment, **tests.environment}
        program = Program(["/bin/sh", "-c", SCRIPT], environment, sandbox.directory)
        ran = await box.execute(program, (null, null, null), tests.seconds)
        late = f"the tests did not end within {tests.seconds:g} s"
        if ran.ending is RunEnding.DIED and ran.seconds < tests.seconds:  # which no code inside can do
            raise SandboxError("the sandbox of the tests ended")
        if ran.ending is RunEnding.STARVED:
            why = "the tests were ended because this machine was nearly out of memory"
            raise SandboxError(f"{why}; lower at_once of the reward tests")
        endings = {
            RunEnding.LATE: late,
            RunEnding.DIED: late,
            RunEnding.OVER: f"the tests took more than {box.limits.resident} MiB with their files",
        }
        if ran.ending in endings:
            raise NoVerdict(endings[ran.ending])
        try:
            if tests.named:
                report = await box.read_file(f"{LOGS}/report.xml")
                passed = await in_thread(partial(read_report, report), "tests")
                found = by_names(tests, passed, self._partial)
            else:
                found = await script_verdict(box.read_file)
        except (SandboxError, ValueError, expat.ExpatError) as error:
            said = await box.run("shell", f"tail -c {SAID} {LOGS}/test-stdout.txt", LOOK_SECONDS)
            raise NoVerdict(
                f"no verdict: {one_line(error)}; the tests said: {said.output.strip()}"
            ) from error
        components = {**found.components, "seconds": ran.seconds, "network": await sandbox.unreached()}
        return Verdict(found.score, components, found.notes)


def read_changes(result: Any) -> list[Entry]:
    """Read the changes that an episode left. RewardError where there are none."""
    try:
        return list(read_entries(base64.b64decode(result["changes"], validate=True)))
    except (TypeError, KeyError):
        raise RewardError(
            "there are no changes to judge: the agent or the tools must work in the task's image"
        ) from None


def within(workspace: Iterable[str], entries: Iterable[Entry], keep: Iterable[str]) -> Iterator[Entry]:
    """Leave out what is outside of these directories, and links that would lead what is kept elsewhere."""
    tops = tuple(os.path.join(os.path.normpath(root), "") for root in workspace)
    around = {str(parent) for name in keep for parent in Path(name).parents}
    for entry in entries:
        leads = entry.kind == LINK and glob.escape(f"/{entry.path}") in around
        if f"/{entry.path}/".startswith(tops) and not leads:
            yield entry


def pack(directory: Path, script: str) -> list[Entry]:
    """Pack a directory of a task as /tests, say, where tests/test.sh is the `script` that can be run. OSError
    if they cannot be read, or are too large."""
    top, _, name = script.partition("/")
    os.stat(directory / name)
    entries = [Entry(OPAQUE, top, 0o755)]
    left = MOST_CHANGES
    for path in sorted(directory.rglob("*")):
        inside = f"{top}/{path.relative_to(directory)}"
        found = path.lstat()
        content = b""
        kind = FILE
        if path.is_symlink():
            kind = LINK
            content = os.fsencode(path.readlink())
        elif path.is_dir():
            kind = DIRECTORY
        elif (left := left - found.st_size) < 0:
            raise OSError(f"{directory} has more than {MOST_CHANGES} bytes")
        else:
            content = path.read_bytes()
        mode = found.st_mode & 0o755 | (0o555 if kind == DIRECTORY or inside == script else 0o444)
        entries.append(Entry(kind, inside, mode, found.st_mtime_ns, content))
    return entries


def in_any_case(pattern: str) -> str:
    return re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", pattern)


def protected(sandbox: TaskSandbox, tests: TaskTests) -> Iterator[str]:
    """Name what else is as the image has it: files of named tests, or all of a directory of tests with one,
    programs in PATH, what the task names."""
    tops = {"/", sandbox.directory, *sandbox.workspace}
    files = {Path(name.partition("::")[0]) for name in tests.named}
    for path in {next((up for up in file.parents if up.name in OF_TESTS), file) for file in files}:
        yield from (glob.escape(os.path.normpath(os.path.join(top, path))) for top in tops)
        if path.suffix or path.name in OF_TESTS:  # wherever it is: tests have their root somewhere below
            yield glob.escape(f"{path}")
    programs = sandbox.environment["PATH"].split(":")
    yield from (glob.escape(os.path.normpath(one)) for one in programs if one.startswith("/"))
    yield from with_modules(tests.protected)


def with_modules(globs: Iterable[str]) -> Iterator[str]:
    """Add to each Python file the package and the compiled module that Python would import instead."""
    for pattern in globs:
        yield pattern
        if pattern.endswith(".py"):
            module = pattern.removesuffix(".py")
            yield from (module, f"{module}.*")


# -- verdicts: reports are untrusted -------------------------------------------------------------------------


def read_report(report: bytes) -> dict[tuple[str, str], bool]:
    """Read which tests passed, by class name and name; one that is there twice has passed if both did.
    ExpatError for what is no XML, ValueError for a document type, which could define entities."""
    passed: dict[tuple[str, str], bool] = {}
    inside: list[tuple[str, str]] = []

    def start(tag: str, given: dict[str, str]) -> None:
        if tag == "testcase":
            inside.append((given.get("classname", ""), given.get("name", "")))
            passed.setdefault(inside[-1], True)
        elif inside and tag in ("failure", "error", "skipped"):  # an expected failure is skipped
            passed[inside[-1]] = False

    def end(tag: str) -> None:
        if tag == "testcase":
            inside.pop()

    def refuse(*_: object) -> None:
        raise ValueError("the report has a document type")

    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(report, True)
    return passed


def named_in_report(test: str) -> tuple[str, str]:
    """Return the class name and the name that pytest gives a test in its report, from its id."""
    path, bracket, parameters = test.partition("[")
    file, *names = path.split("::")
    parts = [re.sub(r"\.py$", "", file.replace("/", ".")), *names]
    return ".".join(parts[:-1]), ILLEGAL.sub(_escaped, parts[-1] + bracket + parameters)


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"#x{number:02X}" if number <= 0xFF else f"#x{number:04X}"


def by_names(tests: TaskTests, passed: dict[tuple[str, str], bool], part: bool) -> Verdict:
    """Judge by the named tests. `part`: a share of those that turn green counts."""

    def failed(names: Sequence[str]) -> list[str]:
        return [name for name in names if not passed.get(named_in_report(name))]

    red = failed(tests.turn_green)
    broken = failed(tests.stay_green)
    turned = 1 - len(red) / max(1, len(tests.turn_green))
    stayed = 1 - len(broken) / max(1, len(tests.stay_green))
    score = (turned if part else float(not red)) * (not broken)
    told = [("not green", red), ("broken", broken)]
    notes = "; ".join(f"{len(names)} {what}: {', '.join(names)}" for what, names in told if names)
    return Verdict(score, {"turn_green": turned, "stay_green": stayed}, notes)


_numbers = msgspec.json.Decoder(dict[str, float | bool] | float | bool).decode


async def script_verdict(read: Any) -> Verdict:
    """Read the script's own verdict, as Harbor does: the number `reward` of reward.json, or its only one;
    where there is no such file, reward.txt. ValueError, or what `read` raises, where there is none."""
    try:
        found = _numbers(await read(f"{LOGS}/reward.json"))
    except SandboxError:
        return Verdict(finite("reward.txt", float(await read(f"{LOGS}/reward.txt"))), {})
    numbers = {
        name: finite(f"reward.json: {name}", value)
        for name, value in (found if isinstance(found, dict) else {"reward": found}).items()
    }
    if "reward" not in numbers and len(numbers) != 1:
        raise ValueError("reward.json has no `reward`")
    return Verdict(numbers.get("reward", next(iter(numbers.values()))), numbers)
