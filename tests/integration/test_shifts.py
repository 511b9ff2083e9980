"""Engines and trainer on the same devices, one side at a time: real processes, the embedded engine."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fakes.audit import at_once
from tests.integration.runs import Run, is_forked, once


def shifts(run: Run) -> list[str]:
    """The shifts in their order, as the coordinator has logged them."""
    return re.findall(r"shift: (\w+)", (run.path / "logs" / "coordinator-0.log").read_text())


def until_next(run: Run, shift: str) -> None:
    """Wait until this shift begins once more."""
    seen = len(shifts(run))
    run.until(lambda: shift in shifts(run)[seen:], shift)


def lost_nothing(run: Run, steps: int, restarts: int) -> None:
    """After restarts all is accounted for, nothing was trained twice, and nothing computed at once."""
    flow = run.completed(steps)["flow"]
    assert run.text().count("; restarting ") == restarts
    assert not [*at_once(run.path)]
    assert flow["trained"] + flow["dropped"] == flow["issued"]
    once(run.path, steps, flow["trained"])


def in_turn(run: Run) -> bool:
    """The four follow each other, from the first to the last."""
    order = shifts(run)
    follows = {"rollout": "sleeping", "sleeping": "train", "train": "waking", "waking": "rollout"}
    return order[0] == "train" and all(after == follows[before] for before, after in pairwise(order))


@pytest.mark.slow
def test_engines_and_trainer_take_turns(tmp_path: Path) -> None:
    """Nothing computes at once, turns go on over a change of the weights, and validations get what they need.
    There is a validation in mid-run, and a tail of slow episodes."""
    more = ("engine.colocated=1", "validation.every=3", "rollout.slots=16")
    with Run(tmp_path, "total_steps=6", *more) as run:
        summary = run.completed(6)
    assert not [*at_once(run.path)]
    assert in_turn(run)
    assert summary["trajectories_multi_version"] > 0
    assert summary["logprob_diff_max_same_version"] <= 1e-4 and summary["probe_logprob_diff_max"] <= 1e-4
    assert None not in (summary["success_before"], summary["success_after"])
    rows = [row for row in run.rows() if "timing_s/step" in row]
    assert rows[-1]["shift/count"] >= 6 and all(row["shift/wake_s"] > 0 for row in rows[1:])


@pytest.mark.slow
def test_zero_staleness_by_shifts_is_synchronous(tmp_path: Path) -> None:
    """A batch is sampled by one version, in one shift, and trained in the next."""
    more = ("engine.colocated=1", "buffer.max_staleness=0", "data.test=''", "algorithm.ess_lr=true")
    with Run(tmp_path, "total_steps=4", *more) as run:
        summary = run.completed(4)
    assert not [*at_once(run.path)] and in_turn(run)
    assert summary["lag_max"] == 0 and summary["trajectories_multi_version"] == 0
    assert summary["logprob_diff_max_same_version"] <= 1e-4
    assert summary["logprob_tokens_compared"] == summary["tokens_trained"] > 0
    assert summary["flow"]["trained"] == 4 * 16


@pytest.mark.slow
def test_kill_9_in_shifts(tmp_path: Path) -> None:
    """Workers, ranks and the coordinator, each in another shift; a lost rank ends the other one, too, and
    both start only while engines sleep. At last the coordinator in the last validation, which is repeated."""
    more = ("engine.colocated=2", "rollout.workers=2", "trainer.ranks=2", "validation.samples=100")
    with Run(tmp_path, "total_steps=7", *more) as run:
        for step, shift, victim in (
            (1, "train", "rollout-0"),
            (2, "rollout", "trainer-1"),
            (4, "sleeping", "coordinator-0"),
            (5, "waking", "rollout-1"),
        ):
            run.until_step(step)
            until_next(run, shift)
            run.kill(victim)
        assert is_forked(run, "rollout-0")
        run.until(lambda: "phase: evaluating" in run.text(), "final validation")
        run.kill("coordinator-0")
        lost_nothing(run, 7, restarts=5)
        restarted = re.findall(r"; restarting (.+?)(?: in [\d.]+ s|$)", run.text(), re.M)
    ranks = "trainer (all ranks)"
    coordinator = "coordinator-0"
    assert restarted == ["rollout-0", ranks, coordinator, "rollout-1", coordinator]
    assert run.completed(7)["success_after"] is not None
