"""Advantages of tokens and turns: what came after them.

"Next" is the next *model* token: tokens of tools and templates do not count here. An episode that a limit
ended is treated as complete: no value is bootstrapped after its last token.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated

import numpy as np
from msgspec import Meta

from asyncrl.algorithms.credit import Credit, CreditInput, Trace, advantage
from asyncrl.algorithms.group_advantages import centred, standardised
from asyncrl.errors import ProtocolError
from asyncrl.types import EpisodeResult

Factor = Annotated[float, Meta(ge=0, le=1)]


@advantage("reinforce_pp", scale="whiten", siblings=False, turns=True)
def reinforce_pp(given: CreditInput, *, gamma: Factor = 1.0, turn_gamma: Factor = 1.0) -> Credit:
    """G_t = r_t + γ_t·G_{t+1}, then whitened over the batch's tokens (REINFORCE++, arXiv 2501.03262). γ_t is
    `gamma`, times `turn_gamma` where the next token is in the next turn.

    Use: no groups (n = 1), on-policy or at small staleness; whitening waits for the whole batch unless
    normalise=whiten_running.
    """
    return returns(given.rewards, _discounts(given.turn, gamma, turn_gamma))


@advantage("constant", siblings=False)
def constant(given: CreditInput) -> Credit:
    """A = 1, whatever the reward (plain).

    Use: with the loss sft, whose episodes have no reward; at any staleness.
    """
    return 1.0


@advantage("remax", siblings=False, greedy=True, turns=True)
def remax(given: CreditInput) -> Credit:
    """G_t − R of the sample's greedy episode, G_t = Σ_{s≥t} r_s (ReMax, arXiv 2310.10505).

    Use: small groups, down to one; costs one more episode per sample. Any staleness.
    """
    if given.greedy is None:
        raise ProtocolError("advantage remax: an episode came without the reward of a greedy episode")
    return to_go(given.rewards) - given.greedy


@advantage("gae", scale="whiten", siblings=False, critic=True, turns=True)
def gae(given: CreditInput, *, gamma: Factor = 1.0, lam: Factor = 1.0, turn_gamma: Factor = 1.0) -> Credit:
    """A_t = δ_t + γ_t·λ·A_{t+1}, δ_t = r_t + γ_t·V_{t+1} − V_t, then whitened (GAE, arXiv 1506.02438). λ is
    `lam`; γ_t is `gamma`, times `turn_gamma` where the next token is in the next turn; V after the last token
    is 0.

    Use: PPO with a critic, long episodes with rewards on turns. Up to staleness 4: V is that of the policy in
    training, the rewards that followed are those of the policy that acted.
    """
    if given.values is None:
        raise ProtocolError("advantage gae: an episode came without values of the critic")
    discount = _discounts(given.turn, gamma, turn_gamma)
    following = np.append(given.values[1:], 0.0)[: len(given.values)]
    return returns(given.rewards + discount * following - given.values, lam * discount)


@advantage("grpo_turn", turns=True)
def grpo_turn(given: CreditInput, *, turn_gamma: Factor = 1.0, std: bool = False) -> Credit:
    """G_k − mean of G_k over the siblings with a turn k, G_k = r_k + turn_gamma·G_{k+1} (turn-level credit as
    in MT-GRPO, arXiv 2505.11821). `std`: divided by (their std + 1e-6), ddof 1. Fewer than two such siblings:
    the advantage of the whole episode, that of its first turn.

    Use: rewards on turns, any staleness. With the std on-policy only.
    """
    compare = standardised if std else centred
    own = turn_returns(given.own, turn_gamma, turns=int(given.turn.max(initial=0)) + 1)
    siblings = [turn_returns(member, turn_gamma) for member in given.siblings]
    by_turn = np.zeros(len(own))
    for k, value in enumerate(own):
        same = [sibling[k] for sibling in siblings if len(sibling) > k]
        if len(same) > 1:
            by_turn[k] = compare(value, same)
        elif k:
            by_turn[k] = by_turn[0]
    return by_turn[given.turn]


@advantage("optimal_token_baseline", whole_group=True, turns=True)
def optimal_token_baseline(given: CreditInput) -> Credit:
    """G_t − Σ G_t·W_t / Σ W_t over the group's episodes with a token t, G_t = Σ_{s≥t} r_s and
    W_t = Σ_{s≤t} (1 − 2π_s + Σ_v π_s(v)²) (OTB, arXiv 2602.07078). W_t stands for the squared norm of the
    gradient up to t; the plain mean where that is 0 or unknown. A tail that one episode alone reaches: 0.

    Use: long episodes in small groups, on-policy or at small staleness; biased as opo.
    """
    own = to_go(given.rewards)
    weighted, weight, plain, members = np.zeros((4, len(own)))
    for trace in given.traces:
        n = min(len(own), len(trace.rewards))
        lead, norm = own[:n] - to_go(trace.rewards)[:n], _norm(trace)[:n]
        weighted[:n] += lead * norm
        weight[:n] += norm
        plain[:n] += lead
        members[:n] += 1
    if not members.all():
        raise ProtocolError("advantage optimal_token_baseline: an episode came without traces of its group")
    used = weight > 0
    return np.where(used, weighted, plain) / np.where(used, weight, members)


def returns(rewards: np.ndarray, discount: np.ndarray) -> np.ndarray:
    """x_t = rewards_t + discount_t·x_{t+1}, [T]; x past the end is 0.

    After k rounds x_t covers 2^k terms and factor_t is the discount past them: log2(T) vector operations.
    """
    total, factor = rewards.astype(np.float64), discount.astype(np.float64)
    reach = 1
    while reach < len(total):
        total[:-reach] += factor[:-reach] * total[reach:]
        factor[:-reach] *= factor[reach:]
        reach *= 2
    return total


def to_go(rewards: np.ndarray) -> np.ndarray:
    """Σ_{s≥t} rewards_s, [T]."""
    return np.cumsum(rewards[::-1], dtype=np.float64)[::-1]


def turn_returns(member: EpisodeResult, turn_gamma: float, turns: int = 1) -> list[float]:
    """G by turn. Without turn rewards all of it falls on the last of `turns`."""
    rewards = member.turn_rewards or (0.0,) * (turns - 1) + (member.reward,)
    return list(accumulate(reversed(rewards), lambda after, reward: reward + turn_gamma * after))[::-1]


def _discounts(turn: np.ndarray, gamma: float, turn_gamma: float) -> np.ndarray:
    """[T]: what the next model token's return counts here."""
    return gamma * turn_gamma ** np.diff(turn, append=turn[-1:])


def _norm(trace: Trace) -> np.ndarray:
    """[T]: W, which rounding must not turn negative."""
    step = 1 - 2 * np.exp(trace.prox) + trace.collision
    return np.cumsum(step.clip(min=0.0))
