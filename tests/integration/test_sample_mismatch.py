"""Real runs whose engine passes the probe: some lie about their samples, one is honest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import Run

# The trainer scores samples only while it holds their version: a tiny model's step would be over too soon if
# the next batch were there already.
LARGE_BATCHES = [
    "buffer.groups_per_batch=8",
    "buffer.episodes_per_group=8",
    "buffer.max_staleness=0",
    "data.test=''",
    "rollout.slots=64",
]


@pytest.mark.parametrize(
    ("lie", "mismatch"),
    [
        ("top_p", "worker 0 does not sample from the trainer's distribution"),
        pytest.param("old_kv", "rounding explains at most", marks=pytest.mark.full),
        pytest.param("stale_labels", "worker 0 names v0 as the version", marks=pytest.mark.full),
        pytest.param("stale_seed", "worker 0 does not sample independently", marks=pytest.mark.full),
    ],
)
def test_an_engine_that_lies_is_named(tmp_path: Path, lie: str, mismatch: str) -> None:
    settings = [f"engine.name=tools/faults/lies.py:{lie}", "weights.on_mismatch=stop"]
    with Run(tmp_path, "total_steps=10", *LARGE_BATCHES, *settings) as run:
        assert run.wait() != 0
        text = run.text()
    assert mismatch in text


@pytest.mark.full
def test_an_engine_that_lies_is_replaced_once_and_then_stops_the_run(tmp_path: Path) -> None:
    engine = "engine.name=tools/faults/lies.py:stale_seed"
    with Run(tmp_path, "total_steps=40", *LARGE_BATCHES, engine) as run:
        assert run.wait() != 0
        text = run.text()
        coordinator_log = (run.path / "logs" / "coordinator-0.log").read_text()
    assert coordinator_log.count("replacing worker 0") == 1
    assert "worker 0 does not sample independently" in text
    assert "replacing its process once did not help" in text


def test_an_engine_that_samples_honestly_is_not(tmp_path: Path) -> None:
    with Run(tmp_path, "total_steps=3", *LARGE_BATCHES) as run:
        run.completed(3)
    last_row = run.rows()[-1]
    assert last_row["weights/mismatches"] == 0 and last_row["weights/sample_tokens"] >= 256
    assert 0 < last_row["weights/sample_surprisal_z"] < 6
