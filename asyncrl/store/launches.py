"""The configurations that a run was launched with, in run.db: config.yaml is what the newest launch reads.

A launch begins at the checkpoint that its trainer resumes from: later steps are trained again. A run begun at
steps 0, 20 and, after a damaged checkpoint, 10 has two: one until step 10, one since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import RunConfig, leaves
from asyncrl.errors import UNDECODABLE, ConfigError, one_line
from asyncrl.store.reader import meta_of
from asyncrl.store.schema import StoreError

KEY = "launches"  # in meta
Tree = Mapping[str, Any]  # a configuration, section by section


class LaunchRecord(msgspec.Struct, frozen=True):
    """`config` is that of the steps after `step`, until the next launch."""

    step: int
    config: dict[str, Any]


decode = msgspec.json.Decoder(list[LaunchRecord]).decode


def launches_of(run_dir: Path) -> list[LaunchRecord]:
    """Oldest first; [] without a run. Where the store has none, cannot be read or is another version's: that
    of config.yaml."""
    config_path = run_dir / "config.yaml"
    recorded_launches = list[LaunchRecord]()
    try:
        recorded_launches = decode(meta_of(run_dir, KEY) or "[]")
    except (StoreError, ConfigError):
        if not config_path.exists():
            raise
    if recorded_launches or not config_path.exists():
        return recorded_launches
    try:
        return [LaunchRecord(0, msgspec.yaml.decode(config_path.read_bytes(), type=dict[str, Any]))]
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(
            f"{config_path}: not readable ({one_line(error)}); restore it, or begin a new run with another name=…"
        ) from None


def at(launches: Sequence[LaunchRecord], step: int) -> LaunchRecord:
    """The launch that trained a step, from 1; for 0, not trained yet, the newest. ConfigError without any."""
    if not launches:
        raise ConfigError("the run has no record of its configuration: run.db and config.yaml are gone")
    return next((launch for launch in reversed(launches) if launch.step < step or not step), launches[0])


def since(launches: Sequence[LaunchRecord], step: int, config: RunConfig) -> list[LaunchRecord]:
    """These, and that all after `step` is trained with `config`."""
    new_launch = LaunchRecord(step, tree(config))
    if launches and launches[-1].step <= step and not differences([launches[-1].config, new_launch.config]):
        return [*launches]
    return [*(launch for launch in launches if launch.step < step), new_launch]


def tree(config: RunConfig) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(config), type=dict[str, Any])


def differences(trees: Sequence[Tree]) -> dict[str, list[Any]]:
    """Keys of which configurations have different values, with the value of each; None: it has no such key.
    Not of those that say where a run is, and how it is begun."""
    flat_configs = [dict(leaves(flat_config)) for flat_config in trees]
    key_names = sorted({name for config in flat_configs for name in config} - {"name", "run_dir", "resume"})
    values = {name: [flat_config.get(name) for flat_config in flat_configs] for name in key_names}
    return {
        name: key_values
        for name, key_values in values.items()
        if any(value != key_values[0] for value in key_values)
    }


def described(old_config: Tree, new_config: Tree) -> str:
    """Return their differences on one line: `seed: 0 → 1, trainer.lr: 1e-05 → 2e-05`."""
    return ", ".join(
        f"{key}: {old_value!s:.60} → {new_value!s:.60}"
        for key, (old_value, new_value) in differences([old_config, new_config]).items()
    )
