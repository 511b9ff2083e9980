"""`asyncrl merge CHECKPOINT OUT`: a model directory of a checkpoint, or its adapters by themselves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.commands import command_parser, find_run
from asyncrl.config import read_config
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.store.checkpoints import Checkpoints

HELP = """\
Write a checkpoint as a Hugging Face directory for transformers, SGLang or vLLM, with adapters merged.

  asyncrl merge demo model                                    the newest checkpoint of a run
  asyncrl merge runs/demo/checkpoints/step-200 model          this checkpoint; s3://… works as well
  asyncrl merge demo adapters --adapters apart                only adapters, in PEFT's format; with
                                                              `agents`, one directory per agent

All files are verified against the checksums of the checkpoint."""


def main(argv: list[str]) -> int:
    parser = command_parser("merge", HELP)
    parser.add_argument("checkpoint", help="a checkpoint, or a run")
    parser.add_argument("out", type=Path, help="output directory, which must not exist yet")
    parser.add_argument(
        "--adapters",
        choices=("merged", "apart"),
        default="merged",
        help="merge adapters into the model, or write only the adapters",
    )
    options = parser.parse_args(argv)

    if options.out.exists():
        raise ConfigError(f"{options.out}: already exists; choose another directory, or delete it")

    checkpoints, step, run_dir = find_checkpoint(options.checkpoint, options.run_dir)
    if damage := checkpoints.find_damage(step):
        raise ConfigError(f"{checkpoints.file_path(step)}: the checkpoint cannot be used: {damage}")

    work_directory = options.out.with_name(f"{options.out.name}.writing")
    shutil.rmtree(work_directory, ignore_errors=True)  # left by a command that was killed
    work_directory.mkdir(parents=True)
    try:
        if options.adapters == "merged" and run_dir is not None and read_config(run_dir).agents:
            raise ConfigError(f"{options.checkpoint}: each agent has its own adapter; add --adapters apart")
        if options.adapters == "apart":
            if run_dir is None:
                raise ConfigError(
                    f"{checkpoints.file_path(step)}: the run directory is not next to this checkpoint; "
                    "pass the run's name instead"
                )
            from asyncrl.trainer.checkpoint import write_adapters

            write_adapters(checkpoints, step, read_config(run_dir), work_directory)
        else:
            _copy_export(checkpoints, step, work_directory)
        work_directory.rename(options.out)
    finally:
        shutil.rmtree(work_directory, ignore_errors=True)
    print(
        f"{options.out}: wrote the {'adapters' if options.adapters == 'apart' else 'model'} from step {step}"
    )
    return 0


def find_checkpoint(name: str, runs: Path) -> tuple[Checkpoints, int, Path | None]:
    """Return the checkpoints, the step, and the run's directory if known: for a checkpoint by its path or
    URL, or for the newest checkpoint of a run. Raises ConfigError if there is none."""
    from asyncrl.store.checkpoints import Checkpoints, checkpoints_of

    parent, _, last_part = name.rstrip("/").rpartition("/")
    step_text = last_part.removeprefix("step-")

    if last_part.startswith("step-") and step_text.isdigit():
        parent_directory = Path(parent).resolve().parent
        checkpoints = Checkpoints(parent or ".")
        steps = [int(step_text)]
        run_dir = parent_directory if (parent_directory / "config.yaml").is_file() else None
    else:
        run_dir = find_run(runs, name)
        checkpoints = checkpoints_of(read_config(run_dir), run_dir)
        steps = checkpoints.steps()
    if not steps:
        raise ConfigError(f"{checkpoints.root}: no checkpoint found; list the runs with asyncrl runs list")
    return checkpoints, steps[0], run_dir


def _copy_export(checkpoints: Checkpoints, step: int, out: Path) -> None:
    """Copy the merged model, which each checkpoint has (see trainer/export.py), and warn about tensors that
    the model's class does not use. Raises ConfigError if the export does not fit the model."""
    from asyncrl.weights.checkpoint_match import UnknownModelError, check_checkpoint

    export_prefix = "hf/"
    names = [name for name in checkpoints.manifest(step).files if name.startswith(export_prefix)]
    if not names:
        raise ConfigError(
            f"{checkpoints.file_path(step)}: the checkpoint has no model in {export_prefix}; use another "
            "checkpoint"
        )
    for name in names:
        with (
            checkpoints.open_file(step, name) as source,
            (out / name.removeprefix(export_prefix)).open("wb") as target,
        ):
            shutil.copyfileobj(source, target)

    try:
        warning = check_checkpoint(str(out), checkpoints.file_path(step))
    except UnknownModelError as error:  # The run's own files register the class
        warning = str(error)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
