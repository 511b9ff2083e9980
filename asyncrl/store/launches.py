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
    path = run_dir / "config.yaml"
    found = list[LaunchRecord]()
    try:
        found = decode(meta_of(run_dir, KEY) or "[]")
    except (StoreError, ConfigError):
        if not path.exists():
            raise
    if found or not path.exists():
        return found
    try:
        return [LaunchRecord(0, msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any]))]
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(
            f"{path}: not readable ({one_line(error)}); restore it, or begin a new run with another name=…"
        ) from None


def at(launches: Sequence[LaunchRecord], step: int) -> LaunchRecord:
    """The launch that trained a step, from 1; for 0, not trained yet, the newest. ConfigError without any."""
    if not launches:
        raise ConfigError("the run has no record of its configuration: run.db and config.yaml are gone")
    return next((one for one in reversed(launches) if one.step < step or not step), launches[0])


def since(launches: Sequence[LaunchRecord], step: int, config: RunConfig) -> list[LaunchRecord]:
    """These, and that all after `step` is trained with `config`."""
    new = LaunchRecord(step, tree(config))
    if launches and launches[-1].step <= step and not differences([launches[-1].config, new.config]):
        return [*launches]
    return [*(one for one in launches if one.step < step), new]


def tree(config: RunConfig) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(config), type=dict[str, Any])


def differences(trees: Sequence[Tree]) -> dict[str, list[Any]]:
    """Keys of which configurations have different values, with the value of each; None: it has no such key.
    Not of those that say where a run is, and how it is begun."""
    flat = [dict(leaves(one)) for one in trees]
    names = sorted({name for one in flat for name in one} - {"name", "run_dir", "resume"})
    values = {name: [one.get(name) for one in flat] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def described(old: Tree, new: Tree) -> str:
    """Return their differences on one line: `seed: 0 → 1, trainer.lr: 1e-05 → 2e-05`."""
    return ", ".join(f"{key}: {a!s:.60} → {b!s:.60}" for key, (a, b) in differences([old, new]).items())
