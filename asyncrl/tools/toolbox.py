"""The tools of a worker, and of one episode: opened, called side by side, always closed.

    box = Toolbox(tools, timeout)                 one per worker: limits of each tool hold over all episodes
    session = box.session(sample)                 one per episode
    await session.open() ... await session.call(call) ... await session.close()

Whatever a tool does, its callers get a reply within its deadlines. What hangs, or ignores cancellation, is
left behind and costs only itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from asyncrl.errors import ProtocolError
from asyncrl.tools.base import Tool, ToolError
from asyncrl.tools.replies import cut, reply_of
from asyncrl.tools.running import Late, bounded, finish, line
from asyncrl.tools.schema import outline
from asyncrl.types import Sample, ToolCall, ToolReply

log = logging.getLogger("asyncrl.tools")

CLOSE_SECONDS = 5.0  # after which a session is closed, whatever its tools do
PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds before a call is tried again; the last one repeats

Outcome = tuple[str, str | None, float]  # content, error, reward


class Wanted(msgspec.Struct):
    """What a sample says of its tools, in `extra_info`."""

    tools: list[str] | None = None
    tools_kwargs: dict[str, dict[str, Any] | None] | None = None

    def arguments(self, name: str) -> dict[str, Any]:
        """Constructor arguments of one tool. Parquet fills what other rows have with null: left out."""
        given = (self.tools_kwargs or {}).get(name) or {}
        return {k: v for k, v in (given.get("create_kwargs", given) or {}).items() if v is not None}


class Gate:
    """Limits of one tool over all episodes of a worker."""

    def __init__(self, tool: Tool) -> None:
        self._places = asyncio.Semaphore(tool.concurrency) if tool.concurrency else None
        self._pause = 1 / tool.rate if tool.rate else 0.0
        self._next = 0.0

    @asynccontextmanager
    async def place(self, seconds: float) -> AsyncIterator[None]:
        """The body is one call. Late when there is no place within `seconds`."""
        if self._places is not None:
            try:
                async with asyncio.timeout(seconds):
                    await self._places.acquire()
            except TimeoutError:
                raise Late(f"the tool is busy: not begun within {seconds:g} s") from None
        try:
            await self._pace(seconds)
            yield
        finally:
            if self._places is not None:
                self._places.release()

    async def _pace(self, seconds: float) -> None:
        if not self._pause:
            return
        now = time.monotonic()
        wait = max(0.0, self._next - now)
        if wait > seconds:
            raise Late(f"the tool is busy: not begun within {seconds:g} s")
        self._next = now + wait + self._pause
        await asyncio.sleep(wait)


class Toolbox:
    """All tools by the names that models call them by. `timeout`: seconds, for tools that set none."""

    def __init__(self, tools: Mapping[str, Tool], timeout: float = 30.0) -> None:
        self.tools = dict(tools)
        self.timeout = timeout
        self.gates = {name: Gate(tool) for name, tool in tools.items()}
        self.schemas = {name: json.dumps(tool.schema, ensure_ascii=False) for name, tool in tools.items()}

    def session(self, sample: Sample) -> Session:
        """The tools of one episode, not yet open."""
        return Session(self, sample)

    def limit(self, tool: Tool) -> float:
        """Seconds that one call of a tool may take."""
        return self.timeout if tool.timeout is None else tool.timeout

    def chosen(self, wanted: Wanted) -> dict[str, Tool]:
        """Those that a sample asks for, in the order of the config. ToolError for unknown names."""
        named = {
            *(wanted.tools or ()),
            *(name for name, given in (wanted.tools_kwargs or {}).items() if given),
        }
        if unknown := sorted(named - self.tools.keys()):
            raise ToolError(f"the sample asks for the tool {unknown[0]!r}; there are: {_names(self.tools)}")
        keep = self.tools if wanted.tools is None else wanted.tools
        return {
            name: _remade(tool, wanted.arguments(name)) for name, tool in self.tools.items() if name in keep
        }


class Kept:
    """An object that lives as long as its episode. Its calls run one after another, in their order."""

    def __init__(self, tool: Tool, state: Any) -> None:
        self.state = state
        self.turn = asyncio.Lock()
        self._blocking = tool.blocking

    async def say(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Call `open` or `close`, where there is one."""
        function = getattr(self.state, method, None)
        if function is not None:
            await finish(function, *arguments, blocking=self._blocking, **keywords)


