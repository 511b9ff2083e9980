"""What a restarted coordinator finds: the data goes on where it was, groups are compared as they were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.algorithms.advantages import Advantage
from asyncrl.buffer.prompts import ComparedParts
from asyncrl.config import parse
from asyncrl.coordinator.journal import TransactionalOutbox
from asyncrl.coordinator.state import RunState, load_state
from asyncrl.errors import ConfigError
from asyncrl.store.runstore import RunStore
from asyncrl.wire.messages.shared import Stop
from tests.fakes.data import give, rows
from tests.fakes.mail import Sent
from tests.unit.buffer.machine import land, land_group, run, train, turn_payload

GREEDY = Advantage(lambda given: 0.0, greedy=True)
ROWS = 5


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, rows(ROWS))


def build(run_dir: Path, advantage: str = "dr_grpo", **buffer: Any) -> RunState:
    sizes = {"groups_per_batch": 1, "episodes_per_group": 2, "filter_zero_variance": False}
    config = parse(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"train": "d"},
            "buffer": sizes | buffer,
            "algorithm": {"advantage": advantage},
        }
    )
    return load_state(config, run_dir, RunStore(run_dir), Sent())  # type: ignore[arg-type]


def land_whole(state: RunState, group: int, *rewards: float) -> None:
    """Land members with their payloads."""
    for member in range(len(rewards)):
        state.journal.store.put_frame(f"{group}.{member}", 0, "generated", turn_payload())
    land_group(state.ledger.buffer, group, *rewards)


def test_a_peer_that_a_message_does_not_reach_is_named() -> None:
    class DeadHub:
        def send(self, *_: Any) -> bool:
            return False

    hub: Any = DeadHub()
    outbox = TransactionalOutbox(hub, hub)
    outbox.to_control(b"gone", Stop(""))
    outbox.flush()
    assert outbox.unreachable == {b"gone"}


def test_nothing_is_sent_before_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = build(tmp_path)
    order = list[str]()
    hub: Any = SimpleNamespace(send=lambda *_: order.append("sent") or True)
    state.journal.outbox = TransactionalOutbox(hub, hub)
    state.journal.outbox.to_control(b"peer", Stop(""))
    commit = state.journal.store.commit
    monkeypatch.setattr(state.journal.store, "commit", lambda: (commit(), order.append("durable")))
    state.journal.persist()
    assert order == ["durable", "sent"]


def play(state: RunState, groups: int) -> list[int]:
    """Admit groups; every other one is solved by all of its members. The rows they got."""
    rows = []
    for _ in range(groups):
        group = state.ledger.buffer.admit_group(0.0)
        rows.append(group.sample)
        land_whole(state, group.id, 1.0, float(group.id % 2 == 0))
        state.journal.persist()
    return rows


def test_what_has_retired_stays_retired_and_the_order_goes_on(tmp_path: Path) -> None:
    """Killed after any number of groups: the same samples follow as without."""
    uninterrupted = play(build(tmp_path / "whole", retire_pass_rate=0.9), 8)
    for killed in (1, 3, 6):
        first = play(build(tmp_path / str(killed), retire_pass_rate=0.9), killed)
        again = build(tmp_path / str(killed), retire_pass_rate=0.9)
        assert again.ledger.buffer.prompts.retired_samples == set(first[::2])
        assert first + play(again, 8 - killed) == uninterrupted
        assert again.ledger.buffer.account().conserved


def test_without_the_option_nothing_is_left_out(tmp_path: Path) -> None:
    play(build(tmp_path, retire_pass_rate=0.9), 3)
    again = build(tmp_path)
    assert again.ledger.buffer.prompts.retired_samples == set()
    assert len(set(play(again, 2 * ROWS))) == ROWS


def test_an_advantage_that_wants_a_greedy_episode_gets_one(tmp_path: Path) -> None:
    state = build(tmp_path, advantage=f"{__name__}:GREEDY")
    assert len(state.ledger.buffer.admit_group(0.0).members) == 3
    plain = build(tmp_path / "plain")
    assert len(plain.ledger.buffer.admit_group(0.0).members) == 2


@pytest.mark.parametrize(
    ("advantage", "reads"),
    [
        ("dr_grpo", ComparedParts()),
        ("grpo_turn", ComparedParts(turns=True)),
        ("remax", ComparedParts(turns=True)),
        ("gdpo", ComparedParts(components=True)),
    ],
)
def test_the_buffer_knows_what_the_advantage_reads(
    tmp_path: Path, advantage: str, reads: ComparedParts
) -> None:
    assert build(tmp_path, advantage=advantage).ledger.buffer.compared == reads


def test_baselines_of_kept_plans_are_the_same_after_a_restart(tmp_path: Path) -> None:
    """Also of a group that is over, and of one whose other members are still there."""
    state = build(tmp_path, episodes_per_group=3, group_policy="partial", group_deadline=1.0)
    for group in range(2):
        state.ledger.buffer.admit_group(0.0)
        land_whole(state, group, 1.0, 0.25, *([0.5] if group else []))
    run(state.ledger.buffer, "0.2")
    state.ledger.buffer.settle_overdue(2.0)
    for step in range(2):
        assert len(train(state.ledger.batches)) == 2 + step
    state.journal.persist()
    again = build(tmp_path, episodes_per_group=3, group_policy="partial", group_deadline=1.0)
    assert list(state.ledger.buffer.live_groups) == list(again.ledger.buffer.live_groups) == [0]
    assert again.ledger.batches.baselines == state.ledger.batches.baselines
    assert [len(baseline.members) for baseline in again.ledger.batches.baselines.values()] == [2, 3]
    state.ledger.batches.forget_covered_plans(1)
    assert list(state.ledger.batches.baselines) == [1]


def test_after_a_restart_what_has_landed_is_in_time_for_the_new_deadline(tmp_path: Path) -> None:
    keys = {"episodes_per_group": 4, "group_policy": "partial", "group_deadline": 1.0}
    state = build(tmp_path, **keys)
    state.ledger.buffer.admit_group(0.0)
    for member in range(4):
        run(state.ledger.buffer, f"0.{member}")
    land(state.ledger.buffer, "0.2", now=1.5)
    assert state.ledger.buffer.live_groups[0].baseline == (2,)  # after the deadline, alone
    state.journal.persist()
    again = build(tmp_path, **keys)
    group = again.ledger.buffer.live_groups[0]
    assert group.baseline == () and not group.settled
    land(again.ledger.buffer, "0.0", now=group.deadline - 0.5)
    again.ledger.buffer.settle_overdue(group.deadline)
    assert (group.baseline, group.late_siblings) == ((0, 2), (0, 2))


def test_the_coordinator_imports_no_torch() -> None:
    """It would cost every run a gigabyte of memory and seconds of its restart."""
    code = "import sys, asyncrl.coordinator.loop; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done


def test_a_run_does_not_go_on_with_other_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups name samples by number: others would be trained in their place, or none be found."""
    state = build(tmp_path)
    play(state, 1)
    build(tmp_path)
    give(monkeypatch, rows(ROWS + 1)[1:])
    with pytest.raises(ConfigError, match="have changed since the run started"):
        build(tmp_path)
