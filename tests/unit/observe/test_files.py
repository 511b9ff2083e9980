"""What is read of a run, also of one that was killed."""

from __future__ import annotations

import datetime
from pathlib import Path

from asyncrl.observe.files import first_day, mark_start, read_rows, read_summary, run_id, write_summary


def test_rows_without_the_line_that_a_crash_cut(tmp_path: Path) -> None:
    assert read_rows(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": \n\0\xff\n7\n{"a": 3}')
    assert read_rows(tmp_path) == [{"a": 1}, {"a": 2}, {"a": 3}]


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
