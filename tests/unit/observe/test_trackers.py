"""Trackers: optional, offline here, and never the end of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.observe.files import mark_start
from asyncrl.observe.trackers import MODULES, OPEN, Trackers, check_trackers


def config(*names: str, run: str = "x") -> RunConfig:
    least = {"name": run, "model": {"path": "m"}, "data": {"train": "t"}}
    return parse(least | {"observe": {"trackers": list(names)}})


@pytest.mark.parametrize("name", sorted(OPEN))
def test_an_uninstalled_one_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with pytest.raises(ConfigError, match=rf"pip install 'asyncrl\[{name}\]'"):
        check_trackers(config(name))


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Trackers.open(config("tensorboard"), tmp_path) as trackers:
        trackers.log(3, {"critic/score/mean": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (point,) = events.Scalars("critic/score/mean")
    assert (point.step, point.value) == (3, 0.5)


@pytest.mark.long
def test_wandb_gets_the_metrics_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    mark_start(tmp_path)
    with Trackers.open(config("wandb"), tmp_path) as trackers:
        trackers.log(3, {"critic/score/mean": 0.5})
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "wandb login"),
        pytest.param({"WANDB_MODE": "offline"}, "", marks=pytest.mark.long),
        pytest.param({"WANDB_API_KEY": "0" * 40}, "", marks=pytest.mark.long),
    ],
)
def test_what_the_real_wandb_knows_of_a_login(variables: dict[str, str], says: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = (
        "from tests.unit.observe.test_trackers import check_trackers, config, ConfigError\n"
        "try: check_trackers(config('wandb'))\n"
        "except ConfigError as error: print(error)\n"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))}
    plain |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert says in done.stdout and bool(says) == bool(done.stdout)


class Service:
    """The parts of wandb and swanlab that are used."""

    def __init__(self, mode: str = "online", key: str | None = None) -> None:
        self.settings = SimpleNamespace(mode=mode, api_key=key, base_url="https://wandb.example")
        self.calls: list[tuple[Any, ...]] = []
        self.described: list[dict[str, Any]] = []

    def setup(self) -> Service:
        return self

    def Settings(self) -> SimpleNamespace:
        return self.settings

    def init(self, **described: Any) -> Service:
        self.described.append(described)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", step, metrics))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture(params=["wandb", "swanlab"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("service", "refused"),
    [(Service(), True), (Service("offline"), False), (Service("disabled"), False), (Service(key="k"), False)],
)
def test_a_missing_login_is_found_by_the_checks_before_the_start(
    name: str, service: Service, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, service)  # type: ignore[arg-type]
    monkeypatch.setenv("NETRC", "/nowhere")
    if not refused:
        check_trackers(config(name))
        return
    with pytest.raises(ConfigError, match=f"run `{name} login`, or set .*_API_KEY, or .*_MODE=offline"):
        check_trackers(config(name))


def test_a_login_of_wandb_may_be_in_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Service())  # type: ignore[arg-type]
    (tmp_path / "netrc").write_text("machine wandb.example login user password key")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    check_trackers(config("wandb"))


def test_runs_of_one_name_have_ids_of_their_own_and_a_resumed_one_keeps_its(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, name, service)  # type: ignore[arg-type]
    for directory in ("a", "a", "b"):
        (tmp_path / directory).mkdir(exist_ok=True)
        mark_start(tmp_path / directory)
        with Trackers.open(config(name), tmp_path / directory):
            pass
    first, again, other = (described["id"] for described in service.described)
    assert first == again != other
    assert {described["resume"] for described in service.described} == {"allow"}


def test_a_service_is_called_as_it_wants(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, name, service)  # type: ignore[arg-type]
    mark_start(tmp_path)
    with Trackers.open(config(name, run="x" * 200), tmp_path) as trackers:
        trackers.log(1, {"a": 1.0})
    (described,) = service.described
    shown = described["name" if name == "wandb" else "experiment_name"]
    assert (described["project"], shown) == ("asyncrl", "x" * 128)
    assert service.calls == [("log", 1, {"a": 1.0}), ("finish",)]


def test_one_that_does_not_start_says_so_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    monkeypatch.setattr(service, "init", lambda **described: 1 / 0)
    monkeypatch.setitem(sys.modules, name, service)  # type: ignore[arg-type]
    mark_start(tmp_path)
    with (
        pytest.raises(ConfigError, match=f"tracker {name} cannot be started: ZeroDivisionError"),
        Trackers.open(config(name), tmp_path),
    ):
        pass


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
