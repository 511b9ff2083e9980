"""Rewards by the tests of a task, which judge an agent's changes in a clean sandbox of the task's image.

    image ─► + the changes, but for protected names ─► + /tests, an empty /logs ─► /tests/test.sh ─► verdict

The verdict comes from named tests in a report, as written by pytest's `--junitxml`, and not from an exit
code. Without a verdict, the tests run once more without the changes, which shows whether the changes or the
task are at fault.
"""

from __future__ import annotations

import asyncio
import base64
import glob
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from asyncrl.isolation.sandbox.base import ISOLATION, MAX_CHANGE_BYTES, Program, RunEnding, SandboxError
from asyncrl.isolation.sandbox.base import SandboxLimits as Limits
from asyncrl.isolation.sandbox.changes import DIRECTORY, FILE, LINK, OPAQUE, Entry, pack_entries, read_entries
from asyncrl.isolation.sandbox.detection import check_isolation
from asyncrl.rewards.base import RewardError, RewardInput, rewards
from asyncrl.types import FailReason
from asyncrl.values import finite_number

PROTECTED = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml"),
    *("tox.ini", "setup.cfg", ".git", "*.pyc", "__pycache__", ".pytest_cache", "*.pth", "*.dist-info"),
    *("*.egg-info", "*.egg-link", "sitecustomize*", "usercustomize*", "site-packages", "dist-packages"),
    "pyvenv.cfg",
)
"""Names of files that decide how tests run, or which code runs. These files come from the image, not from the
agent's changes. Names in capitals are also protected, because Python also reads metadata in `a.DIST-INFO`."""
TEST_DIRECTORIES = ("tests", "test", "testing")  # directories whose helpers also decide how tests run
LOG_DIRECTORY = "/logs/verifier"
EMPTY_LOGS = Entry(DIRECTORY, "logs", 0o755), Entry(OPAQUE, "logs/verifier", 0o755)
RUN_SCRIPT = f"exec /tests/test.sh > {LOG_DIRECTORY}/test-stdout.txt 2>&1"
MAX_REPORT_BYTES = 4 << 20
OUTPUT_TAIL = 300  # bytes of the tests' output that a note quotes
READ_OUTPUT_SECONDS = 10.0
ILLEGAL_IN_XML = re.compile("[^\t\n\r -~\x80-\ud7ff\ue000-\ufffd]")  # as pytest defines illegal characters


class NoVerdict(Exception):
    """Tests ended without a verdict."""


@dataclass(frozen=True)
class Verdict:
    """Holds the outcome of a task's tests. `notes`: failed tests, or the reason for the lack of a verdict."""

    score: float
    components: Mapping[str, float]
    notes: str = ""


