"""Errors at the boundaries, and the only place that turns a failure into a recorded value."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from os import _exit
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import msgspec

from asyncrl.values import printable

T = TypeVar("T")

# Errors of msgspec for bytes that do not encode the requested struct: invalid UTF-8, too deep nesting.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Texts of torch's CPU allocator, the CUDA runtime, and cuBLAS and cuDNN.
_NO_MEMORY_TEXTS = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")
# Errors for a lack of memory, descriptors or threads, of a process or a machine: by number, or by text, in
# errors of a server or of torch.
_LACKING_ERRNOS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
_LACKING_TEXTS = (
    *_NO_MEMORY_TEXTS,
    "Cannot allocate memory",
    "Too many open files",
    "can't start new thread",
)
_OWN_PREFIXES = (f"{Path(__file__).parent}/", "<")
_INSTALLED_PREFIXES = tuple(
    sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class AsyncrlError(Exception):
    """Base of every error the project raises on purpose. The text is a single line: where, what, what to
    do."""

    @classmethod
    @contextmanager
    def instead_of(cls, *kinds: type[Exception], text: str, advice: str = "") -> Iterator[None]:
        """Raise this error instead of errors of these kinds in the body: `text (Type: message); advice`, or
        for the project's own errors: `text: message; advice`. With Exception among the kinds, all errors of
        `users_code` are included."""
        try:
            with users_code() if Exception in kinds else nullcontext():
                yield
        except kinds as error:
            cause = f": {error}" if isinstance(error, AsyncrlError) else f" ({one_line(error)})"
            raise cls(f"{text}{cause}; {advice}" if advice else f"{text}{cause}") from error


class ConfigError(AsyncrlError):
    """Bad input found before anything was started: a key, a file, a name. Exit code 2."""


class MissingKeyError(ConfigError):
    """A configuration key without a default has no value."""

    def __init__(self, key: str) -> None:
        super().__init__(f"configuration: {key} has no value; set {key}=…")
        self.key = key


class UnknownKeysError(ConfigError):
    """Several unknown configuration keys: a line of text for each."""


class GaveUpError(AsyncrlError):
    """A trainer rank gave up a batch, and has reported that: ranks that are started again recompute more
    layers, have smaller micro-batches, or leave the batch out."""


class SetupError(AsyncrlError):
    """The workspace of an episode could not be made: `FailReason.SETUP_FAILED`."""


class ProtocolError(AsyncrlError):
    """A peer broke the protocol: unknown message, wrong order, wrong hash."""


class EngineError(AsyncrlError):
    """An engine refused a request, or broke."""


class NoEngineError(EngineError):
    """No engine took a request in time."""


class DeadlineError(AsyncrlError):
    """A named wait ran past its deadline."""


class UserCodeError(AsyncrlError):
    """Users' code raised a BaseException that is no Exception: type and text of that error."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while users' code ran: a KeyboardInterrupt that this code did not raise itself."""


class Failure:
    """The error that `recorded` caught; empty until something failed."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __bool__(self) -> bool:
        return self.error is not None

    @property
    def line(self) -> str:
        """Return the error on a single line for a record or the model; '' when nothing failed."""
        return one_line(self.error) if self.error else ""

    @property
    def trace(self) -> str:
        return "".join(traceback.format_exception(self.error)) if self.error else ""


@contextmanager
def recorded() -> Iterator[Failure]:
    """Run foreign code (a tool, a reward); an error becomes a value instead of travelling on."""
    failure = Failure()
    try:
        with users_code():
            yield failure
    except Exception as error:
        failure.error = error


@contextmanager
def users_code() -> Iterator[None]:
    """Run users' code in the body: all errors that leave the body are Exceptions.

    A BaseException that the code raised by itself becomes a UserCodeError: the panic of a Rust extension, an
    outcome of pytest, SystemExit, KeyboardInterrupt, CancelledError, GeneratorExit. Ctrl-C, a cancellation of
    this task and the closing of the task's coroutine travel on.
    """
    task = _current_task()
    try:
        with _interrupts_named():
            yield
    except Exception:
        raise
    except BaseException as error:
        task_has_changed = _current_task() is not task
        task_is_cancelled = (
            task is not None and task.cancelling() and type(error).__name__ == "CancelledError"
        )
        if task_has_changed or task_is_cancelled or isinstance(error, Interrupted):
            raise
        raise UserCodeError(one_line(error)).with_traceback(error.__traceback__) from error


_waits: ContextVar[dict[object, str]] = ContextVar("waits")


@contextmanager
def waits_noted() -> Iterator[dict[object, str]]:
    """Let `waits_for` write into the yielded dict, in the body and in everything the body starts; nested
    calls share the outermost dict."""
    waits = _waits.get({})
    token = _waits.set(waits)
    try:
        yield waits
    finally:
        _waits.reset(token)


