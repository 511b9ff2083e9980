"""The tools of a worker, and of one episode: opened, called side by side, always closed.

    box = Toolbox(tools, timeout)                 one per worker: limits of each tool hold over all episodes
    session = box.session(sample)                 one per episode
    await session.open() ... await session.call(call) ... await session.result() ... await session.close()

Every call gets a reply within a deadline, whatever the tool does. A call that hangs, or ignores
cancellation, is abandoned at the deadline, and delays no other call."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from asyncrl.errors import ProtocolError, SetupError, describe, one_line, reason, recorded, users_code
from asyncrl.isolation.calls import call_user, call_without_deadline, in_thread
from asyncrl.registry import select_columns
from asyncrl.tools.base import (
    Tool,
    ToolAnswer,
    ToolError,
    bound_reply,
    join_names,
    read_answer,
    returns_images,
)
from asyncrl.tools.process import CallLimits
from asyncrl.tools.sample_tools import (
    SampleTools,
    accepted_arguments,
    merged_arguments,
    read_sample_tools,
    select_tools,
)
from asyncrl.tools.schema import outline_parameters
from asyncrl.tools.snapshots import Snapshots, ToolSnapshots
from asyncrl.types import ImageRef, Sample, ToolCall, ToolReply
from asyncrl.values import checked_result, finite_number
from asyncrl.vision.content import has_image_parts
from asyncrl.vision.files import StoredImage
from asyncrl.vision.layout import ImageLayout

log = logging.getLogger("asyncrl.tools")

RESTORED_NOTE = "\n[files are kept; variables and background processes from earlier calls are lost]"
"""Text that ends the first reply from each object after `restore`."""
BEGIN_SECONDS = 90.0  # for shared resources of tools to be ready; a process has 60 s to start
CLOSE_SECONDS = 5.0  # a session is closed after so long, whatever the tools do
RETRY_PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds before a call is tried again; the last pause repeats


AddImage = Callable[[StoredImage], ImageRef]
"""Takes an image into an episode, and returns the reference for replies and messages."""


class Toolbox:
    """Holds all tools by their names for models. `timeout`: seconds of a call of tools without a timeout.
    `image_layout`: how the model reads images; None for a model that reads text only."""

    def __init__(
        self, tools: Mapping[str, Tool], timeout: float = 30.0, image_layout: ImageLayout | None = None
    ) -> None:
        self.tools = dict(tools)
        self.timeout = timeout
        self.image_layout = image_layout
        self.call_limits = {name: CallLimits(tool, image_layout) for name, tool in tools.items()}
        self._reported_tools: set[str] = set()

    async def begin_shared(self, tools: Iterable[Tool]) -> None:
        """Wait until the shared resources of these tools are ready. A failure is logged; calls fail as
        well."""

        async def begin_and_report(name: str, begin: Callable[[], Awaitable[None]]) -> None:
            with recorded() as failure:
                await call_user(begin, BEGIN_SECONDS)
            if failure.error is not None:
                self.report_failure(name, describe(failure.error))

        names_by_begin = {tool.begin: tool.name for tool in tools if tool.begin is not None}
        await asyncio.gather(*(begin_and_report(name, begin) for begin, name in names_by_begin.items()))

    def session(
        self,
        sample: Sample,
        episode: str = "",
        snapshots: Snapshots | None = None,
        add_image: AddImage = lambda image: image.ref,
    ) -> ToolSession:
        """Make the tools of one episode, not yet open. `episode`: the episode's name in `snapshots`.
        `add_image` takes the images of replies into the episode."""
        return ToolSession(self, sample, episode, snapshots, add_image)

    async def close(self) -> None:
        """End shared resources of tools, processes and connections, within a deadline. Never raises."""
        pool_closings = [limits.pool.close() for limits in self.call_limits.values() if limits.pool]
        end_functions = {tool.end for tool in self.tools.values() if tool.end is not None}
        end_calls = (call_user(end, CLOSE_SECONDS) for end in end_functions)

        for problem in await asyncio.gather(*pool_closings, *end_calls, return_exceptions=True):
            if isinstance(problem, Exception):
                log.warning("closing tools: %s", one_line(problem))

    def schemas(self, sample: Sample) -> tuple[str, ...]:
        """Return the schemas of a sample's tools, as JSON text. A conversation for training may bring schemas
        (`tool_schemas`). ToolError: a tool is unknown."""
        if sample.demonstration:
            conversation_schemas = sample.extra_info.get("tool_schemas")
            if conversation_schemas is not None:
                return tuple(map(json.dumps, conversation_schemas))
        return tuple(
            tool.schema_text for tool in select_tools(self.tools, read_sample_tools(sample)).values()
        )

    def report_failure(self, name: str, problem: str) -> None:
        """Log the first failure of a tool: the model reads all failures, a person none."""
        if name not in self._reported_tools:
            self._reported_tools.add(name)
            log.warning("tool %s failed (later failures are not logged): %s", name, problem)

    def call_seconds(self, tool: Tool) -> float:
        """Return the seconds that one call of a tool may take."""
        return self.timeout if tool.timeout is None else tool.timeout


class EpisodeObject:
    """Holds an object that lives as long as its episode. Calls run one after another, in their order."""

    def __init__(
        self, state: Any, blocking: bool, call_seconds: float, snapshots: ToolSnapshots | None
    ) -> None:
        self.state = state
        self.order_lock = asyncio.Lock()  # keeps the order of calls that wait for limits or are tried again
        self.call_lock = asyncio.Lock()  # held while the object is in use
        self.was_called = False  # since the last `save`
        self.restored_turn = -1  # the turn up to which a snapshot brought the effects of calls
        self.reply_note = ""  # at the end of the next reply
        self._has_method_tools = not callable(getattr(type(state), "call", None))
        self._blocking = blocking
        self._call_seconds = call_seconds
        self._snapshot_interval: int = getattr(state, "snapshots", 0)
        self.snapshots = snapshots if self._snapshot_interval else None
        self._unsaved_turns = 0  # turns with calls since the newest snapshot

    async def open(self, sample: Sample, arguments: dict[str, Any], layout: ImageLayout | None) -> ToolAnswer:
        """Call the object's `open` with the arguments that it accepts, or the `reset` of a class without
        `call` with the columns that it accepts. Return what `reset` adds to the prompt."""
        if callable(function := getattr(self.state, "open", None)):
            accepted = accepted_arguments(function, arguments)
            await call_without_deadline(partial(function, sample, **accepted), blocking=self._blocking)
            return ToolAnswer("")

        reset = getattr(self.state, "reset", None)
        if not callable(reset) or not self._has_method_tools:
            return ToolAnswer("")

        reset_call = partial(reset, **reset_arguments(reset, sample))
        result = await call_without_deadline(reset_call, blocking=self._blocking)
        if result is None:
            return ToolAnswer("")
        if not (isinstance(result, str) or has_image_parts(result)):
            raise TypeError(
                f"reset returned a value of type {type(result).__name__}; expected text or images for the "
                "prompt, or None"
            )
        return await _read_result(result, layout)

    async def result(self) -> dict[str, Any]:
        """Call the object's `result` after all calls; or, of a class without `call`, TRL's `get_reward`, or
        read `reward`. {}: it has none of these. ToolError: this fails, or takes longer than a call may."""
        if callable(getattr(self.state, "result", None)):
            member_name = "result"
            read_result = self.state.result
        elif self._has_method_tools and callable(getattr(self.state, "get_reward", None)):
            member_name = "get_reward"
            read_result = self.state.get_reward
        elif self._has_method_tools and inspect.getattr_static(self.state, "reward", self) is not self:
            member_name = "reward"
            read_result = partial(getattr, self.state, "reward")
        else:
            return {}

        async def call_result() -> Any:
            async with self.call_lock:
                value = await call_without_deadline(read_result, blocking=self._blocking)
                if member_name != "result":
                    value = {"reward": None if value is None else finite_number("the reward", value)}
                return checked_result(value, "the method")

        try:
            object_result = await call_user(call_result, self._call_seconds)
            return {} if object_result is None else dict(object_result)
        except SetupError:
            raise
        except Exception as problem:
            raise ToolError(f"{type(self.state).__name__}.{member_name}: {describe(problem)}") from problem

    async def save_snapshot(self, turn: int, history: str) -> None:
        """Keep a snapshot if enough turns had calls. Otherwise an older snapshot and later calls give the
        same state."""
        self._unsaved_turns += self.was_called
        self.was_called = False
        if self.snapshots is None or self._unsaved_turns < self._snapshot_interval:
            return

        async def collect_snapshot() -> bytes:
            async with self.call_lock:
                return bytes(await self.state.snapshot())

        try:
            archive = await call_user(collect_snapshot, self._call_seconds)
            await in_thread(partial(self.snapshots.save_snapshot, turn, history, archive), "snapshot")
            self._unsaved_turns = 0
        except Exception as problem:
            log.info("could not take a snapshot of %s: %s", type(self.state).__name__, reason(problem))

    async def restore_snapshot(self, histories: Sequence[str]) -> None:
        """Take the newest snapshot of these turns, if present."""
        if self.snapshots is not None:
            snapshot = await in_thread(partial(self.snapshots.find_snapshot, histories), "snapshot")
            if snapshot is not None:
                self.restored_turn, archive = snapshot
                await call_user(partial(self.state.restore, archive), self._call_seconds)

    async def close(self) -> None:
        """Close the object after its calls, without waiting for hanging calls. Raises only when cancelled."""

        async def close_object() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS / 2):
                    await self.call_lock.acquire()
            if callable(function := getattr(self.state, "close", None)):
                await call_without_deadline(function, blocking=self._blocking)

        try:
            await call_user(close_object, CLOSE_SECONDS)
        except Exception as problem:
            log.warning("closing %s: %s", type(self.state).__name__, reason(problem))


class ToolSession:
    """Holds the tools of one episode. Known after `open`: `schemas` (JSON text, in the config's order), and
    `opening_text` with `opening_images`, which `reset` of the objects adds to the prompt."""

    def __init__(
        self,
        toolbox: Toolbox,
        sample: Sample,
        episode: str,
        snapshots: Snapshots | None,
        add_image: AddImage,
    ) -> None:
        self._toolbox = toolbox
        self._add_image = add_image
        self._sample = sample
        self._episode = episode
        self._snapshots = snapshots
        self.opening_text = ""
        self.opening_images: tuple[ImageRef, ...] = ()
        self._tools: dict[str, Tool] = {}
        self._objects: dict[int, EpisodeObject] = {}  # by the identity of Tool.state

    @property
    def schemas(self) -> tuple[str, ...]:
        return tuple(tool.schema_text for tool in self._tools.values())

    async def open(self) -> None:
        """Make and open all objects with state, concurrently. ToolError: an object fails or misses the
        deadline; `close` must be called in any case."""
        sample_tools = read_sample_tools(self._sample)
        tools = select_tools(self._toolbox.tools, sample_tools)
        await self._toolbox.begin_shared(tools.values())

        tools_by_state: dict[int, list[Tool]] = {}
        for tool in filter(lambda tool: tool.state, tools.values()):
            tools_by_state.setdefault(id(tool.state), []).append(tool)

        opening = (self._open_object(shared, sample_tools) for shared in tools_by_state.values())
        openings: list[ToolAnswer] = []
        for outcome in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            openings.append(outcome)

        self.opening_text = "".join(opening.content for opening in openings)
        self.opening_images = tuple(
            self._add_image(image) for opening in openings for image in opening.images
        )
        self._tools = tools

    async def _open_object(self, tools: Sequence[Tool], sample_tools: SampleTools) -> ToolAnswer:
        """Make and open the object that these tools share. Return what the object adds to the prompt."""
        state = tools[0].state
        assert state is not None
        try:
            call_seconds = max(map(self._toolbox.call_seconds, tools))
            blocking = any(tool.blocking for tool in tools)
            snapshots = (
                self._snapshots.tool_snapshots(self._episode, tools[0].name) if self._snapshots else None
            )
            arguments = merged_arguments(tools, sample_tools)

            async def open_object() -> ToolAnswer:
                made_object = await in_thread(state, "tool") if blocking else state()
                episode_object = EpisodeObject(made_object, blocking, call_seconds, snapshots)
                self._objects[id(state)] = episode_object
                return await episode_object.open(self._sample, arguments, self._toolbox.image_layout)

            opening: ToolAnswer = await call_user(open_object, call_seconds)
            return opening
        except SetupError:
            raise
        except Exception as problem:
            raise ToolError(f"tool {tools[0].name!r} could not be opened: {describe(problem)}") from problem

    def max_call_seconds(self, calls: Iterable[ToolCall]) -> float:
        """Return the seconds after which all these concurrent calls have a reply: each call may be checked,
        waits for a slot, and then runs as long as the tool may take."""
        called_tools = [self._tools[call.name] for call in calls if call.name in self._tools]
        return max(
            (self._toolbox.call_seconds(tool) * (2 + (tool.check is not None)) for tool in called_tools),
            default=0.0,
        )

    async def call(self, call: ToolCall) -> ToolReply:
        """Run one call. Raises only when cancelled: every error is a reply."""
        tool = self._tools.get(call.name)
        if tool is None:
            return unknown_tool(call, self._tools)
        try:
            with users_code():
                keywords = tool.decode(call.arguments)
        except Exception as problem:
            return _refuse_arguments(tool, call, reason(problem))

        started_at = time.monotonic()
        try:
            if tool.check is not None:
                complaint = await call_user(partial(tool.check, keywords), self._toolbox.call_seconds(tool))
                if complaint:
                    return _refuse_arguments(tool, call, complaint)
            answer = await self._run_call(tool, call.arguments, keywords)
            return ToolReply(
                call,
                answer.content,
                seconds=time.monotonic() - started_at,
                reward=answer.reward,
                images=tuple(map(self._add_image, answer.images)),
            )
        except Exception as problem:
            declined = isinstance(problem, ToolError)
            if not declined:
                self._toolbox.report_failure(tool.name, describe(problem))
            return ToolReply(
                call,
                content=f"error: {bound_reply(reason(problem))}",
                error=bound_reply(describe(problem)),
                seconds=time.monotonic() - started_at,
                declined=declined,
            )

    async def save(self, turn: int, history: str) -> None:
        """Keep snapshots of all objects after the calls of a turn. Raises only when cancelled."""
        await asyncio.gather(
            *(episode_object.save_snapshot(turn, history) for episode_object in self._objects.values())
        )

    async def restore(self, histories: Sequence[str]) -> None:
        """Take the newest snapshots of these recorded turns, whose calls `redo` then leaves out."""
        await asyncio.gather(
            *(episode_object.restore_snapshot(histories) for episode_object in self._objects.values())
        )

    @property
    def restored_objects(self) -> list[EpisodeObject]:
        """Return the objects that have taken a snapshot."""
        return [
            episode_object for episode_object in self._objects.values() if episode_object.restored_turn >= 0
        ]

    def caught_up(self) -> None:
        """Note that all recorded turns are replayed: the next reply of each restored object says what its
        snapshot could not bring back."""
        for episode_object in self.restored_objects:
            episode_object.reply_note = RESTORED_NOTE

    async def redo(
        self,
        replies: Sequence[ToolReply],
        shorten: Callable[[str, tuple[ImageRef, ...]], str] = lambda content, images: content,
        turn: int = 0,
    ) -> None:
        """Rebuild the effects of recorded calls for tools that request it. ProtocolError: the episode must
        begin again. `shorten` cuts the content of a reply, given its images, as recorded replies were
        cut."""
        for reply in replies:
            tool = self._tools.get(reply.call.name)
            if tool is None or tool.replay == "pure" or reply.refused:
                continue
            if tool.state and self._objects[id(tool.state)].restored_turn >= turn:
                continue
            if tool.replay == "no":
                raise ProtocolError(f"tool {tool.name} cannot be replayed, so the episode starts again")

            repeated = await self.call(reply.call)
            repeated_contents = [
                shorten(content, repeated.images)
                for content in (repeated.content, repeated.content + RESTORED_NOTE)
            ]
            if reply.content not in repeated_contents or reply.images != repeated.images:
                raise ProtocolError(f"tool {tool.name} gave a different reply when replayed")

    async def result(self) -> dict[str, Any] | None:
        """Return the objects' results for the reward, merged into one dict; None without any result.
        ToolError: a result fails, or two results have a common name."""
        joined_results: dict[str, Any] = {}
        result_calls = (episode_object.result() for episode_object in self._objects.values())
        for object_result in await asyncio.gather(*result_calls):
            if repeated_names := sorted(joined_results.keys() & object_result.keys()):
                raise ToolError(
                    f"two tools return {repeated_names[0]!r} as their result; use only one of them"
                )
            joined_results |= object_result
        return joined_results or None

    async def close(self) -> None:
        """Close all objects, within about CLOSE_SECONDS. Raises only when cancelled; closing then continues
        in the background."""
        self._tools = {}
        objects = list(self._objects.values())
        self._objects = {}
        await asyncio.gather(*(episode_object.close() for episode_object in objects))

    # -- one call ------------------------------------------------------------------------------------

    async def _run_call(self, tool: Tool, arguments: str, keywords: dict[str, Any]) -> ToolAnswer:
        """Return the tool's answer. Raises the error of the tool's last attempt, or CallTimeout."""
        layout = self._toolbox.image_layout
        call_limits = self._toolbox.call_limits[tool.name]
        call_seconds = self._toolbox.call_seconds(tool)
        episode_object = self._objects[id(tool.state)] if tool.state is not None else None

        async def run_once() -> ToolAnswer:
            if call_limits.pool is not None:
                answer = await call_limits.pool.call(arguments)
                if answer.refused:
                    raise ToolError(answer.content)
                return answer

            run_function = partial(
                call_without_deadline, blocking=tool.blocking, live_calls=call_limits.live_calls
            )
            if episode_object is None:
                return await _read_result(await run_function(partial(tool.function, **keywords)), layout)

            episode_object.was_called = True
            # The lock is held until the result is read: the next call may change the returned object.
            async with episode_object.call_lock:
                bound_function = partial(tool.function, episode_object.state, **keywords)
                answer = await _read_result(await run_function(bound_function), layout)
                note = episode_object.reply_note
                episode_object.reply_note = ""
                return replace(answer, content=answer.content + note)

        async def run_repeatedly() -> ToolAnswer:
            for attempt in range(tool.retries):
                try:
                    return await run_once()
                except ToolError:  # the tool's own answer
                    raise
                except Exception as problem:
                    log.debug("tool %s, attempt %d: %s", tool.name, attempt + 1, describe(problem))
                    await asyncio.sleep(RETRY_PAUSES[min(attempt, len(RETRY_PAUSES) - 1)])
            return await run_once()

        order_lock = episode_object.order_lock if episode_object is not None else None
        async with call_limits.call_slot(call_seconds, order_lock):
            answer: ToolAnswer = await call_user(run_repeatedly, call_seconds)
            return answer


async def _read_result(result: Any, layout: ImageLayout | None) -> ToolAnswer:
    """Return the answer for a tool's result. Images are decoded in a thread."""
    if layout is None or not returns_images(result):
        return read_answer(result, layout)
    answer: ToolAnswer = await in_thread(partial(read_answer, result, layout), "image")
    return answer


def reset_arguments(reset: Callable[..., Any], sample: Sample) -> dict[str, Any]:
    """Return the columns of a sample that a `reset` has parameters for, and the sample as `sample`. TypeError
    names a parameter without a column."""
    columns = sample.columns
    if "sample" in inspect.signature(reset).parameters:
        columns["sample"] = sample
    return select_columns(reset, columns)


def check_reset_columns(tools: Mapping[str, Tool], sample: Sample) -> None:
    """Check, without making an object, that a sample has the columns that the `reset` of its classes of tools
    needs. TypeError names the first column that is missing."""
    for tool in select_tools(tools, read_sample_tools(sample)).values():
        definition = getattr(tool.state, "func", tool.state)  # unwraps a functools.partial
        reset = getattr(definition, "reset", None)
        if callable(reset) and not hasattr(definition, "call") and not hasattr(definition, "open"):
            with suppress(ValueError):  # a `reset` without `self`: the first episode tells what it needs
                reset_arguments(partial(reset, None), sample)  # None: `self`


def _refuse_arguments(tool: Tool, call: ToolCall, complaint: str) -> ToolReply:
    error = f"bad arguments for {tool.name}: {complaint}; it takes {outline_parameters(tool.schema)}"
    return ToolReply(call, f"error: {error}", error, refused=True)


def unknown_tool(call: ToolCall, known_names: Iterable[str]) -> ToolReply:
    """Return the reply to a call of a tool that does not exist."""
    error = f"unknown tool {call.name!r}; available: {join_names(known_names)}"
    return ToolReply(call, f"error: {error}", error, refused=True)


async def call_tool(
    tool: Tool, call: ToolCall, call_seconds: float = 30.0, sample: Sample | None = None
) -> ToolReply:
    """Run one call of at most `call_seconds` as a separate episode. Raises only when cancelled."""
    toolbox = Toolbox({tool.name: tool}, call_seconds)
    session = toolbox.session(sample or Sample(0, "", (), "null"))
    try:
        await session.open()
        return await session.call(call)
    except ToolError as problem:
        return ToolReply(call, f"error: {problem}", str(problem))
    finally:
        await session.close()
        await toolbox.close()
