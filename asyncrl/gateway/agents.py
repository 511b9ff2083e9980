"""Agents: functions of the user, or programs, that lead an episode through the endpoint.

    sample as JSON ──stdin──► program ──stdout──► its last line, as JSON, is the result

What a program can read, the model that leads it may read: the sample comes without its ground truth. The
program finds its model by OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. It and its descendants are killed
when the episode is over or the worker has died.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

import msgspec

from asyncrl.config import Plugin
from asyncrl.conversation.requests import AgentRequest, Untrained
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.gateway.server import Endpoint
from asyncrl.isolation.child import inherited, wrapped
from asyncrl.isolation.wrapper import KILL_SECONDS, kill
from asyncrl.registry import Call, Registry, load_object, make
from asyncrl.types import Sample
from asyncrl.values import finite

MAX_RESULT = 1 << 20  # bytes of a result, as JSON

Agent = Callable[..., Any]
"""`(sample: Sample, endpoint: Endpoint) -> None | number | dict`, or a coroutine of that. What it returns is
the `result` that reward functions see. Keyword-only parameters are its options. A class whose instances are
called like this is an agent as well: its constructor takes the options, and refuses them with ConfigError;
all episodes of a worker share one instance."""

ASKED = Call("def untrained(request: AgentRequest) -> bool", ("request",))
CALL = Call("async def agent(sample, endpoint, *, options)", ("sample", "endpoint"))

agents: Registry[Agent] = Registry("agent")


def load_agent(plugin: Plugin, where: str = "rollout.agent") -> Agent:
    """Make the agent of a registered name, `module:function` or `file.py:function`, with its options.
    ConfigError begins with `where`."""
    return agents.make(plugin, where, CALL)


def load_untrained(names: Sequence[str], where: str = "rollout.untrained_agents") -> Untrained:
    """Tell side requests: by the names of agents, globs among them, and by functions of the user
    (`module:function`, `file.py:function`) of a request. ConfigError that begins with `where`."""
    functions = [
        make(load_object(name, where), {}, f"{where} {name!r}", ASKED) for name in names if ":" in name
    ]
    globs = [name for name in names if ":" not in name]

    def untrained(request: AgentRequest) -> bool:
        named = any(fnmatchcase(request.agent, glob) for glob in globs)
        return named or any(bool(function(request)) for function in functions)

    return untrained


def result_of(value: Any) -> Any:
    """Return what an agent returned, as a JSON value. TypeError or ValueError where it is none, or no
    result."""
    if isinstance(value, Real):
        value = finite("the agent's result", value)
    elif value is not None and not isinstance(value, Mapping):
        raise TypeError(f"the agent returned a {type(value).__name__}; None, a number or a dict is expected")
    encoded = msgspec.json.encode(value)
    if len(encoded) > MAX_RESULT:
        raise ValueError(f"the agent returned {len(encoded)} bytes, {MAX_RESULT} are allowed")
    return msgspec.json.decode(encoded)


# -- programs: any language, any framework ------------------------------------------------------------


MAX_ERROR = 1 << 16  # bytes of stderr that are kept
MAX_COMPLAINT = 300  # characters
FRAME = re.compile(r'^ +File "([^"<>]+)", line (\d+)', re.MULTILINE)  # of a Python traceback
INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python\d")

Line = Annotated[str, msgspec.Meta(pattern=r"\S")]


class CommandError(AsyncrlError):
    """The program could not be run, or failed."""


@agents.register("command")
class Command:
    """Runs `line`, a command with its arguments (no shell; `sh -c '...'` is one), in `directory` (default:
    where the run was started). Its first word `python` is the run's own interpreter, with the packages that
    the run has. Of the sample's `extra_info`, which may hold the answer, the program gets the entries named
    here, with commas; of the environment variables those that say where things are (PATH, HOME, LANG, …), and
    those named in `env`, with commas.
    ConfigError for a line or a directory that cannot be used."""

    def __init__(self, *, line: Line, directory: str = "", extra_info: str = "", env: str = "") -> None:
        self._words, self._directory = _split(line), directory or None
        self._extra_info, self._env = _names(extra_info), _names(env)
        if directory and not Path(directory).is_dir():
            raise ConfigError(f"directory {directory!r}: no such directory")
        program = self._words[0]
        if shutil.which(Path(directory, program) if "/" in program else program) is None:
            raise ConfigError(f"line {line!r}: there is no program {program!r}; install it, or give its path")

    async def __call__(self, sample: Sample, endpoint: Endpoint) -> Any:
        """CommandError on an exit code other than 0, with the last line of stderr and, of an error in Python,
        its place."""
        given, program = _written(sample, self._extra_info), self._words[0]
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *wrapped(self._words),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=self._directory,
                env=_environment(inherited(self._env), endpoint),
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"{program} cannot be run: {error.strerror}") from error
        talk = asyncio.ensure_future(_talk(process, given))
        try:
            result, complaint = await asyncio.shield(talk)
        finally:
            if not talk.done():
                with suppress(ProcessLookupError):
                    kill(process.pid)
                await asyncio.wait([talk], timeout=2 * KILL_SECONDS)
        if process.returncode:
            raise CommandError(f"{program} ended with code {process.returncode}: {complaint or 'no message'}")
        return _result(result)


async def _talk(process: asyncio.subprocess.Process, sample: bytes) -> tuple[str, str]:
    """The last line of its output and why it failed, when it and all that it started have ended."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(sample)
    process.stdin.close()  # when all of it is read, or the program has ended
    tails = _tail(process.stdout, MAX_RESULT), _tail(process.stderr, MAX_ERROR)
    out, err = await asyncio.gather(*tails)
    await process.wait()
    return "".join(out[-1:]), _complaint(err)


async def _tail(stream: asyncio.StreamReader, limit: int) -> list[str]:
    """The last lines of a stream of any length, of which `limit` bytes are kept."""
    kept = b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-limit:]
    return kept.decode(errors="replace").strip().splitlines()


def _complaint(lines: Sequence[str]) -> str:
    """The last line; that of a Python traceback with the innermost place in a user's file."""
    if not lines:
        return ""
    above = "\n".join(lines[:-1]).rpartition("Traceback (most recent call last):")[2]
    frames = [frame for frame in FRAME.findall(above) if not INSTALLED.search(frame[0])]
    raised = frames and lines[-2].startswith(" ")
    return lines[-1].strip()[:MAX_COMPLAINT] + (
        f" ({Path(frames[-1][0]).name}:{frames[-1][1]})" if raised else ""
    )


def _written(sample: Sample, names: Sequence[str]) -> bytes:
    """The sample as JSON, with these entries of its extra_info, and without its ground truth."""
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
    return [name.strip() for name in text.split(",")]


def _split(line: str) -> list[str]:
    try:
        program, *arguments = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"line {line!r}: {error}") from None
    return [sys.executable if program in ("python", "python3") else program, *arguments]


def _environment(own: Mapping[str, str], endpoint: Endpoint) -> dict[str, str]:
    """Add to its own variables the endpoint, which is not reached through a proxy."""
    no_proxy = ",".join(filter(None, (own.get("NO_PROXY") or own.get("no_proxy"), "127.0.0.1")))
    return {
        **own,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def _result(line: str) -> Any:
    """The number or object in the last line; None for any other text."""
    with suppress(ValueError, RecursionError):
        value = msgspec.json.decode(line)
        if isinstance(value, dict | int | float) and not isinstance(value, bool):
            return value
    return None