class Session:
    """The tools of one episode. `schemas` (JSON text, the config's order) are known once it is open."""

    def __init__(self, box: Toolbox, sample: Sample) -> None:
        self._box = box
        self._sample = sample
        self._tools: dict[str, Tool] = {}
        self._kept: dict[int, Kept] = {}  # by the identity of Tool.state
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def schemas(self) -> tuple[str, ...]:
        return tuple(self._box.schemas[name] for name in self._tools)

    async def open(self) -> None:
        """Make and open what keeps state, side by side. ToolError when one of them fails or its deadline
        passes; `close` is due in any case."""
        wanted = _wanted(self._sample)
        tools = self._box.chosen(wanted)
        opened = [
            self._open(tool, wanted) for tool in {id(t.state): t for t in tools.values() if t.state}.values()
        ]
        for problem in await asyncio.gather(*opened, return_exceptions=True):
            if problem is not None:
                raise problem
        self._tools = tools

    async def _open(self, tool: Tool, wanted: Wanted) -> None:
        assert tool.state is not None
        try:
            kept = self._kept[id(tool.state)] = Kept(tool, tool.state())
            given = accepted(getattr(kept.state, "open", None), wanted.arguments(tool.name))
            await bounded(kept.say("open", self._sample, **given), self._box.limit(tool), self._running)
        except Exception as problem:
            raise ToolError(f"tool {tool.name!r} could not be opened: {_told(problem)}") from problem

    async def call(self, call: ToolCall) -> ToolReply:
        """Run one call. Never raises but for cancellation: whatever goes wrong is a reply."""
        tool = self._tools.get(call.name)
        if tool is None:
            return unknown_tool(call, self._tools)
        started = time.monotonic()
        content, error, reward = await self._outcome(tool, call.arguments)
        return ToolReply(call, content, error, time.monotonic() - started, reward)

    async def redo(self, replies: Sequence[ToolReply], shorten: Callable[[str], str] = str) -> None:
        """Rebuild the effects of recorded calls, where tools ask for it. ProtocolError: the episode is to
        begin again. `shorten` does to a reply what was done to it before it was recorded."""
        for reply in replies:
            tool = self._tools.get(reply.call.name)
            if tool is None or tool.replay == "pure":
                continue
            if tool.replay == "no":
                raise ProtocolError(f"tool {tool.name} cannot be repeated, so the episode starts again")
            again = await self.call(reply.call)
            if shorten(again.content) != reply.content:
                raise ProtocolError(f"tool {tool.name} gave another reply when repeated")

    async def close(self) -> None:
        """Cancel what runs and close what was made, within CLOSE_SECONDS or so. Never raises but for
        cancellation, and then goes on by itself."""
        self._tools = {}
        kept, self._kept = list(self._kept.values()), {}
        running = [task for task in self._running if not task.done()]
        for task in running:
            task.cancel()
        if kept or running:
            await asyncio.gather(_settled(running), *map(self._close, kept))

    async def _close(self, kept: Kept) -> None:
        try:
            await bounded(_closed(kept), CLOSE_SECONDS, set())
        except Exception as problem:
            log.warning("closing %s: %s", type(kept.state).__name__, _told(problem))

    # -- one call ------------------------------------------------------------------------------------

    async def _outcome(self, tool: Tool, arguments: str) -> Outcome:
        try:
            keywords = tool.decode(arguments)
        except Exception as problem:
            return _failed(
                f"bad arguments for {tool.name}: {_told(problem)}; it takes {outline(tool.schema)}", tool
            )
        limit = self._box.limit(tool)
        try:
            async with self._box.gates[tool.name].place(limit):
                value = await bounded(self._attempts(tool, keywords), limit, self._running)
            content, reward = reply_of(value, tool.max_chars)
            return content, None, reward
        except Exception as problem:
            return _failed(_told(problem), tool)

    async def _attempts(self, tool: Tool, keywords: dict[str, Any]) -> Any:
        for attempt in range(tool.retries):
            try:
                return await self._run(tool, keywords)
            except Exception as problem:
                log.debug("tool %s, attempt %d: %s", tool.name, attempt + 1, _told(problem))
                await asyncio.sleep(PAUSES[min(attempt, len(PAUSES) - 1)])
        return await self._run(tool, keywords)

    async def _run(self, tool: Tool, keywords: dict[str, Any]) -> Any:
        if tool.state is None:
            return await finish(tool.function, blocking=tool.blocking, **keywords)
        kept = self._kept[id(tool.state)]
        async with kept.turn:
            return await finish(tool.function, kept.state, blocking=tool.blocking, **keywords)


