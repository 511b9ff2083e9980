"""Programs that lead episodes: the user's own (`command`), and coding agents as people run them (harnesses/).

    sample, or prompt ──stdin──► program in a place of its own ──stdout──► its last line, a `command`'s result

What a program can read, the model that leads it may read: the sample comes without its ground truth, the
environment without keys, and HOME is the episode's own. It and its descendants are killed when the episode is
over or the worker has died.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import site
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

import asyncrl
from asyncrl.config.base import Count, Seconds
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.gateway.lines import CommandError, fill, fill_word, located, script_of, words_of
from asyncrl.gateway.places import (
    EpisodePlace,
    check_sandbox,
    check_tree,
    open_place,
    sandbox_place,
)
from asyncrl.gateway.server import Endpoint
from asyncrl.isolation.child import inherited
from asyncrl.isolation.sandbox.base import SandboxLimits
from asyncrl.isolation.sandbox.needs import needed_by
from asyncrl.isolation.wrapper import KILL_SECONDS
from asyncrl.types import Sample
from asyncrl.values import MAX_RESULT

STARTS = 2  # at once, for each CPU
VERSION_SECONDS = 60.0  # to say it, on a busy machine and from a cold disk
VERSION = re.compile(r"\d+\.\d+([\w.+-]*\w)?")
MAX_ERROR = 1 << 16  # bytes of stderr that are kept
MAX_COMPLAINT = 300  # characters
FRAME = re.compile(r'^ +File "([^"<>]+)", line (\d+)', re.MULTILINE)  # of a Python traceback
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # no environment variable can have these
INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python\d")
NOT_PASSED = {
    "none": re.compile("XDG_.*|HOME|TMPDIR|HF_HOME|HF_HUB_CACHE|TORCH_HOME"),  # the user's own, with logins
    "jail": re.compile("XDG_.*|HOME|TMPDIR|HF_.*|TORCH_HOME|SSL_CERT_.*|REQUESTS_CA_BUNDLE"),  # not there
}


class TimeUp(AsyncrlError):
    """Ends an episode whose agent has used up its time: as `timeout`, scored for its turns."""


Line = Annotated[str, msgspec.Meta(pattern=r"\S")]
NewPlace = Callable[[Endpoint], AbstractAsyncContextManager[EpisodePlace]]
NOWHERE = Endpoint("http://127.0.0.1:9/v1", "")


NEEDS = SandboxLimits(memory=0, processes=256, open_files=4096, file=1024, disk=1024, resident=2048)


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Describes a program that leads episodes. `line`, the values of `environment` and the texts of `files`
    (by their paths in HOME) have placeholders, see lines.py. `stdin`: what the program reads there; it gives
    a result only if that is the sample. `needs`: limits in a sandbox that are high enough. `resident_mb`: the
    memory that it and its children usually take. `version`: the option that prints its version; `tested`: the
    version that was tested."""

    name: str
    line: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: Literal["sample", "prompt", "nothing"] = "prompt"
    needs: SandboxLimits = NEEDS
    sandbox: Literal["jail", "none"] = "jail"
    resident_mb: int = 0
    version: str = "--version"
    tested: str = ""


COMMAND = Harness(
    name="command",
    environment={
        "OPENAI_BASE_URL": "{base_url}",
        "OPENAI_API_KEY": "{key}",
        "OPENAI_MODEL": "{model}",
    },
    stdin="sample",
    sandbox="none",
)


