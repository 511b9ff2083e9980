"""When a run counts as stalled, and how it stops: the coordinator itself, on a clock of the test's. Peers are
played by their messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.buffer.prompts import Prompts
from asyncrl.config import parse
from asyncrl.coordinator.lifecycle import Phase
from asyncrl.coordinator.loop import Coordinator
from asyncrl.data import samples_path
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.runtime.liveness import Liveness, silence_limit, start_limit
from asyncrl.types import FailReason, PolicyVersion
from asyncrl.weights.manifest import LogprobGaps, Probe, WeightsRef
from asyncrl.wire.messages.shared import Loaded, LoadWeights, ObserverHello, ProbeGap, Replace, Status, Stop
from asyncrl.wire.messages.trainer import (
    Checkpointed,
    PlanRequest,
    Probed,
    Published,
    TrainerHeartbeat,
    TrainerHello,
)
from asyncrl.wire.messages.worker import Assign, Engines, WorkerHeartbeat, WorkerHello
from asyncrl.wire.sockets import choose_endpoints
from tests.fakes.data import rows, stored
from tests.fakes.mail import Sent
from tests.unit.weights.test_delta import Training

OBSERVER = b"observer/0/a"
WORKER = b"rollout/0/launch.1"
RANK = b"trainer/0/launch.2"


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    stored(rows(4)).save(samples_path(tmp_path / "r", "train"))
    keys = {"name": "r", "run_dir": str(tmp_path), "model": {"path": "m"}, "data": {"train": "d"}}
    config = parse(keys)
    monkeypatch.setattr("asyncrl.coordinator.loop.TransactionalOutbox", lambda *hubs: Sent())
    coordinator = Coordinator(config, choose_endpoints("127.0.0.1", 0), "launch")
    coordinator.lifecycle.phase = Phase.RUNNING
    coordinator._on_control(OBSERVER, ObserverHello(), [], now=0.0)
    coordinator.state.fleet.liveness.note_progress(0.0)
    yield coordinator
    coordinator.close()


def trained(coordinator: Coordinator, steps: int) -> None:
    coordinator.state.ledger.buffer.committed = steps


def test_an_evaluation_compares_each_engine_before_its_first_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins only once the probe is scored, which takes longer than writing the weights."""
    for part in ("train", "test"):
        stored(rows(4)).save(samples_path(tmp_path / "r", part))
    data = {"train": "d", "test": "d"}
    keys = {"name": "r", "run_dir": str(tmp_path), "model": {"path": "m"}, "data": data, "total_steps": 0}
    monkeypatch.setattr("asyncrl.coordinator.loop.TransactionalOutbox", lambda *hubs: Sent())
    coordinator = Coordinator(parse(keys), choose_endpoints("127.0.0.1", 0), "launch")
    training = Training(tmp_path / "r" / "weights")
    training.publish(1)
    ref = msgspec.structs.replace(training.ref(0), version=PolicyVersion(1, 0))

    now = coordinator._last_pass_at
    coordinator._on_control(RANK, TrainerHello(0, 1, "launch.2", 0), [], now)
    coordinator._on_control(WORKER, WorkerHello(0, "launch.1", 4, 1), [], now)
    coordinator._on_control(RANK, Published(ref, 0.0, 0.0), [], now)
    tick(coordinator, now)
    assert coordinator.lifecycle.phase is Phase.STARTING
    with pytest.raises(ProtocolError, match="the trainer has not scored the probe"):
        coordinator.lifecycle.advance_phase(now + 1e5)

    probe = Probe(((1, 2),), ((-1.0,),), LogprobGaps(1e-6, 1e-6, 1e-6))
    coordinator._on_control(RANK, Probed(ref.version, probe), [], now)
    for _ in range(2):
        tick(coordinator, now)
    assert coordinator.lifecycle.phase is Phase.EVALUATING and sent(coordinator, Assign) == []
    assert ("eval", probe) in [(order.lane, order.probe) for order in sent(coordinator, LoadWeights)]
    gap = ProbeGap(0.0, 0.0, 0.0, tokens=1, rounding=probe.rounding)
    coordinator._on_control(WORKER, Loaded(ref, "eval", "sum", 0.1, probe_gap=gap), [], now)
    tick(coordinator, now)
    assert coordinator.engines.probe_tokens == 1 and len(sent(coordinator, Assign)) == 4
    coordinator.close()


