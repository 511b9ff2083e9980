"""Advantages of whole episodes: a reward against those of the siblings.

An episode without siblings gets 0, never its raw reward. Equal rewards give exactly 0: every
comparison is a sum of differences. Every std has ddof 1. R − mean over all n siblings, R itself included, is
(n − 1)/n · (R − mean over the others).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from asyncrl.algorithms.credit import EPSILON, Credit, CreditInput, advantage
from asyncrl.errors import ConfigError
from asyncrl.types import EpisodeResult

WEIGHT = r"[^:,]+:-?\d+(\.\d+)?"  # name:weight
Weights = Annotated[str, Meta(pattern=f"^({WEIGHT}(,{WEIGHT})*)?$")]


@advantage("dr_grpo", late=True)
def dr_grpo(given: CreditInput) -> Credit:
    """R − mean (Dr. GRPO, arXiv 2503.20783). Computed as (n − 1)/n · (R − mean of the *other* siblings), n
    the number of members that were issued: the same if all of them landed, and unbiased if some are late.

    Use: the default, and whenever versions mix in a group (max_staleness > 0): a group std would magnify
    near-ties. With normalise=batch_std it is ScaleRL's (arXiv 2510.13786).
    """
    return (given.issued - 1) / given.issued * centred(given.own.reward, rewards(given.others))


@advantage("grpo")
def grpo(given: CreditInput) -> Credit:
    """(R − mean) / (std + 1e-6), ddof 1 (GRPO, arXiv 2402.03300). Fewer than two siblings: 0.

    Use: on-policy (max_staleness 0 or 1), or to compare with published runs.
    """
    return standardised(given.own.reward, rewards(given.siblings))


@advantage("rloo", late=True)
def rloo(given: CreditInput) -> Credit:
    """R − mean of the *other* siblings (RLOO, arXiv 2402.14740).

    Use: any staleness; dr_grpo times n/(n − 1).
    """
    return centred(given.own.reward, rewards(given.others))


@advantage("reinforce_pp_baseline", scale="whiten")
def reinforce_pp_baseline(given: CreditInput) -> Credit:
    """R − mean, then whitened over the batch's tokens (REINFORCE++ with baseline, arXiv 2501.03262).

    Use: rewards of very different size from task to task, on-policy or at small staleness; whitening waits
    for the whole batch unless normalise=whiten_running.
    """
    return centred(given.own.reward, rewards(given.siblings))


@advantage("opo")
def opo(given: CreditInput) -> Credit:
    """R − Σ_j T_j·R_j / Σ_j T_j over the group, T in model tokens (OPO, arXiv 2505.23585).

    Use: lengths that differ a lot, on-policy or at small staleness: the baseline of least variance if the
    square of a gradient grows with the length. Its own weight in the baseline leaves a bias of order 1/n.
    """
    return _by_length(given.own.reward, given.siblings)


@advantage("opo_loo", late=True)
def opo_loo(given: CreditInput) -> Credit:
    """R − Σ_j T_j·R_j / Σ_j T_j over the *other* siblings (OPO, arXiv 2505.23585, without the own weight).

    Use: as opo, at any staleness and with group_policy=partial: the baseline does not depend on the episode.
    """
    return _by_length(given.own.reward, given.others)


@advantage("gpg", scale="nonzero")
def gpg(given: CreditInput, *, f_norm: Annotated[float, Meta(gt=0)] = 1.0) -> Credit:
    """α·(R − mean) / f_norm, α = B/(B − M), B episodes of the batch, M of them in groups without variance
    (GPG, arXiv 2504.02546).

    Use: sparse rewards without a filter: α makes up for groups of equal rewards. Any staleness. The form
    whose f_norm is the group std is grpo with normalise=nonzero.
    """
    return centred(given.own.reward, rewards(given.siblings)) / f_norm


@advantage("pass_at_k")
def pass_at_k(given: CreditInput, *, divide_by_std: bool = False) -> Credit:
    """r_max − r_second for the best of the group, 0 for others and ties (pass@k, arXiv 2503.19595).
    `divide_by_std`: divided by (group std + 1e-6), ddof 1.

    Use: when the best of n attempts is what counts; one episode of a group is trained. With the std on-policy
    only.
    """
    if not given.others:
        return 0.0
    lead = max(given.own.reward - max(rewards(given.others)), 0.0)
    return lead / (deviation(rewards(given.siblings)) + EPSILON) if divide_by_std else lead


@advantage("gdpo", scale="whiten", components=True)
def gdpo(given: CreditInput, *, weights: Weights = "") -> Credit:
    """Σ_c w_c·(R_c − mean_c) / (std_c + 1e-6), ddof 1, then whitened (GDPO, arXiv 2601.05242). `weights`:
    "name:weight,…" of the components that count; empty: all, 1 each.

    Use: several reward components whose sums would tie; on-policy or at small staleness. The reward function
    must report `components`; of one in verl's form name the weights, or `acc` and other numbers count, too.
    """
    weight = _weights(given, weights)
    return math.fsum(
        w * standardised(given.own.components[name], [m.components[name] for m in given.siblings])
        for name, w in weight.items()
    )


def _weights(given: CreditInput, weights: str) -> dict[str, float]:
    """Component → weight. ConfigError when an episode does not report what is weighed."""
    parts = [part.rpartition(":") for part in weights.split(",") if part]
    weight = {name.strip(): float(w) for name, _, w in parts} or dict.fromkeys(given.own.components, 1.0)
    for member in (given.own, *given.siblings):
        if not weight or not weight.keys() <= member.components.keys():
            raise ConfigError(
                f"algorithm.advantage gdpo needs reward components {', '.join(sorted(weight)) or '(any)'}, "
                f"an episode has {', '.join(sorted(member.components)) or 'none'}; the reward function must "
                "report the same `components` for every episode"
            )
    return weight


def _by_length(reward: float, members: Sequence[EpisodeResult]) -> float:
    """reward − mean of the members' rewards, weighted by their model tokens; 0 where they have none."""
    tokens = sum(member.tokens for member in members)
    return math.fsum(m.tokens * (reward - m.reward) for m in members) / tokens if tokens else 0.0


def rewards(members: Sequence[EpisodeResult]) -> list[float]:
    return [member.reward for member in members]


def centred(value: float, siblings: Sequence[float]) -> float:
    """value − mean; 0 without siblings."""
    return math.fsum(value - other for other in siblings) / max(len(siblings), 1)


def deviation(siblings: Sequence[float]) -> float:
    """Standard deviation, ddof 1; 0 for fewer than two."""
    squares = math.fsum(centred(value, siblings) ** 2 for value in siblings)
    return math.sqrt(squares / max(len(siblings) - 1, 1))


def standardised(value: float, siblings: Sequence[float]) -> float:
    """(value − mean) / (std + 1e-6); 0 for fewer than two siblings."""
    return centred(value, siblings) / (deviation(siblings) + EPSILON) if len(siblings) > 1 else 0.0
