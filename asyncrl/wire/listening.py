"""Listening sockets, and how many descriptors their connections may take.

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

SPARE = 256  # but at most a quarter of all
WATCH = 10, 100  # milliseconds between two looks at the descriptors; fewer near the limit
FASTEST = 100  # descriptors in a millisecond; ZeroMQ accepts fewer connections
BACKLOG = 64  # connections that a socket may yet accept when it becomes deaf
_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # a filter that lets nothing pass
_FILTER = struct.pack("HP", 1, ctypes.addressof(_NOTHING))
ATTACH_FILTER, DETACH_FILTER = 26, 27  # of socket(7)


class Listeners:
    """All gates of one process. `shortage` names what they wait for; empty while they hear."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self.shortage: list[str] = []

    def open(self, endpoint: str) -> int:
        """A socket that listens there; port `*`: a free one."""
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
        spare, room = min(SPARE, limit // 4), 0
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
