"""`asyncrl eval MODEL`: a run without training, whose only validation is the result.

    MODEL, overrides ──► RunConfig with total_steps=0 ──► launch/start.py ──► run store ──► the table

After a kill the same command continues: finished episodes are in the run store.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from asyncrl.commands import command_parser, list_run_directories
from asyncrl.commands.merge import find_checkpoint
from asyncrl.config import RunConfig, read_config, texts, training
from asyncrl.config.composition import compose, override, recompose, refused_keys
from asyncrl.errors import ConfigError
from asyncrl.observe.files import read_summary
from asyncrl.observe.held_out import (
    JudgedEpisode,
    NumbersPerSample,
    bootstrap_interval,
    mean_losses,
    mean_sizes,
    numbers_per_sample,
    sample_means,
    threshold_of,
)
from asyncrl.registry import search_working_directory
from asyncrl.values import printable

HELP = """\
Evaluate a model with the episodes, tools, environments and rewards of training, but without training.

  asyncrl eval MODEL data=FILE.parquet rollout.reward=math       MODEL: a directory, or owner/name on the hub
  asyncrl eval runs/demo/checkpoints/step-200                    with the configuration of its run
  asyncrl eval demo validation.episodes=8                        newest checkpoint of a run; mean@8, pass@8
  asyncrl eval demo --baseline runs/demo/checkpoints/step-50     compared with another model
  asyncrl eval MODEL experiment=calculator engine=sglang         OVERRIDES work as in asyncrl train

