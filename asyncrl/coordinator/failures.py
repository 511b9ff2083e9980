"""Counts failures, and draws conclusions from them.

`FailedAttempts` counts failed attempts at training episodes. `FirstAttempts` ends a run whose first attempts
all fail for the same reason (a tool, a reward, an environment or an agent that always raises, or long
prompts). `MemoryLimits` recomputes more layers, or halves micro-batches, each time a trainer rank ran out of
memory. The store has the counts and the limits. Of the first attempts a restarted coordinator knows only
whether one has landed, and counts failures from 0.
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

MAX_CAUSE_CHARACTERS = 300  # stored characters of a cause
MIN_ATTEMPTS = 128  # failed attempts in a row before a run is ended
MIN_SAMPLES = 64  # different samples among these attempts


class FailedAttempts(msgspec.Struct):
    """Failed attempts since the run began, as stored. An attempt counts even if a later attempt landed.

    counts: number of attempts by FailReason.
    newest: newest known cause, with file and line if users' code raised.
    lost: newest known cause among attempts that ended for one of LOSSES.
    """

    META: ClassVar = "failed_attempts"
    counts: dict[str, int] = {}
    newest: str = ""
    lost: str = ""

    @classmethod
    def load_from(cls, store: RunStore) -> FailedAttempts:
        return msgspec.json.decode(store.reader.meta(cls.META, "{}"), type=cls)

    def add_failure(self, reason: FailReason, detail: str, store: RunStore) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1

        cause = " ".join(detail.split())[:MAX_CAUSE_CHARACTERS]
        if reason in LOSSES:
            self.lost = cause or self.lost
        if reason is not FailReason.WORKER_LOST:
            self.newest = cause or self.newest

        store.put_meta(self.META, msgspec.json.encode(self).decode())


class FirstAttempts:
    """Decides whether a run ends because its first attempts all fail for the same reason.

    A run in which one attempt in ten lands must not be ended. If nine in ten fail by chance, MIN_ATTEMPTS in
    a row do once in 700,000 launches (0.9 ** 128 = 1.4e-6). If nine samples in ten fail at every attempt, for
    example by a missing column, more attempts at a sample tell nothing new: MIN_SAMPLES in a row fail once in
    850 launches (0.9 ** 64 = 0.0012). With 8 episodes per group and 2 retries this is known after 1,536
    attempts at the latest. Untrained groups end a run only after 50 batches' worth of groups: 38,400
    attempts.

    Args:
        samples: number of samples of the data; with fewer than MIN_SAMPLES, all must have failed.
    """

    def __init__(self, samples: int) -> None:
        self._min_failed_samples = min(MIN_SAMPLES, samples)
        self._common_reason: FailReason | None = None
        # Pairs (assign number, sample) of the attempts that failed in a row.
        self._failed_attempts: list[tuple[int, int]] = []
        self.landed = False

    def note_failure(self, assign_number: int, sample: int, reason: FailReason) -> None:
        """Note a failed attempt, the `assign_number`th assigned. Lost workers and servers do not count."""
        if self.landed or reason in LOSSES:
            return
        if reason is not self._common_reason:
            self._common_reason = reason
            self._failed_attempts = []

        self._failed_attempts.append((assign_number, sample))

    def verdict(self, running_numbers: Iterable[int]) -> str:
        """Return which attempts have failed; '' as long as an attempt may land.

        Only attempts assigned before all running attempts (`running_numbers`) count. Otherwise many attempts
        that fail fast would outrun slow attempts that land.
        """
        if self.landed or len(self._failed_attempts) < MIN_ATTEMPTS:
            return ""

        first_running = min(running_numbers, default=math.inf)
        samples = [sample for assign_number, sample in self._failed_attempts if assign_number < first_running]

        if len(samples) < MIN_ATTEMPTS or len(set(samples)) < self._min_failed_samples:
            return ""

        attempt_count = f"{len(samples):,} attempts (samples: {len(set(samples))})"
        return f"the first {attempt_count} all failed with {self._common_reason}"


class MemoryLimits(msgspec.Struct):
    """Limits learned from ranks that ran out of memory, as stored.

    configured: `trainer.micro_batch_tokens` under which the limits were learned; another value resets them.
    tokens: largest number of tokens of a micro-batch.
    recompute_every: see Welcome.
    """

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
        """Tighten the limits after a rank ran out of memory: recompute more layers, or else halve tokens.

        ConfigError if the micro-batch was a single episode, which cannot be cut.
        """
        if message.recompute_every:
            self.recompute_every = message.recompute_every
        elif self.tokens == 1 or (message.episodes == 1 and message.tokens >= self.tokens):
            raise ConfigError(
                f"trainer rank {message.rank}: an episode with {message.tokens} tokens does not fit in "
                f"memory: {message.detail}; set {memory_advice(message.recomputed_every)}, then continue "
                "with resume=auto"
            )

        else:
            # The small remainder of a batch was not too large.
            tried_tokens = max(message.tokens, self.tokens // 4)
            self.tokens = max(1, min(self.tokens, tried_tokens) // 2)

        store.put_meta(self.META, msgspec.json.encode(self).decode())

    def describe_change(self, message: GaveUp) -> str:
        """Describe the change that followed from this message."""
        if message.recompute_every:
            return f"{described_recomputation(self.recompute_every)} from now on"
        return f"micro-batches have at most {self.tokens} tokens from now on"
