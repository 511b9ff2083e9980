"""Aggregation: a token's weight w and an episode's contribution to the one denominator D of the batch.

The loss of a batch is (Σ_t w_t·ℓ_t) / D. All three rules are linear with w known before the forward, so
a batch may stream in and D is applied once at the end. Tokens are counted *before* any staleness or
correction mask: counting only survivors would amplify them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from asyncrl.errors import ProtocolError
from asyncrl.registry import Registry


class Share(NamedTuple):
    """`weight` of each model token of one episode, and what the episode adds to D."""

    weight: float
    denominator: float


Rule = Callable[[int, int], Share]
aggregations: Registry[Rule] = Registry("aggregation")


@aggregations.register("token_mean")
def token_mean(tokens: int, group_tokens: int) -> Share:
    """Every token counts the same: w = 1, D = Σ tokens."""
    return Share(1.0, float(tokens))


@aggregations.register("seq_mean_token_mean")
def seq_mean_token_mean(tokens: int, group_tokens: int) -> Share:
    """Every episode counts the same: w = 1/T_i, D = number of episodes."""
    return Share(1.0 / max(tokens, 1), 1.0)


@aggregations.register("prompt_mean")
def prompt_mean(tokens: int, group_tokens: int) -> Share:
    """Every group counts the same: w = 1/T_g, D = number of groups, as the sum of T_i/T_g."""
    if group_tokens < tokens:
        raise ProtocolError(f"a group of {group_tokens} tokens cannot hold an episode of {tokens}")
    return Share(1.0 / max(group_tokens, 1), tokens / max(group_tokens, 1))