@contextmanager
def waits_for(text: str) -> Iterator[None]:
    """Say, during the body, why the current call of users' code waits. The error of a deadline names the
    newest wait."""
    waits = _waits.get({})
    key = object()
    waits[key] = text
    try:
        yield
    finally:
        del waits[key]


def _current_task() -> Any:
    """Return the running asyncio task. A process that never imported asyncio has none."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio and asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


@contextmanager
def _interrupts_named() -> Iterator[None]:
    """Where Python's own handler would raise KeyboardInterrupt at Ctrl-C, raise Interrupted in the body."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # the body may have set another handler
            signal.signal(signal.SIGINT, signal.default_int_handler)


def disk_full(error: BaseException) -> bool:
    """Return True for an error that passes when space is freed: a full disk, or a quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def reason(error: BaseException) -> str:
    """Return the text of an error for a model or a log: the message if raised on purpose, else `one_line`."""
    return str(error) if isinstance(error, AsyncrlError) else one_line(error)


def describe(error: BaseException, limit: int = 300) -> str:
    """Return `one_line`, and the place in users' code that raised: "KeyError: 'b' (bad.py:41)". An error that
    was raised on purpose is returned unchanged, up to twice the limit, because the text may contain such a
    description."""
    if isinstance(error, AsyncrlError) and not isinstance(error, UserCodeError):
        return printable(" ".join(str(error).split()))[: 2 * limit]

    # The innermost frame in a user's file; if all are in installed packages, the first frame outside asyncrl.
    frames = traceback.extract_tb(error.__traceback__)
    foreign_frames = [frame for frame in frames if not frame.filename.startswith(_OWN_PREFIXES)]
    user_frames = [frame for frame in foreign_frames if not frame.filename.startswith(_INSTALLED_PREFIXES)]
    named_frames = user_frames[-1:] or foreign_frames[:1]
    location = f" ({Path(named_frames[0].filename).name}:{named_frames[0].lineno})" if named_frames else ""
    return one_line(error, limit - len(location)) + location


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return `Type: message` on a single line, at most `limit` characters, without control characters. The
    error may come from users' code, or carry the line of another error of the same type, which is not named
    twice."""
    try:
        text = printable(" ".join(str(error)[: 4 * limit].split()))
    except BaseException:
        text = "the error message cannot be read"

    type_name = type(error).__name__
    names_kind = isinstance(error, UserCodeError) or text == type_name or text.startswith(f"{type_name}: ")
    if text and not names_kind:
        text = f"{type_name}: {text}"

    return text[:limit] or type_name


def vital_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Start a thread without which the process is useless. An error in the thread is logged with the thread's
    name, and ends the process, to be replaced by another process."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            logger = logging.getLogger("asyncrl")
            logger.critical("thread %r failed", name, exc_info=True)
            # The launcher quotes the last line of the log.
            logger.critical("thread %r failed; exiting: %s", name, one_line(error))
            _exit(1)  # imported by name: in users' code os._exit raises (isolation/calls.py)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def fulfil(future: Future[T], function: Callable[[], T]) -> None:
    """Call a function in this thread for a future, unless the future was cancelled before the end. The future
    carries Exceptions as in `users_code`, except that StopIteration becomes a UserCodeError, too."""
    try:
        with users_code():
            result = function()
    except StopIteration as problem:
        if future.set_running_or_notify_cancel():
            future.set_exception(UserCodeError(one_line(problem)).with_traceback(problem.__traceback__))
        return
    except BaseException as problem:  # the caller waits for the future
        if future.set_running_or_notify_cancel():
            future.set_exception(problem)
        return

    if future.set_running_or_notify_cancel():
        future.set_result(result)


def lacks_memory(error: BaseException) -> bool:
    """Return True if there was too little memory, of a GPU or of the machine, according to the error or the
    cause. A ConfigError from such an error is advice for a person. torch's error is recognized by name."""
    text_says_so = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY_TEXTS)
    if text_says_so or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    cause = None if isinstance(error, ConfigError) else error.__cause__
    return cause is not None and lacks_memory(cause)


def lacks_resources(error: BaseException) -> bool:
    """Return True if a process had too little memory, too few descriptors or threads, or a full disk,
    according to the error or the cause. The input of the failed work may be sound."""
    error_number = getattr(error, "errno", None)  # ZeroMQ's errors have the attribute, too
    if (
        error_number in _LACKING_ERRNOS
        or disk_full(error)
        or any(text in str(error) for text in _LACKING_TEXTS)
    ):
        return True

    if lacks_memory(error):
        return True

    return error.__cause__ is not None and lacks_resources(error.__cause__)
