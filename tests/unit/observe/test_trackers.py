"""Trackers: optional, offline here, and never the end of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.observe import trackers as trackers_module
from asyncrl.observe.files import mark_start
from asyncrl.observe.metrics import VALIDATED
from asyncrl.observe.trackers import (
    MODULE_NAMES,
    PACKAGE_EXTRAS,
    TRACKER_OPENERS,
    Trackers,
    check_trackers,
    fenced_text,
)


def config(*names: str, run: str = "x") -> RunConfig:
    least = {"name": run, "model": {"path": "m"}, "data": {"train": "t"}}
    return parse(least | {"observe": {"trackers": list(names)}})


def opened(name: str, run_dir: Path, run: str = "x") -> Trackers:
    mark_start(run_dir)
    return Trackers.open(config(name, run=run), run_dir)


@pytest.mark.parametrize("name", sorted(TRACKER_OPENERS))
def test_an_uninstalled_one_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE_NAMES.get(name, name), None)
    package = rf"'asyncrl\[{name}\]'" if name in PACKAGE_EXTRAS else name
    with pytest.raises(ConfigError, match=f"run `pip install {package}`, or"):
        check_trackers(config(name))


def written(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with opened("tensorboard", tmp_path) as trackers:
        play(trackers, tmp_path)
    events = written(tmp_path / "tensorboard")
    (point,) = events.Scalars("critic/score/mean")
    assert (point.step, point.value) == (3, 0.5)
    (lags,) = events.Histograms("staleness/lag/histogram")
    assert (lags.step, lags.histogram_value.bucket_limit, lags.histogram_value.bucket) == (
        *(3, [0.5, 1.5, 2.5]),
        [30.0, 0.0, 10.0],
    )
    (scores,) = events.Histograms("rollout/score/histogram")
    assert (scores.histogram_value.num, scores.histogram_value.sum) == (3, 2)
    texts = {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    assert texts.keys() == {"config", "summary", "transcripts/validation"}
    assert "  path: m" in texts["config"]
    assert "so it is 4" in texts["transcripts/validation"] and "score 1.0" in texts["transcripts/validation"]
    assert '"steps": 3' in texts["summary"]


def test_a_tracker_of_accelerate_gets_numbers_and_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensorboard's, as that is installed."""
    pytest.importorskip("tensorboard")
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", lambda **_: TensorBoardTracker("run", tmp_path))
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    with opened("mlflow", tmp_path) as trackers:
        play(trackers, tmp_path)
        trackers.log(4, {"val-core/all/greedy/mean@1": 0.25})
    events = written(tmp_path / "run")
    (score,), (held_out,) = (
        events.Scalars(name) for name in ("critic/score/mean", "val-core/all/greedy/mean_at_1")
    )
    assert (score.step, score.value, held_out.step, held_out.value) == (3, 0.5, 4, 0.25)
    (options,) = tmp_path.glob("run/*/hparams.yml")
    assert "model.path: m" in options.read_text()


def test_a_tracker_of_accelerate_that_hangs_at_its_start_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    answers = threading.Event()
    hanging = SimpleNamespace(name="mlflow", start=lambda: answers.wait(60))
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", lambda **_: hanging)
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setattr(trackers_module, "PATIENCE_SECONDS", 0.05)
    says = r"tracker mlflow cannot be started: TimeoutError: no answer within 0.05 s; remove mlflow"
    with pytest.raises(ConfigError, match=says), opened("mlflow", tmp_path):
        pass
    answers.set()


def test_a_tracker_that_hangs_in_its_last_row_costs_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    rows = list[Any]()
    hanging = SimpleNamespace(
        name="mlflow",
        start=lambda: None,
        store_init_configuration=lambda options: None,
        log=lambda row, step: answers.wait(60),
        finish=lambda: None,
    )
    other_tracker = SimpleNamespace(
        log=lambda step, *row: rows.append(step), close=lambda: rows.append("closed")
    )
    hung = trackers_module._AccelerateTracker(hanging, config("mlflow"))
    monkeypatch.setattr(trackers_module, "PATIENCE_SECONDS", 0.6)
    trackers = Trackers({"mlflow": hung, "other": other_tracker}, tmp_path)
    trackers.log(1, {})
    trackers.close()
    answers.set()
    assert rows == [1, "closed"]


