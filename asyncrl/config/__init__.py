"""Defines every key of the configuration, with type, bounds and meaning. There is no other definition.

Hydra composes a mapping from `configs/` and the command line; `parse` turns it into a frozen
`RunConfig` or raises ConfigError naming the key. `docs/reference/configuration.md` is generated from this
package: the string under a field is its documentation.
"""

from asyncrl.config.base import Options, Plugin, Section, divisors, leaves, texts, without_defaults
from asyncrl.config.episodes import AgentConfig, EngineConfig, RolloutConfig, ValidationConfig
from asyncrl.config.parsing import parse
from asyncrl.config.run import (
    DataConfig,
    LaunchConfig,
    ModelConfig,
    RunConfig,
    WeightedSource,
    WeightsConfig,
    read_config,
)
from asyncrl.config.scorers import ScorerConfig, loss_has_teacher
from asyncrl.config.training import (
    DIVERGENCE_NAMES,
    BufferConfig,
    CheckpointConfig,
    CriticConfig,
    KLConfig,
    Packing,
    TrainerConfig,
    described_recomputation,
    memory_advice,
)
