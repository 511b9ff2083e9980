"""Makes a workspace for each episode of a program: a directory to work in, a separate HOME and TMPDIR.

    /sandbox/{work,home,tmp}                                   in a sandbox, and removed with the sandbox
    the task's directory, /sandbox/{home,tmp}                  in the sandbox of a sample's task, in its image
    /var/tmp/asyncrl-UID/workspace-TOKEN/{work,…}              without a sandbox

A workspace without a sandbox is removed when the episode is over; the next worker removes workspaces of a
killed worker. The directory is not in /tmp, where Codex does not install its helpers.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.data.task_sandboxes import TaskSandbox
from asyncrl.data.tasks import Task
from asyncrl.errors import ConfigError, SetupError
from asyncrl.gateway.executables import HEAD_BYTES
from asyncrl.gateway.lines import CommandError
from asyncrl.gateway.server import Endpoint
from asyncrl.isolation.calls import in_thread
from asyncrl.isolation.child import wrapped_command
from asyncrl.isolation.sandbox import emptying
from asyncrl.isolation.sandbox.base import Program, RunEnding, SandboxError, SandboxLimits
from asyncrl.isolation.sandbox.detection import check_isolation
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.isolation.wrapper import KILL_SECONDS, kill
from asyncrl.values import MAX_RESULT_BYTES

WORKSPACES_DIRECTORY = f"/var/tmp/asyncrl-{os.getuid()}"
WORKSPACE_PREFIX = "workspace-"  # begins the names of workspace directories
REQUIRED_ISOLATION = frozenset({"network", "files", "processes", "orphans"})  # words of ISOLATION
MAKE_SECONDS = 60.0  # for making three directories, on a busy machine
CHECK_SECONDS = 60.0  # for looking at a file, on a busy machine
LOOK_UP_SCRIPT = """IFS=:; set -f; for directory in $1; do
  if [ -f "$directory/$2" ] && [ -x "$directory/$2" ]; then printf "%s" "$directory/$2"; break; fi
done"""
PROBLEM_SCRIPT = """if [ -d "$1" ]; then echo is a directory
elif [ -h "$1" ] && [ ! -e "$1" ]; then echo is a link to a file that does not exist
elif [ ! -e "$1" ]; then echo does not exist
elif [ ! -x "$1" ]; then echo is not executable; fi"""
ANSWER_MARK = "asyncrl answer:"  # printed before the output of a script
OWN_DIRECTORIES = ("home", "tmp")
CREDENTIAL_NAMES = (
    *(".netrc", ".ssh", ".aws", ".azure", ".gnupg", ".kube", ".git-credentials", ".pypirc", ".npmrc", ".env"),
    *("auth.json", ".credentials.json", "*token", "*tokens", "*token.*", "*tokens.*"),
    *("id_rsa*", "id_ed25519*", "*.pem"),
)
"""Patterns for names of files and directories that may contain credentials."""
MAX_ERROR_BYTES = 1 << 16  # bytes of stderr that are kept
FAST_READS = 256  # reads of an output, each at most 64 KiB; after that a pause follows each read
PAUSE_SECONDS = 0.01  # after each further read
MAX_COMPLAINT_CHARACTERS = 300  # of an error line that is quoted
# A frame of a Python traceback.
TRACEBACK_FRAME = re.compile(r'^ +File "([^"<>]+)", line (\d+)', re.MULTILINE)
INSTALLED_PATH = re.compile(r"/(site|dist)-packages/|/lib/python\d")

Streams = tuple[int, int, int]
"""File descriptors for a program's standard input, output and error."""


