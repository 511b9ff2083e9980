"""Parents of roles as Ray actors. The only importer of ray.

Ray starts; it never restarts (max_restarts=0, max_task_retries=0): the supervisor does, as for local
processes, and a stop goes through the control socket, since `ray.kill` skips every clean-up. Where a process
goes is decided here (`Placing`); what Ray reserves for it there are its GPUs.

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
from asyncrl.launch.joined import LOOK, JoinedProcess, Ticket
from asyncrl.launch.nodes import Node, Placing, check_shared, named_secrets
from asyncrl.launch.placement import RolePlace, Unit, processes_of
from asyncrl.launch.process import BAD_INPUT, LocalSpawner, ProcessSpec, log_path
from asyncrl.launch.run_directory import run_directory
from asyncrl.wire.sockets import Endpoints

log = logging.getLogger("asyncrl.launch")

KILLED = -9
CONNECT_SECONDS = 5.0
PLACED_SECONDS = 20.0  # after which it is said that a process waits for a machine


class RoleActor:
    """Is the parent of one role."""

    def node(self) -> tuple[str, str]:
        """Id and address of the machine where it is."""
        return str(ray.get_runtime_context().get_node_id()), ray.util.get_node_ip_address()

    def run(self, ticket: Ticket, here: str) -> tuple[int, str]:
        """Run the role until it ends, and return what `JoinedProcess.wait` does: on the launcher's machine,
        `here`, as `launch=local` does, elsewhere as a process that has joined. Raises ConfigError where this
        machine lacks what it needs."""
        node, address = self.node()
        use_interface_of(address)
        ticket.enter()

        if node != here:
            return JoinedProcess(ticket).wait()

        process = LocalSpawner(run_directory(ticket.config), ticket.endpoints)(ticket.order)
        while (code := process.poll()) is None:
            time.sleep(LOOK)
        return code, ""


def use_interface_of(address: str) -> None:
    """Let collectives of ranks use the network of the cluster, unless a variable says otherwise: gloo looks
    up the host's name, which is often a loopback address."""
    for name, owned in psutil.net_if_addrs().items():
        if any(one.address == address for one in owned):
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)


class RayProcess:
    """An actor and its one long call, which lasts as long as the role runs."""

    def __init__(self, place: RolePlace, actor: Any, placed: Any, call: Any, spawner: RaySpawner) -> None:
        self.name = place.name
        self._place = place
        self._actor = actor
        self._placed = placed
        self._call = call
        self._log = log_path(spawner.run_dir, place.name)
        self._placing = spawner.placing

        self._since = time.monotonic()
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and ray.wait([self._call], timeout=0)[0]:
            self._code = self._result()
            ray.kill(self._actor)  # it has returned or is lost: release its process

        if self._code is None and self._placed is not None:
            self._look()
        return self._code

    def kill(self) -> None:
        ray.kill(self._actor)

    def _result(self) -> int:
        """Return the exit code. What Ray or this module knows of a failure goes to the log of the process."""
        try:
            code, kept = ray.get(self._call)
            if kept:
                self._say(f"its last lines could not be sent: they are in {kept}, until the next launch")
            return int(code)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            refused = isinstance(cause, ConfigError)
            self._say(str(cause) if refused else " ".join(str(error).split()))
            return BAD_INPUT if refused else KILLED

    def _say(self, text: str) -> None:
        log.warning("%s: %s", self.name, text)
        with suppress(OSError):
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("a") as file:
                file.write(f"{text}\n")

    def _look(self) -> None:
        """Tell whether it is placed by now."""
        if ray.wait([self._placed], timeout=0)[0]:
            with suppress(RayError):
                self._placing.put(self._place, ray.get(self._placed)[0])
            self._placed = None
        elif time.monotonic() - self._since > PLACED_SECONDS:
            log.warning(
                "%s waits for Ray, %g s by now: is there a machine with the free GPUs that it needs?",
                *(self.name, PLACED_SECONDS),
            )
            self._since = float("inf")


