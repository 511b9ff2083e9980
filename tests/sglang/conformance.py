"""What the conformance tests share: engines to test, and the trainer's own model to test them against."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

import asyncrl.engines.torch.engine  # noqa: F401  registers "torch"
from asyncrl.config import ModelConfig
from asyncrl.engines.base import Engine, Request, Sampling, engines
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import PauseMode, ServerApi
from asyncrl.rollout.server_pool import ServerPool
from asyncrl.runtime.activity import BusyTimer, Waits
from asyncrl.trainer.model import Policy, Selected, load_policy, score_ids
from asyncrl.trainer.world import World
from asyncrl.types import Generation, PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.manifest import Manifest, WeightsRef
from asyncrl.wire.messages.worker import EngineEntry, EngineUse
from tests.fakes import weights as fake_weights
from tests.fakes.loop import Intervals
from tests.fakes.sglang import loader_of, sglang_config
from tests.fakes.training import stored
from tests.sglang.models import CONTEXT, build

VOCABULARY = 258
EOS = VOCABULARY - 1
MAX_LEN = CONTEXT - 16  # ids of an episode: a server keeps a few places of its context for itself
TOLERANCE = 1e-3  # of a log-prob, in nats
DEADLINE = 240.0  # seconds for one test's requests


class Closes(Protocol):
    async def close(self) -> None: ...


E = TypeVar("E", bound=Closes)
Open = Callable[[], AbstractAsyncContextManager[Engine]]


class Versions:
    """Published versions of one model: 0 as in `model`, the others quite different ones; and the trainer's
    policy with the weights of each."""

    def __init__(self, family: str, directory: Path, world: World, count: int = 4) -> None:
        self.directory = directory / "published"
        self.world = world
        self.paths = [build(family, directory / str(version), seed=version) for version in range(count)]
        self.policies = [
            load_policy(ModelConfig(path=str(path), dtype="float32"), world) for path in self.paths
        ]
        self.refs = [self.publish(stored(policy), at) for at, policy in enumerate(self.policies)]

    def tensors(self, version: int) -> dict[str, Tensor]:
        return disk.read_tensors(self.refs[version])[1]

    def publish(self, tensors: dict[str, Tensor], version: int, epoch: int = 0) -> WeightsRef:
        return fake_weights.publish(tensors, self.directory, PolicyVersion(epoch, version))

    def score(self, version: int, ids: tuple[int, ...]) -> tuple[float, ...]:
        return score_ids(self.policies[version], ids, self.world.device)

    def logprobs(self, version: int, request: Request, generation: Generation) -> Tensor:
        """What the trainer computes, teacher-forced, for the sampled ids at the temperature of the request
        (greedy: 1)."""
        ids = request.ids + generation.ids
        position = np.arange(len(request.ids), len(ids))
        temperature = torch.full(position.shape, request.sampling.temperature or 1.0)
        selected = Selected.lay_out([np.array(ids)], np.zeros_like(position), position, temperature)
        return _forward(self.policies[version], selected)

    def next_logprobs(self, version: int, ids: tuple[int, ...]) -> Tensor:
        """Of every id of the vocabulary, as the one that follows `ids`."""
        texts = [np.array([*ids, following]) for following in range(VOCABULARY)]
        position = np.full(VOCABULARY, len(ids))
        selected = Selected.lay_out(texts, np.arange(VOCABULARY), position, torch.ones(VOCABULARY))
        return _forward(self.policies[version], selected)

    def check(self, request: Request, generation: Generation) -> int:
        """Spans cover the ids exactly, and where all of the context is of one version, recorded log-probs are
        the trainer's. Returns how many were compared."""
        position = compared = 0
        recorded = torch.tensor(generation.logprobs)
        for span in generation.spans:
            assert span.start == position < span.end and span.kv_version <= span.version
            position = span.end
            if span.kv_version == span.version:
                tokens_of_span = slice(span.start, span.end)
                expected = self.logprobs(span.version, request, generation)[tokens_of_span]
                torch.testing.assert_close(recorded[tokens_of_span], expected, atol=TOLERANCE, rtol=0)
                compared += span.end - span.start
        assert position == len(generation.ids) == len(generation.logprobs)
        return compared


