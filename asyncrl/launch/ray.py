"""Roles as Ray actors. The only importer of ray.

Ray places and starts; it never restarts (max_restarts=0, max_task_retries=0): the supervisor does, as for
local processes, and a stop goes through the control socket, since `ray.kill` skips every clean-up.

    launcher's machine: launcher, coordinator, trainer rank 0, run directory ◄── logs and timelines
    the others:         engines, workers, more ranks; an agent ──────────────────────┘

Processes elsewhere read published weights, so with several machines `weights.directory` is a path that all of
them share.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, one_line
from asyncrl.launch.nodes import FetchedFiles, Node, WrittenFiles, check_nodes, gpus_of, named_secrets, stays
from asyncrl.launch.placement import TRAINER, RolePlace, Unit, environment, plan
from asyncrl.launch.process import BAD_INPUT, ProcessSpec, log_path
from asyncrl.launch.role import execute, set_up_logging
from asyncrl.launch.run_directory import run_directory
from asyncrl.wire.sockets import Endpoints

log = logging.getLogger("asyncrl.launch")

KILLED = -9
CONNECT_SECONDS = 5.0
FETCH_EVERY, FETCH_SECONDS = 2.0, 3.0  # between two looks at a machine; deadline of a look
PLACED_SECONDS = 20.0  # after which it is said that a role waits for a machine


class RoleActor:
    """One role in an actor of its own."""

    def node(self) -> str:
        """Where it is."""
        return str(ray.get_runtime_context().get_node_id())

    def run(
        self, order: ProcessSpec, config: RunConfig, endpoints: Endpoints, cwd: str, secrets: dict[str, str]
    ) -> int:
        """The role, in the launcher's directory and with its own log; returns its exit code."""
        redirect_output(log_path(Path(cwd) / run_directory(config), order.place.name))
        set_up_logging()
        try:
            os.chdir(cwd)
        except OSError as error:
            log.error(
                "%s: the launcher's directory %s is not on this machine (%s); start it in one that all have",
                socket.gethostname(),
                cwd,
                error.strerror,
            )
            return BAD_INPUT
        sys.path.insert(0, cwd)
        os.environ.update(secrets)
        place = order.place
        return execute(
            place.target, place.role, config, endpoints, place.index, order.incarnation, order.rendezvous
        )


class RayProcess:
    """An actor and its one long call, which lasts as long as the role runs."""

    def __init__(self, name: str, actor: Any, placed: Any, call: Any, fetch: FileFetcher) -> None:
        self.name, self.placed = name, placed
        self._actor, self._call, self._fetch = actor, call, fetch
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and ray.wait([self._call], timeout=0)[0]:
            try:
                self._code = int(ray.get(self._call))
            except RayError as error:
                self._code = KILLED
                log.warning("%s: %s", self.name, " ".join(str(error).split()))
            if self._code:
                self._fetch.now()  # its last words, for the error message
            ray.kill(self._actor)  # it has returned or is lost: release its process
        return self._code

    def kill(self) -> None:
        ray.kill(self._actor)


