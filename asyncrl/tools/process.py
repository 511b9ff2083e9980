"""Tools in processes of their own (`process=True`): what runs past its deadline is killed, with its children.

    worker ──Start, then the text of one call's arguments at a time──► child
           ◄──────────────── Answer, of bounded size ────────────────

Frames over a socket that is the child's stdin and stdout: four bytes of length, then msgpack. What the tool
prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

import msgspec

from asyncrl.errors import AsyncrlError, ConfigError, one_line, reason
from asyncrl.isolation.foreign import Late, in_thread
from asyncrl.registry import load_object
from asyncrl.tools.base import Tool, ToolError
from asyncrl.tools.replies import MAX_REPLY, reply_of, within_memory

START_SECONDS = 60.0  # for a child to import what the tool needs
LENGTH = struct.Struct(">I")
LARGEST = 1 << 24  # bytes of a frame to a child
ANSWER = 2 * MAX_REPLY  # bytes of a frame from a child


class ChildError(AsyncrlError):
    """The process of a tool failed, or what ran in it."""


class Start(msgspec.Struct, frozen=True):
    """Which tool the child runs: a function, or a factory with its arguments, as `module:name`."""

    spec: str
    arguments: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """What came of a call; after Start, whether the tool is there. `meant`: the error is the tool's own
    answer."""

    content: str = ""
    error: str = ""
    reward: float = 0.0
    meant: bool = False


_encode = msgspec.msgpack.Encoder().encode
_start = msgspec.msgpack.Decoder(Start).decode
_text = msgspec.msgpack.Decoder(str).decode
_answer = msgspec.msgpack.Decoder(Answer).decode


def origin(tool: Tool) -> Start:
    """How a child finds the tool. ConfigError when it has no name to be found by."""
    made, arguments = tool.function, {}
    if isinstance(tool.remake, partial):
        made, arguments = tool.remake.func, tool.remake.keywords
    module, name = made.__module__, made.__qualname__
    if not name.isidentifier():
        raise ConfigError(f"tool {tool.name!r}: process=True needs a function at the top level of its file")
    if module == "__main__" or module.startswith("asyncrl_user_"):  # not importable by name
        module = os.path.abspath(sys.modules[module].__file__ or "")
    return Start(f"{module}:{name}", arguments)


# -- the worker's end ------------------------------------------------------------------------------------


class Child:
    """A process that runs one call at a time. `busy`: it has a call that it has not answered."""

    def __init__(self, process: subprocess.Popen[bytes], reader: StreamReader, writer: StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.busy = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def usable(self) -> bool:
        return not self.busy and not self.ended

    async def ask(self, message: Start | str) -> Answer:
        """ChildError when it ends, or answers with more than ANSWER bytes."""
        self.busy = True
        body = _encode(message)
        try:
            self._writer.write(LENGTH.pack(len(body)) + body)
            size = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0]
            if size > ANSWER:
                raise ChildError(f"the process of the tool gave {size} bytes")
            answer = _answer(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChildError(f"the process of the tool ended with code {await self.gone()}") from None
        self.busy = False
        return answer

    async def gone(self) -> int:
        """Its exit code, once it has ended."""
        return await in_thread(self._process.wait, "tool-process")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()


class Lease:
    """A child for one call, from when it is first asked; replaced where it dies before it is asked again."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.child: Child | None = None

    async def ask(self, arguments: str) -> Answer:
        """ToolError is the tool's own answer; ChildError: it failed, or its process."""
        if self.child is None or not self.child.usable:
            self.give_back()
            self.child = await self._pool.take()
        answer = await self.child.ask(arguments)
        if answer.error:
            raise (ToolError if answer.meant else ChildError)(answer.error)
        return answer

    def give_back(self) -> None:
        """Ready for the next call, or killed."""
        if self.child is not None:
            self._pool.put(self.child)
            self.child = None


