"""The configurations that a run was launched with, in run.db; config.yaml is the configuration of the next
launch.

A launch begins at the checkpoint from which the trainer resumes: later steps are trained again. A run that
was launched at steps 0, 20 and, after a damaged checkpoint, 10 has two launches: until step 10, and since
step 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import RunConfig, leaves
from asyncrl.errors import UNDECODABLE, ConfigError, one_line
from asyncrl.store.reader import read_meta
from asyncrl.store.schema import StoreError

LAUNCHES_KEY = "launches"  # key in meta
Tree = Mapping[str, Any]  # a configuration, section by section


class LaunchRecord(msgspec.Struct, frozen=True):
    """A launch: `config` applies to the steps from `first_step` on, until the next launch. `step`: the step
    before, whose checkpoint the launch began with."""

    step: int
    config: dict[str, Any]

    @property
    def first_step(self) -> int:
        return self.step + 1


decode_launches = msgspec.json.Decoder(list[LaunchRecord]).decode


def launches_of(run_dir: Path) -> list[LaunchRecord]:
    """Return the launches of a run, oldest first; [] without a run. If the store has no launches, cannot be
    read or has another version's schema, config.yaml counts as the only launch."""
    config_path = run_dir / "config.yaml"
    recorded_launches = list[LaunchRecord]()
    try:
        recorded_launches = decode_launches(read_meta(run_dir, LAUNCHES_KEY) or "[]")
    except (StoreError, ConfigError):
        if not config_path.exists():
            raise

    if recorded_launches or not config_path.exists():
        return recorded_launches

    try:
        return [LaunchRecord(0, msgspec.yaml.decode(config_path.read_bytes(), type=dict[str, Any]))]
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(
            f"{config_path}: not readable ({one_line(error)}); restore the file, or start a new run with "
            "another name=…"
        ) from None


def launch_at(launches: Sequence[LaunchRecord], step: int) -> LaunchRecord:
    """Return the launch that trained a step, or the newest launch for 0 and NO_STEP: not trained yet.
    ConfigError without launches."""
    if not launches:
        raise ConfigError("the run has no record of its configuration: run.db and config.yaml are missing")
    return next((launch for launch in reversed(launches) if launch.step < step or step < 1), launches[0])


def with_launch(launches: Sequence[LaunchRecord], step: int, config: RunConfig) -> list[LaunchRecord]:
    """Return the launches with a record that all steps after `step` are trained with `config`."""
    new_launch = LaunchRecord(step, config_tree(config))
    if launches and launches[-1].step <= step and not differences([launches[-1].config, new_launch.config]):
        return [*launches]
    return [*(launch for launch in launches if launch.step < step), new_launch]


def config_tree(config: RunConfig) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(config), type=dict[str, Any])


def differences(trees: Sequence[Tree]) -> dict[str, list[Any]]:
    """Return the keys whose values differ between configurations, with a value for each configuration; None:
    no such key. Keys that say where a run is stored, and how a run is begun, are left out."""
    flat_configs = [dict(leaves(config)) for config in trees]
    key_names = sorted({name for config in flat_configs for name in config} - {"name", "run_dir", "resume"})
    values = {name: [flat_config.get(name) for flat_config in flat_configs] for name in key_names}
    return {
        name: key_values
        for name, key_values in values.items()
        if any(value != key_values[0] for value in key_values)
    }


def describe_differences(old_config: Tree, new_config: Tree) -> str:
    """Return the differences on one line: `seed: 0 → 1, trainer.lr: 1e-05 → 2e-05`."""
    return ", ".join(
        f"{key}: {old_value!s:.60} → {new_value!s:.60}"
        for key, (old_value, new_value) in differences([old_config, new_config]).items()
    )
