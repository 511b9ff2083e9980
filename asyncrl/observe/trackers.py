"""Trackers beside metrics.jsonl. Each foreign library is imported only when the configuration names it."""

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
from asyncrl.observe.background import Background
from asyncrl.observe.files import read_lines, run_id
from asyncrl.observe.metrics import VALIDATED
from asyncrl.observe.summary import lags

WANDB_URL = "https://api.wandb.ai"  # under which its login is kept, also where the service has moved
STEP = "training/step"
TRANSCRIPTS = "transcripts/validation"
COLUMNS = ("sample", "mode", "score", "success", "failed", "end", "turns", "ground_truth", "text")
# rows that may wait for trackers; seconds, at the end
MOST = 1000
PATIENCE = 60.0
NAME_LIMIT = 128  # characters of a run's name, in wandb

log = logging.getLogger("asyncrl.trackers")


Entry = Mapping[str, Any]  # of a file of transcripts
Values = Mapping[str, Sequence[float]]  # of single episodes, by metric
EMPTY: Values = {}


class Tracker:
    """A service to which a run is sent. It leaves out what it has no place for."""

    def log(self, step: int, metrics: dict[str, float], values: Values, lags: Sequence[int]) -> None:
        """A row, with the values of single episodes, and tokens by lag from 0 on, for histograms."""
        raise NotImplementedError

    def transcripts(self, step: int, entries: Sequence[Entry]) -> None:
        """Send the transcripts that a validation has kept."""

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Send the summary of the whole run."""

    def close(self) -> None:
        """The run is over."""


class Trackers:
    """All trackers of a run, called in a thread of their own: a launcher that waits for a service would
    restart no process any more. One that fails is logged once and left out: it does not end the run."""

    def __init__(self, trackers: dict[str, Tracker], run_dir: Path) -> None:
        self._trackers = trackers
        self._run_dir = run_dir
        self._failed: set[str] = set()
        self._calls = Background("trackers", MOST)

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, run_dir: Path) -> Iterator[Trackers]:
        """Open those of a run directory that is marked as started. ConfigError for one that is not installed,
        or does not start."""
        opened = cls({}, run_dir)
        try:
            for name in config.observe.trackers:
                module = _module(name)
                try:
                    with users_code():
                        opened._trackers[name] = OPEN[name](module, config, run_dir)
                except Exception as error:
                    raise ConfigError(_not_started(name, error)) from error
            yield opened
        finally:
            opened.close()

    def log(self, step: int, metrics: dict[str, float], values: Values = EMPTY) -> None:
        """A row; after that of a validation the transcripts that it has kept."""
        self._calls.call(lambda: self._log(step, metrics, values))

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Send the summary of the whole run, once it is over."""
        if summary:
            self._calls.call(lambda: self._now(lambda tracker: tracker.summarize(summary)))

    def close(self) -> None:
        """Close them once they have all rows, for which they have PATIENCE seconds."""
        if not self._calls.close(PATIENCE):
            log.warning("trackers: not done after %g s; all rows are in metrics.jsonl", PATIENCE)
            return
        if self._calls.lost:
            log.warning("trackers: %d rows are in metrics.jsonl only", self._calls.lost)
        self._failed.clear()  # what they have is kept
        self._now(lambda tracker: tracker.close())  # here: swanlab sets signal handlers back

    def _log(self, step: int, metrics: dict[str, float], values: Values) -> None:
        counts = lags([metrics])
        tokens = [counts.get(lag, 0) for lag in range(max(counts, default=-1) + 1)]
        self._now(lambda tracker: tracker.log(step, metrics, values, tokens))
        if self._trackers and VALIDATED in metrics:
            path = self._run_dir / "transcripts" / "validation" / f"step-{step}.jsonl"
            with recorded() as failure:
                entries = list(read_lines(path))
            if failure:
                log.warning("trackers: no transcripts of step %d: %s", step, failure.line)
            elif entries:
                self._now(lambda tracker: tracker.transcripts(step, entries))

    def _now(self, call: Callable[[Tracker], None]) -> None:
        for name in self._trackers.keys() - self._failed:
            try:
                with users_code():  # a library may end the program
                    call(self._trackers[name])
            except Exception as error:
                log.warning("tracker %s is left out from here on: %s", name, one_line(error))
                self._failed.add(name)


