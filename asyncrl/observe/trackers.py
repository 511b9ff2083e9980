"""Sends a run to trackers. Each tracker's library is imported only if the configuration names the tracker."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import RunConfig
from asyncrl.config.base import leaves
from asyncrl.errors import ConfigError, one_line, recorded, users_code
from asyncrl.observe.background import BackgroundCalls
from asyncrl.observe.files import read_lines, run_id
from asyncrl.observe.metrics import VALIDATED
from asyncrl.observe.summary import tokens_per_lag

WANDB_URL = "https://api.wandb.ai"  # wandb stores the login under this URL, also for other servers
STEP_NAME = "training/step"
TRANSCRIPTS = "transcripts/validation"
COLUMNS = ("sample", "mode", "score", "success", "failed", "end", "turns", "ground_truth", "text")
MAX_WAITING_ROWS = 1000  # rows that may wait for trackers
PATIENCE_SECONDS = 60.0  # seconds that trackers have at the end of a run
NAME_LIMIT = 128  # characters of a run's name, in wandb

log = logging.getLogger("asyncrl.trackers")


TranscriptEntry = Mapping[str, Any]  # an entry in a file of transcripts
EpisodeValues = Mapping[str, Sequence[float]]  # metric → values of single episodes
NO_VALUES: EpisodeValues = {}


class Tracker:
    """Sends a run to a service. Data that the service cannot store are left out."""

    def log(self, step: int, metrics: dict[str, float], values: EpisodeValues, lags: Sequence[int]) -> None:
        """Send a row, with the values of single episodes, and tokens by lag from 0 on, for histograms."""
        raise NotImplementedError

    def transcripts(self, step: int, entries: Sequence[TranscriptEntry]) -> None:
        """Send the stored transcripts of a validation."""

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Send the summary of the whole run."""

    def close(self) -> None:
        """End the tracker's run."""


class Trackers:
    """Calls all trackers of a run in a background thread, as a launcher that waits for a service could not
    restart processes. A tracker that fails is logged once and left out; the run goes on."""

    def __init__(self, trackers: dict[str, Tracker], run_dir: Path) -> None:
        self._trackers = trackers
        self._run_dir = run_dir
        self._failed_trackers: set[str] = set()
        self._calls = BackgroundCalls("trackers", MAX_WAITING_ROWS)

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, run_dir: Path) -> Iterator[Trackers]:
        """Open the configured trackers for a run directory that is marked as started. ConfigError for a
        tracker that is not installed, or does not start."""
        opened = cls({}, run_dir)
        try:
            for name in config.observe.trackers:
                module = _import_module(name)
                try:
                    with users_code():
                        opened._trackers[name] = TRACKER_OPENERS[name](module, config, run_dir)
                except Exception as error:
                    raise ConfigError(_not_started_text(name, error)) from error

            yield opened
        finally:
            opened.close()

    def log(self, step: int, metrics: dict[str, float], values: EpisodeValues = NO_VALUES) -> None:
        """Send a row; after a validation's row also the validation's transcripts."""
        self._calls.call(lambda: self._log_row(step, metrics, values))

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Send the summary of the whole run, once it is over."""
        if summary:
            self._calls.call(lambda: self._call_each(lambda tracker: tracker.summarize(summary)))

    def close(self) -> None:
        """Close the trackers after all rows are sent, for at most PATIENCE_SECONDS."""
        if not self._calls.close(PATIENCE_SECONDS):
            log.warning(
                "trackers: uploads did not finish within %g s; all rows are in metrics.jsonl",
                PATIENCE_SECONDS,
            )
            return
        if self._calls.lost_calls:
            log.warning("trackers: unsent rows: %d; all rows are in metrics.jsonl", self._calls.lost_calls)
        self._failed_trackers.clear()  # closing keeps the rows that failed trackers have
        # The calls are made in this, the main thread, as swanlab resets signal handlers.
        self._call_each(lambda tracker: tracker.close())

    def _log_row(self, step: int, metrics: dict[str, float], values: EpisodeValues) -> None:
        counts = tokens_per_lag([metrics])
        tokens = [counts.get(lag, 0) for lag in range(max(counts, default=-1) + 1)]
        self._call_each(lambda tracker: tracker.log(step, metrics, values, tokens))

        if self._trackers and VALIDATED in metrics:
            path = self._run_dir / "transcripts" / "validation" / f"step-{step}.jsonl"
            with recorded() as failure:
                entries = list(read_lines(path))

            if failure:
                log.warning("trackers: the transcripts of step %d were not sent: %s", step, failure.line)
            elif entries:
                self._call_each(lambda tracker: tracker.transcripts(step, entries))

    def _call_each(self, call: Callable[[Tracker], None]) -> None:
        for name in self._trackers.keys() - self._failed_trackers:
            try:
                with users_code():  # a library may end the program
                    call(self._trackers[name])
            except Exception as error:
                log.warning(
                    "tracker %s failed and is disabled for the rest of this launch: %s", name, one_line(error)
                )
                self._failed_trackers.add(name)


def _captioned_texts(entries: Sequence[TranscriptEntry]) -> Iterator[tuple[str, str]]:
    """Yield (caption, text) of each transcript."""
    for entry in entries:
        facts = (f"{name} {entry[name]}" for name in COLUMNS[:-1] if entry.get(name) is not None)
        yield ", ".join(facts), str(entry.get("text", ""))


def fenced_text(text: str) -> str:
    """Return a text as a code block in Markdown, with a fence longer than any fence in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}" if text else ""


