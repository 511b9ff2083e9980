"""A run whose server and trainer use the same devices, one side at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.runtime.weight_loader import LOAD
from tests.fakes.audit import CLOCKS, COMPUTED, at_once, spans
from tests.integration.runs import Run
from tests.integration.test_shifts import lost_nothing, until_next
from tests.sglang.test_training import DEADLINE, SGLANG, kill, server_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200), pytest.mark.usefixtures("alone")]
SHIFTS = (*SGLANG, "engine.servers=1", "engine.colocated=1", "data.test=''", "launch.stop_timeout=60")


def awake(run: Run) -> Iterator[tuple[float, float]]:
    """The times in which the server had the devices: from the begin of a load until it has said that it
    sleeps."""
    slept = spans(run.path, "coordinator", "sleep")
    for start, loaded in spans(run.path, "engine", LOAD):
        yield start, min((end for _, end in slept if end > loaded), default=float("inf"))


def test_a_server_and_the_trainer_take_turns(tmp_path: Path) -> None:
    """Nothing computes at once, and no turn is given up, or begun anew, for a change."""
    with Run(tmp_path, *SHIFTS, "total_steps=4") as run:
        run.wait(DEADLINE)
        summary = run.completed(4)
    trained = spans(run.path, "trainer", *COMPUTED)
    assert trained and not [*at_once(run.path)]
    assert len([*awake(run)]) >= 4
    for start, end in awake(run):
        assert not [span for span in trained if min(span[1], end) - max(span[0], start) > CLOCKS]
    last = [row for row in run.rows() if "engine/0/requests" in row][-1]
    assert last["engine/0/requests"] > 64
    assert [last[f"engine/0/{name}"] for name in ("lost", "moved", "retracted")] == [0, 0, 0]
    assert summary["trajectories_multi_version"] > 0
    assert summary["logprob_diff_max_same_version"] < 1e-3 and summary["logprob_tokens_compared"] > 0
    assert summary["probe_logprob_diff_max"] < 1e-3 and summary["probe_tokens_compared"] > 0


def test_kill_9_in_shifts_with_a_server(tmp_path: Path) -> None:
    """Kill the supervisor, the server, a rank, a worker and the coordinator, each in another shift.

    The worker's requests at a sleeping server end with the worker.
    """
    with Run(tmp_path, *SHIFTS, "total_steps=8") as run:
        for step, shift, victim in (
            (1, "train", "engine-0"),
            (3, "rollout", "server"),
            (4, "sleeping", "trainer-0"),
            (5, "train", "rollout-0"),
            (6, "waking", "coordinator-0"),
        ):
            run.until(lambda step=step: run.step >= step, f"step {step}", DEADLINE)  # type: ignore[misc]
            until_next(run, shift)
            kill(server_of(run, "engine-0") if victim == "server" else run.children()[victim])
        run.wait(DEADLINE)
        lost_nothing(run, 8, restarts=5)
