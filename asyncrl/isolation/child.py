"""Child processes: how they are started, asked, watched and ended.

    we ──request, length-bounded msgpack frame──► child: serve() ──► a function of ours or of a user
    we ◄────────── its result, or an error ─────┘

Every child runs under `wrapper.py`: when it ends, is killed or we die (by kill -9, too), all that it started
ends with it. `wrapped` does that for the command line of any program.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Generic, TypeVar

import msgspec

from asyncrl.errors import UNDECODABLE, AsyncrlError, one_line, reason
from asyncrl.isolation import wrapper
from asyncrl.isolation.calls import CallTimeout, in_thread
from asyncrl.registry import load_object
from asyncrl.values import encodable

GRACE = 1.0  # seconds from SIGTERM to SIGKILL
SAME_SIGNAL = 0.3  # seconds in which the signal that ended a child may end this process's work, too
HEAD = 4  # bytes of the length before each frame
MAX_REQUEST = 64 << 20  # bytes of a frame to a child
MAX_ERROR = 1 << 16  # characters of an error
FILES, HARD_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # descriptors, as this process began
ROLE_FILES = max(FILES, min(HARD_FILES, 65_536))
KILLED_BY = 128  # plus the number of the signal: the exit code of a program that a signal has ended
CLOSE_SECONDS = 1.0  # for a child that has closed its pipe to end

VARIABLES = frozenset({
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TORCH_HOME"),
    *("OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NO_PROXY", "no_proxy"),
})  # fmt: skip
PREFIXES = ("LC_", "XDG_", "PYTHON", "OMP_", "MKL_", "CONDA_", "CUDA_")

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")


def raise_file_limit() -> None:
    """For a role. What it starts keeps the limit from before: it may call select()."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (ROLE_FILES, HARD_FILES))