def _texts(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    """Yield (caption, text) of each."""
    for entry in entries:
        known = (f"{name} {entry[name]}" for name in COLUMNS[:-1] if entry.get(name) is not None)
        yield ", ".join(known), str(entry.get("text", ""))


def fenced(text: str) -> str:
    """Return a text as Markdown's code; the fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}" if text else ""


class _WandbTracker(Tracker):
    """Our own step is the x axis: a validation can end after later steps; wandb's counter cannot go back."""

    def __init__(self, module: Any, run: Any) -> None:
        self._module = module
        self._run = run
        run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: dict[str, float], values: Values, lags: Sequence[int]) -> None:
        more = {
            f"{name}/histogram": self._module.Histogram(list(found))
            for name, found in values.items()
            if found
        }
        if lags:
            edges = [lag - 0.5 for lag in range(len(lags) + 1)]
            more["staleness/lag/histogram"] = self._module.Histogram(np_histogram=(list(lags), edges))
        self._run.log({STEP: step} | metrics | more)

    def transcripts(self, step: int, entries: Sequence[Entry]) -> None:
        rows = [[_cell(entry.get(name)) for name in COLUMNS] for entry in entries]
        self._run.log({STEP: step, TRANSCRIPTS: self._module.Table(columns=list(COLUMNS), data=rows)})

    def summarize(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))

    def close(self) -> None:
        self._run.finish()


class _SwanlabTracker(Tracker):
    """Takes texts, but neither histograms nor a summary."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def log(self, step: int, metrics: dict[str, float], values: Values, lags: Sequence[int]) -> None:
        self._module.log(metrics, step=step)

    def transcripts(self, step: int, entries: Sequence[Entry]) -> None:
        texts = [self._module.Text(text, caption=caption) for caption, text in _texts(entries)]
        self._module.log({TRANSCRIPTS: texts}, step=step)

    def close(self) -> None:
        self._module.finish()


class _TensorBoardTracker(Tracker):
    """Its texts are Markdown."""

    def __init__(self, writer: Any, config: RunConfig) -> None:
        self._writer = writer
        self._text("config", "config.yaml", [("", msgspec.yaml.encode(config).decode())], 0)

    def log(self, step: int, metrics: dict[str, float], values: Values, lags: Sequence[int]) -> None:
        import numpy as np

        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, found in values.items():
            if found:
                self._writer.add_histogram(f"{name}/histogram", np.array(found), step)
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

    def transcripts(self, step: int, entries: Sequence[Entry]) -> None:
        self._text(TRANSCRIPTS, f"step {step}", list(_texts(entries)), step)

    def summarize(self, summary: Mapping[str, Any]) -> None:
        shown = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        self._text("summary", "summary.json", [("", shown)], int(summary.get("steps", 0)))

    def _text(self, tag: str, title: str, texts: list[tuple[str, str]], step: int) -> None:
        parts = [f"**{title}**", *(fenced(part) for pair in texts for part in pair)]
        self._writer.add_text(tag, "\n\n".join(parts), step)

    def close(self) -> None:
        self._writer.close()


class _AccelerateTracker(Tracker):
    """Takes numbers only. One thread makes all calls, as e.g. mlflow keeps its run by thread; none is waited
    for longer than PATIENCE."""

    def __init__(self, tracker: Any, config: RunConfig) -> None:
        self._tracker = tracker
        self._calls = Background(tracker.name, 1)
        self._calls.ask(lambda: self._start(config), PATIENCE)

    def _start(self, config: RunConfig) -> None:
        from accelerate.state import PartialState

        PartialState(cpu=True)  # accelerate asks it whether this is the main process
        self._tracker.start()
        options = leaves(msgspec.to_builtins(config))
        self._tracker.store_init_configuration(
            {name: value if isinstance(value, int | float) else str(value) for name, value in options}
        )

    def log(self, step: int, metrics: dict[str, float], values: Values, lags: Sequence[int]) -> None:
        named = {name.replace("@", "_at_"): value for name, value in metrics.items()}  # mlflow refuses it
        # Half of what is waited at the end: behind a last row that hangs are those of other trackers.
        self._calls.ask(lambda: self._tracker.log(named, step=step), PATIENCE / 2)

    def close(self) -> None:
        self._calls.ask(self._tracker.finish, PATIENCE)


def _cell(value: Any) -> Any:
    """A table's columns have one type each."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def check_trackers(config: RunConfig) -> None:
    """ConfigError for one that is not installed, or that would send metrics to its service without being
    logged in: when it is opened, there is a run directory already. Nothing is sent."""
    for name in config.observe.trackers:
        module = _module(name)
        try:
            with users_code():
                logged_in = name not in LOGGED_IN or LOGGED_IN[name](module)
        except Exception as error:
            raise ConfigError(_not_started(name, error)) from error
        if not logged_in:
            raise ConfigError(
                f"observe.trackers: {name} is not logged in; run `{name} login`, or set "
                f"{name.upper()}_API_KEY, or {name.upper()}_MODE=offline"
            )


