"""Before the first process and after the last."""

from __future__ import annotations

import io
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console as Terminal

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.launch import checks, preflight, run_directory, start
from asyncrl.launch.console import Console
from asyncrl.launch.console_view import ConsoleState
from asyncrl.launch.data import RunData
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.notes import ok, warning
from asyncrl.launch.process import COMPLETED, INTERRUPTED
from asyncrl.observe.files import read_summary, write_summary
from asyncrl.observe.summary import summarize
from asyncrl.weights import disk
from asyncrl.wire.messages.shared import Status
from tests.fakes.data import rows, stored

CHECKED = RunData(stored(rows(1)), None, [])


def passed_checks(config: RunConfig) -> tuple[Inputs, list[str]]:
    inputs = Inputs(config)
    inputs.run_data = CHECKED
    return inputs, CHECKED.warnings


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    model = {"path": str(tmp_path)}
    data = {"train": "t"}
    return parse({"name": "x", "run_dir": str(tmp_path), "model": model, "data": data})


def test_a_refused_start_has_cleared_shared_memory_and_leaves_no_run(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "SHARED_MEMORY", tmp_path / "shm")
    left = preflight.outside_weights(config)[0] / "e0001-v00000001"  # of a launcher that was killed
    left.mkdir(parents=True)
    seen: list[bool] = []

    def refuse(*_: Any) -> AbstractContextManager[Any]:
        seen.append(left.exists())
        raise ConfigError("no such tracker")

    monkeypatch.setattr(checks, "run_checks", passed_checks)
    monkeypatch.setattr(start.Trackers, "open", refuse)
    with pytest.raises(ConfigError, match="no such tracker"):
        start.train(config)
    assert seen == [False] and (tmp_path / "x" / preflight.PLACES_FILE).exists()
    run_directory.check_run_directory(config)  # with resume=never: there is no run


