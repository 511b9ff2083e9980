"""Servers that do what a test scripts, and a pool of them.

They write the same text: every token is its own position in the whole sequence, and its log-prob the negative
of that. However a turn is moved about, what comes out must count up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.engines.base import EngineBusy, EngineLost, Request, Sampling
from asyncrl.errors import EngineError
from asyncrl.rollout.server_pool import ServerPool
from asyncrl.runtime.activity import BusyTimer, Waits
from asyncrl.types import NO_VERSION, Generation, PolicyVersion, StopReason, TokenScores, VersionSpan
from asyncrl.wire.messages.worker import EngineEntry, EngineUse
from tests.fakes.loop import Intervals

SECONDS = 0.25  # seconds that each part of a turn reports


@dataclass(frozen=True)
class Lose:
    """Sample so many tokens, then be lost."""

    tokens: int = 0


@dataclass(frozen=True)
class Refuse:
    """The request is at fault."""


@dataclass(frozen=True)
class Busy:
    """No room."""


@dataclass(frozen=True)
class Part:
    """Sample so many tokens, and end the request there."""

    tokens: int


Act = Lose | Refuse | Busy | Part


class FakeServer:
    """A client whose server plays `acts`, one per request, and after that samples whole turns.

    While `gate` is closed a request hangs, with `streamed` tokens, until the client is closed. The first
    request sets `first_request`.
    """

    def __init__(self, entry: EngineEntry, use: EngineUse) -> None:
        self.entry = entry
        self.use = use
        self.acts: list[Act] = []
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.first_request = asyncio.Event()
        self.gate = asyncio.Event()

        self.gate.set()
        self.streamed = 0
        self.closed = False
        self._version = NO_VERSION
        self._hanging: dict[str, asyncio.Task[Any]] = {}

    @property
    def version(self) -> int:
        return self._version.step

    def mark_version(self, version: PolicyVersion) -> None:
        self._version = version

    def set_asleep(self, asleep: bool) -> None: ...

    async def generate(self, request: Request) -> Generation:
        assert not self.closed
        self.requests.append(request)
        self.first_request.set()
        self.use.requests += 1

        act = self.acts.pop(0) if self.acts else None
        match act:
            case Busy():
                raise EngineBusy("full")
            case Refuse():
                raise EngineError("refused")
            case Lose(tokens):
                raise EngineLost("gone", self._write(request, tokens, StopReason.ABORT))
            case Part(tokens):
                return self._write(request, tokens, StopReason.ABORT)

        if await self._cut(request.session):
            raise EngineLost("closed", self._write(request, self.streamed, StopReason.ABORT))
        return self._write(request, request.sampling.max_new_tokens, StopReason.LENGTH)

    async def score(self, ids: tuple[int, ...], images: Mapping[str, bytes] = {}) -> tuple[float, ...]:
        generated = await self.generate(Request("score", (), Sampling(len(ids), ())))
        return generated.logprobs[1:]

    async def read(
        self, ids: tuple[int, ...], count: int, top: int, images: Mapping[str, bytes] = {}
    ) -> TokenScores:
        read = await self.generate(Request("score", ids[:-count], Sampling(count, ())))
        return TokenScores(np.array(read.logprobs, "<f4").tobytes())

    async def close(self) -> None:
        self.closed = True
        for hanging in self._hanging.values():
            hanging.cancel()

    async def _cut(self, session: str) -> bool:
        """Wait at the gate."""
        waiting = self._hanging[session] = asyncio.ensure_future(self.gate.wait())
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            self.cancelled.append(session)
            waiting.cancel()
            raise
        finally:
            del self._hanging[session]

        return waiting.cancelled()

    def _write(self, request: Request, tokens: int, stop: StopReason) -> Generation:
        """As many tokens, or fewer if one is a stop id."""
        begin = len(request.ids)

        ids = range(begin, begin + min(tokens, request.sampling.max_new_tokens))
        stops = [id for id in ids if id in request.sampling.stop_ids]
        if stops:
            ids = range(begin, stops[0] + 1)
            stop = StopReason.STOP

        self.use.tokens += len(ids)
        self.use.prompt_tokens += begin
        spans = (VersionSpan(0, len(ids), self.version, self.version),) if ids else ()
        return Generation(tuple(ids), tuple(-float(id) for id in ids), spans, stop, SECONDS)


class Servers:
    """A pool whose servers are all fakes. `entries` is the table, by name."""

    def __init__(self, *names: str, lane: str = "train", patience: float = 60.0) -> None:
        self.now = 0.0
        self.waits = Waits(lambda: self.now)
        self.meter = BusyTimer(Intervals())
        self.clients: list[FakeServer] = []
        self.pool = ServerPool(lane, self._connect, self.waits, self.meter, patience)
        self.entries = {name: entry(name) for name in names}
        self.tell()

    def _connect(self, entry: EngineEntry, use: EngineUse) -> FakeServer:
        self.clients.append(FakeServer(entry, use))
        return self.clients[-1]

    def tell(self, *entries: EngineEntry) -> None:
        """Send the table, with these changed."""
        self.entries |= {entry.name: entry for entry in entries}
        self.pool.update_table(tuple(self.entries.values()))

    def __getitem__(self, name: str) -> FakeServer:
        """The client of its newest incarnation."""
        return next(client for client in reversed(self.clients) if client.entry.name == name)

    def request_counts(self) -> list[str]:
        """How many requests each client got, as "name:requests"."""
        return [f"{client.entry.name}:{len(client.requests)}" for client in self.clients]


def entry(name: str, version: int = 0, **changes: Any) -> EngineEntry:
    facts = {"url": f"http://{name}", "incarnation": "1", "healthy": True} | changes
    return EngineEntry(name=name, version=PolicyVersion(0, version), **facts)


def request(session: str = "s", prompt: int = 3, limit: int = 8, stops: Sequence[int] = ()) -> Request:
    return Request(session, tuple(range(prompt)), Sampling(limit, tuple(stops)))


def counts_up(generation: Generation, prompt: int = 3) -> bool:
    """Whether tokens, log-probs and spans of a turn are complete and in line."""
    ids = tuple(range(prompt, prompt + len(generation.ids)))
    edges = [0, *(span.end for span in generation.spans)]
    return (
        generation.ids == ids
        and generation.logprobs == tuple(-float(id) for id in ids)
        and [span.start for span in generation.spans] == edges[:-1]
        and edges[-1] == len(ids)
    )
