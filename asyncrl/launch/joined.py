"""A process on another machine is one that has joined: Ray has placed it, or a person has invited it.

A ticket says what the process is. `JoinedProcess` is the small parent of the role there: it makes a
directory, starts the role as the launcher starts its own, and sends what the role writes to the coordinator,
which adds it to the files of the run directory:

    RUN_DIR/NAME/elsewhere/LAUNCH-HOST/NAME/logs/rollout-1.log  ──►  RUN_DIR/NAME/logs/rollout-1.log

What was sent is removed at the end. What could not be sent is kept, and it is said where. The next launch
removes what is left of a launch that was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.launch.placement import TRAINER
from asyncrl.launch.process import LocalSpawner, ProcessSpec, log_path
from asyncrl.launch.run_directory import run_directory
from asyncrl.observe.files import replace_file
from asyncrl.weights.disk import weights_directory
from asyncrl.wire.addresses import launch_of
from asyncrl.wire.messages.channels import ToFileSender
from asyncrl.wire.messages.shared import PIECE, WrittenBytes
from asyncrl.wire.sockets import Endpoints, Link, identity

LOOK = 0.1  # seconds between two looks at the role
# between two looks at its files; deadline for what is new in them
SEND_EVERY = 2.0
SEND_SECONDS = 5.0


@dataclass(frozen=True)
class Ticket:
    """Says what a process is in a run. `started`: the launcher's file of that name, which names the day of
    the run; `cwd`: the launcher's directory, "" to stay in one's own; `variables`: secrets that it needs."""

    order: ProcessSpec
    config: RunConfig
    endpoints: Endpoints
    started: str
    cwd: str = ""
    variables: dict[str, str] = field(default_factory=dict, repr=False)

    def enter(self) -> None:
        """Be in the launcher's directory, with the secrets. Raises ConfigError."""
        if self.cwd and not Path(self.cwd).is_dir():
            raise ConfigError(
                f"{socket.gethostname()}: the launcher's directory {self.cwd} is not on this machine; start "
                "asyncrl in a directory that all machines have"
            )

        os.chdir(self.cwd or ".")
        os.environ.update(self.variables)


class JoinedProcess:
    """Starts the role of a ticket and is its parent. Raises ConfigError where this machine lacks a place."""

    def __init__(self, ticket: Ticket) -> None:
        host = socket.gethostname()
        order = ticket.order
        name = ticket.config.name
        launch = f"{launch_of(order.incarnation)}-{host}"
        parent = run_directory(ticket.config).absolute() / "elsewhere" / launch
        run_dir = parent / name
        config = replace(ticket.config, run_dir=str(parent))
        own = run_dir / order.place.name  # what the process was told, and how far its files were sent

        with ConfigError.instead_of(OSError, text=f"run_dir: on {host} it cannot be written to"):
            self._claim = claim(parent, name, host)
            own.mkdir(parents=True, exist_ok=True)
            (own / "started").write_text(ticket.started)
            (own / "started").replace(run_dir / "started")  # other processes of the launch may read it now
            (own / "config.yaml").write_bytes(msgspec.yaml.encode(config))

        self._own = own
        self._files = SentFiles(own, ticket)
        self.role = LocalSpawner(run_dir, ticket.endpoints, own)(order)

    def wait(self, shows: bool = False) -> tuple[int, str]:
        """Send what the role writes, until it has ended; return its exit code, and where files are that could
        not be sent ('': nowhere). `shows`: its log goes to standard output, too."""
        sent_at = 0.0
        with log_path(self._own.parent, self.role.name).open("rb") as log:
            code = None
            while code is None:
                time.sleep(LOOK)
                code = self.role.poll()
                if shows:
                    shows = shown(log)
                if time.monotonic() > sent_at + SEND_EVERY:
                    self._files.send()
                    sent_at = time.monotonic()

        if sent := self._files.send(last=True):
            (self._own / "config.yaml").unlink(missing_ok=True)
        self._files.link.close()
        release(self._claim, self._own.parent)
        return code, "" if sent else f"{socket.gethostname()}:{self._own.parent}"


def shown(log: BinaryIO) -> bool:
    """Write what is new in a log to standard output; False if that is closed: the role goes on without."""
    if log.tell() > os.fstat(log.fileno()).st_size:  # a long log was cut
        log.seek(0, os.SEEK_END)

    try:
        sys.stdout.buffer.write(log.read())
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed at exit, too
        return False
    return True


