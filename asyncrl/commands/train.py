"""`asyncrl train`: trains a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl.commands import command_parser
from asyncrl.config import RunConfig
from asyncrl.config.composition import compose
from asyncrl.errors import MissingKeyError
from asyncrl.registry import search_working_directory

HELP = """\
Train a model. OVERRIDES use Hydra's syntax: key=value, or group=choice for a file in configs/.

  asyncrl train model.path=DIR data.train=FILE.parquet   your own data; the defaults suit 0.5B to 8B models
  asyncrl train experiment=calculator                    a small model learns to use a calculator, on a CPU
  asyncrl train experiment=calculator --dry-run          check everything; print the plan
  asyncrl train experiment=calculator name=first total_steps=20                a short run in runs/first
  asyncrl train experiment=calculator name=first total_steps=40 resume=auto    continue that run
  asyncrl train --config-dir mine experiment=maze        read mine/experiment/maze.yaml

Add to any of these:
  buffer.max_staleness=0                                 train synchronously
  algorithm=rloo rollout.workers=2 trainer.ranks=2
  launch=ray launch.ray_address=auto                     run the roles as Ray actors

Common keys (docs/reference/configuration.md lists all keys with their bounds and meanings):
  name, run_dir, resume        location of the run; resume=auto continues from the last checkpoint
  total_steps, seed            batches to train on; seed for data order and sampling
  model.path, data.train       a Hugging Face model directory or hub repository; data with verl's columns
  data.columns                 for other column names: 'data.columns={prompt: question, ground_truth: answer}'
  rollout.tools, rollout.reward        names, module:function or file.py:function
  buffer.max_staleness         maximum lag of every token trained on; 0 is synchronous
  trainer.lr, trainer.ranks, rollout.workers, rollout.slots
"""

BEGIN = """\
asyncrl: model.path is not set. Three ways to start:

  the demo, on a CPU           make demo, or: asyncrl train experiment=calculator
  your own model and data      asyncrl train model.path=DIR data.train=FILE.parquet
  an example to start from     asyncrl train --config-dir examples/multiturn/search_qa experiment=search_qa

docs/reference/configuration.md lists all keys, and examples/multiturn/README.md lists all examples."""


def main(
    argv: list[str],
    compose: Callable[[list[str], Path | None], RunConfig] = compose,
    name: str = "train",
    help_text: str = HELP,
    no_model_text: str = BEGIN,
) -> int:
    """Parse the arguments, compose the configuration and train. Exit code 2 without a model."""
    parser = command_parser(name, help_text, run_dir_help="")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="key=value or group=choice")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything (downloads a hub model if needed) and print the plan; start nothing",
    )
    parser.add_argument("--config-dir", type=Path, help="directory with your own configuration groups")
    options = parser.parse_intermixed_args(argv)

    try:
        config = compose(options.overrides, options.config_dir)
    except MissingKeyError as error:
        if error.key != "model.path":
            raise
        print(no_model_text, file=sys.stderr)
        return 2

    search_working_directory()
    from asyncrl.launch.start import train

    return train(config, dry_run=options.dry_run)
