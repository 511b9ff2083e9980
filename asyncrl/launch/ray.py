"""Roles as Ray actors. The only importer of ray.

Ray starts; it never restarts (max_restarts=0, max_task_retries=0): the supervisor does, as for local
processes, and a stop goes through the control socket, since `ray.kill` skips every clean-up. Where a process
goes is decided here (`Placing`); what Ray reserves for it there are its GPUs.

    launcher's machine: launcher, coordinator, trainer rank 0, run directory ◄── logs and timelines
    the others:         engines, workers, more ranks; an agent ──────────────────────┘
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray
from msgspec.structs import replace
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, Failure, one_line, recorded
from asyncrl.launch.nodes import Node, Placing, check_shared, named_secrets
from asyncrl.launch.placement import RolePlace, Unit, environment, processes_of
from asyncrl.launch.process import BAD_INPUT, ProcessSpec, log_path
from asyncrl.launch.role import execute, set_up_logging
from asyncrl.launch.run_directory import run_directory
from asyncrl.launch.written_files import PIECE, FetchedFiles, WrittenFiles, claim, parent_elsewhere
from asyncrl.wire.sockets import Endpoints

log = logging.getLogger("asyncrl.launch")

KILLED = -9
CONNECT_SECONDS = 5.0
FETCH_EVERY, FETCH_SECONDS = 2.0, 5.0  # between two looks at a machine; deadline of a look
PLACED_SECONDS = 20.0  # after which it is said that a process waits for a machine


@dataclass(frozen=True)
class Launch:
    """Tells a process on any machine about its launch, beside its configuration. `here`: the launcher's
    machine; `started`: its file of that name, which names the day of the run."""

    id: str
    here: str
    cwd: str
    started: bytes
    secrets: dict[str, str] = field(repr=False)


class RoleActor:
    """One role in an actor of its own."""

    def node(self) -> tuple[str, str]:
        """Id and address of the machine where it is."""
        return str(ray.get_runtime_context().get_node_id()), ray.util.get_node_ip_address()

    def run(self, order: ProcessSpec, config: RunConfig, endpoints: Endpoints, launch: Launch) -> int:
        """The role, in the launcher's directory and with its own log; returns its exit code. Raises
        ConfigError where this machine lacks what it needs."""
        node, address = self.node()
        config = at_home(config, launch) if node == launch.here else elsewhere(config, launch)
        redirect_output(log_path(run_directory(config), order.place.name))
        set_up_logging()
        os.chdir(launch.cwd)
        sys.path.insert(0, launch.cwd)
        os.environ.update(launch.secrets)
        use_interface_of(address)
        place = order.place
        return execute(
            place.target, place.role, config, endpoints, place.index, order.incarnation, order.rendezvous
        )


def at_home(config: RunConfig, launch: Launch) -> RunConfig:
    """Return the configuration of a process on the launcher's machine."""
    return replace(config, run_dir=str(Path(launch.cwd) / config.run_dir))


