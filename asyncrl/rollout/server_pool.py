"""A lane over many servers: each turn is routed, and a turn that one server loses goes on at another.

consumes: the table of engines; turns
waits for: a server that is fit and has room -- with a deadline; the server that samples
unblocks: episodes

    turn ──► a server (routing) ──► whole ──► answer
               ▲        │
               └────────┘ full, or lost: what it sampled is kept, the rest is asked of another
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from asyncrl.engines.base import EngineBusy, EngineLost, Request
from asyncrl.engines.continuation import NOTHING, extended, rest
from asyncrl.errors import EngineError
from asyncrl.rollout.roster import Client, PooledServer, Roster
from asyncrl.runtime.busy_timer import BusyTimer
from asyncrl.runtime.waits import Changed, Waits
from asyncrl.types import Generation, StopReason
from asyncrl.wire.messages import EngineEntry, EngineUse

LOSSES = 8  # in a row that brought no token end a turn: it may be what kills the servers
PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two rounds of full servers, doubled each time


@dataclass(eq=False)
class Pending:
    """A turn under way. `deadline`: loop time by which a server must have taken it."""

    request: Request
    deadline: float
    sampled: Generation = NOTHING
    member: PooledServer | None = None  # that samples it now
    last: PooledServer | None = None  # that sampled of it before
    aborted: bool = False
    losses: int = 0  # in a row that brought no token
    full: set[PooledServer] = field(default_factory=set)  # had no room, in this round
    rounds: int = 0  # in a row in which no server had room

    @property
    def session(self) -> str:
        return self.request.session

    @property
    def over(self) -> bool:
        return self.aborted or self.sampled.stop is not StopReason.ABORT


class ServerPool:
    """`name` is the lane: see Roster for who serves it. `patience`: seconds that a turn waits for a server to
    take it; a lost server should be back by then."""

    def __init__(
        self,
        name: str,
        connect: Callable[[EngineEntry], Client],
        waits: Waits,
        meter: BusyTimer,
        patience: float = 600.0,
    ) -> None:
        self.name, self._waits, self._meter, self._patience = name, waits, meter, patience
        self._roster = Roster(name, connect)
        self._turns: dict[str, Pending] = {}  # by session
        self._oldest: Callable[[], int] = lambda: 0

    @property
    def changed(self) -> Changed:
        return self._roster.changed

    def table(self, entries: Sequence[EngineEntry]) -> None:
        """The servers from now on. The turns of one that left, or was restarted, go on elsewhere."""
        self._roster.table(entries)

    def use(self) -> tuple[EngineUse, ...]:
        """What each server has done for this lane."""
        return self._roster.use()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """The body is one episode. It need not wait here: each of its turns does."""
        yield

    async def fresh(self, oldest: Callable[[], int]) -> None:
        """Wait for a server that is not older than `oldest()`. A turn that moves later is held to it as well.
        Validation takes what there is."""
        if self.name == "eval":
            return
        self._oldest = oldest
        while self.version < oldest():
            with self._waits.named(self._roster.lack(oldest(), full=0)):
                await self.changed.wait()

    @property
    def version(self) -> int:
        """The newest version that a turn can be sampled with; -1 without a server."""
        return self._roster.version

    async def generate(self, request: Request) -> Generation:
        """Sample a turn, on as many servers as it takes. Raises EngineError when none takes it in time, one
        refuses it, or too many lose it."""
        deadline = asyncio.get_running_loop().time() + self._patience
        turn = self._turns[request.session] = Pending(request, deadline)
        try:
            while not turn.over:
                await self._go_on(turn)
        finally:
            del self._turns[request.session]
        return turn.sampled

    def abort(self, session: str) -> None:
        """End the session's running turn, wherever it runs: its `generate` returns what there is."""
        turn = self._turns.get(session)
        if turn is not None:
            turn.aborted = True
            if turn.member is not None:
                turn.member.client.abort(session)
            self.changed.fire()

    def release(self, session: str) -> None:
        self._roster.release(session)

    async def close(self) -> None:
        await self._roster.close()

    # -- one turn ------------------------------------------------------------------------------------

    async def _go_on(self, turn: Pending) -> None:
        """Have one server sample what is left of the turn, or as much of that as it can."""
        turn.member = member = await self._server(turn)
        if member is None:
            return
        try:
            with self._meter.turn():
                part = await member.client.generate(rest(turn.request, turn.sampled))
        except EngineBusy:
            turn.full.add(member)
        except EngineLost as lost:
            self._roster.suspect(member, lost)
            self._keep(turn, member, lost.partial)
            if turn.losses >= LOSSES:
                raise EngineError(f"{LOSSES} servers in a row lost the turn; the last one: {lost}") from lost
        else:
            self._keep(turn, member, part)
        finally:
            turn.member = None
            self._roster.end(turn.session, member)

    def _keep(self, turn: Pending, member: PooledServer, part: Generation) -> None:
        turn.sampled = extended(turn.request, turn.sampled, part)
        turn.losses = 0 if part.ids else turn.losses + 1
        turn.deadline = asyncio.get_running_loop().time() + self._patience
        turn.full.clear()
        turn.rounds = 0
        member.moved += turn.last not in (None, member)
        turn.last = member
        self._meter.tokens += len(part.ids)

    async def _server(self, turn: Pending) -> PooledServer | None:
        """Who goes on with the turn; None if it is aborted meanwhile. EngineError after the deadline."""
        try:
            async with asyncio.timeout_at(turn.deadline):
                while not turn.aborted:
                    member = self._roster.begin(turn.session, self._oldest(), turn.full)
                    if member is not None:
                        return member
                    await self._room(turn)
        except TimeoutError:
            lack = self._roster.lack(self._oldest(), len(turn.full))
            raise EngineError(f"{lack}, after {self._patience:g} s") from None
        return None

    async def _room(self, turn: Pending) -> None:
        """Wait for a change of the table; if servers were full, only a little."""
        pause = min(PAUSE * 2**turn.rounds, LONGEST_PAUSE) if turn.full else None
        with self._waits.named(self._roster.lack(self._oldest(), len(turn.full))):
            try:
                async with asyncio.timeout(pause):
                    await self.changed.wait()
            except TimeoutError:
                turn.rounds += 1
        turn.full.clear()
