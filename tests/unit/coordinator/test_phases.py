"""How a run stops: the coordinator itself, on a clock of the test's; no peer is connected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.config import parse
from asyncrl.coordinator.loop import Coordinator, Phase
from asyncrl.wire.messages.observer import ObserverHello
from asyncrl.wire.messages.shared import Stop
from asyncrl.wire.messages.trainer import Checkpointed
from asyncrl.wire.sockets import choose_endpoints

ROW = {
    "data_source": "d",
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    data = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 4), data)
    keys = {"name": "r", "run_dir": str(tmp_path), "model": {"path": "m"}, "data": {"train": str(data)}}
    config = parse(keys)
    (tmp_path / "r").mkdir()
    coordinator = Coordinator(config, choose_endpoints("127.0.0.1", 0), "launch")
    coordinator.phase = Phase.RUNNING
    coordinator._on_control(b"observer/0/a", ObserverHello("a"), [], now=1000.0)
    yield coordinator
    coordinator.close()


def trained(coordinator: Coordinator, steps: int) -> None:
    coordinator.state.buffer.committed = steps


def tick(coordinator: Coordinator, now: float) -> None:
    coordinator.state.waits = []
    coordinator._tick(now, gap=0.0)


def test_a_stop_waits_for_a_slow_micro_batch_and_its_checkpoint(coordinator: Coordinator) -> None:
    trained(coordinator, 52)
    coordinator._on_control(b"observer/0/a", Stop("interrupted"), [], now=1000.0)
    tick(coordinator, 1400.0)
    assert coordinator.phase is Phase.STOPPING
    assert coordinator.state.waits == ["a checkpoint after the micro-batch under way, for at most 196 s more"]
    coordinator._on_control(b"trainer/0/a", Checkpointed(0, 52, "step-52", 0), [], now=1401.0)
    tick(coordinator, 1401.0)
    assert (coordinator.phase, coordinator.outcome, coordinator.error) == (Phase.CLOSED, "stopped", "")


def test_a_stop_without_its_checkpoint_is_not_clean(coordinator: Coordinator) -> None:
    trained(coordinator, 52)
    coordinator._on_control(b"observer/0/a", Stop("interrupted"), [], now=1000.0)
    tick(coordinator, 1600.0)
    assert (coordinator.phase, coordinator.outcome) == (Phase.CLOSED, "failed")
    assert "without a checkpoint of step 52: none within launch.stop_timeout (600 s)" in coordinator.error
    assert "repeats the steps since the start" in coordinator.error


def test_a_stop_does_not_wait_for_a_trainer_that_was_lost(coordinator: Coordinator) -> None:
    trained(coordinator, 52)
    coordinator._on_control(b"observer/0/a", Stop("interrupted"), [], now=1000.0)
    coordinator._on_control(b"observer/0/a", Stop("trainer-0 was killed", save=False), [], now=1001.0)
    tick(coordinator, 1001.0)
    assert coordinator.outcome == "failed" and "the trainer was lost" in coordinator.error


def test_a_stop_before_the_first_step_ends_at_once(coordinator: Coordinator) -> None:
    coordinator._on_control(b"observer/0/a", Stop("interrupted"), [], now=1000.0)
    tick(coordinator, 1000.0)
    assert coordinator.outcome == "stopped"
