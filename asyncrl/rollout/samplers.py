"""A sampler with an embedded engine: loads offered versions, and samples turns.

consumes: LoadWeights, Sleep
waits for: the engine, also while asleep; with `keeps_version`, the end of all episodes before a load
unblocks: turns that wait for fresher weights
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
from asyncrl.runtime.probe_sampling import ProbeSampling
from asyncrl.runtime.process import quick_imports
from asyncrl.runtime.weight_loader import LoadFailures, WeightLoader
from asyncrl.types import Generation, TokenScores
from asyncrl.wire.messages.shared import Loaded, ProbeSamples

log = logging.getLogger("asyncrl.worker")

MAX_FAILURES = 8  # failed turns in a row, after which the engine counts as broken


@dataclass
class LocalSampler:
    """Samples with an engine of this process. `keeps_version`: the engine is built when first needed, and the
    weights change only when no episode runs: validation samples a fixed version while training goes on.
    Without an `engine` at the start, the training engine sleeps until a version arrives."""

    name: str
    build_engine: Callable[[], Engine]
    waits: Waits
    busy_timer: BusyTimer
    timeline: Timeline
    load_deadline: float  # seconds for each load
    mirror: Mirror | None = None
    keeps_version: bool = False
    engine: Engine | None = None
    running_episodes: int = 0
    failures_in_row: int = 0  # failed turns
    probe_sampling: ProbeSampling | None = None  # only for the training engine
    loads: WeightLoader = field(init=False)
    sleeps: Sleeps = field(init=False)

    def __post_init__(self) -> None:
        self.loads = WeightLoader(
            self.name, self.timeline, self.load_deadline, self._engine_to_load, self.mirror
        )
        self.sleeps = Sleeps(self._engine_asleep)

    @property
    def changed(self) -> Notifier:
        return self.loads.changed

    async def run(self, report: Callable[[Loaded | ProbeSamples], Awaitable[None]]) -> None:
        """Load offered versions for ever, beside generation. Raises EngineError when the engine is broken, or
        refuses every version: the process must then be restarted."""
        load_failures = LoadFailures()
        while True:
            while not self.loads.has_waiting or (self.keeps_version and self.running_episodes):
                if self.failures_in_row >= MAX_FAILURES:
                    raise EngineError(f"the {self.name} engine failed {self.failures_in_row} turns in a row")
                await self.changed.wait()

            loaded = await self.loads.load_next()
            self.sleeps.set_asleep(self._engine_asleep)
            await report(loaded)
            if self.probe_sampling is not None:
                self.probe_sampling.note_load(loaded, self.loads.compared_probe, report)
            load_failures.add_answer(loaded)
            if not self.keeps_version and (failure_text := load_failures.give_up_reason(self.load_deadline)):
                raise EngineError(f"the {self.name} engine: {failure_text}")

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Run one episode in the body. With `keeps_version`, the episode starts on the version that was
        offered last."""
        while self.keeps_version and (self.loads.is_pending or self.sleeps.asleep):
            with self.waits.wait_named(f"{self.name} engine: its weights are being loaded"):
                await self.changed.wait()

        self.running_episodes += 1
        try:
            yield
        finally:
            self.running_episodes -= 1
            if not self.running_episodes:
                self.changed.notify()

    async def wait_for_version(self, min_version: Callable[[], int]) -> None:
        """Wait until the weights are not older than `min_version()`. With `keeps_version` nothing is
        awaited."""
        while not self.keeps_version and self.version < min_version():
            wait_name = f"weights v{min_version()}: engine has v{self.version}"
            if self.sleeps.asleep:
                wait_name = ASLEEP
            with self.waits.wait_named(wait_name, span=ASLEEP if self.sleeps.asleep else FRESHER):
                await self.changed.wait()

    async def generate(self, request: Request, min_version: Callable[[], int] = lambda: 0) -> Generation:
        """Sample a turn on weights that are not older than `min_version()`. Raises EngineError."""
        await self.wait_for_version(min_version)
        try:
            generation = await self.generate_uncounted(request)
        except EngineError as error:
            self.failures_in_row += not isinstance(error, EngineRefused)
            if self.failures_in_row >= MAX_FAILURES:
                self.changed.notify()
            raise

        self.failures_in_row = 0
        return generation

    async def generate_uncounted(self, request: Request) -> Generation:
        """Sample with the weights in use, for a test of the engine: neither a failure nor a success changes
        the number of failed turns in a row. Raises EngineError."""
        with self._engine_busy():
            return await self._required_engine().generate(request)

    async def score(self, request: Request) -> tuple[float, ...]:
        """Return the log-probs of the request's ids, without the first; those of image ids mean nothing."""
        engine = self._required_engine()
        with self._engine_busy():
            return await engine.score(request.ids, **_image_argument(request.images))

    async def read(
        self,
        session: str,
        ids: tuple[int, ...],
        count: int,
        top: int,
        while_waiting: object,
        images: Mapping[str, bytes],
    ) -> TokenScores:
        """Have the base model of the adapters score the last `count` of these ids; compare
        `ServerPool.read`."""
        await self.wait_for_version(lambda: 0)
        engine = self._required_engine()
        with self._engine_busy():
            return await engine.read(ids, count, top, **_image_argument(images))

    def _required_engine(self) -> Engine:
        if self.engine is None:
            raise EngineError(f"this worker has no {self.name} engine")
        return self.engine

    def _engine_busy(self) -> AbstractContextManager[None]:
        """Ask the engine in the body. An engine that falls asleep meanwhile does not count as busy."""
        return self.sleeps.during(self.busy_timer.busy_span, partial(self.waits.wait_named, ASLEEP))

    @property
    def _engine_asleep(self) -> bool:
        # A user's engine may lack the attribute.
        return self.engine is None or bool(getattr(self.engine, "asleep", False))

    def sleep(self) -> Awaitable[None]:
        """Give up KV cache and weights, in order with the loads; see `WeightLoader.sleep`."""
        return self.loads.sleep(self._sleep_engine)

    async def _sleep_engine(self) -> None:
        if self.probe_sampling is not None:
            self.probe_sampling.stop()
        if self.engine is not None:
            await self.engine.sleep()
        self.sleeps.set_asleep(self._engine_asleep)

    def release(self, session: str) -> None:
        if self.engine is None:
            return
        with recorded() as release_failure:  # a registered engine is users' code
            self.engine.release(session)
        if release_failure:
            log.warning("the %s engine could not release a session: %s", self.name, release_failure.line)

    @property
    def version(self) -> int:
        return self.engine.version if self.engine is not None and not self.sleeps.asleep else -1

    @property
    def tokens(self) -> int:
        """Return the tokens sampled so far, including unfinished turns."""
        return self.engine.tokens if self.engine is not None else 0

    @property
    def reprefilled_tokens(self) -> int:
        """Return the prompt tokens that the engine prefilled again for want of a layer's state; 0 for an
        engine that does not count them."""
        return getattr(self.engine, "reprefilled_tokens", 0)

    async def close(self) -> None:
        if self.probe_sampling is not None:
            await self.probe_sampling.close()
        if self.engine is None:
            return
        with recorded() as close_failure:
            await self.engine.close()
        if close_failure:
            log.warning("the %s engine could not be closed: %s", self.name, close_failure.line)

    async def _engine_to_load(self) -> Engine:
        if self.engine is None:
            engine = await to_its_end(self.build_engine)
            if not self.keeps_version:
                await engine.sleep()  # an engine without a version sleeps
            self.engine = engine
        return self.engine


def engine_gpu(config: RunConfig, index: int, gpu_count: int) -> int:
    """Return the GPU of the embedded engine `index` on a machine with `gpu_count` visible GPUs.

    Engines share the GPUs that neither a trainer rank nor a scorer's server uses; without any, the GPUs that
    no rank uses; and only then all GPUs. Engines that take turns with the trainer use the ranks' GPUs; Ray
    shows each engine only a GPU of its own.
    """
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
    """Return a function that makes an embedded engine with the initial weights for the worker `index`.
    ConfigError for an unknown engine."""
    with quick_imports():
        engine_class = engines.load(config.engine.name)
        device = str(config.model.device)
        if config.engine.name == "torch" and config.shifts:  # the engine is built late
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


def _image_argument(images: Mapping[str, bytes]) -> dict[str, Mapping[str, bytes]]:
    """Return the argument for the images of ids; none without images, as a user's engine may read no
    images."""
    return {"images": images} if images else {}
