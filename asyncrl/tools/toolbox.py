"""The tools of a worker, and of one episode: opened, called side by side, always closed.

    box = Toolbox(tools, timeout)                 one per worker: limits of each tool hold over all episodes
    session = box.session(sample)                 one per episode
    await session.open() ... await session.call(call) ... await session.result() ... await session.close()

Every call gets a reply within its deadline, whatever the tool does. A call that hangs, or ignores
cancellation, is abandoned at its deadline, and delays no other call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from asyncrl.errors import ProtocolError, SetupError, describe, one_line, reason, recorded, users_code
from asyncrl.isolation.calls import call_user, in_thread
from asyncrl.tools.base import Tool, ToolError, names, reply_of, within_memory
from asyncrl.tools.process import CallLimits
from asyncrl.tools.sample_tools import (
    SampleTools,
    accepted_arguments,
    merged_arguments,
    read_sample_tools,
    select_tools,
)
from asyncrl.tools.schema import outline
from asyncrl.tools.snapshots import Snapshots, ToolSnapshots
from asyncrl.types import Sample, ToolCall, ToolReply
from asyncrl.values import result_of

log = logging.getLogger("asyncrl.tools")

RESTORED = "\n[files are kept; variables and background processes of earlier calls are lost]"
"""A reply after `restore` ends so."""
BEGIN_SECONDS = 90.0  # for what tools share to be ready; a process has 60 s to start
CLOSE_SECONDS = 5.0  # after which a session is closed, whatever its tools do
PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds before a call is tried again; the last one repeats


class Toolbox:
    """All tools by the names that models call them by. `timeout`: seconds, for tools that set none."""

    def __init__(self, tools: Mapping[str, Tool], timeout: float = 30.0) -> None:
        self.tools = dict(tools)
        self.timeout = timeout
        self.call_limits = {name: CallLimits(tool) for name, tool in tools.items()}
        self._reported: set[str] = set()

    async def begin(self, tools: Iterable[Tool]) -> None:
        """Wait until what these tools share is ready. A failure is logged; calls fail with it, too."""

        async def begin_and_report(name: str, begin: Callable[[], Awaitable[None]]) -> None:
            with recorded() as failure:
                await call_user(begin, BEGIN_SECONDS)
            if failure.error is not None:
                self.report(name, describe(failure.error))

        names_by_begin = {tool.begin: tool.name for tool in tools if tool.begin is not None}
        await asyncio.gather(*(begin_and_report(name, begin) for begin, name in names_by_begin.items()))

    def session(self, sample: Sample, episode: str = "", snapshots: Snapshots | None = None) -> ToolSession:
        """The tools of one episode, not yet open. `episode`: its name in `snapshots`."""
        return ToolSession(self, sample, episode, snapshots)

    async def close(self) -> None:
        """End what tools share: their processes and connections, within a deadline. Never raises."""
        pools = [limits.pool.close() for limits in self.call_limits.values() if limits.pool]
        ends = {tool.end for tool in self.tools.values() if tool.end is not None}
        ended = (call_user(end, CLOSE_SECONDS) for end in ends)
        for problem in await asyncio.gather(*pools, *ended, return_exceptions=True):
            if isinstance(problem, Exception):
                log.warning("closing tools: %s", one_line(problem))

    def schemas(self, sample: Sample) -> tuple[str, ...]:
        """The schemas of the tools that a sample is given, as JSON text. A conversation that is to be learned
        may bring its own (`tool_schemas`). ToolError for an unknown tool."""
        if sample.demonstration:
            own = msgspec.json.decode(sample.extra_info).get("tool_schemas")
            if own is not None:
                return tuple(map(json.dumps, own))
        return tuple(
            tool.schema_text for tool in select_tools(self.tools, read_sample_tools(sample)).values()
        )

    def report(self, name: str, problem: str) -> None:
        """The first failure of a tool goes to the log: the model reads all of them, a person none."""
        if name not in self._reported:
            self._reported.add(name)
            log.warning("tool %s failed (later failures are not logged): %s", name, problem)

    def limit(self, tool: Tool) -> float:
        """Seconds that one call of a tool may take."""
        return self.timeout if tool.timeout is None else tool.timeout


class EpisodeObject:
    """An object that lives as long as its episode. Its calls run one after another, in their order."""

    def __init__(self, state: Any, blocking: bool, limit: float, snapshots: ToolSnapshots | None) -> None:
        self.state = state
        self.turn = asyncio.Lock()
        self.called = False  # since `save`
        self.restored = -1  # the turn up to which a snapshot brought the effects of calls
        self.note = ""  # at the end of the next reply
        self._blocking = blocking
        self._limit = limit
        self._every: int = getattr(state, "snapshots", 0)
        self.snapshots = snapshots if self._every else None
        self._unsaved = 0  # turns with calls since the newest snapshot

    async def open(self, sample: Sample, arguments: dict[str, Any]) -> None:
        """Call its `open`, where it has one, with the arguments that it takes."""
        if function := getattr(self.state, "open", None):
            given = accepted_arguments(function, arguments)
            await call_user(partial(function, sample, **given), blocking=self._blocking)

    async def result(self) -> dict[str, Any]:
        """Call its `result` after its calls. ToolError when that fails, or takes longer
        than a call may."""

        async def call(result: Callable[[], Any]) -> Any:
            async with self.turn:
                return result_of(await call_user(result, blocking=self._blocking), "it")

        try:
            found = await call_user(partial(call, self.state.result), self._limit)
            return {} if found is None else dict(found)
        except SetupError:
            raise
        except Exception as problem:
            raise ToolError(f"{type(self.state).__name__}.result: {describe(problem)}") from problem

    async def save(self, turn: int, history: str) -> None:
        """Keep a snapshot if it is called for. Without it an older one and later calls give the same."""
        self._unsaved += self.called
        self.called = False
        if self.snapshots is None or self._unsaved < self._every:
            return

        async def collect() -> bytes:
            async with self.turn:
                return bytes(await self.state.snapshot())

        try:
            archive = await call_user(collect, self._limit)
            await in_thread(partial(self.snapshots.save, turn, history, archive), "snapshot")
            self._unsaved = 0
        except Exception as problem:
            log.info("no snapshot of %s: %s", type(self.state).__name__, reason(problem))

    async def restore(self, histories: Sequence[str]) -> None:
        """Take the newest snapshot of these turns, if there is one."""
        if self.snapshots is not None:
            found = await in_thread(partial(self.snapshots.find, histories), "snapshot")
            if found is not None:
                self.restored, archive = found
                await call_user(partial(self.state.restore, archive), self._limit)

    async def close(self) -> None:
        """Close it after its calls; a call that hangs is not waited for. Raises only when cancelled."""
        try:
            await call_user(self._close, CLOSE_SECONDS)
        except Exception as problem:
            log.warning("closing %s: %s", type(self.state).__name__, reason(problem))

    async def _close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS / 2):
                await self.turn.acquire()
        if function := getattr(self.state, "close", None):
            await call_user(function, blocking=self._blocking)


class ToolSession:
    """Holds the tools of one episode. `schemas` (JSON text, the config's order) are known once it is open."""

    def __init__(self, box: Toolbox, sample: Sample, episode: str, snapshots: Snapshots | None) -> None:
        self._box = box
        self._sample = sample
        self._episode = episode
        self._snapshots = snapshots
        self._tools: dict[str, Tool] = {}
        self._objects: dict[int, EpisodeObject] = {}  # by the identity of Tool.state

    @property
    def schemas(self) -> tuple[str, ...]:
        return tuple(tool.schema_text for tool in self._tools.values())

    async def open(self) -> None:
        """Make and open all objects with state, concurrently. ToolError when one fails or its deadline
        passes; `close` must be called in any case."""
        asked = read_sample_tools(self._sample)
        tools = select_tools(self._box.tools, asked)
        await self._box.begin(tools.values())
        sharing: dict[int, list[Tool]] = {}
        for tool in filter(lambda tool: tool.state, tools.values()):
            sharing.setdefault(id(tool.state), []).append(tool)
        opening = (self._open(shared, asked) for shared in sharing.values())
        for problem in await asyncio.gather(*opening, return_exceptions=True):
            if problem is not None:
                raise problem
        self._tools = tools

    async def _open(self, tools: Sequence[Tool], asked: SampleTools) -> None:
        """The object that these tools share."""
        state = tools[0].state
        assert state is not None
        try:
            limit = max(map(self._box.limit, tools))
            blocking = any(tool.blocking for tool in tools)
            snapshots = self._snapshots.of(self._episode, tools[0].name) if self._snapshots else None
            with users_code():
                made = self._objects[id(state)] = EpisodeObject(state(), blocking, limit, snapshots)
            opening = partial(made.open, self._sample, merged_arguments(tools, asked))
            await call_user(opening, limit)
        except SetupError:
            raise
        except Exception as problem:
            raise ToolError(f"tool {tools[0].name!r} could not be opened: {describe(problem)}") from problem

    def limit(self, calls: Iterable[ToolCall]) -> float:
        """Seconds after which all these calls, side by side, have a reply: each may be checked, waits for its
        turn, then it runs, as long as its tool may take."""
        called = [self._tools[call.name] for call in calls if call.name in self._tools]
        return max((self._box.limit(tool) * (2 + (tool.check is not None)) for tool in called), default=0.0)

    async def call(self, call: ToolCall) -> ToolReply:
        """Run one call. Raises only when cancelled: every error is a reply."""
        tool = self._tools.get(call.name)
        if tool is None:
            return unknown_tool(call, self._tools)
        try:
            with users_code():
                keywords = tool.decode(call.arguments)
        except Exception as problem:
            return _bad_arguments(tool, call, reason(problem))
        started = time.monotonic()
        try:
            if tool.check is not None:
                complaint = await call_user(partial(tool.check, keywords), self._box.limit(tool))
                if complaint:
                    return _bad_arguments(tool, call, complaint)
            content, reward = await self._run(tool, call.arguments, keywords)
            return ToolReply(call, content, None, time.monotonic() - started, reward)
        except Exception as problem:
            declined = isinstance(problem, ToolError)
            if not declined:
                self._box.report(tool.name, describe(problem))
            return ToolReply(
                call,
                content=f"error: {within_memory(reason(problem))}",
                error=within_memory(describe(problem)),
                seconds=time.monotonic() - started,
                declined=declined,
            )

    async def save(self, turn: int, history: str) -> None:
        """Keep snapshots after the calls of a turn. Raises only when cancelled."""
        await asyncio.gather(*(one.save(turn, history) for one in self._objects.values()))

    async def restore(self, histories: Sequence[str]) -> None:
        """Take the newest snapshots of these recorded turns. Then `redo` leaves out their calls."""
        await asyncio.gather(*(one.restore(histories) for one in self._objects.values()))

    @property
    def restored(self) -> list[EpisodeObject]:
        """The objects that have taken a snapshot."""
        return [one for one in self._objects.values() if one.restored >= 0]

    def caught_up(self) -> None:
        """All recorded turns are there: what snapshots could not bring is reported from now on."""
        for one in self.restored:
            one.note = RESTORED

    async def redo(
        self, replies: Sequence[ToolReply], shorten: Callable[[str], str] = str, turn: int = 0
    ) -> None:
        """Rebuild the effects of recorded calls, where tools ask for it. ProtocolError: the episode must
        begin again. `shorten` cuts a reply as it was cut before it was recorded."""
        for reply in replies:
            tool = self._tools.get(reply.call.name)
            if tool is None or tool.replay == "pure" or reply.refused:
                continue
            if tool.state and self._objects[id(tool.state)].restored >= turn:
                continue
            if tool.replay == "no":
                raise ProtocolError(f"tool {tool.name} cannot be repeated, so the episode starts again")
            again = await self.call(reply.call)
            if reply.content not in (shorten(again.content), shorten(again.content + RESTORED)):
                raise ProtocolError(f"tool {tool.name} gave another reply when repeated")

    async def result(self) -> dict[str, Any] | None:
        """Return what the objects leave for the reward: their dicts in one, None without any. ToolError when
        one fails, and when two leave something of the same name."""
        joined: dict[str, Any] = {}
        asked = [one.result() for one in self._objects.values() if hasattr(one.state, "result")]
        for found in await asyncio.gather(*asked):
            if twice := sorted(joined.keys() & found.keys()):
                raise ToolError(f"two tools leave {twice[0]!r} as their result; use one of them")
            joined |= found
        return joined or None

    async def close(self) -> None:
        """Close what was made, within about CLOSE_SECONDS. Raises only when cancelled; the closing then goes
        on in the background."""
        self._tools = {}
        objects = list(self._objects.values())
        self._objects = {}
        await asyncio.gather(*(one.close() for one in objects))

    # -- one call ------------------------------------------------------------------------------------

    async def _run(self, tool: Tool, arguments: str, keywords: dict[str, Any]) -> tuple[str, float]:
        """Return (content, reward). Raises what the tool raised in its last attempt, or CallTimeout."""
        limits = self._box.call_limits[tool.name]
        limit = self._box.limit(tool)
        async with limits.place(limit):
            here = partial(self._run_here, tool, keywords)
            run = partial(limits.call_process, arguments) if tool.process else here
            result: tuple[str, float] = await call_user(partial(_attempts, tool, run), limit)
            return result

    async def _run_here(self, tool: Tool, keywords: dict[str, Any]) -> tuple[str, float]:
        run = partial(call_user, blocking=tool.blocking, live=self._box.call_limits[tool.name].live)
        if tool.state is None:
            return reply_of(await run(partial(tool.function, **keywords)))
        one = self._objects[id(tool.state)]
        one.called = True
        async with one.turn:  # until the reply is text: the next call may change what this one returned
            text, reward = reply_of(await run(partial(tool.function, one.state, **keywords)))
            note = one.note
            one.note = ""
            return text + note, reward


async def _attempts(tool: Tool, once: Callable[[], Awaitable[tuple[str, float]]]) -> tuple[str, float]:
    """Try, and try again with growing pauses; the deadline is the caller's."""
    for attempt in range(tool.retries):
        try:
            return await once()
        except ToolError:  # the tool's own answer
            raise
        except Exception as problem:
            log.debug("tool %s, attempt %d: %s", tool.name, attempt + 1, describe(problem))
            await asyncio.sleep(PAUSES[min(attempt, len(PAUSES) - 1)])
    return await once()


def _bad_arguments(tool: Tool, call: ToolCall, complaint: str) -> ToolReply:
    error = f"bad arguments for {tool.name}: {complaint}; it takes {outline(tool.schema)}"
    return ToolReply(call, f"error: {error}", error, refused=True)


def unknown_tool(call: ToolCall, known: Iterable[str]) -> ToolReply:
    """The reply to a call of a tool that does not exist."""
    error = f"unknown tool {call.name!r}; there are: {names(known)}"
    return ToolReply(call, f"error: {error}", error, refused=True)


async def call_tool(
    tool: Tool, call: ToolCall, limit: float = 30.0, sample: Sample | None = None
) -> ToolReply:
    """Run one call (`limit`: seconds) as an episode of its own. Raises only when cancelled."""
    box = Toolbox({tool.name: tool}, limit)
    session = box.session(sample or Sample(0, "", (), ""))
    try:
        await session.open()
        return await session.call(call)
    except ToolError as problem:
        return ToolReply(call, f"error: {problem}", str(problem))
    finally:
        await session.close()
        await box.close()
