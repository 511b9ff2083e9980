"""Role functions for tests of the launcher, and a parent to kill. What they do is told over a datagram
socket, so that a test waits for an event and not for a while.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.launch import placement, session
from asyncrl.launch.process import LocalSpawner
from asyncrl.launch.run_directory import prepare_and_lock
from asyncrl.launch.supervisor import Supervisor
from asyncrl.wire.messages.channels import ToCoordinatorControl
from asyncrl.wire.messages.shared import ObserverHello, RunEnd, Status, Stop, Welcome
from asyncrl.wire.sockets import Endpoints, Gate, Hub, Poller, choose_endpoints

DEADLINE = 60.0


# -- roles -----------------------------------------------------------------------------------------


def coordinator(config: RunConfig, endpoints: Endpoints, incarnation: str) -> int:
    """Answers an observer; ends on Stop."""
    return _coordinate(config, endpoints, incarnation, obey=True)


def deaf_coordinator(config: RunConfig, endpoints: Endpoints, incarnation: str) -> int:
    """Answer an observer, and ignore Stop."""
    return _coordinate(config, endpoints, incarnation, obey=False)


def failing_coordinator(config: RunConfig, endpoints: Endpoints, incarnation: str) -> int:
    """Run a coordinator whose verdict on the run is: failed."""
    return 1


def worker(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str) -> int:
    tell(config, "rollout", index, incarnation)
    return _wait()


def crashing_worker(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str) -> int:
    raise RuntimeError("the worker's own reason")


def refusing_worker(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str) -> int:
    raise ConfigError("rollout.tools: found late; correct it")


def rank(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str, rendezvous: str) -> int:
    tell(config, "trainer", index, incarnation, rendezvous)
    return _wait()


def tell(config: RunConfig, *words: Any) -> None:
    """Send a datagram of the words and this process's pid."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(str(Path(config.run_dir) / "events"))
        sock.send(" ".join(map(str, [*words, os.getpid()])).encode())


def _wait() -> int:
    threading.Event().wait(DEADLINE)
    return 70


def _coordinate(config: RunConfig, endpoints: Endpoints, incarnation: str, obey: bool) -> int:
    gate = Gate(endpoints)
    hub = Hub(endpoints.control, ToCoordinatorControl, gate)
    poller = Poller(hub)
    tell(config, "coordinator", 0, incarnation)

    while True:
        poller.wait(DEADLINE)
        received = hub.receive()
        if received is None:
            return 70

        peer, message, _ = received
        match message:
            case ObserverHello():
                hub.send(peer, Welcome(1, 1, 0))
                hub.send(peer, Status("running", 1, 10, {}, ()))
            case Stop():
                tell(config, "stop", 0, message.reason)
                if obey:
                    hub.send(peer, RunEnd("stopped"))
                    hub.close()
                    gate.close()
                    return 0


# -- the test's side -------------------------------------------------------------------------------


class Events:
    """The other end of `tell`."""

    def __init__(self, run_dir: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(run_dir / "events"))
        self._socket.settimeout(DEADLINE)

    def next(self) -> list[str]:
        return self._socket.recv(4096).decode().split()

    def wait_for(self, *names: str) -> dict[str, list[str]]:
        """Return an event of each name, e.g.

        `rollout`, or several events of a name that is given several times. A later event of a name replaces
        the earlier one.
        """
        events: dict[str, list[str]] = {}
        missing = Counter(names)
        while +missing:
            event = self.next()
            events[event[0]] = event
            missing[event[0]] -= 1

        return {name: events[name] for name in names}

    def close(self) -> None:
        self._socket.close()


def config(run_dir: Path, **launch: Any) -> RunConfig:
    return parse(
        {
            "name": "run",
            "run_dir": str(run_dir),
            "model": {"path": str(run_dir)},
            "data": {"train": "t"},
            "launch": launch,
        }
    )


def units(**targets: str) -> tuple[placement.Unit, ...]:
    """A coordinator, a worker and the trainer's ranks (`ranks`: how many)."""
    ranks = int(targets.pop("ranks", "1"))
    roles = {
        "coordinator": [targets.get("coordinator", "coordinator")],
        "rollout": [targets.get("rollout", "worker")],
        "trainer": ["rank"] * ranks,
    }
    return tuple(
        placement.Unit(
            role,
            tuple(
                placement.PlannedProcess(role, i, 1, f"tests.fakes.launching:{name}")
                for i, name in enumerate(names)
            ),
        )
        for role, names in roles.items()
    )


def only(role: str, **targets: str) -> tuple[placement.Unit, ...]:
    return tuple(unit for unit in units(**targets) if unit.role == role)


def all_gone(pids: list[int], seconds: float = DEADLINE) -> bool:
    """Tell whether all processes have ended by then.

    Not for this process's children, whose exit codes would be lost.
    """
    running = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return not psutil.wait_procs(running, timeout=seconds)[1]


class FirstStatus:
    """A view that tells of the session's first status: from then on there is something to save."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._reported = False

    def show_status(self, *arguments: Any) -> None:
        if not self._reported:
            tell(self._config, "running")
        self._reported = True

    def show_step(self, *arguments: Any) -> None: ...

    def print_note(self, text: str) -> None: ...

    def drop_steps_after(self, step: int) -> None: ...


def parent(run_dir: Path, *pairs: str) -> int:
    """Run a launcher process: a whole session over fake roles, none of which leaves by itself."""
    session.LEAVE_SECONDS = 0.5
    targets = dict(pair.split("=") for pair in pairs)

    settings = config(run_dir, stop_timeout=float(targets.pop("stop_timeout", 10)))
    where = run_dir / settings.name
    with prepare_and_lock(settings):
        endpoints = choose_endpoints("127.0.0.1", 0)
        spawner = LocalSpawner(where, endpoints)
        supervisor = Supervisor(units(**targets), spawner, where, 2, spawner.rendezvous)
        view = FirstStatus(settings)
        session_ = session.Session(settings.launch, where, endpoints, supervisor, view, lambda *_: None)
        ending = session_.run()

    print(ending.error)
    return ending.code


if __name__ == "__main__":
    sys.exit(parent(Path(sys.argv[1]), *sys.argv[2:]))
