"""Holds the sequences that engines have sampled for a test, until the trainer can score them."""

from __future__ import annotations

import logging

from asyncrl.types import PolicyVersion
from asyncrl.wire.messages.shared import MAX_SAMPLES, ProbeSamples
from asyncrl.wire.messages.trainer import EngineSamples

log = logging.getLogger("asyncrl.coordinator")

MAX_ENGINES = 8  # engines whose samples are in one plan: the next part of the batch waits


class PendingSamples:
    """The samples of each engine with its newest version. The trainer can score its own version only, so the
    samples of other versions are dropped."""

    def __init__(self) -> None:
        self._samples: dict[bytes, ProbeSamples] = {}  # by identity of the engine's peer

    def add(self, peer: bytes, message: ProbeSamples, vocabulary: int) -> None:
        """Store an engine's samples, beside earlier samples of the same version and in place of samples of
        other versions. Samples that the trainer could not score are dropped."""
        if not message.sequences:
            return
        for sequence in message.sequences:
            has_prompt = 0 < len(sequence.logprobs) < len(sequence.ids)
            if not has_prompt or max(sequence.ids) >= vocabulary:
                log.warning(
                    "%s: samples for the test of the engine are malformed, and are dropped", peer.decode()
                )
                return

        pending = self._samples.get(peer)
        if pending is not None and pending.version == message.version:
            sequences = (*pending.sequences, *message.sequences)[:MAX_SAMPLES]
            message = ProbeSamples(message.version, sequences)
        self._samples[peer] = message

    def take(self, version: PolicyVersion) -> tuple[EngineSamples, ...]:
        """Return the samples of this version, of MAX_ENGINES engines at most, and drop those of other
        versions."""
        self._samples = {
            peer: message for peer, message in self._samples.items() if message.version == version
        }
        return tuple(
            EngineSamples(peer.decode(), self._samples.pop(peer).sequences)
            for peer in list(self._samples)[:MAX_ENGINES]
        )
