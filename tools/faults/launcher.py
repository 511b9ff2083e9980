"""`asyncrl train …` whose processes dial the coordinator through proxies: launcher.py DIAL train …

DIAL: `port=port,port=port`, from the coordinator's own ports to those that its peers are told instead. The
launcher itself, which only watches, dials it directly.
"""

from __future__ import annotations

import sys

from msgspec.structs import replace

from asyncrl import cli
from asyncrl.wire.sockets import COORDINATOR, Endpoints


def dial_through(ports: dict[str, str]) -> None:
    """Start roles other than the coordinator with these ports in their endpoints."""
    given_to = Endpoints.for_role

    def through(self: Endpoints, role: str) -> Endpoints:
        endpoints = given_to(self, role)
        if role == COORDINATOR:
            return endpoints
        return replace(
            endpoints, control=_changed(endpoints.control, ports), bulk=_changed(endpoints.bulk, ports)
        )

    Endpoints.for_role = through


def _changed(endpoint: str, ports: dict[str, str]) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{ports[port]}"


if __name__ == "__main__":
    dial_through(dict(pair.split("=") for pair in sys.argv[1].split(",")))
    sys.argv[1:2] = []
    sys.exit(cli.main())