def tick(coordinator: Coordinator, now: float) -> None:
    coordinator.state.fleet.waits = []
    coordinator._advance(now)


def test_a_stop_waits_for_a_slow_micro_batch_and_its_checkpoint(coordinator: Coordinator) -> None:
    trained(coordinator, 52)
    coordinator._on_control(b"observer/0/a", Stop("interrupted"), [], now=1000.0)
    tick(coordinator, 1400.0)
    assert coordinator.lifecycle.phase is Phase.STOPPING
    assert coordinator.state.fleet.waits == [
        "a checkpoint after the current part of the plan, for at most 196 s more"
    ]
    coordinator._on_control(b"trainer/0/a", Checkpointed(0, 52, 0), [], now=1401.0)
    tick(coordinator, 1401.0)
    run = coordinator.lifecycle
    assert (run.phase, run.outcome, run.error) == (Phase.CLOSED, "stopped", "")


def test_a_stop_without_its_checkpoint_is_not_clean(coordinator: Coordinator) -> None:
    trained(coordinator, 52)
    coordinator._on_control(b"observer/0/a", Stop("interrupted"), [], now=1000.0)
    tick(coordinator, 1600.0)
    assert (coordinator.lifecycle.phase, coordinator.lifecycle.outcome) == (Phase.CLOSED, "failed")
    error = coordinator.lifecycle.error
    assert "without a checkpoint at step 52: none was written within launch.stop_timeout (600 s)" in error
    assert "repeats the steps since the start" in error


def test_a_stop_does_not_wait_for_a_trainer_that_was_lost(coordinator: Coordinator) -> None:
    trained(coordinator, 52)
    coordinator._on_control(b"observer/0/a", Stop("interrupted"), [], now=1000.0)
    coordinator._on_control(b"observer/0/a", Stop("trainer-0 was killed", save=False), [], now=1001.0)
    tick(coordinator, 1001.0)
    assert coordinator.lifecycle.outcome == "failed" and "the trainer was lost" in coordinator.lifecycle.error


def test_a_stop_before_the_first_step_ends_at_once(coordinator: Coordinator) -> None:
    coordinator._on_control(b"observer/0/a", Stop("interrupted"), [], now=1000.0)
    tick(coordinator, 1000.0)
    assert coordinator.lifecycle.outcome == "stopped"


# -- stalls --------------------------------------------------------------------------------------------

# of the default deadlines
SILENCE = 300.0 + 120.0
PROGRESS = 300.0 + 120.0 + 3 * 660.0


def sent(coordinator: Coordinator, kind: type) -> list[Any]:
    outbox: Any = coordinator.state.journal.outbox
    return [message for _, message in outbox.take(kind)]


def beats(coordinator: Coordinator, until: float, **beat: Any) -> None:
    """A worker's heartbeats, one a second of the test's clock; `tokens` a second, if given."""
    coordinator._on_control(WORKER, WorkerHello(0, "launch.1", 4, 1), [], 0.0)
    rate = beat.pop("tokens", 0)
    fields = {"assigned": 0, "held": (), "busy_s": 0.0, "idle_s": 0.0}
    for now in range(int(until) + 1):
        message = WorkerHeartbeat(**fields, tokens=rate * now, **beat)
        coordinator._on_control(WORKER, message, [], float(now))
        if now % 10 == 0:
            tick(coordinator, float(now))


@pytest.mark.parametrize("sign", [{"tokens": 3}, {"in_time": True}], ids=["a long turn", "a slow tool"])
def test_a_long_wait_that_is_alive_does_not_end_the_run(coordinator: Coordinator, sign: dict) -> None:
    beats(coordinator, PROGRESS - 20, **sign)
    assert coordinator.lifecycle.phase is Phase.RUNNING


def test_signs_of_life_alone_are_no_progress(coordinator: Coordinator) -> None:
    """An episode would have reached all its deadlines by then."""
    trained(coordinator, 1)
    rank(coordinator, 0.0)
    for now in range(0, int(PROGRESS) + 20, 5):
        coordinator._on_control(RANK, TrainerHeartbeat(0, 0.0, 0.0, "trajectories of step 1"), [], float(now))
    beats(coordinator, PROGRESS + 20, in_time=True)
    assert coordinator.lifecycle.phase is Phase.STOPPING
    assert "no episode has finished" in coordinator.lifecycle.error


