"""The picture of a run's timeline, written by what the processes write it with."""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.observe.timeline import Timeline
from asyncrl.viewer.lanes import MOST_ROWS, MOST_SPANS, LaneReader, LaneRow, LaneWindow

T = 1_700_000_000.0


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
    work = [(start, end, name[at], text) for start, end, at, _, _, text in rows["trainer 0", "work"].spans]
    assert work[:3] == [
        (0.0, 0.5, "snapshot", "v0 (epoch 1)"),
        (2.0, 4.0, "train", "step 1, micro-batch 0"),
        (4.0, 5.0, "step", "step 1"),
    ]
    held = [span[:2] for span in rows["worker 0", "version"].spans]
    assert held == [(2.0, 12.0), (12.0, 19.0)]  # until the next one is in
    assert rows["worker 0", "push"].spans[1][:2] == (10.5, 12.0)
    assert rows["engine 0", "decode"].spans[0][3:] == (12, 21.0, "worker 0")
    assert rows["engine 0", "load_weights"].spans[0][5] == "v0 (epoch 1), no room"
    assert ("engine 0", "version") not in rows  # it could not load it


def test_a_window_shows_what_reaches_into_it(tmp_path: Path) -> None:
    write(tmp_path)
    rows = rows_of(LaneReader(tmp_path).window(3, 4.5))
    assert [span[:2] for span in rows["trainer 0", "work"].spans] == [(-1.0, 1.0), (1.0, 2.0)]


def test_what_is_added_is_read_and_half_a_line_waits(tmp_path: Path) -> None:
    reader, path = LaneReader(tmp_path), tmp_path / "timeline" / "trainer-0.jsonl"
    assert reader.window().processes == []
    path.parent.mkdir()
    path.write_text('{"name":"train","start":1,"end":2}\nnot a line\n{"name":"step","sta')
    assert reader.window().end == 2
    with path.open("a") as file:
        file.write('rt":2,"end":4}\n{"name":"back","start":9,"end":8}\n')
    assert reader.window().end == 4
    assert reader.window().names == ["train", "step"]


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
    work = rows["trainer 0", "work"].spans
    assert {window.names[span[2]] for span in work} == {"train"}
    assert sum(len(row.spans) for row in rows.values()) <= MOST_SPANS
    assert len([title for process, title in rows if process == "worker 3"]) == MOST_ROWS + 1
    calls = sum(span[3] for (process, _), row in rows.items() if process == "worker 3" for span in row.spans)
    assert calls == (MOST_ROWS + 20) * 10 * 5
