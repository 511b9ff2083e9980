"""Continuous batching, without a clock or an event loop: requests join and leave the batch at every step.

    add ──► waiting ──► slot ──► prefill ──► decode ──► end
            (FIFO)      (kept prefix skipped, (one token per slot and step)
                         another slot's copied)

A step is one forward over every decoding slot and, within the token budget, new prompt tokens. The host knows
every length in advance, so a step waits for the device once: to learn which slots are done.
"""

from __future__ import annotations

import math
import time
from collections import deque
from itertools import pairwise, takewhile

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from asyncrl.engines.base import Request
from asyncrl.engines.torch.recorded import RecordedStep
from asyncrl.engines.torch.slots import KVCache, Prefixes, Slot, Slots, Source
from asyncrl.engines.torch.step_layout import Chunk, SlotSampling, StepLayout, build, reordered
from asyncrl.errors import EngineError
from asyncrl.types import Generation, StopReason, VersionSpan
from asyncrl.weights.adapters import Adapters

_RAGGED = 4  # a prompt waits for a later step rather than be padded to more than 4 times its length


class Run:
    """Follows one request from arrival to its end."""

    def __init__(self, request: Request, limit: int, version: int, started: float) -> None:
        self.request = request
        self.ids = request.ids  # to prefill: after a sleep, with what it had sampled
        self.limit = limit  # length at which it ends
        self.slot: Slot | None = None
        self.source: Source | None = None  # of a longer prefix than its slot holds, to be copied
        self.filled = 0  # leading ids whose KV is in the cache
        self.heard: list[int] = []  # sampled ids that its watch has heard of
        self.decoding = False
        self.spans: tuple[VersionSpan, ...] = ()  # of what it had sampled before the last sleep
        self.marks = [(0, version)]  # (ids sampled before, version in use from there on)
        self.started = started

    @property
    def prompt(self) -> int:
        return len(self.request.ids)

    @property
    def index(self) -> int:
        assert self.slot is not None
        return self.slot.index


