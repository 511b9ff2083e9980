"""Reward functions in child processes: what is slow, blocks, crashes or never returns costs its process.

    worker: Pool.call ──frame──► stdin  ┌───────────────┐
                                        │ serve(): load │  one function, one call at a time
    worker: RewardResult   ◄──frame── stdout └───────────────┘  prints go to stderr, the worker's log

A frame is four bytes of length and msgpack, decoded to a type and bounded both ways. A process that is past
its deadline, broke the protocol or died is killed with its group; the next call starts another one.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import msgspec

from asyncrl.errors import one_line
from asyncrl.rewards.base import RewardError, RewardInput
from asyncrl.rewards.loading import RewardSource, load_reward
from asyncrl.rewards.verdicts import told, verdict_of
from asyncrl.types import RewardResult

SIZE = min(4, os.cpu_count() or 1)  # processes per reward function
LOAD_SECONDS = 300.0  # to import the function and call its `load`, which may read a model
PATIENCE = 10  # deadlines of a call that others may wait for a process; each of them frees one
KILL_SECONDS = 5.0  # to be gone; a process that hangs in the kernel is left to it
MAX_REQUEST = 64 << 20
MAX_ANSWER = 1 << 20
HEAD = 4  # bytes of length
PR_SET_PDEATHSIG = 1
_START = "import sys; sys.path[:] = sys.argv[2:]; from asyncrl.rewards.process import serve; serve()"


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The function could not be loaded, or raised. The process is as good as before."""

    why: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Calls are welcome."""


class Scored(msgspec.Struct, frozen=True, tag=True):
    """What the function said."""

    verdict: RewardResult


Answer = Failed | Loaded | Scored

_encode = msgspec.msgpack.Encoder().encode
_given = msgspec.msgpack.Decoder(RewardInput).decode
_answer = msgspec.msgpack.Decoder(Answer).decode


class Pool:
    """Up to `size` processes for one function, started when they are needed and kept."""

    def __init__(self, source: RewardSource, size: int = SIZE) -> None:
        self._source = source
        self._free = asyncio.Semaphore(size)
        self._first = asyncio.Lock()
        self._proven = False  # a process has loaded the function
        self._closed = False
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def call(self, given: RewardInput, seconds: float) -> RewardResult:
        """The function's verdict. The call may last `seconds`, the wait for a process PATIENCE times that,
        and the first process LOAD_SECONDS to load. RewardError, and TimeoutError when the call is late."""
        frame = _encode(given)
        if len(frame) > MAX_REQUEST:
            raise RewardError(f"an episode of {len(frame)} bytes is too large for a reward process")
        await self._load_first()
        try:
            async with asyncio.timeout(PATIENCE * seconds):
                await self._free.acquire()
        except TimeoutError:
            raise RewardError(f"no reward process was free for {PATIENCE * seconds:g} s") from None
        try:
            return await self._call(frame, seconds)
        finally:
            self._free.release()

    async def close(self) -> None:
        """Kill all processes, busy ones too, and start no more."""
        self._closed = True
        await asyncio.gather(*(process.kill() for process in list(self._all)))
        self._all.clear()
        self._idle.clear()

    async def _load_first(self) -> None:
        """Until a process has loaded the function, all wait for one to do it."""
        try:
            async with asyncio.timeout(LOAD_SECONDS), self._first:
                if not self._proven:
                    self._idle.append(await self._started())
                    self._proven = True
        except TimeoutError:
            raise RewardError(f"{self._source.spec} was not loaded within {LOAD_SECONDS:g} s") from None

    async def _call(self, frame: bytes, seconds: float) -> RewardResult:
        process = await self._taken()
        try:
            async with asyncio.timeout(seconds):
                answer = await process.ask(frame)
        except BaseException:  # cancelled, late, dead: nobody knows what it is doing
            await self._drop(process)
            raise
        self._idle.append(process)
        if isinstance(answer, Scored):
            return answer.verdict
        raise RewardError(answer.why if isinstance(answer, Failed) else "the reward process lost its place")

    async def _taken(self) -> _Process:
        """An idle process, or a new one. One that died in its sleep is nobody's fault."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            await self._drop(process)
        return await self._started()

    async def _started(self) -> _Process:
        process = await _Process.start()
        self._all.add(process)
        try:
            if self._closed:
                raise RewardError("the rewards are closed")
            async with asyncio.timeout(LOAD_SECONDS):
                answer = await process.ask(_encode(self._source))
            if not isinstance(answer, Loaded):
                raise RewardError(answer.why if isinstance(answer, Failed) else "not loaded")
        except TimeoutError:
            await self._drop(process)
            raise RewardError(f"{self._source.spec} was not loaded within {LOAD_SECONDS:g} s") from None
        except BaseException:
            await self._drop(process)
            raise
        return process

    async def _drop(self, process: _Process) -> None:
        self._all.discard(process)
        await process.kill()