def unknown_tool(call: ToolCall, known: Iterable[str]) -> ToolReply:
    """The reply to a call of a tool that does not exist."""
    error = f"unknown tool {call.name!r}; there are: {_names(known)}"
    return ToolReply(call, f"error: {error}", error)


async def call_tool(
    tool: Tool, call: ToolCall, limit: float = 30.0, sample: Sample | None = None
) -> ToolReply:
    """Run one call (`limit`: seconds) as an episode of its own. Never raises but for cancellation."""
    session = Toolbox({tool.name: tool}, limit).session(sample or Sample(0, "", (), ""))
    try:
        await session.open()
        return await session.call(call)
    except ToolError as problem:
        return ToolReply(call, f"error: {problem}", str(problem))
    finally:
        await session.close()


def accepted(function: Callable[..., Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Those keywords that a function has parameters for; data made for other tools may bring more."""
    if function is None or not given:
        return {}
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    if left_out := sorted(given.keys() - parameters.keys()):
        log.debug("create_kwargs that nobody asks for: %s", ", ".join(left_out))
    return {key: value for key, value in given.items() if key in parameters}


async def _closed(kept: Kept) -> None:
    """`close` comes after the calls, unless one hangs: then beside it."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS / 2):
            await kept.turn.acquire()
    except TimeoutError:
        pass
    await kept.say("close")


async def _settled(running: Sequence[asyncio.Task[Any]]) -> None:
    if running:
        await asyncio.wait(running, timeout=CLOSE_SECONDS)


def _wanted(sample: Sample) -> Wanted:
    try:
        return _decode_wanted(sample.extra_info or "{}") or Wanted()
    except msgspec.MsgspecError as problem:
        raise ToolError(f"extra_info of row {sample.row}, tools or tools_kwargs: {line(problem)}") from None


def _remade(tool: Tool, arguments: dict[str, Any]) -> Tool:
    """With a sample's constructor arguments, where it is a factory's that takes them."""
    given = accepted(tool.remake, arguments)
    if not given or tool.remake is None:
        return tool
    try:
        made = tool.remake(**given)
    except Exception as problem:
        raise ToolError(f"tool {tool.name!r} refuses its tools_kwargs: {_told(problem)}") from problem
    return dataclasses.replace(made, name=tool.name)


def _failed(error: str, tool: Tool) -> Outcome:
    return cut(f"error: {error}", tool.max_chars), error, 0.0


def _told(problem: BaseException) -> str:
    """Errors raised on purpose speak for themselves; others by type and text."""
    return str(problem) if isinstance(problem, Late) else line(problem)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


_decode_wanted = msgspec.json.Decoder(Wanted | None).decode
