"""Advantages: how much better an episode, a turn or a token did than expected.

Each is a function of one `AdvantageInput` and gives one number for all model tokens of the episode, or one
per model token. What it needs beside that is declared where it is registered.

An episode without siblings gets 0, never its raw reward. Equal rewards give exactly 0: every comparison is a
sum of differences. Every std has ddof 1. R − mean over all n siblings, R itself included, is
(n − 1)/n · (R − mean over the others).

"Next" is the next *model* token: tokens of tools and templates do not count here. An episode that a limit
ended is treated as complete: no value is bootstrapped after its last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated

import numpy as np
from msgspec import Meta

from asyncrl.algorithms.credit import (
    EPSILON,
    Advantage,
    AdvantageInput,
    AdvantageValues,
    Scale,
    Trace,
    advantage,
    advantages,
)
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.registry import load_object, name_and_options
from asyncrl.types import EpisodeResult

KEY = "algorithm.advantage"

# Users import all they need from here.
__all__ = [
    "Advantage",
    "AdvantageInput",
    "AdvantageValues",
    "Scale",
    "Trace",
    "advantage",
    "advantages",
    "configured_advantage",
]


RENAMED = {"CreditInput": "AdvantageInput", "Credit": "AdvantageValues", "credit_of": "configured_advantage"}


def __getattr__(name: str) -> object:
    if name in RENAMED:
        raise ImportError(f"{__name__}: '{name}' is now called '{RENAMED[name]}'", name=name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'", name=name)


def load_named_files(config: RunConfig) -> None:
    """Import each file and module that a key of `algorithm` names: all keys then know what it registers."""
    for key in ("advantage", "loss", "correction", "aggregation", "shaping"):
        plugin = getattr(config.algorithm, key) or ()
        for name in [plugin] if isinstance(plugin, str) else plugin:
            if ":" in name:
                load_object(name, f"algorithm.{key}")


def configured_advantage(config: RunConfig) -> Advantage:
    """The advantage, options bound. Only an unknown name imports files: the coordinator needs no torch."""
    name, options = name_and_options(config.algorithm.advantage, KEY)
    if name not in advantages:
        load_named_files(config)
    return advantages.load(name, KEY).bound(options, f"{KEY}.{name}")


# -- of whole episodes: a reward against those of the siblings ------------------------------------------

WEIGHT = r"[^:,]+:-?\d+(\.\d+)?"  # name:weight
Weights = Annotated[str, Meta(pattern=f"^({WEIGHT}(,{WEIGHT})*)?$")]


@advantage("dr_grpo", late=True)
def dr_grpo(episode: AdvantageInput) -> AdvantageValues:
    """R − mean (Dr. GRPO, arXiv 2503.20783). Computed as (n − 1)/n · (R − mean of the *other* siblings),
    where n counts the issued members: the same value if all of them have ended, and unbiased if some are
    late.

    Use: the default; also whenever a group mixes versions (max_staleness > 0), because a group std would
    magnify near-ties. With normalise=batch_std it is ScaleRL's advantage (arXiv 2510.13786).
    """
    return (episode.issued - 1) / episode.issued * centred(episode.own.reward, rewards(episode.others))


@advantage("grpo")
def grpo(episode: AdvantageInput) -> AdvantageValues:
    """(R − mean) / (std + 1e-6), ddof 1 (GRPO, arXiv 2402.03300). With fewer than two siblings, A is 0.

    Use: on-policy training (max_staleness 0 or 1), or comparisons with published runs.
    """
    return standardised(episode.own.reward, rewards(episode.siblings))


@advantage("rloo", late=True)
def rloo(episode: AdvantageInput) -> AdvantageValues:
    """R − mean of the *other* siblings (RLOO, arXiv 2402.14740).

    Use: any staleness. Equals dr_grpo times n/(n − 1).
    """
    return centred(episode.own.reward, rewards(episode.others))


@advantage("reinforce_pp_baseline", scale="whiten")
def reinforce_pp_baseline(episode: AdvantageInput) -> AdvantageValues:
    """R − mean, then whitened over the batch's tokens (REINFORCE++ with baseline, arXiv 2501.03262).

    Use: rewards whose scale differs from task to task, on-policy or at small staleness. Whitening waits for
    the whole batch unless normalise=whiten_running.
    """
    return centred(episode.own.reward, rewards(episode.siblings))


@advantage("opo")
def opo(episode: AdvantageInput) -> AdvantageValues:
    """R − Σ_j T_j·R_j / Σ_j T_j over the group, T in model tokens (OPO, arXiv 2505.23585).

    Use: answers whose lengths differ a lot, on-policy or at small staleness. The baseline has the least
    variance if the squared gradient grows with the length; including the episode itself leaves a bias of
    order 1/n.
    """
    return _by_length(episode.own.reward, episode.siblings)


@advantage("opo_loo", late=True)
def opo_loo(episode: AdvantageInput) -> AdvantageValues:
    """R − Σ_j T_j·R_j / Σ_j T_j over the *other* siblings (OPO, arXiv 2505.23585, without the episode's own
    weight).

    Use: like opo, but at any staleness and with group_policy=partial, because the baseline does not depend on
    the episode itself.
    """
    return _by_length(episode.own.reward, episode.others)


@advantage("gpg", scale="nonzero")
def gpg(episode: AdvantageInput, *, f_norm: Annotated[float, Meta(gt=0)] = 1.0) -> AdvantageValues:
    """α·(R − mean) / f_norm, α = B/(B − M), B episodes of the batch, M of them in groups without variance
    (GPG, arXiv 2504.02546).

    Use: sparse rewards without a group filter: α compensates for groups with equal rewards. Any staleness.
    For the variant that divides by the group std, use grpo with normalise=nonzero.
    """
    return centred(episode.own.reward, rewards(episode.siblings)) / f_norm


@advantage("pass_at_k")
def pass_at_k(episode: AdvantageInput, *, divide_by_std: bool = False) -> AdvantageValues:
    """r_max − r_second for the best of the group, 0 for others and ties (pass@k, arXiv 2503.19595).
    `divide_by_std`: divided by (group std + 1e-6), ddof 1.

    Use: tasks where only the best of n attempts counts; trains one episode per group. With divide_by_std,
    on-policy only.
    """
    if not episode.others:
        return 0.0
    best_lead = max(episode.own.reward - max(rewards(episode.others)), 0.0)
    return best_lead / (deviation(rewards(episode.siblings)) + EPSILON) if divide_by_std else best_lead


@advantage("gdpo", scale="whiten", components=True)
def gdpo(episode: AdvantageInput, *, weights: Weights = "") -> AdvantageValues:
    """Σ_c w_c·(R_c − mean_c) / (std_c + 1e-6), ddof 1, then whitened (GDPO, arXiv 2601.05242). `weights`:
    "name:weight,…" for the components that count; empty: all components, with weight 1.

    Use: several reward components whose sums would tie, on-policy or at small staleness. The reward function
    must report `components`. With a verl-style reward, name the weights; otherwise `acc` and other numbers
    count as components.
    """
    component_weights = _weights(episode, weights)
    return math.fsum(
        w * standardised(episode.own.components[name], [m.components[name] for m in episode.siblings])
        for name, w in component_weights.items()
    )


def _weights(episode: AdvantageInput, weights: str) -> dict[str, float]:
    """Component → weight. ConfigError when an episode does not report what is weighed."""
    weight_parts = [part.rpartition(":") for part in weights.split(",") if part]

    component_weights = {name.strip(): float(w) for name, _, w in weight_parts} or dict.fromkeys(
        episode.own.components, 1.0
    )
    for member in (episode.own, *episode.siblings):
        if not component_weights or not component_weights.keys() <= member.components.keys():
            raise ConfigError(
                "algorithm.advantage gdpo needs the reward components "
                f"{', '.join(sorted(component_weights)) or '(any)'}, but an episode has "
                f"{', '.join(sorted(member.components)) or 'none'}; the reward function must "
                "report the same `components` for every episode"
            )

    return component_weights


def _by_length(reward: float, members: Sequence[EpisodeResult]) -> float:
    """reward − mean of the members' rewards, weighted by their model tokens; 0 where they have none."""
    tokens = sum(member.tokens for member in members)
    return math.fsum(m.tokens * (reward - m.reward) for m in members) / tokens if tokens else 0.0


