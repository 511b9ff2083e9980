"""Addresses of this machine, as the processes of a run dial them, listening sockets, and names of process
starts.

The starts of a launch are ordered: a message of a dead process can arrive after the first message of the
successor, and must not be taken for a newer message.

ZeroMQ accepts connections by itself, and the accepting thread tries without a pause when no descriptor is
left. So near the limit of the process (ulimit -n) the sockets become deaf: the kernel drops the packets of
new connections, and clients send these packets again. Open connections stay, and SPARE_DESCRIPTORS are left
to the files of the process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress

from asyncrl.errors import ConfigError

EVERY_ADDRESS = "0.0.0.0"
MAX_HELD_PORTS = 16
_held_ports: deque[socket.socket] = deque()


def own_address() -> str:
    """Return this machine's address on the default route; a loopback address without a route."""
    try:
        return local_address("tcp://192.0.2.1:9")  # an address for documentation, which no machine has
    except OSError:
        return "127.0.0.1"


def bind_address(endpoint: str, host: str) -> str:
    """Return the address to which the coordinator binds for an endpoint."""
    return f"tcp://{EVERY_ADDRESS}:{endpoint.rpartition(':')[2]}" if host == EVERY_ADDRESS else endpoint


def local_address(endpoint: str) -> str:
    """Return this machine's address on the way to `endpoint`: peers of the coordinator come the same way."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        probe_socket.connect((host, int(port)))  # nothing is sent by a datagram socket
        return str(probe_socket.getsockname()[0])


def is_local_endpoint(endpoint: str) -> bool:
    """Return True when `endpoint` is on this machine."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return local_address(endpoint) == socket.gethostbyname(host)


def incarnation_of(launch: str, start: int) -> str:
    """Return the name of the start number `start` within a launch."""
    return f"{launch}.{start}"


def launch_of(incarnation: str) -> str:
    """Return the launch that started a process; "" for a name in another form."""
    return incarnation.rpartition(".")[0]


def is_older(incarnation: str, other_incarnation: str) -> bool:
    """Return True if `incarnation` was started before `other_incarnation` in the same launch. Any text may
    arrive: int() would raise for thousands of digits."""
    launch, _, start = incarnation.rpartition(".")
    other_launch, _, other_start = other_incarnation.rpartition(".")
    if launch != other_launch or not (start.isdecimal() and other_start.isdecimal()):
        return False
    return (len(start), start) < (len(other_start), other_start)


# -- listening ---------------------------------------------------------------------------------------------


SPARE_DESCRIPTORS = 256  # descriptors for files of the process, but at most a quarter of all descriptors
WATCH_INTERVAL = 10, 100  # shortest and longest milliseconds between two checks of the descriptors
MAX_ACCEPT_RATE = 100  # descriptors in a millisecond; ZeroMQ accepts fewer connections
BACKLOG = 64  # waiting connections, which a deaf socket may still accept
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # a filter that drops every packet
_SOCKET_FILTER = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
# Socket options, see socket(7).
ATTACH_FILTER = 26
DETACH_FILTER = 27


class Listeners:
    """Holds all listening sockets of a process. `shortage` says why the sockets are deaf; empty while new
    connections are accepted."""

    def __init__(self) -> None:
        self._listening: list[int] = []
        self.shortage: list[str] = []

    def open_listener(self, endpoint: str) -> int:
        """Return a socket that listens at the endpoint; port `*`: a free port."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, 0 if port == "*" else int(port)))
            sock.listen(BACKLOG)
            sock.setblocking(False)
            self._listening.append(sock.detach())

        return self._listening[-1]

    def watch_descriptors(self) -> int:
        """Accept connections, or none while descriptors are short. Returns milliseconds until the next
        call."""
        open_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        spare_descriptors = min(SPARE_DESCRIPTORS, open_limit // 4)
        free_descriptors = 0
        try:
            lowest_free = os.open(os.devnull, os.O_RDONLY)  # the kernel assigns the lowest free number
            os.close(lowest_free)
            free_descriptors = open_limit - spare_descriptors - lowest_free
            is_deaf = free_descriptors <= 0
            if self.shortage:  # count, because lower numbers may be free as well
                is_deaf = len(os.listdir("/proc/self/fd")) >= open_limit - 2 * spare_descriptors
        except OSError:
            is_deaf = True

        if is_deaf != bool(self.shortage):
            shortage_text = (
                f"new connections must wait: {spare_descriptors} of {open_limit} open files are reserved; "
                "raise ulimit -n"
            )
            self.shortage = [shortage_text] if is_deaf else []
            option = ATTACH_FILTER if is_deaf else DETACH_FILTER
            for file in self._listening:
                with suppress(OSError), socket.fromfd(file, socket.AF_INET, socket.SOCK_STREAM) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_FILTER)

        return max(WATCH_INTERVAL[0], min(WATCH_INTERVAL[1], free_descriptors // MAX_ACCEPT_RATE))


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """Return a socket that is bound to a port, or to a free port for 0, and does not listen. OSError: the
    port is taken.

    Until the socket is closed, the kernel gives the port to nobody who asks for any free port, but a server
    that asks for this port with SO_REUSEADDR may listen there. Servers take up to minutes to start, long
    enough for another process to get a port that is only free.
    """
    reserved_socket = socket.socket()
    try:
        reserved_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved_socket.bind((host, port))
    except OSError:
        reserved_socket.close()
        raise
    return reserved_socket


def reserve_ports(host: str, port: int, count: int) -> list[socket.socket]:
    """Reserve ports on `host`, from `port` on, or free ports for 0. ConfigError if a port is taken."""
    with ExitStack() as stack:
        reserved_sockets = []
        for offset in range(count):
            try:
                reserved_socket = reserve_port(host, port + offset if port else 0)
            except OSError as error:
                raise ConfigError(
                    f"launch.host={host} launch.port={port}: cannot bind ({error.strerror}); "
                    "stop the process that uses the port, or set launch.port=0 for a free port"
                ) from None
            reserved_sockets.append(stack.enter_context(reserved_socket))

        stack.pop_all()
        return reserved_sockets


def hold_ports(reserved_sockets: Iterable[socket.socket]) -> None:
    """Keep ports reserved for servers of other processes: from now on, and between two starts of a server,
    until this process ends or has held MAX_HELD_PORTS others."""
    _held_ports.extend(reserved_sockets)
    while len(_held_ports) > MAX_HELD_PORTS:
        _held_ports.popleft().close()
