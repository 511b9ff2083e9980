"""The picture of a run's timeline, written by what the processes write it with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import asyncrl
from asyncrl.errors import ConfigError
from asyncrl.observe.timeline import START_EVENT, Timeline
from asyncrl.viewer.lanes import MAX_ROWS, MAX_SPANS, LaneReader
from asyncrl.viewer.meanings import MEANINGS, SPANS, meaning_of

T = 1_700_000_000.0
PACKAGE = Path(asyncrl.__file__).parent


def write(run_dir: Path) -> None:
    """Two steps of a trainer, a worker with an engine of its own, and a server."""
    files = {
        name: Timeline(run_dir / "timeline" / f"{name}-0.jsonl")
        for name in ("coordinator", "trainer", "rollout", "engine")
    }
    for step in (0, 1):
        at = T + 10 * step
        version = (1, step)
        files["trainer"].record("snapshot", at, at + 0.5, version=version)
        files["trainer"].record("train", at + 2, at + 4, step=step + 1, micro=0)
        files["trainer"].record("step", at + 4, at + 5, step=step + 1)
        files["rollout"].record("load_weights", at + 1, at + 2, version=version, engine="train")
        files["rollout"].record("decode", at + 2, at + 9, calls=12, seconds=21.0)
        files["rollout"].record("decode on engine 0", at + 2, at + 9, calls=12, seconds=21.0)
        files["coordinator"].record("push", at + 0.5, at + 2, version=version, engine="worker 0")

    files["engine"].record("load_weights", T, T + 1, version=(1, 0), engine="train", error="no room")
    for file in files.values():
        file.close()


def rows_of(window: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Its rows by process and title; of a span the title of its name in place of the number."""
    titles = [title for _, title in window["names"]]
    return {
        (process["title"], row["title"]): row
        | {
            "spans": [
                (start, end, titles[name], *span_values) for start, end, name, *span_values in row["spans"]
            ]
        }
        for process in window["processes"]
        for row in process["rows"]
    }


def test_each_process_has_its_rows(tmp_path: Path) -> None:
    write(tmp_path)
    window = LaneReader(tmp_path).window()
    assert (window["length"], window["window"]) == (19, (0, 19))
    assert [process["title"] for process in window["processes"]] == ["trainer 0", "worker 0", "engine 0"]
    rows = rows_of(window)
    work = [(*span[:3], span[-1]) for span in rows["trainer 0", "trainer"]["spans"]]
    assert work[:3] == [
        (0.0, 0.5, "snapshot of the weights", "v0 (epoch 1)"),
        (2.0, 4.0, "forward and backward", "step 1, micro-batch 0"),
        (4.0, 5.0, "optimizer step", "step 1"),
    ]
    assert rows["worker 0", "push weights"]["spans"][1][:2] == (10.5, 12.0)
    assert rows["engine 0", "generate"]["spans"][0][3:] == (12, 21.0, 1.75, "worker 0")
    assert rows["engine 0", "load weights"]["spans"][0][-1] == "v0 (epoch 1), no room"
    assert window["steps"] == [(1, 5.0), (2, 15.0)]
    assert window["marks"] == []


def test_a_window_shows_what_reaches_into_it(tmp_path: Path) -> None:
    write(tmp_path)
    rows = rows_of(LaneReader(tmp_path).window(3, 4.5))
    assert [span[:2] for span in rows["trainer 0", "trainer"]["spans"]] == [(2.0, 4.0), (4.0, 5.0)]


def test_what_is_added_is_read_and_half_a_line_waits(tmp_path: Path) -> None:
    reader = LaneReader(tmp_path)
    path = tmp_path / "timeline" / "trainer-0.jsonl"
    assert reader.window()["processes"] == []
    path.parent.mkdir()
    path.write_text('{"name":"train","start":1,"end":2}\nnot a line\n{"name":"step","sta')
    assert reader.window()["length"] == 1
    with path.open("a") as file:
        file.write('rt":2,"end":4}\n{"name":"back","start":9,"end":8}\n')
    window = reader.window()
    assert window["length"] == 3
    assert [title for _, title in window["names"]] == ["forward and backward", "optimizer step"]


def test_a_long_run_stays_below_a_megabyte(tmp_path: Path) -> None:
    """Of spans below a pixel the longest name shows, and no call or second is lost."""
    timeline = Timeline(tmp_path / "timeline" / "trainer-0.jsonl")
    for step in range(4_000):
        timeline.record("train", T + step, T + step + 0.75, step=step)
        timeline.record("step", T + step + 0.75, T + step + 1, step=step)

    timeline.close()
    for worker in range(8):
        timeline = Timeline(tmp_path / "timeline" / f"rollout-{worker}.jsonl")
        for tool in range(MAX_ROWS + 20):
            for at in range(0, 4_000, 400):
                timeline.record(f"tool {tool}", T + at, T + at + 2, calls=5, seconds=8.0)
        timeline.close()

    window = LaneReader(tmp_path).window()
    assert len(msgspec.json.encode(window)) < 1_000_000
    rows = rows_of(window)
    work = rows["trainer 0", "trainer"]["spans"]
    assert {span[2] for span in work} == {"forward and backward"}
    busy = [span[4] / (span[1] - span[0]) for span in work]
    assert busy[:-1] == pytest.approx([1.0] * (len(work) - 1), abs=0.01)  # all the time: so each of them is
    assert sum(span[3] for span in work) == 8_000
    assert sum(len(row["spans"]) for row in rows.values()) <= MAX_SPANS
    worker_rows = [row for (process, _), row in rows.items() if process == "worker 3"]
    assert len(worker_rows) == MAX_ROWS + 1
    assert sum(span[3] for row in worker_rows for span in row["spans"]) == (MAX_ROWS + 20) * 10 * 5


