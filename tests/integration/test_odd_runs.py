"""Runs in unusual places: rank counts in turn, a directory that moves, an URL, users' code that hangs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from asyncrl.launch.process import LOG_BYTES
from tests.integration.runs import Run

pytestmark = pytest.mark.long

KEYS = ["resume=auto", "checkpoint.every=1", "data.test=''"]
HANGING_SERVER = """
import itertools, os, signal
from typing import Literal
from mcp.server.mcpserver import MCPServer

server, calls = MCPServer("calculator"), itertools.count(1)

@server.tool(structured_output=False)
def calculator(a: int, op: Literal["plus", "minus", "times"], b: int) -> str:
    "Do one operation on two integers."
    if next(calls) % 40 == 0:
        os.kill(os.getpid(), signal.SIGSTOP)  # in mid-call
    return str({"plus": a + b, "minus": a - b, "times": a * b}[op])

server.run(transport="stdio")
"""
PRINTING_REWARD = """
import itertools

CALLS = itertools.count(1)

def score(data_source, solution_str, ground_truth, extra_info):
    if next(CALLS) % 16 == 0:
        while True:
            print("x" * 10_000)
    return float(str(ground_truth) in solution_str)
"""


def test_one_two_and_four_ranks_in_turn_and_a_directory_that_moves(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    for steps, ranks in ((2, 1), (4, 2), (5, 4)):
        with Run(here, *KEYS, f"total_steps={steps}", f"trainer.ranks={ranks}") as run:
            run.completed(steps)
    shutil.move(here, there)
    with Run(there, *KEYS, "total_steps=7", "trainer.ranks=1") as run:
        assert run.completed(7)["flow"]["issued"] == 7 * 16
    assert not here.exists()


def test_checkpoints_at_an_url_outlive_the_trainer(tmp_path: Path) -> None:
    keys = [*KEYS, f"checkpoint.directory=file://{tmp_path}/checkpoints"]
    with Run(tmp_path, *keys, "total_steps=4") as run:
        run.until_step(2)
        run.kill("trainer-0")
        run.completed(4)
    with Run(tmp_path, *keys, "total_steps=5") as run:
        run.completed(5)
    assert list((tmp_path / "checkpoints").rglob("hf")) and not (run.path / "checkpoints").exists()


def test_a_server_that_hangs_in_mid_call_and_a_reward_that_prints_without_end(tmp_path: Path) -> None:
    """Each costs the call or the attempt that met it, by name, and neither the run nor the disk."""
    server, reward = tmp_path / "server.py", tmp_path / "reward.py"
    server.write_text(HANGING_SERVER)
    reward.write_text(PRINTING_REWARD)
    keys = [
        "rollout.tools=[mcp]",
        f"rollout.tool_args={{mcp: {{command: '{sys.executable} {server}'}}}}",
        "rollout.tool_timeout=1",
        f"rollout.reward={reward}:score",
        "rollout.reward_timeout=2",
        "rollout.retries=9",
    ]
    with Run(tmp_path, *KEYS, *keys, "total_steps=4") as run:
        summary = run.completed(4)
    assert summary["attempts_failed"].keys() == {"reward_error"}
    assert "no reward within 2 s" in summary["newest_failure"]
    log = (run.path / "logs" / "rollout-0.log").stat().st_size
    assert log <= LOG_BYTES
    failed = max(row.get("rollout/tool_failed_frac", 0.0) for row in run.rows())
    assert 0 < failed < 0.5
