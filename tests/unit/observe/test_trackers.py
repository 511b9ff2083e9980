"""Trackers: optional, offline here, and never the end of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.observe.trackers import MODULES, OPEN, Trackers


def config(*names: str) -> RunConfig:
    least = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}}
    return parse(least | {"observe": {"trackers": list(names)}})


@pytest.mark.parametrize("name", sorted(OPEN))
def test_an_uninstalled_one_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with (
        pytest.raises(ConfigError, match=rf"pip install 'asyncrl\[{name}\]'"),
        Trackers.open(config(name), tmp_path),
    ):
        pass


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Trackers.open(config("tensorboard"), tmp_path) as trackers:
        trackers.log(3, {"critic/score/mean": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (point,) = events.Scalars("critic/score/mean")
    assert (point.step, point.value) == (3, 0.5)


@pytest.mark.slow
def test_wandb_gets_the_metrics_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Trackers.open(config("wandb"), tmp_path) as trackers:
        trackers.log(3, {"critic/score/mean": 0.5})
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


class Swan:
    """The part of swanlab that is used."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def init(self, **described: Any) -> None:
        self.calls.append(("init", described["project"], described["experiment_name"]))

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", step, metrics))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_swanlab_is_called_as_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swan = Swan()
    monkeypatch.setitem(sys.modules, "swanlab", swan)  # type: ignore[arg-type]
    with Trackers.open(config("swanlab"), tmp_path) as trackers:
        trackers.log(1, {"a": 1.0})
    assert swan.calls == [("init", "asyncrl", "x"), ("log", 1, {"a": 1.0}), ("finish",)]


def test_one_that_fails_is_left_out_and_the_others_go_on() -> None:
    class Good:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def log(self, step: int, metrics: dict[str, float]) -> None:
            self.steps.append(step)

        def close(self) -> None: ...

    class Bad(Good):
        def log(self, step: int, metrics: dict[str, float]) -> None:
            super().log(step, metrics)
            raise ConnectionError("gone")

    good, bad = Good(), Bad()
    trackers = Trackers({"bad": bad, "good": good})
    trackers.log(1, {})
    trackers.log(2, {})
    assert (bad.steps, good.steps) == ([1], [1, 2])
