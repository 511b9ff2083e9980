"""What is read of a run, also of one that was killed."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from asyncrl.observe.files import (
    cause_of_death,
    first_day,
    mark_start,
    read_added_rows,
    read_rows,
    read_summary,
    run_id,
    write_summary,
)


def test_rows_without_the_line_that_a_crash_cut(tmp_path: Path) -> None:
    assert read_rows(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": \n\0\xff\n7\n{"a": 3}')
    assert read_rows(tmp_path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_many_added_rows_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.observe.files.MAX_ADDED_BYTES", 20)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    rows, end = read_added_rows(tmp_path, 0)
    assert rows == [{"a": 1}, {"a": 2}]
    assert read_added_rows(tmp_path, end) == ([{"a": 3}], 27)


def test_added_rows_are_read_once(tmp_path: Path) -> None:
    assert read_added_rows(tmp_path, 0) == ([], 0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n7\n{"a": ')
    rows, end = read_added_rows(tmp_path, 0)
    assert rows == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b'2}\n{"a": 3}\n')
    rows, end = read_added_rows(tmp_path, end)
    assert rows == [{"a": 2}, {"a": 3}]
    assert read_added_rows(tmp_path, end) == ([], end)


def test_a_summary_is_replaced_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    assert read_summary(tmp_path) == {}
    write_summary(tmp_path, {"steps": 1})
    write_summary(tmp_path, {"steps": 2, "busy_at_once": None})
    assert read_summary(tmp_path) == {"steps": 2, "busy_at_once": None}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_run_that_goes_on_keeps_its_first_day_and_its_id(tmp_path: Path) -> None:
    """Templates write the date into the prompt: recorded turns must find the same one."""
    assert first_day(tmp_path) == datetime.date.today()
    (tmp_path / "started").write_text("2026-01-31 0af1")
    mark_start(tmp_path)
    assert first_day(tmp_path) == datetime.date(2026, 1, 31) and run_id(tmp_path) == "0af1"


START = "04:34:14.317 INFO asyncrl.launch: rollout-0 starts, pid 7, incarnation {}"
WENT_ON = "04:34:20.000 INFO asyncrl.worker: worker 0 is served"
REFUSED = "04:34:39.444 ERROR asyncrl.worker: worker 0 leaves: EngineError: no room"
EXIT_HANDLER = "04:34:44.445 WARNING asyncrl.launch: a socket was left open; exiting after 5 s"
CRASH = """04:34:39.444 ERROR asyncrl.launch: rollout-0 crashed
Traceback (most recent call last):
  File "a.py", line 1, in run
    work
    ^^^^
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in run
    yield
torch.OutOfMemoryError: CUDA out of memory
Tried to allocate 2 GiB"""
GROUP = """04:34:39.444 ERROR asyncrl.launch: rollout-0 crashed
  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1, in run
  |     work
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "b.py", line 2, in task
    |     work
    | ValueError: the cause
    +------------------------------------"""
FORMATTED = """04:34:39.444 ERROR asyncrl.worker: Traceback (most recent call last):
  File "a.py", line 1, in run
    work
torch.OutOfMemoryError: CUDA out of memory"""
WARNED = """04:34:39.444 WARNING asyncrl.worker: episode 7 failed
Traceback (most recent call last):
  File "a.py", line 1, in run
    work
ValueError: an odd row"""
IGNORED = "Exception ignored in atexit callback: <function at 0x7f>"
NEVER_RETRIEVED = "04:34:44.000 ERROR asyncio: Task exception was never retrieved"
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory"
UNCAUGHT = 'Traceback (most recent call last):\n  File "m.py", line 1\nImportError: no libcuda'

BROWSER = "04:34:39.444 ERROR my_tool: the browser crashed"
IN_A_THREAD = UNCAUGHT.replace("Traceback", "Exception in thread Thread-1:\nTraceback")
CHAINED_WARNING = CRASH.replace("ERROR asyncrl.launch: rollout-0 crashed", "WARNING my_tool: odd")


@pytest.mark.parametrize(
    ("lines", "crashed", "killed"),
    [
        ([REFUSED], "worker 0 leaves: EngineError: no room", "worker 0 leaves: EngineError: no room"),
        ([REFUSED, EXIT_HANDLER], *["worker 0 leaves: EngineError: no room"] * 2),
        ([REFUSED, WENT_ON], "worker 0 leaves: EngineError: no room", ""),
        ([CRASH, EXIT_HANDLER, IGNORED], *[OUT_OF_MEMORY] * 2),
        ([GROUP, EXIT_HANDLER], *["ValueError: the cause"] * 2),
        ([WENT_ON, UNCAUGHT, "sys:1: ResourceWarning: unclosed socket"], *["ImportError: no libcuda"] * 2),
        (["Fatal Python error: Aborted", "", "Current thread:", "  <no Python frame>"],
         *["Fatal Python error: Aborted"] * 2),
        ([WENT_ON, "Killed: too much memory"], *["Killed: too much memory"] * 2),
        ([WENT_ON, EXIT_HANDLER], "", ""),
        ([FORMATTED, EXIT_HANDLER], *[OUT_OF_MEMORY] * 2),
        ([WARNED, EXIT_HANDLER], "", ""),
        ([REFUSED, WARNED], *["worker 0 leaves: EngineError: no room"] * 2),
        ([WENT_ON, WARNED], "ValueError: an odd row", ""),
        ([WENT_ON, UNCAUGHT, EXIT_HANDLER], "ImportError: no libcuda", ""),
        ([CRASH, IGNORED, UNCAUGHT], *[OUT_OF_MEMORY] * 2),
        ([CRASH, NEVER_RETRIEVED, UNCAUGHT], *[OUT_OF_MEMORY] * 2),
        ([UNCAUGHT, IGNORED, UNCAUGHT.replace("no libcuda", "shutdown")], *["ImportError: no libcuda"] * 2),
        ([BROWSER, UNCAUGHT], *["ImportError: no libcuda"] * 2),
        ([WARNED, UNCAUGHT, IGNORED], *["ImportError: no libcuda"] * 2),
        ([IN_A_THREAD, UNCAUGHT], *["ImportError: no libcuda"] * 2),
        ([CHAINED_WARNING, EXIT_HANDLER], "", ""),
        ([], "", ""),
    ],
)  # fmt: skip
def test_a_process_is_quoted_by_its_error(
    tmp_path: Path, lines: list[str], crashed: str, killed: str
) -> None:
    """Not by what its exit handlers, the one before it or the next one wrote."""
    log = tmp_path / "rollout-0.log"
    own_lines = [START.format("a.2"), *lines]
    log.write_text("\n".join([START.format("a.1"), "OldError: no", *own_lines, START.format("a.3"), REFUSED]))
    assert cause_of_death(log, "a.2", crashed=True) == crashed
    assert cause_of_death(log, "a.2", crashed=False) == killed


def test_a_process_that_ends_before_its_first_line_is_quoted_by_the_newest(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("\n".join([START.format("a.1"), REFUSED, START.format("a.2"), WENT_ON, UNCAUGHT]))
    assert cause_of_death(log, "a.3", crashed=True) == "ImportError: no libcuda"
    log.write_text("\n".join([START.format("a.1"), CRASH, IGNORED, REFUSED]))
    assert cause_of_death(log, "a.2", crashed=True) == "worker 0 leaves: EngineError: no room"