def inherited(names: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a program that the model leads, without keys and tokens: variables that say where
    programs, libraries and temporary files are, and the variables `names`, where they are set."""
    allowed = VARIABLES.union(names)
    return {name: value for name, value in os.environ.items() if name in allowed or name.startswith(PREFIXES)}


class ChildError(AsyncrlError):
    """A child died, broke the protocol, or what it ran failed."""


@dataclass(frozen=True)
class Service(Generic[S, Q, A]):
    """The work of a child. In the child, `open` takes the first message (an S) and returns the function that
    answers the others (from Q to A; msgspec encodes all three types). `name`: its place, `module:NAME`."""

    name: str
    open: Callable[[S], Callable[[Q], A]]
    first: type[S]
    request: type[Q]
    answer: type[A]


class ChildReply(msgspec.Struct, Generic[A], frozen=True, array_like=True):
    """Holds the reply to one frame: an `error`, or a result (None for the first frame)."""

    error: str = ""
    result: A | None = None


_encode = msgspec.msgpack.Encoder().encode


def wrapped(command: Sequence[str], grace: float = GRACE) -> list[str]:
    """The command line that runs a program so that nothing of it is left when it ends, or when we do.

    It ends as the program ends; if that cannot be run, with code 127 and a line on stderr. SIGTERM is passed
    on, and after `grace` seconds everything is killed (math.inf: never); `wrapper.KILL` kills at once.
    """
    own = [sys.executable, "-I", "-S", wrapper.__file__, str(os.getpid()), str(grace), str(FILES)]
    return [*own, *command]


def run_enclosed(function: str, arguments: Sequence[str], grace: float) -> int:
    """Call `module:function` with these arguments in a process with our standard streams, for the exit code.
    What the process starts ends with it, or with us. Signals that end programs are passed on to it, and
    `grace` seconds later it is killed (math.inf: never)."""
    module, _, name = function.partition(":")
    paths = str(len(sys.path))
    code = (
        "import sys; end = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:end]; arguments = sys.argv[end:]; "
        f"del sys.argv[1:]; from {module} import {name}; sys.exit({name}(arguments))"
    )
    process = subprocess.Popen(
        wrapped([sys.executable, "-c", code, paths, *sys.path, *arguments], grace),
        start_new_session=True,
    )
    passed_on: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        passed_on.append(number)
        process.send_signal(number)

    for number in wrapper.PASSED_ON:
        signal.signal(number, pass_on)
    ended = process.wait()
    if ended == -signal.SIGKILL and passed_on:  # it was late
        ended = -passed_on[0]
    return ended if ended >= 0 else KILLED_BY - ended


def describe_exit(code: int) -> str:
    """`was killed by SIGKILL`, or `ended with exit code 70`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class Child(Generic[S, Q, A]):
    """Our end of a process that serves one request at a time. `name` is what errors call it."""

    def __init__(
        self,
        service: Service[S, Q, A],
        name: str,
        largest: int,
        process: subprocess.Popen[bytes],
        streams: tuple[StreamReader, StreamWriter],
    ) -> None:
        self._name = name
        self._largest = largest
        self._process = process
        self._reader, self._writer = streams
        self._reply = msgspec.msgpack.Decoder(ChildReply[service.answer]).decode  # type: ignore[name-defined]
        self._killed = False

    @classmethod
    async def start(
        cls, service: Service[S, Q, A], name: str, largest: int, env: Mapping[str, str] | None = None
    ) -> Child[S, Q, A]:
        """A fresh interpreter with our import path. `largest`: bytes that it may answer at once. `env`: its
        environment variables; None: ours."""
        ours, theirs = socket.socketpair()
        try:  # beside the loop: starting a process takes a while, more so on a busy machine
            process = await in_thread(partial(_spawn, theirs, service.name, largest, env), "child")
        except BaseException:
            ours.close()  # a child that was started nevertheless ends then
            raise
        return cls(service, name, largest, process, await asyncio.open_connection(sock=ours))

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def usable(self) -> bool:
        """True if it can be asked."""
        return not (self._killed or self.ended or self._reader.at_eof())

    async def open(self, first: S, seconds: float = math.inf) -> None:
        """Must be awaited before the first request. Raises as `ask` does."""
        await self._exchange(first, seconds)

    async def ask(self, request: Q, seconds: float = math.inf) -> A:
        """ChildError with the text of what the function raised. A child that is late (CallTimeout), dies or
        breaks the protocol (ChildError), or is not waited for any more, is killed."""
        result = await self._exchange(request, seconds)
        assert result is not None
        return result

    def kill(self, last: bool = False) -> None:
        """Kill it with all that it started. It takes a moment; see `gone`. `last`: see `wrapper.kill`."""
        self._killed = True
        if not self.ended:
            wrapper.kill(self._process.pid, last)
        self._writer.close()

    async def gone(self) -> int:
        """Wait for its exit code, once it and all that it started have ended."""
        return await in_thread(self._process.wait, "child")

    async def _exchange(self, message: S | Q, seconds: float) -> A | None:
        frame = _encode(message)
        if len(frame) > MAX_REQUEST:
            raise ChildError(f"{len(frame)} bytes are too many for {self._name}")
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                reply = await self._answered(frame)
        except TimeoutError:
            self.kill()
            raise CallTimeout(f"no reply within {seconds:g} s") from None
        except BaseException:
            self.kill()
            raise
        if reply.error:
            raise ChildError(reply.error)
        return reply.result

    async def _answered(self, frame: bytes) -> ChildReply[A]:
        try:
            self._writer.write(len(frame).to_bytes(HEAD, "little") + frame)
            length = int.from_bytes(await self._reader.readexactly(HEAD), "little")
            if length > self._largest:
                raise ChildError(f"{self._name} sent {length} bytes at once")
            reply: ChildReply[A] = self._reply(await self._reader.readexactly(length))
        except UNDECODABLE as error:
            raise ChildError(f"{self._name} sent an unreadable answer ({one_line(error)})") from error
        except (OSError, asyncio.IncompleteReadError):
            raise ChildError(f"{self._name} {await self._ending()}") from None
        return reply

    async def _ending(self) -> str:
        """Say how it ended; its pipe is at its end, so it does soon, or has closed the pipe itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                code = await self.gone()
                if -code in wrapper.PASSED_ON:
                    await asyncio.sleep(SAME_SIGNAL)
                return describe_exit(code)
        return "closed its pipe"


def _spawn(
    end: socket.socket, service: str, largest: int, env: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    code = f"import sys; sys.path[:] = sys.argv[3:]; from {__name__} import serve; serve()"
    with end:
        return subprocess.Popen(
            wrapped([sys.executable, "-c", code, service, str(largest), *sys.path]),
            stdin=end.fileno(),
            stdout=end.fileno(),
            env=env,
            start_new_session=True,
        )


# -- in the child ------------------------------------------------------------------------------------


def serve() -> None:
    """The main function of a child: read a frame, answer it, until the other end is closed."""
    name = sys.argv[1]
    largest = int(sys.argv[2])
    del sys.argv[1:]
    requests, answers = _private_pipes()
    service: Service[Any, Any, Any] = load_object(name, "service")
    first = msgspec.msgpack.Decoder(service.first).decode
    request = msgspec.msgpack.Decoder(service.request).decode
    function: Callable[[Any], Any] | None = None
    while (frame := _read(requests)) is not None:
        reply: ChildReply[Any] = ChildReply()
        try:
            if function is None:
                function = service.open(first(frame))
            else:
                reply = ChildReply(result=function(request(frame)))
            answer = _encode(reply)
        except BaseException as error:  # an error of users' code, SystemExit too, is sent as the answer
            answer = _encode(ChildReply(error=encodable(reason(error)[:MAX_ERROR])))
        if len(answer) > largest:
            answer = _encode(
                ChildReply(error=f"the answer has {len(answer)} bytes, at most {largest} are allowed")
            )
        answers.write(len(answer).to_bytes(HEAD, "little") + answer)
        answers.flush()


def _private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The pipes under new numbers, away from users' code: its prints go to stderr, its stdin is empty."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _read(requests: IO[bytes]) -> bytes | None:
    length = int.from_bytes(head, "little") if len(head := requests.read(HEAD)) == HEAD else -1
    frame = requests.read(length) if length >= 0 else b""
    return frame if len(frame) == length else None
