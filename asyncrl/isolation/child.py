"""Child processes: how they are started, asked, watched and ended.

    we ──request, length-bounded msgpack frame──► child: serve() ──► a function of ours or of a user
    we ◄────────── its result, or an error ─────┘

Every child runs under `wrapper.py`: when the child ends or is killed, or we die (by kill -9, too), every
process that the child started ends as well. `wrapped_command` does the same for the command line of any
program."""

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
from asyncrl.registry import INSIDE_RUN, load_object
from asyncrl.values import encodable

GRACE_SECONDS = 1.0  # seconds from SIGTERM to SIGKILL
SAME_SIGNAL_SECONDS = 0.3  # seconds in which the signal that ended a child may end this process's work, too
LENGTH_BYTES = 4  # bytes of the length before each frame
MAX_REQUEST_BYTES = 64 << 20  # bytes of a frame to a child
MAX_ERROR_CHARACTERS = 1 << 16  # characters of an error
# Limits of descriptors at this process's start
FILE_LIMIT, HARD_FILE_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)
ROLE_FILE_LIMIT = max(FILE_LIMIT, min(HARD_FILE_LIMIT, 65_536))
KILLED_BY_SIGNAL = 128  # plus the number of the signal: the exit code of a program that a signal has ended
CLOSE_SECONDS = 1.0  # a child that has closed its pipe has so long to end

INHERITED_VARIABLES = frozenset({
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TORCH_HOME"),
    *("OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NO_PROXY", "no_proxy", INSIDE_RUN),
})  # fmt: skip
INHERITED_PREFIXES = ("LC_", "XDG_", "PYTHON", "OMP_", "MKL_", "CONDA_", "CUDA_")

SetupT = TypeVar("SetupT")
RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


def raise_file_limit() -> None:
    """Raise the limit of descriptors of a role. Programs that the role starts keep the earlier limit: they
    may call select()."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (ROLE_FILE_LIMIT, HARD_FILE_LIMIT))


def inherited_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of a program that the model leads, without keys and tokens: variables that
    locate programs, libraries and temporary files, and the variables `names` if set."""
    allowed_names = INHERITED_VARIABLES.union(names)
    return {
        name: value
        for name, value in os.environ.items()
        if name in allowed_names or name.startswith(INHERITED_PREFIXES)
    }


class ChildError(AsyncrlError):
    """A child died or broke the protocol, or the function in the child failed."""


@dataclass(frozen=True)
class Service(Generic[SetupT, RequestT, AnswerT]):
    """Describe the work of a child. In the child, `open` takes the first message (a SetupT) and returns the
    function that answers each request (from RequestT to AnswerT; msgspec encodes all three types). `name`:
    the service's path for importing, `module:NAME`."""

    name: str
    open: Callable[[SetupT], Callable[[RequestT], AnswerT]]
    first: type[SetupT]
    request: type[RequestT]
    answer: type[AnswerT]


class ChildReply(msgspec.Struct, Generic[AnswerT], frozen=True, array_like=True):
    """Hold the reply to one frame: an `error`, or a result (None for the first frame)."""

    error: str = ""
    result: AnswerT | None = None


_encode = msgspec.msgpack.Encoder().encode


def wrapped_command(command: Sequence[str], grace_seconds: float = GRACE_SECONDS) -> list[str]:
    """Return the command line that runs a program so that no process is left when the program ends or we do.

    The command ends as the program ends; if the program cannot be run, with code 127 and a line on stderr.
    SIGTERM is passed on, and after `grace_seconds` everything is killed (math.inf: never);
    `wrapper.KILL_SIGNAL` kills at once.
    """
    wrapper_command = [
        sys.executable,
        "-I",
        "-S",
        wrapper.__file__,
        str(os.getpid()),
        str(grace_seconds),
        str(FILE_LIMIT),
    ]
    return [*wrapper_command, *command]