@torch.no_grad()
def _forward(policy: Policy, selected: Selected) -> Tensor:
    return policy(selected).logp


@dataclass(frozen=True)
class Subject:
    """An engine under test. `open` starts it, or connects to it, within the running event loop."""

    name: str
    versions: Versions
    open: Open

    @property
    def keeps_cache(self) -> bool:
        """Requests under way at an update go on with the keys and values that the old weights wrote."""
        return not self.name.endswith(("retract", "abort"))

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[Engine]:
        """An engine that holds version 0, within the deadline of one test."""
        async with asyncio.timeout(DEADLINE), self.open() as engine:
            await engine.load(self.versions.refs[0])
            yield engine


def embedded(model: Path) -> Open:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        engine = engines.get("torch")(
            model_path=str(model), dtype="float32", slots=64, max_len=MAX_LEN, max_batch_tokens=4096
        )
        try:
            yield engine
        finally:
            await engine.close()

    return opened


class Served:
    """A server as in a run: a supervisor loads weights into it, and a worker samples from its pool."""

    def __init__(self, url: str, mode: PauseMode, salt: str = "a run", replay: bool = False) -> None:
        config = sglang_config(MAX_LEN, mode, replay=replay)

        def connect(entry: EngineEntry, use: EngineUse) -> SGLangClient:
            return SGLangClient(ServerApi(entry.url), config, VOCABULARY, use, salt)

        self.loader = loader_of(ServerApi(url), config.weights)
        self.pool = ServerPool("train", connect, Waits(), BusyTimer(Intervals()), turn_patience=DEADLINE)
        self.generate = self.pool.generate
        self.release = self.pool.release
        self.score = self.loader.score

    @property
    def version(self) -> int:
        return self.loader.loaded.version.step if self.loader.loaded else -1

    async def load(self, ref: WeightsRef) -> Manifest:
        manifest = await self.loader.load(ref)
        self.pool.update_table([EngineEntry("engine 0", self.loader.api.url, "1", ref.version, True)])
        return manifest

    async def close(self) -> None:
        await asyncio.gather(self.pool.close(), self.loader.close())


@asynccontextmanager
async def in_use(engine: E) -> AsyncIterator[E]:
    """It is closed afterwards."""
    try:
        yield engine
    finally:
        await engine.close()


def served(url: str, mode: PauseMode) -> Open:
    """A running server."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        engine = Served(url, mode)
        try:
            # Labels come again in the next test, as they never do in a run: its cache starts empty.
            await engine.loader.api.flush_cache(wait=10)
            yield engine
        finally:
            await engine.close()

    return opened


def prompt(count: int, seed: object = 0) -> tuple[int, ...]:
    return tuple(random.Random(str(seed)).choices(range(EOS), k=count))


def ask(ids: tuple[int, ...], new: int = 16, session: str = "s", key: int = 0, **knobs: object) -> Request:
    knobs.setdefault("stop_ids", ())
    return Request(session, ids, Sampling(new, **knobs), key)  # type: ignore[arg-type]


def seen(generation: Generation) -> list[int]:
    """The versions that sampled, one after another."""
    return [version for version, _ in groupby(span.version for span in generation.spans)]


class Generates(Protocol):
    async def generate(self, request: Request) -> Generation: ...


async def under_way(engine: Generates, *requests: Request) -> list[asyncio.Task[Generation]]:
    """Start requests, and return when they are sampling: what was asked for after them is done by then."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)  # a task has sent nothing before it has run
    await engine.generate(ask(prompt(3, "gate"), 8, "gate"))
    return tasks
