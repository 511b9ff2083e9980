"""Log-probs and entropy of selected tokens, a chunk at a time: no [tokens × vocabulary] matrix is held.

A chunk's logits are dropped after the forward and computed again in the backward (activation
checkpointing, arXiv 1604.06174, of the output layer), so at any time there are those of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 512  # tokens whose logits exist at once
LOWEST = -1e30  # in place of log 0: zero times it is zero
Logits = Callable[[Tensor], Tensor]  # features of n tokens [n, ·] → their logits [n, V]


class Scores(NamedTuple):
    """Per selected token [N], at its temperature, natural logs, float32 at least.

    `logp` and `value` carry gradient; `entropy`, over the whole vocabulary, if it was asked to;
    `collision`, Σ π² over the vocabulary, never. None: not asked for, or no value head.
    """

    logp: Tensor
    entropy: Tensor
    collision: Tensor | None = None
    value: Tensor | None = None


@dataclass(frozen=True)
class Selected:
    """Which tokens to score. `ids` [B, T], right-padded; token i of N is ids[row[i], position[i]],
    predicted at position - 1 by logits divided by temperature[i]."""

    ids: Tensor
    row: Tensor
    position: Tensor
    temperature: Tensor

    @property
    def labels(self) -> Tensor:
        return self.ids[self.row, self.position]

    def predictors(self, hidden: Tensor) -> Tensor:
        """Of hidden states [B, T, H] those that predict the tokens, [N, H]."""
        return hidden[self.row, self.position - 1]


def score_chunks(
    logits_of: Logits, features: Tensor, tokens: Selected, *, entropy_grad: bool, collision: bool
) -> Scores:
    """Scores from what the output layer reads of each selected token, [N, ·]."""

    def chunk(part: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        logits = widened(logits_of(part))
        table = (logits / temperature.to(logits.dtype)[:, None]).log_softmax(-1)
        del logits  # it is as large as the table
        logp = table.gather(1, labels[:, None])[:, 0]
        entropy = entropy_of(table if entropy_grad else table.detach())
        return (logp, entropy, collision_of(table)) if collision else (logp, entropy)

    parts = zip(
        features.split(CHUNK), tokens.labels.split(CHUNK), tokens.temperature.split(CHUNK), strict=True
    )
    columns = zip(
        *(checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts),
        strict=True,
    )
    return Scores(*(torch.cat(column) for column in columns))


def entropy_of(logp: Tensor) -> Tensor:
    """-Σ p·log p over the vocabulary, of log p [N, V], which may be -inf; [N]."""
    return -(logp.exp() * logp.clamp(min=LOWEST)).sum(-1)


@torch.no_grad()
def collision_of(logp: Tensor) -> Tensor:
    """Σ p² over the vocabulary, the chance that two draws agree, of log p [N, V]; [N]."""
    return (2 * logp).exp().sum(-1)


def widened(tensor: Tensor) -> Tensor:
    """float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
