from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.correction import CorrectionInput, correct, select_rules
from asyncrl.algorithms.diagnostics import (
    LAG_NAMES,
    RatioSums,
    TokenReport,
    TokenState,
    TokenSums,
    metrics_of,
    report_tokens,
)

N = 60
ROWS = 6
FRESH = [i % 7 != 0 for i in range(N)]
LAG = [i * 11 % 20 for i in range(N)]
ROW = [i * ROWS // N for i in range(N)]
ADVANTAGE = [(-1.0) ** i * (i % 5) / 2 for i in range(N)]  # every fifth is 0
RULES = select_rules({"mask": {}, "truncate": {}}, "$")
BUCKETS = {
    "0": range(1),
    "1": range(1, 2),
    "2": range(2, 3),
    "3-4": range(3, 5),
    "5-8": range(5, 9),
    "9-16": range(9, 17),
    "17+": range(17, 999),
}


def logs(seed: int) -> list[float]:
    rng = random.Random(seed)
    return [math.log(rng.uniform(0.1, 1)) for _ in range(N)]


RATIO = [math.exp(a - b) for a, b in zip(logs(1), logs(2), strict=True)]
KEPT = [i for i in range(N) if FRESH[i] and 0.5 <= RATIO[i] <= 5]
CAPPED = [min(RATIO[i], 2 if ADVANTAGE[i] < 0 else 5) for i in range(N)]
WEIGHT = [CAPPED[i] if i in KEPT else 0.0 for i in range(N)]


def state(keep: list[int] | None = None) -> TokenState:
    """The tokens of `keep`, episodes numbered from 0 in every micro-batch."""
    keep = list(range(N)) if keep is None else keep
    prox, mu, advantage, lower = (
        torch.tensor([values[i] for i in keep], dtype=torch.float64)
        for values in (logs(1), logs(2), ADVANTAGE, [float(i % 4 == 0) for i in range(N)])
    )
    rows = sorted({ROW[i] for i in keep})
    row = torch.tensor([rows.index(ROW[i]) for i in keep])
    trainable = torch.tensor([FRESH[i] for i in keep])
    no = torch.zeros(len(keep), dtype=torch.bool)
    log_ratio = torch.where(trainable, prox - mu, 0.0)
    given = CorrectionInput(log_ratio, log_ratio, advantage, row, torch.zeros_like(row), trainable)
    corrected = correct(RULES, given)
    return TokenState(
        prox=prox,
        mu=mu,
        drift=torch.full_like(prox, 0.25),
        entropy=torch.ones_like(prox),
        advantage=advantage,
        weight=torch.tensor([1.0 / (1 + ROW[i]) for i in keep], dtype=torch.float64),
        loss=torch.full_like(prox, 2.0),
        clipped=~no,
        correction=corrected,
        ruled_out=corrected.masked,
        counted=~no,
        within_staleness=trainable | torch.tensor([i == 7 for i in keep]),
        trainable=trainable,
        exact=torch.tensor([LAG[i] == 0 for i in keep]),
        row=row,
        lag=torch.tensor([LAG[i] for i in keep]),
        clipped_lower=lower > 0,
    )


def numbers(sums: RatioSums) -> dict[str, float]:
    """All numbers among the sums, by field, and by lag bucket and bin."""
    flat_numbers: dict[str, float] = {}
    for name, value in msgspec.structs.asdict(sums).items():
        if name == "by_lag_bucket":
            for lag, part in value.items():
                flat_numbers |= {f"{lag}/{key}": number for key, number in numbers(part).items()}
        elif isinstance(value, dict):
            flat_numbers |= {f"{name}/{key}": number for key, number in value.items()}
        else:
            flat_numbers[name] = value
    return flat_numbers


def share(weights: list[float]) -> float:
    """Effective sample size over the number of samples."""
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def episodes(tokens: list[int]) -> list[float]:
    """Weights of the episodes over these tokens, cut at e^±8."""
    rows = {ROW[i] for i in tokens}
    totals = [sum(math.log(RATIO[i]) for i in tokens if ROW[i] == row) for row in rows]
    return [math.exp(min(max(total, -8), 8)) for total in totals]


def spread(tokens: list[int]) -> dict[str, float]:
    """What is told of trainable tokens, but quantiles, from the definitions."""
    n = len(tokens)
    ratios = [RATIO[i] for i in tokens]
    log_rho = sum(map(math.log, ratios)) / n
    return {
        "tokens": n,
        "log_rho": log_rho,
        "kl": -log_rho,
        "k3": sum(r - 1 - math.log(r) for r in ratios) / n,
        "chi2": sum(r * r for r in ratios) / n - 1,
        "masked_frac": sum(i not in KEPT for i in tokens) / n,
        "truncated_frac": sum(i in KEPT and CAPPED[i] < RATIO[i] for i in tokens) / n,
        "ess": share(ratios),
        "seq_ess": share(episodes(tokens)),
    }


def test_by_lag_against_plain_python() -> None:
    metrics = metrics_of(report_tokens(state()).sums)
    assert list(BUCKETS) == LAG_NAMES
    for name, lags in BUCKETS.items():
        tokens = [i for i in range(N) if FRESH[i] and LAG[i] in lags]
        assert tokens, "the example covers all buckets"
        prefix = f"rollout_corr/by_lag/{name}/"
        values_by_name = {key.removeprefix(prefix): v for key, v in metrics.items() if key.startswith(prefix)}
        wanted = spread(tokens)
        assert {key: values_by_name[key] for key in wanted} == pytest.approx(wanted)
        assert set(values_by_name) - set(wanted) == {"rho_p05", "rho_p50", "rho_p95"}


def test_of_all_tokens_against_plain_python() -> None:
    trainable = [i for i in range(N) if FRESH[i]]
    exact = [i for i in trainable if LAG[i] == 0]
    whole = spread(trainable)
    metrics = metrics_of(report_tokens(state()).sums)
    positive = [i for i in trainable if ADVANTAGE[i] > 0]
    push = [CAPPED[i] * ADVANTAGE[i] / (1 + ROW[i]) for i in KEPT]
    wanted = {
        "actor/pg_clipfrac": 1.0,
        "actor/pg_clipfrac_lower": sum(i % 4 == 0 for i in KEPT) / len(KEPT),
        "actor/ppo_kl": 0.25,
        "actor/entropy": 1.0,
        "rollout_corr/rollout_is_mean": sum(WEIGHT[i] for i in trainable) / len(trainable),
        "rollout_corr/rollout_is_eff_sample_size": share([WEIGHT[i] for i in trainable]),
        "rollout_corr/rho_mean": sum(RATIO[i] for i in trainable) / len(trainable),
        "rollout_corr/kl": whole["kl"],
        "rollout_corr/k3_kl": whole["k3"],
        "rollout_corr/chi2_token": whole["chi2"],
        "rollout_corr/rollout_rs_masked_fraction": whole["masked_frac"],
        "rollout_corr/truncated_fraction": whole["truncated_frac"],
        "rollout_corr/rho_eff_sample_size": whole["ess"],
        "rollout_corr/rho_seq_eff_sample_size": whole["seq_ess"],
        "rollout_corr/logprob_diff_mean": sum(abs(math.log(RATIO[i])) for i in exact) / len(exact),
        "rollout_corr/k3_kl_same_version": spread(exact)["k3"],
        "rollout_corr/logprob_diff_tokens": len(exact),
        "rollout_corr/nonfinite_tokens": 1,
        "rollout_corr/zero_advantage_frac": sum(ADVANTAGE[i] == 0 for i in trainable) / len(trainable),
        "rollout_corr/kept_advantage/positive": sum(CAPPED[i] * ADVANTAGE[i] for i in KEPT if i in positive)
        / sum(ADVANTAGE[i] for i in positive),
        "rollout_corr/residual_drift": sum(push) / sum(map(abs, push)),
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)


def test_sums_and_extremes_against_plain_python() -> None:
    seen = report_tokens(state())
    trainable = [i for i in range(N) if FRESH[i]]
    wanted = {
        "model_tokens": N,
        "trainable_tokens": len(trainable),
        "kept_tokens": len(KEPT),
        "loss": 2.0 * len(KEPT),
        "weight": sum(CAPPED[i] for i in KEPT),
        "episodes": ROWS,
        "episode_weight": sum(episodes(trainable)),
        "episode_weight_squared": sum(w * w for w in episodes(trainable)),
    }
    assert {name: getattr(seen.sums, name) for name in wanted} == pytest.approx(wanted)
    for name, values in (("rho", RATIO), ("rollout_is", WEIGHT)):
        assert seen.highest[f"rollout_corr/{name}_max"] == pytest.approx(max(values[i] for i in trainable))
        assert seen.lowest[f"rollout_corr/{name}_min"] == pytest.approx(min(values[i] for i in trainable))
    assert seen.highest["rollout_corr/logprob_diff_max"] == pytest.approx(
        max(abs(math.log(RATIO[i])) for i in trainable if LAG[i] == 0)
    )
    assert seen.sums.kept_by_lag == Counter(LAG[i] for i in KEPT)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_the_cut_into_micro_batches_does_not_matter(micro_batch: list[int]) -> None:
    """Whole episodes, dealt in any way, give the sums of the whole batch."""
    batch_report = report_tokens(state())
    parts = list[TokenReport]()
    for k in set(micro_batch):
        parts.append(report_tokens(state([i for i in range(N) if micro_batch[ROW[i]] == k])))
    added = sum((part.sums for part in parts), TokenSums())
    assert numbers(added) == pytest.approx(numbers(batch_report.sums) | {"micro_batches": len(parts)})
    for name in batch_report.highest:
        assert max(part.highest.get(name, -math.inf) for part in parts) == batch_report.highest[name]
    assert added.kept_by_lag == batch_report.sums.kept_by_lag


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-25, 25), min_size=1, max_size=40))
def test_quantiles_are_those_of_numpy_up_to_the_width_of_a_bin(values: list[float]) -> None:
    """A bin is a factor of 1.26 wide in log rho, 0.002 around 0; between two tokens either will do."""
    n = len(values)
    yes = torch.ones(n, dtype=torch.bool)
    row = torch.zeros(n, dtype=torch.long)
    one = replace(state([1]), correction=correct([], correction_input(values)))
    many = {
        name: getattr(one, name).expand(n) for name in ("drift", "entropy", "advantage", "weight", "loss")
    }
    given = replace(one, prox=torch.tensor(values, dtype=torch.float64), mu=torch.zeros(n), **many)
    given = replace(
        given, row=row, lag=row, counted=yes, within_staleness=yes, trainable=yes, exact=yes, clipped=yes
    )
    metrics = metrics_of(report_tokens(replace(given, clipped_lower=None)).sums)
    limited = np.clip(values, -20, 20)
    for name, q in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
        log_ratio = math.log(metrics[f"rollout_corr/rho_{name}"])
        low = np.quantile(limited, q, method="lower")
        high = np.quantile(limited, q, method="higher")
        assert low - 0.26 * abs(low) - 0.002 <= log_ratio <= high + 0.26 * abs(high) + 0.002