def elsewhere(config: RunConfig, launch: Launch) -> RunConfig:
    """Of a process on another machine, which has a run directory of its own. Raises ConfigError."""
    host = socket.gethostname()
    if not Path(launch.cwd).is_dir():
        raise ConfigError(
            f"{host}: the launcher's directory {launch.cwd} is not on this machine; start asyncrl in a "
            "directory that all machines have"
        )
    config = replace(config, run_dir=str(parent_elsewhere(config, launch.cwd, launch.id)))
    try:
        claim(Path(config.run_dir), config.name)
        run_directory(config).mkdir(exist_ok=True)
        (run_directory(config) / "started").write_bytes(launch.started)
    except OSError as error:
        raise ConfigError(f"run_dir: on {host} it cannot be written to ({one_line(error)})") from None
    return config


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
        self.name, self._place = place.name, place
        self._actor, self._placed, self._call = actor, placed, call
        self._run_dir, self._placing, self._files = spawner.run_dir, spawner.placing, spawner.files
        self._since = time.monotonic()
        self._code: int | None = None
        self._fetched: threading.Event | None = None  # its last words, for the error message
        self._until = 0.0

    def poll(self) -> int | None:
        if self._code is None and ray.wait([self._call], timeout=0)[0]:
            self._code = self._result()
            ray.kill(self._actor)  # it has returned or is lost: release its process
            if self._code:
                self._fetched, self._until = self._files.soon(), time.monotonic() + FETCH_SECONDS
        if self._code is None and self._placed is not None:
            self._look()
        if self._fetched is not None and not self._fetched.is_set() and time.monotonic() < self._until:
            return None
        return self._code

    def kill(self) -> None:
        ray.kill(self._actor)

    def _result(self) -> int:
        """The exit code. What Ray or this module knows of a failure goes to the log of the process."""
        try:
            return int(ray.get(self._call))
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            refused = isinstance(cause, ConfigError)
            said = str(cause) if refused else " ".join(str(error).split())
            log.warning("%s: %s", self.name, said)
            path = log_path(self._run_dir, self.name)
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                with path.open("a") as file:
                    file.write(f"{said}\n")
            return BAD_INPUT if refused else KILLED

    def _look(self) -> None:
        """Tell whether it is placed by now."""
        if ray.wait([self._placed], timeout=0)[0]:
            with suppress(RayError):
                node, address = ray.get(self._placed)
                self._files.follow(node, address)
                self._placing.put(self._place, node)
            self._placed = None
        elif time.monotonic() - self._since > PLACED_SECONDS:
            log.warning(
                "%s waits for Ray, %g s by now: is there a machine with the free GPUs that it needs?",
                *(self.name, PLACED_SECONDS),
            )
            self._since = float("inf")


class FileFetcher:
    """Brings logs and timelines of all machines into the run directory, in a thread of its own."""

    def __init__(self, run_dir: Path, parent: Path, here: str) -> None:
        self._written, self._here, self._run_dir = (parent, run_dir.name), here, run_dir
        self._followed: dict[str, str] = {}  # machines: id -> address
        self._fetched: dict[str, FetchedFiles] = {}  # by address: a machine may come back with another id
        self._agents: dict[str, Any] = {}
        self._mute: set[str] = set()  # machines whose logs are late, which was said
        self._asked: list[threading.Event] = []
        self._lock, self._wake, self._closing = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="files of other machines", daemon=True)
        self._thread.start()

    def follow(self, node: str, address: str) -> None:
        """Fetch from this machine, too."""
        if node != self._here:
            with self._lock:
                self._followed[node] = address
                self._fetched.setdefault(address, FetchedFiles(self._run_dir))

    def soon(self) -> threading.Event:
        """Is set once all that is written now was fetched, or could not be."""
        asked = threading.Event()
        with self._lock:
            self._asked.append(asked)
        self._wake.set()
        return asked

    def close(self) -> None:
        """After a last look, within a deadline."""
        self._closing = True
        self._wake.set()
        self._thread.join(FETCH_SECONDS * (1 + len(self._followed)))
        if self._thread.is_alive():
            log.warning("logs of other machines are not complete: a machine does not answer")

    def _run(self) -> None:
        while True:
            self._wake.wait(FETCH_EVERY)
            self._wake.clear()
            last = self._closing
            with self._lock:
                followed, asked, self._asked = dict(self._followed), self._asked, []
            for node, address in followed.items():
                with recorded() as failure:
                    self._fetch(node, self._fetched[address], last)
                if not failure:
                    self._mute.discard(node)
                    continue
                with recorded():  # Ray itself may not answer
                    self._excuse(node, address, failure)
            for event in asked:
                event.set()
            if last:
                return

    def _fetch(self, node: str, files: FetchedFiles, last: bool) -> None:
        """Fetch all that is new there, within a deadline; the `last` time also remove it."""
        if node not in self._agents:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            kind: Any = ray.remote(WrittenFiles)
            actor = kind.options(num_cpus=0, max_restarts=0, scheduling_strategy=there)
            self._agents[node] = actor.remote(*self._written)
        agent = self._agents[node]
        until = time.monotonic() + FETCH_SECONDS

        def answer(call: Any) -> Any:
            return ray.get(call, timeout=max(0.1, until - time.monotonic()))

        more = True
        while more:
            files.add(found := answer(agent.after.remote(files.read)))
            more = any(len(new) == PIECE for new in found.values())
        if last:
            answer(agent.remove.remote())

    def _excuse(self, node: str, address: str, failure: Failure) -> None:
        """Say it once; an agent that is gone is made anew, unless its machine is gone, too."""
        slow = isinstance(failure.error, GetTimeoutError)
        if node not in self._mute:
            self._mute.add(node)
            why = f"no answer within {FETCH_SECONDS:g} s" if slow else failure.line
            log.warning("logs of %s are late: %s", address, why)
        if slow:
            return
        self._agents.pop(node, None)
        if not any(one.id == node for one in machines()):
            with self._lock:
                self._followed.pop(node, None)


