"""What a tool is, how its schema is derived, and how one call is run.

A tool is a function. Its JSON schema comes from the signature and the docstring; its arguments are
validated against the signature before it runs; whatever goes wrong becomes a reply that the model reads.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import threading
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, overload

import msgspec

from asyncrl.errors import ConfigError, one_line
from asyncrl.registry import Registry
from asyncrl.types import ToolCall, ToolReply

Replay = Literal["pure", "reapply", "no"]


@dataclass(frozen=True)
class Tool:
    """A callable the model may use.

    `schema` is OpenAI's tool schema. `timeout` is in seconds, None: the caller's default. `replay` says
    what may be done with a call again after a crash: `pure` (the recorded reply stands for it),
    `reapply` (run it again, its effects must be rebuilt), `no` (the episode cannot be resumed past it).
    """

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    arguments: type[msgspec.Struct]
    timeout: float | None = None
    replay: Replay = "pure"
    blocking: bool = False
    max_chars: int = 4096


@dataclass(frozen=True)
class Rewarded:
    """What a tool returns to reward the turn that called it: its reply, and the reward beside it, which the
    model does not read. The rewards of an episode add up, the reward function's included."""

    content: Any
    reward: float


tools: Registry[Tool | Callable[..., Tool]] = Registry("tool")
"""Tools, or factories of tools (functions annotated `-> Tool`, called with the config's arguments)."""


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str = "",
    timeout: float | None = None,
    replay: Replay = "pure",
    blocking: bool = False,
    max_chars: int = 4096,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(function: Callable[..., Any] | None = None, /, *, name: str = "", **options: Any) -> Any:
    """Turn a sync or async function into a `Tool`; its name, schema and checks come from the function.

    `blocking=True` runs a sync function in a thread, where the deadline can abandon it; other sync
    functions run inline and must be quick. Replies are cut at `max_chars` characters.
    """

    def build(function: Callable[..., Any]) -> Tool:
        label = name or function.__name__
        arguments, description = _arguments(function, label)
        return Tool(label, _schema(label, description, arguments), function, arguments, **options)

    return build(function) if function is not None else build


async def call_tool(tool: Tool, call: ToolCall, default_timeout: float = 30.0) -> ToolReply:
    """Run one call to its end or its deadline (`tool.timeout`, else `default_timeout`, in seconds).

    Never raises but for cancellation: bad arguments, an exception and a passed deadline are replies.
    """
    started = time.monotonic()
    limit = tool.timeout if tool.timeout is not None else default_timeout
    deadline = asyncio.timeout(limit)
    error: str | None = None
    reward = 0.0
    try:
        async with deadline:
            content, reward = _reply(await _run(tool, call.arguments))
    except msgspec.MsgspecError as problem:
        error = content = f"bad arguments for {tool.name}: {one_line(problem)}"
    except (Exception, SystemExit) as problem:
        late = isinstance(problem, TimeoutError) and deadline.expired()
        error = content = f"no reply within {limit:g} s" if late else one_line(problem)
    if error is not None:
        content = f"error: {content}"
    return ToolReply(call, _cut(content, tool.max_chars), error, time.monotonic() - started, reward)


def unknown_tool(call: ToolCall, known: typing.Iterable[str]) -> ToolReply:
    """The reply to a call of a tool that does not exist."""
    error = f"unknown tool {call.name!r}; there are: {', '.join(sorted(known))}"
    return ToolReply(call, f"error: {error}", error)


def load_tool(spec: str, **arguments: Any) -> Tool:
    """A tool by registered name, `module:function` or `file.py:function`.

    `arguments` go to a factory (a function annotated `-> Tool`); a plain tool takes none. ConfigError
    when the object is no tool, or the factory refuses its arguments.
    """
    found = tools.load(spec)
    if isinstance(found, Tool):
        if arguments:
            raise ConfigError(f"tool {spec!r} takes no arguments; remove {', '.join(sorted(arguments))}")
        return found
    if not callable(found) or inspect.signature(found).return_annotation not in (Tool, "Tool"):
        raise ConfigError(f"{spec!r} is no tool; decorate it with @asyncrl.tools.tool")
    try:
        return found(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tool {spec!r}: {error}; see its signature") from error


async def _run(tool: Tool, arguments: str) -> Any:
    checked = msgspec.json.decode(arguments or "{}", type=tool.arguments, strict=False)
    keywords = msgspec.structs.asdict(checked)
    if tool.blocking:
        return await in_thread(lambda: tool.function(**keywords), "tool")
    result = tool.function(**keywords)
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[[], Any], name: str, ended: Callable[[], None] = lambda: None) -> Any:
    """Run foreign code in a daemon thread of its own: when it never returns it costs that thread, neither a
    place in a pool nor the end of the process. `ended` is called in the loop when it has really returned,
    which may be long after this coroutine was cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        ended()
        if future.done():  # abandoned at the deadline
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function()
        except BaseException as problem:  # a SystemExit ends the thread, and must not leave anybody waiting
            error = _carried(problem)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name=name).start()
    return await future


def _carried(problem: BaseException) -> Exception:
    """What a future can carry out of a thread."""
    if isinstance(problem, Exception) and not isinstance(problem, StopIteration):
        return problem
    return RuntimeError(one_line(problem))


def _reply(value: Any) -> tuple[str, float]:
    """(text, reward) of what a tool returned."""
    given = value if isinstance(value, Rewarded) else Rewarded(value, 0.0)
    reward = float(given.reward)
    if not math.isfinite(reward):
        raise ValueError(f"the tool gave the reward {reward}, which is no finite number")
    return _text(given.content), reward


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(msgspec.to_builtins(value), ensure_ascii=False)


def _cut(text: str, limit: int) -> str:
    """At most `limit` characters, saying so where something was cut."""
    if len(text) <= limit:
        return text
    note = f" [cut: {len(text)} characters]"
    return (text[: max(0, limit - len(note))] + note)[:limit]


def _arguments(function: Callable[..., Any], name: str) -> tuple[type[msgspec.Struct], str]:
    """The arguments of `function` as a Struct that refuses unknown names, and the description."""
    hints = typing.get_type_hints(function, include_extras=True)
    description, notes = _docstring(function)
    fields: list[Any] = []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name!r}: parameter {key!r} cannot be passed by name")
        if key not in hints:
            raise ConfigError(f"tool {name!r}: parameter {key!r} needs a type annotation")
        hint = Annotated[hints[key], msgspec.Meta(description=notes[key])] if key in notes else hints[key]
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((key, hint, *default))
    struct = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    return struct, description


def _schema(name: str, description: str, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    _, parts = msgspec.json.schema_components((arguments,), ref_template="#/$defs/{name}")
    parts = dict(parts)
    parameters = {k: v for k, v in parts.pop(name).items() if k in ("type", "properties", "required")}
    if parts:
        parameters["$defs"] = parts
    body = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": body}


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the notes of a Google-style `Args:` section (one line each)."""
    text = inspect.getdoc(function) or ""
    head, _, tail = text.partition("Args:\n")
    notes = {}
    for line in tail.splitlines():
        if not (match := re.match(r"\s+(\w+)(?:\s*\(.*?\))?:\s*(.+)", line)):
            break
        notes[match[1]] = match[2].strip()
    return " ".join(head.split("\n\n")[0].split()), notes