@rewards.register("tests")
@dataclass(kw_only=True, eq=False)
class JudgedByTests:
    """Give 1.0 if all tests that must turn green are green, and all tests that must stay green, too. With
    `partial`: the fraction of tests that turned green, if all others stayed green. Components: both
    fractions, the seconds of the tests, and the number of attempts to reach a `network`.

    `at_once`: sandboxes of one worker; `setup_seconds`: limit for making a sandbox. `memory_mb`, `disk_mb`:
    used if the task sets none. `require`: see docs/guides/tasks.md.
    """

    needs_truth = True
    own_deadline = math.inf  # each step has its own limit, and waiting for a sandbox must not count

    partial: bool = False
    at_once: Annotated[int, Meta(ge=1)] = 4
    setup_seconds: Annotated[float, Meta(gt=0)] = 60.0
    memory_mb: Annotated[int, Meta(ge=1)] = 2048
    disk_mb: Annotated[int, Meta(ge=1)] = 1024
    require: str = " ".join(ISOLATION)

    def __post_init__(self) -> None:
        self._limits = Limits(
            memory=0,
            processes=256,
            open_files=4096,
            file=self.disk_mb,
            disk=self.disk_mb,
            resident=self.memory_mb,
            output=MAX_REPORT_BYTES,
        )
        self._isolation = check_isolation(self.require)
        self._sandbox_slots = asyncio.Semaphore(self.at_once)

    async def __call__(self, episode: RewardInput) -> dict[str, Any]:
        task = task_of(episode.sample)
        if task is None:
            raise RewardError("the sample is not a task: it has no extra_info.task with an image")

        tests = msgspec.json.decode(episode.sample.ground_truth_json, type=TaskTests)
        result = episode.result if isinstance(episode.result, dict) else {}
        fraction_names = ("turn_green", "stay_green") if tests.named else ()
        verdict = Verdict(0.0, dict.fromkeys((*fraction_names, "seconds", "network"), 0.0))

        if failure := result.get("failed"):
            verdict = replace(verdict, notes=f"the changes cannot be judged: {failure}")
        else:
            changes = await in_thread(partial(read_changes, episode.result), "tests")
            async with self._sandbox_slots:
                try:
                    verdict = await self._judge_changes(task, tests, changes)
                except NoVerdict as error:
                    verdict = replace(verdict, notes=str(error))

                    # If the tests give no verdict without the changes either, the task is at fault.
                    try:
                        await self._judge_changes(task, tests, None)
                    except NoVerdict as error_without_changes:
                        reason = f"task {task.name} fails even without changes: {error_without_changes}"
                        raise RewardError(reason, FailReason.TESTS_FAILED_TO_RUN) from None

        notes = "; ".join(str(note) for note in (verdict.notes, result.get("ended")) if note)
        return {"score": verdict.score, "components": verdict.components, "tests": notes or None}

    async def _judge_changes(self, task: Task, tests: TaskTests, changes: list[Entry] | None) -> Verdict:
        """Run the tests in a new sandbox, with the changes if there are any. NoVerdict if the tests give no
        verdict, or the changes do not fit into the sandbox. RewardError if the sandbox cannot be made."""
        sandbox = None
        try:
            async with asyncio.timeout(self.setup_seconds):
                sandbox = TaskSandbox(task, self._limits, self._isolation)
                files = await in_thread(partial(pack_directory, Path(tests.tests), "tests/test.sh"), "tests")
                await sandbox.start()
                if changes is not None:
                    protected_globs = (
                        *map(match_any_case, with_modules(PROTECTED)),
                        *protected_names(sandbox, tests),
                    )
                    entries = entries_within(sandbox.workspace, changes, protected_globs)
                    await sandbox.jail.apply_changes(pack_entries(entries), protected_globs)

                await sandbox.jail.apply_changes(pack_entries((*files, *EMPTY_LOGS)))

            return await self._run_tests(sandbox, tests)
        except (SetupError, SandboxError, TimeoutError, OSError) as error:
            sandbox_started = sandbox is not None and sandbox.jail.pid is not None
            if sandbox_started and changes is not None and isinstance(error, SandboxError):
                raise NoVerdict(one_line(error)) from error

            reason = (
                f"task {task.name}: {one_line(error) or f'setup took more than {self.setup_seconds:g} s'}"
            )
            raise RewardError(reason, FailReason.SETUP_FAILED) from error
        finally:
            if sandbox is not None:
                await sandbox.jail.close()

    async def _run_tests(self, sandbox: TaskSandbox, tests: TaskTests) -> Verdict:
        """Run the tests and read the verdict. NoVerdict if there is none."""
        jail = sandbox.jail
        null_file = os.open(os.devnull, os.O_RDWR)
        environment = {"HOME": jail.home, **sandbox.environment, **tests.environment}
        program = Program(["/bin/sh", "-c", RUN_SCRIPT], environment, sandbox.directory)
        run_result = await jail.execute(program, (null_file, null_file, null_file), tests.seconds)
        timeout_note = f"the tests did not finish within {tests.seconds:g} s"

        # No code inside can end the sandbox early.
        if run_result.ending is RunEnding.DIED and run_result.seconds < tests.seconds:
            raise SandboxError("the sandbox for the tests stopped unexpectedly")

        if run_result.ending is RunEnding.STARVED:
            reason = "the tests were stopped because this machine was nearly out of memory"
            raise SandboxError(f"{reason}; lower at_once for the reward 'tests'")

        endings = {
            RunEnding.LATE: timeout_note,
            RunEnding.DIED: timeout_note,
            RunEnding.OVER: f"the tests used more than {jail.limits.resident} MiB, including their files",
        }
        if run_result.ending in endings:
            raise NoVerdict(endings[run_result.ending])

        try:
            if tests.named:
                report = await jail.read_file(f"{LOG_DIRECTORY}/report.xml")
                passed = await in_thread(partial(read_report, report), "tests")
                verdict = verdict_by_names(tests, passed, self.partial)
            else:
                verdict = await script_verdict(jail.read_file)
        except (SandboxError, ValueError, expat.ExpatError) as error:
            test_output = await jail.run(
                "shell", f"tail -c {OUTPUT_TAIL} {LOG_DIRECTORY}/test-stdout.txt", READ_OUTPUT_SECONDS
            )
            raise NoVerdict(
                f"no verdict: {one_line(error)}; the tests wrote: {test_output.output.strip()}"
            ) from error

        components = {
            **verdict.components,
            "seconds": run_result.seconds,
            "network": await sandbox.count_unreached(),
        }

        return Verdict(verdict.score, components, verdict.notes)