class Pool:
    """The processes of one tool: as many as calls run side by side.

    One that starts is a call's until its deadline; then it goes on starting, for the next call.
    """

    def __init__(self, tool: Tool) -> None:
        self._origin = origin(tool)
        self._idle: list[Child] = []
        self._starts: dict[asyncio.Task[Child], bool] = {}  # under way; whether a call waits for it
        self._all: set[Child] = set()  # but for those that have ended

    @contextlib.contextmanager
    def lease(self) -> Iterator[Lease]:
        """The body makes one call."""
        lease = Lease(self)
        try:
            yield lease
        finally:
            lease.give_back()

    def put(self, child: Child) -> None:
        """Keep it for another call, or kill it when it did not answer."""
        if child.usable:
            self._idle.append(child)
        else:
            child.kill()

    async def take(self) -> Child:
        """An idle child, or else one that starts. Errors: see `_start`."""
        while self._idle:
            if (child := self._idle.pop()).usable:
                return child
            child.kill()
        start = next((start for start, awaited in self._starts.items() if not awaited), None)
        if start is None:
            start = asyncio.create_task(self._start())
            start.add_done_callback(self._started)
        self._starts[start] = True
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            if start.done():
                self._keep(start)
            else:
                self._starts[start] = False
            raise

    def _started(self, start: asyncio.Task[Child]) -> None:
        if not self._starts.pop(start):
            self._keep(start)

    def _keep(self, start: asyncio.Task[Child]) -> None:
        """What came of a start that no call waits for; a failure is met again by the next one."""
        if not start.cancelled() and start.exception() is None:
            self.put(start.result())

    async def _start(self) -> Child:
        """A child that has imported the tool. ChildError when it cannot, Late when that takes too long."""
        ours, theirs = socket.socketpair()
        try:  # beside the loop: starting a process takes a while, more so on a busy machine
            process = await in_thread(lambda: _spawn(theirs), "tool-process")
        except BaseException:
            ours.close()  # a child that was started all the same ends with it
            raise
        child = Child(process, *await asyncio.open_connection(sock=ours))
        self._all = {child} | {other for other in self._all if not other.ended}
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = await child.ask(self._origin)
        except TimeoutError:
            child.kill()
            raise Late(f"the process of the tool was not ready within {START_SECONDS:g} s") from None
        except BaseException:
            child.kill()
            raise
        if answer.error:
            child.kill()
            raise ChildError(f"the process of the tool cannot load it: {answer.error}")
        return child

    async def close(self) -> None:
        """Kill all children and wait for their end."""
        for start in self._starts:
            start.cancel()
        self._idle.clear()
        alive = [child for child in self._all if not child.ended]
        for child in alive:
            child.kill()
        if alive:
            await asyncio.wait([asyncio.ensure_future(child.gone()) for child in alive], timeout=5.0)


def _spawn(end: socket.socket) -> subprocess.Popen[bytes]:
    code = "from asyncrl.tools.process import serve; serve()"
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with end:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=end.fileno(),
            stdout=end.fileno(),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths},
        )


# -- the child's end -------------------------------------------------------------------------------------


def serve() -> None:
    """The main function of a child. It ends with its worker: end of file on stdin kills it and its children,
    even out of the middle of a call."""
    stdin, stdout = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(stdin, frames), daemon=True).start()
    start = _start(frames.get())
    try:
        tool = _load(start)
        _write(stdout, Answer())
    except BaseException as problem:
        _write(stdout, Answer(error=one_line(problem)))
        return
    while True:
        _write(stdout, _answered(tool, _text(frames.get())))


def _load(start: Start) -> Tool:
    found = load_object(start.spec, "tool")
    found = found if isinstance(found, Tool) else found(**start.arguments)
    assert isinstance(found, Tool)
    return found


def _answered(tool: Tool, arguments: str) -> Answer:
    try:
        content, reward = reply_of(tool.function(**tool.decode(arguments)))
    except BaseException as problem:  # a SystemExit, too, is the tool's and not this process's
        return Answer(error=within_memory(reason(problem)), meant=isinstance(problem, ToolError))
    return Answer(content, reward=reward)


def _read(stdin: BinaryIO, frames: queue.SimpleQueue[bytes]) -> None:
    while len(head := stdin.read(LENGTH.size)) == LENGTH.size:
        size = LENGTH.unpack(head)[0]
        if size > LARGEST or len(body := stdin.read(size)) < size:
            break
        frames.put(body)
    os.killpg(0, signal.SIGKILL)


def _write(stdout: BinaryIO, answer: Answer) -> None:
    body = _encode(answer)
    stdout.write(LENGTH.pack(len(body)) + body)
    stdout.flush()
