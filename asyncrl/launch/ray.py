"""Runs the parents of roles as Ray actors. No other module imports ray.

Ray starts processes and never restarts them (max_restarts=0, max_task_retries=0): the supervisor restarts, as
for local processes. A stop goes through the control socket, since `ray.kill` skips every clean-up. The
machine of a process is decided here (`NodeAssignment`); Ray only reserves the GPUs of the process there.

    launcher's machine: launcher, coordinator, trainer rank 0, run directory
    the others:         engines, workers, more ranks, which have joined (`launch/joined.py`)
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, one_line
from asyncrl.launch.joined import POLL_SECONDS, JoinedProcess, Ticket
from asyncrl.launch.nodes import Node, NodeAssignment, check_shared_resources, named_secrets
from asyncrl.launch.placement import PlannedProcess, Unit, plan_units
from asyncrl.launch.process import BAD_INPUT, LocalSpawner, ProcessSpec, log_path
from asyncrl.launch.run_directory import run_directory
from asyncrl.wire.addresses import EVERY_ADDRESS, reserve_port
from asyncrl.wire.sockets import Endpoints

log = logging.getLogger("asyncrl.launch")

KILLED_CODE = -9
CONNECT_TIMEOUT = 5.0
PLACING_WARNING_SECONDS = 20.0  # Seconds until a warning says that a process waits for a machine.


class RoleActor:
    """A Ray actor that is the parent of one role."""

    def node(self) -> tuple[str, str]:
        """Return the id and the address of the machine on which the actor runs."""
        return str(ray.get_runtime_context().get_node_id()), ray.util.get_node_ip_address()

    def run(self, ticket: Ticket, launcher_node: str) -> tuple[int, str]:
        """Run the role until it ends: on the launcher's machine as `launch=local` does, elsewhere as a joined
        process. Return the same as `JoinedProcess.wait_for_exit`. Raises ConfigError if this machine lacks
        something that the role needs."""
        node, address = self.node()
        use_interface_of(address)
        ticket.enter_directory()

        if node != launcher_node:
            return JoinedProcess(ticket).wait_for_exit()

        process = LocalSpawner(run_directory(ticket.config), ticket.endpoints)(ticket.process_spec)
        while (exit_code := process.poll()) is None:
            time.sleep(POLL_SECONDS)
        return exit_code, ""


def use_interface_of(address: str) -> None:
    """Make collectives of ranks use the network of the cluster, unless a variable says otherwise: gloo looks
    up the host's name, which is often a loopback address."""
    for interface, interface_addresses in psutil.net_if_addrs().items():
        if any(interface_address.address == address for interface_address in interface_addresses):
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


