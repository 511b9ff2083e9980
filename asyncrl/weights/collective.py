"""Weights through a process group: both ends of the protocol.

The trainer's rank 0 has one `Sender`. Each server's keeper has one `Receiver`, which asks; the server is told
over HTTP what to do, and the weights go from the trainer to it directly.

    keeper                                trainer                        server
    Want(version)             ──►  its turn; rank 0 listens
    /init_weights_update_group ◄── Plan(group, buckets)  ──────────────► joins rank 0
    Next(i)                   ──►  bucket i is ready
    /update_weights_from_...  ◄──  Going(i), and broadcasts ───────────► receives, loads
      (until then bucket i + 1 is read, flattened and hashed)
    Next(behind the last)     ──►
    the version is loaded     ◄──  Sent(manifest)

One connection carries this, and owns the group: while it is open the group is whole, and is used for the next
version. Whatever goes wrong, on either side, closes it; the other side sees that at once and gives the group
up too, so that a server that waits for a broadcast gets an error instead. A server is never told to wait for
somebody who is not there: to join, before rank 0 listens; to receive, before the bucket is ready.

What is left are processes that freeze: both ends have deadlines, and a server that waits for a frozen trainer
answers nobody and has to be started again. Nothing here is authenticated or encrypted: for private networks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from asyncrl.errors import AsyncrlError, DeadlineError, EngineError, ProtocolError, one_line
from asyncrl.weights.buffers import Superseded
from asyncrl.weights.collective_messages import (
    BroadcastPlan,
    Going,
    Next,
    Question,
    Refused,
    Sent,
    Want,
    ask,
    hear,
    left,
    tell,
)
from asyncrl.weights.group import ServerGroup, background
from asyncrl.weights.manifest import (
    ITEM_BYTES,
    Layout,
    Manifest,
    TensorEntry,
    WeightsError,
    WeightsRef,
    describe,
    entry,
)
from asyncrl.weights.snapshot import Snapshot, Tensors, as_bytes, split

T = TypeVar("T")
log = logging.getLogger("asyncrl.weights")

CLEANUP_SECONDS = 5.0  # for a server to give up its end of a group
PAUSE = 1.0  # seconds until the sender listens again after it could not take a connection


# -- the trainer's end ---------------------------------------------------------------------------------


class Sender:
    """Offers the newest version to all engines, and pushes it to one after another.

    It listens at `host`, which servers and keepers must be able to reach. A push takes at most `seconds`.
    What it cannot read of a version is kept in `error` for the owner to raise.
    """

    def __init__(self, host: str, bucket_bytes: int, seconds: float, device: torch.device) -> None:
        self.bucket_bytes, self.seconds, self.device = bucket_bytes, seconds, device
        self.turn = threading.Lock()  # of one engine at a time
        self.latest: Snapshot | None = None
        self.error: Exception | None = None
        self._host, self._closing = host, threading.Event()
        self._listener = socket.create_server((host, 0))
        self.lines: set[Line] = set()
        background(self._accept)

    def offer(self, snapshot: Snapshot) -> WeightsRef:
        """From now on engines that ask get this version. A push under way is finished with its own."""
        self.latest = snapshot
        port = self._listener.getsockname()[1]
        return WeightsRef(*snapshot.order, f"tcp://{self._host}:{port}")

    def close(self) -> None:
        """End all pushes, now."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread in `accept`
        self._listener.close()
        for line in list(self.lines):
            line.hang_up()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            except OSError as error:  # closed, or out of file descriptors, or a keeper was gone already
                if not self._closing.is_set():
                    log.warning("weights: a keeper could not be heard, next try soon: %s", one_line(error))
                self._closing.wait(PAUSE)
                continue
            line = Line(self, connection)
            self.lines.add(line)
            background(line.serve)