class RaySpawner:
    """Starts actors on a local or given cluster. `here`: the launcher's machine."""

    def __init__(
        self, config: RunConfig, endpoints: Endpoints, run_dir: Path, placing: Placing, here: str
    ) -> None:
        self._config = config
        self._endpoints = endpoints
        self.run_dir = run_dir
        self.placing = placing
        self._here = here
        self._started = (run_dir / "started").read_text()
        self._secrets = named_secrets(config)

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, run_dir: Path, endpoints: Endpoints) -> Iterator[RaySpawner]:
        """Connect to `launch.ray_address`, or start a cluster of this machine for as long as this lives."""
        with cluster(config) as here:
            nodes = machines()
            dialled = urlsplit(endpoints.control).hostname or ""
            placing = Placing(config, processes_of(config), nodes, here)
            check_shared(config, nodes, here, dialled, placing)
            yield cls(config, endpoints, run_dir, placing, here)

    def __call__(self, order: ProcessSpec) -> RayProcess:
        place = order.place
        given = self._endpoints.given_to(place.role)
        ticket = Ticket(order, self._config, given, self._started, os.getcwd(), self._secrets)

        actor: Any = ray.remote(RoleActor).options(**self._options(place)).remote()  # type: ignore[attr-defined]
        placed = actor.node.remote()  # an actor makes its calls one after another, and the next one is long
        call = actor.run.remote(ticket, self._here)  # by Ray's own channel: runtime_env is logged
        return RayProcess(place, actor, placed, call, self)

    def rendezvous(self, unit: Unit, incarnation: str) -> str:
        """A free port of this node, where rank 0 is."""
        if len(unit.places) == 1:
            return ""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def _options(self, place: RolePlace) -> dict[str, Any]:
        """CPUs are not reserved: on one machine the roles share cores. Without a machine that has room, Ray
        waits for one, also for one that joins the cluster."""
        pool = self.placing.pool(place)
        where: Any = "DEFAULT"

        if (node := self.placing.choose(place, machines())) is not None:
            # soft=True went to others that were just as free
            where = NodeAffinitySchedulingStrategy(node.id, soft=False)

        return {
            "num_cpus": 0,
            "num_gpus": self.placing.gpus(place),
            "resources": {pool: 0.001} if pool else None,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": where,
        }


@contextmanager
def cluster(config: RunConfig) -> Iterator[str]:
    """Connect to `launch.ray_address`, or start a cluster of this machine; its id. Raises ConfigError."""
    address = config.launch.ray_address
    try:
        reach(address)
        ray.init(
            address=address or "local",  # None: what RAY_ADDRESS names
            include_dashboard=None if address else False,
            log_to_driver=False,
            configure_logging=False,
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"launch.ray_address {address!r}: no Ray cluster ({one_line(error)}); "
            "correct it, or leave it empty to start one here"
        ) from None

    try:
        yield str(ray.get_runtime_context().get_node_id())
    finally:
        ray.shutdown()


def planned(config: RunConfig, host: str) -> list[str]:
    """Say which processes would go where on the cluster now, a line for each machine. Raises ConfigError."""
    with cluster(config) as here:
        nodes = machines()
        placing = Placing(config, processes_of(config), nodes, here)
        check_shared(config, nodes, here, host, placing)
        return placing.describe(nodes)


def machines() -> list[Node]:
    """Return the machines of the cluster that are there, by address."""
    free = available_resources_per_node()
    there = [
        Node(
            one["NodeID"],
            one["NodeManagerAddress"],
            one["Resources"].get("GPU", 0),
            free.get(one["NodeID"], {}).get("GPU", 0),
            frozenset(one["Resources"]),
        )
        for one in ray.nodes()
        if one["Alive"]
    ]

    return sorted(there, key=lambda node: node.address)


def reach(address: str) -> None:
    """OSError when no server listens at host:port; Ray itself needs minutes to find that out."""
    if found := re.fullmatch(r"(?:ray://)?([^/:]+):(\d+)", address):
        socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS).close()
