"""Samples short sequences with a new version: the trainer tests that the engine samples from its policy.

consumes: versions that an engine has loaded and whose probe it has compared
waits for: the engine, in the background, SAMPLE_SECONDS at most
unblocks: nobody: without samples nothing is tested
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.engines.base import Request, Sampling
from asyncrl.errors import one_line, recorded
from asyncrl.types import NO_VERSION, Generation, PolicyVersion
from asyncrl.weights.manifest import Probe
from asyncrl.wire.messages.shared import Loaded, ProbeSamples, SampledSequence

log = logging.getLogger("asyncrl.engine")

SAMPLE_COUNT = 64  # sequences
SAMPLE_TOKENS = 16  # sampled tokens of each sequence
PROMPT_TOKENS = 8
REQUESTS_AT_ONCE = 16  # sequences in a batch: turns of episodes find room beside it
SAMPLE_SECONDS = 60.0  # seconds for all sequences of a version


class ProbeSampling:
    """Samples once with each version whose probe was compared, and reports the sequences. Nothing waits for
    the task: a newer version, a sleep or the deadline ends it, and errors are only logged.

    `generate` and `release` are those of the engine that samples the turns of episodes. `engine`: the index
    of the worker or of the server.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: int,
        generate: Callable[[Request], Coroutine[Any, Any, Generation]],
        release: Callable[[str], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._generate = generate
        self._release = release
        self._version = NO_VERSION  # sampled last
        self._task: asyncio.Task[None] | None = None

    def note_load(
        self, loaded: Loaded, probe: Probe | None, report: Callable[[ProbeSamples], Awaitable[None]]
    ) -> None:
        """Begin to sample with a loaded version, if the engine has compared this probe. A version is sampled
        once: the same keys would give the same sequences again."""
        version = loaded.ref.version
        if loaded.error or version == self._version:
            return

        self.stop()
        if probe is not None:
            self._version = version
            requests = sample_requests(self._config, self._engine, version, probe)
            self._task = asyncio.create_task(self._sample(version, requests, report))

    def stop(self) -> None:
        """End the task under way, if any."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End the task under way, and wait for its end."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _sample(
        self,
        version: PolicyVersion,
        requests: Sequence[Request],
        report: Callable[[ProbeSamples], Awaitable[None]],
    ) -> None:
        """Sample and report the sequences in batches: if the trainer moves on to another version early, the
        first batches still count."""
        with recorded() as failure:
            async with asyncio.timeout(SAMPLE_SECONDS):
                for start in range(0, len(requests), REQUESTS_AT_ONCE):
                    sequences = await self._sample_batch(version, requests[start : start + REQUESTS_AT_ONCE])
                    if sequences:
                        await report(ProbeSamples(version, sequences))

        error = failure.error
        if isinstance(error, ExceptionGroup):  # by the task group
            error = error.exceptions[0]
        if error is not None:
            log.info("v%d was not sampled for the test of the engine: %s", version.step, one_line(error))

    async def _sample_batch(
        self, version: PolicyVersion, requests: Sequence[Request]
    ) -> tuple[SampledSequence, ...]:
        """Return the sequences that only this version has sampled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate(request)) for request in requests]
        finally:
            for request in requests:
                self._release(request.session)

        generations = [task.result() for task in tasks]
        return tuple(
            SampledSequence(request.ids + generation.ids, generation.logprobs)
            for request, generation in zip(requests, generations, strict=True)
            if generation.ids
            and all(span.version == span.kv_version == version.step for span in generation.spans)
        )


def sample_requests(
    config: RunConfig, engine: int, version: PolicyVersion, probe: Probe
) -> tuple[Request, ...]:
    """Return requests for SAMPLE_COUNT sequences, the same for the same engine and version. Their prompts are
    drawn from the ids of the probe, which are below the vocabulary."""
    generator = random.Random(f"{config.seed} {engine} {version.label}")
    sampling = Sampling(SAMPLE_TOKENS, (), config.rollout.temperature)
    return tuple(
        Request(
            session=f"probe-{version.label}-{index}",
            ids=tuple(generator.choices(probe.ids, k=PROMPT_TOKENS)),
            sampling=sampling,
            key=generator.getrandbits(63),
            agent=next(iter(config.adapters), ""),
        )
        for index in range(SAMPLE_COUNT)
    )
