"""What samples tokens: ids in, ids with log-probs and version spans out."""

from __future__ import annotations

from typing import Protocol

import msgspec

from asyncrl.errors import EngineError
from asyncrl.registry import Registry
from asyncrl.types import Generation
from asyncrl.weights.manifest import Manifest, WeightsRef


class Sampling(msgspec.Struct, frozen=True):
    """How to sample one turn. Temperature 0 is greedy; top_p 1 and top_k 0 are off."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class Request(msgspec.Struct, frozen=True):
    """One turn of one episode.

    `session` names the episode: its prefix may be kept between turns. `ids` is the whole prefix.
    `key` seeds the sampling: the token at position p depends on (key, p) and the weights only.
    """

    session: str
    ids: tuple[int, ...]
    sampling: Sampling
    key: int = 0


class EngineBusy(EngineError):
    """The engine's queue is full. Nothing was sampled: the request may be sent again, anywhere."""


class EngineLost(EngineError):
    """The engine died, or took the request back, after it had sampled `partial` (stop: ABORT): another
    engine can go on from there."""

    def __init__(self, message: str, partial: Generation) -> None:
        super().__init__(message)
        self.partial = partial


class Engine(Protocol):
    """A continuous-batching sampler that swaps its weights between two tokens."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Cancelling the call aborts it. Raises EngineError on a request it must refuse,
        and an engine outside this process EngineBusy or EngineLost."""

    def abort(self, session: str) -> None:
        """End the session's running turn: its `generate` returns what there is, with StopReason.ABORT."""

    def release(self, session: str) -> None:
        """The episode is over: forget its prefix. Unknown sessions are fine."""

    async def load(self, ref: WeightsRef) -> Manifest:
        """Swap in a published version without draining; returns what was loaded. Raises WeightsError and
        keeps the old weights when the files are missing or damaged."""

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probs of ids[1:] under the weights in use, at temperature 1."""

    async def close(self) -> None: ...


engines: Registry = Registry("engine")
