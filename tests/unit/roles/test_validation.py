"""The version of a validation stays readable for workers that come late, and no longer."""

from __future__ import annotations

from pathlib import Path

from asyncrl.roles.validation import Validation
from asyncrl.weights import disk
from tests.unit.roles.test_worker_desk import SAMPLE, Desk
from tests.unit.weights.test_delta import Training


def test_a_version_and_what_it_builds_upon_is_kept_until_the_session_ends(tmp_path: Path) -> None:
    training = Training(tmp_path / "weights")
    training.publish(3)  # one whole, and two that build upon it
    desk = Desk(tmp_path)
    validation = Validation(desk.core, desk.desk, desk.engines, [SAMPLE])
    desk.core.latest = training.ref(1)
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
    desk.core.latest = training.ref(0)
    disk.prune(training.directory, keep=1)
    assert not validation.begin(step=1, count=1, final=False, now=0.0)
    assert not validation.busy