def rank(coordinator: Coordinator, now: float) -> None:
    """The only trainer rank reports in, with what was trained."""
    step = coordinator.state.ledger.batches.committed
    coordinator.trainer._check_position = lambda step: None  # type: ignore[method-assign]
    coordinator._on_control(RANK, TrainerHello(0, 1, "launch.2", step), [], now)


def test_a_stall_ends_the_run_with_a_checkpoint_and_says_who_waits(coordinator: Coordinator) -> None:
    trained(coordinator, 3)
    rank(coordinator, 0.0)
    now = SILENCE + 1
    coordinator._on_control(WORKER, WorkerHello(0, "launch.1", 4, 1), [], now)
    coordinator._on_control(RANK, TrainerHeartbeat(0, 0.0, 0.0, "trajectories of step 3"), [], now)
    tick(coordinator, now)
    assert coordinator.lifecycle.phase is Phase.STOPPING
    coordinator._on_control(RANK, Checkpointed(coordinator.state.fleet.trainer_epoch, 3, 0), [], now)
    tick(coordinator, now)
    assert coordinator.lifecycle.outcome == "failed"
    assert "no sign of life for 420 s (launch.stall_timeout" in coordinator.lifecycle.error
    assert "trainer 0: trajectories of step 3" in coordinator.lifecycle.error


def test_a_disk_that_stays_full_ends_the_run(coordinator: Coordinator) -> None:
    """The last checkpoint is written again and again: a sign of life, but no progress."""
    trained(coordinator, 3)
    rank(coordinator, 0.0)
    coordinator._on_control(WORKER, WorkerHello(0, "launch.1", 4, 1), [], 0.0)
    for now in range(0, int(PROGRESS) + 20, 10):
        assert coordinator.lifecycle.phase is Phase.RUNNING
        beat = TrainerHeartbeat(0, 0.0, 0.0, "not saved: no space left", written=1000 * now)
        coordinator._on_control(RANK, beat, [], float(now))
        coordinator._on_control(WORKER, WorkerHeartbeat(0, (), 0.0, 0.0, 0), [], float(now))
        tick(coordinator, float(now))
    assert coordinator.lifecycle.phase is Phase.STOPPING
    assert "the trainer has made no progress" in coordinator.lifecycle.error
    assert "trainer 0: not saved: no space left" in coordinator.lifecycle.error


def test_a_rank_that_hangs_is_replaced(coordinator: Coordinator) -> None:
    """It is silent: in a forward, or in a collective. The next one is given the same time."""
    trained(coordinator, 3)
    rank(coordinator, 0.0)
    tick(coordinator, SILENCE - 1)
    assert sent(coordinator, Replace) == []
    for again in (1, 2):
        tick(coordinator, again * (SILENCE + 1))
        (replace,) = [order for order in sent(coordinator, Replace) if order.role == "trainer"]
        assert not replace.incarnation and "no sign of life" in replace.reason
        assert coordinator.lifecycle.phase is Phase.RUNNING


def test_the_trainer_is_replaced_once_for_damaged_weights(coordinator: Coordinator) -> None:
    """To start, and to repeat steps, takes the next one longer than engines to refuse the version again."""
    state = coordinator.state
    replaced = []
    for now in range(0, 60, 5):
        if now in (0, 30):  # the first trainer, and the next one
            coordinator._on_control(RANK, TrainerHello(0, 1, f"launch.{now}", 0), [], float(now))
            request = PlanRequest(state.fleet.trainer_epoch, 1, 0)
            coordinator._on_bulk(RANK, request, [], float(now))
        if now in (0, 45):  # both publish weights that are damaged
            state.fleet.versions.set_newest(WeightsRef(PolicyVersion(state.fleet.trainer_epoch, 0), ""))
        coordinator.engines.refusals[b"e", state.fleet.versions.newest] += 5
        tick(coordinator, float(now))
        replaced += [now for order in sent(coordinator, Replace) if order.role == "trainer"]
    assert replaced == [0, 45]