class Command:
    """Runs `line` and `arguments`, a command (without a shell), in a place of each episode's own, with a copy
    of the tree `files`; files with logins in it are refused unless `allow` names them. A first word `python`
    is the run's own interpreter, with the run's packages; `program` is the path of another program for the
    first word. The program gets those entries of the sample's `extra_info` (which may hold the answer) that
    the option names, and those environment variables that say where programs and libraries are (PATH, LANG,
    …) or that `env` names: `NAME`, or `NAME=value`. Commas separate several values of an option.

    `sandbox`: `jail` or `none`. In a jail a program can read its place, the system's programs, its own files
    and the paths in `show`, and reach only its endpoint. Limits: `memory_mb` of all processes with their
    files, `processes` (threads included), `disk_mb`; 0 is what the harness needs. `setup_seconds`: time
    until the first request, in which at most `starts` episodes of a worker may be (0: two per CPU);
    `seconds`: time from then on (0: as long as the episode).
    ConfigError for options that cannot be used."""

    def __init__(
        self,
        harness: Harness = COMMAND,
        *,
        line: Line = "",
        extra_info: str = "",
        directory: str = "",
        program: str = "",
        arguments: str = "",
        files: str = "",
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
        if directory:
            raise ConfigError(
                "each episode has a directory of its own: instead of `directory` set `files`, a tree that is "
                "copied there; paths of the program and its script start where the run does"
            )
        self.harness, self._extra_info = harness, _names(extra_info)
        words = words_of(line or harness.line) + words_of(arguments, "arguments")
        self._named = words[0]
        self._words = located([program or words[0], *words[1:]])
        if shutil.which(self._words[0]) is None:
            raise ConfigError(
                f"line {line or harness.line!r}: there is no program {program or self._named!r}; install it, "
                "or set program to its path"
            )
        if extra_info and harness.stdin != "sample":
            raise ConfigError(f"extra_info is for command: {harness.name} reads the prompt and nothing else")
        if files:
            check_tree(files, _names(allow))
        self._files = files and os.path.abspath(files)
        given = [name.partition("=") for name in _names(env)]
        self._env = {name: value for name, equals, value in given if equals}
        self._inherited = {name for name, equals, _ in given if not equals}
        if NO_TEXT.search(env) or any(not name.strip() for name, *_ in given):
            raise ConfigError(f"env {env!r} has a NUL, a part of a character, or a value without a name")
        self.sandbox = sandbox or harness.sandbox
        self._place: NewPlace = open_place
        chosen = {"resident": memory_mb, "processes": processes, "disk": disk_mb}
        chosen = {name: most for name, most in chosen.items() if most}
        if self.sandbox == "jail":
            check_sandbox()
            limits, shown = harness.needs._replace(**chosen), _shown(self._words, self._files, _names(show))
            self._place = partial(sandbox_place, limits=limits, show=shown)
        elif chosen or show:
            raise ConfigError("memory_mb, processes, disk_mb and show need a sandbox; set sandbox: jail")
        self._setup_seconds, self._seconds = setup_seconds, seconds or None
        self._starts = asyncio.Semaphore(starts or STARTS * len(os.sched_getaffinity(0)))

    async def __call__(self, sample: Sample, endpoint: Endpoint) -> Any:
        """Run the program for an episode, and return its result. CommandError on an exit code other than 0,
        with the last line of stderr (and the place of a Python error), or if no request comes in time.
        TimeUp after `seconds`."""
        tasks = list[asyncio.Future[Any]]()
        try:
            async with self._starts:
                tasks += map(asyncio.ensure_future, (self._run(sample, endpoint), endpoint.asked()))
                running, asked = tasks
                await asyncio.wait(tasks, timeout=self._setup_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not (running.done() or asked.done()):
                seconds = f"setup_seconds ({self._setup_seconds:g} s)"
                raise CommandError(f"{self._named} made no request within {seconds}")
            await asyncio.wait([running], timeout=self._seconds)
            if not running.done():
                raise TimeUp(f"{self._named} was ended after seconds ({self._seconds:g} s)")
            return running.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def version(self) -> str:
        """Ask a harness' program for its version, in a place without an endpoint; '' for a `command`.
        CommandError, or SandboxError, where it cannot be run there."""
        async with (
            asyncio.timeout(VERSION_SECONDS),
            self._place(NOWHERE) as place,
        ):
            words = [self._words[0], self.harness.version] if self.harness.tested else ["true"]
            said = await _talk(words, place, self._environment(place, self._values(place, "")))
        found = VERSION.search("\n".join(said))
        return found[0] if found else ""

    async def _run(self, sample: Sample, endpoint: Endpoint) -> Any:
        harness, prompt = self.harness, "\n\n".join(message.content for message in sample.prompt)
        given = {"sample": _written(sample, self._extra_info), "prompt": prompt.encode(errors="replace")}
        async with self._place(endpoint) as place:
            values = self._values(place, prompt)
            words = [fill_word(word, values) for word in self._words]
            if any("{prompt_file}" in word for word in self._words):
                await place.write("prompt", prompt)
            values["key"] = endpoint.api_key
            for path, text in harness.files.items():
                await place.write(f"home/{path}", fill(text, values))
            environment = self._environment(place, values)
            if self._files:
                await _talk(["cp", "-a", "--", f"{self._files}/.", "."], place, environment)
            said = await _talk(words, place, environment, given.get(harness.stdin, b""))
        return _result("".join(said[-1:])) if harness.stdin == "sample" else None

    def _values(self, place: EpisodePlace, prompt: str) -> dict[str, str]:
        """Return the values of all placeholders but the key."""
        return {
            "base_url": place.endpoint.base_url,
            "anthropic_url": place.endpoint.anthropic_url,
            "model": place.endpoint.model,
            "max_tokens": str(place.endpoint.max_tokens),
            "workspace": f"{place.root}/work",
            "prompt": prompt,
            "prompt_file": f"{place.root}/prompt",
        }

    def _environment(self, place: EpisodePlace, values: Mapping[str, str]) -> dict[str, str]:
        """Return its environment variables, with which it reaches the endpoint without a proxy."""
        named = self._inherited
        own = {
            name: value
            for name, value in inherited(named).items()
            if name in named or not NOT_PASSED[self.sandbox].fullmatch(name)
        }
        host = urlsplit(place.endpoint.base_url).hostname
        no_proxy = ",".join(filter(None, (own.get("NO_PROXY") or own.get("no_proxy"), host)))
        return {
            "HOME": f"{place.root}/home",
            "TMPDIR": f"{place.root}/tmp",
            "PYTHONUSERBASE": site.getuserbase(),  # it would be looked for in HOME
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


async def _talk(
    words: Sequence[str], place: EpisodePlace, environment: Mapping[str, str], given: bytes = b""
) -> list[str]:
    """Run a program in a place, and return the last lines of its output. CommandError, with the last line of
    its errors, if it fails."""
    (stdin, feed), (read_out, stdout), (read_err, stderr) = (os.pipe() for _ in range(3))
    out = asyncio.ensure_future(_tail(read_out, MAX_RESULT))
    err = asyncio.ensure_future(_tail(read_err, MAX_ERROR))
    fed = asyncio.ensure_future(_feed(feed, given))
    try:
        status = await place.run(words, environment, (stdin, stdout, stderr))
    finally:  # all of its processes have ended, and so do the pipes
        await asyncio.wait([fed, out, err], timeout=KILL_SECONDS)
    if status:
        raise CommandError(f"{words[0]} ended with code {status}: {_complaint(err.result()) or 'no message'}")
    return out.result()


async def _feed(descriptor: int, given: bytes) -> None:
    connect = asyncio.get_running_loop().connect_write_pipe
    writer, _ = await connect(asyncio.BaseProtocol, os.fdopen(descriptor, "wb", 0))
    writer.write(given)
    writer.close()  # when all of it is read, or nobody can read it


async def _tail(descriptor: int, limit: int) -> list[str]:
    """Read a pipe to its end, and return the lines in its last `limit` bytes."""
    stream, kept = asyncio.StreamReader(), bytearray()
    protocol = partial(asyncio.StreamReaderProtocol, stream)
    await asyncio.get_running_loop().connect_read_pipe(protocol, os.fdopen(descriptor, "rb", 0))
    while data := await stream.read(1 << 16):
        kept += data
        if len(kept) > 2 * limit:  # not each time: it would copy all that is kept
            del kept[:-limit]
    return kept[-limit:].decode(errors="replace").strip().splitlines()


def _complaint(lines: Sequence[str]) -> str:
    """Return the last line; for a Python traceback, with the innermost place in a user's file."""
    if not lines:
        return ""
    above = "\n".join(lines[:-1]).rpartition("Traceback (most recent call last):")[2]
    frames = [frame for frame in FRAME.findall(above) if not INSTALLED.search(frame[0])]
    raised = frames and lines[-2].startswith(" ")
    return lines[-1].strip()[:MAX_COMPLAINT] + (
        f" ({Path(frames[-1][0]).name}:{frames[-1][1]})" if raised else ""
    )


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


def _result(line: str) -> Any:
    """Read the number or object in the last line; None for any other text."""
    with suppress(ValueError, RecursionError):
        value = msgspec.json.decode(line)
        if isinstance(value, dict | int | float) and not isinstance(value, bool):
            return value
    return None