class SentFiles:
    """Sends what a role writes, a piece at a time. How far that has got is in a file, too: a process that is
    started again on this machine goes on from there."""

    def __init__(self, own: Path, ticket: Ticket) -> None:
        place = ticket.order.place
        self._endpoints = ticket.endpoints
        self._run_dir = own.parent
        self._name = identity(place.role, place.index)
        self._last = f"logs/{place.name}.log"  # the file of which bytes were sent last
        self._patterns = [self._last, f"timeline/{place.name}.jsonl"]

        if place.role == TRAINER:
            self._patterns.append(f"ratios/step-*-{place.index}-*.jsonl")
        self._note, self.link = own / "sent.json", self._dialled()
        self._sent: dict[str, int] = {}
        with suppress(OSError, msgspec.DecodeError):
            self._sent = msgspec.json.decode(self._note.read_bytes(), type=dict[str, int])

    def send(self, last: bool = False) -> bool:
        """Send all that is new; False if the coordinator has not taken it within SEND_SECONDS. Nothing waits
        in the socket then: it is closed, and the next call dials again, and first sends no bytes."""
        until = time.monotonic() + SEND_SECONDS
        taken = self._taken(self._last, b"", until) and all(
            self._taken(name, data, until) for name, data in self._new()
        )
        if taken and last:
            taken = self._taken(self._last, b"", until, last)

        if not taken:
            self.link.close()
            self.link = self._dialled()
        return taken

    def _new(self) -> Iterator[tuple[str, bytes]]:
        """Yield what was not sent of each file, at most PIECE bytes at once."""
        found = (path for pattern in self._patterns for path in sorted(self._run_dir.glob(pattern)))
        paths = {str(path.relative_to(self._run_dir)): path for path in found}
        self._sent = {name: sent for name, sent in self._sent.items() if name in paths}

        for name, path in paths.items():
            with suppress(FileNotFoundError), path.open("rb") as file:  # old ratios are deleted
                size = file.seek(0, os.SEEK_END)
                self._sent[name] = min(self._sent.get(name, 0), size)  # a long log was cut
                while file.seek(self._sent[name]) < size:
                    yield name, file.read(PIECE)

    def _taken(self, name: str, data: bytes, until: float, last: bool = False) -> bool:
        """Send bytes of a file, and wait until the coordinator has them."""
        offset = self._sent.get(name, 0)
        self._last = name
        self.link.send(WrittenBytes(name, offset, last), (data,))

        while (left := until - time.monotonic()) > 0 and not self.link.refused:
            answer = None
            with suppress(ProtocolError):
                answer = self.link.receive(min(left, LOOK))
            if answer and answer[0].name == name and answer[0].size >= offset:
                self._sent[name] = answer[0].size
                with suppress(OSError):
                    replace_file(self._note, msgspec.json.encode(self._sent))
                return True

        return False

    def _dialled(self) -> Link:
        return Link(self._endpoints.bulk, ToFileSender, self._name, self._endpoints.keys)


def claim(parent: Path, name: str, host: str) -> int:
    """Make the directory of a launch on this machine, and lock it for as long as this process lives; remove
    those beside it of this machine that no process has locked. Return the lock. Raises OSError."""
    while (lock := locked(parent)) is None:
        pass

    for other in parent.parent.glob(f"*-{host}"):
        with suppress(OSError):  # another process has just removed it
            if other != parent:
                release(os.open(other, os.O_RDONLY), other / name, over=True)
    return lock


def locked(parent: Path) -> int | None:
    """Make a directory and lock it; None where the last process of before has just removed it."""
    with suppress(FileNotFoundError):
        parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if parent.exists() and os.path.samestat(os.fstat(lock), parent.stat()):
            return lock
        os.close(lock)
    return None


def release(lock: int, run_dir: Path, over: bool = False) -> None:
    """Remove what a launch has left on this machine, unless a process has its directory locked: what keepers
    had in shared memory, and its files, if those of each process were sent or the launch is `over`."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        caches = weights_directory("shm", run_dir, run_dir.name, needed_bytes=0)
        all_sent = over or not any(run_dir.glob("*/config.yaml"))
        for directory in (caches, run_dir.parent if all_sent else run_dir / "weights"):
            shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)