def read_changes(result: Any) -> list[Entry]:
    """Read the changes that an episode left. RewardError if there are none."""
    try:
        return list(read_entries(base64.b64decode(result["changes"], validate=True)))
    except (TypeError, KeyError):
        raise RewardError(
            "no changes to judge: the agent or the tools must work in the task's image"
        ) from None


def entries_within(
    workspace: Iterable[str], entries: Iterable[Entry], protected_globs: Iterable[str]
) -> Iterator[Entry]:
    """Drop entries outside of the workspace, and links that would replace a parent of protected names."""
    root_prefixes = tuple(os.path.join(os.path.normpath(root), "") for root in workspace)
    parents_of_protected = {str(parent) for name in protected_globs for parent in Path(name).parents}
    for entry in entries:
        replaces_parent = entry.kind == LINK and glob.escape(f"/{entry.path}") in parents_of_protected
        if f"/{entry.path}/".startswith(root_prefixes) and not replaces_parent:
            yield entry


def pack_directory(directory: Path, script: str) -> list[Entry]:
    """Pack a directory of a task, for example as /tests with the executable `script` tests/test.sh. OSError
    if the files cannot be read, or are too large."""
    root_name, _, name = script.partition("/")
    os.stat(directory / name)
    entries = [Entry(OPAQUE, root_name, 0o755)]
    bytes_left = MAX_CHANGE_BYTES

    for path in sorted(directory.rglob("*")):
        archive_name = f"{root_name}/{path.relative_to(directory)}"
        file_status = path.lstat()
        content = b""
        kind = FILE
        if path.is_symlink():
            kind = LINK
            content = os.fsencode(path.readlink())
        elif path.is_dir():
            kind = DIRECTORY
        elif (bytes_left := bytes_left - file_status.st_size) < 0:
            raise OSError(f"{directory} contains more than {MAX_CHANGE_BYTES} bytes")
        else:
            content = path.read_bytes()

        mode = file_status.st_mode & 0o755 | (0o555 if kind == DIRECTORY or archive_name == script else 0o444)
        entries.append(Entry(kind, archive_name, mode, file_status.st_mtime_ns, content))

    return entries


def match_any_case(pattern: str) -> str:
    return re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", pattern)


def protected_names(sandbox: TaskSandbox, tests: TaskTests) -> Iterator[str]:
    """Yield further protected names: files of named tests, or the whole directory of tests around such a
    file, programs in PATH, and the task's own globs."""
    roots = {"/", sandbox.directory, *sandbox.workspace}
    test_files = {Path(name.partition("::")[0]) for name in tests.named}

    test_paths = {
        next((parent for parent in file.parents if parent.name in TEST_DIRECTORIES), file)
        for file in test_files
    }

    for path in test_paths:
        yield from (glob.escape(os.path.normpath(os.path.join(top, path))) for top in roots)

        # The path is protected anywhere, as the root of the tests may lie deeper.
        if path.suffix or path.name in TEST_DIRECTORIES:
            yield glob.escape(f"{path}")

    programs = sandbox.environment["PATH"].split(":")
    yield from (
        glob.escape(os.path.normpath(program_directory))
        for program_directory in programs
        if program_directory.startswith("/")
    )

    yield from with_modules(tests.protected)


