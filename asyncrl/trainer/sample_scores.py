"""Scores the sequences that engines have sampled for a test, with the policy of the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from asyncrl.config import Packing
from asyncrl.trainer.model import Policy
from asyncrl.trainer.scores import Selected
from asyncrl.wire.messages.shared import SampledSequence
from asyncrl.wire.messages.trainer import EngineSamples, SurprisalSums


@torch.no_grad()
def sum_surprisals(
    policy: Policy,
    samples: Sequence[EngineSamples],
    *,
    temperature: float,
    token_budget: int,
    device: torch.device,
    after_forward: Callable[[], None],
) -> tuple[SurprisalSums, ...]:
    """Return the sums of `SurprisalSums` of each engine, over the tokens that the engine has sampled. Sums
    that are not finite are inf.

    The sequences of all engines share forwards of at most `token_budget` tokens, including padding. A
    collective, and so is each forward; `after_forward` is called between them. Several agents' adapters:
    those of the first agent.
    """
    sequences = [sequence for engine_samples in samples for sequence in engine_samples.sequences]
    longest = max(len(sequence.ids) for sequence in sequences)
    sequences_per_forward = max(1, token_budget // longest)

    forward_scores = list[Tensor]()
    for start in range(0, len(sequences), sequences_per_forward):
        forward_sequences = sequences[start : start + sequences_per_forward]
        forward_scores.append(_score_sequences(policy, forward_sequences, temperature, device))
        after_forward()

    logprobs, entropy, variance = torch.cat(forward_scores, dim=1)
    deviations = -logprobs - entropy
    reported_logprobs = torch.tensor(
        [logprob for sequence in sequences for logprob in sequence.logprobs], dtype=torch.float64
    )

    token_counts = [
        sum(len(sequence.logprobs) for sequence in engine_samples.sequences) for engine_samples in samples
    ]
    engine_of = torch.arange(len(samples)).repeat_interleave(torch.tensor(token_counts))

    def without_nan(values: Tensor) -> list[float]:
        # Decoding refuses a NaN, and the message with the sums of all engines would be lost.
        return [value if math.isfinite(value) else math.inf for value in values.tolist()]

    def sum_by_engine(values: Tensor) -> list[float]:
        return without_nan(torch.zeros(len(samples), dtype=torch.float64).index_add(0, engine_of, values))

    gaps = (logprobs - reported_logprobs).abs()
    median_gaps = torch.stack(
        [
            engine_gaps.quantile(0.5) if len(engine_gaps) else gaps.new_zeros(())
            for engine_gaps in gaps.split(token_counts)
        ]
    )

    columns = zip(
        samples,
        token_counts,
        sum_by_engine(deviations),
        sum_by_engine(deviations.square()),
        sum_by_engine(variance),
        without_nan(median_gaps),
        strict=True,
    )
    return tuple(
        SurprisalSums(
            engine=engine_samples.engine,
            tokens=tokens,
            deviation=deviation,
            squares=squares,
            variance=variance_sum,
            median_gap=median_gap,
        )
        for engine_samples, tokens, deviation, squares, variance_sum, median_gap in columns
    )


def _score_sequences(
    policy: Policy, sequences: Sequence[SampledSequence], temperature: float, device: torch.device
) -> Tensor:
    """Return log-prob, entropy and variance of the surprisal of the sampled tokens [3, N], on the host and in
    float64, for sums of many tokens. Runs one forward."""
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

    return torch.stack([column.double().cpu() for column in (scores.logp, scores.entropy, scores.variance)])
