"""A lane: one engine, the versions it is to load, and the turns sampled from it.

consumes: LoadWeights, through a mailbox in which the latest wins
waits for: the engine; on the pinned lane, the end of its episodes before its weights change
unblocks: turns that wait for fresher weights, by `changed`
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from asyncrl.engines.base import Engine, Request
from asyncrl.errors import EngineError, recorded
from asyncrl.roles.meter import Meter, Recorder
from asyncrl.roles.waits import Changed, Waits
from asyncrl.transport.messages import Loaded
from asyncrl.types import Generation
from asyncrl.weights.disk import read_manifest
from asyncrl.weights.manifest import WeightsError, WeightsRef

BROKEN = 8  # failed turns in a row that tell a broken engine from bad requests


@dataclass
class Lane:
    """`pinned`: the engine is built when first needed, and its weights change only when no episode runs:
    validation samples one fixed version while training goes on."""

    name: str
    build: Callable[[], Engine]
    waits: Waits
    meter: Meter
    timeline: Recorder
    deadline: float  # of one load, in seconds
    pinned: bool = False
    engine: Engine | None = None
    running: int = 0  # episodes
    failures: int = 0  # turns in a row that the engine refused or broke
    changed: Changed = field(default_factory=Changed)
    _mail: WeightsRef | None = None
    _loading: bool = False
    _loaded: tuple[WeightsRef, str] | None = None

    def offer(self, ref: WeightsRef) -> None:
        """Load this version next; one that was waiting is skipped."""
        self._mail = ref
        self.changed.fire()

    async def run(self, report: Callable[[Loaded], Awaitable[None]]) -> None:
        """Load what is offered, for ever, beside generation. Raises EngineError when the engine is broken:
        only another process can help."""
        while True:
            while self._mail is None or (self.pinned and self.running):
                if self.failures >= BROKEN:
                    raise EngineError(f"the {self.name} engine failed {self.failures} turns in a row")
                await self.changed.wait()
            ref, self._mail, self._loading = self._mail, None, True
            answer = await self._load(ref)
            self._loading = False
            self.changed.fire()
            await report(answer)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """The body is one episode. On the pinned lane it starts on the version offered last."""
        while self.pinned and (self._mail or self._loading or self.engine is None):
            with self.waits.named(f"{self.name} lane: its weights are being loaded"):
                await self.changed.wait()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.changed.fire()

    async def fresh(self, oldest: Callable[[], int]) -> None:
        """Wait until the weights are not older than `oldest()`. The pinned lane keeps what it has."""
        while not self.pinned and self.version < oldest():
            with self.waits.named(f"weights v{oldest()}: engine has v{self.version}"):
                await self.changed.wait()

    async def generate(self, request: Request) -> Generation:
        """Sample a turn. Raises EngineError."""
        if self.engine is None:
            raise EngineError(f"the {self.name} lane has no engine")
        try:
            with self.meter.turn():
                generation = await self.engine.generate(request)
        except EngineError:
            self.failures += 1
            if self.failures >= BROKEN:
                self.changed.fire()
            raise
        self.failures = 0
        self.meter.tokens += len(generation.ids)
        return generation

    def release(self, session: str) -> None:
        if self.engine is not None:
            self.engine.release(session)

    @property
    def version(self) -> int:
        return self.engine.version if self.engine is not None else -1

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()

    async def _load(self, ref: WeightsRef) -> Loaded:
        start, wall, checksum, gap, tokens = time.monotonic(), time.time(), "", 0.0, 0
        with recorded() as failure:
            async with asyncio.timeout(self.deadline):
                checksum = await self._swap(ref)
                gap, tokens = await self._probe(ref)
        self.timeline.record("load_weights", wall, time.time())
        seconds = time.monotonic() - start
        return Loaded(ref, self.name, checksum, seconds, failure.line, gap, tokens)

    async def _probe(self, ref: WeightsRef) -> tuple[float, int]:
        """(largest gap, tokens) between this engine's log-probs of the version's probe and the trainer's."""
        assert self.engine is not None
        try:
            probe = read_manifest(ref).probe
        except WeightsError:  # pruned since: the swap itself has succeeded
            return 0.0, 0
        if probe is None or self.engine.version != ref.version:
            return 0.0, 0
        own = await self.engine.score(probe.ids)
        gaps = [abs(a - b) for a, b in zip(own, probe.logprobs, strict=True)]
        return (max(gaps) if all(map(math.isfinite, gaps)) else math.inf), len(own)

    async def _swap(self, ref: WeightsRef) -> str:
        """Load a version; one that is already in use is only confirmed again."""
        if self._loaded is not None and self._loaded[0] == ref:
            return self._loaded[1]
        if self.engine is None:
            self.engine = await asyncio.to_thread(self.build)
        checksum = await self.engine.load(ref)
        self._loaded = ref, checksum
        return checksum
