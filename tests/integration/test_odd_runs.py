"""Runs in unusual places: rank counts in turn, a directory that moves, an URL, users' code that hangs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from asyncrl.observe.files import MAX_LOG_BYTES
from asyncrl.tools import load_tools
from tests.integration.runs import Run

pytestmark = pytest.mark.long

KEYS = ["resume=auto", "checkpoint.every=1", "data.test=''"]
HANGING_SERVER = """
import itertools, json, os, signal, sys

SCHEMA = json.load(open(sys.argv[1]))  # as the demo's model knows the tool
CALLS = itertools.count(1)

def answer(method, params):
    if method == "initialize":
        info = {"name": "calculator", "version": "1"}
        return {"protocolVersion": "2025-06-18", "serverInfo": info, "capabilities": {"tools": {}}}
    if method == "tools/list":
        return {"tools": [SCHEMA]}
    if method != "tools/call":
        return None
    if next(CALLS) % 12 == 0:
        os.kill(os.getpid(), signal.SIGSTOP)  # in mid-call
    a, op, b = (params["arguments"][name] for name in ("a", "op", "b"))
    text = str({"plus": a + b, "minus": a - b, "times": a * b}[op])
    return {"content": [{"type": "text", "text": text}]}

for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        found = answer(request["method"], request.get("params", {}))
        reply = {"result": found} if found else {"error": {"code": -32601, "message": "no such method"}}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"]} | reply), flush=True)
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
    first_directory = tmp_path / "here"
    second_directory = tmp_path / "there"
    first_directory.mkdir()
    for steps, ranks in ((2, 1), (4, 2), (5, 4)):
        with Run(first_directory, *KEYS, f"total_steps={steps}", f"trainer.ranks={ranks}") as run:
            run.completed(steps)
    shutil.move(first_directory, second_directory)
    with Run(second_directory, *KEYS, "total_steps=7", "trainer.ranks=1") as run:
        flow = run.completed(7)["flow"]
        assert 6 * 16 < flow["trained"] <= 7 * 16 <= flow["issued"]  # the rest came too late
    assert not first_directory.exists()


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
    server = tmp_path / "server.py"
    reward = tmp_path / "reward.py"
    server.write_text(HANGING_SERVER)
    reward.write_text(PRINTING_REWARD)
    calculator_schema = load_tools(["calculator"])["calculator"].schema["function"]
    schema = {
        "name": calculator_schema["name"],
        "description": calculator_schema["description"],
        "inputSchema": calculator_schema["parameters"],
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    keys = [
        "rollout.tools=[mcp]",
        f"rollout.tool_args={{mcp: {{command: '{sys.executable} {server} {tmp_path}/schema.json'}}}}",
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
    assert log <= MAX_LOG_BYTES
    failed = [row["rollout/tool_failed_frac"] for row in run.rows() if "rollout/tool_failed_frac" in row]
    assert max(failed) > 0 and min(failed) < 1, "calls fail, and the server comes back"
