"""Replaced engines where the trainer scores no further probe: the successor is compared with the probe that
its predecessor failed, and the run goes on. A coordinator, whose peers are played by their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from asyncrl.buffer.shifts import Shift
from asyncrl.config import parse
from asyncrl.coordinator.lifecycle import Phase
from asyncrl.coordinator.loop import Coordinator
from asyncrl.data import samples_path
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import LogprobGaps, Probe
from asyncrl.wire.messages.shared import Loaded, LoadWeights, ObserverHello, ProbeGap, Replace
from asyncrl.wire.messages.trainer import PlanRequest, Probed, Published, TrainerHello, WorkPlan
from asyncrl.wire.messages.worker import Assign, WorkerHello
from asyncrl.wire.sockets import choose_endpoints
from tests.fakes.data import rows, stored
from tests.fakes.mail import Sent
from tests.unit.weights.test_delta import Training

OBSERVER = b"observer/0/a"
RANK = b"trainer/0/launch.2"
WORKER = b"rollout/0/launch.1"
SUCCESSOR = b"rollout/0/launch.9"
ROUNDING = LogprobGaps(1e-6, 1e-6, 1e-6)
PROBE = Probe(((1, 2),), ((-1.0,),), ROUNDING)
OTHER_PROBE = Probe(((3, 4),), ((-1.0,),), ROUNDING)
WRONG = ProbeGap(1.0, 1.0, 1.0, tokens=1, rounding=ROUNDING)
RIGHT = ProbeGap(0.0, 0.0, 0.0, tokens=1, rounding=ROUNDING)


class PlayedRun:
    """A coordinator with a launcher, a trainer that has published version `step`, and one worker."""

    def __init__(self, directory: Path, step: int = 0, **keys: Any) -> None:
        for part in ("train", "test"):
            stored(rows(4)).save(samples_path(directory / "r", part))
        data = {"train": "d", "test": "d"}
        base_keys = {"name": "r", "run_dir": str(directory), "model": {"path": "m"}, "data": data}
        self.coordinator = Coordinator(
            parse(base_keys | keys), choose_endpoints("127.0.0.1", 0), incarnation="launch"
        )
        training = Training(directory / "r" / "weights")
        training.publish(1)
        self.ref = msgspec.structs.replace(training.ref(0), version=PolicyVersion(1, step))

        self.now = self.coordinator._last_pass_at
        self.receive(OBSERVER, ObserverHello())
        self.receive(RANK, TrainerHello(0, 1, "launch.2", 0))
        self.receive(WORKER, WorkerHello(0, "launch.1", 4, 1))
        self.receive(RANK, Published(self.ref, 0.0, 0.0))

    def receive(self, peer: bytes, message: Any) -> None:
        self.coordinator._on_control(peer, message, [], self.now)

    def advance(self) -> None:
        """Run what follows the messages of a pass."""
        self.coordinator.state.fleet.waits = []
        self.coordinator._act_on_mismatches(self.now)
        self.coordinator._advance(self.now)
        self.coordinator.state.journal.store.commit()

    def advance_twice(self) -> None:
        """Advance the phase, and then act in the new phase."""
        self.advance()
        self.advance()

    def sent(self, kind: type) -> list[Any]:
        outbox: Any = self.coordinator.state.journal.outbox
        return [message for _, message in outbox.take(kind)]

    def loads(self, lane: str = "train") -> list[Probe | None]:
        """The probes of the versions that were sent to a lane since the last call."""
        return [message.probe for message in self.sent(LoadWeights) if message.lane == lane]

    def answer_load(self, peer: bytes, gap: ProbeGap, lane: str = "train") -> None:
        self.receive(peer, Loaded(self.ref, lane, "sum", 0.1, probe_gap=gap))

    def replace_worker(self) -> None:
        """The successor of a worker that was found wrong says hello."""
        (request,) = self.sent(Replace)
        assert request.incarnation == "launch.1"
        self.sent(Assign)
        self.receive(SUCCESSOR, WorkerHello(0, "launch.9", 4, 1))
        self.advance_twice()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PlayedRun]]:
    monkeypatch.setattr("asyncrl.coordinator.loop.TransactionalOutbox", lambda *hubs: Sent())
    runs: list[PlayedRun] = []

    def start_run(**keys: Any) -> PlayedRun:
        runs.append(PlayedRun(tmp_path, **keys))
        return runs[-1]

    yield start_run
    for run in runs:
        run.coordinator.close()


@pytest.mark.parametrize("wrong_lane", ["train", "eval"])
def test_an_evaluation_compares_a_successor_with_its_only_probe(
    start: Callable[..., PlayedRun], wrong_lane: str
) -> None:
    run = start(total_steps=0)
    run.receive(RANK, Probed(run.ref.version, PROBE))
    run.advance_twice()
    assert run.coordinator.lifecycle.phase is Phase.EVALUATING
    if wrong_lane == "eval":
        run.answer_load(WORKER, RIGHT)
    run.answer_load(WORKER, WRONG, wrong_lane)
    run.advance()
    run.loads()

    run.replace_worker()
    assert run.loads() == [PROBE] and not run.sent(Assign)
    run.answer_load(SUCCESSOR, RIGHT)
    run.advance()
    assert run.loads("eval") == [PROBE] and not run.sent(Assign)
    run.answer_load(SUCCESSOR, RIGHT, "eval")
    run.advance()
    assert len(run.sent(Assign)) == 4


def test_shifts_compare_a_successor_while_the_trainer_has_offloaded(start: Callable[..., PlayedRun]) -> None:
    run = start(engine={"colocated": 1})
    run.receive(RANK, Probed(run.ref.version, PROBE))
    run.coordinator.lifecycle.phase = Phase.RUNNING
    run.coordinator.state.fleet.shifts.shift = Shift.WAKING  # type: ignore[union-attr]
    ranks = run.coordinator.trainer.ranks
    ranks.offloaded = True
    ranks.last_plan_kind = "rest"
    ranks.open_request = PlanRequest(trainer_epoch=1, step=1, part=0, resting=True)
    run.advance()
    assert run.loads() == [PROBE]

    run.answer_load(WORKER, WRONG)
    run.advance()
    run.replace_worker()
    assert run.loads() == [PROBE] and not run.sent(Assign)
    run.answer_load(SUCCESSOR, RIGHT)
    run.advance_twice()
    assert run.coordinator.state.fleet.shifts.shift is Shift.ROLLOUT  # type: ignore[union-attr]
    assert run.sent(Assign)


def test_the_last_validation_compares_a_successor_after_the_last_plan(
    start: Callable[..., PlayedRun],
) -> None:
    run = start(total_steps=1, step=1)
    run.coordinator.lifecycle.phase = Phase.DRAINING
    run.coordinator.state.ledger.buffer.committed = 1
    run.coordinator.trainer.checkpoint_step = 1
    run.coordinator.trainer.ranks.open_request = PlanRequest(trainer_epoch=1, step=2, part=0)
    run.advance()
    assert [plan.kind for plan in run.sent(WorkPlan)] == ["end"]
    run.receive(RANK, Probed(run.ref.version, PROBE))
    run.advance()
    run.loads()

    run.answer_load(WORKER, WRONG)
    run.advance()
    run.replace_worker()
    assert run.loads() == [PROBE]
    run.answer_load(SUCCESSOR, RIGHT)
    run.advance_twice()
    assert run.coordinator.lifecycle.phase is Phase.EVALUATING
    assert run.loads("eval") == [PROBE] and not run.sent(Assign)
    run.answer_load(SUCCESSOR, RIGHT, "eval")
    run.advance()
    assert len(run.sent(Assign)) == 4


@pytest.mark.parametrize("moves_on", [False, True])
def test_a_validation_during_training_does_not_repeat_a_failed_probe(
    start: Callable[..., PlayedRun], moves_on: bool
) -> None:
    """The trainer may have moved on to the next version, and scores no other texts with the validated one."""
    run = start()
    run.receive(RANK, Probed(run.ref.version, PROBE))
    run.advance_twice()
    assert run.coordinator.validation.is_busy
    run.answer_load(WORKER, RIGHT)
    run.answer_load(WORKER, WRONG, "eval")
    run.advance()
    run.loads()

    if moves_on:
        run.ref = msgspec.structs.replace(run.ref, version=PolicyVersion(1, 1))
        run.receive(RANK, Published(run.ref, 0.0, 0.0))
    run.replace_worker()
    assert run.loads() == [None]
    run.receive(SUCCESSOR, Loaded(run.ref, "train", "sum", 0.1, uncompared=True))
    run.receive(RANK, Probed(run.ref.version, OTHER_PROBE))
    run.advance()
    assert run.loads() == [OTHER_PROBE]
    run.answer_load(SUCCESSOR, RIGHT)
    run.advance()
    assert run.loads("eval") == [None if moves_on else OTHER_PROBE]


def test_a_late_answer_of_a_process_with_a_verdict_does_not_expire_the_next_probe(
    start: Callable[..., PlayedRun],
) -> None:
    run = start()
    run.receive(RANK, Probed(run.ref.version, PROBE))
    run.advance_twice()
    run.answer_load(WORKER, WRONG)
    versions = run.coordinator.state.fleet.versions
    assert versions.find_probe(run.ref.version) is None
    versions.add_probe(Probed(run.ref.version, OTHER_PROBE), run.now)
    run.answer_load(WORKER, WRONG, "eval")
    assert versions.find_probe(run.ref.version) == OTHER_PROBE


def test_verdicts_are_encoded_after_a_change_only(start: Callable[..., PlayedRun]) -> None:
    """With many workers, each pass would take longer."""
    run = start()
    encode_verdicts = mock.Mock(return_value="{}")
    run.coordinator.engines.mismatches.encode_verdicts = encode_verdicts  # type: ignore[method-assign]
    run.receive(RANK, Probed(run.ref.version, PROBE))
    run.advance_twice()
    assert not encode_verdicts.called
    run.answer_load(WORKER, RIGHT)
    run.advance_twice()
    assert encode_verdicts.call_count == 1


def test_no_process_is_replaced_while_the_run_stops(start: Callable[..., PlayedRun]) -> None:
    run = start()
    run.receive(RANK, Probed(run.ref.version, PROBE))
    run.advance_twice()
    run.coordinator.lifecycle.phase = Phase.STOPPING
    run.answer_load(WORKER, WRONG)
    run.advance()
    assert run.coordinator.engines.mismatches.count == 1 and run.sent(Replace) == []