def test_versions_of_a_killed_launcher_go_under_another_host_name_and_after_a_move(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But those of a run that this one was copied from stay."""
    monkeypatch.setattr(disk, "SHARED_MEMORY", tmp_path / "shm")
    weights = msgspec.structs.replace(config.weights, directory=str(tmp_path / "shared"))
    config = msgspec.structs.replace(config, weights=weights)

    def killed(config: RunConfig) -> list[Path]:
        """What a launch leaves."""
        (Path(config.run_dir) / config.name).mkdir(exist_ok=True)
        preflight.record_launch_name(config)
        left = preflight.outside_weights(config)[:2]
        for directory in left:
            directory.mkdir(parents=True)
        return left

    def starts(config: RunConfig) -> None:
        for directory in preflight.outside_weights(config):
            shutil.rmtree(directory, ignore_errors=True)

    first = killed(config)
    monkeypatch.setattr(disk.socket, "gethostname", lambda: "another")
    second = killed(config)
    shutil.copytree(tmp_path / "x", tmp_path / "copied")
    starts(msgspec.structs.replace(config, name="copied"))
    assert all(directory.exists() for directory in first + second) and len({*first, *second}) == 4
    (tmp_path / "x").rename(tmp_path / "moved")
    with (tmp_path / "moved" / preflight.PLACES_FILE).open("a") as record:
        record.write("../../kept\t/nowhere\nkept\t/nowhere\nnothing\n")
    (tmp_path / "shared" / "kept").mkdir()
    starts(msgspec.structs.replace(config, name="moved"))
    assert not any(directory.exists() for directory in first + second)
    assert (tmp_path / "shared" / "kept").exists()


def test_a_cluster_that_refuses_the_run_leaves_none_in_trackers(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at that address."""
    pytest.importorskip("ray")
    address = "127.0.0.1:1"
    refused = msgspec.structs.replace(
        config, launch=msgspec.structs.replace(config.launch, kind="ray", ray_address=address)
    )
    opened: list[RunConfig] = []
    monkeypatch.setattr(checks, "run_checks", passed_checks)
    monkeypatch.setattr(start.Trackers, "open", lambda config, run_dir: opened.append(config))
    with pytest.raises(ConfigError, match="cannot connect to a Ray cluster"):
        start.train(refused)
    assert not opened


@pytest.mark.parametrize(("code", "share"), [(COMPLETED, 0.5), (INTERRUPTED, None)])
def test_the_summary_gets_the_share_of_time_in_which_all_were_busy(
    tmp_path: Path, config: RunConfig, code: int, share: float | None
) -> None:
    run_dir = tmp_path / "x"
    (run_dir / "timeline").mkdir(parents=True)
    (run_dir / "timeline" / "trainer-0.jsonl").write_text('{"name": "train", "start": 0, "end": 4}\n')
    (run_dir / "timeline" / "rollout-0.jsonl").write_text('{"name": "decode", "start": 2, "end": 9}\n')
    write_summary(run_dir, summarize([], {}, True))
    out = io.StringIO()
    console = Console("plain", ConsoleState("x", Status("starting", 0, 1, {}, ())), Terminal(file=out))
    assert start.conclude(config, run_dir, code, "", console) == code
    assert read_summary(run_dir).get("busy_at_once") == share


def test_a_full_disk_is_one_line_and_leaves_no_run(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "run_checks", passed_checks)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.tmp").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"x: cannot be written .No space left on device.; set run_dir="):
        start.train(config)
    run_directory.check_run_directory(config)  # with resume=never: there is no run


def test_two_runs_of_one_name_do_not_share_a_place_for_checkpoints(tmp_path: Path, config: RunConfig) -> None:
    """Before either of them has saved one; each has a run directory of its own, as on two machines."""
    shared = msgspec.structs.replace(config.checkpoint, directory=str(tmp_path / "shared"))
    first, second = (
        msgspec.structs.replace(config, run_dir=str(tmp_path / name), checkpoint=shared) for name in "ab"
    )
    with (
        run_directory.prepare_and_lock(first),
        pytest.raises(ConfigError, match=r"checkpoint\.directory: .*shared/x "),
    ):
        run_directory.prepare_and_lock(second).__enter__()
    with run_directory.prepare_and_lock(second):
        assert (tmp_path / "b" / "x" / "config.yaml").exists()


def test_checkpoints_may_lie_where_the_run_does(tmp_path: Path, config: RunConfig) -> None:
    own = msgspec.structs.replace(config.checkpoint, directory=str(tmp_path))
    with run_directory.prepare_and_lock(
        msgspec.structs.replace(config, run_dir=str(tmp_path), checkpoint=own)
    ):
        assert (tmp_path / "x" / "config.yaml").exists()


def test_a_disk_that_is_full_at_the_end_costs_no_more_than_the_picture(
    tmp_path: Path, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "x"
    run_dir.mkdir()
    write_summary(run_dir, summarize([], {}, True))
    (run_dir / "summary.tmp").symlink_to("/dev/full")
    console = Console("plain", ConsoleState("x", Status("starting", 0, 1, {}, ())), Terminal())
    assert start.conclude(config, run_dir, COMPLETED, "", console) == COMPLETED
    shown = capsys.readouterr()
    assert "0 issued" in shown.out and "No space left on device" in shown.err
    assert read_summary(run_dir)["steps"] == 0


def test_a_dry_run_ends_with_the_plan_and_the_warnings(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the keys that are not the defaults."""
    stub_checks = (
        checks.Check("settings", (), lambda inputs: [warning("far too fast")]),
        checks.Check(
            "estimate", (), lambda inputs: [ok("model  7"), ok("memory  9"), warning("too much memory")]
        ),
    )
    monkeypatch.setattr(checks, "ALL_CHECKS", stub_checks)
    assert start.train(config, dry_run=True) == COMPLETED
    text = capsys.readouterr().out
    tree, _, plan = text.partition("run directory: ")
    assert msgspec.yaml.decode(tree) == {
        "name": "x",
        "run_dir": config.run_dir,
        "model": {"path": config.model.path},
        "data": {"train": "t"},
    }
    assert (
        plan.index("total ")
        < plan.index("model  7")
        < plan.index("memory  9")
        < plan.index("warning: far too fast")
    )
    assert plan.endswith("warning: too much memory\n") and not (Path(config.run_dir) / "x").exists()
