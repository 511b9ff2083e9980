"""Evaluates models from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.api.launcher import LauncherProcess, RunError
from asyncrl.api.live_view import LineView, Show
from asyncrl.api.requests import make_request
from asyncrl.errors import ConfigError
from asyncrl.registry import refuse_inside_run


class Evaluation(msgspec.Struct, frozen=True):
    """The result of an evaluation, which is a run in `directory`. `metrics`: values by name, for example
    `val-core/all/sampled/mean@8`, each with its `mean` and, for means over samples, the 95% interval from
    `low` to `high` (docs/guides/after_a_run.md)."""

    directory: Path
    metrics: dict[str, dict[str, float]]

    @property
    def success(self) -> float:
        """The fraction of episodes that succeed: `validation.success`."""
        return self._mean("success")

    @property
    def score(self) -> float:
        """The mean score of the reward."""
        return self._mean("mean@")

    def _mean(self, measure: str) -> float:
        prefix = f"val-core/all/sampled/{measure}"
        means = [values["mean"] for name, values in self.metrics.items() if name.startswith(prefix)]
        if not means:
            raise ConfigError(f"{self.directory}: no metric {prefix}; available: {', '.join(self.metrics)}")
        return means[0]


def evaluate_model(
    model: str,
    settings: Sequence[str | Mapping[str, Any]],
    keywords: Mapping[str, Any],
    runs: Path,
    saved_directory: Path,
    config_dir: str | Path = "",
    show: Show = print,
) -> Evaluation:
    """Evaluate a model, a checkpoint or a run, as `asyncrl eval` does. Functions and rows are saved below
    `saved_directory`. Raises ConfigError, RunError, and KeyboardInterrupt once the evaluation has stopped."""
    refuse_inside_run("asyncrl.evaluate()")
    request = make_request(
        "eval",
        settings,
        keywords,
        saved_directory,
        named_directory=str(saved_directory),
        config_dir=config_dir,
        model=model,
        runs=str(runs),
    )
    ending = LauncherProcess(request).wait(LineView(show))
    if ending.code:
        raise RunError("the evaluation was interrupted; repeat the call to continue")

    directory = Path(ending.run_dir).absolute()
    written_metrics = (directory / "evaluation.json").read_bytes()
    metrics = msgspec.json.decode(written_metrics, type=dict[str, dict[str, float]])
    return Evaluation(directory, metrics)