def _wandb_logged_in(module: Any) -> bool:
    """True if wandb finds a key in what it reads itself; its `login` would ask the service."""
    from requests.utils import get_netrc_auth  # a dependency of wandb

    settings = module.setup().settings
    if settings.mode in ("offline", "disabled", "dryrun"):
        return True
    given = settings.api_key or getattr(settings, "identity_token_file", None)
    return bool(given) or any(get_netrc_auth(url) for url in (settings.base_url, WANDB_URL))


def _swanlab_logged_in(module: Any) -> bool:
    settings = module.Settings()  # of earlier releases without these
    return getattr(settings, "mode", "") != "online" or bool(settings.api_key)


def _not_started(name: str, error: Exception) -> str:
    return f"tracker {name} cannot be started: {one_line(error)}; leave it out of observe.trackers to go on"


def _wandb(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    described = _described(config)
    settings = {"finish_timeout": PATIENCE} if hasattr(module.setup().settings, "finish_timeout") else {}
    kept = {"dir": str(run_dir), "resume": "allow", "id": run_id(run_dir)}
    run = module.init(**described, **kept, settings=module.Settings(**settings))
    return _WandbTracker(module, run)


def _swanlab(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    described = _described(config)
    described["experiment_name"] = described.pop("name")
    module.init(**described, logdir=str(run_dir / "swanlab"), resume="allow", id=run_id(run_dir))
    return _SwanlabTracker(module)


def _accelerate(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind: Any = LOGGER_TYPE_TO_CLASS[module.__name__]
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
    return _AccelerateTracker(kind(**options[module.__name__]), config)


def _described(config: RunConfig) -> dict[str, Any]:
    name = config.name[:NAME_LIMIT]
    return {"project": config.observe.project, "name": name, "config": msgspec.to_builtins(config)}


OPEN: dict[str, Callable[[Any, RunConfig, Path], Tracker]] = {
    "wandb": _wandb,
    "swanlab": _swanlab,
    "tensorboard": lambda module, config, run_dir: _TensorBoardTracker(
        module.SummaryWriter(str(run_dir / "tensorboard")), config
    ),
    **dict.fromkeys(("aim", "clearml", "comet_ml", "dvclive", "mlflow", "trackio"), _accelerate),
}
LOGGED_IN: dict[str, Callable[[Any], bool]] = {"wandb": _wandb_logged_in, "swanlab": _swanlab_logged_in}
MODULES = {"tensorboard": "torch.utils.tensorboard"}  # of the others: their names
EXTRAS = ("wandb", "tensorboard", "swanlab")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(MODULES.get(name, name))
    except ImportError as error:
        package = f"'asyncrl[{name}]'" if name in EXTRAS else name
        raise ConfigError(
            f"tracker {name} is not installed ({error}); pip install {package}, or leave it out of "
            "observe.trackers"
        ) from None
