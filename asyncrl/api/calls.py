"""The calls of `import asyncrl` that start a run, or open one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.api.evaluation import Evaluation, evaluate_model
from asyncrl.api.launcher import LauncherProcess
from asyncrl.api.live_view import LineView, Show, can_draw
from asyncrl.api.requests import make_request
from asyncrl.api.run import Run, StartedRun
from asyncrl.errors import ConfigError
from asyncrl.registry import refuse_inside_run

Setting = str | Mapping[str, Any]
ERROR_MARK = "asyncrl: "  # how a line of the launcher begins that is an error


def start(
    *settings: Setting,
    command: Literal["train", "sft"] = "train",
    config_dir: str | Path = "",
    show: Show = print,
    **keywords: Any,
) -> StartedRun:
    """Start a run like `train`, and return as soon as its processes start. With `command="sft"`, start it
    like `sft`. `show` gets each line that the launcher prints while a call waits; with `print`, a terminal
    and a notebook show a live view. You can call this function in any thread, and several times."""
    refuse_inside_run(f"asyncrl.{command}()")
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as directory:
        request = make_request(
            command, settings, _with_model_path(keywords), Path(directory), config_dir=config_dir
        )
        request = msgspec.structs.replace(request, caller_draws=can_draw(show))
        launcher = LauncherProcess(request)
        try:
            run_dir = launcher.wait_for_start(show)  # by then the launcher has copied the files
        except BaseException:
            launcher.kill()
            raise
    return StartedRun(run_dir, launcher, show, caller_draws=request.caller_draws)


def train(*settings: Setting, config_dir: str | Path = "", **keywords: Any) -> Run:
    """Train a run, like the command `asyncrl train`, and return it when it ends.

    settings: overrides as for the command (`"experiment=calculator"`, `"trainer.lr=1e-5"`), and dicts of
        sections (`{"trainer": {"lr": 1e-5}}`).
    model: a directory, `owner/name` on the hub, or a run, whose newest checkpoint is used.
    train, test: rows (dicts, a table of pyarrow, pandas or polars, a `datasets.Dataset`), or files. With
        `train` but without `test`, the test data of the experiment are ignored.
    tools, reward, environment, agent: functions, classes, or names as in the configuration; pass the options
        of a function as `{function: {option: value}}`.
    keywords: all other sections and keys at top level (`total_steps=60`, `trainer={"lr": 1e-5}`).

    Raises ConfigError for bad input, before anything is started, and RunError for a run that failed. Ctrl-C
    stops the run with a checkpoint.
    """
    return start(*settings, config_dir=config_dir, **keywords).wait()


def dry_run(
    *settings: Setting,
    command: Literal["train", "sft"] = "train",
    config_dir: str | Path = "",
    show: Show = print,
    **keywords: Any,
) -> None:
    """Check everything that `train` would check, try the tools and the reward on a row, and show the plan,
    without starting or writing anything. The arguments are those of `start`. Raises ConfigError with all
    errors, one per line."""
    refuse_inside_run("asyncrl.dry_run()")
    errors: list[str] = []

    def show_or_keep(line: str) -> None:
        if line.startswith(ERROR_MARK):
            errors.append(line.removeprefix(ERROR_MARK))
        else:
            show(line)

    with tempfile.TemporaryDirectory(prefix="asyncrl-") as directory:
        request = make_request(
            command,
            settings,
            _with_model_path(keywords),
            Path(directory),
            named_directory=directory,
            config_dir=config_dir,
        )
        launcher = LauncherProcess(msgspec.structs.replace(request, dry_run=True))
        try:
            launcher.wait(LineView(show_or_keep))
        except ConfigError as error:
            raise ConfigError("\n".join(errors) or str(error)) from None


def sft(*settings: Setting, config_dir: str | Path = "", **keywords: Any) -> Run:
    """Train on conversations, like the command `asyncrl sft`; the arguments are those of `train`. Each row is
    `{"messages": [{"role": …, "content": …}, …]}` (docs/guides/models.md)."""
    return start(*settings, command="sft", config_dir=config_dir, **keywords).wait()


def evaluate(
    model: str | Path | Run,
    data: Any = None,
    *settings: Setting,
    samples: int | None = None,
    episodes: int | None = None,
    run_dir: str | Path = "",
    config_dir: str | Path = "",
    show: Show = print,
    **keywords: Any,
) -> Evaluation:
    """Evaluate a model, like the command `asyncrl eval`. The evaluation is a separate run: the same call
    continues it after an interruption, and reads its result once it has finished.

    model: a directory, `owner/name` on the hub, a checkpoint, or a run, whose configuration is then used.
    data: rows or files, as for `train`; None: the data of the run or of `settings`.
    samples, episodes: the number of first rows, and of episodes per row; None: all rows, one episode each.
    run_dir: the parent of run directories; default: `runs`, or for a run the parent of its directory.
    settings, keywords: as for `train`.
    """
    keywords = {
        "test": data,
        "validation.samples": samples,
        "validation.episodes": episodes,
        **keywords,
    }
    if isinstance(model, Run):
        runs = Path(run_dir) if run_dir else model.directory.parent
        return evaluate_model(
            str(model.directory), settings, keywords, runs, model.directory, config_dir, show
        )

    runs = Path(run_dir or "runs")
    return evaluate_model(str(model), settings, keywords, runs, runs, config_dir, show)


def open_run(name: str | Path, run_dir: str | Path = "runs") -> Run:
    """Open a running or finished run by its directory, or by its name in `run_dir`."""
    from asyncrl.commands import find_run

    if not str(name):
        raise ConfigError("open_run: the name is empty; pass the directory of a run, or its name")
    return Run(find_run(Path(run_dir), str(name), option="run_dir="))


def _with_model_path(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords, with a run as the model replaced by its newest checkpoint's directory."""
    model = keywords.get("model")
    return {**keywords, "model": model.model} if isinstance(model, Run) else dict(keywords)
