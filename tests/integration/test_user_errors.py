"""Parts of the user's that raise: the run ends early and says where, or goes on if some attempts land."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.observe.files import read_summary
from tests.integration.runs import Run

pytestmark = pytest.mark.long

PARTS = """
import itertools

from asyncrl.environments import Environment
from asyncrl.tools import tool

TRIES = itertools.count(1)

def bad(*_, **__):
    raise KeyError("b")  # the cause

def score(data_source, solution_str, ground_truth, extra_info):
    return bad()

def seldom(data_source, solution_str, ground_truth, extra_info):
    return bad() if next(TRIES) % 10 else 1.0

async def agent(endpoint, sample):
    bad()

class Game(Environment):
    async def reset(self, sample):
        bad()

    async def step(self, message):
        bad()

@tool
class Notes:
    '''A notepad.'''

    def open(self, sample):
        bad()

    def call(self, line: str) -> str:
        return line
"""
LINE = PARTS[: PARTS.index("  # the cause")].count("\n") + 1
SHORT = ["total_steps=2", "data.test=''", "rollout.max_new_tokens=4", "rollout.max_turns=1"]


@pytest.mark.parametrize(
    ("reason", "keys"),
    [
        ("reward_error", ["rollout.reward={}:score"]),
        ("tool_error", ["rollout.tools=[{}:Notes]"]),
        ("environment_error", ["rollout.environment={}:Game", "rollout.tools=[]"]),
        ("agent_error", ["rollout.agent={}:agent", "rollout.tools=[]"]),
    ],
)
def test_a_part_that_always_raises_ends_the_run_early(tmp_path: Path, reason: str, keys: list[str]) -> None:
    parts = tmp_path / "parts.py"
    parts.write_text(PARTS)
    with Run(tmp_path, *SHORT, *(key.format(parts) for key in keys)) as run:
        assert run.wait() == 1
        said = run.text().splitlines()
        (line,) = [line for line in said if line.startswith("asyncrl: the first ")]
        assert re.search(
            rf"\(samples: \d+\) all failed with {reason}: .*KeyError: 'b' \(parts.py:{LINE}\)", line
        )
        summary = read_summary(run.path)
    assert summary["outcome"] == "failed" and summary["error"] in line and summary["conserved"]
    assert 128 <= summary["attempts_failed"][reason] < 2000
    assert any(re.match(rf"  attempts failed: [\d,]+ {reason}", line) for line in said)
    if reason == "reward_error":
        parts.write_text(PARTS.replace("raise KeyError", "return 1.0 or"))
        with Run(tmp_path, *SHORT, "resume=auto", *(key.format(parts) for key in keys)) as run:
            assert run.wait() == 0, run.text()
        assert run.summary()["steps"] == 2 and run.summary()["conserved"]


def test_a_reward_of_which_a_tenth_lands_does_not_end_the_run(tmp_path: Path) -> None:
    parts = tmp_path / "parts.py"
    parts.write_text(PARTS)
    keys = [f"rollout.reward={parts}:seldom", "rollout.retries=9"]
    with Run(tmp_path, *SHORT, *keys) as run:
        assert run.wait() == 0, run.text()
        summary = run.summary()
    assert summary["steps"] == 2 and summary["attempts_failed"]["reward_error"] > 128
