"""Serves versions of the weights to machines that do not see the trainer's files.

The coordinator's server is the root, and gives each reader its source. The machines form a chain, and each
machine passes a version on while still receiving, so the trainer's machine sends a version once, however many
machines and engines there are:

    root ──► machine 2 ──► machine 3 ──► …      a piece goes on as soon as it has arrived

A reader that gets nothing from its source asks the root again, and reads from the root. So do machines that
nobody can read from: machines that joined later, with keys that other machines do not know.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.errors import lacks_resources, vital_thread
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsError, WeightsRef
from asyncrl.wire.addresses import bind_address
from asyncrl.wire.messages.channels import ToVersionServer
from asyncrl.wire.messages.engine import OpenedVersion, OpenVersion, ReadBytes, VersionBytes, VersionGone
from asyncrl.wire.sockets import Endpoints, Gate, Hub, Poller

log = logging.getLogger("asyncrl.weights")

POLL_SECONDS = 0.005  # between two looks for pieces that readers wait for
# Requests between two looks at waiting readers: other readers may ask as fast as they get answers.
MAX_REQUESTS_PER_PASS = 64
PENDING_SECONDS = 2.0  # until a reader hears that its piece has not come so far
UNUSED_SECONDS = 60.0  # without a request, until a version may be deleted
HELD_VERSIONS = 2  # versions that are locked at once: the last requested versions
# Values of weights.directory that mean another directory on each machine.
LOCAL_DIRECTORIES = ("auto", "shm", "run")
REMEMBERED_CHAINS = 4  # newest versions whose readers are remembered


@dataclass
class ArrivingVersion:
    """A version that this process is receiving into a file. `received_bytes`: from the start of the file."""

    file: Path = Path()
    received_bytes: int = 0


@dataclass
class Chain:
    """The readers of a version. `last_member`: address and key of the reader that nobody reads from so
    far."""

    last_member: tuple[str, str]
    members: set[str] = field(default_factory=set)


@dataclass
class PendingRead:
    """A request for a piece that has not arrived; `answered_at`: when the reader last got an answer."""

    peer: bytes
    request: ReadBytes
    answered_at: float


class VersionServer:
    """A thread that answers until `close`. Binds `endpoint`; readers dial `address`, by default the same.
    `directory`: of the versions; None: no versions so far. `arriving`: the versions that this process is
    receiving; none at the root."""

    def __init__(
        self,
        gate: Gate,
        endpoint: str,
        directory: Callable[[], Path | None],
        arriving: Mapping[PolicyVersion, ArrivingVersion] = {},
        address: str = "",
    ) -> None:
        self._hub = Hub(endpoint, ToVersionServer, gate, large=True)
        self.address = address or self._hub.endpoint
        self.key = gate.key_pair.public
        self._directory = directory
        self._arriving = arriving
        self._chains: dict[PolicyVersion, Chain] = {}

        self._held_locks: dict[
            PolicyVersion, tuple[ExitStack, float]
        ] = {}  # with the time of the last request
        self._pending_reads: deque[PendingRead] = deque()
        self.sent_bytes = 0  # bytes
        self._closing_event = threading.Event()
        self._thread = vital_thread("versions", self._run)

    def close(self) -> None:
        """Stop answering; readers have their own deadlines."""
        self._closing_event.set()
        self._thread.join()
        self._release_versions(math.inf, 0)
        self._hub.close()

    def _run(self) -> None:
        poller = Poller(self._hub)
        while not self._closing_event.is_set():
            poller.wait(POLL_SECONDS if self._pending_reads else 0.1)
            for _ in range(MAX_REQUESTS_PER_PASS):
                if (received := self._hub.receive()) is None:
                    break
                peer, message, _ = received
                self._answer_request(peer, message, time.monotonic())

            for _ in range(len(self._pending_reads)):
                pending_read = self._pending_reads.popleft()
                self._answer_request(pending_read.peer, pending_read.request, pending_read.answered_at)
            self._release_versions(time.monotonic() - UNUSED_SECONDS, HELD_VERSIONS)

    def _answer_request(self, peer: bytes, message: OpenVersion | ReadBytes, answered_at: float) -> None:
        try:
            if isinstance(message, OpenVersion):
                self._hub.send(peer, self._open_answer(message))
            else:
                self._send_piece(peer, message, answered_at)
        except (WeightsError, OSError) as error:
            log.info("%s was not served to %s: %s", message.version.label, peer.decode(), error)
            if lacks_resources(error):  # of this process: the version is there, and the reader asks again
                return

            published_refs = disk.published_versions(directory) if (directory := self._directory()) else ()
            newer = any(ref.version > message.version for ref in published_refs)
            self._hub.send(peer, VersionGone(message.version, newer))

    # -- the chain of readers ---------------------------------------------------------------------------

    def _open_answer(self, message: OpenVersion) -> OpenedVersion:
        version_directory = self._hold_version(message.version)
        manifest = (version_directory / disk.MANIFEST).read_bytes()
        size = disk.payload_path(version_directory).stat().st_size
        return OpenedVersion(message.version, manifest, size, *self._choose_source(message))

    def _choose_source(self, message: OpenVersion) -> tuple[str, str]:
        """Return the end of the chain, and put the asker there; but the root for a member of the chain, so
        that the chain never forms a cycle."""
        root_source = (self.address, self.key)
        chain = self._chains.setdefault(message.version, Chain(root_source))
        for old_version in sorted(self._chains)[:-REMEMBERED_CHAINS]:
            del self._chains[old_version]

        if message.anew or not message.address or message.address in chain.members:
            return root_source

        source = chain.last_member
        chain.last_member = (message.address, message.key)
        chain.members.add(message.address)

        return source

    # -- pieces ----------------------------------------------------------------------------------------

    def _send_piece(self, peer: bytes, request: ReadBytes, answered_at: float) -> None:
        """Send a piece, or keep the request until the piece arrives."""
        piece = self._piece_bytes(request)
        if piece is not None:
            self._hub.send(peer, VersionBytes(request.offset), (piece,))
            self.sent_bytes += len(piece)
            return

        if time.monotonic() - answered_at > PENDING_SECONDS:
            self._hub.send(peer, VersionBytes(request.offset))
            answered_at = time.monotonic()

        self._pending_reads.append(PendingRead(peer, request, answered_at))

    def _piece_bytes(self, request: ReadBytes) -> bytes | None:
        """Return the bytes of a piece; None: not arrived yet. Raises WeightsError or OSError for bytes that
        never will."""
        arriving = self._arriving.get(request.version)
        if arriving is not None:
            if arriving.received_bytes < request.offset + request.size:
                return None
            with suppress(FileNotFoundError):  # the file is complete, and was renamed just now
                return _read_at(arriving.file, request)
        return _read_at(disk.payload_path(self._hold_version(request.version)), request)

    def _hold_version(self, version: PolicyVersion) -> Path:
        """Return a version's directory, which stays as long as readers ask for the version. Raises
        WeightsError when the version is gone."""
        directory = self._directory()
        if directory is None:
            raise WeightsError("no version is available yet")

        ref = disk.ref_to(directory, version)
        lock_stack, _ = self._held_locks.get(version) or (ExitStack(), 0.0)
        if version not in self._held_locks:
            lock_stack.enter_context(disk.lock_version(ref))

        self._held_locks[version] = lock_stack, time.monotonic()
        return Path(ref.path)

    def _release_versions(self, unused_since: float, keep_count: int) -> None:
        """Unlock versions without a request since `unused_since`, and all but the last `keep_count`
        versions."""
        newest_first = sorted(
            self._held_locks, key=lambda version: self._held_locks[version][1], reverse=True
        )
        for position, version in enumerate(newest_first):
            lock_stack, asked_at = self._held_locks[version]
            if asked_at < unused_since or position >= keep_count:
                lock_stack.close()
                del self._held_locks[version]


def root_server(
    config: RunConfig, endpoints: Endpoints, gate: Gate, newest: Callable[[], WeightsRef | None]
) -> VersionServer | None:
    """Return the coordinator's server, unless versions are on a path that all machines share. `newest`:
    returns the newest version, if known."""
    if not versions_travel(config) or not endpoints.versions:
        return None

    def directory() -> Path | None:
        ref = newest()
        return None if ref is None else Path(ref.path).parent

    address = endpoints.versions
    return VersionServer(gate, bind_address(address, config.launch.host), directory, address=address)


def versions_travel(config: RunConfig) -> bool:
    """True if versions are files of the trainer's machine alone."""
    return config.weights.transport == "disk" and config.weights.directory in LOCAL_DIRECTORIES


def _read_at(path: Path, request: ReadBytes) -> bytes:
    with path.open("rb", 0) as file:
        data = os.pread(file.fileno(), request.size, request.offset)
    if len(data) != request.size:
        raise WeightsError(f"{path} does not have {request.size} bytes at offset {request.offset}")
    return data
