"""The supervisor's end of a push: asks the trainer for a version, and has its server receive it.

The trainer's end, and the protocol between the two, are in weights/collective.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from asyncrl.engines.sglang.http import ServerApi, update_session
from asyncrl.errors import AsyncrlError, EngineError, ProtocolError
from asyncrl.weights import collective_messages as messages
from asyncrl.weights.manifest import Layout, Manifest, Postponed, WeightsError, WeightsRef
from asyncrl.wire.addresses import is_local_endpoint

T = TypeVar("T")
CLEANUP_SECONDS = 5.0  # for a server to give up its end of a group
# Torch's text of an NCCL error for versions that differ ("invalid usage"), unlike errors of networks or GPUs.
NCCL_REFUSAL = re.compile(r"invalid usage.*, NCCL version (\d+(?:\.\d+)+)")


@dataclass
class SenderConnection:
    """A connection to the sender at `path`. `group`: the group that the server has joined through it."""

    path: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    group: str = ""

    async def ask_sender(self, question: messages.Question, kind: type[T]) -> T:
        """Return the sender's answer, of this kind. Raises Postponed, WeightsError when the sender refuses or
        is gone, ProtocolError."""
        with WeightsError.instead_of(
            OSError, EOFError, text=f"weights {self.path}: the connection to the sender was lost"
        ):
            answer = await messages.ask_question(self.reader, self.writer, question)
        if isinstance(answer, messages.Refused):
            text = f"weights {self.path}: {answer.reason}"
            raise Postponed(text) if answer.postponed else WeightsError(text)
        if not isinstance(answer, kind):
            raise ProtocolError(f"weights: expected {kind.__name__}, received {type(answer).__name__}")
        return answer


@dataclass
class Push:
    """A version that is about to be sent: the server, a member of `group`, still has the old weights."""

    label: str
    buckets: tuple[Layout, ...]
    connection: SenderConnection
    server: ServerApi
    deadline: float  # by the loop's clock
    group: str
    trainer_nccl: str  # version; "" for gloo
    is_done: bool = field(default=False, init=False)

    async def load_buckets(self) -> Manifest:
        """Load the version into the server, which gets the label with the last bucket. A failure leaves the
        server with some old and some new weights. Raises WeightsError, or another AsyncrlError when the
        server did not answer."""
        last_index = len(self.buckets) - 1
        async with update_session(self.server):
            for index, specs in enumerate(self.buckets):
                await self.connection.ask_sender(messages.BucketRequest(index), messages.BucketReady)
                with self._explaining_nccl():
                    await self.server.update_from_group(
                        [spec.name for spec in specs],
                        [spec.dtype for spec in specs],
                        [spec.shape for spec in specs],
                        group=self.group,
                        label=self.label if index == last_index else None,
                        seconds=self.deadline - asyncio.get_running_loop().time(),
                    )

            sent = await self.connection.ask_sender(messages.BucketRequest(last_index + 1), messages.Sent)

        self.is_done = True
        return sent.manifest

    @contextmanager
    def _explaining_nccl(self) -> Iterator[None]:
        """Name both versions of NCCL in the error if the server has another version. NCCL makes no group of
        two versions, and explains this in the server's log only; the server's version is in the error's
        text."""
        try:
            yield
        except WeightsError as error:
            server_nccl = NCCL_REFUSAL.search(str(error))
            if server_nccl is None or server_nccl[1] == self.trainer_nccl:
                raise

            raise WeightsError(
                f"weights.transport=collective: the trainer uses NCCL {self.trainer_nccl}, but the server "
                f"uses {server_nccl[1]}; install the same version of torch in both environments, or set "
                "weights.transport=disk"
            ) from error


@dataclass
class Receiver:
    """Asks for versions on behalf of the server number `index`, of `ranks` ranks, and loads the versions."""

    server: ServerApi
    index: int
    ranks: int
    _connection: SenderConnection | None = field(default=None, init=False)

    @asynccontextmanager
    async def push(self, ref: WeightsRef, seconds: float) -> AsyncIterator[Push]:
        """Get the sender ready to push `ref`, and the server ready to receive. Preparation and body together
        take at most `seconds`. WeightsError from entering: nothing has changed (Postponed: ask again). Any
        failure gives up the group; the next push makes a new group.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                push = await self._prepare_push(ref, deadline)
                yield push

            if not push.is_done:
                await self.close()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                problem = f"weights {ref.path}: {ref.label} did not arrive within {seconds:g} s"
                raise WeightsError(problem) from None  # the trainer may be late
            raise

    async def close(self) -> None:
        """Leave the sender, and have the server leave the group. Takes a few seconds at most, also with a
        server that does not answer."""
        connection = self._connection
        self._connection = None
        if connection is None:
            return

        connection.writer.close()  # first: the server may wait for the sender, which notices the closing
        if connection.group:
            with suppress(AsyncrlError):
                await self.server.destroy_group(connection.group, seconds=CLEANUP_SECONDS)

    async def _prepare_push(self, ref: WeightsRef, deadline: float) -> Push:
        """Connect to the sender, ask for the version, and have the server join the sender's group."""
        paths = ref.path.split(",")
        for path in paths:
            address = urlsplit(path)
            if address.scheme != "tcp" or not address.hostname or not address.port:
                raise WeightsError(f"weights {path}: not a sender's address; expected tcp://host:port")

        # A sender on the server's machine, if there is one.
        local_paths = [path for path in paths if _is_local(path)] if _is_local(self.server.url) else []
        usable_paths = local_paths or paths
        path = usable_paths[self.index % len(usable_paths)]

        connection = self._connection
        if connection is not None and (connection.path != path or connection.reader.at_eof()):
            await self.close()  # of another trainer, or closed by the sender after a long silence
            connection = None
        if connection is None:
            address = urlsplit(path)
            with WeightsError.instead_of(OSError, text=f"weights {path}: cannot connect to the sender"):
                streams = await asyncio.open_connection(address.hostname, address.port)
            connection = self._connection = SenderConnection(path, *streams)

        seconds = deadline - asyncio.get_running_loop().time()
        request = messages.VersionRequest(f"engine {self.index}", ref.version, self.ranks, seconds)

        plan = await connection.ask_sender(request, messages.Plan)
        if plan.port:
            connection.group = plan.group
            problem = f"weights {path}: the server did not join the sender's group"
            with WeightsError.instead_of(EngineError, text=problem):
                await self.server.init_group(
                    str(urlsplit(path).hostname),
                    plan.port,
                    rank_offset=1,
                    world_size=1 + self.ranks,
                    name=plan.group,
                    backend=plan.backend,
                    seconds=deadline - asyncio.get_running_loop().time(),
                )
        elif plan.group != connection.group:
            raise ProtocolError(
                f"weights {ref.path}: the push uses group {plan.group}, which the server has not joined"
            )

        return Push(
            label=ref.label,
            buckets=plan.buckets,
            connection=connection,
            server=self.server,
            deadline=deadline,
            group=plan.group,
            trainer_nccl=plan.nccl,
        )


def _is_local(url: str) -> bool:
    address = urlsplit(url)
    with suppress(OSError, ValueError):  # an unknown name, or no address
        return is_local_endpoint(f"tcp://{address.hostname}:{address.port or 80}")
    return False