class RaySpawner:
    """Starts actors on a local or given cluster."""

    def __init__(
        self, config: RunConfig, endpoints: Endpoints, run_dir: Path, placing: Placing, launch: Launch
    ) -> None:
        self._config, self._endpoints, self.run_dir = config, endpoints, run_dir
        self.placing, self._launch = placing, launch
        parent = parent_elsewhere(config, launch.cwd, launch.id)
        self.files = FileFetcher(run_dir.absolute(), parent, launch.here)

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, run_dir: Path, endpoints: Endpoints) -> Iterator[RaySpawner]:
        """Connect to `launch.ray_address`, or start a cluster of this machine for as long as this lives."""
        with cluster(config) as here:
            nodes, dialled = machines(), urlsplit(endpoints.control).hostname or ""
            placing = Placing(config, processes_of(config), nodes, here)
            check_shared(config, nodes, here, dialled, placing)
            started = (run_dir / "started").read_bytes()
            launch = Launch(secrets.token_hex(6), here, os.getcwd(), started, named_secrets(config))
            spawner = cls(config, endpoints, run_dir, placing, launch)
            try:
                yield spawner
            finally:
                spawner.files.close()

    def __call__(self, order: ProcessSpec) -> RayProcess:
        node = self.placing.choose(order.place, machines())
        if node is not None:
            self.files.follow(node.id, node.address)
        actor: Any = ray.remote(RoleActor).options(**self._options(order.place, node)).remote()  # type: ignore[attr-defined]
        given = self._endpoints.given_to(order.place.role)  # by Ray's own channel: runtime_env is logged
        placed = actor.node.remote()  # an actor makes its calls one after another, and the next one is long
        call = actor.run.remote(order, self._config, given, self._launch)
        return RayProcess(order.place, actor, placed, call, self)

    def rendezvous(self, unit: Unit, incarnation: str) -> str:
        """A free port of this node, where rank 0 is."""
        if len(unit.places) == 1:
            return ""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def _options(self, place: RolePlace, node: Node | None) -> dict[str, Any]:
        """CPUs are not reserved: on one machine the roles share cores. Without a machine that has room, Ray
        waits for one, also for one that joins the cluster."""
        pool = self.placing.pool(place)
        where: Any = "DEFAULT"
        if node is not None:  # soft=True went to others that were just as free
            where = NodeAffinitySchedulingStrategy(node.id, soft=False)
        return {
            "num_cpus": 0,
            "num_gpus": self.placing.gpus(place),
            "resources": {pool: 0.001} if pool else None,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": where,
            "runtime_env": {"env_vars": environment(place)},
        }


@contextmanager
def cluster(config: RunConfig) -> Iterator[str]:
    """Connect to `launch.ray_address`, or start a cluster of this machine; the id of this machine. Raises
    ConfigError."""
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


def redirect_output(path: Path) -> None:
    """Standard output and error of this process, native code included, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