def run_enclosed(function: str, arguments: Sequence[str], grace_seconds: float) -> int:
    """Call `module:function` with these arguments in a process with our standard streams; return the exit
    code. Every process started there ends with the new process, or with us. Signals that end programs are
    passed on to the process, and `grace_seconds` later the process is killed (math.inf: never)."""
    module, _, function_name = function.partition(":")
    path_count = str(len(sys.path))
    start_code = (
        "import sys; end = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:end]; arguments = sys.argv[end:]; "
        f"del sys.argv[1:]; from {module} import {function_name}; sys.exit({function_name}(arguments))"
    )

    process = subprocess.Popen(
        wrapped_command([sys.executable, "-c", start_code, path_count, *sys.path, *arguments], grace_seconds),
        start_new_session=True,
    )

    passed_signals: list[int] = []

    def pass_signal_on(number: int, _: Any) -> None:
        passed_signals.append(number)
        process.send_signal(number)

    for number in wrapper.PASSED_SIGNALS:
        signal.signal(number, pass_signal_on)

    exit_code = process.wait()
    # The process was killed because it did not end in time
    if exit_code == -signal.SIGKILL and passed_signals:
        exit_code = -passed_signals[0]
    return exit_code if exit_code >= 0 else KILLED_BY_SIGNAL - exit_code