class LocalWorkspace:
    """Runs programs in the directory `work` without a sandbox, with all rights of the user. `root`: the
    directory of `home` and `tmp`. `endpoint`: the endpoint for programs."""

    task = None

    def __init__(self, root: str, endpoint: Endpoint) -> None:
        self.root = root
        self.work = f"{root}/work"
        self.endpoint = endpoint

    async def write(self, path: str, text: str) -> None:
        """Write a file at a path below `root`."""
        file = Path(self.root, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, errors="replace")  # noqa: ASYNC240

    async def look_up(self, name: str, search_path: str) -> str:
        return shutil.which(name, path=search_path) or ""

    async def problem(self, path: str) -> str:
        return _execution_problem(Path(path))

    async def head(self, path: str) -> bytes:
        with suppress(OSError), open(path, "rb") as file:  # noqa: ASYNC230
            return file.read(HEAD_BYTES)
        return b""

    async def run(self, words: Sequence[str], environment: Mapping[str, str], streams: Streams) -> int:
        """Run a program in `work` to the end, and return the exit code. The program and its descendants are
        killed on cancellation, or when the worker dies. The streams are closed here after the start."""
        stdin, stdout, stderr = streams
        try:
            process = await asyncio.create_subprocess_exec(
                *wrapped_command(words),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=self.work,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"{words[0]} cannot be run: {error.strerror}") from error
        finally:
            for descriptor in streams:
                os.close(descriptor)

        process_ended = asyncio.ensure_future(process.wait())
        try:
            return await asyncio.shield(process_ended)
        finally:
            if not process_ended.done():
                with suppress(ProcessLookupError):
                    kill(process.pid)
                await asyncio.wait([process_ended], timeout=2 * KILL_SECONDS)


def _execution_problem(path: Path) -> str:
    if path.is_dir():
        return "is a directory"
    if not path.exists():
        return "is a link to a file that does not exist" if path.is_symlink() else "does not exist"
    return "" if os.access(path, os.X_OK) else "is not executable"


class SandboxWorkspace:
    """Runs programs in a sandbox, where they can read only programs and shown paths, or an image. `task`: the
    task's sandbox, if the sample has a task."""

    def __init__(self, jail: Jail, endpoint: Endpoint, task: TaskSandbox | None) -> None:
        self.root = jail.home
        self.endpoint = endpoint
        self._jail = jail
        self.task = task
        self.work = task.directory if task else f"{self.root}/work"

    async def write(self, path: str, text: str) -> None:
        await self._jail.write_file(f"{self.root}/{path}", text.encode(errors="replace"))

    async def look_up(self, name: str, search_path: str) -> str:
        return await self._shell(LOOK_UP_SCRIPT, search_path, name)

    async def problem(self, path: str) -> str:
        return await self._shell(PROBLEM_SCRIPT, path)

    async def head(self, path: str) -> bytes:
        with suppress(SandboxError):
            return (await self._jail.read_file(path))[:HEAD_BYTES]
        # The file is too large for `read_file`.
        printed = await self._shell(f'od -An -v -tx1 -N{HEAD_BYTES} "$1"', path)
        try:
            return bytes.fromhex(printed)
        except ValueError:  # there is no `od`
            return b""

    async def _shell(self, script: str, *arguments: str) -> str:
        """Return what a script of the sandbox's shell prints; '' if it fails. What the shell itself has to
        say is in the output, too, before ANSWER_MARK."""
        script_lines = (
            shlex.join(("set", "--", *arguments)),
            f"echo {ANSWER_MARK}",
            f"{{ {script}\n}} 2>/dev/null",
        )

        script_result = await self._jail.run("shell", "\n".join(script_lines), CHECK_SECONDS)
        if script_result.ending is not RunEnding.DONE:
            return ""
        return script_result.output.rpartition(ANSWER_MARK)[2].strip("\n")

    async def run(self, words: Sequence[str], environment: Mapping[str, str], streams: Streams) -> int:
        result = await self._jail.execute(Program(words, environment, self.work), streams)
        if result.ending is RunEnding.OVER:
            max_mb = self._jail.limits.resident
            raise CommandError(
                f"{words[0]} used more than {max_mb} MiB, including its files, and was killed; raise "
                "memory_mb"
            )

        if result.ending in (RunEnding.DIED, RunEnding.STARVED):  # code inside cannot cause these endings
            cause = "the program's sandbox stopped unexpectedly"
            if result.ending is RunEnding.STARVED:
                cause = (
                    "the program's sandbox was stopped because this machine was nearly out of memory; lower "
                    "rollout.slots"
                )
            raise SetupError(f"task {self.task.task.name}: {cause}") if self.task else CommandError(cause)

        return result.status


