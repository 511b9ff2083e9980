"""What is kept of transcripts and of pi/mu, and which of several files counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.coordinator.reporting import save_transcripts
from asyncrl.observe import transcripts
from asyncrl.observe.transcripts import TokenRatios, newest_transcript, read_ratios, save_ratios


def noted(value: float, uid: str = "8.0") -> list[TokenRatios]:
    return [TokenRatios(uid, [value], [False])]


@pytest.mark.parametrize(("before", "now"), [(3, 0), (0, 3), (3, 3)])
def test_a_step_that_is_repeated_with_other_ranks_counts_as_it_was_last(
    tmp_path: Path, before: int, now: int
) -> None:
    for rank, value in ((before, 0.5), (now, 0.25)):
        save_ratios(tmp_path, 7, rank, noted(value))
    ratios = read_ratios(tmp_path, 7, "8.0")
    assert ratios is not None and ratios.log_ratio == [0.25]
    assert read_ratios(tmp_path, 7, "8.1") is None and read_ratios(tmp_path, 70, "8.0") is None


def test_the_newest_steps_are_kept_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "KEPT_STEPS", 3)
    for step in range(1, 6):
        for rank in (0, 1) if step < 3 else (0,):  # resumed with one rank
            save_ratios(tmp_path, step, rank, noted(0.5) if step < 5 else [])
    left = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "ratios").iterdir())
    assert left == ["step-3-0", "step-4-0"]


def test_the_newest_good_and_the_newest_bad_one(tmp_path: Path) -> None:
    assert newest_transcript(tmp_path, True, 1.0) is None
    entry = {"uid": "u", "end": "answered", "ground_truth": "4"}
    save_transcripts(tmp_path, "training", 1, [entry | {"score": 3.0, "text": "a"}])
    save_transcripts(tmp_path, "training", 2, [entry | {"score": 0.0, "text": "b"}, entry | {"failed": "x"}])
    save_transcripts(tmp_path, "validation", 2, [entry | {"score": 0.5, "success": True, "text": "c"}])
    for age, name in enumerate(("training/step-2", "validation/step-2", "training/step-1")):
        os.utime(tmp_path / "transcripts" / f"{name}.jsonl", (1000 - age, 1000 - age))
    good = newest_transcript(tmp_path, True, 2.0)
    bad = newest_transcript(tmp_path, False, 2.0)
    assert good and bad and (good.text, bad.text) == ("c", "b")
    assert good.title == (
        "newest good transcript: validation, step 2, u, score 0.5, ground truth 4, end answered"
    )
