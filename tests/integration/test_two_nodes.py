"""A run over two machines that share no memory, loopback or temporary files: a Ray cluster in namespaces."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.observe.files import read_rows, read_summary
from tests.fakes.nodes import WORK, Node, emulated, forbidden
from tests.integration.runs import ROOT, SMALL

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PORT = 6379
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    if why := forbidden():
        pytest.skip(why)
    logs = tmp_path_factory.mktemp("raylets")
    with emulated(2) as nodes:
        for number, node in enumerate(nodes):
            head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            role = ["--address", f"{nodes[0].address}:{PORT}"] if number else head
            start_raylet(node, role, logs / node.name)
        await_members(nodes, logs / "members")
        yield nodes


def await_members(nodes: list[Node], log: Path) -> None:
    """Until Ray counts them all: a raylet that has started is not known to it at once."""
    script = (
        "import ray, sys, time\n"
        f"ray.init(address='{nodes[0].address}:{PORT}', log_to_driver=False)\n"
        f"while sum(node['Alive'] for node in ray.nodes()) < {len(nodes)}: time.sleep(0.1)\n"
    )
    with log.open("wb") as out:
        process = nodes[0].start(sys.executable, "-c", script, out=out, env=ENVIRONMENT)
        assert process.wait(90) == 0, log.read_text()


def start_raylet(node: Node, role: Sequence[str], log: Path) -> None:
    """Until it says that it runs."""
    ray = str(Path(sys.executable).with_name("ray"))
    size = "--object-store-memory=80000000"
    with log.open("wb") as out:
        started = node.start(
            ray, "start", *role, f"--node-ip-address={node.address}", "--num-cpus=4", size, "--block",
            out=out, env=ENVIRONMENT,
        )  # fmt: skip
    deadline = time.monotonic() + 90
    while "Ray runtime started" not in log.read_text():
        assert started.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            started.wait(0.2)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def shared_directory() -> Iterator[Path]:
    """One that all machines see: temporary directories are their own."""
    path = Path(tempfile.mkdtemp(prefix="asyncrl-shared-", dir="/var/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def train(nodes: list[Node], out: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and output of a launcher on the first machine, with workers on the second one as well."""
    cluster = ("launch=ray", f"launch.ray_address={nodes[0].address}:{PORT}")
    command = ["-m", "asyncrl.cli", "train", "experiment=calculator", "name=run", f"run_dir={WORK}/runs"]
    with out.open("wb") as file:
        process = nodes[0].start(
            sys.executable, *command, *cluster, *SMALL, *overrides, out=file, env=ENVIRONMENT, cwd=str(ROOT)
        )
        code = process.wait(240)
    return code, out.read_text()


def test_workers_on_another_machine_sample_with_new_weights(cluster: list[Node], tmp_path: Path) -> None:
    """The lease is longer than the second machine needs to start its first workers."""
    first, second = cluster
    with shared_directory() as weights:
        code, said = train(
            cluster, tmp_path / "out", "total_steps=6", "rollout.workers=2", f"launch.host={first.address}",
            f"weights.directory={weights}", "launch.lease=30",
        )  # fmt: skip
    run = first.seen(f"{WORK}/runs/run")
    summary = read_summary(run)
    assert code == 0 and summary["outcome"] == "completed" and summary["conserved"], said[-3000:]
    assert second.seen(f"{WORK}/runs/run/logs/rollout-0.log").exists(), said[-3000:]
    for index in range(2):
        log = (run / "logs" / f"rollout-{index}.log").read_text()
        assert len(re.findall("ends with 0", log)) == 1, "logs of all machines are here, once and whole"
        assert (run / "timeline" / f"rollout-{index}.jsonl").stat().st_size
    assert max(row.get("staleness/lag/max", 0) for row in read_rows(run)) <= 4
