"""Addresses of this machine, as the processes of a run dial them, its listening sockets, and names of starts.

The starts of one launch are in order: what a dead process sent can arrive after its successor's first
message, and must not be taken for the newer one's.

ZeroMQ accepts by itself, and its thread tries without a pause where no descriptor is left. So near the limit
of the process (ulimit -n) its sockets are deaf: the kernel drops the packets of new connections, which are
sent again. What is connected stays, and SPARE descriptors are left to the files of the process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
from contextlib import ExitStack, suppress

from asyncrl.errors import ConfigError

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


# -- listening ---------------------------------------------------------------------------------------------


SPARE = 256  # but at most a quarter of all
WATCH = 10, 100  # milliseconds between two looks at the descriptors; fewer near the limit
FASTEST = 100  # descriptors in a millisecond; ZeroMQ accepts fewer connections
BACKLOG = 64  # connections that a socket may yet accept when it becomes deaf
_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # a filter that lets nothing pass
_FILTER = struct.pack("HP", 1, ctypes.addressof(_NOTHING))
# of socket(7)
ATTACH_FILTER = 26
DETACH_FILTER = 27


class Listeners:
    """Holds all gates of one process. `shortage` names what they wait for; empty while they hear."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self.shortage: list[str] = []

    def open(self, endpoint: str) -> int:
        """Return a socket that listens there; port `*`: a free one."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, 0 if port == "*" else int(port)))
            sock.listen(BACKLOG)
            sock.setblocking(False)
            self._files.append(sock.detach())
        return self._files[-1]

    def watch(self) -> int:
        """Accept connections, or none while descriptors are short. Returns milliseconds to the next call."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        spare = min(SPARE, limit // 4)
        room = 0
        try:
            os.close(lowest := os.open(os.devnull, os.O_RDONLY))  # the lowest number that is free
            room = limit - spare - lowest
            deaf = room <= 0
            if self.shortage:  # there may be gaps below
                deaf = len(os.listdir("/proc/self/fd")) >= limit - 2 * spare
        except OSError:
            deaf = True
        if deaf != bool(self.shortage):
            wait = f"new connections wait: of {limit} open files {spare} are kept for others; raise ulimit -n"
            self.shortage = [wait] if deaf else []
            for file in self._files:
                with suppress(OSError), socket.fromfd(file, socket.AF_INET, socket.SOCK_STREAM) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER if deaf else DETACH_FILTER, _FILTER)
        return max(WATCH[0], min(WATCH[1], room // FASTEST))


def free_ports(host: str, port: int, count: int) -> list[int]:
    """Ports on `host`, from `port` on, or free ones for 0. ConfigError if one is taken."""
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for offset, sock in enumerate(socks):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port + offset if port else 0))
            except OSError as error:
                raise ConfigError(
                    f"launch.host={host} launch.port={port}: cannot bind ({error.strerror}); "
                    "end what uses it, or set launch.port=0 for a free port"
                ) from None
        return [sock.getsockname()[1] for sock in socks]
