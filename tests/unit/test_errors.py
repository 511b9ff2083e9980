"""Failures as values, and errors as one line."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

import asyncrl
from asyncrl.errors import (
    ConfigError,
    EngineError,
    SetupError,
    describe,
    lacks_resources,
    one_line,
    recorded,
    users_code,
)
from asyncrl.isolation.calls import LoopThread, OwnThread, call_user, call_without_deadline
from asyncrl.registry import make_by_factory
from asyncrl.weights.manifest import WeightsError
from tests.fakes.raised import BASE_EXCEPTIONS


def test_recorded_keeps_an_exception_and_goes_on() -> None:
    with recorded() as failure:
        raise ValueError("two\n  lines")
    assert failure and failure.line == "ValueError: two lines"
    assert "raise ValueError" in failure.trace


def test_recorded_without_a_failure_is_false_and_empty() -> None:
    with recorded() as failure:
        pass
    assert not failure and failure.line == failure.trace == ""


def test_an_error_in_place_of_another_says_where_why_and_what_to_do() -> None:
    read = ConfigError.instead_of(OSError, KeyError, text="f.json: not readable", advice="write it anew")
    text = r"^f\.json: not readable \(KeyError: 'a'\); write it anew$"
    with pytest.raises(ConfigError, match=text) as raised, read:
        raise KeyError("a")
    assert isinstance(raised.value.__cause__, KeyError)
    task = SetupError.instead_of(ConfigError, text="task one")
    with pytest.raises(SetupError, match=r"^task one: no image$"), task:
        raise ConfigError("no image")
    with pytest.raises(TypeError), ConfigError.instead_of(ValueError, text="of another kind"):
        raise TypeError


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (caused(WeightsError("no usable manifest.json"), OSError(errno.ENFILE, "files")), True),
        (caused(WeightsError("cannot be written here"), OSError(errno.ENOSPC, "no room")), True),
        (zmq.ZMQError(errno.EMFILE), True),
        (MemoryError(), True),
        (caused(EngineError("the engine failed"), MemoryError()), True),
        (RuntimeError("unable to mmap 64 bytes from file </w>: Cannot allocate memory (12)"), True),
        (RuntimeError("can't start new thread"), True),
        (WeightsError("server http://a: CUDA out of memory. Tried to allocate"), True),
        (OSError(errno.ENOENT, "gone"), False),
        (caused(WeightsError("no usable manifest.json"), OSError(errno.EIO, "I/O error")), False),
        (WeightsError("tensor w does not match its manifest entry"), False),
    ],
)
def test_what_a_process_lacks_is_distinguished_from_damage(error: Exception, lacks: bool) -> None:
    assert lacks_resources(error) is lacks


@pytest.mark.parametrize("kind", BASE_EXCEPTIONS)
@pytest.mark.parametrize(
    "boundary", ["recorded", "object", "async", "inline", "no deadline", "thread", "own thread", "own loop"]
)
def test_all_that_users_code_raises_is_an_exception(kind: type[BaseException], boundary: str) -> None:
    def use() -> None:
        raise kind("its text")

    async def wait() -> None:
        await asyncio.sleep(0)
        raise kind("its text")

    async def call() -> None:
        match boundary:
            case "recorded":
                with recorded() as failure:
                    use()
                assert failure.error is not None
                raise failure.error
            case "object":
                make_by_factory(use, "rollout.reward")
            case "async":
                await call_user(wait, 60)
            case "inline":
                await call_user(use, 60)
            case "no deadline":
                await call_without_deadline(wait)
            case "thread":
                await call_without_deadline(use, blocking=True)
            case "own thread":
                thread = OwnThread("test")
                try:
                    await thread.run(use)
                finally:
                    await thread.end_thread(lambda: None)
            case "own loop":
                loop_thread = LoopThread("test")
                try:
                    await loop_thread.call(wait)
                finally:
                    loop_thread.close()

    with pytest.raises(Exception, match=rf"{kind.__name__}: its text") as raised:
        asyncio.run(call())
    assert re.search(rf"{kind.__name__}: its text \(test_errors\.py:\d+\)", describe(raised.value))


@pytest.mark.parametrize("seconds", [60.0, None])
def test_a_cancellation_of_ours_ends_the_call_and_its_caller(seconds: float | None) -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("user")

    async def main() -> None:
        call = call_without_deadline(endless) if seconds is None else call_user(endless, seconds)
        calling = asyncio.create_task(call)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait([calling])
        assert calling.cancelled()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert ended == ["user"]


def test_a_coroutine_of_users_code_can_be_closed() -> None:
    async def endless() -> None:
        with users_code():
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(endless())
        await asyncio.sleep(0)
        coroutine = task.get_coro()
        assert inspect.iscoroutine(coroutine)
        coroutine.close()
        task.cancel()

    with suppress(asyncio.CancelledError):
        asyncio.run(main())


def test_ctrl_c_in_users_code_ends_the_command_as_elsewhere() -> None:
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # another test may have left its own
    try:
        with pytest.raises(KeyboardInterrupt), recorded():
            interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_line_is_cut_and_never_empty() -> None:
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 999), limit=50)) == 50


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError("OSError: [Errno 28] No space left on device"),
            "OSError: [Errno 28] No space left on device",
        ),
        (ValueError(one_line(ValueError(one_line(ValueError("a"))))), "ValueError: a"),
        (RuntimeError("RuntimeError"), "RuntimeError"),
        (RuntimeError(one_line(ValueError("a"))), "RuntimeError: ValueError: a"),
        (ValueError("ValueErrors: two"), "ValueError: ValueErrors: two"),
    ],
)
def test_a_kind_is_named_once(error: Exception, line: str) -> None:
    assert one_line(error) == line == describe(error)
    text = rf"^f: no \({re.escape(line)}\)$"
    with pytest.raises(ConfigError, match=text), ConfigError.instead_of(Exception, text="f: no"):
        raise error


def failing(tmp_path: Path, body: str) -> Any:
    """The function `use` of a user's file bad.py, whose lines from the second on are `body`."""
    path = tmp_path / "bad.py"
    path.write_text(f"import json, sys\n{body}\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return scope["use"]


def caught(function: Any, blocking: bool = False) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011 - whatever the user's code raises
        asyncio.run(call_user(lambda: call_without_deadline(function, blocking=blocking), 60))
    return found.value


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("def use():\n    return {}['b']", "KeyError: 'b' (bad.py:3)"),
        ("def inner():\n    {}['b']\ndef use():\n    inner()", "KeyError: 'b' (bad.py:3)"),
        ("def use():\n    sys.exit('over')", "SystemExit: over (bad.py:3)"),
    ],
)
def test_an_error_of_users_code_is_described_with_file_and_line(
    tmp_path: Path, body: str, line: str, blocking: bool
) -> None:
    assert describe(caught(failing(tmp_path, body), blocking)) == line


def test_a_file_beside_the_package_is_the_users() -> None:
    scope: dict[str, Any] = {}
    exec(compile("def use():\n    {}['b']", f"{asyncrl.__path__[0]}_rewards.py", "exec"), scope)
    assert describe(caught(scope["use"])) == "KeyError: 'b' (asyncrl_rewards.py:2)"


def test_the_place_is_the_users_line_not_the_librarys_and_is_never_cut_off(tmp_path: Path) -> None:
    raised = caught(failing(tmp_path, "def use():\n    json.loads('x' * 999)"))
    assert describe(raised).endswith("(bad.py:3)")
    long = caught(failing(tmp_path, "def use():\n    raise ValueError('x' * 999)"))
    assert describe(long).endswith("x (bad.py:3)") and len(describe(long)) == 300


def test_an_error_raised_on_purpose_is_its_own_text() -> None:
    assert describe(ConfigError("no such\n file: a.py")) == "no such file: a.py"
    assert len(describe(ConfigError("x" * 9999))) == 600
