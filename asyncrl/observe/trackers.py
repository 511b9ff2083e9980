"""Trackers beside metrics.jsonl. Each foreign library is imported only when the configuration names it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, one_line, recorded
from asyncrl.observe.files import run_id

WANDB_URL = "https://api.wandb.ai"  # under which its login is kept, also where the service has moved
NAME_LIMIT = 128  # characters of a run's name, in wandb

log = logging.getLogger("asyncrl.trackers")


class Tracker(Protocol):
    """Where metrics are sent."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers of a run. One that fails is logged once and left out: it does not end the run."""

    def __init__(self, trackers: dict[str, Tracker]) -> None:
        self._trackers = trackers

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, run_dir: Path) -> Iterator[Trackers]:
        """In a run directory that is marked as started. ConfigError for one that is not installed, or that
        does not start."""
        with ExitStack() as stack:
            trackers: dict[str, Tracker] = {}
            for name in config.observe.trackers:
                module = _module(name)
                try:
                    trackers[name] = OPEN[name](module, config, run_dir)
                except Exception as error:
                    raise ConfigError(_not_started(name, error)) from error
                stack.callback(trackers[name].close)
            yield cls(trackers)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            with recorded() as failure:
                tracker.log(step, metrics)
            if failure:
                log.warning("tracker %s is left out from here on: %s", name, failure.line)
                del self._trackers[name]


class _RunTracker:
    """A tracker whose run object has `log(metrics, step=…)` and `finish()`: wandb and swanlab."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoardTracker:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def check_trackers(config: RunConfig) -> None:
    """ConfigError for one that is not installed, or that would send metrics to its service without being
    logged in: when it is opened, there is a run directory already. Nothing is sent."""
    for name in config.observe.trackers:
        module = _module(name)
        try:
            logged_in = name not in LOGGED_IN or LOGGED_IN[name](module)
        except Exception as error:
            raise ConfigError(_not_started(name, error)) from error
        if not logged_in:
            raise ConfigError(
                f"observe.trackers: {name} is not logged in; run `{name} login`, or set "
                f"{name.upper()}_API_KEY, or {name.upper()}_MODE=offline"
            )


def _wandb_logged_in(module: Any) -> bool:
    """By what it reads itself; its `login` would ask the service."""
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
    return _RunTracker(
        module.init(**_described(config), dir=str(run_dir), resume="allow", id=run_id(run_dir))
    )


def _swanlab(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    described = _described(config)
    described["experiment_name"] = described.pop("name")
    module.init(**described, logdir=str(run_dir / "swanlab"), resume="allow", id=run_id(run_dir))
    return _RunTracker(module)


def _tensorboard(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    return _TensorBoardTracker(module.SummaryWriter(str(run_dir / "tensorboard")))


def _described(config: RunConfig) -> dict[str, Any]:
    name = config.name[:NAME_LIMIT]
    return {"project": config.observe.project, "name": name, "config": msgspec.to_builtins(config)}


OPEN: dict[str, Callable[[Any, RunConfig, Path], Tracker]] = {
    "wandb": _wandb,
    "swanlab": _swanlab,
    "tensorboard": _tensorboard,
}
LOGGED_IN: dict[str, Callable[[Any], bool]] = {"wandb": _wandb_logged_in, "swanlab": _swanlab_logged_in}
MODULES = {"wandb": "wandb", "swanlab": "swanlab", "tensorboard": "torch.utils.tensorboard"}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        raise ConfigError(
            f"tracker {name} is not installed ({error}); pip install 'asyncrl[{name}]', or leave it out of "
            "observe.trackers"
        ) from None
