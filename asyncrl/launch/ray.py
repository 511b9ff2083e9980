"""Roles as Ray actors. The only importer of ray.

Ray places and starts; it never restarts (max_restarts=0, max_task_retries=0): the supervisor does, as for
local processes, and a stop goes through the control socket, since `ray.kill` skips every clean-up.

The coordinator and trainer rank 0 stay on the launcher's node: there is the run directory, on a local
disk. Processes elsewhere read published weights, so with several nodes `weights.directory` must be a path
that all nodes share.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, one_line
from asyncrl.launch.placement import COORDINATOR, ENGINE, ROLLOUT, TRAINER, RolePlace, Unit, environment
from asyncrl.launch.process import ProcessSpec, log_path
from asyncrl.launch.role import execute, set_up_logging
from asyncrl.wire.sockets import Endpoints

KILLED = -9
CONNECT_SECONDS = 5.0  # seconds


class RoleActor:
    """One role in an actor of its own."""

    def run(self, order: ProcessSpec, config: RunConfig, endpoints: Endpoints, cwd: str) -> int:
        """The role, in the launcher's directory and with its own log; returns its exit code."""
        os.chdir(cwd)
        sys.path.insert(0, cwd)
        redirect_output(log_path(Path(config.run_dir) / config.name, order.place.name))
        set_up_logging()
        place = order.place
        return execute(
            place.target, place.role, config, endpoints, place.index, order.incarnation, order.rendezvous
        )


class RayProcess:
    """An actor and its one call, which lasts as long as the role runs."""

    def __init__(self, name: str, actor: Any, call: Any) -> None:
        self.name = name
        self._actor, self._call = actor, call
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and ray.wait([self._call], timeout=0)[0]:
            try:
                self._code = int(ray.get(self._call))
            except RayError:
                self._code = KILLED
            ray.kill(self._actor)  # it has returned or is lost: release its process
        return self._code

    def kill(self) -> None:
        ray.kill(self._actor)


class RaySpawner:
    """Starts actors on a local or given cluster."""

    def __init__(self, config: RunConfig, endpoints: Endpoints) -> None:
        self._config, self._endpoints = config, endpoints
        self._here = ray.get_runtime_context().get_node_id()

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
            yield cls(config, endpoints)
        finally:
            ray.shutdown()

    def __call__(self, order: ProcessSpec) -> RayProcess:
        actor: Any = ray.remote(RoleActor).options(**self._options(order.place)).remote()  # type: ignore[attr-defined]
        given = self._endpoints.given_to(order.place.role)  # by Ray's own channel: runtime_env is logged
        call = actor.run.remote(order, self._config, given, os.getcwd())
        return RayProcess(order.place.name, actor, call)

    def rendezvous(self, unit: Unit, incarnation: str) -> str:
        """A free port of this node, where rank 0 is."""
        if len(unit.places) == 1:
            return ""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def _options(self, place: RolePlace) -> dict[str, Any]:
        """CPUs are not reserved: on one machine the roles share cores, on a cluster they spread."""
        here = place.role == COORDINATOR or (place.role == TRAINER and place.index == 0)
        strategy = NodeAffinitySchedulingStrategy(self._here, soft=False) if here else "SPREAD"
        return {
            "num_cpus": 0,
            "num_gpus": self._gpus(place),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": environment(place)},
        }

    def _gpus(self, place: RolePlace) -> int:
        """One for a rank if there are any, `engine.tp` for a server; one for an embedded engine only with
        `model.device=cuda`."""
        if not ray.cluster_resources().get("GPU", 0):
            return 0
        wants = {
            TRAINER: int(self._config.model.device != "cpu" and self._config.total_steps > 0),
            ENGINE: place.gpus,
            ROLLOUT: int(self._config.model.device == "cuda" and not self._config.engine.remote),
        }
        return wants.get(place.role, 0)


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
