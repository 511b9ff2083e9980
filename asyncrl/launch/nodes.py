"""Several machines of one run: what it needs of them, what travels to them, and what is fetched from them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import RunConfig
from asyncrl.errors import UNDECODABLE, ConfigError
from asyncrl.launch.placement import COORDINATOR, ENGINE, ROLLOUT, TRAINER, RolePlace, Unit

FETCHED = ("logs/*.log", "timeline/*.jsonl")  # of a run directory
FETCH_BYTES = 1 << 20  # of a file, at once
ROLES = (ENGINE, ROLLOUT, TRAINER)  # that may use GPUs
KEY_NAMES = "key_env"  # how the names of keys end whose value is the name of a variable with a secret


@dataclass(frozen=True)
class Node:
    """A machine of the cluster. `gpus`: of all, whoever uses them."""

    id: str
    address: str
    gpus: int


def gpus_of(config: RunConfig, place: RolePlace) -> int:
    """One for a rank, `engine.tp` for a server; one for an embedded engine only with `model.device=cuda`."""
    wants = {
        TRAINER: int(config.model.device != "cpu" and config.total_steps > 0),
        ENGINE: place.gpus,
        ROLLOUT: int(config.model.device == "cuda" and not config.engine.remote),
    }
    return wants.get(place.role, 0)


def stays(place: RolePlace) -> bool:
    """On the launcher's machine, where the run directory is. The other ranks go there while it has GPUs."""
    return place.role == COORDINATOR or (place.role == TRAINER and place.index == 0)


def check_nodes(config: RunConfig, units: Iterable[Unit], nodes: Sequence[Node], here: Node) -> None:
    """ConfigError where roles on these machines could not work: an address that only one of them knows,
    weights that only one of them has, GPUs that are not there."""
    if len(nodes) > 1 and is_loopback(config.launch.host):
        raise ConfigError(
            f"launch.host: {config.launch.host} is another machine on each of the {len(nodes)} of the "
            f"cluster; set launch.host={here.address}"
        )
    weights = config.weights
    if len(nodes) > 1 and weights.transport == "disk" and weights.directory in ("auto", "shm", "run"):
        raise ConfigError(
            f"weights.directory: {weights.directory!r} is on one machine, and the cluster has {len(nodes)}; "
            "set it to a path that all of them share"
        )
    if not any(node.gpus for node in nodes):
        return
    wanted = {place.name: gpus_of(config, place) for unit in units for place in unit.places}
    there, most = sum(node.gpus for node in nodes), max(node.gpus for node in nodes)
    if sum(wanted.values()) > there:
        roles = {role: sum(n for name, n in wanted.items() if name.startswith(role)) for role in ROLES}
        listed = ", ".join(f"{role} {count}" for role, count in roles.items() if count)
        raise ConfigError(
            f"the run needs {sum(wanted.values())} GPUs ({listed}), and the cluster has {there}; change "
            "trainer.ranks, engine.servers or engine.tp"
        )
    if max(wanted.values()) > most:
        raise ConfigError(
            f"engine.tp: a server needs {config.engine.tp} GPUs of one machine, which has {most}"
        )


def is_loopback(host: str) -> bool:
    """True for an address or a name of the machine itself, such as 127.0.0.1 or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def named_secrets(config: RunConfig) -> dict[str, str]:
    """Variables that the configuration names as those of API keys, which roles elsewhere need too."""
    names = set(_named(msgspec.to_builtins(config)))
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def _named(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if isinstance(value, str) and value and str(key).endswith(KEY_NAMES):
                yield value
            yield from _named(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _named(value)


class WrittenFiles:
    """What roles of a run have written on this machine."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def after(self, read: Mapping[str, int]) -> dict[str, bytes]:
        """By name what is new of each file, at most FETCH_BYTES of it, where so many bytes of it were read.
        Nothing where the launcher's own directory is visible: then all is there already."""
        if (self._run_dir / "started").exists():
            return {}
        found = {}
        for path in (path for pattern in FETCHED for path in self._run_dir.glob(pattern)):
            name = str(path.relative_to(self._run_dir))
            with path.open("rb") as file:
                file.seek(read.get(name, 0))
                if new := file.read(FETCH_BYTES):
                    found[name] = new
        return found


class FetchedFiles:
    """Appends what was fetched of one machine to the files of the run directory here. How much that was is
    kept for the next launch, as files stay where they are."""

    def __init__(self, run_dir: Path, machine: str) -> None:
        self._run_dir, self._kept = run_dir, run_dir / "fetched" / f"{machine}.json"
        self.read: dict[str, int] = {}
        with suppress(OSError, *UNDECODABLE):
            self.read = msgspec.json.decode(self._kept.read_bytes(), type=dict[str, int])

    def add(self, found: Mapping[str, bytes]) -> None:
        """Names that are no files of roles are left out. Raises OSError."""
        for name, new in found.items():
            if not any(Path(name).match(pattern) for pattern in FETCHED) or len(Path(name).parts) != 2:
                continue
            path = self._run_dir / name
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(new)
            self.read[name] = self.read.get(name, 0) + len(new)
        self._kept.parent.mkdir(exist_ok=True)
        self._kept.write_bytes(msgspec.json.encode(self.read))
