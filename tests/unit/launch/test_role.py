"""How a role's process ends, and what its log holds."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import warnings
from collections.abc import Iterator

import pytest
import zmq

from asyncrl.launch import role
from asyncrl.launch.role import leave


def leave_with_an_open_socket(memory: int) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    try:
        leave(3, timeout=0.05)
    finally:
        socket.close()


@pytest.mark.parametrize("memory", [resource.RLIM_INFINITY, 1 << 20], ids=["", "no memory"])
def test_a_socket_that_was_left_open_does_not_keep_a_process(memory: int) -> None:
    """Nor its exit code, also where it ends because it has no memory."""
    forked = multiprocessing.get_context("fork")
    process = forked.Process(target=leave_with_an_open_socket, args=(memory,))
    process.start()
    process.join(20)
    code = process.exitcode
    process.kill()
    assert code == 3


@pytest.fixture
def own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("own_logging")
def test_loggers_of_libraries_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever they are, asyncio's and Python's warnings among them; the project's own are all written."""
    monkeypatch.setattr(role, "LIBRARY_RECORDS", 3)
    role.set_up_logging()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for number in range(1, 101):
            for name in ("asyncio", "aiohttp.server", "asyncrl.worker"):
                logging.getLogger(name).warning("%s says %d", name, number)
            warnings.warn(f"warning {number}", stacklevel=1)
    lines = capsys.readouterr().err.splitlines()
    for name in ("asyncio", "aiohttp.server"):
        records = [line.partition(" says ")[2] for line in lines if f" {name} says " in line]
        assert [int(record.split()[0]) for record in records] == [1, 2, 3, 4, 8, 16, 32, 64]
        assert records[2] == "3"
        assert records[-1] == "64 (record 64 of level WARNING from this logger; the others are omitted)"
    assert sum("asyncrl.worker says" in line for line in lines) == 100
    logging.getLogger("asyncio").error("an error after many warnings")
    assert "an error after many warnings" in capsys.readouterr().err
    assert sum("Warning: warning" in line for line in lines) == 8


@pytest.mark.usefixtures("own_logging")
def test_records_of_libraries_are_bounded_and_none_drives_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    role.set_up_logging()
    try:
        try:
            raise ValueError("\x1b[31m" + "x" * 10**6)
        except ValueError as error:
            raise RuntimeError("the last of the chain") from error
    except RuntimeError:
        logging.getLogger("asyncio").exception("a task failed")
    logging.getLogger("asyncrl.worker").warning("it says \x1b]0;title\x07")
    text = capsys.readouterr().err
    assert len(text) < role.RECORD_START + role.RECORD_END + 1000 and " characters) … " in text
    assert "a task failed" in text and "RuntimeError: the last of the chain\n" in text
    assert "^[[31mxxx" in text and "^[]0;title^G" in text and "\x1b" not in text