def rewards(members: Sequence[EpisodeResult]) -> list[float]:
    return [member.reward for member in members]


def centred(value: float, siblings: Sequence[float]) -> float:
    """value − mean; 0 without siblings."""
    return math.fsum(value - sibling_reward for sibling_reward in siblings) / max(len(siblings), 1)


def deviation(siblings: Sequence[float]) -> float:
    """Standard deviation, ddof 1; 0 for fewer than two."""
    square_sum = math.fsum(centred(value, siblings) ** 2 for value in siblings)
    return math.sqrt(square_sum / max(len(siblings) - 1, 1))


def standardised(value: float, siblings: Sequence[float]) -> float:
    """(value − mean) / (std + 1e-6); 0 for fewer than two siblings."""
    return centred(value, siblings) / (deviation(siblings) + EPSILON) if len(siblings) > 1 else 0.0


# -- of tokens and turns: what came after them ------------------------------------------------------------

Factor = Annotated[float, Meta(ge=0, le=1)]


@advantage("reinforce_pp", scale="whiten", siblings=False, turns=True)
def reinforce_pp(
    episode: AdvantageInput, *, gamma: Factor = 1.0, turn_gamma: Factor = 1.0
) -> AdvantageValues:
    """G_t = r_t + γ_t·G_{t+1}, then whitened over the batch's tokens (REINFORCE++, arXiv 2501.03262). γ_t is
    `gamma`, times `turn_gamma` where the next token is in the next turn.

    Use: no groups (n = 1), on-policy or at small staleness. Whitening waits for the whole batch unless
    normalise=whiten_running.
    """
    return returns(episode.rewards, _discounts(episode.turn, gamma, turn_gamma))


