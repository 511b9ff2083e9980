"""The trainer's versions as files of this machine: read over the network where its own are not in sight.

consumes: versions that engines are to load
waits for: whom the version is read from, as long as pieces of it come; another process of this machine
unblocks: the loads of all engines of this machine, and machines that read the version from here

One process of a machine at a time fetches, which a lock on a file in the run directory ensures; the others
find what it has brought. So a version comes to a machine once, however many engines are there. A fetch that
is killed leaves nothing but a temporary directory, which the next one removes.
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
from asyncrl.runtime.version_server import Arriving, VersionServer, travels
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.manifest import Manifest, Superseded, Unreachable, WeightsError, WeightsRef
from asyncrl.wire.addresses import is_here, local_address
from asyncrl.wire.messages.channels import ToVersionReader
from asyncrl.wire.messages.engine import OpenedVersion, OpenVersion, ReadBytes, VersionBytes, VersionGone
from asyncrl.wire.messages.shared import PIECE
from asyncrl.wire.sockets import COORDINATOR, ROLES, Endpoints, Gate, KeyPair, Link, identity

log = logging.getLogger("asyncrl.weights")

FETCH = "fetch_weights"  # a span of the timeline
WINDOW = 16  # pieces that are asked for at once: bounds memory, and fills a line with up to 16 MB under way
STALL_S = 10.0  # seconds without a sign of life of the source
BARREN_S = 30.0  # seconds in which a source that waits itself may have nothing for us
CLOSING_S = 0.5  # seconds after which a wait for it ends with the process
ENDING = "this process ends"
TRIES = 3  # sources
SLACK = 4.0  # a fetch may take so many times as long as the last one made expect


class Mirror:
    """The end of one process. `role`, `index`: of the process."""

    def __init__(
        self, config: RunConfig, endpoints: Endpoints, role: str, index: int, timeline: Timeline
    ) -> None:
        weights = config.weights
        self._where = weights.directory
        self._deadline = weights.deadline
        self._name = config.name
        self._run_dir = Path(config.run_dir) / config.name
        self._lock = self._run_dir / f"mirror-{socket.gethostname()}"  # machines may share the directory
        self._endpoints = endpoints
        self._role = role
        self._index = index
        self._timeline = timeline
        self._possible = travels(config) and bool(endpoints.versions)
        self._sees_files = not self._possible or is_here(endpoints.control)
        self._joined = not set(ROLES) <= endpoints.keys.keys()  # it knows no keys of others
        self._directory: Path | None = None
        self._fetching = threading.Lock()
        self._arriving: dict[PolicyVersion, Arriving] = {}
        self._server: VersionServer | None = None
        self._rate = 0.0  # bytes a second, of the last fetch
        self._wanted: WeightsRef | None = None
        self._prefetching: asyncio.Task[None] | None = None
        self._closing = threading.Event()

    @asynccontextmanager
    async def local_copy(self, ref: WeightsRef) -> AsyncIterator[WeightsRef]:
        """The version as files that this machine sees, and which stay during the body. If that fails, what is
        damaged here is deleted. Raises Unreachable when nobody delivers it, Superseded when only a newer one
        is left, and WeightsError."""
        if not self._is_elsewhere(ref):
            yield ref
            return
        local = await asyncio.to_thread(self._fetched, ref.version)
        with disk.lock_version(local):
            try:
                yield local
            except WeightsError as error:
                if not lacks_resources(error):
                    await asyncio.to_thread(disk.delete_damaged, local)
                raise

    def prefetch(self, ref: WeightsRef) -> None:
        """Bring a version here in the background; one that still waits is skipped. A failure shows when the
        version is to be loaded."""
        self._wanted = ref
        if self._prefetching is None or self._prefetching.done():
            self._prefetching = asyncio.create_task(self._prefetch())

    def close(self) -> None:
        """A fetch under way ends with an error. What was brought is deleted by the parent of the last process
        of this machine."""
        self._closing.set()
        if self._prefetching is not None:
            self._prefetching.cancel()
        with self._fetching:  # its thread looks every CLOSING_S
            if self._server is not None:
                self._server.close()
                self._gate.close()

    async def _prefetch(self) -> None:
        while (ref := self._wanted) is not None:
            self._wanted = None
            with suppress(AsyncrlError):
                if self._is_elsewhere(ref):
                    await asyncio.to_thread(self._fetched, ref.version)

    def _is_elsewhere(self, ref: WeightsRef) -> bool:
        """Returns True when it is to be fetched. Where files of the trainer's machine are in sight, one that
        is gone is asked for, too: the answer says whether there is a newer one."""
        return self._possible and not (self._sees_files and Path(ref.path).is_dir())

    # -- in a thread -----------------------------------------------------------------------------------

    def _fetched(self, version: PolicyVersion) -> WeightsRef:
        """The version's files here, fetched unless another process has done it meanwhile."""
        try:
            with self._turn() as lock, self._fetching:
                if self._directory is None and (known := lock.read_text()):
                    self._directory = Path(known)
                if (local := self._local(version)) is not None:
                    return local
                if self._directory is not None:
                    disk.prune(self._directory, disk.KEEP - 1)
                return self._fetch(version, lock)
        except OSError as error:
            advice = "; set weights.directory=run" if disk_full(error) and self._where != "run" else ""
            raise WeightsError(f"{version.label} cannot be written here: {error}{advice}") from error
        except (DeadlineError, ProtocolError) as error:
            log.warning("%s does not come to this machine: %s", version.label, error)
            raise Unreachable(f"{version.label} does not come: {one_line(error)}") from error

    @contextmanager
    def _turn(self) -> Iterator[Path]:
        """The only one of this machine that fetches. The file is touched when a piece has come, and before
        each source: it is left after BARREN_S, and waits for its last answer and for the name of the next."""
        path = self._lock
        seen = 0
        until = math.inf
        with path.open("a") as file:
            while not self._closing.is_set():
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if (touched := path.stat().st_mtime_ns) != seen:
                    seen = touched
                    until = time.monotonic() + BARREN_S + 3 * STALL_S
                if time.monotonic() > until:
                    raise DeadlineError("another process of this machine fetches, and gets nothing")
                time.sleep(0.02)
            else:
                raise DeadlineError(ENDING)
            os.utime(path)
            yield path

    def _local(self, version: PolicyVersion) -> WeightsRef | None:
        """The version, with what it builds upon, if all is here."""
        if self._directory is None:
            return None
        ref = disk.ref_to(self._directory, version)
        with suppress(WeightsError):
            for _ in disk.lineage_of(ref):
                pass
            return ref
        return None

    def _fetch(self, version: PolicyVersion, lock: Path) -> WeightsRef:
        arriving = self._arriving[version] = Arriving()  # others may ask for it as soon as it is opened
        try:
            return self._fetch_as(arriving, version, lock)
        finally:
            del self._arriving[version]

    def _fetch_as(self, arriving: Arriving, version: PolicyVersion, lock: Path) -> WeightsRef:
        opened = self._open(version)
        with ProtocolError.instead_of(*UNDECODABLE, text="no usable manifest"):
            manifest = msgspec.json.decode(opened.manifest, type=Manifest)
        if manifest.delta is not None and self._local(manifest.delta.version) is None:
            self._fetch(manifest.delta.version, lock)
        begin = time.monotonic()
        wall = time.time()
        if (directory := self._directory) is None:
            size = sum(spec.nbytes for spec in manifest.layout)
            needed = disk.bytes_needed(size, manifest.delta is not None, caches=0)
            within = disk.weights_directory(self._where, self._run_dir, self._name, needed)
            directory = self._directory = within / self._lock.name
            lock.write_text(str(directory))
        with disk.new_version(directory, version) as work:
            arriving.file = work / (disk.DELTA if manifest.delta else disk.PAYLOAD)
            self._receive(opened, arriving, lock)
            (work / disk.MANIFEST).write_bytes(opened.manifest)
        size = opened.size
        seconds = time.monotonic() - begin
        self._rate = size / seconds
        self._timeline.record(FETCH, wall, time.time(), version=version, bytes=size)
        log.info("%s: %d bytes in %.2f s", version.label, size, seconds)
        return disk.ref_to(directory, version)

    def _open(self, version: PolicyVersion, anew: bool = False) -> OpenedVersion:
        """Ask the coordinator's machine from whom to read."""
        address, key = self._served_at()
        with self._link(self._endpoints.versions, self._endpoints.keys[COORDINATOR].public) as link:
            link.send(OpenVersion(version, address, key, anew))
            answer, _ = self._answer(link)
        if not isinstance(answer, OpenedVersion):
            raise ProtocolError(f"{type(answer).__name__} is no answer to OpenVersion")
        return answer

    def _receive(self, opened: OpenedVersion, arriving: Arriving, lock: Path) -> None:
        """All bytes of a version. Where one source fails, the trainer's machine goes on."""
        with arriving.file.open("wb") as empty:
            if opened.size:
                os.posix_fallocate(empty.fileno(), 0, opened.size)  # a full disk shows now
        expected = opened.size / self._rate if self._rate else math.inf
        until = time.monotonic() + self._deadline + SLACK * expected
        for left in reversed(range(TRIES)):
            os.utime(lock)
            try:
                self._read_from(opened, arriving, lock, until)
                return
            except AsyncrlError as error:
                if not left or time.monotonic() > until or self._closing.is_set():
                    self._rate = 0.0  # it need not be what it was
                    raise
                log.warning("%s from %s: %s", opened.version.label, opened.address, one_line(error))
                opened = self._open(opened.version, anew=True)

    def _read_from(self, opened: OpenedVersion, arriving: Arriving, lock: Path, until: float) -> None:
        """Read what has not arrived so far, in order."""
        wanted = iter(range(arriving.have, opened.size, PIECE))
        asked: dict[int, int] = {}  # sizes of pieces by where they begin
        end = arriving.have  # of what was asked for
        barren_at = time.monotonic() + BARREN_S
        with self._link(opened.address, opened.key) as link:
            while True:
                while len(asked) < WINDOW and (offset := next(wanted, None)) is not None:
                    asked[offset] = min(PIECE, opened.size - offset)
                    link.send(ReadBytes(opened.version, offset, asked[offset]))
                    end = offset + asked[offset]
                if not asked:
                    return
                if time.monotonic() > until:
                    raise DeadlineError(f"it takes {SLACK:g} times as long as the last version")
                if (found := _piece(self._answer(link), asked)) is None:
                    if time.monotonic() > barren_at:
                        raise DeadlineError(f"it has had nothing itself for {BARREN_S:g} s")
                    continue
                offset, data = found
                barren_at = time.monotonic() + BARREN_S
                with arriving.file.open("r+b") as file:
                    file.seek(offset)
                    file.write(data)
                del asked[offset]
                arriving.have = min(asked, default=end)
                os.utime(lock)

    def _served_at(self) -> tuple[str, str]:
        """Gives the address where others read from this process, and the key."""
        if self._joined:
            return "", ""
        if self._server is None:
            address = f"tcp://{local_address(self._endpoints.control)}:*"
            gate = Gate(self._endpoints, owner=self._role)
            try:
                self._server = VersionServer(gate, address, lambda: self._directory, self._arriving)
            except BaseException:
                gate.close()
                raise
            self._gate = gate
        return self._server.address, self._server.key

    def _answer(self, link: Link) -> tuple[OpenedVersion | VersionBytes, list[bytes]]:
        """The next answer. DeadlineError: none comes, or this process ends. Superseded, WeightsError: the
        version is gone."""
        until = time.monotonic() + STALL_S
        while not self._closing.is_set():
            if (received := link.receive(CLOSING_S)) is not None:
                break
            if time.monotonic() > until:
                raise DeadlineError(f"no answer for {STALL_S:g} s")
        else:
            raise DeadlineError(ENDING)
        answer, frames = received
        if isinstance(answer, VersionGone):
            raise (Superseded if answer.newer else WeightsError)(f"{answer.version.label} is gone")
        return answer, frames

    @contextmanager
    def _link(self, address: str, key: str) -> Iterator[Link]:
        keys = {**self._endpoints.keys, COORDINATOR: KeyPair(key)}
        link = Link(address, ToVersionReader, identity(self._role, self._index), keys)
        try:
            yield link
        finally:
            link.close()


def _piece(
    answer: tuple[OpenedVersion | VersionBytes, list[bytes]], asked: Mapping[int, int]
) -> tuple[int, bytes] | None:
    """A piece that was asked for, and where it begins; None: the source is waiting for it itself."""
    message, frames = answer
    if not isinstance(message, VersionBytes) or message.offset not in asked:
        raise ProtocolError(f"{type(message).__name__} that nobody has asked for")
    if not frames:
        return None
    if len(frames) != 1 or len(frames[0]) != asked[message.offset]:
        raise ProtocolError(f"a piece of {sum(map(len, frames))} bytes")
    return message.offset, frames[0]
