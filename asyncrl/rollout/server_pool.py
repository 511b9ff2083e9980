"""A sampler over many servers: each turn goes to a server, and continues elsewhere if that server is lost.

consumes: the table of engines; turns
waits for: a usable server with room -- with a deadline; the server that samples
unblocks: episodes

    turn ──► a server (choose) ──► whole ──► answer
               ▲        │
               └────────┘ full, lost, or ended too early: sampled tokens are kept, the rest is asked for again

Each turn goes to the server that holds the episode's prefix, within a bound on the server's load, or else to
the least loaded server. With n servers and m requests in all, the server with the prefix may have at most
max(2, ceil(1.25 * (m + 1) / n)) requests, this request included. Example: n = 3, m = 5 gives ceil(2.5) = 3.
The least loaded server always has room within that bound: at most floor(m / n) requests are there, and
floor(m / n) + 1 <= ceil((m + 1) / n).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from asyncrl.config import RunConfig
from asyncrl.engines.base import (
    NOTHING,
    EngineBusy,
    EngineLost,
    Request,
    Sampling,
    remaining_request,
    with_part,
)
from asyncrl.errors import EngineError, NoEngineError
from asyncrl.runtime.activity import ASLEEP, FRESHER, BusyTimer, Notifier, Sleeps, Waits
from asyncrl.types import Generation, StopReason, TokenScores
from asyncrl.wire.messages.worker import EngineEntry, EngineUse

if TYPE_CHECKING:
    from asyncrl.engines.sglang.client import SGLangClient

T = TypeVar("T")
log = logging.getLogger("asyncrl.worker")

LOAD_FACTOR = 1.25  # maximum load, relative to the mean, of a server chosen for a prefix
ENGINE_LANES = {"train", "eval"}  # lanes of engines; any further lane is the name of a scorer
MIN_LOAD_BOUND = 2  # requests; so few are no overload, whatever the mean over many servers is
MAX_LOSSES = 8  # losses in a row, without a new token, that end a turn: the request may kill the servers
FIRST_PAUSE = 0.1  # seconds between two rounds of full servers, doubled each time
LONGEST_PAUSE = 2.0  # seconds
SUSPECT_SECONDS = 10.0  # seconds without requests for a server that lost a turn, unless a new table arrives


# Makes a client that counts requests in the EngineUse.
Connect = Callable[[EngineEntry, EngineUse], "SGLangClient"]


@dataclass(eq=False)
class PooledServer:
    """An incarnation of a server, with a client."""

    entry: EngineEntry
    client: SGLangClient
    usage: EngineUse  # summed over incarnations
    running_requests: int = 0
    suspect: bool = False  # lost a turn, and no table has arrived since

    @property
    def id(self) -> str:
        """Return a name that a restart changes: a restarted server has lost all prefixes."""
        return f"{self.entry.name} {self.entry.incarnation}"


@dataclass(eq=False)
class ServerTurn:
    """An unfinished turn. `min_version`: no older version may sample. `deadline`: loop time by which a server
    must have taken the turn."""

    request: Request
    min_version: Callable[[], int]
    deadline: float
    sampled: Generation = NOTHING
    last_server: PooledServer | None = None  # the server that sampled the newest part
    losses_in_row: int = 0  # losses without a new token
    full_servers: set[PooledServer] = field(default_factory=set)  # without room in this round
    full_rounds: int = 0  # rounds in which no server had room
    # Entered around each wait for a server.
    while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext


class ServerPool:
    """The servers for one purpose. The pool "train" uses the servers that are not reserved for validation;
    "eval" uses the reserved servers, with any version, and the training servers while none is reserved; the
    pool of a scorer uses that scorer's servers.

    `turn_patience`: seconds that a turn waits for a server to accept it; a lost server should be back by
    then. `usage_by_name`: the work of each server, by server name, summed over incarnations; the pools of a
    worker share this table.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        waits: Waits,
        busy_timer: BusyTimer,
        turn_patience: float = 600.0,
        usage_by_name: dict[str, EngineUse] | None = None,
    ) -> None:
        self.name = name
        self.changed = Notifier()
        self.sleeps = Sleeps()
        self._connect = connect
        self._waits = waits
        self._turn_patience = turn_patience
        self._served_lanes = ENGINE_LANES
        self._config_section = "engines"
        self._wait_span = FRESHER
        self._request_span: Callable[[str], AbstractContextManager[None]] = busy_timer.busy_span

        if name not in ENGINE_LANES:
            self._served_lanes = {name}
            self._config_section = f"scorers.{name}"
            self._wait_span = f"scorers.{name}: reads turns"
            self._request_span = lambda _: waits.wait_named(self._wait_span)

        self._url_calls = itertools.count()
        self.usage_by_name = {} if usage_by_name is None else usage_by_name
        self._servers: dict[str, PooledServer] = {}  # keys: server ids
        self._session_homes: dict[str, str] = {}  # the id of the server with the prefix, by session
        self._close_tasks: set[asyncio.Task[None]] = set()

    # -- the sampler ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Run one episode in the body. Nothing is awaited here: each turn waits."""
        yield

    @property
    def version(self) -> int:
        """Return the newest version that can sample a turn; -1 without a server."""
        return max((server.entry.version.step for server in self._eligible_servers(0)), default=-1)

    async def generate(self, request: Request, min_version: Callable[[], int] = lambda: 0) -> Generation:
        """Sample a turn, on as many servers as necessary; the wait for weights that are not older than
        `min_version()` has no deadline of its own. Validation takes any version. Raises EngineError when no
        server accepts the turn in time, a server refuses the turn, or too many servers lose it."""
        if self.name == "train":
            await self.wait_for_version(min_version)
        turn = ServerTurn(request, min_version, self._turn_deadline())
        while turn.sampled.stop is StopReason.ABORT:  # a server samples the remainder, or a part
            async with self._asked_server(turn) as server:
                self._append_part(
                    turn, server, await server.client.generate(remaining_request(request, turn.sampled))
                )
        return turn.sampled

    async def score(self, request: Request) -> tuple[float, ...]:
        return await self._first_answer(request, lambda client: client.score(request.ids, request.images))

    async def read(
        self,
        session: str,
        ids: tuple[int, ...],
        count: int,
        top: int = 0,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        images: Mapping[str, bytes] = {},
    ) -> TokenScores:
        """Have a scorer of this pool score the last `count` of these ids, and name the `top` likeliest tokens
        at each of these positions. `images`: see `Request`. Waits for a server, within `while_waiting`, and
        raises, as `generate` does."""
        request = Request(session, ids, Sampling(0, ()))
        return await self._first_answer(
            request, lambda client: client.read(ids, count, top, images), while_waiting
        )

    async def url(self) -> str:
        """Return the address of a server, round robin. Waits for a server, and raises, as `generate` does."""
        turn = ServerTurn(Request("", (), Sampling(0, ())), lambda: 0, self._turn_deadline())
        (await self._acquire_server(turn)).running_requests -= 1
        self.release("")
        servers = self._eligible_servers(0)
        return servers[next(self._url_calls) % len(servers)].entry.url

    async def wait_for_version(self, min_version: Callable[[], int]) -> None:
        """Wait for a server that is not older than `min_version()`."""
        while self.version < min_version():
            wait_name = ASLEEP if self.sleeps.asleep else self._wait_name(min_version())
            with self._waits.wait_named(wait_name, span=ASLEEP if self.sleeps.asleep else FRESHER):
                await self.changed.wait()

    def release(self, session: str) -> None:
        """Forget the server that holds a session's prefix: the episode is over."""
        self._session_homes.pop(session, None)

    async def close(self) -> None:
        for server in self._servers.values():
            self._close_server(server)
        await asyncio.gather(*self._close_tasks, return_exceptions=True)

    # -- single turns --------------------------------------------------------------------------------

    async def _first_answer(
        self,
        request: Request,
        question: Callable[[SGLangClient], Awaitable[T]],
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """Return the first answer of a server; see `generate`."""
        turn = ServerTurn(request, lambda: 0, self._turn_deadline(), while_waiting=while_waiting)
        while True:
            async with self._asked_server(turn) as server:
                return await question(server.client)

    @asynccontextmanager
    async def _asked_server(self, turn: ServerTurn) -> AsyncIterator[PooledServer]:
        """Ask a server in the body. If the server is full, or is lost, the caller asks again."""
        server = await self._acquire_server(turn)
        try:
            request_span = partial(self._request_span, server.entry.name)
            with self.sleeps.during(request_span, partial(self._waits.wait_named, ASLEEP)):
                yield server
        except EngineBusy:
            server.usage.busy += 1
            turn.full_servers.add(server)
        except EngineLost as engine_lost:
            server.usage.lost += 1
            self._suspend_server(server, engine_lost)
            self._append_part(turn, server, engine_lost.partial)
            await turn.request.on_part(turn.sampled)
            if turn.losses_in_row >= MAX_LOSSES:
                loss_text = f"{MAX_LOSSES} servers in a row lost the turn; last error: {engine_lost}"
                raise EngineError(loss_text) from engine_lost
        finally:
            server.running_requests -= 1

    def _append_part(self, turn: ServerTurn, server: PooledServer, part: Generation) -> None:
        turn.sampled = with_part(turn.request, turn.sampled, part)
        turn.losses_in_row = 0 if part.ids else turn.losses_in_row + 1
        turn.deadline = self._turn_deadline()
        turn.full_servers.clear()
        turn.full_rounds = 0
        server.usage.moved += turn.last_server not in (None, server)
        turn.last_server = server

    def _turn_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._turn_patience

    async def _acquire_server(self, turn: ServerTurn) -> PooledServer:
        """Return the server that continues the turn. NoEngineError after the deadline."""
        while (
            server := self.begin_request(turn.request.session, turn.full_servers, turn.min_version())
        ) is None:
            if self.sleeps.asleep:  # this wait extends the deadline
                asleep_since = asyncio.get_running_loop().time()
                with self._waits.wait_named(ASLEEP):
                    while self.sleeps.asleep:
                        await self.changed.wait()
                turn.deadline += asyncio.get_running_loop().time() - asleep_since
                continue

            try:
                async with asyncio.timeout_at(turn.deadline):
                    await self._wait_for_room(turn)
            except TimeoutError:
                wait_name = self._wait_name(turn.min_version(), len(turn.full_servers))
                raise NoEngineError(f"{wait_name}, after {self._turn_patience:g} s") from None

        return server

    async def _wait_for_room(self, turn: ServerTurn) -> None:
        """Wait for a change of the table; for a short pause only if servers were full."""
        pause = None
        span_name = self._wait_span
        while_waiting = turn.while_waiting
        if turn.full_servers:
            pause = min(FIRST_PAUSE * 2**turn.full_rounds, LONGEST_PAUSE)
            span_name = f"room on {self._config_section}"
            while_waiting = nullcontext

        wait_name = self._wait_name(turn.min_version(), len(turn.full_servers))
        with while_waiting(), self._waits.wait_named(wait_name, self._turn_patience, span_name):
            try:
                async with asyncio.timeout(pause):
                    await self.changed.wait()
            except TimeoutError:
                turn.full_rounds += 1

        turn.full_servers.clear()

    def _wait_name(self, min_version: int, full_count: int = 0) -> str:
        """Name the wait of a turn."""
        version_text = f" with v{min_version}" if min_version else ""
        if full_count:
            return f"{self._config_section}: all {full_count} servers{version_text} are full"
        server_counts = f"({len(self._servers)} known, {len(self._eligible_servers(0))} healthy)"
        return f"{self._config_section}: no server{version_text} {server_counts}"

    # -- routing -------------------------------------------------------------------------------------

    def begin_request(
        self, session: str, avoided: Collection[PooledServer] = (), min_version: int = 0
    ) -> PooledServer | None:
        """Choose the server for the session's next request and count the request; None if there is no
        server."""
        servers = [server for server in self._eligible_servers(min_version) if server not in avoided]
        if not servers:
            return None

        chosen_server = choose(
            servers, self._session_homes.get(session), Counter(self._session_homes.values())
        )
        self._session_homes[session] = chosen_server.id
        chosen_server.running_requests += 1

        return chosen_server

    def _eligible_servers(self, min_version: int) -> list[PooledServer]:
        """Return the usable servers whose weights are not older than `min_version`."""
        servers = self._servers.values()
        has_validation_servers = any(server.entry.lane == "eval" for server in servers)
        lane = "train" if self.name == "eval" and not has_validation_servers else self.name
        return [
            server
            for server in servers
            if server.entry.healthy
            and not server.entry.asleep
            and not server.suspect
            and server.entry.lane == lane
            and (self.name == "eval" or server.entry.version.step >= min_version)
        ]

    # -- the table -----------------------------------------------------------------------------------

    def update_table(self, entries: Iterable[EngineEntry]) -> None:
        """Replace the servers. The turns of servers that left, or were restarted, continue elsewhere."""
        previous_servers = self._servers
        self._servers = {}
        lane_entries = [entry for entry in entries if entry.lane in self._served_lanes]
        for entry in lane_entries:
            if not entry.url:
                continue

            server_id = f"{entry.name} {entry.incarnation}"
            usage = self.usage_by_name.setdefault(entry.name, EngineUse(entry.name))
            server = previous_servers.pop(server_id, None)
            if server is None:
                server = PooledServer(entry, self._connect(entry, usage), usage)
            self._servers[server_id] = server
            server.entry = entry
            server.suspect = False
            server.client.set_asleep(entry.asleep)
            if entry.healthy:  # the coordinator may not know an unhealthy server's version
                server.client.mark_version(entry.version)

        for server in previous_servers.values():
            self._close_server(server)

        any_awake = any(entry.healthy and not entry.asleep for entry in lane_entries)
        self.sleeps.set_asleep(not any_awake and any(entry.asleep for entry in lane_entries))
        self.changed.notify()

    def _suspend_server(self, server: PooledServer, lost_error: Exception) -> None:
        """Avoid a server that lost a turn until the next table, or for SUSPECT_SECONDS."""
        if not server.suspect and server.id in self._servers:
            log.warning(
                "%s lost a turn (%s); the server's turns continue on other servers",
                server.entry.name,
                lost_error,
            )
            server.suspect = True

            def clear_suspicion() -> None:
                server.suspect = False
                self.changed.notify()

            asyncio.get_running_loop().call_later(SUSPECT_SECONDS, clear_suspicion)

    def _close_server(self, server: PooledServer) -> None:
        task = asyncio.get_running_loop().create_task(server.client.close())
        self._close_tasks.add(task)
        task.add_done_callback(self._close_tasks.discard)


def choose(servers: Sequence[PooledServer], home_id: str | None, prefix_counts: Counter[str]) -> PooledServer:
    """Return the server `home_id`, which holds the prefix, if available and within the bound; else the server
    with the fewest requests, and among equals the server with the fewest prefixes."""
    request_count = sum(server.running_requests for server in servers) + 1
    load_bound = max(MIN_LOAD_BOUND, math.ceil(LOAD_FACTOR * request_count / len(servers)))
    for server in servers:
        if server.id == home_id and server.running_requests + 1 <= load_bound:
            return server

    # Of equal servers min() returns the first.
    return min(servers, key=lambda server: (server.running_requests, prefix_counts[server.id]))


def connector(config: RunConfig, scorer: str = "") -> Connect:
    """Return a function that makes a client for a server of the engine, or of a scorer. ConfigError where
    keys or the model's vocabulary cannot be read. If the scorer's model is not on this machine, or reads no
    turns, the policy's vocabulary is used."""
    from asyncrl.engines.sglang.client import SGLangClient
    from asyncrl.engines.sglang.http import ServerApi
    from asyncrl.engines.sglang.images import PromptWriter
    from asyncrl.engines.sglang.process import server_keys
    from asyncrl.engines.sglang.server import vocabulary_size_of

    scorer_path = config.scorers[scorer].path if scorer not in ("", "reward") else config.model.path
    model_path = scorer_path if (Path(scorer_path) / "config.json").is_file() else config.model.path
    vocabulary = vocabulary_size_of(model_path)
    prompt_writer = PromptWriter.of_model(model_path)
    api_keys = server_keys(config.engine)

    def connect(entry: EngineEntry, usage: EngineUse) -> SGLangClient:
        return SGLangClient(
            ServerApi(entry.url, *api_keys),
            config,
            vocabulary=vocabulary,
            use=usage,
            salt=entry.incarnation,
            prompt_writer=prompt_writer,
        )

    return connect