EpisodeWorkspace = LocalWorkspace | SandboxWorkspace


@asynccontextmanager
async def open_local_workspace(endpoint: Endpoint) -> AsyncIterator[LocalWorkspace]:
    """Make a workspace, which is removed at the end. CommandError if it cannot be made."""
    with ExitStack() as stack:
        with CommandError.instead_of(OSError, text="the episode's workspace could not be created"):
            root = stack.enter_context(emptying.locked_directory(_workspaces_directory(), WORKSPACE_PREFIX))
            for directory in ("work", *OWN_DIRECTORIES):
                os.mkdir(f"{root}/{directory}", 0o700)

        try:
            yield LocalWorkspace(root, endpoint)
        finally:
            await in_thread(stack.close, "workspace")


@asynccontextmanager
async def open_sandbox_workspace(
    endpoint: Endpoint, limits: SandboxLimits, show: Iterable[str], task: Task | None = None
) -> AsyncIterator[SandboxWorkspace]:
    """Make a workspace in a sandbox, whose only network is the endpoint (without a key no endpoint is
    served). CommandError if the workspace cannot be made; SetupError if the workspace of a task cannot be
    made."""
    task_sandbox = TaskSandbox(task, limits, REQUIRED_ISOLATION, show, True) if task else None
    jail = (
        task_sandbox.jail
        if task_sandbox
        else Jail(limits, require=REQUIRED_ISOLATION, show=show, listen=True)
    )

    try:
        await (task_sandbox or jail).start()
        assert jail.listener is not None
        with jail.listener:
            served_endpoint = await endpoint.serve_on(jail.listener) if endpoint.api_key else endpoint

        workspace = SandboxWorkspace(jail, served_endpoint, task_sandbox)
        directories = shlex.join((workspace.work, *(f"{workspace.root}/{part}" for part in OWN_DIRECTORIES)))

        mkdir_result = await jail.run("shell", f"mkdir -p {directories}", MAKE_SECONDS)
        if mkdir_result.ending is not RunEnding.DONE:
            cause = mkdir_result.output.strip() or mkdir_result.ending
            reason = f"the sandbox could not create its workspace: {cause}"
            raise SetupError(f"task {task.name}: {reason}") if task else CommandError(reason)

        yield workspace
    finally:
        await jail.close()


# -- running a program: the input, and the end of the output ------------------------------------------------


async def run_program(
    words: Sequence[str],
    workspace: EpisodeWorkspace,
    environment: Mapping[str, str],
    stdin_bytes: bytes = b"",
) -> list[str]:
    """Run a program in a workspace, and return the last lines of the output. CommandError, with the last line
    of stderr, if the program fails."""
    (stdin, stdin_feed), (stdout_pipe, stdout), (stderr_pipe, stderr) = (os.pipe() for _ in range(3))
    stdout_tail = asyncio.ensure_future(_read_tail(stdout_pipe, MAX_RESULT_BYTES))
    stderr_tail = asyncio.ensure_future(_read_tail(stderr_pipe, MAX_ERROR_BYTES))
    input_fed = asyncio.ensure_future(_write_input(stdin_feed, stdin_bytes))
    try:
        status = await workspace.run(words, environment, (stdin, stdout, stderr))
    finally:  # all processes of the program have ended, and so do the pipes
        await asyncio.wait([input_fed, stdout_tail, stderr_tail], timeout=KILL_SECONDS)

    if status:
        raise CommandError(
            f"{words[0]} exited with code {status}: {_last_complaint(stderr_tail.result()) or 'no message'}"
        )

    return stdout_tail.result()


