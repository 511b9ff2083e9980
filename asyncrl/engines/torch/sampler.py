"""Sampling of one token per slot, reproducible whatever the batch.

The random number of a token is a hash of (the request's key, the token's position): no generator state, so
the same request on the same weights gives the same ids in any batch (up to rounding of the logits).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

WEIGHTS_PER_BLOCK = 256
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Params(NamedTuple):
    """Holds sampling settings of n slots. All tensors are [n]; the flag says if any slot is greedy."""

    seed: torch.Tensor  # int64, `mix_key` of the request's key
    temperature: torch.Tensor  # float32, 1 on greedy slots
    greedy: torch.Tensor  # bool
    any_greedy: bool


def mix_key(key: int) -> int:
    """Return splitmix64 of a request's key, as a signed 64-bit number."""
    bits = (key + _GOLDEN) & _MASK
    bits = ((bits ^ (bits >> 30)) * _MULTIPLIERS[0]) & _MASK
    bits = ((bits ^ (bits >> 27)) * _MULTIPLIERS[1]) & _MASK
    return _signed(bits ^ (bits >> 31))


def uniform(seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return random numbers [n], float64 in [0, 1 - 2^-52]: the upper 52 bits of splitmix64(seed +
    position)."""
    mixed_bits = seed + (positions + 1) * _signed(_GOLDEN)  # int64 arithmetic wraps like uint64
    mixed_bits = (mixed_bits ^ _shift_right(mixed_bits, 30)) * _signed(_MULTIPLIERS[0])
    mixed_bits = (mixed_bits ^ _shift_right(mixed_bits, 27)) * _signed(_MULTIPLIERS[1])
    mixed_bits = mixed_bits ^ _shift_right(mixed_bits, 31)
    return _shift_right(mixed_bits, 12).double() * 2.0**-52


def sample(
    logits: torch.Tensor, positions: torch.Tensor, params: Params, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample ids [n] from logits [n, vocabulary]; return ids and log-probs [n].

    A log-prob is the float32 log_softmax(logits / temperature), with temperature 1 on greedy slots, and NaN
    where the logits are not finite numbers.
    """
    logprobs = torch.log_softmax(logits.float() / params.temperature[:, None], -1)
    ids = _draw_indices(logprobs.exp(), uniform(params.seed, positions)[:, None], vocabulary)
    if params.any_greedy:
        ids = torch.where(params.greedy, logprobs.argmax(-1), ids)
    return ids, logprobs.gather(1, ids[:, None]).squeeze(1)


def _draw_indices(weights: torch.Tensor, uniforms: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return indices [n] into weights [n, V]: the first index whose cumulative sum is above u · total, with u
    in `uniforms` [n, 1]. The search finds the block of WEIGHTS_PER_BLOCK weights first, then the index within
    the block: a cumulative sum over all V in float64 is slow."""
    padding = -vocabulary % WEIGHTS_PER_BLOCK
    blocks = (F.pad(weights, (0, padding)) if padding else weights).unflatten(1, (-1, WEIGHTS_PER_BLOCK))
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    # u < 1 in steps of 2^-52 keeps the target below the total, so that the first entry above it has weight.
    target = uniforms * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True)
    block.clamp_(max=(vocabulary + padding) // WEIGHTS_PER_BLOCK - 1)  # NaN compares false with everything

    weight_before = F.pad(cumulative, (1, 0)).gather(1, block)
    cumulative_inside = blocks.take_along_dim(block[:, :, None], 1)[:, 0].cumsum(-1, dtype=torch.float64)
    inner_index = torch.searchsorted(cumulative_inside, target - weight_before, right=True)
    total = cumulative_inside[:, -1:].contiguous()

    # The two sums may differ by rounding: never go beyond the last entry that has weight.
    last_weighted = torch.searchsorted(cumulative_inside, total)
    inner_index = torch.minimum(inner_index, last_weighted)
    return (block * WEIGHTS_PER_BLOCK + inner_index).squeeze(1).clamp(max=vocabulary - 1)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 to the right, without sign extension."""
    return (values >> bits) & (_MASK >> bits)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned
