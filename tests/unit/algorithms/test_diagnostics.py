from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from asyncrl.algorithms.correction import CorrectionInput, corrections
from asyncrl.algorithms.diagnostics import TokenState, TokenSums, token_sums
from asyncrl.config import AlgorithmConfig

N = 40
FRESH = [i % 7 != 0 for i in range(N)]
LAG = [i % 20 for i in range(N)]
ROW = [i // 10 for i in range(N)]


def logs(seed: int) -> list[float]:
    rng = random.Random(seed)
    return [math.log(rng.uniform(0.1, 1)) for _ in range(N)]


def state(keep: range, row_start: int = 0) -> TokenState:
    """The tokens of `keep`; rows are numbered from 0 in every micro-batch."""
    prox, mu = (torch.tensor(logs(seed), dtype=torch.float64)[keep.start : keep.stop] for seed in (1, 2))
    advantage = torch.where(torch.arange(N) % 2 == 0, 1.0, -1.0)[keep.start : keep.stop]
    cut = slice(keep.start, keep.stop)
    return TokenState(
        logp=prox,
        prox=prox,
        mu=mu,
        entropy=torch.ones_like(prox),
        loss=torch.arange(len(prox), dtype=torch.float64) * 0 + 2.0,
        clipped=torch.zeros(len(prox), dtype=torch.bool),
        correction=corrections.get("mask_truncate")(CorrectionInput(prox - mu, advantage, AlgorithmConfig())),
        counted=torch.ones(len(prox), dtype=torch.bool),
        in_bound=torch.tensor(FRESH[cut]),
        fresh=torch.tensor(FRESH[cut]),
        exact=torch.tensor([lag == 0 for lag in LAG[cut]]),
        row=torch.tensor(ROW[cut]) - row_start,
        lag=torch.tensor(LAG[cut]),
    )


def test_against_plain_python() -> None:
    seen = token_sums(state(range(N)))
    ratios = [math.exp(a - b) for a, b in zip(logs(1), logs(2), strict=True)]
    fresh = [i for i in range(N) if FRESH[i]]
    kept = [i for i in fresh if 0.5 <= ratios[i] <= 5]
    rows = [math.prod(ratios[i] for i in fresh if ROW[i] == r) for r in range(4)]
    rows = [min(max(weight, math.exp(-8)), math.exp(8)) for weight in rows]
    wanted = {
        "tokens": N,
        "fresh": len(fresh),
        "kept": len(kept),
        "masked": len(fresh) - len(kept),
        "truncated": sum(ratios[i] > (2 if i % 2 else 5) for i in kept),
        "loss": 2.0 * len(kept),
        "rho": sum(ratios[i] for i in fresh),
        "rho2": sum(ratios[i] ** 2 for i in fresh),
        "k1": sum(-math.log(ratios[i]) for i in fresh),
        "k3": sum(ratios[i] - 1 - math.log(ratios[i]) for i in fresh),
        "entropy": N,
        "episodes": 4,
        "episode_w": sum(rows),
        "episode_w2": sum(weight**2 for weight in rows),
        "exact": sum(LAG[i] == 0 for i in fresh),
        "nonfinite": 0,
    }
    assert {name: seen.sums[name] for name in wanted} == pytest.approx(wanted)
    assert seen.highest["rho"] == pytest.approx(max(ratios[i] for i in fresh))
    assert seen.lowest["rho"] == pytest.approx(min(ratios[i] for i in fresh))
    assert seen.log_rho_by_lag[3][0] == pytest.approx(sum(math.log(ratios[i]) for i in fresh if LAG[i] == 3))
    assert seen.kept_lags == Counter(LAG[i] for i in kept)
    assert seen.log_rho_by_lag[16][1] == sum(LAG[i] >= 16 for i in fresh)


def test_sums_add_over_micro_batches() -> None:
    whole = token_sums(state(range(N)))
    parts = [token_sums(state(range(20))), token_sums(state(range(20, N), row_start=2))]
    assert {name: sum(part.sums[name] for part in parts) for name in whole.sums} == pytest.approx(whole.sums)
    assert max(part.highest["rho"] for part in parts) == whole.highest["rho"]


def test_tokens_that_do_not_count_leave_no_trace() -> None:
    given = state(range(1))
    given.fresh[:] = given.counted[:] = given.in_bound[:] = False
    seen = token_sums(given)
    assert not any(seen.sums.values()) and isinstance(seen, TokenSums)
    assert seen.highest == {} and seen.lowest == {} and seen.kept_lags == {}
