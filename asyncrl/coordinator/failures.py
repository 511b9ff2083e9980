"""Counts failures, and draws the conclusions that a restarted coordinator keeps.

Attempts at training episodes: how many failed since the run began, and whether the first of a launch all fail
alike (a tool, a reward, an environment or an agent that always raises, long prompts). Trainer ranks that ran
out of memory: each time, more layers are recomputed, or micro-batches are halved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from asyncrl.buffer.records import LOSSES
from asyncrl.config import described_recomputation, memory_advice
from asyncrl.errors import ConfigError
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import RunStore
from asyncrl.types import FailReason
from asyncrl.wire.messages.trainer import GaveUp

MAX_CAUSE_CHARACTERS = 300  # characters of a cause that are kept
MIN_ATTEMPTS = 128
MIN_SAMPLES = 64


class FailedAttempts(msgspec.Struct):
    """Kept in the store. An attempt counts whatever became of its episode: the next one may have landed.
    `newest`: the cause of the last one that named it, with file and line where users' code raised; `lost`: of
    the last one that was lost with a worker or a server."""

    META: ClassVar = "failed_attempts"
    counts: dict[str, int] = {}  # by FailReason
    newest: str = ""
    lost: str = ""

    @classmethod
    def load_from(cls, store: RunStore) -> FailedAttempts:
        return msgspec.json.decode(store.read.meta(cls.META, "{}"), type=cls)

    def add_failure(self, reason: FailReason, detail: str, store: RunStore) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1

        cause = " ".join(detail.split())[:MAX_CAUSE_CHARACTERS]
        if reason in LOSSES:
            self.lost = cause or self.lost
        if reason is not FailReason.WORKER_LOST:
            self.newest = cause or self.newest

        store.put_meta(self.META, msgspec.json.encode(self).decode())


class FirstAttempts:
    """Ends a run whose first attempts all fail alike: the next ones would, too. Pure.

    A run in which one attempt in ten lands must not be ended. If nine in ten fail by chance, MIN_ATTEMPTS in
    a row do once in 700,000 launches (0.9 ** 128 = 1.4e-6). If nine samples in ten fail whatever the attempt,
    as their columns lack something, more attempts at one sample tell nothing new: MIN_SAMPLES in a row fail
    once in 850 launches (0.9 ** 64 = 0.0012). With 8 episodes per group and 2 retries this is known after
    1,536 attempts at the latest. Groups that are not trained end a run after 50 batches' worth: 38,400.

    `samples`: how many there are; if fewer than MIN_SAMPLES, all of them must have failed.
    """

    def __init__(self, samples: int) -> None:
        self._min_failed_samples = min(MIN_SAMPLES, samples)
        self._common_reason: FailReason | None = None
        self._failed_attempts: list[
            tuple[int, int]
        ] = []  # (place, sample) of those that failed for it in a row
        self.landed = False

    def note_failure(self, assign_number: int, sample: int, reason: FailReason) -> None:
        """An attempt failed that was the `place`th to be given out. Lost workers and servers do not count."""
        if self.landed or reason in LOSSES:
            return
        if reason is not self._common_reason:
            self._common_reason = reason
            self._failed_attempts = []

        self._failed_attempts.append((assign_number, sample))

    def verdict(self, running_numbers: Iterable[int]) -> str:
        """Says what has failed; '' as long as an attempt may land. `running`: places of those under way. Only
        the attempts before all of these count, or slow ones that land would come after many that fail
        fast."""
        if self.landed or len(self._failed_attempts) < MIN_ATTEMPTS:
            return ""

        first_running = min(running_numbers, default=math.inf)
        samples = [sample for assign_number, sample in self._failed_attempts if assign_number < first_running]

        if len(samples) < MIN_ATTEMPTS or len(set(samples)) < self._min_failed_samples:
            return ""

        attempt_count = f"{len(samples):,} attempts (samples: {len(set(samples))})"
        return f"the first {attempt_count} all failed with {self._common_reason}"


class MemoryLimits(msgspec.Struct):
    """What ranks that ran out of memory have taught: the `tokens` that a micro-batch may have, and
    `recompute_every` (see Welcome). Kept in the store; forgotten under another `trainer.micro_batch_tokens`
    than they were learned under (`configured`)."""

    META: ClassVar = "micro_budget"
    configured: int
    tokens: int
    recompute_every: int = 0

    @classmethod
    def load_from(cls, reader: RunReader, configured: int) -> MemoryLimits:
        stored_text = reader.meta(cls.META)
        limits = msgspec.json.decode(stored_text, type=cls) if stored_text else cls(configured, configured)
        return limits if limits.configured == configured else cls(configured, configured)

    def tighten(self, message: GaveUp, store: RunStore) -> None:
        """A rank ran out of memory: let more layers be recomputed where that is left, or else allow half
        the tokens. ConfigError when the micro-batch cannot be cut any more, as it was a single episode over
        the budget."""
        if message.recompute_every:
            self.recompute_every = message.recompute_every
        else:
            self._halve(message)
        store.put_meta(self.META, msgspec.json.encode(self).decode())

    def _halve(self, message: GaveUp) -> None:
        if self.tokens == 1 or (message.episodes == 1 and message.tokens >= self.tokens):
            raise ConfigError(
                f"trainer rank {message.rank}: one episode of {message.tokens} tokens does not fit: "
                f"{message.detail}; set {memory_advice(message.recomputed_every)}, then go on with "
                "resume=auto"
            )

        tried_tokens = max(
            message.tokens, self.tokens // 4
        )  # a small rest of a batch is not what was too large
        self.tokens = max(1, min(self.tokens, tried_tokens) // 2)

    def describe_change(self, message: GaveUp) -> str:
        """Return in words what was changed because of this message."""
        if message.recompute_every:
            return f"{described_recomputation(self.recompute_every)} from now on"
        return f"micro-batches have at most {self.tokens} tokens from now on"