class _WandbTracker(Tracker):
    """Sends to wandb, with the training step as the x axis: a validation can end after later steps, but
    wandb's counter cannot go back."""

    def __init__(self, module: Any, run: Any) -> None:
        self._module = module
        self._run = run
        run.define_metric("*", step_metric=STEP_NAME)

    def log(self, step: int, metrics: dict[str, float], values: EpisodeValues, lags: Sequence[int]) -> None:
        histograms = {
            f"{name}/histogram": self._module.Histogram(list(episode_values))
            for name, episode_values in values.items()
            if episode_values
        }
        if lags:
            edges = [lag - 0.5 for lag in range(len(lags) + 1)]
            histograms["staleness/lag/histogram"] = self._module.Histogram(np_histogram=(list(lags), edges))

        self._run.log({STEP_NAME: step} | metrics | histograms)

    def transcripts(self, step: int, entries: Sequence[TranscriptEntry]) -> None:
        # The cells of a column must be of one type, so everything but numbers is text.
        rows = [
            [
                cell if cell is None or isinstance(cell, bool | int | float) else str(cell)
                for cell in map(entry.get, COLUMNS)
            ]
            for entry in entries
        ]
        self._run.log({STEP_NAME: step, TRANSCRIPTS: self._module.Table(columns=list(COLUMNS), data=rows)})

    def summarize(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))

    def close(self) -> None:
        self._run.finish()


class _SwanlabTracker(Tracker):
    """Sends to swanlab, which takes texts, but neither histograms nor a summary."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def log(self, step: int, metrics: dict[str, float], values: EpisodeValues, lags: Sequence[int]) -> None:
        self._module.log(metrics, step=step)

    def transcripts(self, step: int, entries: Sequence[TranscriptEntry]) -> None:
        texts = [self._module.Text(text, caption=caption) for caption, text in _captioned_texts(entries)]
        self._module.log({TRANSCRIPTS: texts}, step=step)

    def close(self) -> None:
        self._module.finish()


class _TensorBoardTracker(Tracker):
    """Writes files for TensorBoard, with texts as Markdown."""

    def __init__(self, writer: Any, config: RunConfig) -> None:
        self._writer = writer
        self._text("config", "config.yaml", [("", msgspec.yaml.encode(config).decode())], 0)

    def log(self, step: int, metrics: dict[str, float], values: EpisodeValues, lags: Sequence[int]) -> None:
        import numpy as np

        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

        for name, episode_values in values.items():
            if episode_values:
                self._writer.add_histogram(f"{name}/histogram", np.array(episode_values), step)

        if tokens := sum(lags):
            self._writer.add_histogram_raw(
                "staleness/lag/histogram",
                min=0,
                max=len(lags) - 1,
                num=tokens,
                sum=sum(lag * count for lag, count in enumerate(lags)),
                sum_squares=sum(lag * lag * count for lag, count in enumerate(lags)),
                bucket_limits=[lag + 0.5 for lag in range(len(lags))],
                bucket_counts=list(lags),
                global_step=step,
            )

    def transcripts(self, step: int, entries: Sequence[TranscriptEntry]) -> None:
        self._text(TRANSCRIPTS, f"step {step}", list(_captioned_texts(entries)), step)

    def summarize(self, summary: Mapping[str, Any]) -> None:
        summary_text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        self._text("summary", "summary.json", [("", summary_text)], int(summary.get("steps", 0)))

    def _text(self, tag: str, title: str, texts: list[tuple[str, str]], step: int) -> None:
        parts = [f"**{title}**", *(fenced_text(part) for pair in texts for part in pair)]
        self._writer.add_text(tag, "\n\n".join(parts), step)

    def close(self) -> None:
        self._writer.close()


class _AccelerateTracker(Tracker):
    """Sends numbers through accelerate. One thread makes all calls, as e.g. mlflow keeps its run by thread;
    no call is waited for longer than PATIENCE_SECONDS."""

    def __init__(self, tracker: Any, config: RunConfig) -> None:
        self._tracker = tracker
        self._calls = BackgroundCalls(tracker.name, 1)
        self._calls.ask(lambda: self._start(config), PATIENCE_SECONDS)

    def _start(self, config: RunConfig) -> None:
        from accelerate.state import PartialState

        PartialState(cpu=True)  # tells accelerate that this is the main process
        self._tracker.start()
        options = leaves(msgspec.to_builtins(config))
        self._tracker.store_init_configuration(
            {name: value if isinstance(value, int | float) else str(value) for name, value in options}
        )

    def log(self, step: int, metrics: dict[str, float], values: EpisodeValues, lags: Sequence[int]) -> None:
        # mlflow refuses `@` in names.
        renamed_metrics = {name.replace("@", "_at_"): value for name, value in metrics.items()}

        # Half of the patience at the end, so that a last row that hangs leaves time for other trackers.
        self._calls.ask(lambda: self._tracker.log(renamed_metrics, step=step), PATIENCE_SECONDS / 2)

    def close(self) -> None:
        self._calls.ask(self._tracker.finish, PATIENCE_SECONDS)


def check_trackers(config: RunConfig) -> None:
    """Check trackers before a run directory exists. ConfigError for a tracker that is not installed, or not
    logged in to a service. Nothing is sent."""
    for name in config.observe.trackers:
        module = _import_module(name)
        try:
            with users_code():
                logged_in = name not in LOGIN_CHECKS or LOGIN_CHECKS[name](module)
        except Exception as error:
            raise ConfigError(_not_started_text(name, error)) from error

        if not logged_in:
            raise ConfigError(
                f"observe.trackers: {name} is not logged in; run `{name} login`, or set "
                f"{name.upper()}_API_KEY or {name.upper()}_MODE=offline"
            )


def _wandb_logged_in(module: Any) -> bool:
    """Tell whether wandb finds a key in its own settings; wandb's `login` would ask the service."""
    from requests.utils import get_netrc_auth  # a dependency of wandb

    settings = module.setup().settings
    if settings.mode in ("offline", "disabled", "dryrun"):
        return True
    credentials = settings.api_key or getattr(settings, "identity_token_file", None)
    return bool(credentials) or any(get_netrc_auth(url) for url in (settings.base_url, WANDB_URL))