def correction_input(values: list[float]) -> CorrectionInput:
    n = len(values)
    row = torch.zeros(n, dtype=torch.long)
    yes = torch.ones(n, dtype=torch.bool)
    log_ratio = torch.tensor(values, dtype=torch.float64)
    return CorrectionInput(log_ratio, log_ratio, torch.ones(n), row, row, yes)


def test_where_prox_is_mu_nothing_is_off() -> None:
    given = state()
    even = correct(RULES, replace(correction_input([0.0] * N), trainable=given.trainable))
    metrics = metrics_of(report_tokens(replace(given, mu=given.prox, correction=even)).sums)
    for name in ("rollout_corr", *(f"rollout_corr/by_lag/{lag}" for lag in LAG_NAMES)):
        whole = name == "rollout_corr"
        assert metrics[f"{name}/{'rho_eff_sample_size' if whole else 'ess'}"] == pytest.approx(1)
        assert metrics[f"{name}/{'rho_seq_eff_sample_size' if whole else 'seq_ess'}"] == pytest.approx(1)
        assert metrics[f"{name}/{'chi2_token' if whole else 'chi2'}"] == pytest.approx(0)
        assert metrics[f"{name}/rho_p50"] == pytest.approx(1, abs=1e-3)
    assert metrics["rollout_corr/kept_advantage/negative"] == pytest.approx(1)