class RayProcess:
    """An actor and its one long call, which lasts as long as the role runs."""

    def __init__(
        self, planned: PlannedProcess, actor: Any, node_call: Any, run_call: Any, spawner: RaySpawner
    ) -> None:
        self.name = planned.name
        self._planned = planned
        self._actor = actor
        self._node_call = node_call
        self._run_call = run_call
        self._log_path = log_path(spawner.run_dir, planned.name)
        self._assignment = spawner.assignment

        self._waiting_since = time.monotonic()
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs. A failure that Ray or this module reports
        goes to the log of the process. Also record the machine of the process once Ray has placed the actor,
        and warn if Ray has not placed the actor for long."""
        if self._exit_code is None and ray.wait([self._run_call], timeout=0)[0]:
            try:
                self._exit_code, kept_at = ray.get(self._run_call)
                if kept_at:
                    self._log_text(
                        f"the last lines of the log could not be sent, but remain in {kept_at} until the "
                        "next launch"
                    )
            except RayError as error:
                cause = error.cause if isinstance(error, RayTaskError) else None
                is_refused = isinstance(cause, ConfigError)
                self._log_text(str(cause) if is_refused else " ".join(str(error).split()))
                self._exit_code = BAD_INPUT if is_refused else KILLED_CODE
            ray.kill(self._actor)  # The call has returned or is lost: release the actor's process

        if self._exit_code is not None or self._node_call is None:
            return self._exit_code

        if ray.wait([self._node_call], timeout=0)[0]:
            with suppress(RayError):
                self._assignment.record_node(self._planned, ray.get(self._node_call)[0])
            self._node_call = None
        elif time.monotonic() - self._waiting_since > PLACING_WARNING_SECONDS:
            log.warning(
                "%s has been waiting for Ray for %g s; check that a machine has enough free GPUs",
                self.name,
                PLACING_WARNING_SECONDS,
            )
            self._waiting_since = float("inf")
        return None

    def kill(self) -> None:
        ray.kill(self._actor)

    def _log_text(self, text: str) -> None:
        log.warning("%s: %s", self.name, text)
        with suppress(OSError):
            self._log_path.parent.mkdir(exist_ok=True)
            with self._log_path.open("a") as file:
                file.write(f"{text}\n")


class RaySpawner:
    """Starts actors on a local or an existing cluster. `launcher_node`: the id of the launcher's machine."""

    def __init__(
        self,
        config: RunConfig,
        endpoints: Endpoints,
        run_dir: Path,
        assignment: NodeAssignment,
        launcher_node: str,
    ) -> None:
        self._config = config
        self._endpoints = endpoints
        self.run_dir = run_dir
        self.assignment = assignment
        self._launcher_node = launcher_node
        self._start_file_text = (run_dir / "started").read_text()
        self._secrets = named_secrets(config)
        self._rendezvous_socket: socket.socket | None = None

    @classmethod
    @contextmanager
    def open_cluster(cls, config: RunConfig, run_dir: Path, endpoints: Endpoints) -> Iterator[RaySpawner]:
        """Connect to `launch.ray_address`, or start a cluster of this machine until the context ends."""
        with connect_cluster(config) as launcher_node:
            nodes = list_nodes()
            dialled_host = urlsplit(endpoints.control).hostname or ""
            assignment = NodeAssignment(config, plan_units(config), nodes, launcher_node)
            check_shared_resources(config, nodes, launcher_node, dialled_host, assignment)
            yield cls(config, endpoints, run_dir, assignment, launcher_node)

    def __call__(self, process_spec: ProcessSpec) -> RayProcess:
        """Start an actor. CPUs are not reserved: on one machine the roles share cores. If no machine has
        room, Ray waits for one, also for a machine that joins the cluster later."""
        planned = process_spec.process
        ticket = Ticket(
            process_spec=process_spec,
            config=self._config,
            endpoints=self._endpoints.for_role(planned.role),
            start_file_text=self._start_file_text,
            working_directory=os.getcwd(),
            secret_variables=self._secrets,
        )

        strategy: Any = "DEFAULT"
        if (node := self.assignment.choose_node(planned, list_nodes())) is not None:
            # With soft=True, Ray chose other machines that were just as free.
            strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)

        pool = self.assignment.pool_for(planned)
        actor_options = {
            "num_cpus": 0,
            "num_gpus": self.assignment.gpus_for(planned),
            "resources": {pool: 0.001} if pool else None,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": strategy,
        }
        actor: Any = ray.remote(RoleActor).options(**actor_options).remote()  # type: ignore[attr-defined]
        # An actor runs its calls one after another, and the call of `run` is long.
        node_call = actor.node.remote()
        # The ticket travels by Ray's own channel, as runtime_env is logged.
        run_call = actor.run.remote(ticket, self._launcher_node)
        return RayProcess(planned, actor, node_call, run_call, self)

    def rendezvous(self, unit: Unit, incarnation: str) -> str:
        """Return the URL of a free port of this machine, on which rank 0 runs; '' for a single process. The
        port stays reserved until the next rendezvous."""
        if len(unit.processes) == 1:
            return ""
        if self._rendezvous_socket is not None:
            self._rendezvous_socket.close()
        self._rendezvous_socket = reserve_port(EVERY_ADDRESS)
        return f"tcp://{ray.util.get_node_ip_address()}:{self._rendezvous_socket.getsockname()[1]}"


@contextmanager
def connect_cluster(config: RunConfig) -> Iterator[str]:
    """Connect to `launch.ray_address`, or start a cluster of this machine. Yield the id of this machine.
    Raises ConfigError."""
    address = config.launch.ray_address
    try:
        # If no server listens at host:port, Ray itself needs minutes to find that out.
        if address_match := re.fullmatch(r"(?:ray://)?([^/:]+):(\d+)", address):
            socket.create_connection((address_match[1], int(address_match[2])), CONNECT_TIMEOUT).close()
        ray.init(
            address=address or "local",  # None would mean the address in RAY_ADDRESS
            include_dashboard=None if address else False,
            log_to_driver=False,
            configure_logging=False,
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"launch.ray_address: cannot connect to a Ray cluster at {address!r} ({one_line(error)}); "
            "correct the address, or clear the key to start a cluster here"
        ) from None

    try:
        yield str(ray.get_runtime_context().get_node_id())
    finally:
        ray.shutdown()


def plan_on_cluster(config: RunConfig, host: str) -> list[str]:
    """Describe which processes would go to which machine of the cluster now, one line per machine. Raises
    ConfigError."""
    with connect_cluster(config) as launcher_node:
        nodes = list_nodes()
        assignment = NodeAssignment(config, plan_units(config), nodes, launcher_node)
        check_shared_resources(config, nodes, launcher_node, host, assignment)
        return assignment.describe_nodes(nodes)


def list_nodes() -> list[Node]:
    """Return the machines of the cluster that are alive, ordered by address."""
    free_resources = available_resources_per_node()
    alive_nodes = [
        Node(
            id=ray_node["NodeID"],
            address=ray_node["NodeManagerAddress"],
            gpus=ray_node["Resources"].get("GPU", 0),
            free_gpus=free_resources.get(ray_node["NodeID"], {}).get("GPU", 0),
            resources=frozenset(ray_node["Resources"]),
        )
        for ray_node in ray.nodes()
        if ray_node["Alive"]
    ]

    return sorted(alive_nodes, key=lambda node: node.address)