@pytest.mark.parametrize("silent", [1, 2], ids=["one of two", "both"])
def test_a_silent_worker_is_named_and_then_replaced(coordinator: Coordinator, silent: int) -> None:
    """Blocked for ever by somebody's code, say: its lease is over. The next one may take time to start."""
    coordinator.config = parse(msgspec.to_builtins(coordinator.config) | {"rollout": {"workers": 2}})
    coordinator.workers.peers._planned_count = 2
    for index in (0, 1):
        peer = f"rollout/{index}/launch.{index}".encode()
        coordinator._on_control(peer, WorkerHello(index, f"launch.{index}", 4, 1), [], 0.0)
    replaced = {}
    for now in range(300):
        for index in range(2 - silent):
            beat = WorkerHeartbeat(0, (), 0.0, 0.0, 0, in_time=True)
            coordinator._on_control(f"rollout/{index}/launch.{index}".encode(), beat, [], float(now))
        tick(coordinator, float(now))
        named = {wait.partition(" ")[0] for wait in coordinator.state.fleet.waits if "is silent" in wait}
        assert len(named) == (silent if now > 30 else 0)  # launch.lease
        replaced |= {(order.role, order.incarnation, now): named for order in sent(coordinator, Replace)}
    lost_incarnations = ["launch.1"] if silent == 1 else ["launch.0", "launch.1"]
    assert list(replaced) == [
        ("rollout", incarnation, now) for now in (152, 273) for incarnation in lost_incarnations
    ]
    assert coordinator.lifecycle.phase is Phase.RUNNING


def test_a_large_model_has_more_time_to_start(tmp_path: Path) -> None:
    """Policy, critic and reference, and a checkpoint of 12 times the policy's bytes, at 50 MB/s."""
    config = parse({"name": "t", "model": {"path": str(tmp_path)}, "data": {"train": "d"}})
    assert start_limit(config) == config.launch.start_timeout
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1_000_000_000)
    assert start_limit(config) == pytest.approx(config.launch.start_timeout + 15 * 20.0)
    assert Liveness(config, 0.0).stall_reason(silence_limit(config) - 1) == ""
    assert silence_limit(config) == start_limit(config) + config.launch.stall_timeout


def test_a_worker_that_missed_servers_is_sent_them_all(coordinator: Coordinator) -> None:
    """Also where a message to observers comes before the table."""
    coordinator.engines.remote = True
    coordinator._on_control(WORKER, WorkerHello(0, "launch.1", 4, 1), [], 0.0)
    coordinator.engines._started_at = -1000.0  # nobody waits for supervisors
    tick(coordinator, 1.0)
    assert [message.whole for message in sent(coordinator, Engines)] == [True]
    coordinator.state.journal.outbox.unreachable.add(WORKER)
    coordinator._to_observers(Status("running", 0, 1, {}, ()))
    for now, count in ((2.0, 1), (3.0, 0)):
        tick(coordinator, now)
        assert len(sent(coordinator, Engines)) == count


def test_an_observer_that_has_left_is_forgotten(coordinator: Coordinator) -> None:
    """In the turn after the status that did not reach it, long before the next one."""
    tick(coordinator, 1.0)
    assert len(sent(coordinator, Status)) == 1
    coordinator.state.journal.outbox.unreachable.add(OBSERVER)
    tick(coordinator, 1.05)
    assert coordinator.observers == set()
    tick(coordinator, 2.0)
    assert sent(coordinator, Status) == []
    coordinator._on_control(OBSERVER, ObserverHello(), [], now=3.0)
    tick(coordinator, 3.0)
    assert len(sent(coordinator, Status)) == 1


def test_batches_that_learn_nothing_end_the_run_with_a_checkpoint(coordinator: Coordinator) -> None:
    trained(coordinator, 3)
    coordinator.state.ledger.skipped_batches = 21
    tick(coordinator, 0.0)
    assert coordinator.lifecycle.phase is Phase.STOPPING
    assert "led to no optimizer step" in coordinator.lifecycle.error


