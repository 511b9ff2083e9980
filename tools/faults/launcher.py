"""`asyncrl train …` whose processes dial the coordinator through proxies: launcher.py DIAL train …

DIAL: `port=port,port=port`, from the coordinator's own ports to those that its peers are told instead. The
launcher itself, which only watches, dials it directly.
"""

from __future__ import annotations

import sys

from asyncrl import cli
from asyncrl.launch.local import LocalSpawner
from asyncrl.launch.placement import COORDINATOR
from asyncrl.launch.process import ProcessSpec


def dial_through(ports: dict[str, str]) -> None:
    """Let roles other than the coordinator be started with these ports in their endpoints."""
    command = LocalSpawner._command

    def through(self: LocalSpawner, order: ProcessSpec) -> list[str]:
        words = command(self, order)
        return words if order.place.role == COORDINATOR else [_changed(word, ports) for word in words]

    LocalSpawner._command = through


def _changed(word: str, ports: dict[str, str]) -> str:
    host, _, port = word.rpartition(":")
    return f"{host}:{ports[port]}" if host.startswith("tcp://") and port in ports else word


if __name__ == "__main__":
    dial_through(dict(pair.split("=") for pair in sys.argv[1].split(",")))
    sys.argv[1:2] = []
    sys.exit(cli.main())
