"""`asyncrl sft`: `asyncrl train` with the preset of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.commands import train
from asyncrl.config import RunConfig
from asyncrl.config.composition import compose
from asyncrl.errors import ConfigError

HELP = """\
Run supervised fine-tuning on the assistant tokens of conversations. OVERRIDES work as in `asyncrl train`.

  asyncrl sft model.path=DIR data.train=FILE.jsonl       a row: {"messages": [{"role": …, "content": …}, …]}
  asyncrl sft model.path=DIR data.train=FILE.parquet data.epochs=3 trainer.lr=2e-5
  asyncrl sft model.path=DIR data.train=FILE.jsonl --dry-run      check everything; print the plan
  asyncrl sft model.path=DIR data.train=FILE.jsonl model.lora_rank=16 trainer.lr=2e-4

Then start reinforcement learning from the trained model:
  asyncrl train model.path=runs/NAME/checkpoints/step-N/hf …

Common keys (docs/reference/configuration.md lists all keys, docs/guides/models.md the row formats):
  total_steps, data.epochs     batches to train on; maximum passes over the data
  buffer.groups_per_batch      conversations per batch
  rollout.max_tokens           longer conversations are left out
  rollout.tools                tools shown in the prompts, if the rows have no `tools` column
  data.test, validation.every  held-out conversations (to measure loss) or prompts (to measure rewards)
"""

BEGIN = """\
asyncrl: model.path is not set. Name a model and conversations:

  asyncrl sft model.path=DIR data.train=FILE.jsonl

docs/guides/models.md shows the row format and a complete example."""

# Experiments for reinforcement learning set the size of groups, and would win over the preset.
PRESET = ["algorithm=sft", "buffer.episodes_per_group=1"]


def main(argv: list[str]) -> int:
    return train.main(argv, compose_sft, name="sft", help_text=HELP, no_model_text=BEGIN)


def compose_sft(overrides: list[str], config_dir: Path | None, values: Mapping[str, Any] = {}) -> RunConfig:
    """Compose the configuration with the preset. Raises ConfigError for another algorithm."""
    if other_algorithms := [
        argument
        for argument in overrides
        if argument.startswith("algorithm=") and argument != "algorithm=sft"
    ]:
        raise ConfigError(f"asyncrl sft sets algorithm=sft; for {other_algorithms[0]}, use asyncrl train")
    own_overrides = [argument for argument in overrides if argument != "algorithm=sft"]
    return compose([*PRESET, *own_overrides], config_dir, values)