def test_first_attempts_that_all_fail_end_the_run_with_their_cause(coordinator: Coordinator) -> None:
    """Also before the first step, when there is nothing to save."""
    cause = "KeyError: 'b' (bad.py:41)"
    for assign_number in range(128):
        coordinator.state.ledger.first_attempts.note_failure(
            assign_number, assign_number % 4, FailReason.REWARD_ERROR
        )
    coordinator.state.ledger.failed_attempts.add_failure(
        FailReason.REWARD_ERROR, cause, coordinator.state.journal.store
    )
    tick(coordinator, 0.0)
    tick(coordinator, 0.0)
    assert coordinator.lifecycle.outcome == "failed"
    assert coordinator.lifecycle.error == (
        f"the first 128 attempts (samples: 4) all failed with reward_error: {cause}; "
        "fix the cause, then continue with resume=auto"
    )


def test_a_run_of_a_few_samples_all_of_whose_episodes_fail_has_failed(coordinator: Coordinator) -> None:
    buffer = coordinator.state.ledger.buffer
    buffer.prompts.max_draws = 1
    for episode in buffer.admit_group(0.0).members:
        tick(coordinator, 0.0)
        assert coordinator.lifecycle.phase is Phase.RUNNING
        buffer.fail_attempt(buffer.episodes[episode], FailReason.PROMPT_TOO_LONG, 0.0)
    coordinator.state.ledger.failed_attempts.add_failure(
        FailReason.PROMPT_TOO_LONG, "100 tokens", coordinator.state.journal.store
    )
    tick(coordinator, 0.0)
    tick(coordinator, 0.0)
    assert (coordinator.lifecycle.outcome, coordinator.lifecycle.error) == (
        "failed",
        "all episodes failed, and no samples are left: 100 tokens; fix the cause, then start a new run",
    )


def test_groups_that_cannot_be_trained_end_the_run_with_a_checkpoint(coordinator: Coordinator) -> None:
    trained(coordinator, 3)
    coordinator.state.ledger.buffer.untrained_groups = 10_000
    coordinator.state.ledger.buffer.untrained_reason = "tool_error"
    tick(coordinator, 0.0)
    assert coordinator.lifecycle.phase is Phase.STOPPING and "tool_error" in coordinator.lifecycle.error


def test_an_order_that_fails_in_a_later_epoch_ends_the_run_with_a_checkpoint(
    coordinator: Coordinator,
) -> None:
    """Not if that epoch is not needed: all groups of the run are there."""

    def order(epoch: int) -> list[int]:
        if epoch:
            raise ConfigError("data.order: mine.py:hook, epoch 1: failed")
        return [0, 1, 2, 3]

    trained(coordinator, 3)
    rank(coordinator, 0.0)
    coordinator._on_control(WORKER, WorkerHello(0, "launch.1", 64, 1), [], 0.0)
    buffer = coordinator.state.ledger.buffer
    buffer.prompts = Prompts(4, order)
    needed = buffer.total_groups
    buffer.total_groups = 3 * buffer.config.groups_per_batch + 4
    buffer.spare_groups = 1  # a group more would be of use, but is not needed
    coordinator._run_pass(0.0)
    assert len(buffer.live_groups) == 4 and coordinator.lifecycle.phase is Phase.RUNNING
    buffer.total_groups = needed
    coordinator._run_pass(0.0)
    assert len(buffer.live_groups) == 4 and coordinator.lifecycle.phase is Phase.STOPPING
    coordinator._on_control(RANK, Checkpointed(coordinator.state.fleet.trainer_epoch, 3, 0), [], 1.0)
    tick(coordinator, 1.0)
    assert coordinator.lifecycle.outcome == "failed"
    assert coordinator.lifecycle.error == (
        "data.order: mine.py:hook, epoch 1: failed; fix the error, then continue with resume=auto"
    )


def test_a_run_begins_as_late_as_a_trainer_that_repeats_steps_needs(coordinator: Coordinator) -> None:
    life = coordinator.lifecycle
    start = coordinator.state.fleet.liveness.start_seconds
    life.phase = Phase.STARTING
    life._deadline = 10.0
    coordinator.state.fleet.liveness.note_alive(20.0)
    life.advance_phase(20.0 + start)
    with pytest.raises(ProtocolError, match=r"^the run did not start within .*: "):
        life.advance_phase(21.0 + start)
