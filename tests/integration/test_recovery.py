"""kill -9 any process in mid-run, or interrupt the run: it completes, and each trajectory is trained once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.runs import Run, manifests, trained_uids

pytestmark = pytest.mark.slow


def test_kill_9(tmp_path: Path) -> None:
    """A process of each role, one after another in one run."""
    victims = {2: "rollout-0", 5: "trainer-0", 8: "coordinator-0"}
    with Run(tmp_path, "total_steps=12", "rollout.workers=2", "data.test=''") as run:
        for step, victim in victims.items():
            run.until_step(step)
            run.kill(victim)
        summary = run.completed(12)
        assert all(f"{victim} was killed by SIGKILL" in run.text() for victim in victims.values())
    assert summary["flow"]["trained"] == 12 * 16
    once(run.path, 12)


def test_killing_a_rank_ends_them_all_and_the_run_goes_on(tmp_path: Path) -> None:
    with Run(tmp_path, "total_steps=8", "trainer.ranks=2", "data.test=''") as run:
        run.until_step(4)
        run.kill("trainer-1")
        run.completed(8)
    once(run.path, 8)


@pytest.mark.long
def test_a_rank_that_hangs_is_replaced(tmp_path: Path) -> None:
    """It is stopped, and silent."""
    limits = ("launch.stall_timeout=5", "launch.start_timeout=30", "weights.deadline=5")
    with Run(tmp_path, "total_steps=8", "data.test=''", *limits) as run:
        run.until_step(4)
        run.children()["trainer-0"].suspend()
        run.completed(8)
        assert "the trainer processes are replaced" in run.text()
    once(run.path, 8)


@pytest.mark.long
def test_a_stop_waits_for_a_trainer_that_is_slow(tmp_path: Path) -> None:
    """As in a micro-batch of a real model: here it does not run for 10 s and more."""
    waits = "waits: a checkpoint after the micro-batch under way, for at most"
    with Run(tmp_path, "total_steps=1000", "trainer.checkpoint_every=0", "data.test=''") as run:
        run.until_step(4)
        trainer = run.children()["trainer-0"]
        trainer.suspend()
        run.process.send_signal(signal.SIGHUP)
        run.until(lambda: run.text().count(waits) >= 3, "three status lines, 5 s apart")
        trainer.resume()
        assert run.wait() == 130, f"{run.text()}\n{run.logs()}"
        assert "with a checkpoint: at most 600 s" in run.text()
    stopped = run.summary()
    assert stopped["outcome"] == "stopped" and stopped["conserved"]
    assert [manifest.step for manifest in manifests(run.path)] == [stopped["steps"]]


@pytest.mark.long
def test_a_run_goes_on_while_no_checkpoint_can_be_written(tmp_path: Path) -> None:
    """The directory is a file, for a while; killed then, the run goes on from its start."""
    blocked = tmp_path / "run" / "checkpoints"
    blocked.parent.mkdir()
    blocked.touch()
    with Run(tmp_path, "total_steps=12", "trainer.checkpoint_every=1", "data.test=''") as run:
        run.until_step(4)
        assert "not saved: checkpoint" in (run.path / "logs" / "trainer-0.log").read_text()
        run.kill("trainer-0")
        run.until_step(8)
        blocked.unlink()
        run.completed(12)
        assert run.text().count("is restarted") == 1
    once(run.path, 12)


def test_killing_the_coordinator_at_the_end_repeats_the_last_validation(tmp_path: Path) -> None:
    with Run(tmp_path, "total_steps=3", "validation.samples=200") as run:
        run.until(lambda: "phase: evaluating" in run.text(), "final validation")
        run.kill("coordinator-0")
        summary = run.completed(3)
    assert summary["success_after"] is not None
    once(run.path, 3)


def test_an_interrupted_run_ends_in_time_and_resumes(tmp_path: Path) -> None:
    """Twice, by either signal; a checkpoint of two ranks goes on at one. "In time" is the stop timeout: who
    exceeds it ends with another code."""
    for number, ranks, step in ((signal.SIGTERM, 2, 3), (signal.SIGINT, 1, 6)):
        more = (f"trainer.ranks={ranks}", "resume=auto", "launch.stop_timeout=60")
        with Run(tmp_path, "total_steps=12", "data.test=''", *more) as run:
            run.until_step(step)
            run.process.send_signal(number)
            assert run.wait() == 130, f"{run.text()}\n{run.logs()}"
            assert not run.children()
        stopped = run.summary()
        assert stopped["outcome"] == "stopped" and stopped["conserved"]
        saved = max(manifest.step for manifest in manifests(run.path))
        assert saved == stopped["steps"] < 12, "the checkpoint is of the last step"
    with Run(tmp_path, "total_steps=12", "data.test=''", "resume=auto") as again:
        summary = again.completed(12)
    assert summary["flow"]["trained"] == 12 * 16
    once(again.path, 12)


def test_kill_9_of_everything_resumes(tmp_path: Path) -> None:
    with Run(tmp_path, "total_steps=9", "data.test=''") as run:
        run.until_step(5)
        children = run.children()
        run.process.kill()
        run.process.wait(60)
        for child in children.values():
            child.wait(60)  # no orphan outlives the launcher
    with Run(tmp_path, "total_steps=9", "data.test=''", "resume=must") as again:
        again.completed(9)
    once(run.path, 9)


def once(run: Path, steps: int) -> None:
    """No trajectory is in two batches; the last checkpoint counts as many as the batches held."""
    assert max(trained_uids(run).values(), default=1) == 1
    last = max(manifests(run), key=lambda manifest: manifest.step)
    assert last.step == steps and last.trained_total == steps * 16
    assert len(set(last.trained)) == len(last.trained)