@advantage("constant", siblings=False)
def constant(episode: AdvantageInput) -> AdvantageValues:
    """A = 1, whatever the reward (plain).

    Use: with the loss sft, whose episodes have no reward; any staleness.
    """
    return 1.0


@advantage("remax", siblings=False, greedy=True, turns=True)
def remax(episode: AdvantageInput) -> AdvantageValues:
    """G_t − R of the sample's greedy episode, G_t = Σ_{s≥t} r_s (ReMax, arXiv 2310.10505).

    Use: small groups, down to one episode, at the cost of one extra episode per sample. Any staleness.
    """
    if episode.greedy is None:
        raise ProtocolError("advantage remax: an episode has no reward from a greedy episode")
    return to_go(episode.rewards) - episode.greedy


@advantage("gae", scale="whiten", siblings=False, critic=True, turns=True)
def gae(
    episode: AdvantageInput, *, gamma: Factor = 1.0, lam: Factor = 1.0, turn_gamma: Factor = 1.0
) -> AdvantageValues:
    """A_t = δ_t + γ_t·λ·A_{t+1}, δ_t = r_t + γ_t·V_{t+1} − V_t, then whitened (GAE, arXiv 1506.02438). λ is
    `lam`; γ_t is `gamma`, times `turn_gamma` where the next token is in the next turn; V after the last token
    is 0.

    Use: PPO with a critic, and long episodes with rewards for turns. Staleness up to 4: V belongs to the
    policy in training, but the rewards come from the policy that acted.
    """
    if episode.values is None:
        raise ProtocolError("advantage gae: an episode has no values from the critic")
    discount = _discounts(episode.turn, gamma, turn_gamma)
    next_values = np.append(episode.values[1:], 0.0)[: len(episode.values)]
    return returns(episode.rewards + discount * next_values - episode.values, lam * discount)


@advantage("grpo_turn", turns=True)
def grpo_turn(episode: AdvantageInput, *, turn_gamma: Factor = 1.0, std: bool = False) -> AdvantageValues:
    """G_k − mean of G_k over the siblings with a turn k, G_k = r_k + turn_gamma·G_{k+1} (turn-level credit as
    in MT-GRPO, arXiv 2505.11821). `std`: divided by (their std + 1e-6), ddof 1. With fewer than two such
    siblings, the turn gets the advantage of the whole episode, which is that of its first turn.

    Use: rewards for turns, at any staleness; with std, on-policy only.
    """
    compare_returns = standardised if std else centred
    own_returns = turn_returns(episode.own, turn_gamma, turns=int(episode.turn.max(initial=0)) + 1)

    returns_of_siblings = [turn_returns(member, turn_gamma) for member in episode.siblings]
    by_turn = np.zeros(len(own_returns))
    for k, value in enumerate(own_returns):
        sibling_returns = [sibling[k] for sibling in returns_of_siblings if len(sibling) > k]
        if len(sibling_returns) > 1:
            by_turn[k] = compare_returns(value, sibling_returns)
        elif k:
            by_turn[k] = by_turn[0]

    return by_turn[episode.turn]


@advantage("optimal_token_baseline", whole_group=True, turns=True)
def optimal_token_baseline(episode: AdvantageInput) -> AdvantageValues:
    """G_t − Σ G_t·W_t / Σ W_t over the group's episodes with a token t, G_t = Σ_{s≥t} r_s and W_t = Σ_{s≤t}
    (1 − 2π_s + Σ_v π_s(v)²) (OTB, arXiv 2602.07078). W_t approximates the squared norm of the gradient up to
    t; where it is 0 or unknown, the plain mean is used. Tokens that only one episode reaches get 0.

    Use: long episodes in small groups, on-policy or at small staleness. It has the same bias as opo.
    """
    own_returns = to_go(episode.rewards)
    weighted_lead, norm_sum, plain_lead, member_count = np.zeros((4, len(own_returns)))
    for trace in episode.traces:
        common_length = min(len(own_returns), len(trace.rewards))
        norm_step = 1 - 2 * np.exp(trace.prox) + trace.collision  # rounding must not turn it negative
        lead = own_returns[:common_length] - to_go(trace.rewards)[:common_length]
        norm = norm_step.clip(min=0.0).cumsum()[:common_length]
        weighted_lead[:common_length] += lead * norm
        norm_sum[:common_length] += norm
        plain_lead[:common_length] += lead
        member_count[:common_length] += 1

    if not member_count.all():
        raise ProtocolError(
            "advantage optimal_token_baseline: an episode has no traces, but other members of its group do"
        )
    has_weight = norm_sum > 0

    return np.where(has_weight, weighted_lead, plain_lead) / np.where(has_weight, norm_sum, member_count)


def returns(rewards: np.ndarray, discount: np.ndarray) -> np.ndarray:
    """x_t = rewards_t + discount_t·x_{t+1}, [T]; x past the end is 0.

    After k rounds x_t covers 2^k terms and factor_t is the discount past them: log2(T) vector operations.
    """
    total = rewards.astype(np.float64)

    factor = discount.astype(np.float64)
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