After a crash, run the same command again to continue; once there is a result, the command only prints it.
`data=` is short for `data.test=`. All rows are used, or only the first N with `samples=N`; with `episodes=K`,
each row is answered K times. The episodes form their own run, which `asyncrl runs transcripts NAME` shows.
docs/guides/after_a_run.md explains the numbers."""

EVALUATION = "evaluation.json"
ALL_SAMPLES = "validation.samples=1000000000"
ALIASES = {"data": "data.test", "samples": "validation.samples", "episodes": "validation.episodes"}
STEM_BYTES = 150  # Bytes of the model's name in the name of its run.
SOLVED = re.compile(r"val-core/all/(\w+/(?:success|pass@\d+))")
COLUMNS = ("mean", "95% interval", "samples", "minus baseline", "95% interval")


class Target(NamedTuple):
    """The model to evaluate, and, for a checkpoint, the run whose configuration is used."""

    model: str
    run_dir: Path | None


def main(argv: list[str]) -> int:
    """Parse the arguments, evaluate, print and write the numbers. Exit code 1 if the run failed."""
    parser = argument_parser("eval", HELP)
    parser.add_argument("--baseline", help="another MODEL, or a run of asyncrl eval, to compare with")
    options = parser.parse_intermixed_args(argv)
    check_order(options)
    target = resolve_target(options.model, options.run_dir)
    code, run_dir = evaluate(target, options)
    if code or run_dir is None:
        return code

    result = Result.read(run_dir)
    if not options.baseline:
        print_result(result)
        return 0

    for baseline_dir in (Path(options.baseline), options.run_dir / options.baseline):
        if (baseline_dir / "config.yaml").is_file() and not read_config(baseline_dir).total_steps:
            break  # an existing evaluation
    else:  # Evaluate the baseline model now, configured like `target`.
        baseline_target = resolve_target(options.baseline, options.run_dir)
        code, baseline_dir = evaluate(baseline_target._replace(run_dir=target.run_dir), options)

    if code or baseline_dir is None:
        return code
    baseline = Result.read(baseline_dir)
    if not (baseline_dir / EVALUATION).is_file():  # The viewer's comparison reads both files
        write_result(baseline)
    print_result(result, baseline)
    return 0


def argument_parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = command_parser(
        name, text, "directory that contains the run directories, including the new run's"
    )
    parser.add_argument("model", help="a model, a checkpoint of a run, or a run")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="key=value or group=choice")
    parser.add_argument("--config-dir", type=Path, help="directory with your own configuration groups")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and print the plan; start nothing"
    )
    parser.set_defaults(values={})  # calls from Python have some
    return parser


def evaluate(
    target: Target,
    options: argparse.Namespace,
    on_start: Callable[[Path], None] = lambda run_dir: None,
) -> tuple[int, Path | None]:
    """Run the episodes that are not finished yet. Return the exit code and the run's directory; None after a
    dry run. `on_start`: see `train`."""
    config = configuration(target, options)
    run_dir = Path(config.run_dir) / config.name

    if (run_dir / "config.yaml").is_file():
        previous_config = read_config(run_dir)
        if previous_config.total_steps or previous_config.held_out_settings != config.held_out_settings:
            raise ConfigError(f"{run_dir}: a different run has this name; choose another name=…")
    if read_summary(run_dir).get("outcome") == "completed" and not options.dry_run:
        return 0, run_dir

    search_working_directory()
    from asyncrl.launch.start import train

    exit_code = train(config, dry_run=options.dry_run, on_start=on_start)
    return exit_code, None if options.dry_run else run_dir


def resolve_target(name: str, runs_directory: Path) -> Target:
    """Return a checkpoint's export, for a checkpoint or a run; else the model itself, which may be on the
    hub. Raises ConfigError for a name that can be none of these."""
    from asyncrl.launch.models import parse_hub_model

    path = Path(name)
    is_checkpoint = path.name.startswith("step-") and (path / "manifest.json").is_file()

    if not (
        is_checkpoint or (path / "config.yaml").is_file() or (runs_directory / name / "config.yaml").is_file()
    ):
        model_path = path.expanduser()
        is_in_runs = model_path.parent.resolve() == runs_directory.resolve()
        if model_path.is_dir() or (parse_hub_model(name) and not is_in_runs):
            return Target(name, None)

        runs = list_run_directories(runs_directory) if runs_directory.is_dir() else []
        raise ConfigError(
            f"{name}: no such model, checkpoint or run; use a model directory, owner/name on the "
            f"hub, a checkpoint ({runs_directory}/NAME/checkpoints/step-N), or a run in {runs_directory}: "
            f"{', '.join(sorted(run.name for run in runs)) or 'none yet'}"
        )

    checkpoints, step, run_dir = find_checkpoint(name, runs_directory)
    export = Path(checkpoints.file_path(step)) / "hf"
    if not (export / "config.json").is_file():
        raise ConfigError(f"{export}: not a model directory; create one with asyncrl merge {name} OUT")
    return Target(str(export), run_dir)


def check_order(options: argparse.Namespace) -> None:
    """Raise ConfigError if a key stands in place of the model. The error explains keys of other tools."""
    if "=" in options.model and not os.path.exists(options.model):
        unknown = unknown_keys([options.model, *options.overrides])
        raise unknown or ConfigError(
            f"{options.model}: name the model first, then KEY=VALUE (asyncrl eval MODEL KEY=VALUE …)"
        )


def unknown_keys(arguments: Sequence[str]) -> ConfigError | None:
    """Return an error that describes unknown keys; None if all keys are known."""
    return refused_keys([word for word in arguments if word.partition("=")[0] not in (*ALIASES, "out")])


def configuration(target: Target, options: argparse.Namespace) -> RunConfig:
    """Make the configuration of an evaluation: keys of training have their defaults, and the name of the run
    identifies the model and the settings."""
    pairs = (argument.partition("=") for argument in options.overrides)
    arguments = [ALIASES.get(key, key) + equals + value for key, equals, value in pairs]

    fixed_overrides = [override("model.path", target.model), "total_steps=0"]
    values = {**options.values, "total_steps": 0}
    values["model"] = {**values.get("model", {}), "path": target.model}
    if target.run_dir is not None:
        fixed_overrides += [override("run_dir", options.run_dir)]
        values["run_dir"] = str(options.run_dir)
        config = recompose(target.run_dir, [ALL_SAMPLES, *arguments, *fixed_overrides], values)
    else:
        base_overrides = [ALL_SAMPLES, "data.train=-", override("run_dir", options.run_dir)]
        config = compose([*base_overrides, *arguments, *fixed_overrides], options.config_dir, values)

    if not config.data.test:
        raise ConfigError(
            "data.test: no data to evaluate on; set data=FILE, with the same columns as for asyncrl train"
        )
    if config.agents:
        raise ConfigError(
            "agents: the model exported with a checkpoint does not contain the agents' adapters; see "
            "val-core/ in the run's metrics instead"
        )

    from asyncrl.algorithms.recipe import imitates
    from asyncrl.launch.models import resolve_models
    from asyncrl.launch.run_directory import previous_config

    # Keys of training must not change the name of the run.
    config = replace(
        config,
        data=replace(config.data, train=config.data.test, shuffle=False, order="", epochs=0),
        model=replace(config.model, lora_rank=0),
        algorithm=config.algorithm if imitates(config) else training.AlgorithmConfig(),
        buffer=training.BufferConfig(groups_per_batch=1),
        trainer=training.TrainerConfig(),
        kl=training.KLConfig(),
        critic=training.CriticConfig(),
        checkpoint=training.CheckpointConfig(),
        weights=replace(config.weights, transport="disk", full_every=1),
    )
    config = resolve_models(config, previous_config(config))

    if "name" not in values and not any(argument.startswith("name=") for argument in arguments):
        path_parts = Path(target.model).parts
        stem = (
            f"{path_parts[-4]}-{path_parts[-2]}"
            if path_parts[-1] == "hf" and len(path_parts) > 3
            else path_parts[-1]
        )
        stem = "".join(character if character.isprintable() else "-" for character in stem)
        stem = stem.encode()[:STEM_BYTES].decode(errors="ignore")
        config = replace(config, name=f"eval-{stem}-{fingerprint(config)}", resume="auto")
    return config


def fingerprint(config: RunConfig) -> str:
    """Hash the settings of episodes, and name, size and time of their files: weights, data, plug-ins."""
    from asyncrl.data.sources import named_files, source_paths
    from asyncrl.weights.model_files import weight_files

    plugins = texts(msgspec.to_builtins(config.rollout))
    plugin_files = [plugin.rpartition(":")[0] or plugin for plugin in plugins]  # FILE.py:function
    data = [name for path in source_paths(config.data, "test") for name in named_files(path)]
    used_files = {*map(str, weight_files(config.model.path)), *data, *plugin_files}

    file_stats = [
        (os.path.basename(file), os.stat(file)) for file in sorted(used_files) if os.path.isfile(file)
    ]
    file_times = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in file_stats]
    return blake2s(msgspec.json.encode((config.held_out_settings, file_times)), digest_size=4).hexdigest()


class Result(NamedTuple):
    """A finished evaluation."""

    run_dir: Path
    data: str  # fingerprint of the samples
    episodes: list[JudgedEpisode]
    numbers: NumbersPerSample
    tasks: dict[str, dict[str, float]]  # `success` and `pass@k` of each task, by name

    @classmethod
    def read(cls, run_dir: Path) -> Result:
        """Read the evaluation from its run. Raises StoreError and ConfigError."""
        from asyncrl.data.tasks import task_of
        from asyncrl.episodes.recorded import evaluated

        samples, episodes = evaluated(run_dir)
        numbers = numbers_per_sample(episodes, threshold_of(read_config(run_dir), episodes))

        rows = sorted({episode.identity.row for episode in episodes})
        samples_by_row = {row: samples[row] for row in rows}
        tasks = {
            row: (sample.data_source, task.name)
            for row, sample in samples_by_row.items()
            if (task := task_of(sample))
        }
        return cls(run_dir, samples.fingerprint, episodes, numbers, by_task(tasks, numbers))


def by_task(tasks: dict[int, tuple[str, str]], numbers: NumbersPerSample) -> dict[str, dict[str, float]]:
    """Return `success` and `pass@k` of samples, by the names of their tasks; tasks with the same name are
    distinguished by source and row. `tasks`: source and name by row."""
    name_counts = Counter(name for _, name in tasks.values())
    solved_metrics = {
        name_match[1]: numbers[name] for name in numbers if (name_match := SOLVED.fullmatch(name))
    }
    return {
        name if name_counts[name] == 1 else f"{source}/{name}#{row}": {
            metric: values[row] for metric, values in solved_metrics.items() if row in values
        }
        for row, (source, name) in tasks.items()
    }


def write_result(result: Result, baseline: Result | None = None) -> dict[str, dict[str, Any]]:
    """Write evaluation.json in the run's directory, and return the numbers of the table."""
    if baseline is not None and baseline.data != result.data:
        raise ConfigError(
            f"{baseline.run_dir} and {result.run_dir} were evaluated on different samples; use the same "
            "data=…"
        )

    metrics = summarize_metrics(result.numbers, baseline.numbers if baseline else {})
    extra_values = mean_sizes(result.episodes) | mean_losses(result.episodes)
    for task, values in result.tasks.items():
        extra_values |= {f"val-task/{task}/{name}": value for name, value in values.items()}
    written_metrics = {**metrics, **{name: {"mean": value} for name, value in extra_values.items()}}

    (result.run_dir / EVALUATION).write_bytes(
        msgspec.json.format(msgspec.json.encode(written_metrics), indent=2) + b"\n"
    )
    return metrics


