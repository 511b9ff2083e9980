"""Plans several machines of one run: which process runs where, which resources each machine needs, and which
secrets travel.

Pure: the plan that `--dry-run` prints for a cluster is the plan that is launched.

    trainer rank 0       the launcher's machine, where the run directory is
    other ranks          the launcher's machine, then as few others as possible: ranks communicate most
    servers              each on the machine with most free GPUs
    without a GPU        the machines in turn, the launcher's last; workers on machines of servers
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
from asyncrl.launch.placement import COORDINATOR, ENGINE, ROLLOUT, SCORER, TRAINER, PlannedProcess, Unit

PLACING_ORDER = (COORDINATOR, TRAINER, ENGINE, SCORER, ROLLOUT)  # Order in which processes choose a machine.
SECRET_KEY_SUFFIX = "key_env"  # Keys with this ending name an environment variable that holds a secret.
VARIABLE_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)")  # Reference to an environment variable in a header.


@dataclass(frozen=True)
class Node:
    """A machine of the cluster. `gpus`: all its GPUs; `free_gpus`: GPUs that were free when the cluster was
    listed; `resources`: names of the node's resources, for pools."""

    id: str
    address: str
    gpus: float = 0
    free_gpus: float = 0
    resources: frozenset[str] = frozenset()


class NodeAssignment:
    """Assigns each process of a run to a machine. Raises ConfigError if the machines have no room for all
    processes."""

    def __init__(
        self, config: RunConfig, units: Iterable[Unit], nodes: Sequence[Node], launcher_node: str
    ) -> None:
        """`launcher_node`: the id of the launcher's machine."""
        self._config = config
        self._launcher_node = launcher_node
        self._cluster_has_gpus = any(node.gpus for node in nodes)
        # GPUs that other runs leave to this run.
        self._free_gpus = {node.id: node.free_gpus for node in nodes}
        self._node_of: dict[str, str] = {}  # node id by process name
        self._processes = [process for unit in units for process in unit.processes]

        for process in sorted(
            self._processes, key=lambda process: (PLACING_ORDER.index(process.role), process.index)
        ):
            if self.choose_node(process, nodes) is None:
                raise ConfigError(self._describe_lack(process, nodes))

    def choose_node(self, process: PlannedProcess, nodes: Sequence[Node]) -> Node | None:
        """Choose a machine for a starting process: its previous machine if that has room, else any other;
        None if no machine has room. A process that must stay on its machine waits for room there."""
        previous_node = self._node_of.pop(process.name, "")
        stays = stays_with_launcher(process)
        pool = self.pool_for(process)

        for node in nodes:
            self._free_gpus.setdefault(node.id, min(node.gpus, node.free_gpus + self._gpus_held(node)))
        fitting_nodes = [
            node
            for node in nodes
            if self._gpus_left(node) >= self.gpus_for(process)
            and (not stays or node.id == self._launcher_node)
            and (not pool or pool in node.resources)
        ] or [node for node in nodes if stays and node.id == previous_node]
        if not fitting_nodes:
            return None

        chosen_node = min(
            fitting_nodes, key=lambda node: (node.id != previous_node, *self._node_cost(process, node))
        )
        self._node_of[process.name] = chosen_node.id
        return chosen_node

    def record_node(self, process: PlannedProcess, node: str) -> None:
        """Record the machine on which Ray has started a process; Ray may have chosen another machine."""
        self._node_of[process.name] = node

    def gpus_for(self, process: PlannedProcess) -> float:
        """Return the GPUs of a process: as `launch.gpus` says, or else one for a rank, `tp` for a server, and
        one for an embedded engine with `model.device=cuda`; none on a cluster without GPUs, unless GPUs are
        asked for."""
        config = self._config
        role = process.role
        for name, gpus in config.launch.gpus.items():
            if name == role:
                return gpus

        cuda = config.model.device == "cuda"
        if role == TRAINER and config.total_steps:
            return int(cuda or (config.model.device == "auto" and self._cluster_has_gpus))
        if role == ROLLOUT:
            return int(cuda and not config.engine.remote)
        return process.gpus if role in (ENGINE, SCORER) and self._cluster_has_gpus else 0

    def pool_for(self, process: PlannedProcess) -> str:
        """Return the resource that the machine of a process must have; '' for none."""
        return next((pool for role, pool in self._config.launch.pools.items() if role == process.role), "")

    def nodes_of(self, role: str) -> set[str]:
        return {self._node_of[process.name] for process in self._processes if process.role == role}

    def describe_nodes(self, nodes: Sequence[Node]) -> list[str]:
        """Return a line for each machine, for people to read."""
        lines = []
        for node in nodes:
            process_names = [
                process.name for process in self._processes if self._node_of[process.name] == node.id
            ]
            gpus_text = (
                f", {node.free_gpus:g} of {node.gpus:g} GPUs free, {self._gpus_held(node):g} for this run"
            )
            launcher_text = " (this machine)" if node.id == self._launcher_node else ""
            lines.append(
                f"{node.address}{launcher_text}{gpus_text if node.gpus else ''}: "
                f"{', '.join(process_names) or 'nothing'}"
            )
        return lines

    def _gpus_left(self, node: Node) -> float:
        """Return the GPUs left, rounded to the fraction that Ray counts: 1 - 0.8 is less than 0.2."""
        return round(self._free_gpus[node.id] - self._gpus_held(node), 4)

    def _gpus_held(self, node: Node) -> float:
        return sum(
            self.gpus_for(process)
            for process in self._processes
            if self._node_of.get(process.name) == node.id
        )

    def _node_cost(self, process: PlannedProcess, node: Node) -> tuple[Any, ...]:
        """Return the cost of placing a process on a machine that has room; the least cost is chosen."""
        is_remote = node.id != self._launcher_node
        gpus_left = self._gpus_left(node)
        role_counts = Counter(
            self._node_of[other_process.name]
            for other_process in self._processes
            if other_process.role == process.role and other_process.name in self._node_of
        )

        if process.role == TRAINER:
            return is_remote, not role_counts[node.id], -gpus_left, node.address
        if self.gpus_for(process):
            return -gpus_left, not is_remote, node.address
        uses_servers = self._config.engine.remote and process.role == ROLLOUT
        has_server = uses_servers and any(
            other_process.role == ENGINE and self._node_of.get(other_process.name) == node.id
            for other_process in self._processes
        )
        return uses_servers and not has_server, role_counts[node.id], not is_remote, node.address

    def _describe_lack(self, process: PlannedProcess, nodes: Sequence[Node]) -> str:
        """Explain which resources the machines lack, and how to correct this."""
        wanted_gpus = self.gpus_for(process)
        pool = self.pool_for(process)
        if stays_with_launcher(process):
            nodes = [node for node in nodes if node.id == self._launcher_node]
            where_text = "the launcher's machine"
            advice = "start asyncrl on another machine"
        else:
            where_text = "one machine"
            advice = "change trainer.ranks or the keys servers and tp of engine and scorers"

        if pool and not any(pool in node.resources for node in nodes):
            return (
                f"launch.pools: {process.name} needs {pool!r} on {where_text}; start Ray on "
                f"that machine with ray start --resources='{{\"{pool}\": 1}}'"
            )

        if pool:
            nodes = [node for node in nodes if pool in node.resources]
            where_text = f"{where_text} with {pool!r}"

        total_gpus = sum(map(self.gpus_for, self._processes))
        gpus_by_role = {
            role: sum(
                self.gpus_for(other_process)
                for other_process in self._processes
                if other_process.role == role
            )
            for role in PLACING_ORDER
        }
        demand_text = ", ".join(f"{role} {count:g}" for role, count in gpus_by_role.items() if count)
        left_text = ", ".join(f"{node.address} {self._gpus_left(node):g} of {node.gpus:g}" for node in nodes)
        return (
            f"{process.name} needs {wanted_gpus:g} GPU{'s' * (wanted_gpus != 1)} on {where_text}, but too "
            f"few are left: {left_text} (the run needs {total_gpus:g}: {demand_text}); {advice}, or set "
            "model.device=cpu"
        )


