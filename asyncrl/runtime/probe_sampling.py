"""Samples short sequences with a new version: the trainer tests that the engine samples from its policy.

consumes: versions that an engine has loaded and whose probe it has compared
waits for: the engine, in the background, SAMPLE_SECONDS at most
unblocks: nobody: without samples nothing is tested
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.engines.base import Request, Sampling
from asyncrl.errors import Failure, recorded
from asyncrl.types import NO_VERSION, Generation, PolicyVersion
from asyncrl.weights.manifest import Probe
from asyncrl.wire.messages.shared import Loaded, ProbeSamples, SampledSequence

log = logging.getLogger("asyncrl.engine")

SAMPLE_COUNT = 64  # sequences
SAMPLE_TOKENS = 16  # sampled tokens of each sequence
PROMPT_COUNT = 16  # different prompts, each of SAMPLE_COUNT // PROMPT_COUNT requests in a row
# More than a block of the embedded engine's prefix cache, 32 ids, and of most servers' caches.
PROMPT_TOKENS = 40
# Sequences in a batch, at most. In an embedded engine each sequence takes a slot. Without a free slot, an
# episode that waits between two turns loses its slot, and its prefix is computed again.
REQUESTS_AT_ONCE = 16
SLOTS_PER_SEQUENCE = 4  # a batch takes at most a quarter of `rollout.slots`, or MIN_REQUESTS_AT_ONCE
MIN_REQUESTS_AT_ONCE = 2  # of the same prompt: equal sequences of a batch show an engine with one seed
SAMPLE_SECONDS = 60.0  # seconds for all sequences of a version


class ProbeSampling:
    """Samples once with each version whose probe was compared, and reports the sequences. Nothing waits for
    the task: a newer version, a sleep or the deadline ends the task, and errors are only logged.

    The prompts are the same for all versions: an engine whose prefix cache outlives an update samples from
    old keys and values, and the trainer's log-probs tell. Several requests have the same prompt: an engine
    that draws the same random numbers for all of them gives the same sequence.

    `generate` and `release` use the engine that samples the turns of episodes. `engine`: the index of the
    worker or of the server.
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
        quarter_of_slots = config.rollout.slots // SLOTS_PER_SEQUENCE
        self._batch_size = min(REQUESTS_AT_ONCE, max(MIN_REQUESTS_AT_ONCE, quarter_of_slots))
        self._prompts: tuple[tuple[int, ...], ...] = ()  # drawn with the first probe
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
            self._prompts = self._prompts or draw_prompts(self._config, self._engine, probe)
            requests = sample_requests(self._config, self._engine, version, self._prompts)
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
                for start in range(0, len(requests), self._batch_size):
                    sampled_turns = await self._sample_batch(
                        version, requests[start : start + self._batch_size]
                    )
                    sequences = sequences_of_version(version, sampled_turns)
                    wrong_label = find_wrong_label(version, sampled_turns) if start == 0 else None
                    if sequences or wrong_label is not None:
                        await report(ProbeSamples(version, sequences, wrong_label))

        if failure:
            log.info("v%d: sampling for the engine's test did not finish: %s", version.step, failure.line)

    async def _sample_batch(
        self, version: PolicyVersion, requests: Sequence[Request]
    ) -> list[tuple[Request, Generation]]:
        """Return the requests and what was sampled, without failed requests."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate_recorded(request)) for request in requests]
        finally:
            for request in requests:
                self._release(request.session)

        sampled_turns = list[tuple[Request, Generation]]()
        error_lines = list[str]()
        for request, task in zip(requests, tasks, strict=True):
            generation = task.result()
            if isinstance(generation, Failure):
                error_lines.append(generation.line)
            else:
                sampled_turns.append((request, generation))

        if error_lines:
            log.info(
                "v%d: %d of %d sequences for the engine's test could not be sampled: %s",
                version.step,
                len(error_lines),
                len(requests),
                error_lines[0],
            )
        return sampled_turns

    async def _generate_recorded(self, request: Request) -> Generation | Failure:
        """Return the generation, or the error of the engine."""
        with recorded() as failure:
            return await self._generate(request)
        return failure


def sequences_of_version(
    version: PolicyVersion, sampled_turns: Iterable[tuple[Request, Generation]]
) -> tuple[SampledSequence, ...]:
    """Return the sequences that only this version has sampled, from keys and values that only this version
    has computed."""
    return tuple(
        # The coordinator accepts no longer sequences; a user's engine may sample more than requested.
        SampledSequence(request.ids + turn.ids[:SAMPLE_TOKENS], turn.logprobs[:SAMPLE_TOKENS])
        for request, turn in sampled_turns
        if turn.ids and all(span.version == span.kv_version == version.step for span in turn.spans)
    )


def find_wrong_label(
    version: PolicyVersion, sampled_turns: Iterable[tuple[Request, Generation]]
) -> int | None:
    """Return the newest version, a step, that the engine names for tokens of these turns, if that version is
    older than the loaded one; else None. A newer version may have been loaded meanwhile."""
    labels = [span.version for _, turn in sampled_turns for span in turn.spans]
    newest_label = max(labels, default=version.step)
    return newest_label if newest_label < version.step else None


def draw_prompts(config: RunConfig, engine: int, probe: Probe) -> tuple[tuple[int, ...], ...]:
    """Return PROMPT_COUNT prompts, the same for the same engine, from the ids of the probe, which are below
    the vocabulary."""
    generator = random.Random(f"{config.seed} {engine}")
    length = min(PROMPT_TOKENS, max(1, config.rollout.max_tokens - SAMPLE_TOKENS))
    return tuple(tuple(generator.choices(probe.ids, k=length)) for _ in range(PROMPT_COUNT))


def sample_requests(
    config: RunConfig, engine: int, version: PolicyVersion, prompts: Sequence[tuple[int, ...]]
) -> tuple[Request, ...]:
    """Return requests for SAMPLE_COUNT sequences, the same for the same engine and version."""
    generator = random.Random(f"{config.seed} {engine} {version.label}")
    sampling = Sampling(SAMPLE_TOKENS, (), config.rollout.temperature)
    return tuple(
        Request(
            session=f"probe-{version.label}-{index}",
            ids=prompts[index * len(prompts) // SAMPLE_COUNT],
            sampling=sampling,
            key=generator.getrandbits(63),
            agent=next(iter(config.adapters), ""),
        )
        for index in range(SAMPLE_COUNT)
    )