class Line:
    """The connection of one engine, with the group that it is in. Lives on a thread of its own."""

    def __init__(self, sender: Sender, connection: socket.socket) -> None:
        self._sender, self._socket = sender, connection
        self._group: ServerGroup | None = None
        self._engine = "an engine"

    def serve(self) -> None:
        """Until the engine leaves, or a push fails."""
        try:
            while True:
                want = hear(self._socket, Want, None)
                self._engine = want.engine
                deadline = time.monotonic() + min(want.seconds, self._sender.seconds)
                self._take_turn(want, deadline)
        except EOFError:
            log.debug("%s needs no more weights from here", self._engine)
        except Exception as error:  # whatever a foreign process or the network did: others go on
            log.warning("push to %s ended: %s", self._engine, one_line(error))
            self._refuse(one_line(error), isinstance(error, Superseded))
        finally:
            self._sender.lines.discard(self)
            self._socket.close()
            if self._group is not None:
                self._group.close()

    def hang_up(self) -> None:
        """From another thread: this one finds that the engine has gone."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _take_turn(self, want: Want, deadline: float) -> None:
        if not self._sender.turn.acquire(timeout=left(deadline)):
            raise DeadlineError("other engines were being served all the time")
        try:
            snapshot, order = self._sender.latest, (want.trainer_epoch, want.version)
            if snapshot is not None and snapshot.order == order:
                self._push(snapshot, want, deadline)
                return
        finally:
            self._sender.turn.release()
        latest = f"e{snapshot.trainer_epoch}-v{snapshot.version}" if snapshot else "nothing"
        self._refuse(f"the sender has {latest}", snapshot is not None and snapshot.order > order)

    def _push(self, snapshot: Snapshot, want: Want, deadline: float) -> None:
        buckets = tuple(_aligned(snapshot.layout[part]) for part in self._parts(snapshot))
        entries: dict[str, TensorEntry] = {}
        with closing(self._flattened(snapshot, buckets, entries)) as flattened:
            ready = next(flattened)  # Superseded is said before the engine has done anything
            group, port = self._join(1 + want.ranks, deadline)
            tell(self._socket, BroadcastPlan(group.name, port, group.backend, buckets), deadline)
            under_way: Future[None] | None = None
            for index in range(len(buckets)):
                self._arrived(index, under_way, deadline)
                tell(self._socket, Going(index), deadline)
                under_way = group.broadcast(ready)
                ready = next(flattened, ready)  # meanwhile
        self._arrived(len(buckets), under_way, deadline)
        manifest = describe(snapshot.order, tuple(entries[s.name] for s in snapshot.layout), snapshot.probe)
        tell(self._socket, Sent(manifest), deadline)

    def _parts(self, snapshot: Snapshot) -> Iterator[slice]:
        return split(snapshot.layout, self._sender.bucket_bytes)

    def _join(self, ranks: int, deadline: float) -> tuple[ServerGroup, int]:
        """The engine's group, and the port where a new one is to be joined."""
        if self._group is not None and self._group.ranks == ranks:
            return self._group, 0
        if self._group is not None:
            self._group.close()
        name = f"asyncrl-{uuid.uuid4().hex}"
        self._group = ServerGroup(name, ranks, self._sender.device, self._sender.seconds)
        self._group.await_listening(deadline)
        return self._group, self._group.port

    def _flattened(
        self, snapshot: Snapshot, buckets: Sequence[Layout], entries: dict[str, TensorEntry]
    ) -> Generator[Tensor]:
        """Each bucket as the bytes of its tensors, one behind the other; `entries` get their checksums."""
        for specs, tensors in zip(buckets, self._read(snapshot), strict=True):
            entries.update((spec.name, entry(spec, as_bytes(tensors[spec.name]))) for spec in specs)
            yield torch.cat([tensors[spec.name].reshape(-1).view(torch.uint8) for spec in specs])

    def _read(self, snapshot: Snapshot) -> Iterator[Tensors]:
        """The snapshot's buckets. That they cannot be had is the trainer's failure, and no engine's."""
        try:
            yield from snapshot.buckets(self._sender.bucket_bytes)
        except Superseded:
            raise
        except Exception as error:
            self._sender.error = error
            raise

    def _arrived(self, count: int, last: Future[None] | None, deadline: float) -> None:
        """Wait until the engine has `count` buckets, of which the last one was sent by `last`."""
        asked = hear(self._socket, Next, deadline).bucket
        if asked != count:
            raise ProtocolError(f"asked for bucket {asked} when {count} were sent")
        if last is not None:
            last.result(left(deadline))

    def _refuse(self, reason: str, superseded: bool) -> None:
        with suppress(OSError):
            tell(self._socket, Refused(reason, superseded), time.monotonic() + CLEANUP_SECONDS)


def _aligned(specs: Layout) -> Layout:
    """In an order in which every tensor starts at a multiple of its item size: large items first."""
    return tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))


# -- the keeper's end ----------------------------------------------------------------------------------


class GroupServer(Protocol):
    """What a receiver tells its server. WeightsError: the server refuses; other AsyncrlErrors: no answer."""

    async def init_group(
        self,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        name: str,
        backend: str,
        seconds: float,
    ) -> None: ...

    async def update_from_group(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        label: str | None,
        flush: bool,
        flattened: bool,
        seconds: float,
    ) -> None: ...

    async def destroy_group(self, name: str, seconds: float) -> None: ...


