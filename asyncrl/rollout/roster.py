"""The servers as one lane of a worker sees them: a client of each, who may be asked, what each has done.

consumes: the table of engines, suspicions
waits for: nothing
unblocks: turns that wait for an engine or for fresher weights, by `changed`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.engines.base import Engine
from asyncrl.engines.sglang.engine import Counters
from asyncrl.rollout.routing import Place, Router
from asyncrl.runtime.waits import Changed
from asyncrl.wire.messages import EngineEntry, EngineUse

log = logging.getLogger("asyncrl.worker")

SUSPICION = 10.0  # seconds that a server which lost a turn gets none, unless the table vouches for it before


class Client(Engine, Protocol):
    """An engine outside this process."""

    @property
    def counters(self) -> Counters: ...

    def mark(self, order: tuple[int, int]) -> None:
        """It has confirmed this (trainer_epoch, version)."""


@dataclass(eq=False)
class PooledServer:
    """One incarnation of a server, and the lane's client of it."""

    entry: EngineEntry
    client: Client
    sessions: set[str] = field(default_factory=set)  # whose turns it samples now
    moved: int = 0  # turns that it took over from another
    suspect: bool = False  # it lost a turn, and nobody has vouched for it since
    retired: bool = False  # it has left the table


class Roster:
    """`lane` "train" uses the servers that are not leased; "eval" those that are, whatever they hold, and the
    others while none is."""

    def __init__(self, lane: str, connect: Callable[[EngineEntry], Client]) -> None:
        self.changed = Changed()
        self._lane, self._connect = lane, connect
        self._router = Router()
        self._members: dict[str, PooledServer] = {}  # by place
        self._ever: dict[str, list[PooledServer]] = {}  # by name: every incarnation there was
        self._closing: set[asyncio.Task[None]] = set()

    # -- the table -----------------------------------------------------------------------------------

    def table(self, entries: Sequence[EngineEntry]) -> None:
        """The servers from now on. The turns of one that left, or was restarted, come back as aborted."""
        before, self._members = self._members, {}
        for entry in entries:
            if entry.url:
                member = before.pop(place_of(entry), None) or self._join(entry)
                member.entry, member.suspect = entry, False
                if entry.healthy:  # else the desk may not know yet what it holds
                    member.client.mark((entry.epoch, entry.version))
                self._members[place_of(entry)] = member
        for member in before.values():
            self._retire(member)
        self._route()

    def suspect(self, member: PooledServer, why: Exception) -> None:
        """It lost a turn: it gets no more until the table vouches for it, or some time has passed."""
        if not member.suspect and not member.retired:
            log.warning("%s lost a turn (%s): its turns go on elsewhere", member.entry.name, why)
            member.suspect = True
            self._route()
            asyncio.get_running_loop().call_later(SUSPICION, self._acquit, member)

    def _acquit(self, member: PooledServer) -> None:
        if member.suspect:  # the table had no news of it
            member.suspect = False
            self._route()

    def _join(self, entry: EngineEntry) -> PooledServer:
        member = PooledServer(entry, self._connect(entry))
        self._ever.setdefault(entry.name, []).append(member)
        return member

    def _retire(self, member: PooledServer) -> None:
        """Take its turns back; the client is closed after the last one."""
        member.retired = True
        for session in member.sessions:
            member.client.abort(session)
        if not member.sessions:
            self._close(member)

    def _route(self) -> None:
        leased = any(member.entry.lane == "eval" for member in self._members.values())
        lane = "eval" if leased and self._lane == "eval" else "train"
        self._router.update(
            Place(
                id=place,
                version=member.entry.version,
                healthy=member.entry.healthy and not member.suspect and member.entry.lane == lane,
            )
            for place, member in self._members.items()
        )
        self.changed.fire()

    # -- turns ---------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The newest version that a turn can be sampled with; -1 without a server."""
        return max((place.version for place in self._router.eligible(0)), default=-1)

    def begin(self, session: str, oldest: int, avoid: Collection[PooledServer]) -> PooledServer | None:
        """The server to ask for the session's next turn, until `end`; None if none may be asked."""
        place = self._router.begin(session, oldest, [place_of(member.entry) for member in avoid])
        if place is None:
            return None
        member = self._members[place]
        member.sessions.add(session)
        return member

    def end(self, session: str, member: PooledServer) -> None:
        self._router.end(place_of(member.entry))
        member.sessions.discard(session)
        if member.retired and not member.sessions:
            self._close(member)

    def release(self, session: str) -> None:
        """The episode is over."""
        self._router.forget(session)
        for member in self._members.values():
            member.client.release(session)

    def lack(self, oldest: int, full: int) -> str:
        """What a turn waits for."""
        if full:
            return f"engines: all {full} that have v{oldest} are full"
        healthy = len(self._router.eligible(0))
        return f"engines: none has v{oldest} ({len(self._members)} known, {healthy} healthy)"

    # -- totals and the end --------------------------------------------------------------------------

    def use(self) -> tuple[EngineUse, ...]:
        """What each server has done for this lane, all its incarnations together."""
        return tuple(use_of(name, members) for name, members in self._ever.items())

    async def close(self) -> None:
        for member in self._members.values():
            self._close(member)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _close(self, member: PooledServer) -> None:
        task = asyncio.get_running_loop().create_task(member.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def place_of(entry: EngineEntry) -> str:
    """A restarted server is another place."""
    return f"{entry.name} {entry.incarnation}"


def use_of(name: str, members: Sequence[PooledServer]) -> EngineUse:
    counters = [member.client.counters for member in members]
    return EngineUse(
        name=name,
        requests=sum(each.requests for each in counters),
        prompt_tokens=sum(each.prompt_tokens for each in counters),
        cached_tokens=sum(each.cached_tokens for each in counters),
        tokens=sum(each.generated_tokens for each in counters),
        busy=sum(each.busy for each in counters),
        lost=sum(each.lost for each in counters),
        moved=sum(member.moved for member in members),
    )
