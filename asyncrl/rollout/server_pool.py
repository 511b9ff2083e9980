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

LOAD_FACTOR = 1.25  # load of a server that is chosen for its prefix, relative to the mean
LANES = {"train", "eval"}  # of engines; others are names of scorers
MIN_BOUND = 2  # requests; so few are no overload, whatever the mean over many servers is
MAX_LOSSES = 8  # in a row without a token end a turn: its request may be what kills the servers
# seconds between two rounds of full servers, doubled each time
PAUSE = 0.1
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
        meter: BusyTimer,
        patience: float = 600.0,
        uses: dict[str, EngineUse] | None = None,
    ) -> None:
        self.name = name
        self.changed = Notifier()
        self.sleeps = Sleeps()
        self._connect = connect
        self._waits = waits
        self._patience = patience
        self._lanes = LANES
        self._kind = "engines"
        self._span = FRESHER
        self._asking: Callable[[str], AbstractContextManager[None]] = meter.turn  # around each request
        if name not in LANES:
            self._lanes = {name}
            self._kind = f"scorers.{name}"
            self._span = f"scorers.{name}: reads turns"
            self._asking = lambda _: waits.named(self._span)
        self._calls = itertools.count()
        self.uses = {} if uses is None else uses
        self._servers: dict[str, PooledServer] = {}  # by id
        self._homes: dict[str, str] = {}  # by session: the server that holds its prefix
        self._closing: set[asyncio.Task[None]] = set()

    # -- the sampler ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """The body is one episode. It need not wait here: each of its turns does."""
        yield

    @property
    def version(self) -> int:
        """The newest version that a turn can be sampled with; -1 without a server."""
        return max((server.entry.version.step for server in self._eligible(0)), default=-1)

    async def generate(self, request: Request, oldest: Callable[[], int] = lambda: 0) -> Generation:
        """Sample a turn, on as many servers as it takes; the wait for weights that are not older than
        `oldest()` has no deadline of its own. Validation takes what there is. Raises EngineError when no
        server takes it in time, one refuses it, or too many lose it."""
        if self.name == "train":
            await self.fresh(oldest)
        turn = ServerTurn(request, oldest, asyncio.get_running_loop().time() + self._patience)
        while turn.sampled.stop is StopReason.ABORT:  # a server samples what is left, or as much as it can
            async with self._server(turn) as server:
                self._append(
                    turn, server, await server.client.generate(remaining_request(request, turn.sampled))
                )
        return turn.sampled

    async def score(self, request: Request) -> tuple[float, ...]:
        return await self._ask(request, lambda client: client.score(request.ids))

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
        return await self._ask(request, lambda client: client.read(ids, count, top), waiting)

    async def url(self) -> str:
        """Return the address of a server, each in turn. Waits for one, and raises, as `generate` does."""
        deadline = asyncio.get_running_loop().time() + self._patience
        turn = ServerTurn(Request("", (), Sampling(0, ())), lambda: 0, deadline)
        (await self._acquire(turn)).running -= 1
        self.release("")
        servers = self._eligible(0)
        return servers[next(self._calls) % len(servers)].entry.url

    async def fresh(self, oldest: Callable[[], int]) -> None:
        """Wait for a server that is not older than `oldest()`."""
        while self.version < oldest():
            lack = self._waits_for(oldest())
            span = FRESHER
            if self.sleeps.asleep:
                lack = span = ASLEEP
            with self._waits.named(lack, span=span):
                await self.changed.wait()

    def release(self, session: str) -> None:
        """The episode is over."""
        self._homes.pop(session, None)

    async def close(self) -> None:
        for server in self._servers.values():
            self._close(server)
        await asyncio.gather(*self._closing, return_exceptions=True)

    # -- one turn ------------------------------------------------------------------------------------

    async def _ask(
        self,
        request: Request,
        question: Callable[[SGLangClient], Awaitable[T]],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """Return the first answer of a server; see `generate`."""
        deadline = asyncio.get_running_loop().time() + self._patience
        turn = ServerTurn(request, lambda: 0, deadline, waiting=waiting)
        while True:
            async with self._server(turn) as server:
                return await question(server.client)

    @asynccontextmanager
    async def _server(self, turn: ServerTurn) -> AsyncIterator[PooledServer]:
        """The body asks a server. If that is full, or is lost, another one is to be asked."""
        server = await self._acquire(turn)
        try:
            asking = partial(self._asking, server.entry.name)
            with self.sleeps.during(asking, partial(self._waits.named, ASLEEP)):
                yield server
        except EngineBusy:
            server.use.busy += 1
            turn.full.add(server)
        except EngineLost as lost:
            server.use.lost += 1
            self._suspect(server, lost)
            self._append(turn, server, lost.partial)
            await turn.request.on_part(turn.sampled)
            if turn.losses >= MAX_LOSSES:
                text = f"{MAX_LOSSES} servers in a row lost the turn; the last one: {lost}"
                raise EngineError(text) from lost
        finally:
            server.running -= 1

    def _append(self, turn: ServerTurn, server: PooledServer, part: Generation) -> None:
        turn.sampled = with_part(turn.request, turn.sampled, part)
        turn.losses = 0 if part.ids else turn.losses + 1
        turn.deadline = asyncio.get_running_loop().time() + self._patience
        turn.full.clear()
        turn.rounds = 0
        server.use.moved += turn.last not in (None, server)
        turn.last = server

    async def _acquire(self, turn: ServerTurn) -> PooledServer:
        """The server that goes on with the turn. NoEngineError after the deadline."""
        while (server := self.begin(turn.request.session, turn.full, turn.oldest())) is None:
            if self.sleeps.asleep:
                turn.deadline += await self._slept()
                continue
            try:
                async with asyncio.timeout_at(turn.deadline):
                    await self._wait_for_room(turn)
            except TimeoutError:
                lack = self._waits_for(turn.oldest(), len(turn.full))
                raise NoEngineError(f"{lack}, after {self._patience:g} s") from None
        return server

    async def _slept(self) -> float:
        """Wait until the servers wake; the seconds that it took, which are no turn's own."""
        start = asyncio.get_running_loop().time()
        with self._waits.named(ASLEEP):
            while self.sleeps.asleep:
                await self.changed.wait()
        return asyncio.get_running_loop().time() - start

    async def _wait_for_room(self, turn: ServerTurn) -> None:
        """Wait for a change of the table; if servers were full, only a little."""
        pause = min(PAUSE * 2**turn.rounds, LONGEST_PAUSE) if turn.full else None
        span, waiting = (f"room on {self._kind}", nullcontext) if turn.full else (self._span, turn.waiting)
        lack = self._waits_for(turn.oldest(), len(turn.full))
        with waiting(), self._waits.named(lack, self._patience, span):
            try:
                async with asyncio.timeout(pause):
                    await self.changed.wait()
            except TimeoutError:
                turn.rounds += 1
        turn.full.clear()

    def _waits_for(self, oldest: int, full: int = 0) -> str:
        """Name what a turn waits for."""
        version = f" with v{oldest}" if oldest else ""
        if full:
            return f"{self._kind}: all {full} servers{version} are full"
        known = f"({len(self._servers)} known, {len(self._eligible(0))} healthy)"
        return f"{self._kind}: no server{version} {known}"

    # -- routing -------------------------------------------------------------------------------------

    def begin(
        self, session: str, avoid: Collection[PooledServer] = (), oldest: int = 0
    ) -> PooledServer | None:
        """Choose the server for the session's next request, counted in its `running`; None: there is none."""
        servers = [server for server in self._eligible(oldest) if server not in avoid]
        if not servers:
            return None
        chosen = choose(servers, self._homes.get(session), Counter(self._homes.values()))
        self._homes[session] = chosen.id
        chosen.running += 1
        return chosen

    def _eligible(self, oldest: int) -> list[PooledServer]:
        """Servers that may be used and whose weights are not older than `oldest`."""
        found = self._servers.values()
        set_aside = any(server.entry.lane == "eval" for server in found)
        lane = "train" if self.name == "eval" and not set_aside else self.name
        return [
            server
            for server in found
            if server.entry.healthy
            and not server.entry.asleep
            and not server.suspect
            and server.entry.lane == lane
            and (self.name == "eval" or server.entry.version.step >= oldest)
        ]

    # -- the table -----------------------------------------------------------------------------------

    def table(self, entries: Iterable[EngineEntry]) -> None:
        """The servers from now on. The turns of one that left, or was restarted, go on elsewhere."""
        before = self._servers
        self._servers = {}
        own = [entry for entry in entries if entry.lane in self._lanes]
        for entry in own:
            if entry.url:
                id = f"{entry.name} {entry.incarnation}"
                use = self.uses.setdefault(entry.name, EngineUse(entry.name))
                server = before.pop(id, None) or PooledServer(entry, self._connect(entry, use), use)
                self._servers[id] = server
                server.entry = entry
                server.suspect = False
                server.client.sleeps(entry.asleep)
                if entry.healthy:  # else the coordinator may not know yet what it holds
                    server.client.mark(entry.version)
        for server in before.values():
            self._close(server)
        awake = any(entry.healthy and not entry.asleep for entry in own)
        self.sleeps.change(not awake and any(entry.asleep for entry in own))
        self.changed.notify()

    def _suspect(self, server: PooledServer, why: Exception) -> None:
        """Avoid a server that lost a turn until the next table, or until some time has passed."""
        if not server.suspect and server.id in self._servers:
            log.warning("%s lost a turn (%s): its turns go on elsewhere", server.entry.name, why)
            server.suspect = True
            asyncio.get_running_loop().call_later(SUSPECT_SECONDS, self._clear_suspicion, server)

    def _clear_suspicion(self, server: PooledServer) -> None:
        server.suspect = False
        self.changed.notify()

    def _close(self, server: PooledServer) -> None:
        task = asyncio.get_running_loop().create_task(server.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def choose(servers: Sequence[PooledServer], home: str | None, prefixes: Counter[str]) -> PooledServer:
    """The server `home`, which holds the prefix, if it is one of them and within the bound; else the one with
    the fewest requests, and of these the one with the fewest prefixes."""
    requests = sum(server.running for server in servers) + 1
    bound = max(MIN_BOUND, math.ceil(LOAD_FACTOR * requests / len(servers)))
    for server in servers:
        if server.id == home and server.running + 1 <= bound:
            return server
    return min(servers, key=lambda server: (server.running, prefixes[server.id]))  # ties: the first


def connector(config: RunConfig, scorer: str = "") -> Connect:
    """Return what makes a client of an engine, or of a scorer. ConfigError where keys or the model's
    vocabulary cannot be read; that of a scorer whose model is not on this machine, or reads no turns, is the
    policy's."""
    from asyncrl.engines.sglang.client import SGLangClient
    from asyncrl.engines.sglang.http import ServerApi
    from asyncrl.engines.sglang.process import keys
    from asyncrl.engines.sglang.server import vocabulary_of

    path = config.scorers[scorer].path if scorer not in ("", "reward") else config.model.path
    known = path if (Path(path) / "config.json").is_file() else config.model.path
    vocabulary = vocabulary_of(known)
    secrets = keys(config.engine)

    def connect(entry: EngineEntry, use: EngineUse) -> SGLangClient:
        return SGLangClient(ServerApi(entry.url, *secrets), config, vocabulary, use, salt=entry.incarnation)

    return connect
