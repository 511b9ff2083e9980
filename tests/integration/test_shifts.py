"""Engines and trainer on the same devices, one side at a time: real processes, the embedded engine."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.runs import Run
from tools.faults.audit import at_once, trained_uids


def shifts(run: Run) -> list[str]:
    """The shifts in their order, as the coordinator has logged them."""
    return re.findall(r"shift: (\w+)", (run.path / "logs" / "coordinator-0.log").read_text())


def until_next(run: Run, shift: str) -> None:
    """Wait until this shift begins once more."""
    seen = len(shifts(run))
    run.until(lambda: shift in shifts(run)[seen:], shift)


def lost_nothing(run: Run, kills: int) -> None:
    """After so many kills all is accounted for, nothing was trained twice, and nothing computed at once."""
    flow = run.completed(8)["flow"]
    assert run.text().count("is restarted") == kills
    assert not [*at_once(run.path)]
    assert flow["trained"] + flow["dropped"] == flow["issued"]
    assert set(trained_uids(run.path).values()) == {1}


@pytest.mark.slow
def test_engines_and_trainer_take_turns(tmp_path: Path) -> None:
    """Nothing computes at once, turns go on over a change of the weights, and validations get what they need.
    There is a validation in mid-run, and a tail of slow episodes."""
    more = ("engine.colocated=1", "validation.every=3", "rollout.slots=16")
    with Run(tmp_path, "total_steps=6", *more) as run:
        summary = run.completed(6)
    assert not [*at_once(run.path)]
    order = shifts(run)
    assert order[:4] == ["train", "waking", "rollout", "sleeping"]
    follows = {"rollout": "sleeping", "sleeping": "train", "train": "waking", "waking": "rollout"}
    assert all(after == follows[before] for before, after in pairwise(order))
    assert summary["trajectories_multi_version"] > 0
    assert summary["logprob_diff_max_same_version"] <= 1e-4 and summary["probe_logprob_diff_max"] <= 1e-4
    assert None not in (summary["success_before"], summary["success_after"])
    rows = [row for row in run.rows() if "timing_s/step" in row]
    assert rows[-1]["shift/count"] >= 6 and all(row["shift/wake_s"] > 0 for row in rows[1:])


@pytest.mark.slow
def test_kill_9_in_shifts(tmp_path: Path) -> None:
    """Workers, ranks and the coordinator, each in another shift. Ranks start only while engines sleep."""
    more = ("engine.colocated=2", "rollout.workers=2", "trainer.ranks=2", "data.test=''")
    with Run(tmp_path, "total_steps=8", *more) as run:
        for step, shift, victim in (
            (1, "train", "rollout-0"),
            (2, "rollout", "trainer-1"),
            (4, "sleeping", "coordinator-0"),
            (5, "waking", "rollout-1"),
        ):
            run.until_step(step)
            until_next(run, shift)
            run.kill(victim)
        lost_nothing(run, 4)