def with_modules(globs: Iterable[str]) -> Iterator[str]:
    """Add to each Python file the package and the compiled module that Python would import first."""
    for pattern in globs:
        yield pattern
        if pattern.endswith(".py"):
            module = pattern.removesuffix(".py")
            yield from (module, f"{module}.*")


# -- verdicts: reports are untrusted -------------------------------------------------------------------------


def read_report(report: bytes) -> dict[tuple[str, str], bool]:
    """Read which tests passed, by class name and name; a repeated test has passed if all runs passed.
    ExpatError for bad XML, ValueError for a document type, which could define entities."""
    passed: dict[tuple[str, str], bool] = {}
    open_cases: list[tuple[str, str]] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "testcase":
            open_cases.append((attributes.get("classname", ""), attributes.get("name", "")))
            passed.setdefault(open_cases[-1], True)
        elif open_cases and tag in ("failure", "error", "skipped"):  # an expected failure is skipped
            passed[open_cases[-1]] = False

    def end(tag: str) -> None:
        if tag == "testcase":
            open_cases.pop()

    def refuse(*_: object) -> None:
        raise ValueError("the report contains a document type declaration")

    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(report, True)

    return passed


def report_name(test: str) -> tuple[str, str]:
    """Return the class name and the name of a test in pytest's report, from the test's id."""
    path, bracket, parameters = test.partition("[")
    file, *names = path.split("::")
    parts = [re.sub(r"\.py$", "", file.replace("/", ".")), *names]
    return ".".join(parts[:-1]), ILLEGAL_IN_XML.sub(_escape_illegal, parts[-1] + bracket + parameters)


def _escape_illegal(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"#x{number:02X}" if number <= 0xFF else f"#x{number:04X}"


def verdict_by_names(tests: TaskTests, passed: dict[tuple[str, str], bool], allow_partial: bool) -> Verdict:
    """Judge by the named tests. `allow_partial`: a fraction of the tests that must turn green counts."""

    def failed(names: Sequence[str]) -> list[str]:
        return [name for name in names if not passed.get(report_name(name))]

    not_green = failed(tests.turn_green)
    broken = failed(tests.stay_green)
    turned_fraction = 1 - len(not_green) / max(1, len(tests.turn_green))
    stayed_fraction = 1 - len(broken) / max(1, len(tests.stay_green))
    score = turned_fraction if allow_partial else float(not not_green)
    if broken:
        score = 0.0

    failures = [("not green", not_green), ("broken", broken)]
    notes = "; ".join(
        f"{len(names)} {description}: {', '.join(names)}" for description, names in failures if names
    )

    return Verdict(score, {"turn_green": turned_fraction, "stay_green": stayed_fraction}, notes)


_decode_numbers = msgspec.json.Decoder(dict[str, float | bool] | float | bool).decode


async def script_verdict(read_file: Any) -> Verdict:
    """Read the script's own verdict, as Harbor does: `reward` of reward.json, or the only number in the file;
    without that file, reward.txt. ValueError, or an exception of `read_file`, if there is no verdict."""
    try:
        reported = _decode_numbers(await read_file(f"{LOG_DIRECTORY}/reward.json"))
    except SandboxError:
        return Verdict(finite_number("reward.txt", float(await read_file(f"{LOG_DIRECTORY}/reward.txt"))), {})

    numbers = {
        name: finite_number(f"reward.json: {name}", value)
        for name, value in (reported if isinstance(reported, dict) else {"reward": reported}).items()
    }
    if "reward" not in numbers and len(numbers) != 1:
        raise ValueError("reward.json has no `reward`")

    return Verdict(numbers.get("reward", next(iter(numbers.values()))), numbers)
