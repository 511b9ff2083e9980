"""kill -9 of a worker or supervisor: what its children started ends too, also in sessions of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

# In a child of the worker: starts a process in a session of its own, and hangs.
STARTS_ONE = """
import subprocess, sys, time
from asyncrl.tools import tool

def start(path: str) -> float:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(path, "w") as pids:
        pids.write(str(child.pid))
    time.sleep(600)

def reward(given):
    return start(given.answer)

@tool(process=True)
def call(path: str) -> float:
    return start(path)

if __name__ == "__main__":
    start(sys.argv[1])
"""

# The worker: FILE has the above, PIDS is where the pid goes.
WORKERS = {
    "reward": """
from asyncrl.rewards import RewardInput, RewardSource
from asyncrl.rewards.process import RewardPool
work = RewardPool(RewardSource(f"{FILE}:reward"), 1).call(RewardInput(SAMPLE, PIDS), 600.0)
""",
    "tool": """
import json
from asyncrl.tools import call_tool, load_tool
from asyncrl.types import ToolCall
work = call_tool(load_tool(f"{FILE}:call"), ToolCall("call", json.dumps({"path": PIDS})), 600.0)
""",
    "agent program": """
from asyncrl.gateway import Command, Endpoint
work = Command(line=f"python {FILE} {PIDS}")(SAMPLE, Endpoint("http://127.0.0.1:1/v1", "key"))
""",
    "SGLang server": """
from pathlib import Path
from asyncrl.config import parse
from asyncrl.engines.sglang.process import ServerProcess
config = parse({
    "name": "t", "model": {"path": "m"}, "data": {"train": "d"},
    "engine": {"server_command": [sys.executable, FILE, PIDS]},
})
async def serve():
    server = await ServerProcess.start(config, 0, "127.0.0.1", Path(FILE).parent)
    await server.wait_ended()
work = serve()
""",
}

WORKER = """
import asyncio, sys
from asyncrl.types import Sample
FILE, PIDS = sys.argv[1:]
SAMPLE = Sample(0, "test", (), "1")
{work}
async def main():
    await work
asyncio.run(main())
"""


@pytest.mark.timeout(90)  # reading the pids waits for ever when a worker fails
@pytest.mark.parametrize("kind", WORKERS)
def test_nothing_outlives_a_killed_worker(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "starts.py"
    pids = tmp_path / "pids"
    file.write_text(STARTS_ONE)
    os.mkfifo(pids)
    code = WORKER.format(work=WORKERS[kind])
    worker = subprocess.Popen([sys.executable, "-c", code, str(file), str(pids)], cwd=ROOT)
    grandchild = psutil.Process(int(pids.read_text()))
    assert os.getsid(grandchild.pid) == grandchild.pid
    tree = [grandchild, *psutil.Process(worker.pid).children(recursive=True)]
    worker.kill()
    worker.wait(60)
    assert not psutil.wait_procs(tree, timeout=60)[1]
