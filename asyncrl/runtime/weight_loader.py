"""The versions for an engine to load: a mailbox in which the latest wins, and the checks of loaded versions.

consumes: versions offered, orders to sleep
waits for: the version to be at hand; the engine, at most `deadline` seconds a load
unblocks: tasks that wait for fresher weights, by `changed`
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from asyncrl.errors import EngineError, lacks_resources, recorded
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime.activity import Notifier
from asyncrl.runtime.mirror import Mirror
from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.weights.manifest import Manifest, Postponed, Probe, Unreachable, WeightsError, WeightsRef
from asyncrl.wire.messages.shared import Loaded, ProbeGap, Sleep, Slept

LOAD = "load_weights"  # a span of the timeline
# Failed loads in a row, over a time that the owner allows, after which an engine is given up.
LOAD_TRIES = 3
PROCESS_PATIENCE = 20.0  # seconds at most, where the engine's process fails: another process may do better


class Loadable(Protocol):
    """An `Engine`, or a supervisor's server; see `Engine` for the methods."""

    async def load(self, ref: WeightsRef) -> Manifest: ...

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]: ...


class LoadFailures:
    """Counts failed loads in a row. A version that is not available now is no failure."""

    def __init__(self) -> None:
        self._failure_count = 0
        self._failing_since = math.inf
        self._last_error = ""
        self._process_failed = True  # each time

    def add_answer(self, answer: Loaded) -> None:
        if not answer.error or answer.postponed:
            self._failure_count = 0
            self._failing_since = math.inf
            self._process_failed = True
            return

        self._failure_count += 1
        self._last_error = answer.error
        self._process_failed &= answer.process_failed
        self._failing_since = min(self._failing_since, time.monotonic())

    def give_up_reason(self, patience: float) -> str:
        """Say why the engine is to be given up: LOAD_TRIES failures or more, over `patience` seconds; else
        "". If the process failed each time, the patience is PROCESS_PATIENCE at most."""
        if self._process_failed:
            patience = min(patience, PROCESS_PATIENCE)
        if self._failure_count < LOAD_TRIES or time.monotonic() - self._failing_since < patience:
            return ""
        return f"{self._failure_count} loads in a row failed; last error: {self._last_error}"