def print_result(result: Result, baseline: Result | None = None) -> None:
    """Write the numbers of an evaluation, and print the table."""
    metrics = write_result(result, baseline)
    shown_names = [name for name in metrics if name.startswith("val-core/")]
    if len({episode.source for episode in result.episodes}) == 1:  # `all` would repeat the only source
        shown_names = [name for name in shown_names if not name.startswith("val-core/all/")]

    lines: list[tuple[str, ...]] = [("", *COLUMNS[: 5 if baseline else 3])]
    for name in shown_names:
        if name.endswith("/mean@1") and name.replace("/mean@1", "/pass@2") in metrics:
            continue  # `mean@1` would repeat `mean@k`.

        numbers = metrics[name]
        interval_text = f"{numbers['low']:.4f} to {numbers['high']:.4f}"
        cells = [f"{numbers['mean']:.4f}", interval_text, str(numbers["samples"])]
        if "difference" in numbers:
            interval_text = f"{numbers['difference_low']:+.4f} to {numbers['difference_high']:+.4f}"
            cells += [f"{numbers['difference']:+.4f}", interval_text]
        lines.append((name.removeprefix("val-core/"), *cells))

    lines += [
        (name.removeprefix("val-core/"), f"{value:.4f}")
        for name, value in mean_losses(result.episodes).items()
    ]

    if result.tasks:
        columns = sorted(set().union(*result.tasks.values()))
        lines += [(), ("task", *columns)]
        for task, values in result.tasks.items():
            lines.append((task, *(f"{values[name]:.4f}" if name in values else "" for name in columns)))

    width = max(len(line[0]) for line in filter(None, lines))
    for first, *line_cells in (line or ("",) for line in lines):
        print(printable(" ".join((f"{first:<{width}}", *(f"{cell:>18}" for cell in line_cells))).rstrip()))

    if failed := sum(episode.result is None for episode in result.episodes):
        print(f"{failed} of {len(result.episodes)} episodes failed in every attempt")
    print(f"run: {result.run_dir.absolute()}")


def summarize_metrics(numbers: NumbersPerSample, baseline: NumbersPerSample) -> dict[str, dict[str, Any]]:
    """Return by metric: `mean`, `low`, `high`, `samples`; if the baseline has the metric, too, also
    `difference`, `difference_low`, `difference_high` over the samples that both runs have."""
    metrics: dict[str, dict[str, Any]] = {}
    for (name, mean), values in zip(sample_means(numbers).items(), numbers.values(), strict=True):
        low, high = bootstrap_interval([*values.values()])
        metrics[name] = {"mean": mean, "low": low, "high": high, "samples": len(values)}

        baseline_values = baseline.get(name, {})
        if pairs := [
            values[row] - baseline_values[row] for row in sorted(values.keys() & baseline_values.keys())
        ]:
            low, high = bootstrap_interval(pairs)
            difference = {"difference": sum(pairs) / len(pairs)}
            metrics[name] |= difference | {"difference_low": low, "difference_high": high}
    return dict(sorted(metrics.items()))
