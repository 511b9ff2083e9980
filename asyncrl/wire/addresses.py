"""Addresses of this machine, as the processes of a run dial them, and names of process starts.

The starts of one launch are in order: what a dead process sent can arrive after its successor's first
message, and must not be taken for the newer one's.
"""

from __future__ import annotations

import socket

EVERY_ADDRESS = "0.0.0.0"


def own_address() -> str:
    """This machine's address on the default route; a loopback one without any."""
    try:
        return local_address("tcp://192.0.2.1:9")  # an address for documentation: nobody has it
    except OSError:
        return "127.0.0.1"


def bound(endpoint: str, host: str) -> str:
    """The address to which the coordinator binds for an endpoint."""
    return f"tcp://{EVERY_ADDRESS}:{endpoint.rpartition(':')[2]}" if host == EVERY_ADDRESS else endpoint


def local_address(endpoint: str) -> str:
    """This machine's address on the way to `endpoint`: peers of the coordinator come the same way."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def is_here(endpoint: str) -> bool:
    """True when `endpoint` is of this machine."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return local_address(endpoint) == socket.gethostbyname(host)


def incarnation_of(launch: str, start: int) -> str:
    """The name of the start number `start` within a launch."""
    return f"{launch}.{start}"


def launch_of(incarnation: str) -> str:
    """The launch that a process was started by; "" of a name in another form."""
    return incarnation.rpartition(".")[0]


def is_older(one: str, other: str) -> bool:
    """True if `one` was started before `other` in the same launch. Any text may come: int() would raise for
    thousands of digits."""
    (launch, _, start), (its, _, later) = one.rpartition("."), other.rpartition(".")
    numbers = start.isdecimal() and later.isdecimal()
    return launch == its and numbers and (len(start), start) < (len(later), later)
