"""Programs that lead episodes: the user's own (`command`), and coding agents as people run them (harnesses).

    sample, or prompt ──stdin──► program in a place of its own ──stdout──► its last line, a `command`'s result

What a program can read, the model that leads it may read: the sample comes without its ground truth, the
environment without keys, and HOME is the episode's own. It and its descendants are killed when the episode is
over or the worker has died.
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
from asyncrl.data.task_sandboxes import LIMITS, RESULT_SECONDS
from asyncrl.data.tasks import Task, task_of
from asyncrl.errors import ConfigError, SetupError
from asyncrl.gateway.executables import why_not_executable
from asyncrl.gateway.lines import CommandError, fill, fill_word, located, script_of, words_of
from asyncrl.gateway.places import (
    EpisodePlace,
    check_sandbox,
    check_tree,
    open_place,
    result_in,
    sandbox_place,
    talk,
)
from asyncrl.gateway.server import Endpoint
from asyncrl.isolation.child import inherited
from asyncrl.isolation.sandbox.needs import needed_by
from asyncrl.types import Sample

INSTALL = "install it, or set program to its path"
STARTS = 2  # at once, for each CPU
SPARE_SECONDS = RESULT_SECONDS + 5.0  # at the end of an episode, to collect what changed
VERSION_SECONDS = 60.0  # to say it, on a busy machine and from a cold disk
VERSION = re.compile(r"\d+\.\d+([\w.+-]*\w)?")
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # no environment variable can have these
NOT_PASSED = {
    "none": re.compile("XDG_.*|HOME|TMPDIR|HF_HOME|HF_HUB_CACHE|TORCH_HOME"),  # the user's own, with logins
    "jail": re.compile("XDG_.*|HOME|TMPDIR|HF_.*|TORCH_HOME|SSL_CERT_.*|REQUESTS_CA_BUNDLE"),  # not there
}


class TimeUp(CommandError):
    """Ends an episode whose agent has used up its time: as `timeout`, scored for its turns."""


Line = Annotated[str, msgspec.Meta(pattern=r"\S")]
NO_FILES: Mapping[str, str] = {}
MAX_HOME_FILES = 1 << 20  # bytes of all together
NOWHERE = Endpoint("http://127.0.0.1:9/v1", "")


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Describes a program that leads episodes. `line`, the values of `environment` and the texts of `files`
    (by their paths in HOME) have placeholders, see lines.py. `stdin`: what the program reads there; it gives
    a result only if that is the sample. `resident_mb`: the memory that it and its children usually take.
    `version`: the option that prints its version; `tested`: the version that was tested."""

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
    """Runs `line` and `arguments`, a command (without a shell), in a place of each episode's own, with a copy
    of the tree `files`; files with logins in it are refused unless `allow` names them. `home_files`: texts
    with placeholders that are written into its HOME first, by their paths there. A first word `python` is the
    run's own interpreter, with the run's packages; `program` is the path of another program for the first
    word. The program gets those entries of the sample's `extra_info` (which may hold the answer) that the
    option names, and those environment variables that say where programs and libraries are (PATH, LANG, …)
    or that `env` names: `NAME`, or `NAME=value`. Commas separate several values of an option.

    `sandbox`: `jail` or `none`. In a jail a program can read its place, the system's programs, its own files
    and the paths in `show`, and reach only its endpoint. Limits: `memory_mb` of all processes with their
    files, `processes` (threads included), `disk_mb`; 0 is the default. `setup_seconds`: time
    until the first request, in which at most `starts` episodes of a worker may be (0: two per CPU);
    `seconds`: time from then on (0: as long as the episode).

    A sample with a task (data/tasks.py) has its place in the task's image, with the sizes and seconds that
    the task states. The program is the image's, if it has one of that name; else the one of this machine. Its
    result has the changes of the task's workspace, however it ended.
    ConfigError for options that cannot be used."""

    def __init__(
        self,
        harness: Harness = COMMAND,
        *,
        line: Line = "",
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
        if not (line or harness.line):
            raise ConfigError("option 'line' is missing; set rollout.agent.command.line")
        self.harness = harness
        self._extra_info = _names(extra_info)
        words = words_of(line or harness.line) + words_of(arguments, "arguments")
        self._named = words[0]
        self._searched = "" if "/" in (program or self._named) else program or self._named
        self._words = located([program or words[0], *words[1:]])
        self.sandbox = sandbox or harness.sandbox
        found = shutil.which(self._words[0])
        self._absent = "" if found else f"there is no program {program or self._named!r}"
        if self._absent and self.sandbox == "none":  # else the image of a task may have it
            raise ConfigError(f"line {line or harness.line!r}: {self._absent}; {INSTALL}")
        if extra_info and harness.stdin != "sample":
            raise ConfigError(f"extra_info is for command: {harness.name} reads the prompt and nothing else")
        if files:
            check_tree(files, _names(allow))
        self._files = files and os.path.abspath(files)
        self._home_files = _checked_home_files({**harness.files, **home_files})
        given = [name.partition("=") for name in _names(env)]
        self._env = {name: value for name, equals, value in given if equals}
        self._inherited = {name for name, equals, _ in given if not equals}
        if NO_TEXT.search(env) or any(not name.strip() for name, *_ in given):
            raise ConfigError(f"env {env!r} has a NUL, a part of a character, or a value without a name")
        chosen = {"resident": memory_mb, "processes": processes, "disk": disk_mb}
        chosen = {name: most for name, most in chosen.items() if most}
        if self.sandbox == "jail":
            check_sandbox()
            self._limits = LIMITS._replace(**chosen)
            self._shown = _shown(self._words, self._files, _names(show))
        elif chosen or show:
            raise ConfigError("memory_mb, processes, disk_mb and show need a sandbox; set sandbox: jail")
        self._setup_seconds = setup_seconds
        self._seconds = seconds
        self._starts = asyncio.Semaphore(starts or STARTS * len(os.sched_getaffinity(0)))

    async def __call__(self, sample: Sample, endpoint: Endpoint) -> Any:
        """Run the program for an episode, and return its result. CommandError on an exit code other than 0,
        with the last line of stderr (and the place of a Python error), or if no request comes in time.
        TimeUp after `seconds`. SetupError where the sandbox of the sample's task cannot be made."""
        task = task_of(sample)
        stop = asyncio.get_running_loop().create_future()
        now = endpoint.clock
        until = now() + endpoint.seconds - min(SPARE_SECONDS, endpoint.seconds / 4) if task else math.inf
        runs = list[asyncio.Future[Any]]()
        try:
            async with self._starts:
                both = self._run(sample, endpoint, task, stop), endpoint.wait_for_first_request()
                running, asked = runs = [*map(asyncio.ensure_future, both)]
                await asyncio.wait(runs, timeout=self._setup_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not (running.done() or asked.done()):
                limit = f"setup_seconds ({self._setup_seconds:g} s)"
                raise CommandError(f"{self._named} made no request within {limit}")
            limits = self._seconds, task.seconds if task else 0.0, until - now()
            seconds = min(most or math.inf for most in limits)
            due = now() + seconds
            while not running.done() and (left := due - now()) > 0:
                await asyncio.wait([running], timeout=max(left, 0.05))  # the clock may stand
            if running.done():
                return running.result()
            late = TimeUp(f"{self._named} was ended after {seconds:g} s, as its time was up")
            if task:
                late.result = {"failed": f"its sandbox did not end the program within {SPARE_SECONDS:g} s"}
                stop.set_result(late)
                await asyncio.wait([running], timeout=SPARE_SECONDS)
            raise (running.done() and running.exception()) or late
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def version(self, tasks: Sequence[Task] = ()) -> str:
        """Ask a harness' program for its version, in a place without an endpoint, that of the first task if
        there are some; '' for a `command`. CommandError, or SandboxError, where it cannot be run there;
        SetupError where it cannot be in the places of all tasks."""
        for other in tasks[1:]:
            async with self._place(NOWHERE, other) as place:
                await self._executable(place)
        first = next(iter(tasks), None)
        async with asyncio.timeout(VERSION_SECONDS), self._place(NOWHERE, first) as place:
            program = await self._executable(place)
            words = [program, self.harness.version] if self.harness.tested else ["true"]
            said = await talk(words, place, self._environment(place, self._values(place, "")))
        found = VERSION.search("\n".join(said))
        return found[0] if found else ""

    def _place(self, endpoint: Endpoint, task: Task | None) -> AbstractAsyncContextManager[EpisodePlace]:
        if task and (self.sandbox == "none" or self._files):
            other = "sandbox: none" if self.sandbox == "none" else "files"
            raise SetupError(f"task {task.name} has an image, so {other} cannot be; leave it out")
        if self.sandbox == "none":
            return open_place(endpoint)
        return sandbox_place(endpoint, self._limits, self._shown, task)

    async def _program(self, place: EpisodePlace) -> str:
        """Find the program: in an image by its PATH, or this machine's, which is shown there."""
        here = self._words[0]
        if place.task is None:
            if self._absent:
                raise CommandError(f"{self._absent}; {INSTALL}")
            return here
        for name in filter(None, (self._searched, shutil.which(here) or here)):
            if found := await place.task.find(name):
                return found
        why = "nor has this machine" if self._absent else f"and {here} of this machine cannot be shown there"
        raise SetupError(f"the image has no program {self._named!r}, {why}; install it in the image")

    async def _executable(self, place: EpisodePlace) -> str:
        """Find the program as `_program` does. SetupError, or CommandError, also where it cannot be executed:
        it is no program of this machine, or what its first line names is not there."""
        program = await self._program(place)
        search_path = self._environment(place, self._values(place, "")).get("PATH", os.defpath)
        if trouble := await why_not_executable(program, place, search_path):
            if place.task:
                image = place.task.task.image
                why = f"image {image} cannot run the program: {trouble}; correct the image"
                raise SetupError(f"task {place.task.task.name}: {why}")
            raise CommandError(trouble)
        return program

    async def _run(
        self, sample: Sample, endpoint: Endpoint, task: Task | None, stop: asyncio.Future[CommandError]
    ) -> Any:
        """Run the program until it ends, or until `stop` is done."""
        harness = self.harness
        prompt = "\n\n".join(message.content for message in sample.prompt)
        given = {"sample": _written(sample, self._extra_info), "prompt": prompt.encode(errors="replace")}
        async with self._place(endpoint, task) as place:
            values = self._values(place, prompt)
            words = [await self._program(place), *(fill_word(word, values) for word in self._words[1:])]
            if any("{prompt_file}" in word for word in self._words):
                await place.write("prompt", prompt)
            values["key"] = endpoint.api_key
            for path, text in self._home_files.items():
                await place.write(f"home/{path}", fill(text, values))
            environment = self._environment(place, values)
            if self._files:
                await talk(["cp", "-a", "--", f"{self._files}/.", "."], place, environment)
            if sandbox := place.task:
                stop.add_done_callback(lambda _: sandbox.jail.stop())
            said = list[str]()
            error = None
            try:
                said = await talk(words, place, environment, given.get(harness.stdin, b""))
            except CommandError as raised:
                error = raised
                if endpoint.api_key in str(raised) and endpoint.api_key:  # clients quote it
                    error = CommandError(str(raised).replace(endpoint.api_key, "KEY"))
            result: Any = result_in("".join(said[-1:])) if harness.stdin == "sample" else None
            if sandbox:
                told = {} if result is None else result if isinstance(result, dict) else {"score": result}
                ours = ("changes", "failed", "ended")  # known to the sandbox, not to the program
                result = {name: value for name, value in told.items() if name not in ours}
                result |= await sandbox.result()
        error = stop.result() if stop.done() else error
        if error is None:
            return result
        error.result = {**result, "ended": str(error)} if sandbox else result
        raise error

    def _values(self, place: EpisodePlace, prompt: str) -> dict[str, str]:
        """Return the values of all placeholders but the key."""
        return {
            "base_url": place.endpoint.base_url,
            "anthropic_url": place.endpoint.anthropic_url,
            "model": place.endpoint.model,
            "max_tokens": str(place.endpoint.max_tokens),
            "workspace": place.work,
            "prompt": prompt,
            "prompt_file": f"{place.root}/prompt",
        }

    def _environment(self, place: EpisodePlace, values: Mapping[str, str]) -> dict[str, str]:
        """Return its environment variables, with which it reaches the endpoint without a proxy."""
        named = self._inherited
        image = place.task.environment if place.task else None
        own = {"PYTHONUSERBASE": site.getuserbase()} if image is None else dict(image)  # not in its HOME
        own |= {
            name: value
            for name, value in inherited(named).items()
            if name in named or (image is None and not NOT_PASSED[self.sandbox].fullmatch(name))
        }
        host = urlsplit(place.endpoint.base_url).hostname
        no_proxy = ",".join(filter(None, (own.get("NO_PROXY") or own.get("no_proxy"), host)))
        return {
            "HOME": f"{place.root}/home",
            "TMPDIR": f"{place.root}/tmp",
            **own,
            **dict.fromkeys(("NO_PROXY", "no_proxy"), no_proxy),
            **{name: fill(text, values) for name, text in {**self.harness.environment, **self._env}.items()},
        }


def _shown(words: list[str], files: str, show: Sequence[str]) -> list[str]:
    """List what a sandbox shows: the program and its script, the tree `files`, and the paths in `show`."""
    script = script_of(words)
    shown = [*needed_by(words[0]), *(needed_by(words[script]) if script else ())]
    shown += [str(Path(asyncrl.__file__).parent)] * (words[0] == sys.executable)  # a checkout's
    for option, path in [*(("show", path) for path in show), *([("files", files)] if files else [])]:
        shown.append(os.path.abspath(os.path.expanduser(path)))
        if not os.path.exists(shown[-1]):
            raise ConfigError(f"{option} {path!r}: no such file or directory")
        if os.path.realpath(shown[-1]) in ("/", "/dev", "/etc", "/proc"):
            raise ConfigError(f"{option} {path!r}: a sandbox has its own; name what is in it")
    return shown


def _checked_home_files(files: Mapping[str, str]) -> Mapping[str, str]:
    """Return texts by their paths in HOME. ConfigError for a path that leads out of it, or into another one
    of the files, and for texts that are too large or cannot be written."""
    for path, text in files.items():
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or NO_TEXT.search(path):
            raise ConfigError(f"home_files {path!r} is no path of a file in HOME, such as .config/agent.toml")
        if inner := [other for other in files if other.startswith(f"{path}/")]:
            raise ConfigError(f"home_files {path!r} cannot be a file: {inner[0]!r} lies below it")
        if NO_TEXT.search(text):
            raise ConfigError(f"home_files {path!r} contains a NUL or a lone surrogate")
    if (size := sum(len(text.encode()) for text in files.values())) > MAX_HOME_FILES:
        why = f"home_files has {size} bytes, more than the {MAX_HOME_FILES} allowed"
        raise ConfigError(f"{why}; put large files into the image, or show them")
    return files


def _written(sample: Sample, names: Sequence[str]) -> bytes:
    """Write the sample as JSON, with these entries of its extra_info, and without its ground truth."""
    extra = msgspec.json.decode(sample.extra_info)
    return msgspec.json.encode(
        {
            "row": sample.row,
            "data_source": sample.data_source,
            "ability": sample.ability,
            "prompt": sample.prompt,
            "extra_info": {name: extra[name] for name in names if name in extra},
        }
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
