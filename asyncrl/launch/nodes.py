"""Several machines of one run: where its processes go, what it needs of them, and which secrets travel.

Pure: what `--dry-run` prints for a cluster is what is launched on it.

    trainer rank 0       the launcher's machine, where the run directory is
    other ranks          the launcher's machine, then as few others as possible: they talk most
    servers              each on the machine with most free GPUs
    what needs no GPU    the machines in turn, the launcher's last; workers where servers are
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import COORDINATOR, ENGINE, ROLLOUT, SCORER, TRAINER, RolePlace, Unit

ORDER = (COORDINATOR, TRAINER, ENGINE, SCORER, ROLLOUT)  # in which processes choose a machine
KEY_NAMES = "key_env"  # how the names of keys end whose value is the name of a variable with a secret
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")  # in headers


@dataclass(frozen=True)
class Node:
    """A machine of the cluster. `gpus`: of all; `free`: of those, what nobody had when it was looked at.
    `resources`: names of what it has, for pools."""

    id: str
    address: str
    gpus: float = 0
    free: float = 0
    resources: frozenset[str] = frozenset()


class Placing:
    """Which machine each process of a run has. ConfigError when the machines cannot have them all."""

    def __init__(self, config: RunConfig, units: Iterable[Unit], nodes: Sequence[Node], here: str) -> None:
        """`here`: the id of the launcher's machine."""
        self._config = config
        self._here = here
        self._gpus_known = any(node.gpus for node in nodes)
        self._free = {node.id: node.free for node in nodes}  # GPUs that other runs leave to this one
        self._at: dict[str, str] = {}  # id of the machine of each process
        self._places = [place for unit in units for place in unit.places]

        for place in sorted(self._places, key=lambda place: (ORDER.index(place.role), place.index)):
            if self.choose(place, nodes) is None:
                raise ConfigError(self._lack(place, nodes))

    def choose(self, place: RolePlace, nodes: Sequence[Node]) -> Node | None:
        """Choose a machine for a starting process: its previous one if it has room, else any other; None if
        none has room. A process that must stay where it was waits for room there."""
        had = self._at.pop(place.name, "")

        for node in nodes:
            self._free.setdefault(node.id, min(node.gpus, node.free + self._held(node)))
        fitting = [node for node in nodes if self._fits(place, node)]
        fitting = fitting or [node for node in nodes if stays(place) and node.id == had]
        if not fitting:
            return None

        chosen = min(fitting, key=lambda node: (node.id != had, *self._cost(place, node)))
        self._at[place.name] = chosen.id
        return chosen

    def put(self, place: RolePlace, node: str) -> None:
        """Ray has started it there, perhaps by a choice of its own."""
        self._at[place.name] = node

    def gpus(self, place: RolePlace) -> float:
        """As `launch.gpus` says, or else one for a rank and `tp` for a server, and one for an embedded
        engine with `model.device=cuda`; none on a cluster without any, unless they are asked for."""
        config = self._config
        role = place.role
        for name, gpus in config.launch.gpus.items():
            if name == role:
                return gpus

        cuda = config.model.device == "cuda"
        if role == TRAINER and config.total_steps:
            return int(cuda or (config.model.device == "auto" and self._gpus_known))
        if role == ROLLOUT:
            return int(cuda and not config.engine.remote)
        return place.gpus if role in (ENGINE, SCORER) and self._gpus_known else 0

    def pool(self, place: RolePlace) -> str:
        """The resource that its machine must have; '' for none."""
        return next((pool for role, pool in self._config.launch.pools.items() if role == place.role), "")

    def machines(self, role: str) -> set[str]:
        return {self._at[place.name] for place in self._places if place.role == role}

    def describe(self, nodes: Sequence[Node]) -> list[str]:
        """A line for each machine, for a person to read."""
        lines = []
        for node in nodes:
            mine = [place.name for place in self._places if self._at[place.name] == node.id]
            gpus = f", {node.free:g} of {node.gpus:g} GPUs free, {self._held(node):g} for this run"
            here = " (this machine)" if node.id == self._here else ""
            lines.append(f"{node.address}{here}{gpus * bool(node.gpus)}: {', '.join(mine) or 'nothing'}")
        return lines

    def _fits(self, place: RolePlace, node: Node) -> bool:
        pool = self.pool(place)
        room = self._left(node) >= self.gpus(place)
        return room and (not stays(place) or node.id == self._here) and (not pool or pool in node.resources)

    def _left(self, node: Node) -> float:
        """GPUs, to the fraction that Ray counts: 1 - 0.8 is less than 0.2."""
        return round(self._free[node.id] - self._held(node), 4)

    def _held(self, node: Node) -> float:
        return sum(self.gpus(place) for place in self._places if self._at.get(place.name) == node.id)

    def _cost(self, place: RolePlace, node: Node) -> tuple[Any, ...]:
        """Return the cost of a machine that fits; the least is chosen."""
        away = node.id != self._here
        left = self._left(node)
        mine = Counter(
            self._at[one.name] for one in self._places if one.role == place.role and one.name in self._at
        )

        if place.role == TRAINER:
            return away, not mine[node.id], -left, node.address
        if self.gpus(place):
            return -left, not away, node.address
        servers = self._config.engine.remote and place.role == ROLLOUT
        beside = servers and any(
            one.role == ENGINE and self._at.get(one.name) == node.id for one in self._places
        )
        return servers and not beside, mine[node.id], not away, node.address

    def _lack(self, place: RolePlace, nodes: Sequence[Node]) -> str:
        """Say what the machines lack, and what to do."""
        wants = self.gpus(place)
        pool = self.pool(place)
        if stays(place):
            nodes = [node for node in nodes if node.id == self._here]
            where = "the launcher's machine"
            advice = "start asyncrl on another one"
        else:
            where = "one machine"
            advice = "change trainer.ranks, or servers or tp of engine and scorers"

        if pool and not any(pool in node.resources for node in nodes):
            return (
                f"launch.pools: {place.name} needs {pool!r}, which {where} must have; start Ray "
                f"there with ray start --resources='{{\"{pool}\": 1}}'"
            )

        if pool:
            nodes = [node for node in nodes if pool in node.resources]
            where = f"{where} with {pool!r}"

        total = sum(map(self.gpus, self._places))
        sums = {role: sum(self.gpus(one) for one in self._places if one.role == role) for role in ORDER}
        listed = ", ".join(f"{role} {count:g}" for role, count in sums.items() if count)
        left = ", ".join(f"{node.address} {self._left(node):g} of {node.gpus:g}" for node in nodes)
        return (
            f"{place.name} needs {wants:g} GPU(s) of {where}, and there is left: {left} (the run needs "
            f"{total:g}: {listed}); {advice}, or model.device=cpu"
        )