async def _write_input(descriptor: int, stdin_bytes: bytes) -> None:
    connect = asyncio.get_running_loop().connect_write_pipe
    writer, _ = await connect(asyncio.BaseProtocol, os.fdopen(descriptor, "wb", 0))
    writer.write(stdin_bytes)
    writer.close()  # once all bytes are read, or nobody can read them


async def _read_tail(descriptor: int, limit: int) -> list[str]:
    """Read a pipe to its end, and return the lines in its last `limit` bytes."""
    stream = asyncio.StreamReader()
    tail_bytes = bytearray()
    protocol = partial(asyncio.StreamReaderProtocol, stream)
    await asyncio.get_running_loop().connect_read_pipe(protocol, os.fdopen(descriptor, "rb", 0))
    read_count = 0

    while data := await stream.read(1 << 16):
        read_count += 1
        if read_count > FAST_READS:  # without pauses endless output would take a core
            await asyncio.sleep(PAUSE_SECONDS)
        tail_bytes += data
        if len(tail_bytes) > 2 * limit:  # not after each read: cutting copies the tail
            del tail_bytes[:-limit]

    return tail_bytes[-limit:].decode(errors="replace").strip().splitlines()


def _last_complaint(lines: Sequence[str]) -> str:
    """Return the last line; for a Python traceback, with the innermost position in a user's file."""
    if not lines:
        return ""

    traceback_text = "\n".join(lines[:-1]).rpartition("Traceback (most recent call last):")[2]
    frames = [
        frame for frame in TRACEBACK_FRAME.findall(traceback_text) if not INSTALLED_PATH.search(frame[0])
    ]
    in_user_code = frames and lines[-2].startswith(" ")

    return lines[-1].strip()[:MAX_COMPLAINT_CHARACTERS] + (
        f" ({Path(frames[-1][0]).name}:{frames[-1][1]})" if in_user_code else ""
    )


def result_in(line: str) -> Any:
    """Read the number or object in a line; None for any other text."""
    with suppress(ValueError, RecursionError):
        value = msgspec.json.decode(line)
        if isinstance(value, dict | int | float) and not isinstance(value, bool):
            return value
    return None


# -- checks, and directories without a sandbox --------------------------------------------------------------


def check_sandbox() -> None:
    """Check that a sandbox can isolate a program on this machine. ConfigError if not."""
    try:
        check_isolation(" ".join(REQUIRED_ISOLATION))
    except ConfigError as error:
        advice = f"{error}; or set sandbox: none, which lets the model read and write everything that you can"
        raise ConfigError(f"sandbox: jail cannot be used: {advice}") from error


@cache
def _workspaces_directory() -> str:
    """Make the directory of all workspaces of this user, and remove workspaces of killed workers."""
    emptying.make_private_directory(WORKSPACES_DIRECTORY)
    emptying.delete_abandoned(WORKSPACES_DIRECTORY, WORKSPACE_PREFIX)
    return WORKSPACES_DIRECTORY


def check_tree(files: str, allow: Sequence[str]) -> None:
    """Check a tree of files. ConfigError if `files` is no directory, or contains files whose names suggest
    credentials and that no path or glob of `allow` names."""
    if not Path(files).is_dir():
        raise ConfigError(f"files {files!r}: no such directory")

    credential_paths = []
    for top, directories, file_names in os.walk(files):
        for name in (*directories, *file_names):
            path = os.path.relpath(os.path.join(top, name), files)
            may_hold_credentials = any(fnmatchcase(name.lower(), pattern) for pattern in CREDENTIAL_NAMES)
            if may_hold_credentials and not any(fnmatchcase(path, glob) for glob in allow):
                credential_paths.append(path)

    if credential_paths:
        credential_paths.sort()
        raise ConfigError(
            f"files {files!r}: the model could read {', '.join(credential_paths)}, which may contain "
            f"credentials; remove them, or set allow: {credential_paths[0]}"
        )
