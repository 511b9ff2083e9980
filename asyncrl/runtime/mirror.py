"""The trainer's versions as files of this machine: read over the network where its own are not in sight.

consumes: versions that engines are to load
waits for: the source of a version, as long as pieces come; another process of this machine
unblocks: the loads of all engines of this machine, and machines that read the version from here

One process of a machine at a time fetches, which a lock on a file in the run directory ensures; other
processes find the fetched files. So a version comes to a machine once, however many engines are there. A
killed fetch leaves nothing but a temporary directory, which the next fetch removes.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec

from asyncrl.config import RunConfig
from asyncrl.errors import (
    UNDECODABLE,
    AsyncrlError,
    DeadlineError,
    ProtocolError,
    disk_full,
    lacks_resources,
    one_line,
)
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime.version_server import ArrivingVersion, VersionServer, versions_travel
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.manifest import Manifest, Superseded, Unreachable, WeightsError, WeightsRef
from asyncrl.wire.addresses import is_local_endpoint, local_address
from asyncrl.wire.messages.channels import ToVersionReader
from asyncrl.wire.messages.engine import OpenedVersion, OpenVersion, ReadBytes, VersionBytes, VersionGone
from asyncrl.wire.messages.shared import MAX_PIECE_BYTES
from asyncrl.wire.sockets import COORDINATOR, PEER_ROLES, Endpoints, Gate, KeyPair, Link, identity

log = logging.getLogger("asyncrl.weights")

FETCH = "fetch_weights"  # a span of the timeline
# Pieces requested at once: few for the memory, enough to fill a line with up to 16 MB under way.
MAX_PENDING_PIECES = 16
STALL_SECONDS = 10.0  # without a sign of life, until a source is given up
BARREN_SECONDS = 30.0  # without a piece, until a source that waits itself is given up
CLOSING_SECONDS = 0.5  # between two looks at whether the process ends
ENDING = "this process is shutting down"
MAX_SOURCES = 3  # tried for one version
SLACK_FACTOR = 4.0  # a fetch may take so many times the seconds that the rate of the last fetch predicts


class Mirror:
    """Brings versions to this machine, for one process. `role`, `index`: of the process."""

    def __init__(
        self, config: RunConfig, endpoints: Endpoints, role: str, index: int, timeline: Timeline
    ) -> None:
        weights = config.weights
        self._directory_setting = weights.directory
        self._deadline = weights.deadline
        self._name = config.name
        self._run_dir = Path(config.run_dir) / config.name
        self._lock_path = self._run_dir / f"mirror-{socket.gethostname()}"  # machines may share the directory

        self._endpoints = endpoints
        self._role = role
        self._index = index
        self._timeline = timeline
        self._versions_travel = versions_travel(config) and bool(endpoints.versions)
        self._sees_files = not self._versions_travel or is_local_endpoint(endpoints.control)

        # A process that joined later knows no keys of other processes.
        self._joined_later = not set(PEER_ROLES) <= endpoints.keys.keys()
        self._directory: Path | None = None
        self._fetch_lock = threading.Lock()
        self._arriving_versions: dict[PolicyVersion, ArrivingVersion] = {}
        self._server: VersionServer | None = None
        self._bytes_per_second = 0.0  # bytes a second, of the last fetch

        self._wanted_ref: WeightsRef | None = None
        self._prefetch_task: asyncio.Task[None] | None = None
        self._closing_event = threading.Event()

    @asynccontextmanager
    async def local_copy(self, ref: WeightsRef) -> AsyncIterator[WeightsRef]:
        """Yield the version as files of this machine, which stay during the body. If the body raises
        WeightsError, damaged files are deleted. Raises Unreachable when nobody delivers the version,
        Superseded when only a newer version is left, and WeightsError."""
        if not self._is_elsewhere(ref):
            yield ref
            return

        local_ref = await asyncio.to_thread(self._fetch_once, ref.version)
        with disk.lock_version(local_ref):
            try:
                yield local_ref
            except WeightsError as error:
                if not lacks_resources(error):
                    await asyncio.to_thread(disk.delete_damaged, local_ref)
                raise

    def prefetch(self, ref: WeightsRef) -> None:
        """Bring a version here in the background; an earlier version that still waits is skipped. A failure
        shows when the version is to be loaded."""
        self._wanted_ref = ref
        if self._prefetch_task is None or self._prefetch_task.done():
            self._prefetch_task = asyncio.create_task(self._prefetch_wanted())

    def close(self) -> None:
        """End a fetch under way with an error. The parent of the last process of this machine deletes the
        fetched files."""
        self._closing_event.set()
        if self._prefetch_task is not None:
            self._prefetch_task.cancel()
        with self._fetch_lock:  # the fetching thread looks every CLOSING_SECONDS
            if self._server is not None:
                self._server.close()
                self._gate.close()

    async def _prefetch_wanted(self) -> None:
        while (ref := self._wanted_ref) is not None:
            self._wanted_ref = None
            with suppress(AsyncrlError):
                if self._is_elsewhere(ref):
                    await asyncio.to_thread(self._fetch_once, ref.version)

    def _is_elsewhere(self, ref: WeightsRef) -> bool:
        """True if the version must be fetched. Where files of the trainer's machine are in sight, a version
        that is gone is requested, too: the answer says whether there is a newer version."""
        return self._versions_travel and not (self._sees_files and Path(ref.path).is_dir())

    # -- in a thread -----------------------------------------------------------------------------------

    def _fetch_once(self, version: PolicyVersion) -> WeightsRef:
        """Return the version's files here, fetched unless another process has fetched them meanwhile."""
        try:
            with self._machine_lock() as lock, self._fetch_lock:
                if self._directory is None and (directory_name := lock.read_text()):
                    self._directory = Path(directory_name)
                if (local_ref := self._local_version(version)) is not None:
                    return local_ref
                if self._directory is not None:
                    disk.prune(self._directory, disk.KEPT_VERSIONS - 1)
                return self._fetch_version(version, lock)
        except OSError as error:
            advice = (
                "; set weights.directory=run" if disk_full(error) and self._directory_setting != "run" else ""
            )
            raise WeightsError(
                f"{version.label} cannot be written on this machine: {error}{advice}"
            ) from error
        except (DeadlineError, ProtocolError) as error:
            log.warning("%s cannot be copied to this machine: %s", version.label, error)
            raise Unreachable(f"{version.label} cannot be fetched: {one_line(error)}") from error

    @contextmanager
    def _machine_lock(self) -> Iterator[Path]:
        """Be the only process of this machine that fetches, during the body. The file is touched at each
        piece, and before each source: a source is left after BARREN_SECONDS, plus the waits for its last
        answer and for the next source."""
        lock_path = self._lock_path
        last_touched = 0
        give_up_at = math.inf
        with lock_path.open("a") as file:
            while not self._closing_event.is_set():
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break

                if (touched := lock_path.stat().st_mtime_ns) != last_touched:
                    last_touched = touched
                    give_up_at = time.monotonic() + BARREN_SECONDS + 3 * STALL_SECONDS

                if time.monotonic() > give_up_at:
                    raise DeadlineError(
                        "another process on this machine is fetching the file but is making no progress"
                    )
                time.sleep(0.02)
            else:
                raise DeadlineError(ENDING)

            os.utime(lock_path)
            yield lock_path

    def _local_version(self, version: PolicyVersion) -> WeightsRef | None:
        """Return the version, if the version and its base versions are here."""
        if self._directory is None:
            return None

        ref = disk.ref_to(self._directory, version)
        with suppress(WeightsError):
            for _ in disk.lineage_of(ref):
                pass
            return ref

        return None

    def _fetch_version(self, version: PolicyVersion, lock: Path) -> WeightsRef:
        """Fetch a version, after the base versions that are not here."""
        arriving = ArrivingVersion()
        self._arriving_versions[version] = arriving  # other machines may ask for pieces from now on
        try:
            opened = self._open_version(version)
            with ProtocolError.instead_of(*UNDECODABLE, text="no usable manifest"):
                manifest = msgspec.json.decode(opened.manifest, type=Manifest)

            if manifest.delta is not None and self._local_version(manifest.delta.version) is None:
                self._fetch_version(manifest.delta.version, lock)

            started_at = time.monotonic()
            started_wall = time.time()

            if (directory := self._directory) is None:
                size = sum(spec.nbytes for spec in manifest.layout)
                needed_bytes = disk.bytes_needed(size, manifest.delta is not None, caches=0)
                parent = disk.weights_directory(
                    self._directory_setting, self._run_dir, self._name, needed_bytes
                )
                directory = parent / self._lock_path.name
                self._directory = directory
                lock.write_text(str(directory))

            with disk.new_version(directory, version) as work_directory:
                arriving.file = work_directory / (disk.DELTA if manifest.delta else disk.PAYLOAD)
                self._receive_payload(opened, arriving, lock)
                (work_directory / disk.MANIFEST).write_bytes(opened.manifest)

            seconds = time.monotonic() - started_at
            self._bytes_per_second = opened.size / seconds
            self._timeline.record(FETCH, started_wall, time.time(), version=version, bytes=opened.size)
            log.info("%s: %d bytes in %.2f s", version.label, opened.size, seconds)

            return disk.ref_to(directory, version)
        finally:
            del self._arriving_versions[version]

    def _open_version(self, version: PolicyVersion, anew: bool = False) -> OpenedVersion:
        """Ask the coordinator's machine for the source to read from."""
        address, key = self._served_at()
        with self._open_link(self._endpoints.versions, self._endpoints.keys[COORDINATOR].public) as link:
            link.send(OpenVersion(version, address, key, anew))
            answer, _ = self._await_answer(link)
        if not isinstance(answer, OpenedVersion):
            raise ProtocolError(f"{type(answer).__name__} is not an answer to OpenVersion")
        return answer

    def _receive_payload(self, opened: OpenedVersion, arriving: ArrivingVersion, lock: Path) -> None:
        """Receive all bytes of a version. If a source fails, the trainer's machine goes on."""
        with arriving.file.open("wb") as payload_file:
            if opened.size:
                os.posix_fallocate(payload_file.fileno(), 0, opened.size)  # a full disk shows now

        expected_seconds = opened.size / self._bytes_per_second if self._bytes_per_second else math.inf
        give_up_at = time.monotonic() + self._deadline + SLACK_FACTOR * expected_seconds
        for tries_left in reversed(range(MAX_SOURCES)):
            os.utime(lock)
            try:
                self._read_from(opened, arriving, lock, give_up_at)
                return
            except AsyncrlError as error:
                if not tries_left or time.monotonic() > give_up_at or self._closing_event.is_set():
                    self._bytes_per_second = 0.0  # the rate may have changed
                    raise

                log.warning("%s from %s: %s", opened.version.label, opened.address, one_line(error))
                opened = self._open_version(opened.version, anew=True)

    def _read_from(
        self, opened: OpenedVersion, arriving: ArrivingVersion, lock: Path, give_up_at: float
    ) -> None:
        """Read the bytes that have not arrived so far, in order."""
        wanted_offsets = iter(range(arriving.received_bytes, opened.size, MAX_PIECE_BYTES))
        pending_sizes: dict[int, int] = {}  # sizes of pieces by where they begin

        asked_end = arriving.received_bytes  # end of the requested bytes
        barren_at = time.monotonic() + BARREN_SECONDS
        with self._open_link(opened.address, opened.key) as link:
            while True:
                while (
                    len(pending_sizes) < MAX_PENDING_PIECES
                    and (offset := next(wanted_offsets, None)) is not None
                ):
                    pending_sizes[offset] = min(MAX_PIECE_BYTES, opened.size - offset)
                    link.send(ReadBytes(opened.version, offset, pending_sizes[offset]))
                    asked_end = offset + pending_sizes[offset]

                if not pending_sizes:
                    return
                if time.monotonic() > give_up_at:
                    raise DeadlineError(
                        f"the fetch takes more than {SLACK_FACTOR:g} times as long as the last fetch"
                    )

                if (piece := _received_piece(self._await_answer(link), pending_sizes)) is None:
                    if time.monotonic() > barren_at:
                        raise DeadlineError(
                            f"the source itself has received nothing for {BARREN_SECONDS:g} s"
                        )
                    continue

                offset, data = piece
                barren_at = time.monotonic() + BARREN_SECONDS

                with arriving.file.open("r+b") as file:
                    file.seek(offset)
                    file.write(data)

                del pending_sizes[offset]
                arriving.received_bytes = min(pending_sizes, default=asked_end)
                os.utime(lock)

    def _served_at(self) -> tuple[str, str]:
        """Return the address where other machines read from this process, and the key."""
        if self._joined_later:
            return "", ""

        if self._server is None:
            address = f"tcp://{local_address(self._endpoints.control)}:*"
            gate = Gate(self._endpoints, owner=self._role)
            try:
                self._server = VersionServer(gate, address, lambda: self._directory, self._arriving_versions)
            except BaseException:
                gate.close()
                raise

            self._gate = gate

        return self._server.address, self._server.key

    def _await_answer(self, link: Link) -> tuple[OpenedVersion | VersionBytes, list[bytes]]:
        """Return the next answer. Raises DeadlineError without an answer, or when this process ends;
        Superseded and WeightsError when the version is gone."""
        give_up_at = time.monotonic() + STALL_SECONDS
        while not self._closing_event.is_set():
            if (received := link.receive(CLOSING_SECONDS)) is not None:
                break
            if time.monotonic() > give_up_at:
                raise DeadlineError(f"no answer for {STALL_SECONDS:g} s")
        else:
            raise DeadlineError(ENDING)

        answer, frames = received
        if isinstance(answer, VersionGone):
            text = f"{answer.version.label} no longer exists"
            raise Superseded(text) if answer.newer else WeightsError(text)

        return answer, frames

    @contextmanager
    def _open_link(self, address: str, key: str) -> Iterator[Link]:
        keys = {**self._endpoints.keys, COORDINATOR: KeyPair(key)}
        link = Link(address, ToVersionReader, identity(self._role, self._index), keys)
        try:
            yield link
        finally:
            link.close()


def _received_piece(
    answer: tuple[OpenedVersion | VersionBytes, list[bytes]], pending_sizes: Mapping[int, int]
) -> tuple[int, bytes] | None:
    """Return where a requested piece begins, and the piece; None: the source itself waits for the piece."""
    message, frames = answer
    if not isinstance(message, VersionBytes) or message.offset not in pending_sizes:
        raise ProtocolError(f"{type(message).__name__} was not requested")
    if not frames:
        return None
    if len(frames) != 1 or len(frames[0]) != pending_sizes[message.offset]:
        raise ProtocolError(f"a chunk has the wrong size ({sum(map(len, frames))} bytes)")

    return message.offset, frames[0]
