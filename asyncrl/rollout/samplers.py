"""A sampler with an embedded engine: the versions it is to load, and the turns sampled from it.

consumes: LoadWeights, Sleep
waits for: the engine, also while it sleeps; if `pinned`, the end of its episodes before its weights change
unblocks: turns that wait for fresher weights
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch

from asyncrl.config import RunConfig
from asyncrl.engines.base import Engine, EngineRefused, Request, engines
from asyncrl.engines.sglang.process import server_gpus
from asyncrl.errors import EngineError, recorded
from asyncrl.isolation.calls import to_its_end
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime.activity import ASLEEP, FRESHER, BusyTimer, Notifier, Sleeps, Waits
from asyncrl.runtime.mirror import Mirror
from asyncrl.runtime.process import quick_imports
from asyncrl.runtime.weight_loader import LoadFailures, WeightLoader
from asyncrl.types import Generation, TokenScores
from asyncrl.wire.messages.shared import Loaded

log = logging.getLogger("asyncrl.worker")

MAX_FAILURES = 8  # failed turns in a row after which the engine counts as broken


@dataclass
class LocalSampler:
    """`pinned`: the engine is built when first needed, and its weights change only when no episode runs:
    validation samples one fixed version while training goes on. Without an `engine` at first, that of
    training sleeps until there is a version."""

    name: str
    build: Callable[[], Engine]
    waits: Waits
    meter: BusyTimer
    timeline: Timeline
    deadline: float  # of one load, in seconds
    mirror: Mirror | None = None
    pinned: bool = False
    engine: Engine | None = None
    running: int = 0  # episodes
    failures: int = 0  # turns in a row that the engine broke
    loads: WeightLoader = field(init=False)
    sleeps: Sleeps = field(init=False)

    def __post_init__(self) -> None:
        self.loads = WeightLoader(self.name, self.timeline, self.deadline, self._engine_to_load, self.mirror)
        self.sleeps = Sleeps(self._asleep)

    @property
    def changed(self) -> Notifier:
        return self.loads.changed

    async def run(self, report: Callable[[Loaded], Awaitable[None]]) -> None:
        """Load what is offered, for ever, beside generation. Raises EngineError when the engine is broken, or
        refuses every version: the process must be restarted."""
        load_failures = LoadFailures()
        while True:
            while not self.loads.waiting or (self.pinned and self.running):
                if self.failures >= MAX_FAILURES:
                    raise EngineError(f"the {self.name} engine failed {self.failures} turns in a row")
                await self.changed.wait()
            loaded = await self.loads.next()
            self.sleeps.change(self._asleep)
            await report(loaded)
            load_failures.add(loaded)
            if not self.pinned and (failure_text := load_failures.too_many(self.deadline)):
                raise EngineError(f"the {self.name} engine: {failure_text}")

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """The body is one episode. If `pinned`, it starts on the version offered last."""
        while self.pinned and (self.loads.pending or self.sleeps.asleep):
            with self.waits.named(f"{self.name} engine: its weights are being loaded"):
                await self.changed.wait()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.changed.notify()

    async def fresh(self, min_version: Callable[[], int]) -> None:
        """Wait until the weights are not older than `oldest()`. With `pinned` they stay as they are."""
        while not self.pinned and self.version < min_version():
            wait_name = f"weights v{min_version()}: engine has v{self.version}"
            span_name = FRESHER
            if self.sleeps.asleep:
                wait_name = span_name = ASLEEP
            with self.waits.named(wait_name, span=span_name):
                await self.changed.wait()

    async def generate(self, request: Request, min_version: Callable[[], int] = lambda: 0) -> Generation:
        """Sample a turn, on weights that are not older than `oldest()`. Raises EngineError."""
        await self.fresh(min_version)
        try:
            with self._engine_busy():
                generation = await self._required_engine().generate(request)
        except EngineError as error:
            self.failures += not isinstance(error, EngineRefused)
            if self.failures >= MAX_FAILURES:
                self.changed.notify()
            raise
        self.failures = 0
        return generation

    async def score(self, request: Request) -> tuple[float, ...]:
        with self._engine_busy():
            return await self._required_engine().score(request.ids)

    async def read(self, session: str, ids: tuple[int, ...], count: int, top: int, _: object) -> TokenScores:
        """Have the base of the adapters score the last `count` of these ids; compare `ServerPool.read`."""
        await self.fresh(lambda: 0)
        with self._engine_busy():
            return await self._required_engine().read(ids, count, top)

    def _required_engine(self) -> Engine:
        if self.engine is None:
            raise EngineError(f"there is no {self.name} engine")
        return self.engine

    def _engine_busy(self) -> AbstractContextManager[None]:
        """The body asks the engine, which may fall asleep meanwhile: then it is not busy."""
        return self.sleeps.during(self.meter.turn, partial(self.waits.named, ASLEEP))

    @property
    def _asleep(self) -> bool:
        return self.engine is None or bool(getattr(self.engine, "asleep", False))  # a user's may lack it

    def sleep(self) -> Awaitable[None]:
        """Give up KV cache and weights, in order with the loads; see `WeightLoader.sleep`."""
        return self.loads.sleep(self._sleep_engine)

    async def _sleep_engine(self) -> None:
        if self.engine is not None:
            await self.engine.sleep()
        self.sleeps.change(self._asleep)

    def release(self, session: str) -> None:
        if self.engine is None:
            return
        with recorded() as release_failure:  # a registered engine's is users' code
            self.engine.release(session)
        if release_failure:
            log.warning("the %s engine does not release a session: %s", self.name, release_failure.line)

    @property
    def version(self) -> int:
        return self.engine.version if self.engine is not None and not self.sleeps.asleep else -1

    @property
    def tokens(self) -> int:
        """Sampled so far, turns under way included."""
        return self.engine.tokens if self.engine is not None else 0

    async def close(self) -> None:
        if self.engine is None:
            return
        with recorded() as close_failure:
            await self.engine.close()
        if close_failure:
            log.warning("the %s engine does not close: %s", self.name, close_failure.line)

    async def _engine_to_load(self) -> Engine:
        if self.engine is None:
            engine = await to_its_end(self.build)  # before that it cannot sleep
            if not self.pinned:
                await engine.sleep()  # as it does whenever it has no version
            self.engine = engine
        return self.engine


def engine_gpu(config: RunConfig, index: int, gpu_count: int) -> int:
    """Return the GPU of the embedded engine `index` on a machine where `gpus` are visible. Engines take turns
    among those that neither a trainer rank nor a scorer's server uses; where there are none, among those that
    no rank uses; and only then among all. Engines that take turns with the trainer have its ranks' GPUs; Ray
    shows each engine only its own."""
    if config.shifts:
        return index
    if config.launch.kind != "local":
        return 0

    gpus_without_ranks = range(min(config.ranks_on_gpus, gpu_count), gpu_count)
    scorer_gpus = {*chain(*server_gpus(config, gpu_count).values())}
    unused_gpus = [gpu for gpu in gpus_without_ranks if gpu not in scorer_gpus]
    candidate_gpus = unused_gpus or gpus_without_ranks or range(max(1, gpu_count))
    return candidate_gpus[index % len(candidate_gpus)]


def engine_factory(config: RunConfig, index: int = 0) -> Callable[[], Engine]:
    """Return what makes an embedded engine with the initial weights, for the worker of this index.
    ConfigError for an unknown one."""
    with quick_imports():
        engine_class = engines.load(config.engine.name)
        device = str(config.model.device)
        if config.engine.name == "torch" and config.shifts:  # it is built late
            from asyncrl.engines.torch.check import check_served

            check_served(config.model.path)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{engine_gpu(config, index, torch.cuda.device_count())}"
    return lambda: engine_class(
        model_path=config.model.path,
        dtype=config.model.dtype,
        slots=config.rollout.slots,
        max_len=config.rollout.max_tokens,
        device=device,
    )