def play(trackers: Trackers, run_dir: Path) -> None:
    """A step, the validation of an earlier one with its transcripts, and the end."""
    lags = {"staleness/lag_tokens/0": 30.0, "staleness/lag_tokens/2": 10.0}
    values = {"rollout/score": [0.0, 1.0, 1.0], "rollout/response_length": []}
    trackers.log(3, {"training/step": 3.0, "critic/score/mean": 0.5} | lags, values)
    folder = run_dir / "transcripts" / "validation"
    folder.mkdir(parents=True)
    entries = [{"sample": 7, "mode": "greedy", "score": 1.0, "text": "so it is 4"}, {"failed": "deadline"}]
    (folder / "step-0.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    trackers.log(0, {"training/step": 0.0, VALIDATED: 0.0})
    trackers.summarize({"steps": 3, "flow": {"issued": 8}})


@pytest.mark.long
def test_wandb_gets_rows_tables_histograms_and_the_summary_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As its file, which is not compressed, holds them."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with opened("wandb", tmp_path) as trackers:
        play(trackers, tmp_path)
    assert "left out" not in caplog.text  # it has refused nothing
    wandb.teardown()  # its process, which writes the file
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    written = path.read_bytes().replace(b", ", b",")
    for part in (b"[30,0,10]", b"rollout/score/histogram", b"staleness/lag/histogram", b"nrows", b"flow"):
        assert part in written, part
    assert b"response_length/histogram" not in written
    (table,) = path.parent.glob("files/media/table/transcripts/*.table.json")
    assert json.loads(table.read_text())["data"][0][-1] == "so it is 4"


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
        self.summary: dict[str, Any] = {}

    def setup(self) -> Service:
        return self

    def Settings(self, **changed: Any) -> SimpleNamespace:
        unknown = changed.keys() - vars(self.settings).keys()
        if unknown:
            raise TypeError(f"no such settings: {unknown}")
        return SimpleNamespace(**vars(self.settings) | changed)

    def init(self, **described: Any) -> Service:
        self.described.append(described)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append(("define", name, step_metric))

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", step, metrics))

    def Text(self, text: str, caption: str) -> tuple[str, str]:
        return text, caption

    def finish(self) -> None:
        assert threading.current_thread() is threading.main_thread()  # swanlab sets signal handlers
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
    with pytest.raises(ConfigError, match=f"run `{name} login`, or set .*_API_KEY or .*_MODE=offline"):
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
        with opened(name, tmp_path / directory):
            pass
    first, again, other_id = (described["id"] for described in service.described)
    assert first == again != other_id
    assert {described["resume"] for described in service.described} == {"allow"}


def test_a_service_is_called_as_it_wants(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, name, service)  # type: ignore[arg-type]
    with opened(name, tmp_path, "x" * 200) as trackers:
        trackers.log(1, {"a": 1.0})
    (described,) = service.described
    shown_name = described["name" if name == "wandb" else "experiment_name"]
    assert (described["project"], shown_name) == ("asyncrl", "x" * 128)
    assert (
        service.calls
        == {
            # a validation of step 0 is over after later steps, and wandb's own steps never go back
            "wandb": [
                ("define", "*", "training/step"),
                ("log", None, {"training/step": 1, "a": 1.0}),
                ("finish",),
            ],
            "swanlab": [("log", 1, {"a": 1.0}), ("finish",)],
        }[name]
    )


@pytest.mark.parametrize("known", [True, False])
def test_a_wandb_that_knows_a_limit_for_its_end_gets_it(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it waits without an end for a service that does not answer; earlier releases have none."""
    service = Service()
    if known:
        service.settings.finish_timeout = None
    monkeypatch.setitem(sys.modules, "wandb", service)  # type: ignore[arg-type]
    with opened("wandb", tmp_path):
        pass
    settings = service.described[0]["settings"]
    assert getattr(settings, "finish_timeout", "unknown") == (60.0 if known else "unknown")


def test_swanlab_gets_transcripts_as_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "swanlab", service)  # type: ignore[arg-type]
    with opened("swanlab", tmp_path) as trackers:
        play(trackers, tmp_path)
    _, step, sent = service.calls[-2]
    texts = [("so it is 4", "sample 7, mode greedy, score 1.0"), ("", "failed deadline")]
    assert step == 0 and sent["transcripts/validation"] == texts


def test_one_that_does_not_start_says_so_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    monkeypatch.setattr(service, "init", lambda **described: 1 / 0)
    monkeypatch.setitem(sys.modules, name, service)  # type: ignore[arg-type]
    says = f"tracker {name} cannot be started: ZeroDivisionError"
    with pytest.raises(ConfigError, match=says), opened(name, tmp_path):
        pass


def raising(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("error", [ConnectionError("gone"), SystemExit(3)])
def test_one_that_fails_is_left_out_and_the_others_go_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    steps = list[tuple[str, int]]()
    closed = list[str]()

    def tracker(name: str, log: Callable[[], Any]) -> Any:
        return SimpleNamespace(
            log=lambda step, *_: (steps.append((name, step)), log()), close=lambda: closed.append(name)
        )

    trackers = Trackers(
        {"bad": tracker("bad", lambda: raising(error)), "good": tracker("good", lambda: None)}, Path()
    )
    for step in (1, 2):
        trackers.log(step, {})
    trackers.close()
    assert sorted(steps) == [("bad", 1), ("good", 1), ("good", 2)] and sorted(closed) == ["bad", "good"]
    assert (
        caplog.text.count(
            f"tracker bad failed and is disabled for the rest of this launch: {type(error).__name__}: {error}"
        )
        == 1
    )


def test_a_text_for_markdown_cannot_end_its_own_fence() -> None:
    text = "</pre><script>x</script> | `a`\n````\n# d"
    assert (
        fenced_text(text).splitlines() == ["`````text", *text.splitlines(), "`````"] and fenced_text("") == ""
    )


def test_one_that_does_not_answer_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    tracker = SimpleNamespace(log=lambda *_: answers.wait(60))
    monkeypatch.setattr(trackers_module, "MAX_WAITING_ROWS", 2)
    monkeypatch.setattr(trackers_module, "PATIENCE_SECONDS", 0.01)
    trackers = Trackers({"slow": tracker}, Path())  # type: ignore[dict-item]
    for step in range(5):
        trackers.log(step, {})
    trackers.close()
    assert "did not finish within 0.01 s" in caplog.text
    answers.set()
