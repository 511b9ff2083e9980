"""An engine that writes what a test tells it to, when the test lets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from asyncrl.engines.base import Request
from asyncrl.types import Generation, StopReason, TokenScores, VersionSpan
from asyncrl.weights.manifest import Manifest, WeightsError, WeightsRef
from tests.fakes.chat import END, encode, read


def generation(text: str, version: int = 0, stop: StopReason = StopReason.STOP) -> Generation:
    """Return a whole turn of `text`, sampled by a version."""
    ids = (*encode(text), END) if stop is StopReason.STOP else encode(text)
    span = VersionSpan(0, len(ids), version, version)
    return Generation(ids, tuple(-0.5 for _ in ids), (span,), stop)


async def _watched(request: Request, turn: Generation) -> Generation:
    """Return the turn as far as the request's watch lets the turn come, id by id."""
    for count in range(1, len(turn.ids) + 1 if request.stop_check else 0):
        await asyncio.sleep(0)
        if request.stop_check and request.stop_check(turn.ids[:count]):
            span = VersionSpan(0, count, turn.spans[0].version, turn.spans[0].version)
            return Generation(turn.ids[:count], turn.logprobs[:count], (span,), StopReason.TEXT)
    return turn


class ScriptedEngine:
    """An engine that plays a script.

    `script` returns the text of a turn, or raises. `gate` is open unless a test closes it. `parts`: the
    numbers of first tokens that a requester receives early, in that order.
    """

    def __init__(self, script: Callable[[Request], str], version: int = 0) -> None:
        self.script = script
        self._version = version
        self.gate = asyncio.Event()
        self.gate.set()

        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.requests: list[Request] = []
        self.loads: list[WeightsRef] = []
        self.read_ids: list[tuple[int, ...]] = []
        self.released: list[str] = []
        self.cancelled: list[str] = []
        self.closed = self.asleep = False
        self.tokens = 0
        self.parts: Sequence[int] = ()

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.session)
            raise

        turn = generation(self.script(request), self._version)
        if len(turn.ids) > (max_tokens := request.sampling.max_new_tokens):
            turn = generation(read(turn.ids[:max_tokens]), self._version, StopReason.LENGTH)
        for count in (count for count in self.parts if count < len(turn.ids)):
            await request.on_part(generation(read(turn.ids[:count]), self._version, StopReason.ABORT))
        turn = await _watched(request, turn)
        self.tokens += len(turn.ids)

        return turn

    def abort(self, session: str) -> None: ...

    def release(self, session: str) -> None:
        self.released.append(session)

    async def load(self, ref: WeightsRef) -> Manifest:
        self.loads.append(ref)
        await self.load_gate.wait()
        if ref.path == "damaged":
            raise WeightsError("weights damaged: checksum")
        self._version = ref.version.step
        self.asleep = False
        return Manifest(ref.version, (), f"sum-{ref.version.step}")

    async def sleep(self) -> None:
        self.asleep = True

    async def score(self, ids: tuple[int, ...], images: Mapping[str, bytes] = {}) -> tuple[float, ...]:
        return tuple(-1.0 for _ in ids[1:])

    async def read(
        self, ids: tuple[int, ...], count: int, top: int, images: Mapping[str, bytes] = {}
    ) -> TokenScores:
        self.read_ids.append(ids)
        return TokenScores(np.full(count, -1, "<f4").tobytes())

    async def close(self) -> None:
        self.closed = True