def describe_exit(exit_code: int) -> str:
    """Say `was killed by SIGKILL`, or `exited with code 70`."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


class Child(Generic[SetupT, RequestT, AnswerT]):
    """Hold our end of a process that serves one request at a time. `name`: the process's name in errors."""

    def __init__(
        self,
        service: Service[SetupT, RequestT, AnswerT],
        name: str,
        max_answer_bytes: int,
        process: subprocess.Popen[bytes],
        streams: tuple[StreamReader, StreamWriter],
    ) -> None:
        self._name = name
        self._max_answer_bytes = max_answer_bytes
        self._process = process
        self._reader, self._writer = streams
        self._decode_reply = msgspec.msgpack.Decoder(ChildReply[service.answer]).decode  # type: ignore[name-defined]
        self._killed = False

    @classmethod
    async def start(
        cls,
        service: Service[SetupT, RequestT, AnswerT],
        name: str,
        max_answer_bytes: int,
        env: Mapping[str, str] | None = None,
    ) -> Child[SetupT, RequestT, AnswerT]:
        """Start a new interpreter with our import path. `max_answer_bytes`: the limit of one answer. `env`:
        the environment variables of the child; None: ours."""
        parent_socket, child_socket = socket.socketpair()

        try:  # beside the loop: starting a process takes a while, more so on a busy machine
            process = await in_thread(
                partial(_spawn, child_socket, service.name, max_answer_bytes, env), "child"
            )
        except BaseException:
            parent_socket.close()  # a child that was started nevertheless ends then
            raise

        return cls(
            service, name, max_answer_bytes, process, await asyncio.open_connection(sock=parent_socket)
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_usable(self) -> bool:
        """Return whether the child can serve a request."""
        return not (self._killed or self.has_ended or self._reader.at_eof())

    async def open(self, first_message: SetupT, seconds: float = math.inf) -> None:
        """Send the first message; must be awaited before the first request. Raises as `ask` does."""
        await self._exchange_frames(first_message, seconds)

    async def ask(self, request: RequestT, seconds: float = math.inf) -> AnswerT:
        """Return the answer to one request. ChildError: the text of the function's error. A child that
        misses the deadline (CallTimeout), dies or breaks the protocol (ChildError) is killed, and so is a
        child whose caller stops waiting."""
        result = await self._exchange_frames(request, seconds)
        assert result is not None
        return result

    def kill(self, without_wrapper: bool = False) -> None:
        """Kill the child and every process that the child started, which takes a moment (`wait_for_exit`).
        `without_wrapper`: see `wrapper.kill`."""
        self._killed = True
        if not self.has_ended:
            wrapper.kill(self._process.pid, without_wrapper)
        self._writer.close()

    async def wait_for_exit(self) -> int:
        """Return the exit code after the child and every process that the child started have ended."""
        return await in_thread(self._process.wait, "child")

    async def _exchange_frames(self, message: SetupT | RequestT, seconds: float) -> AnswerT | None:
        frame = _encode(message)
        if len(frame) > MAX_REQUEST_BYTES:
            raise ChildError(f"a request of {len(frame)} bytes is too large for {self._name}")

        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                reply = await self._send_and_receive(frame)
        except TimeoutError:
            self.kill()
            raise CallTimeout(f"no reply within {seconds:g} s") from None
        except BaseException:
            self.kill()
            raise

        if reply.error:
            raise ChildError(reply.error)
        return reply.result

    async def _send_and_receive(self, frame: bytes) -> ChildReply[AnswerT]:
        try:
            self._writer.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if length > self._max_answer_bytes:
                raise ChildError(f"{self._name} sent an answer of {length} bytes, which is too large")
            reply: ChildReply[AnswerT] = self._decode_reply(await self._reader.readexactly(length))
        except UNDECODABLE as error:
            raise ChildError(f"{self._name} sent an unreadable answer ({one_line(error)})") from error
        except (OSError, asyncio.IncompleteReadError):
            raise ChildError(f"{self._name} {await self._describe_end()}") from None
        return reply

    async def _describe_end(self) -> str:
        """Say how the child ended. The pipe is closed: the child ends soon, or has closed the pipe itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                exit_code = await self.wait_for_exit()
                if -exit_code in wrapper.PASSED_SIGNALS:
                    await asyncio.sleep(SAME_SIGNAL_SECONDS)
                return describe_exit(exit_code)
        return "closed its pipe"


def _spawn(
    child_socket: socket.socket, service_name: str, max_answer_bytes: int, env: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    start_code = f"import sys; sys.path[:] = sys.argv[3:]; from {__name__} import serve; serve()"

    with child_socket:
        return subprocess.Popen(
            wrapped_command(
                [sys.executable, "-c", start_code, service_name, str(max_answer_bytes), *sys.path]
            ),
            stdin=child_socket.fileno(),
            stdout=child_socket.fileno(),
            env=env,
            start_new_session=True,
        )


# -- in the child ------------------------------------------------------------------------------------


def serve() -> None:
    """Read and answer frames until the other end is closed: the main function of a child."""
    service_name = sys.argv[1]
    max_answer_bytes = int(sys.argv[2])
    del sys.argv[1:]

    request_pipe, answer_pipe = private_pipes()
    service: Service[Any, Any, Any] = load_object(service_name, "service")
    decode_first = msgspec.msgpack.Decoder(service.first).decode
    decode_request = msgspec.msgpack.Decoder(service.request).decode
    answer_request: Callable[[Any], Any] | None = None

    while (frame := read_frame(request_pipe)) is not None:
        reply: ChildReply[Any] = ChildReply()
        try:
            if answer_request is None:
                answer_request = service.open(decode_first(frame))
            else:
                reply = ChildReply(result=answer_request(decode_request(frame)))
            answer_frame = _encode(reply)
        except BaseException as error:  # an error of users' code, SystemExit too, is sent as the answer
            answer_frame = _encode(ChildReply(error=encodable(reason(error)[:MAX_ERROR_CHARACTERS])))

        if len(answer_frame) > max_answer_bytes:
            answer_frame = _encode(
                ChildReply(
                    error=f"the answer has {len(answer_frame)} bytes, but at most {max_answer_bytes} are "
                    "allowed"
                )
            )

        write_frame(answer_pipe, answer_frame)


def private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Move the pipes to new descriptors, away from users' code, whose prints go to stderr and whose stdin is
    empty."""
    request_pipe = os.fdopen(os.dup(0), "rb")
    answer_pipe = os.fdopen(os.dup(1), "wb")

    empty_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty_input, 0)
    os.close(empty_input)
    os.dup2(2, 1)
    return request_pipe, answer_pipe


def write_frame(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """Return the next frame; None at the end of the pipe, also within a frame."""
    length_bytes = pipe.read(LENGTH_BYTES)
    if len(length_bytes) != LENGTH_BYTES:
        return None
    length = int.from_bytes(length_bytes, "little")
    frame = pipe.read(length)
    return frame if len(frame) == length else None
