"""Runs programs that lead episodes: the user's programs (`command`), and coding agents (harnesses).

    sample, or prompt ──stdin──► program in a workspace ──stdout──► the last line, a `command`'s result

The model may read everything that its program can read: the sample comes without the ground truth, the
environment without keys, and each episode has a separate HOME. The program and its descendants are killed
when the episode is over or the worker has died.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import site
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

import asyncrl
from asyncrl.config.base import Count, Seconds
from asyncrl.data.task_sandboxes import DEFAULT_LIMITS, RESULT_SECONDS
from asyncrl.data.tasks import Task, task_of
from asyncrl.errors import ConfigError, SetupError
from asyncrl.gateway.executables import why_not_executable
from asyncrl.gateway.lines import CommandError, fill, fill_word, script_of, with_absolute_paths, words_of
from asyncrl.gateway.server import Endpoint
from asyncrl.gateway.workspaces import (
    EpisodeWorkspace,
    check_sandbox,
    check_tree,
    open_local_workspace,
    open_sandbox_workspace,
    result_in,
    run_program,
)
from asyncrl.isolation.child import inherited_environment
from asyncrl.isolation.sandbox.needs import find_needed_paths
from asyncrl.types import Sample

INSTALL_ADVICE = "install it, or set program to its path"
STARTS_PER_CPU = 2  # programs that may start at once, for each CPU
SPARE_SECONDS = RESULT_SECONDS + 5.0  # seconds at the end of an episode, to collect the changes
VERSION_SECONDS = 60.0  # for a program to print the version, on a busy machine and from a cold disk
VERSION_NUMBER = re.compile(r"\d+\.\d+([\w.+-]*\w)?")
UNWRITABLE_CHARACTERS = re.compile("[\0\ud800-\udfff]")  # no environment variable can contain these
# By sandbox, variables that name directories with the user's credentials, or directories that a jail lacks.
WITHHELD_VARIABLES = {
    "none": re.compile("XDG_.*|HOME|TMPDIR|HF_HOME|HF_HUB_CACHE|TORCH_HOME"),
    "jail": re.compile("XDG_.*|HOME|TMPDIR|HF_.*|TORCH_HOME|SSL_CERT_.*|REQUESTS_CA_BUNDLE"),
}


class TimeUp(CommandError):
    """Ends an episode whose agent has used up the time: the end is `timeout`, and the turns are scored."""


CommandLine = Annotated[str, msgspec.Meta(pattern=r"\S")]
NO_FILES: Mapping[str, str] = {}
MAX_HOME_FILE_BYTES = 1 << 20  # bytes of all files together
NO_ENDPOINT = Endpoint("http://127.0.0.1:9/v1", "")


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Describes a program that leads episodes. `line`, the values of `environment` and the texts of `files`
    (by path in HOME) have placeholders, see lines.py. `stdin`: the standard input of the program, which gives
    a result only if it reads the sample. `resident_mb`: the usual memory of the program and its children.
    `version`: the option that prints the version; `tested`: the version that was tested."""

    name: str
    line: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: Literal["sample", "prompt", "nothing"] = "prompt"
    sandbox: Literal["jail", "none"] = "jail"
    resident_mb: int = 0
    version: str = "--version"
    tested: str = ""


