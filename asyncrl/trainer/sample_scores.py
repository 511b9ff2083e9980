"""Scores the sequences that an engine has sampled for a test, with the policy of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from asyncrl.config import Packing
from asyncrl.trainer.model import Policy
from asyncrl.trainer.scores import Selected
from asyncrl.wire.messages.shared import SampledSequence
from asyncrl.wire.messages.trainer import SurprisalSums


@torch.no_grad()
def sum_surprisals(
    policy: Policy,
    engine: str,
    sequences: Sequence[SampledSequence],
    *,
    temperature: float,
    device: torch.device,
) -> SurprisalSums:
    """Return the sums of `SurprisalSums` over the sampled tokens. A collective. Several agents' adapters:
    those of the first agent."""
    counts = [len(sequence.logprobs) for sequence in sequences]
    sequence_of = np.repeat(np.arange(len(sequences)), counts)
    position = np.concatenate(
        [
            np.arange(len(sequence.ids) - count, len(sequence.ids))
            for sequence, count in zip(sequences, counts, strict=True)
        ]
    )
    packing: Packing = "padded" if policy.packing == "padded" else "packed"
    selected = Selected.lay_out(
        [np.array(sequence.ids) for sequence in sequences],
        sequence_of,
        position,
        torch.full((len(sequence_of),), temperature),
        packing,
        adapters=[0] * len(sequences),
    )

    scores = policy(selected.to(device), with_variance=True)
    cast(FSDPModule, policy).reshard()  # a forward without a backward leaves the root's parameters whole
    assert scores.variance is not None, "the variance was requested"

    # In float64: sums of many tokens.
    logprobs, entropy, variance = (
        column.double().cpu() for column in (scores.logp, scores.entropy, scores.variance)
    )
    deviations = -logprobs - entropy
    reported_logprobs = torch.tensor(
        [logprob for sequence in sequences for logprob in sequence.logprobs], dtype=torch.float64
    )
    gap = float((logprobs - reported_logprobs).abs().sum())

    return SurprisalSums(
        engine=engine,
        tokens=len(logprobs),
        deviation=float(deviations.sum()),
        squares=float(deviations.square().sum()),
        variance=float(variance.sum()),
        gap=gap if np.isfinite(gap) else float("inf"),
    )
