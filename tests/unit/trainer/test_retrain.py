"""Which steps can be repeated; that they come out the same is shown by tests/integration/test_train.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from asyncrl.config import parse
from asyncrl.errors import ConfigError
from asyncrl.store.checkpoints import Checkpoints
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StoreError
from asyncrl.trainer.retrain import recorded_work, start_step
from asyncrl.wire.messages.trainer import PlannedTrajectory
from tests.unit.store.test_retention import Coordinator


@pytest.mark.parametrize(("keep_bytes", "can"), [(1 << 30, "1 to {0}"), (0, "none")])
def test_what_cannot_be_repeated_is_said_with_what_can(tmp_path: Path, keep_bytes: int, can: str) -> None:
    """The checkpoint cannot be read: from the initial policy, if all turns since are kept."""
    run = Coordinator(tmp_path, keep_bytes, Random(1))
    place = Checkpoints(tmp_path / "checkpoints")
    for _ in range(25):
        run.play()
    run.checkpoint(keep=1)
    run.forget()
    run.store.close()
    last = run.buffer.committed
    with closing(RunReader.open(tmp_path)) as reader:
        if keep_bytes:
            assert start_step(reader, place, 1) == start_step(reader, place, last) == 0
        else:
            with pytest.raises(
                ConfigError, match="step 1 cannot be replayed: a replay needs an earlier checkpoint"
            ):
                start_step(reader, place, 1)
        complaint = f"this step was not committed; replayable steps: {can.format(last)} "
        for step in (0, last + 1):
            with pytest.raises(ConfigError, match=f"step {step} cannot be replayed: {complaint}"):
                start_step(reader, place, step)


def test_a_lost_episode_keeps_its_place_when_a_plan_is_partitioned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Coordinator(tmp_path, 1 << 30, Random(1))
    partitioned = list[str]()
    while not run.buffer.committed:
        run.play()
    config = parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}, "total_steps": 1})
    with closing(RunReader.open(tmp_path)) as reader:
        plan = reader.plan(1)
        lost = plan.parts[0][0]
        plan.lost.add(lost)

        def deal(planned: Sequence[PlannedTrajectory], ranks: int) -> list[list[list[PlannedTrajectory]]]:
            partitioned.extend(p.uid for p in planned)
            return [[[*planned]]]

        monkeypatch.setattr("asyncrl.trainer.retrain.with_turns", lambda planned, frames: planned)
        recorded_uids = [p.uid for part in recorded_work(config, reader, plan, deal) for p in part]  # type: ignore[attr-defined]
    assert (
        partitioned == plan.planned
        and lost not in recorded_uids
        and sorted(recorded_uids) == sorted(plan.uids)
    )
    run.store.close()


@pytest.mark.parametrize("table", ["plans", "groups", "frames"])
def test_what_the_run_forgets_meanwhile_is_said(tmp_path: Path, table: str) -> None:
    run = Coordinator(tmp_path, 1 << 30, Random(1))
    while not run.buffer.committed:
        run.play()
    config = parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}, "total_steps": 1})
    with closing(RunReader.open(tmp_path)) as reader:
        run.store._db.execute(f"DELETE FROM {table}")
        with pytest.raises(StoreError, match=r"store\.keep_bytes"):
            next(recorded_work(config, reader, reader.plan(1), lambda planned, ranks: [[[*planned]]]))
    run.store.close()
