"""Real runs whose engine reports honest log-probs: one samples with top_p, the other honestly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import Run

LARGE_BATCHES = ["buffer.groups_per_batch=8", "buffer.episodes_per_group=8", "data.test=''"]


def test_an_engine_that_samples_with_top_p_is_named(tmp_path: Path) -> None:
    lies = ["engine.name=tools/faults/lies.py:top_p", "weights.on_mismatch=stop"]
    with Run(tmp_path, "total_steps=10", *LARGE_BATCHES, *lies) as run:
        assert run.wait() != 0
        text = run.text()
    assert "worker 0 does not sample from the trainer's distribution" in text
    assert "less surprising" in text and "top_p" in text


@pytest.mark.full
def test_an_engine_that_samples_honestly_is_not(tmp_path: Path) -> None:
    with Run(tmp_path, "total_steps=3", *LARGE_BATCHES) as run:
        run.completed(3)
    last_row = run.rows()[-1]
    assert last_row["weights/mismatches"] == 0 and last_row["weights/sample_tokens"] >= 256
    assert 0 < last_row["weights/sample_surprisal_z"] < 6