class _Process:
    """The worker's end of one child."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdin is not None and child.stdout is not None
        self._child, self._to, self._from = child, child.stdin, child.stdout

    @classmethod
    async def start(cls) -> _Process:
        """A fresh interpreter with this one's import path, in a session of its own."""
        arguments = ["-c", _START, str(os.getpid()), *sys.path]
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdin=pipe, stdout=pipe, start_new_session=True
            )
        )

    @property
    def alive(self) -> bool:
        return self._child.returncode is None

    async def ask(self, frame: bytes) -> Answer:
        """The answer to one frame. RewardError when the process died or answered nonsense."""
        try:
            self._to.write(len(frame).to_bytes(HEAD, "little") + frame)
            await self._to.drain()
            length = int.from_bytes(await self._from.readexactly(HEAD), "little")
            if length > MAX_ANSWER:
                raise RewardError(f"the reward process sent {length} bytes at once")
            return _answer(await self._from.readexactly(length))
        except msgspec.MsgspecError as error:
            raise RewardError(f"the reward process answered nonsense ({one_line(error)})") from error
        except (OSError, asyncio.IncompleteReadError):
            raise RewardError(f"the reward process {await self._ending()}") from None

    async def kill(self) -> None:
        """With everything it started that is still in its group."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._to.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._child.wait()

    async def _ending(self) -> str:
        """How it ended; its pipe is at its end, so it does soon, or has closed the pipe itself."""
        try:
            async with asyncio.timeout(1.0):
                code = await self._child.wait()
        except TimeoutError:
            return "closed its pipe"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


# -- the child ---------------------------------------------------------------------------------------


def serve() -> None:
    """Load the function that the first frame names, then answer frames until the worker is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it died before the call above
        return
    requests, answers = _private_pipes()
    function: Callable[[RewardInput], Any] | None = None
    while (frame := _read(requests)) is not None:
        try:
            if function is None:
                function = _loaded(msgspec.msgpack.decode(frame, type=RewardSource))
                answer: Answer = Loaded()
            else:
                answer = Scored(_verdict(function, _given(frame)))
        except BaseException as error:  # whatever foreign code raises, SystemExit too, is its answer
            answer = Failed(told(error))
        _write(answers, answer)


def _loaded(source: RewardSource) -> Callable[[RewardInput], Any]:
    reward = load_reward(source)
    reward.load()
    return reward.function


def _private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The pipes under numbers that foreign code does not know; its prints go to stderr, its reads find
    nothing."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _read(requests: IO[bytes]) -> bytes | None:
    head = requests.read(HEAD)
    if len(head) < HEAD:
        return None
    length = int.from_bytes(head, "little")
    frame = requests.read(length)
    return frame if len(frame) == length else None


def _write(answers: IO[bytes], answer: Answer) -> None:
    frame = _encode(answer)
    if len(frame) > MAX_ANSWER:
        frame = _encode(Failed(f"the verdict has {len(frame)} bytes, at most {MAX_ANSWER} are allowed"))
    answers.write(len(frame).to_bytes(HEAD, "little") + frame)
    answers.flush()


def _verdict(function: Callable[[RewardInput], Any], given: RewardInput) -> RewardResult:
    """Sync code finds no running loop, so that it may start one."""
    result = function(given)
    return verdict_of(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)


async def _awaited(result: Any) -> Any:
    return await result
