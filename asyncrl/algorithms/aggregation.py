"""Aggregation: a token's weight w and an episode's contribution to the one denominator D of the batch.

The loss of a batch is (Σ_t w_t·ℓ_t) / D. All rules are linear with w known before the forward, so
a batch may stream in and D is applied once at the end. Tokens are counted *before* any staleness or
correction mask: counting only survivors would amplify them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from asyncrl.registry import Registry, bind_options


class Share(NamedTuple):
    """`weight` of each model token of one episode, and what the episode adds to D."""

    weight: float
    denominator: float


Rule = Callable[[int, int], Share]


@dataclass(frozen=True)
class Aggregation:
    """Describes a registered rule: called with the model tokens of an episode and of its group.

    `whole_group`: the group's tokens count, so all its members must be in the batch.
    `fixed`: D is 1 whatever the batch holds; the episodes' denominators then only scale what is reported.
    """

    of: Callable[..., Share]
    fixed: bool = False
    whole_group: bool = False

    def __call__(self, tokens: int, group_tokens: int) -> Share:
        return self.of(tokens, group_tokens)

    def bound(self, run_facts: Mapping[str, Any], where: str) -> Aggregation:
        """With those facts of the run that the rule names: `length`, the limit of tokens of an episode."""
        named_facts = {
            name: run_facts[name] for name in inspect.signature(self.of).parameters if name in run_facts
        }
        return replace(self, of=bind_options(self.of, named_facts, where))

    def divisor(self, denominators: float) -> float:
        """D, from the sum of the episodes' denominators. 0: there is no token to divide for."""
        return 1.0 if self.fixed and denominators else denominators


aggregations: Registry[Aggregation] = Registry("aggregation", Aggregation)


def aggregation(name: str, **declared_fields: bool) -> Callable[[Callable[..., Share]], Aggregation]:
    """Register `(tokens, group_tokens, *, options…) -> Share` as `name`. `declared_fields`: of
    Aggregation."""
    return lambda function: aggregations.register(name)(Aggregation(function, **declared_fields))


@aggregation("token_mean")
def token_mean(tokens: int, group_tokens: int) -> Share:
    """w = 1, D = Σ tokens (DAPO, arXiv 2503.14476): every token counts the same.

    Use: the default; long episodes count more. Any staleness.
    """
    return Share(1.0, float(tokens))


@aggregation("token_sum", fixed=True)
def token_sum(tokens: int, group_tokens: int) -> Share:
    """w = 1, D = 1 (plain): the gradient grows with the batch. The loss is reported per token.

    Use: batches of equal size, for comparison with trainers that sum; check trainer.grad_clip. Any
    staleness.
    """
    return Share(1.0, float(tokens))


@aggregation("seq_mean_token_mean")
def seq_mean_token_mean(tokens: int, group_tokens: int) -> Share:
    """w = 1/T_i, D = number of episodes (GRPO, arXiv 2402.03300): every episode counts the same.

    Use: comparisons with published GRPO runs; tokens in long wrong answers are penalised less. Any staleness.
    """
    return Share(1.0 / max(tokens, 1), 1.0)


@aggregation("seq_mean_token_sum")
def seq_mean_token_sum(tokens: int, group_tokens: int) -> Share:
    """w = 1, D = number of episodes (plain REINFORCE): the unbiased gradient of the mean reward.

    Use: unbiased gradients, at the cost of steps that grow with the length of the answers. Any staleness.
    """
    return Share(1.0, 1.0)


@aggregation("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(tokens: int, group_tokens: int, *, length: Annotated[int, Meta(ge=1)]) -> Share:
    """w = 1/L, D = number of episodes (Dr. GRPO, arXiv 2503.20783), L = `length`, which
    is rollout.max_tokens.

    Use: like seq_mean_token_sum, but with gradients as large as those of the means. Any staleness.
    """
    return Share(1.0 / length, 1.0)


@aggregation("prompt_mean", whole_group=True)
def prompt_mean(tokens: int, group_tokens: int) -> Share:
    """w = 1/T_g, D = number of groups, as Σ T_i/T_g (ScaleRL, arXiv 2510.13786): every group counts the same.

    Use: samples whose answers differ a lot in length. Any staleness.
    """
    return Share(1.0 / max(group_tokens, 1), tokens / max(group_tokens, 1))