COMMAND = Harness(
    name="command",
    environment={"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "{model}"},
    stdin="sample",
    sandbox="none",
)


class Command:
    """Runs `line` and `arguments`, a command (without a shell), in a separate workspace for each episode,
    with a copy of the tree `files`; files with credentials are refused unless `allow` names the files.
    `home_files`: texts with placeholders that are written into HOME first, by path. A first word `python` is
    the run's interpreter, with the run's packages; `program` is the path of another program for the first
    word. The program gets the entries of the sample's `extra_info` (which may hold the answer) that the
    option names, and the environment variables that locate programs and libraries (PATH, LANG, …) or that
    `env` names: `NAME`, or `NAME=value`. Commas separate several values of an option.

    `sandbox`: `jail` or `none`. In a jail a program can read the workspace, the system's programs, the
    program's own files and the paths in `show`, and reach only the endpoint. Limits: `memory_mb` of all
    processes and files, `processes` (threads included), `disk_mb`; 0 is the default. `setup_seconds`: time
    until the first request; at most `starts` episodes of a worker may be in this phase at once (0: two per
    CPU). `seconds`: time from the first request on (0: as long as the episode).

    A sample with a task (data/tasks.py) runs in the task's image, with the sizes and seconds of the task. The
    program of the image is used, if the image has a program of that name; else the program of this machine.
    The result has the changes of the task's directory, however the program ended. ConfigError for options
    that cannot be used."""

    def __init__(
        self,
        harness: Harness = COMMAND,
        *,
        line: CommandLine = "",
        extra_info: str = "",
        program: str = "",
        arguments: str = "",
        files: str = "",
        home_files: Mapping[str, str] = NO_FILES,
        allow: str = "",
        env: str = "",
        sandbox: Literal["", "jail", "none"] = "",
        show: str = "",
        memory_mb: Count = 0,
        processes: Count = 0,
        disk_mb: Count = 0,
        setup_seconds: Seconds = 60.0,
        seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0,
        starts: Count = 0,
    ) -> None:
        line = line or harness.line
        if not line:
            raise ConfigError("option 'line' is missing; set rollout.agent.command.line")

        self.harness = harness
        self._extra_info_names = _split_names(extra_info)
        self._program_name, *argument_words = words_of(line) + words_of(arguments, "arguments")
        program = program or self._program_name
        self._name_on_path = "" if "/" in program else program
        self._command_words = with_absolute_paths([program, *argument_words])

        self.sandbox = sandbox or harness.sandbox
        program_path = shutil.which(self._command_words[0])
        self._absence = "" if program_path else f"no such program: {program!r}"
        if self._absence and self.sandbox == "none":  # in a jail, the image of a task may have the program
            raise ConfigError(f"line {line!r}: {self._absence}; {INSTALL_ADVICE}")
        if extra_info and harness.stdin != "sample":
            raise ConfigError(
                f"extra_info works only with the agent 'command': {harness.name} reads only the prompt"
            )
        if files:
            check_tree(files, _split_names(allow))

        self._file_tree = files and os.path.abspath(files)
        self._home_files = _checked_home_files({**harness.files, **home_files})
        variables = [name.partition("=") for name in _split_names(env)]
        self._set_variables = {name: value for name, equals, value in variables if equals}
        self._inherited_names = {name for name, equals, _ in variables if not equals}
        if UNWRITABLE_CHARACTERS.search(env) or any(not name.strip() for name, *_ in variables):
            raise ConfigError(
                f"env {env!r} contains a NUL character, a lone surrogate, or a value without a name"
            )

        chosen_limits = {"resident": memory_mb, "processes": processes, "disk": disk_mb}
        chosen_limits = {name: limit for name, limit in chosen_limits.items() if limit}

        if self.sandbox == "jail":
            check_sandbox()
            self._sandbox_limits = DEFAULT_LIMITS._replace(**chosen_limits)
            self._shown_paths = _paths_to_show(self._command_words, self._file_tree, _split_names(show))
        elif chosen_limits or show:
            raise ConfigError("memory_mb, processes, disk_mb and show need a sandbox; set sandbox: jail")

        self._setup_seconds = setup_seconds
        self._run_seconds = seconds
        self._start_slots = asyncio.Semaphore(starts or STARTS_PER_CPU * len(os.sched_getaffinity(0)))

    async def __call__(self, sample: Sample, endpoint: Endpoint) -> Any:
        """Run the program for an episode, and return the result. CommandError on an exit code other than 0,
        with the last line of stderr (and the position of a Python error), or if no request comes in time.
        TimeUp after `seconds`. SetupError if the sandbox of the sample's task cannot be made."""
        task = task_of(sample)
        stop = asyncio.get_running_loop().create_future()
        now = endpoint.clock
        task_deadline = math.inf
        if task:
            task_deadline = now() + endpoint.seconds - min(SPARE_SECONDS, endpoint.seconds / 4)

        runs = list[asyncio.Future[Any]]()
        try:
            async with self._start_slots:
                running = asyncio.ensure_future(self._run_program(sample, endpoint, task, stop))
                first_request = asyncio.ensure_future(endpoint.wait_for_first_request())
                runs += [running, first_request]
                await asyncio.wait(runs, timeout=self._setup_seconds, return_when=asyncio.FIRST_COMPLETED)

            if not (running.done() or first_request.done()):
                limit = f"setup_seconds ({self._setup_seconds:g} s)"
                raise CommandError(f"{self._program_name} did not make a request within {limit}")

            time_limits = self._run_seconds, task.seconds if task else 0.0, task_deadline - now()
            seconds = min(time_limit or math.inf for time_limit in time_limits)
            deadline = now() + seconds
            while not running.done() and (seconds_left := deadline - now()) > 0:
                await asyncio.wait([running], timeout=max(seconds_left, 0.05))  # the clock may pause

            if running.done():
                return running.result()

            time_up = TimeUp(
                f"{self._program_name} was stopped after {seconds:g} s, when its time limit expired"
            )
            if task:
                failure = f"the sandbox did not stop the program within {SPARE_SECONDS:g} s"
                time_up.result = {"failed": failure}
                stop.set_result(time_up)
                await asyncio.wait([running], timeout=SPARE_SECONDS)

            raise (running.done() and running.exception()) or time_up
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def version(self, tasks: Sequence[Task] = ()) -> str:
        """Ask a harness' program for the version, in a workspace without an endpoint (of the first task, if
        there are tasks); '' for a `command`. CommandError, or SandboxError, if the program cannot be run
        there; SetupError if the program cannot be run in the workspace of some task."""
        for task in tasks[1:]:
            async with self._open_workspace(NO_ENDPOINT, task) as workspace:
                await self._find_executable(workspace)

        first_task = next(iter(tasks), None)
        async with (
            asyncio.timeout(VERSION_SECONDS),
            self._open_workspace(NO_ENDPOINT, first_task) as workspace,
        ):
            program = await self._find_executable(workspace)
            words = [program, self.harness.version] if self.harness.tested else ["true"]
            environment = self._program_environment(workspace, self._placeholder_values(workspace, ""))
            output_lines = await run_program(words, workspace, environment)

        version_match = VERSION_NUMBER.search("\n".join(output_lines))
        return version_match[0] if version_match else ""

    def _open_workspace(
        self, endpoint: Endpoint, task: Task | None
    ) -> AbstractAsyncContextManager[EpisodeWorkspace]:
        if task and (self.sandbox == "none" or self._file_tree):
            excluding_option = "sandbox: none" if self.sandbox == "none" else "files"
            raise SetupError(
                f"task {task.name} has an image, so {excluding_option} cannot be used; remove that option"
            )

        if self.sandbox == "none":
            return open_local_workspace(endpoint)

        return open_sandbox_workspace(endpoint, self._sandbox_limits, self._shown_paths, task)

    async def _find_program(self, workspace: EpisodeWorkspace) -> str:
        """Find the program: in the PATH of an image, or on this machine, whose program is shown to the
        sandbox."""
        local_program = self._command_words[0]
        if workspace.task is None:
            if self._absence:
                raise CommandError(f"{self._absence}; {INSTALL_ADVICE}")
            return local_program

        for name in filter(None, (self._name_on_path, shutil.which(local_program) or local_program)):
            if image_program := await workspace.task.find_program(name):
                return image_program

        absence = (
            "is neither in the image nor on this machine"
            if self._absence
            else f"is not in the image, and {local_program} from this machine cannot be used in the image"
        )

        raise SetupError(f"the program {self._program_name!r} {absence}; install the program in the image")

    async def _find_executable(self, workspace: EpisodeWorkspace) -> str:
        """Find the program as `_find_program` does. SetupError, or CommandError, also if it cannot be
        executed: it is built for another machine, or the interpreter in the first line is missing."""
        program = await self._find_program(workspace)
        search_path = self._program_environment(workspace, self._placeholder_values(workspace, "")).get(
            "PATH", os.defpath
        )
        if problem := await why_not_executable(program, workspace, search_path):
            if workspace.task:
                image = workspace.task.task.image
                explanation = f"image {image} cannot run the program: {problem}; correct the image"
                raise SetupError(f"task {workspace.task.task.name}: {explanation}")
            raise CommandError(problem)

        return program

    async def _run_program(
        self, sample: Sample, endpoint: Endpoint, task: Task | None, stop: asyncio.Future[CommandError]
    ) -> Any:
        """Run the program until it ends, or until `stop` is done."""
        harness = self.harness
        prompt = "\n\n".join(message.content for message in sample.prompt)
        stdin_texts = {
            "sample": _sample_json(sample, self._extra_info_names),
            "prompt": prompt.encode(errors="replace"),
        }

        async with self._open_workspace(endpoint, task) as workspace:
            values = self._placeholder_values(workspace, prompt)
            words = [
                await self._find_program(workspace),
                *(fill_word(word, values) for word in self._command_words[1:]),
            ]
            if any("{prompt_file}" in word for word in self._command_words):
                await workspace.write("prompt", prompt)

            values["key"] = endpoint.api_key
            for path, text in self._home_files.items():
                await workspace.write(f"home/{path}", fill(text, values))

            environment = self._program_environment(workspace, values)
            if self._file_tree:
                await run_program(["cp", "-a", "--", f"{self._file_tree}/.", "."], workspace, environment)
            if sandbox := workspace.task:
                stop.add_done_callback(lambda _: sandbox.jail.stop())

            output_lines = list[str]()
            error = None
            try:
                output_lines = await run_program(
                    words, workspace, environment, stdin_texts.get(harness.stdin, b"")
                )
            except CommandError as command_error:
                error = command_error
                if endpoint.api_key in str(command_error) and endpoint.api_key:  # clients quote the key
                    error = CommandError(str(command_error).replace(endpoint.api_key, "KEY"))

            result: Any = result_in("".join(output_lines[-1:])) if harness.stdin == "sample" else None
            if sandbox:
                result_fields: dict[str, Any] = {}
                if isinstance(result, dict):
                    result_fields = result
                elif result is not None:
                    result_fields = {"score": result}

                reserved_names = ("changes", "failed", "ended")  # known to the sandbox, not to the program
                result = {name: value for name, value in result_fields.items() if name not in reserved_names}
                result |= await sandbox.collect_changes()

        error = stop.result() if stop.done() else error
        if error is None:
            return result

        error.result = {**result, "ended": str(error)} if sandbox else result
        raise error

    def _placeholder_values(self, workspace: EpisodeWorkspace, prompt: str) -> dict[str, str]:
        """Return the values of all placeholders but the key."""
        return {
            "base_url": workspace.endpoint.base_url,
            "anthropic_url": workspace.endpoint.anthropic_url,
            "model": workspace.endpoint.model,
            "max_tokens": str(workspace.endpoint.max_tokens),
            "workspace": workspace.work,
            "prompt": prompt,
            "prompt_file": f"{workspace.root}/prompt",
        }

    def _program_environment(self, workspace: EpisodeWorkspace, values: Mapping[str, str]) -> dict[str, str]:
        """Return the program's environment variables; NO_PROXY lets the program reach the endpoint
        directly."""
        inherited_names = self._inherited_names
        image_environment = workspace.task.environment if workspace.task else None
        # The user's packages do not lie in the episode's HOME.
        variables = (
            {"PYTHONUSERBASE": site.getuserbase()} if image_environment is None else dict(image_environment)
        )
        variables |= {
            name: value
            for name, value in inherited_environment(inherited_names).items()
            if name in inherited_names
            or (image_environment is None and not WITHHELD_VARIABLES[self.sandbox].fullmatch(name))
        }

        host = urlsplit(workspace.endpoint.base_url).hostname
        no_proxy = ",".join(filter(None, (variables.get("NO_PROXY") or variables.get("no_proxy"), host)))
        return {
            "HOME": f"{workspace.root}/home",
            "TMPDIR": f"{workspace.root}/tmp",
            **variables,
            **dict.fromkeys(("NO_PROXY", "no_proxy"), no_proxy),
            **{
                name: fill(text, values)
                for name, text in {**self.harness.environment, **self._set_variables}.items()
            },
        }


def _paths_to_show(words: list[str], files: str, show: Sequence[str]) -> list[str]:
    """List the paths that a sandbox shows: the program and the script, the tree `files`, the paths in
    `show`."""
    script_index = script_of(words)
    shown_paths = [
        *find_needed_paths(words[0]),
        *(find_needed_paths(words[script_index]) if script_index else ()),
    ]
    if words[0] == sys.executable:
        shown_paths.append(str(Path(asyncrl.__file__).parent))  # this package may lie in a checkout

    for option, path in [*(("show", path) for path in show), *([("files", files)] if files else [])]:
        shown_paths.append(os.path.abspath(os.path.expanduser(path)))
        if not os.path.exists(shown_paths[-1]):
            raise ConfigError(f"{option} {path!r}: no such file or directory")
        if os.path.realpath(shown_paths[-1]) in ("/", "/dev", "/etc", "/proc"):
            raise ConfigError(
                f"{option} {path!r}: a sandbox has its own {path}; list only the files that you need"
            )

    return shown_paths


def _checked_home_files(files: Mapping[str, str]) -> Mapping[str, str]:
    """Return texts by path in HOME. ConfigError for a path that leads out of HOME, or into another file, and
    for texts that are too large or cannot be written."""
    for path, text in files.items():
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or UNWRITABLE_CHARACTERS.search(path):
            raise ConfigError(
                f"home_files {path!r} is not the path of a file in HOME; use a path such as "
                ".config/agent.toml"
            )
        if paths_below := [other_path for other_path in files if other_path.startswith(f"{path}/")]:
            raise ConfigError(
                f"home_files {path!r} cannot be a file, because {paths_below[0]!r} is inside it"
            )
        if UNWRITABLE_CHARACTERS.search(text):
            raise ConfigError(f"home_files {path!r} contains a NUL character or a lone surrogate")

    if (size := sum(len(text.encode()) for text in files.values())) > MAX_HOME_FILE_BYTES:
        size_problem = f"home_files contains {size} bytes, but at most {MAX_HOME_FILE_BYTES} are allowed"
        raise ConfigError(f"{size_problem}; put large files into the image, or use show")

    return files


def _sample_json(sample: Sample, names: Sequence[str]) -> bytes:
    """Write the sample as JSON, with the entries `names` of extra_info, and without the ground truth."""
    extra_info = sample.extra_info
    return msgspec.json.encode(
        {
            "row": sample.row,
            "data_source": sample.data_source,
            "ability": sample.ability,
            "prompt": sample.prompt,
            "extra_info": {name: extra_info[name] for name in names if name in extra_info},
        }
    )


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