def _swanlab_logged_in(module: Any) -> bool:
    settings = module.Settings()  # earlier releases have no `mode`
    return getattr(settings, "mode", "") != "online" or bool(settings.api_key)


def _not_started_text(name: str, error: Exception) -> str:
    return (
        f"tracker {name} cannot be started: {one_line(error)}; remove {name} from observe.trackers to "
        "continue"
    )


def _open_wandb(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    run_description = _run_description(config)
    settings = {}
    if hasattr(module.setup().settings, "finish_timeout"):
        settings["finish_timeout"] = PATIENCE_SECONDS

    run_options = {"dir": str(run_dir), "resume": "allow", "id": run_id(run_dir)}
    run = module.init(**run_description, **run_options, settings=module.Settings(**settings))
    return _WandbTracker(module, run)


def _open_swanlab(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    run_description = _run_description(config)
    run_description["experiment_name"] = run_description.pop("name")
    module.init(**run_description, logdir=str(run_dir / "swanlab"), resume="allow", id=run_id(run_dir))
    return _SwanlabTracker(module)


def _open_accelerate(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker_class: Any = LOGGER_TYPE_TO_CLASS[module.__name__]
    project = config.observe.project
    name = config.name[:NAME_LIMIT]
    options: dict[str, dict[str, Any]] = {
        "aim": {"run_name": name, "logging_dir": str(run_dir), "experiment": project},
        "clearml": {"run_name": project, "task_name": name},
        "comet_ml": {"run_name": project},
        "dvclive": {"dir": str(run_dir / "dvclive"), "save_dvc_exp": False},
        "mlflow": {"experiment_name": project, "run_name": name},
        "trackio": {"run_name": project, "name": name, "resume": "allow"},
    }

    return _AccelerateTracker(tracker_class(**options[module.__name__]), config)


def _run_description(config: RunConfig) -> dict[str, Any]:
    name = config.name[:NAME_LIMIT]
    return {"project": config.observe.project, "name": name, "config": msgspec.to_builtins(config)}


TRACKER_OPENERS: dict[str, Callable[[Any, RunConfig, Path], Tracker]] = {
    "wandb": _open_wandb,
    "swanlab": _open_swanlab,
    "tensorboard": lambda module, config, run_dir: _TensorBoardTracker(
        module.SummaryWriter(str(run_dir / "tensorboard")), config
    ),
    **dict.fromkeys(("aim", "clearml", "comet_ml", "dvclive", "mlflow", "trackio"), _open_accelerate),
}
LOGIN_CHECKS: dict[str, Callable[[Any], bool]] = {"wandb": _wandb_logged_in, "swanlab": _swanlab_logged_in}
MODULE_NAMES = {"tensorboard": "torch.utils.tensorboard"}  # other modules have the tracker's name
PACKAGE_EXTRAS = ("wandb", "tensorboard", "swanlab")


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(MODULE_NAMES.get(name, name))
    except ImportError as error:
        package = f"'asyncrl[{name}]'" if name in PACKAGE_EXTRAS else name
        raise ConfigError(
            f"tracker {name} is not installed ({error}); run `pip install {package}`, or remove {name} from "
            "observe.trackers"
        ) from None
