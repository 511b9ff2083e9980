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
Train on conversations: each token that an assistant says in them. OVERRIDES are those of `asyncrl train`.

  asyncrl sft model.path=DIR data.train=FILE.jsonl       a row: {"messages": [{"role": …, "content": …}, …]}
  asyncrl sft model.path=DIR data.train=FILE.parquet data.epochs=3 trainer.lr=2e-5
  asyncrl sft model.path=DIR data.train=FILE.jsonl --dry-run      check everything; print the plan
  asyncrl sft model.path=DIR data.train=FILE.jsonl model.lora_rank=16 trainer.lr=2e-4

Then reinforcement learning from what it wrote:
  asyncrl train model.path=runs/NAME/checkpoints/step-N/hf …

Common keys (all of them: docs/reference/configuration.md; what rows may be: docs/guides/models.md):
  total_steps, data.epochs     batches to train; passes over the data after which the run ends
  buffer.groups_per_batch      conversations per batch
  rollout.max_tokens           longer conversations are left out
  rollout.tools                tools that the prompts show, where the rows have no column `tools`
  data.test, validation.every  conversations, for their loss; prompts, for their rewards as in `asyncrl train`
"""

BEGIN = """\
asyncrl: model.path has no value. Give a model and conversations:

  asyncrl sft model.path=DIR data.train=FILE.jsonl

docs/guides/models.md shows what a row is, and a whole example."""

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
        raise ConfigError(f"asyncrl sft is algorithm=sft; for {other_algorithms[0]} use asyncrl train")
    own_overrides = [argument for argument in overrides if argument != "algorithm=sft"]
    return compose([*PRESET, *own_overrides], config_dir, values)
