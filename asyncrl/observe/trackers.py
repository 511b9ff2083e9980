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
from asyncrl.errors import ConfigError, recorded

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
        """ConfigError, naming the extra, for one that is not installed."""
        with ExitStack() as stack:
            trackers: dict[str, Tracker] = {}
            for name in config.observe.trackers:
                trackers[name] = OPEN[name](_module(name), config, run_dir)
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


def _wandb(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    return _RunTracker(module.init(**_described(config), dir=str(run_dir), resume="allow", id=config.name))


def _swanlab(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    described = _described(config)
    described["experiment_name"] = described.pop("name")
    module.init(**described, logdir=str(run_dir / "swanlab"))
    return _RunTracker(module)


def _tensorboard(module: Any, config: RunConfig, run_dir: Path) -> Tracker:
    return _TensorBoardTracker(module.SummaryWriter(str(run_dir / "tensorboard")))


def _described(config: RunConfig) -> dict[str, Any]:
    return {"project": config.observe.project, "name": config.name, "config": msgspec.to_builtins(config)}


OPEN: dict[str, Callable[[Any, RunConfig, Path], Tracker]] = {
    "wandb": _wandb,
    "swanlab": _swanlab,
    "tensorboard": _tensorboard,
}
MODULES = {"wandb": "wandb", "swanlab": "swanlab", "tensorboard": "torch.utils.tensorboard"}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        raise ConfigError(
            f"tracker {name} is not installed ({error}); pip install 'asyncrl[{name}]', or leave it out of "
            "observe.trackers"
        ) from None