class WeightLoader:
    """Loads offered versions into one engine. `engine` is called at each load, and may build the engine.
    `mirror` brings versions from another machine here."""

    def __init__(
        self,
        lane: str,
        timeline: Timeline,
        deadline: float,
        engine: Callable[[], Awaitable[Loadable]],
        mirror: Mirror | None = None,
    ) -> None:
        self.lane = lane
        self.changed = Notifier()
        self._timeline = timeline
        self._deadline = deadline
        self._engine = engine
        self._mirror = mirror

        self._offered_version: tuple[WeightsRef, Probe | None] | None = None
        self.compared_probe: Probe | None = None  # the probe that the last load has compared
        self._loading_version: tuple[WeightsRef, Probe | None] | None = None
        self._last_loaded: tuple[WeightsRef, Manifest] | None = None
        self._sleeps_asked = 0  # asked for, and not over

    def offer_version(self, ref: WeightsRef, probe: Probe | None = None) -> None:
        """Load this version next; a waiting version is skipped. A version under way is not loaded again,
        unless the engine is to sleep."""
        if self._loading_version != (ref, probe) or self._sleeps_asked:
            self._offered_version = ref, probe
        self.changed.notify()

    @property
    def has_waiting(self) -> bool:
        """True if a version has been offered and can be loaded now."""
        return self._offered_version is not None and not self._sleeps_asked

    @property
    def is_pending(self) -> bool:
        """True if a version is being loaded, or is about to be."""
        return self._loading_version is not None or self._offered_version is not None

    @property
    def version(self) -> PolicyVersion:
        """The version that was loaded last; NO_VERSION if a load has failed or the engine was put to sleep
        since."""
        return self._last_loaded[0].version if self._last_loaded is not None else NO_VERSION

    async def load_next(self) -> Loaded:
        """Load and check the version offered last; there must be an offer. Failures are in the answer."""
        assert self._offered_version is not None
        offered = self._offered_version
        self._loading_version = offered
        self._offered_version = None

        try:
            return await self._load_version(*offered)
        finally:
            self._loading_version = None
            self.changed.notify()

    def sleep(self, give_up: Callable[[], Awaitable[None]]) -> Awaitable[None]:
        """Have the engine sleep by `give_up`, after a load under way. An earlier offer that is not being
        loaded is dropped; a later offer is loaded after the sleep, even if it was loaded before."""
        self._offered_version = None
        self._sleeps_asked += 1
        return self._fall_asleep(give_up)

    async def _fall_asleep(self, give_up: Callable[[], Awaitable[None]]) -> None:
        try:
            while self._loading_version is not None:
                await self.changed.wait()

            self._last_loaded = None
            with EngineError.instead_of(TimeoutError, text="the engine did not go to sleep in time"):
                async with asyncio.timeout(self._deadline):
                    await give_up()
        finally:
            self._sleeps_asked -= 1
            self.changed.notify()

    async def _load_version(self, ref: WeightsRef, probe: Probe | None) -> Loaded:
        checksum = ""
        probe_gap: ProbeGap | None = None
        self.compared_probe = None
        started_at = time.monotonic()
        started_wall = time.time()
        with recorded() as failure:
            local_copy: AbstractAsyncContextManager[WeightsRef] = nullcontext(ref)
            is_in_use = self._last_loaded is not None and self._last_loaded[0] == ref
            if self._mirror is not None and not is_in_use:  # a version in use is confirmed without files
                local_copy = self._mirror.local_copy(ref)

            async with local_copy as local_ref:
                started_at = time.monotonic()
                started_wall = time.time()

                try:
                    async with asyncio.timeout(self._deadline):
                        engine = await self._engine()
                        manifest = await self._swap_version(engine, ref, local_ref)
                        if probe is not None:
                            probe_gap = await _compare_probe(engine, probe)
                            self.compared_probe = probe if probe_gap is not None else None
                        checksum = manifest.checksum
                except TimeoutError as timeout:
                    verb = "loaded" if self._last_loaded is None else "probed"
                    raise WeightsError(f"{ref.label} was not {verb} within {self._deadline:g} s") from timeout

        details = {"error": failure.line} if failure.line else {}
        self._timeline.record(
            LOAD, started_wall, time.time(), version=ref.version, engine=self.lane, **details
        )
        seconds = time.monotonic() - started_at
        postponed = isinstance(failure.error, Postponed)

        return Loaded(
            ref,
            self.lane,
            checksum,
            seconds,
            failure.line,
            probe_gap,
            postponed,
            uncompared=probe is None,
            lost=isinstance(failure.error, Unreachable),
            process_failed=failure.error is not None and _is_of_process(failure.error),
        )

    async def _swap_version(self, engine: Loadable, ref: WeightsRef, files: WeightsRef) -> Manifest:
        """Load a version; a version in use is only confirmed again."""
        if self._last_loaded is None or self._last_loaded[0] != ref:
            self._last_loaded = None  # until the load ends: after a failure the engine may hold anything
            self._last_loaded = ref, await engine.load(files)
        return self._last_loaded[1]


async def sleep_answer(order: Sleep, falling: Awaitable[Any]) -> Slept:
    """Return the answer to an order to sleep, once the engine sleeps. Failures are in the answer."""
    started_at = time.monotonic()
    with recorded() as failure:
        await falling
    return Slept(order.number, time.monotonic() - started_at, failure.line)


def _is_of_process(error: BaseException) -> bool:
    """True if a failed load was not the version's fault: the engine, the server or the loading process was
    broken, late, or lacked resources. (A failure to connect concerns the trainer that broadcasts.)"""
    if isinstance(error, EngineError | TimeoutError) or lacks_resources(error):
        return True
    return error.__cause__ is not None and _is_of_process(error.__cause__)


async def _compare_probe(engine: Loadable, probe: Probe) -> ProbeGap | None:
    """Compare the engine's log-probs of the probe with the trainer's. An engine that computes nothing has no
    log-probs to compare."""
    engine_logprobs = await asyncio.gather(*map(engine.score, probe.sequences))
    if not any(engine_logprobs):
        return None

    gaps = probe.compare(engine_logprobs)
    return ProbeGap(
        largest=gaps.largest,
        mean=gaps.mean,
        median=gaps.median,
        tokens=sum(map(len, engine_logprobs)),
        rounding=probe.rounding,
    )