@dataclass
class Connection:
    """To the sender at `path`. `group`: which the server has joined through it."""

    path: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    group: str = ""

    async def ask(self, question: Question, kind: type[T]) -> T:
        """Raises Superseded, WeightsError when the sender refuses or is gone, ProtocolError."""
        try:
            answer = await ask(self.reader, self.writer, question)
        except (OSError, EOFError) as error:
            raise WeightsError(f"weights {self.path}: the sender is gone ({one_line(error)})") from error
        if isinstance(answer, Refused):
            raise (Superseded if answer.superseded else WeightsError)(f"weights {self.path}: {answer.reason}")
        if not isinstance(answer, kind):
            raise ProtocolError(f"weights: a {type(answer).__name__} where a {kind.__name__} is due")
        return answer


@dataclass
class Push:
    """A version that is about to be sent: the server is in the group, and has its old weights still."""

    label: str
    plan: BroadcastPlan
    connection: Connection
    server: GroupServer
    deadline: float  # by the loop's clock
    done: bool = field(default=False, init=False)

    async def load(self, flush: bool) -> Manifest:
        """Get it into the server, which gets the label with the last bucket, and empties its cache then if
        told to `flush`. A failure leaves the server with some old and some new weights: WeightsError, or
        another AsyncrlError when it did not answer."""
        last = len(self.plan.buckets) - 1
        for index, specs in enumerate(self.plan.buckets):
            await self.connection.ask(Next(index), Going)
            await self.server.update_from_group(
                [spec.name for spec in specs],
                [spec.dtype for spec in specs],
                [spec.shape for spec in specs],
                group=self.plan.group,
                label=self.label if index == last else None,
                flush=flush and index == last,
                flattened=True,
                seconds=self.deadline - asyncio.get_running_loop().time(),
            )
        sent = await self.connection.ask(Next(last + 1), Sent)
        self.done = True
        return sent.manifest


class Receiver:
    """Asks for versions on behalf of one server of `ranks` ranks. `engine`: its name in the trainer's log."""

    def __init__(self, server: GroupServer, engine: str, ranks: int) -> None:
        self._server, self._engine, self._ranks = server, engine, ranks
        self._connection: Connection | None = None

    @asynccontextmanager
    async def push(self, ref: WeightsRef, seconds: float) -> AsyncIterator[Push]:
        """Get the sender ready to push `ref`, and the server ready to receive. All of it, what is done within
        the context included, takes at most `seconds`. WeightsError from entering: nothing has changed
        (Superseded: the sender has a newer version). Any failure gives up the group, for a new one next time.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                push = await self._prepare(ref, deadline)
                yield push
            if not push.done:
                await self.close()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                late = f"weights {ref.path}: {ref.label} did not arrive within {seconds:g} s"
                raise WeightsError(late) from error
            raise

    async def close(self) -> None:
        """Leave the sender, and have the server give up its end of the group. Takes a few seconds at most,
        also with a server that does not answer."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        connection.writer.close()  # first: the server may be waiting for the sender, which sees this
        if connection.group:
            with suppress(AsyncrlError):
                await self._server.destroy_group(connection.group, seconds=CLEANUP_SECONDS)

    async def _prepare(self, ref: WeightsRef, deadline: float) -> Push:
        connection = await self._connect(ref.path)
        seconds = deadline - asyncio.get_running_loop().time()
        want = Want(self._engine, ref.trainer_epoch, ref.version, self._ranks, seconds)
        plan = await connection.ask(want, BroadcastPlan)
        if plan.port:
            await self._join(connection, plan, deadline - asyncio.get_running_loop().time())
        elif plan.group != connection.group:
            raise ProtocolError(f"weights {ref.path}: a push over group {plan.group}, which nobody joined")
        return Push(ref.label, plan, connection, self._server, deadline)

    async def _connect(self, path: str) -> Connection:
        if self._connection is not None and self._connection.path != path:
            await self.close()  # another trainer's
        if self._connection is None:
            self._connection = Connection(path, *await _open(path))
        return self._connection

    async def _join(self, connection: Connection, plan: BroadcastPlan, seconds: float) -> None:
        connection.group = plan.group
        address = str(urlsplit(connection.path).hostname)
        try:
            await self._server.init_group(
                address, plan.port, 1, 1 + self._ranks, plan.group, plan.backend, seconds=seconds
            )
        except EngineError as error:
            raise WeightsError(f"weights {connection.path}: the server did not join: {error}") from error


async def _open(path: str) -> Any:
    where = urlsplit(path)
    if where.scheme != "tcp" or not where.hostname or not where.port:
        raise WeightsError(f"weights {path}: not the address of a sender (tcp://host:port)")
    try:
        return await asyncio.open_connection(where.hostname, where.port)
    except OSError as error:
        raise WeightsError(f"weights {path}: no sender there ({one_line(error)})") from error
