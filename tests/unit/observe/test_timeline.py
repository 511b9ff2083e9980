"""Spans on disk, and how much of them overlaps."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from asyncrl.observe.timeline import Timeline, TimelineFile, busy_overlap, merge_spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write(run_dir: Path, name: str, *spans: tuple[str, float, float]) -> None:
    timeline = Timeline(run_dir / "timeline" / f"{name}.jsonl")
    for span in spans:
        timeline.record(*span)
    timeline.close()


def spans(path: Path) -> list[tuple[str, float, float]]:
    return [(span.name, span.start, span.end) for span in TimelineFile(path).read_added()]


def test_spans_are_appended_and_read_back(tmp_path: Path) -> None:
    clock = Clock()
    for _ in range(2):
        timeline = Timeline(tmp_path / "t" / "a.jsonl", clock)
        with suppress(RuntimeError), timeline.span("train"):
            clock.now += 2
            raise RuntimeError
        timeline.close()
        timeline.record("late", 0, 1)  # ignored
    assert spans(tmp_path / "t" / "a.jsonl") == [("train", 100, 102), ("train", 102, 104)]


def test_a_full_disk_does_not_end_the_process(tmp_path: Path) -> None:
    clock = Clock()
    ran = []
    timeline = Timeline(Path("/dev/full"), clock)
    for _ in range(2000):  # more than any buffer takes
        with timeline.span("train"):
            ran.append(clock.now)
            clock.now += 2
    timeline.close()
    timeline.record("late", 0, 1)
    assert len(ran) == 2000


def test_it_is_flushed_at_most_once_a_second(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "a.jsonl"
    timeline = Timeline(path, clock)
    timeline.record("train", 0, 1)
    assert path.read_text() == ""
    clock.now += 1
    timeline.record("train", 1, 2)
    assert len(path.read_text().splitlines()) == 2
    timeline.close()


def test_a_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"name": "x", "start": 0, "end": 1}\n{"name": "y"}\n{"name": "y", "st')
    assert spans(path) == [("x", 0, 1)]


def test_a_process_that_is_started_again_loses_no_span_to_one_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"name": "x", "start": 0, "end": 1}\n{"name": "y", "st')
    timeline = Timeline(path)
    timeline.record("z", 2, 3)
    timeline.close()
    assert spans(path) == [("x", 0, 1), ("z", 2, 3)]


def test_spans_of_a_process_are_joined() -> None:
    assert merge_spans([(3, 4), (0, 1), (1, 2), (5, 5)]) == [(0, 2), (3, 4)]


def test_the_overlap_needs_every_process_of_both_roles(tmp_path: Path) -> None:
    write(tmp_path, "trainer-0", ("train", 10, 14), ("step", 14, 15), ("snapshot", 15, 18), ("train", 18, 20))
    write(tmp_path, "rollout-0", ("decode", 0, 13), ("load_weights", 13, 15), ("decode", 18, 30))
    write(tmp_path, "rollout-1", ("decode", 12, 19))
    assert busy_overlap(tmp_path) == pytest.approx(0.2)  # 12-13, 18-19 of 10-20; a snapshot is not training


def test_roles_in_turns_do_not_overlap(tmp_path: Path) -> None:
    write(tmp_path, "trainer-0", ("train", 1, 2), ("train", 3, 4))
    write(tmp_path, "rollout-0", ("decode", 0, 1), ("decode", 2, 3))
    assert busy_overlap(tmp_path) == 0


def test_no_timeline_is_no_overlap(tmp_path: Path) -> None:
    assert busy_overlap(tmp_path) is None
    write(tmp_path, "trainer-0", ("train", 1, 2))
    assert busy_overlap(tmp_path) == 0