def stays_with_launcher(process: PlannedProcess) -> bool:
    """Return whether a process must run on the launcher's machine, where the run directory is."""
    return process.role == COORDINATOR or (process.role == TRAINER and process.index == 0)


def check_shared_resources(
    config: RunConfig,
    nodes: Sequence[Node],
    launcher_node: str,
    dialled_host: str,
    assignment: NodeAssignment,
) -> None:
    """Raise ConfigError if processes on these machines could not work together: if only one machine knows the
    coordinator's address, or has the checkpoints. `dialled_host`: the coordinator's host."""
    if len(nodes) < 2:
        return

    if is_loopback(dialled_host):
        own_address = next(node.address for node in nodes if node.id == launcher_node)
        raise ConfigError(
            f"launch.host: {dialled_host} refers to a different machine on each of the "
            f"{len(nodes)} nodes of the cluster; set launch.host={own_address}"
        )

    if len(assignment.nodes_of(TRAINER)) > 1 and not config.checkpoint.directory:
        raise ConfigError(
            "checkpoint.directory: trainer ranks run on several machines; set a path that all these machines "
            "share, or a URL"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host is the machine itself, such as 127.0.0.1 or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def named_secrets(config: RunConfig) -> dict[str, str]:
    """Return the environment variables that the configuration names for API keys, headers and programs, which
    processes on other machines need, too."""
    variable_names = set(_secret_variables(msgspec.to_builtins(config)))
    return {name: os.environ[name] for name in sorted(variable_names) if name in os.environ}


def _secret_variables(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if isinstance(value, str):
                if str(key).endswith(SECRET_KEY_SUFFIX):
                    yield value
                elif key == "env":
                    yield from (name.strip() for name in value.split(","))
                elif key == "headers":
                    yield from VARIABLE_REFERENCE.findall(value)
            yield from _secret_variables(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _secret_variables(value)
