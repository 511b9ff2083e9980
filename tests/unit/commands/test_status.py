"""`asyncrl status`: a run as its coordinator last told, and how it ended."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.launch.run_directory import lock_directory
from asyncrl.observe.files import read_status, write_status, write_summary
from asyncrl.types import EpisodeResult, EpisodeStats
from tests.unit.coordinator.test_loop import ROWS, LoopSetup, give


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopSetup]:
    give(monkeypatch, ROWS)
    loop_setup = LoopSetup(tmp_path)
    (loop_setup.run_dir / "config.yaml").touch()
    with lock_directory(loop_setup.run_dir, "run_dir"):
        yield loop_setup
    loop_setup.close()


def left_behind(run_dir: Path) -> None:
    """The lock of a launcher that is gone, whose number another process has now: this one."""
    with lock_directory(run_dir, "run_dir"):
        pass


def shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["status", str(run_dir)]) == 0
    return capsys.readouterr().out


def test_who_waits_for_what_since_when(setup: LoopSetup, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = setup.coordinator
    assert "has not reported yet" in shown(setup.run_dir, capsys)
    setup.turn()
    waits = read_status(setup.run_dir)["waits"]
    assert waits and not any(wait.endswith(" s)") for wait in waits)
    coordinator.reporter._wait_since = {
        wait: since - 12 for wait, since in coordinator.reporter._wait_since.items()
    }
    coordinator.reporter.write_status(coordinator.lifecycle.phase)
    text = shown(setup.run_dir, capsys)
    assert f"{setup.run_dir}: starting\nstep 0 of" in text and "✓" in text
    assert text.endswith("waits:\n" + "".join(f"  {wait} (12 s)\n" for wait in waits))


def test_before_any_step_the_score_so_far_and_why_nothing_is_learned(
    setup: LoopSetup, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.turn()
    reporter = setup.coordinator.reporter
    batch = setup.coordinator.config.buffer
    for _ in range(2 * batch.groups_per_batch * batch.episodes_per_group):
        record = EpisodeRecord("0.0", 0, 0, result=EpisodeResult(0.0, 1), stats=EpisodeStats(1))
        reporter.note_landed(record, 0, "")
    reporter.ledger.buffer.settled_counts[State.FILTERED] += 2 * batch.groups_per_batch
    reporter.write_status("running")
    lines = shown(setup.run_dir, capsys)
    assert (
        "so far: reward 0.000, groups filtered 100%" in lines
        and "episodes scored 0; read some episodes" in lines
    )
    assert "issued = " in lines


def test_a_store_that_cannot_be_written_is_a_wait(
    setup: LoopSetup, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.turn()
    setup.coordinator.state.journal.store.put_meta("something", "to write")
    with closing(sqlite3.connect(setup.run_dir / "run.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        setup.turn()
    assert "database is locked" in shown(setup.run_dir, capsys)


def test_a_coordinator_that_is_silent(setup: LoopSetup, capsys: pytest.CaptureFixture[str]) -> None:
    setup.turn()
    status = read_status(setup.run_dir)
    write_status(setup.run_dir, status | {"time": status["time"] - 40})
    assert "starting, silent for 4" in shown(setup.run_dir, capsys)


@pytest.mark.parametrize("set_to", [0, 4e9])
def test_a_clock_that_was_set_ends_no_run(
    setup: LoopSetup, capsys: pytest.CaptureFixture[str], set_to: float
) -> None:
    setup.turn()
    os.utime(setup.run_dir / "lock", (set_to, set_to))
    assert f"{setup.run_dir}: starting" in shown(setup.run_dir, capsys)


@pytest.mark.parametrize(
    ("summary", "status_fields", "text"),
    [
        ({"outcome": "completed", "error": ""}, {"code": 0, "error": ""}, "completed"),
        ({"outcome": "failed", "error": "no worker"}, {"code": 1, "error": "no worker"}, "failed: no worker"),
        ({}, {"code": 1, "error": "rollout-0 exited with 3"}, "failed: rollout-0 exited with 3"),
        ({}, {}, "killed: the launcher exited"),
    ],
)
def test_after_an_end_why_it_ended(
    setup: LoopSetup,
    capsys: pytest.CaptureFixture[str],
    summary: dict[str, str],
    status_fields: dict[str, object],
    text: str,
) -> None:
    setup.turn()
    (setup.run_dir / "lock").unlink()
    left_behind(setup.run_dir)
    write_status(setup.run_dir, read_status(setup.run_dir) | status_fields)
    if summary:
        write_summary(setup.run_dir, summary)
    shown_text = shown(setup.run_dir, capsys)
    assert shown_text.startswith(f"{setup.run_dir}: {text}") and "waits:" not in shown_text