def test_a_fully_masked_batch_has_ratios_but_no_share_of_kept_tokens() -> None:
    given = state()
    nothing = replace(given.correction, weight=torch.zeros(N), masked=torch.ones(N, dtype=torch.bool))
    seen = report_tokens(replace(given, correction=nothing, ruled_out=nothing.masked))
    metrics = metrics_of(seen.sums)
    assert seen.sums.kept_by_lag == {} and seen.sums.loss == 0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert metrics["rollout_corr/kept_advantage/positive"] == 0
    assert not {"actor/pg_clipfrac", "rollout_corr/residual_drift"} & set(metrics)


def test_a_single_token() -> None:
    """Its lag is 11."""
    metrics = metrics_of(report_tokens(state([1])).sums)
    assert metrics["rollout_corr/by_lag/9-16/tokens"] == 1
    assert metrics["rollout_corr/rho_mean"] == pytest.approx(RATIO[1])
    assert metrics["rollout_corr/rho_seq_eff_sample_size"] == pytest.approx(1)
    assert sum(name.endswith("/tokens") for name in metrics) == 1


def test_tokens_that_do_not_count_leave_no_trace() -> None:
    given = state([1])
    given.trainable[:] = given.counted[:] = given.within_staleness[:] = False
    given.drift[:] = given.entropy[:] = math.nan
    seen = report_tokens(given)
    assert not any((numbers(seen.sums) | {"micro_batches": 0}).values())
    assert seen.highest == {} and seen.lowest == {} and seen.sums.kept_by_lag == {}
    assert not any(metrics_of(seen.sums).values()) and metrics_of(TokenSums()) == {}


def test_extreme_log_probs_give_finite_sums() -> None:
    given = state()
    values = [10.0 ** (i % 39) * (-1) ** i for i in range(N)]
    wild = replace(given, mu=torch.tensor(values), correction=correct(RULES, correction_input(values)))
    seen = report_tokens(wild)
    assert all(map(math.isfinite, numbers(seen.sums).values()))
    assert all(map(math.isfinite, metrics_of(seen.sums).values()))


def test_one_episode_may_not_rule_the_effective_sample_size() -> None:
    """Weights e^12 and 1 count as e^8 and 1."""
    given = state([1, N - 2])
    seen = report_tokens(replace(given, mu=given.prox - torch.tensor([12.0, 0.0], dtype=torch.float64)))
    assert seen.sums.episode_weight == pytest.approx(math.exp(8) + 1)
    assert seen.sums.episode_weight_squared == pytest.approx(math.exp(16) + 1)


def test_a_lag_over_the_last_place_is_counted_there() -> None:
    seen = report_tokens(replace(state(KEPT[:1]), lag=torch.tensor([5000])))
    assert seen.sums.kept_by_lag == {1023: 1} and seen.sums.by_lag_bucket["17+"].trainable_tokens == 1
