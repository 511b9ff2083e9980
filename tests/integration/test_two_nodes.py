"""Runs over two machines that share no memory, loopback or temporary files: a Ray cluster in namespaces."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.fakes.nodes import WORK, Node, emulated, forbidden
from tests.integration.runs import ROOT, TELLING, Run

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(400)]
PORT = 6379
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONFAULTHANDLER": "1",  # a process that is aborted has last words
    # A machine that does not answer is lost after half a minute. What was cut off needs seconds to be heard
    # again: TCP waits longer and longer before it repeats what was lost.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "15",
}


class Cluster:
    """Two machines, one raylet each, which claims a GPU. `shared`: a directory that both see."""

    def __init__(self, nodes: list[Node], logs: Path, shared: Path) -> None:
        self.first, self.second = nodes
        self.shared = shared
        self._logs = logs
        for node in nodes:
            self.start_raylet(node)

    def start_raylet(self, node: Node) -> None:
        """Until Ray counts the machine: a raylet that has started is not known to it at once."""
        address = f"{self.first.address}:{PORT}"
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        role = head if node is self.first else ["--address", address, '--resources={"second": 1}']
        own = [f"--node-ip-address={node.address}", "--num-cpus=1", "--num-gpus=1", "--block"]
        command = ["-m", "ray.scripts.scripts", "start", *role, *own, "--object-store-memory=80000000"]
        log = self._logs / f"{node.name}-{time.monotonic_ns()}"
        with log.open("wb") as out:
            started = node.start(sys.executable, *command, out=out, env=ENVIRONMENT)
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            try:
                assert started.wait(0.2) is None, log.read_text()
            except subprocess.TimeoutExpired:
                continue
        script = (
            "import ray, time\n"
            f"ray.init(address='{address}', log_to_driver=False)\n"
            f"while not any(node['Alive'] and node['NodeManagerAddress'] == '{node.address}'"
            " for node in ray.nodes()): time.sleep(0.1)\n"
        )
        with log.open("wb") as out:
            counted = self.first.start(sys.executable, "-c", script, out=out, env=ENVIRONMENT)
            assert counted.wait(90) == 0, log.read_text()


class ClusterRun(Run):
    """A run whose launcher is on the first machine. `path`: as it is seen from outside."""

    def __init__(self, cluster: Cluster, out_dir: Path, *overrides: str, program: Sequence[str] = ()) -> None:
        self._cluster = cluster
        super().__init__(
            out_dir,
            *("launch=ray", f"launch.ray_address={cluster.first.address}:{PORT}"),
            f"launch.host={cluster.first.address}",
            *(
                f"run_dir={WORK}/runs",
                "launch.lease=30",
            ),  # longer than a second machine needs to start workers
            *overrides,
            name=out_dir.name,
            program=program,
        )
        self.path = cluster.first.seen(f"{WORK}/runs/{out_dir.name}")

    def start(self, program: Sequence[str], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command = (sys.executable, *(program or ("-m", "asyncrl.cli")), *arguments)
        with self.out.open("wb") as out:
            return self._cluster.first.start(*command, out=out, env=ENVIRONMENT, cwd=str(ROOT))

    def spans(self, role: str) -> list[dict[str, Any]]:
        """Its timeline here, as far as it was fetched."""
        if not (self.path / "timeline" / f"{role}.jsonl").exists():
            return []
        with (self.path / "timeline" / f"{role}.jsonl").open("rb") as file:
            return [msgspec.json.decode(line) for line in file]

    def starts(self, role: str) -> int:
        path = self.path / "logs" / f"{role}.log"
        return path.read_text().count(f"{role} starts") if path.exists() else 0


def joined(cluster: Cluster, run: ClusterRun, out: Path) -> subprocess.Popen[bytes]:
    """A worker of the second machine that was invited."""
    token = cluster.shared / "token"
    command = (sys.executable, "-m", "asyncrl.cli", "invite", f"{WORK}/runs/{run.path.name}")
    with token.open("wb") as asked:
        assert cluster.first.start(*command, out=asked, cwd=str(ROOT)).wait(60) == 0, token.read_text()
    join = f"exec {sys.executable} -m asyncrl.cli worker --join - --run-dir {WORK}/joined < {token}"
    with out.open("wb") as terminal:
        return cluster.second.start("sh", "-c", join, out=terminal, env=ENVIRONMENT, cwd=str(ROOT))


def known_to_others(cluster: Cluster, secrets: Sequence[str]) -> list[str]:
    """Where one of these can be read that is not a file of the run: logs of Ray, arguments and variables."""
    nodes = (cluster.first, cluster.second)
    places = [path for node in nodes for path in node.seen("/tmp/ray").glob("session_2*/logs/**/*")]
    places += [Path(f"/proc/{pid}/{name}") for pid in psutil.pids() for name in ("cmdline", "environ")]
    found = []
    for place in places:
        with suppress(OSError):  # of a process that has just ended, or of others; directories
            content = place.read_bytes()
            found += [str(place) for secret in secrets if secret.encode() in content]
    assert len(places) > 50
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := forbidden():
        pytest.skip(why)
    shared = Path(
        tempfile.mkdtemp(prefix="asyncrl-shared-", dir="/var/tmp")
    )  # the machines' WORK is their own
    try:
        with emulated(2) as nodes:
            yield Cluster(nodes, tmp_path_factory.mktemp("raylets"), shared)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def test_workers_on_another_machine_sample_with_new_weights(cluster: Cluster, tmp_path: Path) -> None:
    with ClusterRun(cluster, tmp_path, "total_steps=6", "rollout.workers=2") as run:
        summary = run.completed(6)
        for role in ("rollout-0", "rollout-1"):
            assert (run.path / "logs" / f"{role}.log").read_text().count("ends with 0") == 1
        spans = run.spans("rollout-0")
        loads = [span["end"] for span in spans if span["name"] == "load_weights" and span["version"][1] > 0]
        assert any(span["name"] == "fetch_weights" for span in spans), "no directory is shared"
        assert any(span["name"] == "decode" and span["end"] > loads[0] for span in spans)
        assert max(row.get("staleness/lag/max", 0) for row in run.rows()) <= 4 and summary["conserved"]
        assert not cluster.second.seen(f"{WORK}/runs/{run.path.name}/logs").exists()
        left = cluster.second.seen(f"{WORK}/runs/{run.path.name}/elsewhere")
        assert not list(left.iterdir()), "what was fetched is removed there"
        assert not list(cluster.second.seen("/dev/shm").glob("asyncrl-*")), "and weights"


def test_what_ray_places_and_what_joins_by_invitation_show_the_same(cluster: Cluster, tmp_path: Path) -> None:
    """Conformance of processes on another machine: rollout-0 is placed there, rollout-1 joins."""
    secrets_file = cluster.shared / "told"
    keys = ("total_steps=1000", "rollout.workers=1", "launch.start_timeout=30")
    with ClusterRun(cluster, tmp_path, *keys, program=("-c", TELLING, str(secrets_file))) as run:
        run.until_step(1)
        invited = joined(cluster, run, tmp_path / "terminal")
        both = {role: run.path / f"logs/{role}.log" for role in ("rollout-0", "rollout-1")}

        def said(role: str) -> str:
            return both[role].read_text() if both[role].exists() else ""

        def pids() -> list[int]:
            return [int(pid) for role in both for pid in re.findall(r"starts, pid (\d+)", said(role))]

        run.until(lambda: all(f"{role} starts" in said(role) for role in both), "both start")
        secrets = secrets_file.read_text().split()
        assert len(secrets) >= 5 and not known_to_others(cluster, secrets)
        coordinator = run.path / "logs/coordinator-0.log"
        os.kill(int(re.findall(r"starts, pid (\d+)", coordinator.read_text())[-1]), signal.SIGKILL)
        run.until(lambda: run.starts("coordinator-0") == 2, "a coordinator again")
        back = time.time()
        run.until(lambda: any(span["end"] > back for span in run.spans("rollout-0")), "both go on")
        for pid in pids():
            os.kill(pid, signal.SIGABRT)
        run.until(lambda: all("Fatal Python error: Aborted" in said(role) for role in both), "last words")
        assert invited.wait(60) != 0
        run.until(lambda: run.starts("rollout-0") == 2, "it is restarted")
        assert "rollout-0 was killed by SIG" in run.text()
        assert said("rollout-1") in (tmp_path / "terminal").read_text()
        again = joined(cluster, run, tmp_path / "terminal")
        both["rollout-2"] = run.path / "logs/rollout-2.log"
        run.until(lambda: "rollout-2 starts" in said("rollout-2"), "another one joins")
        assert not known_to_others(cluster, secrets_file.read_text().split())
        run.process.kill()
        assert not psutil.wait_procs([psutil.Process(pid) for pid in pids() if psutil.pid_exists(pid)], 60)[1]
        assert again.wait(60) == 1, (tmp_path / "terminal").read_text()


def test_a_dry_run_says_who_would_go_where(cluster: Cluster, tmp_path: Path) -> None:
    keys = ("--dry-run", "rollout.workers=2", "trainer.ranks=2", f"checkpoint.directory={cluster.shared}")
    with ClusterRun(cluster, tmp_path, *keys) as run:
        assert run.wait() == 0, run.text()
        assert "10.77.0.1 (this machine), 1 of 1 GPUs free, 1 for this run: coordinator-0, " in run.text()
        assert "10.77.0.2, 1 of 1 GPUs free, 1 for this run: rollout-0, trainer-1" in run.text()


def two_ranks(cluster: Cluster, *overrides: str) -> tuple[str, ...]:
    """One on each machine; so are the workers."""
    return (
        *("trainer.ranks=2", "launch.gpus={trainer: 1}", "rollout.workers=2", "checkpoint.every=2"),
        *(f"checkpoint.directory={cluster.shared / 'checkpoints'}", *overrides),
    )


@pytest.mark.long
@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_a_server_on_the_other_machine(cluster: Cluster, tmp_path: Path, transport: str) -> None:
    """Broadcasts come over the network."""
    if not (ROOT / ".venv-sglang").exists():
        pytest.skip("needs SGLang: make sglang-cpu")
    keys = ("engine=sglang_cpu", "engine.servers=1", "launch.start_timeout=300", "total_steps=4")
    sent = f"weights.transport={transport}"
    with ClusterRun(cluster, tmp_path, *keys, "rollout.slots=32", sent) as run:
        summary = run.completed(4)
        assert summary["k3_same_version"] < 1e-4 and summary["logprob_tokens_compared"] > 0
        assert run.rows()[-1]["engine/0/version"] == 4
        assert "10.77.0.2" in (run.path / "logs/engine-0.log").read_text()


@pytest.mark.long
def test_ranks_on_two_machines_go_on_from_their_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    with ClusterRun(cluster, tmp_path, *two_ranks(cluster, "total_steps=100")) as run:
        run.until_step(5)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait(60)
        assert "trainer-1 starts" in (run.path / "logs/trainer-1.log").read_text()
    with ClusterRun(cluster, tmp_path, *two_ranks(cluster, "total_steps=8", "resume=must")) as run:
        run.completed(8)
        assert run.starts("trainer-1") == 2
        steps = [row["training/step"] for row in run.rows() if "timing_s/step" in row]
        assert sorted(set(steps)) == list(range(1, 9))
        left = cluster.second.seen(f"{WORK}/runs/{run.path.name}/elsewhere")
        assert not list(left.iterdir()), "what the killed launcher had no time to remove is gone, too"


@pytest.mark.long
@pytest.mark.parametrize("lease", [30, 4])
def test_a_machine_that_cannot_be_reached_for_a_while(cluster: Cluster, tmp_path: Path, lease: float) -> None:
    """Longer than the lease, or not; and not as long as Ray waits until a machine is lost."""
    keys = ("total_steps=1000", "rollout.workers=2", f"launch.lease={lease}")
    with ClusterRun(cluster, tmp_path, *keys) as run:
        log = run.path / "logs/coordinator-0.log"
        run.until_step(3)
        cluster.second.cut()
        back_at = time.monotonic() + 4
        run.until(lambda: time.monotonic() > back_at, "4 s without the machine")
        if lease == 4:
            run.until(lambda: "worker 0 lost (silent for 4 s)" in log.read_text(), "its lease is over")
        cluster.second.join()
        back = time.time()
        run.until(lambda: any(span["end"] > back for span in run.spans("rollout-0")), "it works again")
        run.until_step(run.step + 3)
        assert ("silent for" in log.read_text()) == (lease == 4)
        assert run.starts("rollout-0") == run.starts("rollout-1") == 1, run.text()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 130 and run.summary()["conserved"]
        assert "waiting for Ray" not in run.text()


@pytest.mark.long
def test_a_machine_that_is_lost_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    """Its worker may be nowhere else, so it waits for it; the run goes on with the other one."""
    # Both workers are of the pool: the second machine has one GPU, which two halves share.
    keys = ("launch.pools={rollout: second}", "rollout.workers=2", "total_steps=100", "launch.restarts=20")
    with ClusterRun(cluster, tmp_path, *keys) as run:
        run.until_step(3)
        before = {role: run.starts(role) for role in ("rollout-0", "rollout-1")}
        assert "waiting for Ray" not in run.text()
        cluster.second.kill()
        run.until(lambda: "waiting for Ray" in run.text(), "it is said that workers wait for a machine")
        step = run.step
        cluster.start_raylet(cluster.second)
        run.until_step(step + 3)
        assert all(run.starts(role) > before[role] for role in before)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 130 and run.summary()["conserved"]