def stays(place: RolePlace) -> bool:
    """On the launcher's machine, where the run directory is."""
    return place.role == COORDINATOR or (place.role == TRAINER and place.index == 0)


def check_shared(config: RunConfig, nodes: Sequence[Node], here: str, dialled: str, placing: Placing) -> None:
    """ConfigError where processes on these machines could not work together: an address that only one of them
    knows, checkpoints that only one of them has. `dialled`: the coordinator's host."""
    if len(nodes) < 2:
        return

    if is_loopback(dialled):
        own = next(node.address for node in nodes if node.id == here)
        raise ConfigError(
            f"launch.host: {dialled} is another machine on each of the {len(nodes)} of the cluster; set "
            f"launch.host={own}"
        )

    if len(placing.machines(TRAINER)) > 1 and not config.checkpoint.directory:
        raise ConfigError(
            "checkpoint.directory: trainer ranks are on several machines; set it to a path that all of them "
            "share, or to a URL"
        )


def is_loopback(host: str) -> bool:
    """True for an address or a name of the machine itself, such as 127.0.0.1 or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def named_secrets(config: RunConfig) -> dict[str, str]:
    """Variables that the configuration names as those of API keys, of headers and of programs, which
    processes elsewhere need too."""
    names = set(_named(msgspec.to_builtins(config)))
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def _named(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if isinstance(value, str):
                if str(key).endswith(KEY_NAMES):
                    yield value
                elif key == "env":
                    yield from (name.strip() for name in value.split(","))
                elif key == "headers":
                    yield from VARIABLE.findall(value)
            yield from _named(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _named(value)