class FileFetcher:
    """Brings logs and timelines of all machines into the run directory, in a thread of its own."""

    def __init__(self, run_dir: Path, here: str) -> None:
        self._run_dir, self._here = run_dir, here
        self._started: dict[str, tuple[Any, float]] = {}  # where a role is placed, and since when it waits
        self._agents: dict[str, tuple[Any, FetchedFiles]] = {}  # by machine
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="files of other machines", daemon=True)
        self._thread.start()

    def follow(self, process: RayProcess) -> None:
        self._started[process.name] = process.placed, time.monotonic()

    def now(self) -> None:
        """Fetch what is there. What cannot be fetched in time is left for the next time."""
        with self._lock:
            self._look_for_machines()
            for node, (agent, files) in list(self._agents.items()):
                try:
                    while found := ray.get(agent.after.remote(files.read), timeout=FETCH_SECONDS):
                        files.add(found)
                except GetTimeoutError:
                    log.warning("machine %s does not answer: its logs are late", node[:8])
                except (RayError, OSError) as error:
                    log.warning("logs of machine %s are not fetched any more: %s", node[:8], one_line(error))
                    del self._agents[node]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(FETCH_SECONDS)
        if not self._thread.is_alive():
            self.now()

    def _run(self) -> None:
        while not self._stop.wait(FETCH_EVERY):
            self.now()

    def _look_for_machines(self) -> None:
        """An agent for each machine on which a role was placed since."""
        for name, (placed, since) in list(self._started.items()):
            if not ray.wait([placed], timeout=0)[0]:
                if time.monotonic() - since > PLACED_SECONDS:
                    log.warning("%s waits for Ray to place it: no machine has what it needs, free", name)
                    self._started[name] = placed, float("inf")
                continue
            self._started.pop(name, None)
            try:
                node = ray.get(placed)
            except RayError:
                continue
            if node != self._here and node not in self._agents:
                agent: Any = ray.remote(WrittenFiles).options(  # type: ignore[attr-defined]
                    num_cpus=0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                address = next((one.address for one in machines() if one.id == node), node)
                self._agents[node] = agent.remote(self._run_dir), FetchedFiles(self._run_dir, address)


class RaySpawner:
    """Starts actors on a local or given cluster."""

    def __init__(self, config: RunConfig, endpoints: Endpoints, fetcher: FileFetcher, here: str) -> None:
        self._config, self._endpoints = config, endpoints
        self._fetcher, self._here = fetcher, here
        self._secrets = named_secrets(config)

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, run_dir: Path, endpoints: Endpoints) -> Iterator[RaySpawner]:
        """Connect to `launch.ray_address`, or start a cluster of this machine for as long as this lives."""
        address = config.launch.ray_address
        local = not address
        try:
            reach(address)
            ray.init(
                address=address or None,
                include_dashboard=False if local else None,
                log_to_driver=False,
                configure_logging=False,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"launch.ray_address {address!r}: no Ray cluster ({one_line(error)}); "
                "correct it, or leave it empty to start one here"
            ) from None
        try:
            own, nodes = str(ray.get_runtime_context().get_node_id()), machines()
            check_nodes(config, plan(config), nodes, next(node for node in nodes if node.id == own))
            fetcher = FileFetcher(run_dir.absolute(), own)
            try:
                yield cls(config, endpoints, fetcher, own)
            finally:
                fetcher.close()
        finally:
            ray.shutdown()

    def __call__(self, order: ProcessSpec) -> RayProcess:
        actor: Any = ray.remote(RoleActor).options(**self._options(order.place)).remote()  # type: ignore[attr-defined]
        given = self._endpoints.given_to(order.place.role)  # by Ray's own channel: runtime_env is logged
        placed = actor.node.remote()
        call = actor.run.remote(order, self._config, given, os.getcwd(), self._secrets)
        process = RayProcess(order.place.name, actor, placed, call, self._fetcher)
        self._fetcher.follow(process)
        return process

    def rendezvous(self, unit: Unit, incarnation: str) -> str:
        """A free port of this node, where rank 0 is."""
        if len(unit.places) == 1:
            return ""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def _options(self, place: RolePlace) -> dict[str, Any]:
        """CPUs are not reserved: on one machine the roles share cores."""
        gpus = gpus_of(self._config, place) if ray.cluster_resources().get("GPU", 0) else 0
        return {
            "num_cpus": 0,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": self._strategy(place, gpus),
            "runtime_env": {"env_vars": environment(place)},
        }

    def _strategy(self, place: RolePlace, gpus: int) -> Any:
        """Ranks fill this machine first, as they talk most. What needs no GPU goes to the machines in turn,
        the others first: Ray's SPREAD looks at what is reserved."""
        if place.role == TRAINER or stays(place):
            return NodeAffinitySchedulingStrategy(self._here, soft=not stays(place))
        if gpus:
            return "SPREAD"
        there = sorted(machines(), key=lambda node: (node.id == self._here, node.address))
        return NodeAffinitySchedulingStrategy(there[place.index % len(there)].id, soft=True)


def machines() -> list[Node]:
    """Those of the cluster that are there."""
    return [
        Node(one["NodeID"], one["NodeManagerAddress"], int(one["Resources"].get("GPU", 0)))
        for one in ray.nodes()
        if one["Alive"]
    ]


def reach(address: str) -> None:
    """OSError when no server listens at host:port; Ray itself needs minutes to find that out."""
    if found := re.fullmatch(r"(?:ray://)?([^/:]+):(\d+)", address):
        socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS).close()


def redirect_output(path: Path) -> None:
    """Standard output and error of this process, native code included, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
