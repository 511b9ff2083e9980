"""Faults in mid-run, or an interrupt: the run completes, and each trajectory is trained once."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from asyncrl.cli import main
from tests.fakes.audit import manifests, trained_uids
from tests.fakes.world import damage
from tests.integration.runs import ROOT, Run, is_forked, once

pytestmark = pytest.mark.slow


@pytest.mark.timeout(500)
@pytest.mark.parametrize("more", [(), pytest.param(("engine.colocated=1",), marks=pytest.mark.full)])
def test_each_kind_of_fault_once(tmp_path: Path, more: tuple[str, ...]) -> None:
    """tools/chaos.py says what is done, and what must hold: some at once, one round after another."""
    command = [sys.executable, "-m", "tests.fakes.chaos", "--each-once", "--disk", "--lease", "2"]
    command += ["--run-dir", str(tmp_path / "chaos"), *more]
    namespace_command = ["unshare", "-rm"]
    variables = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    if not subprocess.run([*namespace_command, "true"], check=False).returncode:  # it may mount what fills up
        command = namespace_command + command
        variables = variables | {"CHAOS_NAMESPACE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


@pytest.mark.full
def test_kill_9(tmp_path: Path) -> None:
    """A process of each role, one after another in one run; a lost rank ends the other one, too. At last the
    coordinator in the last validation, which is repeated. (By shifts, in each of them: test_shifts.)"""
    victims = {2: "rollout-0", 5: "trainer-1", 8: "coordinator-0"}
    more = ("rollout.workers=2", "trainer.ranks=2", "validation.samples=200")
    with Run(tmp_path, "total_steps=11", *more) as run:
        for step, victim in victims.items():
            run.until_step(step)
            run.kill(victim)
        assert is_forked(run, "rollout-0")
        run.until(lambda: "phase: evaluating" in run.text(), "final validation")
        run.kill("coordinator-0")
        summary = run.completed(11)
        restarted = re.findall(r"; restarting (.+?)(?: in [\d.]+ s|$)", run.text(), re.M)
    assert restarted == ["rollout-0", "trainer (all ranks)", "coordinator-0", "coordinator-0"]
    flow = summary["flow"]  # a member that is late at the end, as its worker was lost, is dropped by name
    assert flow["trained"] + flow["dropped"] == flow["issued"] and 10 * 16 < flow["trained"] <= 11 * 16
    assert summary["success_after"] is not None
    once(run.path, 11, flow["trained"])


WHOLE_GROUPS = "buffer.group_policy=complete"  # every batch is of 16 episodes, however slow the machine is
LACKING = '''
"""A loss; in the third micro-batch of rank 1 there is once too little memory."""
from itertools import count
from pathlib import Path

import torch

from asyncrl.algorithms.losses import TokenLoss, loss

MARKER, calls = Path(__file__).with_suffix(".lacked"), count(1)


@loss("lacking", ratio="prox")
def lacking(given):
    if torch.distributed.get_rank() == 1 and next(calls) == 3 and not MARKER.exists():
        MARKER.touch()
        raise torch.OutOfMemoryError("no room for it")
    value = -given.correction.weight * given.advantage * given.logp
    return TokenLoss(value, clipped=torch.zeros_like(given.trainable))
'''


@pytest.mark.long
@pytest.mark.parametrize(
    ("recomputed", "then"),
    [
        ("none", r"micro-batches have at most (?!8192)\d+ tokens from now on$"),
        ("auto", r"1 layer in 2 is recomputed from now on$"),
    ],
)
def test_a_rank_that_lacks_memory_goes_on_with_less(tmp_path: Path, recomputed: str, then: str) -> None:
    """No restart is allowed: this one does not count."""
    (tmp_path / "lacking.py").write_text(LACKING)
    more = (f"algorithm.loss={tmp_path}/lacking.py:lacking", "trainer.ranks=2", "launch.restarts=0")
    more += (f"trainer.activation_checkpointing={recomputed}", WHOLE_GROUPS)
    with Run(tmp_path, "total_steps=5", "data.test=''", *more) as run:
        run.completed(5)
        assert run.text().count("; restarting ") == 1 and "no room for it" in run.text()
        log = (run.path / "logs" / "coordinator-0.log").read_text()
    assert len(re.findall(then, log, re.MULTILINE)) == 1
    rows = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    shares = [row["perf/recomputed_layers"] for row in rows if "perf/recomputed_layers" in row]
    assert shares[-1] == (2 / 3 if recomputed == "auto" else 0.0), "of three layers"
    once(run.path, 5)


SPIKING = '''
"""A loss that is once not a number, in the third micro-batch that a rank trains."""
from itertools import count
from pathlib import Path

from asyncrl.algorithms.losses import TokenLoss, loss

MARKER, calls = Path(__file__).with_suffix(".spiked"), count(1)


@loss("spiking", ratio="prox")
def spiking(given):
    value = -given.correction.weight * given.advantage * given.logp
    if next(calls) == 3 and not MARKER.exists():
        MARKER.touch()
        value = value * float("nan")
    return TokenLoss(value, clipped=given.trainable & False)
'''


@pytest.mark.long
def test_a_batch_that_spiked_is_left_out_and_the_steps_before_it_are_repeated(tmp_path: Path) -> None:
    """No restart is allowed: this one does not count."""
    (tmp_path / "spiking.py").write_text(SPIKING)
    more = (f"algorithm.loss={tmp_path}/spiking.py:spiking", "trainer.on_spike=rollback", "launch.restarts=0")
    more += (WHOLE_GROUPS,)
    with Run(tmp_path, "total_steps=6", "data.test=''", "checkpoint.every=2", *more) as run:
        summary = run.completed(6)
        assert "spiked: its gradient norm is nan" in run.text()
        log = (run.path / "logs" / "coordinator-0.log").read_text()
    assert summary["reasons"]["dropped/spike"] == 16 and summary["skipped_steps"] == 0
    (names,) = re.findall(r"gradient norm is nan; left out: (.*)", log)
    assert not set(names.split()) & trained_uids(run.path).keys() and len(names.split()) == 16
    once(run.path, 6)


@pytest.mark.long
def test_a_rank_that_hangs_is_replaced(tmp_path: Path) -> None:
    """It is stopped, and silent."""
    limits = ("launch.stall_timeout=5", "launch.start_timeout=30", "weights.deadline=5")
    with Run(tmp_path, "total_steps=8", "data.test=''", WHOLE_GROUPS, *limits) as run:
        run.until_step(4)
        run.children()["trainer-0"].suspend()
        run.completed(8)
        assert re.search(r"the trainer is hanging; no sign of life .*: replacing the process", run.text())
    once(run.path, 8)


@pytest.mark.long
def test_a_stop_waits_for_a_trainer_that_is_slow(tmp_path: Path) -> None:
    """As in a micro-batch of a real model: here it does not run for 10 s and more."""
    waits = "waits: a checkpoint after the current part of the plan, for at most"
    with Run(tmp_path, "total_steps=1000", "checkpoint.every=0", "data.test=''") as run:
        run.until_step(4)
        trainer = run.children()["trainer-0"]
        trainer.suspend()
        run.process.send_signal(signal.SIGHUP)
        run.until(lambda: run.text().count(waits) >= 3, "three status lines, 5 s apart")
        trainer.resume()
        assert run.wait() == 130, f"{run.text()}\n{run.logs()}"
        assert "with a checkpoint (at most 600 s; " in run.text()
    stopped = run.summary()
    assert stopped["outcome"] == "stopped" and stopped["conserved"]
    assert [manifest.step for manifest in manifests(run.path)] == [stopped["steps"]]


@pytest.mark.long
def test_a_run_goes_on_while_no_checkpoint_can_be_written(tmp_path: Path) -> None:
    """The directory is a file, for a while; killed then, the run goes on from its start."""
    blocked = tmp_path / "run" / "checkpoints"
    blocked.parent.mkdir()
    blocked.touch()
    with Run(tmp_path, "total_steps=12", "checkpoint.every=1", "data.test=''") as run:
        run.until_step(4)
        run.until(lambda: "checkpoints are not written: " in run.text(), "a checkpoint that is not saved")
        run.kill("trainer-0")
        run.until_step(8)
        blocked.unlink()
        summary = run.completed(12)
        assert run.text().count("; restarting ") == 1
    once(run.path, 12, summary["flow"]["trained"])  # a step may take less of a partial group
    assert not any("checkpoints are not written" in line for line in summary["alerts"])


def test_an_interrupted_or_killed_run_resumes(tmp_path: Path) -> None:
    """By SIGTERM to all processes at once, as Slurm sends it, and by kill -9 of the launcher. A checkpoint of
    two ranks goes on at one. A signal ends it in time, within the stop timeout: a run that exceeds it has
    another exit code. (SIGINT: test_launch_local.)"""
    for number, ranks, step in ((signal.SIGTERM, 2, 2), (signal.SIGKILL, 1, 5)):
        more = (f"trainer.ranks={ranks}", "resume=auto", "launch.stop_timeout=60", WHOLE_GROUPS)
        with Run(tmp_path, "total_steps=9", "data.test=''", *more) as run:
            run.until_step(step)
            children = run.children().values()
            others = psutil.Process(run.process.pid).children(recursive=True)
            for process in [run.process, *(others if number == signal.SIGTERM else [])]:
                process.send_signal(number)
            code = run.wait()
            killed = number == signal.SIGKILL
            assert not psutil.wait_procs(children, 60 if killed else 0)[1], "a process outlived the launcher"
        if killed:
            continue
        assert code == 130, f"{run.text()}\n{run.logs()}"
        stopped = run.summary()
        assert stopped["outcome"] == "stopped" and stopped["conserved"]
        assert not stopped["attempts_failed"], "a stop that was asked for is no loss"
        saved = max(manifest.step for manifest in manifests(run.path))
        assert saved == stopped["steps"] < 9, "the checkpoint is of the last step"
    with Run(tmp_path, "total_steps=9", "data.test=''", "resume=must", WHOLE_GROUPS) as again:
        summary = again.completed(9)
    assert summary["flow"]["trained"] == 9 * 16
    once(again.path, 9)


@pytest.mark.long
@pytest.mark.parametrize("index", ["on the disk", "lost", "damaged"])
def test_a_power_cut_resumes(tmp_path: Path, index: str) -> None:
    """Half of the newest segment is left. The index knows all payloads, or it has lost everything since some
    moment before, and with it a checkpoint that is in place; or it is damaged, and made anew from a copy."""
    snapshot = tmp_path / "snapshot.db"
    with Run(tmp_path, "total_steps=9", "data.test=''") as run:
        database = run.path / "run.db"
        run.until(lambda: len(manifests(run.path)) > 0, "checkpoint")
        if index == "lost":
            with closing(sqlite3.connect(database)) as live, closing(sqlite3.connect(snapshot)) as copy:
                live.backup(copy)
            first = len(manifests(run.path))
            run.until(lambda: len(manifests(run.path)) > first, "another checkpoint")
        else:
            run.until_step(run.step + 2)
        children = run.children()
        run.process.kill()
        run.process.wait(60)
        for child in children.values():
            child.wait(60)
    newest = max((run.path / "segments").iterdir())
    os.truncate(newest, newest.stat().st_size // 2)
    if index == "lost":
        for path in run.path.glob("run.db*"):
            path.unlink()
        snapshot.rename(database)
    if index == "damaged":
        damage(database)
        with Run(tmp_path, "total_steps=9", "data.test=''", "resume=must") as refused:
            assert refused.wait() == 2 and "is damaged" in refused.text(), refused.text()
            assert "asyncrl runs restore" in refused.text()
        assert main(["runs", "restore", "run", "--run-dir", str(tmp_path)]) == 0
    with Run(tmp_path, "total_steps=9", "data.test=''", "resume=must") as again:
        summary = again.completed(9)
        log = (again.path / "logs" / "coordinator-0.log").read_text()
    assert max(trained_uids(again.path).values(), default=1) == 1
    last = max(manifests(again.path), key=lambda manifest: manifest.step)
    assert last.step == 9 and last.trained_total == summary["flow"]["trained"]
    if index != "damaged":
        assert ("had lost steps" if index == "lost" else "turns can be read") in log
