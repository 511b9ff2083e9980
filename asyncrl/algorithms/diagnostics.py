"""What the tokens of one micro-batch say about off-policyness, as sums.

All values are plain sums, maxima or minima over tokens or episodes, so they add up over micro-batches
and ranks. With rho = pi_prox/mu: k1 = -log rho and k3 = rho - 1 - log rho estimate KL(mu, prox).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.correction import Correction

SEQUENCE_LOG_LIMIT = 8.0  # a single episode may not rule the effective sample size
NOTHING = float("-inf")  # the maximum over no token
LAGS = 17  # log rho is reported by lag 0..15; older tokens share the last place


@dataclass(frozen=True)
class TokenState:
    """Tokens [N]: log-probs without gradient, and which count. `counted`: real model tokens; `in_bound`:
    of these, with a lag within the bound; `fresh`: of these, with finite log-probs (the others' mu was
    replaced by prox); `exact`: sampled by the policy in training, whole context included. `row`: episode
    of each token; `loss`: weighted loss."""

    logp: Tensor
    prox: Tensor
    mu: Tensor
    entropy: Tensor
    loss: Tensor
    clipped: Tensor
    correction: Correction
    counted: Tensor
    in_bound: Tensor
    fresh: Tensor
    exact: Tensor
    row: Tensor
    lag: Tensor


@dataclass(frozen=True)
class TokenSums:
    """`sums` add, `highest` take the maximum, `lowest` the minimum. `log_rho_by_lag`: (Σ log rho, tokens)
    at lag 0, 1, …; the last place holds everything older. `kept_lags`: lag → tokens that entered the loss."""

    sums: dict[str, float]
    highest: dict[str, float]
    lowest: dict[str, float]
    log_rho_by_lag: list[tuple[float, float]]
    kept_lags: dict[int, int]


def token_sums(state: TokenState) -> TokenSums:
    """Reduce one micro-batch; the only transfers from the device."""
    fresh, ratio, log_ratio = state.fresh, state.correction.ratio, state.prox - state.mu
    kept = fresh & ~state.correction.masked
    episodes, episode_ess = _episode_weights(state)

    def over(where: Tensor, value: Tensor) -> Tensor:
        return torch.where(where, value, 0).sum(dtype=torch.float64)

    sums = {
        "loss": over(kept, state.loss),
        "tokens": state.counted.sum(),
        "fresh": fresh.sum(),
        "kept": kept.sum(),
        "nonfinite": (state.in_bound & ~fresh).sum(),
        "clipped": (state.clipped & kept).sum(),
        "masked": (state.correction.masked & fresh).sum(),
        "truncated": (state.correction.truncated & fresh).sum(),
        "rho": over(fresh, ratio),
        "rho2": over(fresh, ratio**2),
        "k1": over(fresh, -log_ratio),
        "k3": over(fresh, ratio - 1 - log_ratio),
        "drift": over(fresh, state.prox - state.logp),
        "entropy": over(state.counted, state.entropy.nan_to_num(0.0)),
        "episodes": episodes,
        "episode_w": episode_ess[0],
        "episode_w2": episode_ess[1],
        "exact": (state.exact & fresh).sum(),
        "exact_diff": over(state.exact & fresh, log_ratio.abs()),
        "exact_k3": over(state.exact & fresh, ratio - 1 - log_ratio),
    }
    extremes = {
        "rho": torch.where(fresh, ratio, NOTHING).max(),
        "-rho": torch.where(fresh, -ratio, NOTHING).max(),
        "exact_diff": torch.where(state.exact & fresh, log_ratio.abs(), NOTHING).max(),
    }
    lags, counts = torch.unique(state.lag[kept], return_counts=True)
    kept_lags = dict(zip(lags.tolist(), counts.tolist(), strict=True))
    return _collect(sums, extremes, _by_lag(state.lag, log_ratio, fresh), kept_lags)


def _episode_weights(state: TokenState) -> tuple[Tensor, Tensor]:
    """Episodes with fresh tokens, and (Σ w, Σ w²) of their ratios Π rho over the fresh suffix."""
    rows = int(state.row.max()) + 1
    log_ratio = torch.where(state.fresh, state.prox - state.mu, 0).double()
    total = torch.zeros(rows, dtype=torch.float64, device=log_ratio.device).index_add(0, state.row, log_ratio)
    present = torch.zeros_like(total).index_add(0, state.row, state.fresh.double()) > 0
    weight = total.clamp(-SEQUENCE_LOG_LIMIT, SEQUENCE_LOG_LIMIT).exp() * present
    return present.sum(), torch.stack([weight.sum(), (weight**2).sum()])


def _by_lag(lag: Tensor, log_ratio: Tensor, fresh: Tensor) -> Tensor:
    """[2, LAGS]: Σ log rho and tokens, by lag."""
    place = lag.clamp(max=LAGS - 1)
    values = torch.stack([torch.where(fresh, log_ratio, 0).double(), fresh.double()])
    return torch.zeros(2, LAGS, dtype=torch.float64, device=lag.device).index_add(1, place, values)


def _collect(
    sums: dict[str, Tensor], extremes: dict[str, Tensor], by_lag: Tensor, kept_lags: dict[int, int]
) -> TokenSums:
    scalars = torch.stack([value.double() for value in (*sums.values(), *extremes.values())])
    flat = torch.cat([scalars, by_lag.flatten()]).tolist()
    added, flat = dict(zip(sums, flat, strict=False)), flat[len(sums) :]
    peaks, flat = dict(zip(extremes, flat, strict=False)), flat[len(extremes) :]
    peaks = {name: value for name, value in peaks.items() if value != NOTHING}
    return TokenSums(
        sums=added,
        highest={name: value for name, value in peaks.items() if not name.startswith("-")},
        lowest={name[1:]: -value for name, value in peaks.items() if name.startswith("-")},
        log_rho_by_lag=list(zip(flat[:LAGS], flat[LAGS:], strict=True)),
        kept_lags=kept_lags,
    )
