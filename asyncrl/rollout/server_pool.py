"""A sampler over many servers: each turn goes to one of them, and one that a server loses goes on at another.

consumes: the table of engines; turns
waits for: a server that may be used and has room -- with a deadline; the server that samples
unblocks: episodes

    turn ──► a server (choose) ──► whole ──► answer
               ▲        │
               └────────┘ full, lost, or ended too early: what is sampled is kept, the rest is asked for again

Each turn goes to the server that holds the episode's prefix, within a bound on its load, or else to the least
loaded one. Of n servers with m requests in all, the one that holds the prefix may have at most
max(2, ceil(1.25 * (m + 1) / n)) with this request. Example: n = 3, m = 5 gives ceil(2.5) = 3. The least
loaded server always has room within that bound: it has at most floor(m / n) requests, and
floor(m / n) + 1 <= ceil((m + 1) / n).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from asyncrl.config import RunConfig
from asyncrl.engines.base import NOTHING, EngineBusy, EngineLost, Request, Sampling, extended, rest
from asyncrl.errors import EngineError, NoEngineError
from asyncrl.runtime.activity import ASLEEP, FRESHER, BusyTimer, Notifier, Sleeps, Waits
from asyncrl.types import Generation, StopReason, TokenScores
from asyncrl.wire.messages.worker import EngineEntry, EngineUse

if TYPE_CHECKING:
    from asyncrl.engines.sglang.client import SGLangClient

T = TypeVar("T")
log = logging.getLogger("asyncrl.worker")

LOAD_FACTOR = 1.25  # load of a server that is chosen for its prefix, relative to the mean
ENGINE_LANES = {"train", "eval"}  # of engines; others are names of scorers
MIN_LOAD_BOUND = 2  # requests; so few are no overload, whatever the mean over many servers is
MAX_LOSSES = 8  # in a row without a token end a turn: its request may be what kills the servers
# seconds between two rounds of full servers, doubled each time
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
SUSPECT_SECONDS = 10.0  # seconds that a server which lost a turn gets none, unless a new table comes before


# The client counts what it does in the EngineUse.
Connect = Callable[[EngineEntry, EngineUse], "SGLangClient"]


@dataclass(eq=False)
class PooledServer:
    """Holds an incarnation of a server, and the client of it."""

    entry: EngineEntry
    client: SGLangClient
    use: EngineUse  # of all incarnations
    running: int = 0  # requests
    suspect: bool = False  # it lost a turn, and no table has come since

    @property
    def id(self) -> str:
        """A restarted server has lost its prefixes: it counts as another one."""
        return f"{self.entry.name} {self.entry.incarnation}"


@dataclass(eq=False)
class ServerTurn:
    """A turn under way. `oldest`: it is sampled on no older version. `deadline`: loop time by which a server
    must have taken it."""

    request: Request
    oldest: Callable[[], int]
    deadline: float
    sampled: Generation = NOTHING
    last: PooledServer | None = None  # that sampled of it
    losses: int = 0  # in a row that brought no token
    full: set[PooledServer] = field(default_factory=set)  # had no room, in this round
    rounds: int = 0  # in a row in which no server had room
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # around each wait until one is there


class ServerPool:
    """`name` "train" uses the servers that are not set aside for validation; "eval" those that are, whatever
    they hold, and the others while there is none; a scorer's, its own. `patience`: seconds that a turn waits
    for a server to take it; a lost server should be back by then. `uses`: what each server has done, by its
    name, all its incarnations together; pools of one worker share it."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        waits: Waits,
        busy_timer: BusyTimer,
        patience: float = 600.0,
        usage_by_name: dict[str, EngineUse] | None = None,
    ) -> None:
        self.name = name
        self.changed = Notifier()
        self.sleeps = Sleeps()
        self._connect = connect
        self._waits = waits
        self._turn_patience = patience
        self._served_lanes = ENGINE_LANES
        self._config_section = "engines"
        self._wait_span = FRESHER
        self._request_span: Callable[[str], AbstractContextManager[None]] = (
            busy_timer.turn
        )  # around each request
        if name not in ENGINE_LANES:
            self._served_lanes = {name}
            self._config_section = f"scorers.{name}"
            self._wait_span = f"scorers.{name}: reads turns"
            self._request_span = lambda _: waits.named(self._wait_span)
        self._url_calls = itertools.count()
        self.uses = {} if usage_by_name is None else usage_by_name
        self._servers: dict[str, PooledServer] = {}  # by id
        self._session_homes: dict[str, str] = {}  # by session: the server that holds its prefix
        self._close_tasks: set[asyncio.Task[None]] = set()

    # -- the sampler ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """The body is one episode. It need not wait here: each of its turns does."""
        yield

    @property
    def version(self) -> int:
        """The newest version that a turn can be sampled with; -1 without a server."""
        return max((server.entry.version.step for server in self._eligible_servers(0)), default=-1)

    async def generate(self, request: Request, min_version: Callable[[], int] = lambda: 0) -> Generation:
        """Sample a turn, on as many servers as it takes; the wait for weights that are not older than
        `oldest()` has no deadline of its own. Validation takes what there is. Raises EngineError when no
        server takes it in time, one refuses it, or too many lose it."""
        if self.name == "train":
            await self.fresh(min_version)
        turn = ServerTurn(request, min_version, asyncio.get_running_loop().time() + self._turn_patience)
        while turn.sampled.stop is StopReason.ABORT:  # a server samples what is left, or as much as it can
            async with self._asked_server(turn) as server:
                self._append_part(turn, server, await server.client.generate(rest(request, turn.sampled)))
        return turn.sampled

    async def score(self, request: Request) -> tuple[float, ...]:
        return await self._first_answer(request, lambda client: client.score(request.ids))

    async def read(
        self,
        session: str,
        ids: tuple[int, ...],
        count: int,
        top: int = 0,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> TokenScores:
        """Have the scorer of this name score the last `count` of these ids, and name its `top` likeliest
        tokens at each of their places. Waits for a server, within `waiting`, and raises, as `generate`
        does."""
        request = Request(session, ids, Sampling(0, ()))
        return await self._first_answer(request, lambda client: client.read(ids, count, top), waiting)

    async def url(self) -> str:
        """Return the address of a server, each in turn. Waits for one, and raises, as `generate` does."""
        deadline = asyncio.get_running_loop().time() + self._turn_patience
        turn = ServerTurn(Request("", (), Sampling(0, ())), lambda: 0, deadline)
        (await self._acquire_server(turn)).running -= 1
        self.release("")
        servers = self._eligible_servers(0)
        return servers[next(self._url_calls) % len(servers)].entry.url

    async def fresh(self, min_version: Callable[[], int]) -> None:
        """Wait for a server that is not older than `oldest()`."""
        while self.version < min_version():
            wait_name = self._wait_name(min_version())
            span_name = FRESHER
            if self.sleeps.asleep:
                wait_name = span_name = ASLEEP
            with self._waits.named(wait_name, span=span_name):
                await self.changed.wait()

    def release(self, session: str) -> None:
        """The episode is over."""
        self._session_homes.pop(session, None)

    async def close(self) -> None:
        for server in self._servers.values():
            self._close(server)
        await asyncio.gather(*self._close_tasks, return_exceptions=True)

    # -- one turn ------------------------------------------------------------------------------------

    async def _first_answer(
        self,
        request: Request,
        question: Callable[[SGLangClient], Awaitable[T]],
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """Return the first answer of a server; see `generate`."""
        deadline = asyncio.get_running_loop().time() + self._turn_patience
        turn = ServerTurn(request, lambda: 0, deadline, waiting=while_waiting)
        while True:
            async with self._asked_server(turn) as server:
                return await question(server.client)

    @asynccontextmanager
    async def _asked_server(self, turn: ServerTurn) -> AsyncIterator[PooledServer]:
        """The body asks a server. If that is full, or is lost, another one is to be asked."""
        server = await self._acquire_server(turn)
        try:
            request_span = partial(self._request_span, server.entry.name)
            with self.sleeps.during(request_span, partial(self._waits.named, ASLEEP)):
                yield server
        except EngineBusy:
            server.use.busy += 1
            turn.full.add(server)
        except EngineLost as engine_lost:
            server.use.lost += 1
            self._suspend_server(server, engine_lost)
            self._append_part(turn, server, engine_lost.partial)
            await turn.request.on_part(turn.sampled)
            if turn.losses >= MAX_LOSSES:
                loss_text = f"{MAX_LOSSES} servers in a row lost the turn; the last one: {engine_lost}"
                raise EngineError(loss_text) from engine_lost
        finally:
            server.running -= 1

    def _append_part(self, turn: ServerTurn, server: PooledServer, part: Generation) -> None:
        turn.sampled = extended(turn.request, turn.sampled, part)
        turn.losses = 0 if part.ids else turn.losses + 1
        turn.deadline = asyncio.get_running_loop().time() + self._turn_patience
        turn.full.clear()
        turn.rounds = 0
        server.use.moved += turn.last not in (None, server)
        turn.last = server

    async def _acquire_server(self, turn: ServerTurn) -> PooledServer:
        """The server that goes on with the turn. NoEngineError after the deadline."""
        while (server := self.begin(turn.request.session, turn.full, turn.oldest())) is None:
            if self.sleeps.asleep:
                turn.deadline += await self._wait_until_awake()
                continue
            try:
                async with asyncio.timeout_at(turn.deadline):
                    await self._wait_for_room(turn)
            except TimeoutError:
                wait_name = self._wait_name(turn.oldest(), len(turn.full))
                raise NoEngineError(f"{wait_name}, after {self._turn_patience:g} s") from None
        return server

    async def _wait_until_awake(self) -> float:
        """Wait until the servers wake; the seconds that it took, which are no turn's own."""
        started_at = asyncio.get_running_loop().time()
        with self._waits.named(ASLEEP):
            while self.sleeps.asleep:
                await self.changed.wait()
        return asyncio.get_running_loop().time() - started_at

    async def _wait_for_room(self, turn: ServerTurn) -> None:
        """Wait for a change of the table; if servers were full, only a little."""
        pause = min(FIRST_PAUSE * 2**turn.rounds, LONGEST_PAUSE) if turn.full else None
        span_name, while_waiting = (
            (f"room on {self._config_section}", nullcontext) if turn.full else (self._wait_span, turn.waiting)
        )
        wait_name = self._wait_name(turn.oldest(), len(turn.full))
        with while_waiting(), self._waits.named(wait_name, self._turn_patience, span_name):
            try:
                async with asyncio.timeout(pause):
                    await self.changed.wait()
            except TimeoutError:
                turn.rounds += 1
        turn.full.clear()

    def _wait_name(self, min_version: int, full_count: int = 0) -> str:
        """Name what a turn waits for."""
        version_text = f" with v{min_version}" if min_version else ""
        if full_count:
            return f"{self._config_section}: all {full_count} servers{version_text} are full"
        server_counts = f"({len(self._servers)} known, {len(self._eligible_servers(0))} healthy)"
        return f"{self._config_section}: no server{version_text} {server_counts}"

    # -- routing -------------------------------------------------------------------------------------

    def begin(
        self, session: str, avoided: Collection[PooledServer] = (), min_version: int = 0
    ) -> PooledServer | None:
        """Choose the server for the session's next request, counted in its `running`; None: there is none."""
        servers = [server for server in self._eligible_servers(min_version) if server not in avoided]
        if not servers:
            return None
        chosen_server = choose(
            servers, self._session_homes.get(session), Counter(self._session_homes.values())
        )
        self._session_homes[session] = chosen_server.id
        chosen_server.running += 1
        return chosen_server

    def _eligible_servers(self, min_version: int) -> list[PooledServer]:
        """Servers that may be used and whose weights are not older than `oldest`."""
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

    def table(self, entries: Iterable[EngineEntry]) -> None:
        """The servers from now on. The turns of one that left, or was restarted, go on elsewhere."""
        previous_servers = self._servers
        self._servers = {}
        lane_entries = [entry for entry in entries if entry.lane in self._served_lanes]
        for entry in lane_entries:
            if entry.url:
                server_id = f"{entry.name} {entry.incarnation}"
                usage = self.uses.setdefault(entry.name, EngineUse(entry.name))
                server = previous_servers.pop(server_id, None) or PooledServer(
                    entry, self._connect(entry, usage), usage
                )
                self._servers[server_id] = server
                server.entry = entry
                server.suspect = False
                server.client.sleeps(entry.asleep)
                if entry.healthy:  # else the coordinator may not know yet what it holds
                    server.client.mark(entry.version)
        for server in previous_servers.values():
            self._close(server)
        any_awake = any(entry.healthy and not entry.asleep for entry in lane_entries)
        self.sleeps.change(not any_awake and any(entry.asleep for entry in lane_entries))
        self.changed.notify()

    def _suspend_server(self, server: PooledServer, lost_error: Exception) -> None:
        """Avoid a server that lost a turn until the next table, or until some time has passed."""
        if not server.suspect and server.id in self._servers:
            log.warning("%s lost a turn (%s): its turns go on elsewhere", server.entry.name, lost_error)
            server.suspect = True
            asyncio.get_running_loop().call_later(SUSPECT_SECONDS, self._clear_suspicion, server)

    def _clear_suspicion(self, server: PooledServer) -> None:
        server.suspect = False
        self.changed.notify()

    def _close(self, server: PooledServer) -> None:
        task = asyncio.get_running_loop().create_task(server.client.close())
        self._close_tasks.add(task)
        task.add_done_callback(self._close_tasks.discard)


def choose(servers: Sequence[PooledServer], home_id: str | None, prefix_counts: Counter[str]) -> PooledServer:
    """The server `home`, which holds the prefix, if it is one of them and within the bound; else the one with
    the fewest requests, and of these the one with the fewest prefixes."""
    request_count = sum(server.running for server in servers) + 1
    load_bound = max(MIN_LOAD_BOUND, math.ceil(LOAD_FACTOR * request_count / len(servers)))
    for server in servers:
        if server.id == home_id and server.running + 1 <= load_bound:
            return server
    return min(servers, key=lambda server: (server.running, prefix_counts[server.id]))  # ties: the first


def connector(config: RunConfig, scorer: str = "") -> Connect:
    """Return what makes a client of an engine, or of a scorer. ConfigError where keys or the model's
    vocabulary cannot be read; that of a scorer whose model is not on this machine, or reads no turns, is the
    policy's."""
    from asyncrl.engines.sglang.client import SGLangClient
    from asyncrl.engines.sglang.http import ServerApi
    from asyncrl.engines.sglang.process import keys
    from asyncrl.engines.sglang.server import vocabulary_of

    model_path = config.scorers[scorer].path if scorer not in ("", "reward") else config.model.path
    vocabulary_path = model_path if (Path(model_path) / "config.json").is_file() else config.model.path
    vocabulary = vocabulary_of(vocabulary_path)
    api_keys = keys(config.engine)

    def connect(entry: EngineEntry, usage: EngineUse) -> SGLangClient:
        return SGLangClient(
            ServerApi(entry.url, *api_keys), config, vocabulary, usage, salt=entry.incarnation
        )

    return connect
