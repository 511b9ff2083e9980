"""The picture of a run's timeline, written by what the processes write it with."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

import asyncrl
from asyncrl.errors import ConfigError
from asyncrl.observe.timeline import START, Timeline
from asyncrl.viewer.columns import MOST_TOTALS
from asyncrl.viewer.lanes import MOST_ROWS, MOST_SPANS, LaneReader, LaneRow, LaneWindow
from asyncrl.viewer.meanings import MEANINGS, SPANS, meaning

T = 1_700_000_000.0
PACKAGE = Path(asyncrl.__file__).parent


def write(run_dir: Path) -> None:
    """Two steps of a trainer, a worker with an engine of its own, and a server."""
    files = {
        name: Timeline(run_dir / "timeline" / f"{name}-0.jsonl")
        for name in ("coordinator", "trainer", "rollout", "engine")
    }
    for step in (0, 1):
        at, version = T + 10 * step, (1, step)
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


def rows_of(window: LaneWindow) -> dict[tuple[str, str], LaneRow]:
    return {(process.title, row.title): row for process in window.processes for row in process.rows}


def test_each_process_has_its_rows(tmp_path: Path) -> None:
    write(tmp_path)
    window = LaneReader(tmp_path).window()
    assert (window.start, window.end) == (T, T + 19)
    assert [process.title for process in window.processes] == ["trainer 0", "worker 0", "engine 0"]
    rows, name = rows_of(window), window.names
    work = [(span[0], span[1], name[span[2]], span[-1]) for span in rows["trainer 0", "trainer"].spans]
    assert work[:3] == [
        (0.0, 0.5, "snapshot of the weights", "v0 (epoch 1)"),
        (2.0, 4.0, "forward and backward", "step 1, micro-batch 0"),
        (4.0, 5.0, "optimizer step", "step 1"),
    ]
    held = [span[:2] for span in rows["worker 0", "weights held"].spans]
    assert held == [(2.0, 12.0), (12.0, 19.0)]  # until the next one is in
    assert rows["worker 0", "push weights"].spans[1][:2] == (10.5, 12.0)
    assert rows["engine 0", "generate"].spans[0][3:] == (12, 21.0, 1.75, "worker 0")
    assert rows["engine 0", "load weights"].spans[0][-1] == "v0 (epoch 1), no room"
    assert ("engine 0", "weights held") not in rows  # it could not load it
    assert window.steps == [(1, 5.0), (2, 15.0)]
    assert window.marks == []


def test_a_window_shows_what_reaches_into_it(tmp_path: Path) -> None:
    write(tmp_path)
    rows = rows_of(LaneReader(tmp_path).window(3, 4.5))
    assert [span[:2] for span in rows["trainer 0", "trainer"].spans] == [(-1.0, 1.0), (1.0, 2.0)]


def test_what_is_added_is_read_and_half_a_line_waits(tmp_path: Path) -> None:
    reader, path = LaneReader(tmp_path), tmp_path / "timeline" / "trainer-0.jsonl"
    assert reader.window().processes == []
    path.parent.mkdir()
    path.write_text('{"name":"train","start":1,"end":2}\nnot a line\n{"name":"step","sta')
    assert reader.window().end == 2
    with path.open("a") as file:
        file.write('rt":2,"end":4}\n{"name":"back","start":9,"end":8}\n')
    assert reader.window().end == 4
    assert reader.window().names == ["forward and backward", "optimizer step"]


def test_a_long_run_stays_below_a_megabyte(tmp_path: Path) -> None:
    """Of spans below a pixel the longest name shows, and no call or second is lost."""
    timeline = Timeline(tmp_path / "timeline" / "trainer-0.jsonl")
    for step in range(4_000):
        timeline.record("train", T + step, T + step + 0.75, step=step)
        timeline.record("step", T + step + 0.75, T + step + 1, step=step)
    timeline.close()
    for worker in range(8):
        timeline = Timeline(tmp_path / "timeline" / f"rollout-{worker}.jsonl")
        for tool in range(MOST_ROWS + 20):
            for at in range(0, 4_000, 400):
                timeline.record(f"tool {tool}", T + at, T + at + 2, calls=5, seconds=8.0)
        timeline.close()
    window = LaneReader(tmp_path).window()
    encoded = msgspec.json.encode(window)
    assert len(encoded) < 1_000_000
    rows = rows_of(window)
    work = rows["trainer 0", "trainer"].spans
    assert {window.names[span[2]] for span in work} == {"forward and backward"}
    assert {round(span[4] / window.pixel, 3) for span in work} == {1.0}  # busy all the time: so each pixel is
    assert sum(len(row.spans) for row in rows.values()) <= MOST_SPANS
    assert len([title for process, title in rows if process == "worker 3"]) == MOST_ROWS + 1
    calls = sum(span[3] for (process, _), row in rows.items() if process == "worker 3" for span in row.spans)
    assert calls == (MOST_ROWS + 20) * 10 * 5


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
    shares = {title: row.share for (_, title), row in rows.items()}
    assert shares == {"generate": 1.0, "tool of the user": 0.04, ACKS: 0.007}
    assert rows["worker 0", ACKS].spans[0][:5] == (0.0, 2.0, window.names.index(ACKS), 813, 0.014)
    part = reader.window(51, 55)
    found = [(kind, part.names[name], *rest) for kind, name, *rest in part.totals]
    assert found == [
        ("worker", "generate", 30, 32.0, 1.5),  # half of the first and of the last span
        ("worker", "tool of the user", 4, 2.0, 1.75),
        ("worker", ACKS, 3 * 813, 0.028, round(0.014 / 813, 6)),
    ]
    assert len(window.totals) <= MOST_TOTALS


ACKS = "acks: the window is full"


def test_a_step_is_found_the_last_time_where_it_was_made_again(tmp_path: Path) -> None:
    trainer = Timeline(tmp_path / "timeline" / "trainer-0.jsonl")
    for place, step in enumerate((1, 2, 3, 2, 3, 4)):
        trainer.record("step", T + 10 * place, T + 10 * place + 1, step=step)
    trainer.close()
    window = LaneReader(tmp_path).window(step=3)
    assert (window.since - T, window.until - T) == (31, 41)
    with pytest.raises(ConfigError, match=r"step 7 is not in the timeline; the last one is 4"):
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
            timeline.record(START, T + at, T + at)
        if name == "trainer":
            timeline.record("wait_data", T, T + 400)
            timeline.record("step", T + 400, T + 450, step=1)
            timeline.record("step", T + 90_010, T + 90_050, step=2)
        timeline.close()
    window = LaneReader(tmp_path).window()
    assert window.marks == [(100.0, "worker 0 began again"), (450.0, "launched again, 89550 s later")]
    assert [span[:2] for span in window.processes[0].rows[0].spans] == [(0, 400), (400, 450), (460, 500)]
    assert window.steps == [(1, 450.0), (2, 500.0)]


def test_every_name_that_is_recorded_has_a_meaning() -> None:
    """Those of waits that are in no table are waits for another process; others are in it."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        found |= set(re.findall(r'imeline\.(?:span|past)\("([^"{]+)', text))
        found |= set(re.findall(r'waits\.named\(f?"([^"{]+)', text))
        found |= set(re.findall(r'^(?:FRESHER|LOAD|FETCH|DECODE) = "([^"]+)', text, re.MULTILINE))
    found -= {"weights v"}  # a wait of another name in the timeline
    assert len(found) >= 20
    unknown = {name for name in found if not any(name.startswith(known) for known in SPANS)}
    assert unknown == set()
    assert len(MEANINGS) <= 8
    assert {number for number, _ in SPANS.values()} == set(range(len(MEANINGS)))
    assert meaning("tool of the user") == (MEANINGS.index("tool or environment"), "tool of the user")
    assert meaning("no such wait") == (MEANINGS.index("wait for another process"), "no such wait")
    assert meaning("load_weights (validation)")[1] == "load weights (validation)"
