"""The version of a validation stays readable for workers that come late, and no longer."""

from __future__ import annotations

from pathlib import Path

from asyncrl.coordinator.validation import Validation
from asyncrl.coordinator.workers import WorkerRecord
from asyncrl.types import EpisodeResult, EpisodeStats, FailReason
from asyncrl.weights import disk
from asyncrl.wire.messages.worker_bulk import Failed, Finished
from asyncrl.wire.messages.worker_control import Assign
from tests.unit.coordinator.test_workers import SAMPLE, A, Desk
from tests.unit.weights.test_delta import Training


def test_a_version_and_what_it_builds_upon_is_kept_until_the_session_ends(tmp_path: Path) -> None:
    training = Training(tmp_path / "weights")
    training.publish(3)  # one whole, and two that build upon it
    desk = Desk(tmp_path)
    validation = Validation(desk.core, desk.desk, desk.engines, [SAMPLE])
    desk.core.versions.ref = training.ref(1)
    assert validation.begin(step=1, count=1, final=False, now=0.0)
    training.publish(6)  # the fifth is whole again, the ninth, too
    disk.prune(training.directory, keep=1)
    training.check(training.ref(1))
    assert validation.session is not None
    validation.tick(validation.session.deadline + 1, exclusive=True)
    assert not validation.busy
    disk.prune(training.directory, keep=1)
    assert disk.published(training.directory) == [training.ref(8)]


def test_a_version_that_is_gone_is_not_validated(tmp_path: Path) -> None:
    training, desk = Training(tmp_path / "weights"), Desk(tmp_path)
    validation = Validation(desk.core, desk.desk, desk.engines, [SAMPLE])
    training.publish(5)
    desk.core.versions.ref = training.ref(0)
    disk.prune(training.directory, keep=1)
    assert not validation.begin(step=1, count=1, final=False, now=0.0)
    assert not validation.busy


def validating(run_dir: Path) -> tuple[Desk, WorkerRecord, Validation]:
    """A session of one sample, with a worker that is ready for it."""
    training, desk = Training(run_dir / "weights"), Desk(run_dir)
    training.publish(1)
    desk.core.versions.ref = training.ref(0)
    desk.join(A)
    (worker,) = desk.desk.workers.values()
    worker.eval_version = training.ref(0).version
    validation = Validation(desk.core, desk.desk, desk.engines, [SAMPLE])
    assert validation.begin(step=1, count=1, final=False, now=0.0)
    return desk, worker, validation


def test_a_failed_episode_is_tried_again_and_then_counts_as_nothing(tmp_path: Path) -> None:
    """Else an agent that breaks on bad answers would be judged by the good ones."""
    desk, worker, validation = validating(tmp_path)
    tries = dict.fromkeys(("sampled", "greedy"), 0)
    while validation.busy:
        validation.tick(0.0, exclusive=True)
        for _, message in desk.sent.take(Assign):
            mode = message.attempt.uid.split("/")[1]
            tries[mode] += 1
            record = Failed(0, message.attempt, FailReason.AGENT_ERROR, "it broke")
            if mode == "greedy":
                record = Finished(0, message.attempt, EpisodeResult(1.0), EpisodeStats(1))
            validation.record(worker, record)
    assert tries == {"sampled": 1 + desk.core.config.rollout.retries, "greedy": 1}
    ((_, metrics),) = validation.results
    assert metrics["val-core/all/sampled/mean@1"] == 0.0
    assert metrics["val-core/all/greedy/mean@1"] == metrics["val-aux/failed"] == 1.0
    assert worker.eval_running == 0


def test_who_failed_and_cannot_be_tried_again_in_time_counts_as_failed(tmp_path: Path) -> None:
    """One slow failure must not cost the whole report."""
    desk, worker, validation = validating(tmp_path)
    validation.tick(0.0, exclusive=True)
    for _, message in desk.sent.take(Assign):
        record = Failed(0, message.attempt, FailReason.AGENT_ERROR, "it broke")
        validation.record(worker, record)
    assert validation.session is not None
    validation.tick(validation.session.deadline + 1, exclusive=True)
    ((_, metrics),) = validation.results
    assert metrics["val-core/all/greedy/mean@1"] == 0.0 and metrics["val-aux/failed"] == 2.0
