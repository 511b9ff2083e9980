"""run.png while a run goes on, by a real process."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.launch import start as module
from asyncrl.launch.start import LivePicture


def test_one_drawing_at_a_time_and_not_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"training/step": 1.0, "time_s": 1.0}) + "\n")
    with closing(LivePicture(tmp_path)) as picture:
        picture.update()
        first = picture.process
        assert first is not None
        now += 31
        picture.update()
        assert picture.process is first  # it is under way
        assert first.wait(120) == 0 and (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
        picture.update()
        second = picture.process
        assert second is not first and second is not None
        now += 1
    assert second.returncode is not None  # nothing is left behind


def test_a_drawing_that_is_over_is_not_repeated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(LivePicture(tmp_path / "away")) as picture:
        picture.update()
        first = picture.process
        assert first is not None and first.wait(120) == 0  # no row yet: nothing to draw
        picture.update()
        assert picture.process is first


def test_a_machine_without_room_for_a_drawing_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "gone"))
    with closing(LivePicture(tmp_path)) as picture:
        picture.update()
        assert picture.process is None