def test_spans_below_a_pixel_do_not_fill_a_lane(tmp_path: Path) -> None:
    """One of a millisecond in each second, where a pixel is many seconds, or less than one."""
    coordinator = Timeline(tmp_path / "timeline" / "coordinator-0.jsonl")
    for at in range(10_000):
        coordinator.record("commit", T + at, T + at + 0.001)
    coordinator.close()
    reader = LaneReader(tmp_path)
    ((_, row),) = rows_of(reader.window()).items()
    assert row["share"] == pytest.approx(0.001, rel=0.01)
    assert max(span[4] / (span[1] - span[0]) for span in row["spans"]) < 0.002
    ((_, row),) = rows_of(reader.window(0, 900)).items()
    assert row["spans"][0][:5] == (0.0, 0.6, "commit", 1, 0.001)  # a pixel wide


def test_a_bar_is_by_its_seconds_and_so_are_shares_and_totals(tmp_path: Path) -> None:
    """813 waits of together 0.014 s, in a span of 2 s, are no lane that is always full."""
    worker = Timeline(tmp_path / "timeline" / "rollout-0.jsonl")
    for at in range(0, 100, 2):
        worker.record("decode", T + at, T + at + 2, calls=10, seconds=16.0, longest=1.5)
        worker.record(
            "acks: the window of unacknowledged records is full", T + at, T + at + 2, calls=813, seconds=0.014
        )

    worker.record("tool of the user", T + 50, T + 52, calls=4, seconds=4.0, longest=1.75)
    worker.close()
    reader = LaneReader(tmp_path)
    window = reader.window()
    rows = rows_of(window)
    shares = {title: row["share"] for (_, title), row in rows.items()}
    assert shares == {"generate": 1.0, "tool of the user": 0.04, ACKS: 0.007}
    assert rows["worker 0", ACKS]["spans"][0][:5] == (0.0, 2.0, ACKS, 813, 0.014)
    part = reader.window(51, 55)
    totals = [
        tuple(total[key] for key in ("of", "name", "calls", "took", "longest")) for total in part["totals"]
    ]
    assert totals == [
        ("worker", "generate", 30, 32.0, 1.5),  # half of the first and of the last span
        ("worker", "tool of the user", 4, 2.0, 1.75),
        ("worker", ACKS, 3 * 813, 0.028, round(0.014 / 813, 6)),
    ]


ACKS = "acks: the window is full"


def test_a_step_is_found_the_last_time_where_it_was_made_again(tmp_path: Path) -> None:
    trainer = Timeline(tmp_path / "timeline" / "trainer-0.jsonl")
    for position, step in enumerate((1, 2, 3, 2, 3, 4)):
        trainer.record("step", T + 10 * position, T + 10 * position + 1, step=step)
    trainer.close()
    window = LaneReader(tmp_path).window(step=3)
    assert window["window"] == (31, 41)
    with pytest.raises(ConfigError, match=r"step 7 is not in the timeline \(last step: 4\)"):
        LaneReader(tmp_path).window(step=7)


def test_what_began_again_is_marked_and_pauses_between_launches_are_left_out(tmp_path: Path) -> None:
    """A worker alone; then all, by another launch a day later."""
    for name, times in {
        "coordinator": (0, 90_000),
        "rollout": (2, 100, 90_003),
        "trainer": (1, 90_002),
    }.items():
        timeline = Timeline(tmp_path / "timeline" / f"{name}-0.jsonl")
        for at in times:
            timeline.record(START_EVENT, T + at, T + at)
        if name == "trainer":
            timeline.record("wait_data", T, T + 400)
            timeline.record("step", T + 400, T + 450, step=1)
            timeline.record("step", T + 90_010, T + 90_050, step=2)

        timeline.close()

    window = LaneReader(tmp_path).window()
    assert window["marks"] == [(100.0, "worker 0 restarted"), (450.0, "relaunched 24:52:30 later")]
    ((_, row),) = rows_of(window).items()
    assert [span[:2] for span in row["spans"]] == [(0, 400), (400, 450), (460, 500)]
    assert window["steps"] == [(1, 450.0), (2, 500.0)]


def test_every_name_that_is_recorded_has_a_meaning() -> None:
    """Those of waits that are in no table are waits for another process; others are in it."""
    recorded_names = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        recorded_names |= set(re.findall(r'imeline\.(?:span|record_past)\("([^"{]+)', text))
        recorded_names |= set(re.findall(r'waits\.wait_named\(f?"([^"{]+)', text))
        recorded_names |= set(re.findall(r'^(?:FRESHER|LOAD|FETCH|DECODE) = "([^"]+)', text, re.MULTILINE))

    recorded_names -= {"weights v"}  # a wait of another name in the timeline
    assert len(recorded_names) >= 20
    unknown = {name for name in recorded_names if not any(name.startswith(prefix) for prefix in SPANS)}
    assert unknown == set()
    assert len(MEANINGS) <= 8
    assert {number for number, _ in SPANS.values()} == set(range(len(MEANINGS)))
    assert meaning_of("tool of the user") == (MEANINGS.index("tool or environment"), "tool of the user")
    assert meaning_of("no such wait") == (MEANINGS.index("wait for another process"), "no such wait")
    assert meaning_of("load_weights (validation)")[1] == "load weights (validation)"