class Batcher:
    """Owns the KV cache and decides what each step computes."""

    def __init__(self, model: PreTrainedModel, slots: int, max_len: int, budget: int, version: int) -> None:
        self.version = version
        self._swaps = 0  # of weights: two may have one version number
        self.budget = budget
        self.generated = 0  # tokens, in all
        self.runs: dict[str, Run] = {}  # by session: all that have not ended
        self.cache = KVCache(model, slots, max_len)
        self._forward = RecordedStep(self.cache)
        self.slots = Slots(slots)
        self._prefixes = Prefixes()
        self._waiting: deque[Run] = deque()
        self._filling: list[Run] = []
        self._decoding: dict[int, Run] = {}  # by slot
        self._lengths = np.zeros(slots, dtype=np.int64)  # ids of decoding slots; the last one has no KV yet
        self._sampling = SlotSampling(slots)
        self._steady: StepLayout | None = None  # the last plan, while it only needs to be advanced
        # asleep since then; seconds before that
        self._since = math.inf
        self._slept = 0.0

    def add(self, request: Request) -> Run:
        limit = min(len(request.ids) + request.sampling.max_new_tokens, self.cache.max_len)
        run = self.runs[request.session] = Run(request, limit, self.version, self._now())
        self._waiting.append(run)
        return run

    def adapt(self, adapters: Adapters) -> None:
        """From the next step on, each slot is computed with the adapter of its agent, too."""
        self.cache.adapters = adapters
        for slot in self.slots.all:
            self.cache.agents[slot.index] = self._adapter(slot.agent)
        self._forward = RecordedStep(self.cache)  # recordings are of the model without them

    def _adapter(self, agent: str) -> int:
        return self.cache.adapters.index(agent) if self.cache.adapters else 0

    def mark(self, version: int) -> None:
        """From the next step on, tokens are sampled by other weights."""
        self.version = version
        self._swaps += 1
        for run in self.runs.values():
            run.marks.append((self._sampled(run), version))

    @property
    def asleep(self) -> bool:
        return self._since < math.inf

    def sleep(self) -> None:
        """The KV is lost: what has sampled already is prefilled again with that, after `wake`."""
        for run in self._decoding.values():
            sampled = self.so_far(run)
            run.ids = run.request.ids + sampled.ids
            run.decoding = False
            run.spans = sampled.spans
            run.marks = [(len(sampled.ids), self.version)]
        self._filling = [*self._decoding.values(), *self._filling]
        self._decoding = {}
        self._steady = None
        self._prefixes = Prefixes()
        self._lengths[:] = 0
        for slot in self.slots.all:
            slot.held = ()
        for run in self._filling:
            run.filled = 0
            self._find_prefix(run)
        self._since = time.perf_counter()

    def wake(self) -> None:
        """There are weights again, and room for KV."""
        for pool in self.cache.pools:
            pool.zero_()  # no mask stops a NaN
        self._slept += time.perf_counter() - self._since
        self._since = math.inf

    def _now(self) -> float:
        """Return the time, which stands still during a sleep."""
        return min(time.perf_counter(), self._since) - self._slept

    @torch.inference_mode()
    def step(self) -> list[Run]:
        """Sample one token for every decoding slot and prefill what fits; returns the runs to `end`."""
        self._admit()
        if self._steady and self._steady.further and not self._filling:
            plan = self._steady.advance()
            chunks = {}
        else:
            self._order()
            chunks = self._chunks()
            plan = build(self.cache, self._sampling, self._lengths, list(chunks.values()))
        done = self._forward(plan)
        self._steady = plan
        self._lengths += self._lengths > 0
        for run, chunk in chunks.items():
            self._filled(run, chunk)
        self.generated += len(self._decoding)
        return [self._decoding[slot] for slot in done]

    def watched(self, run: Run) -> bool:
        """Tell the run's watch of its new id; whether the run ends with it."""
        if (watch := run.request.watch) is None or (sampled := self._sampled(run)) == len(run.heard):
            return False
        run.heard.append(int(self.cache.ids[run.index, run.prompt + sampled - 1]))
        return watch(run.heard)

    def end(self, run: Run, stop: StopReason | None = None) -> Generation:
        """Take a run out of the batch with what it has sampled. `stop` says why if it was not done. Raises
        EngineError if its log-probs are not finite; it is out all the same."""
        generation = self.so_far(run)
        del self.runs[run.request.session]
        ids = generation.ids
        finite = all(map(math.isfinite, generation.logprobs))
        self._leave(run, (run.request.ids + ids)[: -1 if run.decoding else run.filled] if finite else ())
        if not finite:
            if not self.asleep:
                self.cache.wipe(run.index)
            raise EngineError(f"session {run.request.session!r}: the model's logits are not finite numbers")
        if stop is None:
            stop = StopReason.STOP if ids[-1] in run.request.sampling.stop_ids else StopReason.LENGTH
        return replace(generation, stop=stop)

    def so_far(self, run: Run) -> Generation:
        """Return what a run has sampled."""
        sampled = self._sampled(run)
        spans = run.spans + tuple(
            VersionSpan(start, end, version, run.slot.born if run.slot else version)
            for (start, version), (end, _) in pairwise([*run.marks, (sampled, 0)])
            if start < end
        )
        return Generation(*self._read(run, sampled), spans, StopReason.ABORT, self._now() - run.started)

    def _order(self) -> None:
        """Move slots so that long rows lie together: attention reads a range as far as its longest row."""
        lengths = self._lengths.copy()
        for run in self._filling:  # they decode soon
            lengths[run.index] = len(run.ids)
        sources = reordered(lengths)
        if sources is None:
            return
        moved = np.flatnonzero(sources != np.arange(len(sources)))
        length = max(self._used(self.slots.all[slot]) for slot in moved)
        self.cache.move(sources[moved], moved, length)
        self._lengths = self._lengths[sources]
        self._sampling.move(sources)
        self.slots.move(sources.tolist())
        self._decoding = {run.index: run for run in self._decoding.values()}

    def _used(self, slot: Slot) -> int:
        """The number of leading positions of a slot that hold something."""
        run = self.runs.get(slot.session or "")
        return run.prompt + self._sampled(run) if run and run.slot is slot else len(slot.held)

    def _sampled(self, run: Run) -> int:
        return (int(self._lengths[run.index]) if run.decoding else len(run.ids)) - run.prompt

    def _read(self, run: Run, sampled: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        if sampled == 0:
            return (), ()
        new = slice(run.prompt, run.prompt + sampled)
        ids = self.cache.ids[run.index, new]
        logprobs = self.cache.logprobs[run.index, new]
        return tuple(ids.tolist()), tuple(logprobs.tolist())

    def _admit(self) -> None:
        """Give slots to waiting requests, in order."""
        while self._waiting and (slot := self.slots.acquire(self._waiting[0].request.session)):
            run = self._waiting.popleft()
            request = run.request
            adapter = self._adapter(request.agent)
            if adapter != self._adapter(slot.agent):
                slot.held = ()
            slot.agent, self.cache.agents[slot.index] = request.agent, adapter
            run.slot = slot
            run.filled = slot.keep(request.ids)
            self._find_prefix(run)
            new = torch.tensor(request.ids[run.filled :], device=self.cache.device)
            self.cache.ids[slot.index, run.filled : run.prompt] = new
            self._sampling.set(slot.index, request.key, request.sampling, run.limit)
            self._filling.append(run)

    def _find_prefix(self, run: Run) -> None:
        assert run.slot is not None
        source = self._prefixes.enter(run.slot, run.ids, self._adapter(run.request.agent))
        run.source = source if source and source.length > run.filled else None

    def _chunks(self) -> dict[Run, Chunk]:
        """Tokens to prefill in this step. They are padded to the first one's length, and padding counts."""
        chunks: dict[Run, Chunk] = {}
        filling = [run for run in self._filling if not self._awaits(run)]
        width = min(len(filling[0].ids) - filling[0].filled, self.budget) if filling else 1
        for run in filling:
            size = min(len(run.ids) - run.filled, width)
            if size * _RAGGED >= width:
                end = run.filled + size
                chunks[run] = Chunk(run.index, run.filled, end, end == len(run.ids))
            if (len(chunks) + 1) * width > self.budget:
                break
        return chunks

    def _awaits(self, run: Run) -> bool:
        """True if a request ahead is still computing the run's prefix. Copies the prefix once it is there, if
        the present weights computed all of it: its tokens are then as exact as without."""
        if run.source is None:
            return False
        (slot, length), own = run.source, run.slot
        prefix = run.ids[:length]
        assert own is not None
        if self._adapter(slot.agent) == self._adapter(own.agent) and slot.held[:length] == prefix:
            if slot.swap == self._swaps:
                self.cache.copy(slot.index, own.index, length)
                run.filled = length
                own.held = prefix
                own.born = slot.born
                own.swap = slot.swap
        else:
            ahead = takewhile(lambda other: other is not run, self._filling)
            if any(other.slot is slot and other.ids[:length] == prefix for other in ahead):
                return True
        run.source = None
        return False

    def _filled(self, run: Run, chunk: Chunk) -> None:
        """The chunk's KV is in the cache; after the last one the slot decodes."""
        assert run.slot is not None
        if chunk.start == 0:
            run.slot.born = self.version
            run.slot.swap = self._swaps
        run.filled = chunk.end
        run.slot.held = run.ids[: chunk.end]
        if chunk.last:
            self._filling.remove(run)
            run.decoding = True
            at = run.index
            self._decoding[at], self._lengths[at] = run, len(run.ids) + 1

    def _leave(self, run: Run, held: tuple[int, ...]) -> None:
        """The run is over; the KV of `held` stays for the session's next turn: all but the last sampled id,
        which was never fed back."""
        if run.slot is None:
            self._waiting.remove(run)
            return
        if run.decoding:
            del self._decoding[run.index]
        else:
            self._filling.remove(run)
        run.decoding, self._lengths[run.index], self._steady = False, 0, None
        self.slots.rest(run.slot, held)
