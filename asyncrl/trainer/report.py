"""Metrics of a batch under the names dashboards know: what the tallies mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.algorithms.diagnostics import TokenSums
from asyncrl.buffer.staleness import LagHistogram, length_bucket, masked_by_quarter
from asyncrl.trainer.batch import Example
from asyncrl.trainer.tally import Tally

TAKEN = "staleness/lag_tokens/"  # + lag: tokens taken at that lag, the histogram
KEPT = "_kept_lag/"  # + lag: tokens of that lag that entered the loss


def tally_examples(tally: Tally, examples: Sequence[Example]) -> None:
    """Rewards, lengths and staleness of the episodes of one micro-batch."""
    for e in examples:
        t = e.trajectory
        tally.summary("critic/score", [t.reward])
        tally.summary("critic/rewards", [t.reward])
        tally.summary("critic/advantages", [e.advantage])
        tally.summary("response_length", [e.tokens])
        tally.summary("prompt_length", [int(e.position[0]) if e.tokens else e.length])
        tally.summary("num_turns", [t.turns])
        tally.summary("tool_call_counts", [t.tool_calls])
        tally.summary("global_seqlen", [e.length])
        tally.ratio("response_length/clip_ratio", float(t.end.truncated), 1.0)
        tally.ratio("critic/zero_advantage_frac", float(e.advantage == 0), 1.0)
        tally.total("perf/total_num_tokens", e.length)
        tally.total("trainer/trajectories", 1)
        tally.total("trainer/model_tokens", e.tokens)
        _tally_staleness(tally, e)


def _tally_staleness(tally: Tally, e: Example) -> None:
    """Lags, and the share over the bound by response length and by quarter of the response."""
    lags, counts = np.unique(e.lag, return_counts=True)
    for lag, count in zip(lags.tolist(), counts.tolist(), strict=True):
        tally.total(f"{TAKEN}{lag}", count)
    masked = int(e.stale.sum())
    tally.ratio("staleness/masked_token_frac", masked, e.tokens)
    tally.total("staleness/fully_masked_trajectories", float(0 < e.tokens == masked))
    by_length = f"staleness/by_length/{length_bucket(e.tokens)}"
    tally.ratio(f"{by_length}/masked_frac", masked, e.tokens)
    if masked:  # quarters only where there is something to place
        for quarter, (part, whole) in enumerate(masked_by_quarter(e.stale.tolist()), start=1):
            tally.ratio(f"{by_length}/masked_q{quarter}", part, whole)


def tally_tokens(tally: Tally, seen: TokenSums, denominator: float) -> None:
    """Loss and off-policyness of the tokens of one micro-batch. `denominator`: its share of D."""
    s = seen.sums
    tally.ratio("actor/pg_loss", s["loss"], denominator)
    tally.ratio("actor/pg_clipfrac", s["clipped"], s["kept"])
    tally.ratio("actor/ppo_kl", s["drift"], s["fresh"])
    tally.ratio("actor/entropy", s["entropy"], s["tokens"])
    tally.ratio("rollout_corr/rollout_is_mean", s["rho"], s["fresh"])
    tally.ratio("rollout_corr/kl", s["k1"], s["fresh"])
    tally.ratio("rollout_corr/k3_kl", s["k3"], s["fresh"])
    tally.ratio("rollout_corr/rollout_rs_masked_fraction", s["masked"], s["fresh"])
    tally.ratio("rollout_corr/truncated_fraction", s["truncated"], s["fresh"])
    tally.ratio("rollout_corr/logprob_diff_mean", s["exact_diff"], s["exact"])
    tally.ratio("rollout_corr/k3_kl_same_version", s["exact_k3"], s["exact"])
    tally.total("rollout_corr/logprob_diff_tokens", s["exact"])
    tally.total("rollout_corr/nonfinite_tokens", s["nonfinite"])
    tally.total("trainer/kept_tokens", s["kept"])
    for name in ("fresh", "rho", "rho2", "episodes", "episode_w", "episode_w2"):
        tally.total(f"_{name}", s[name])
    for name, label in (("rho", "rollout_is_max"), ("exact_diff", "logprob_diff_max")):
        if name in seen.highest:
            tally.high(f"rollout_corr/{label}", seen.highest[name])
    if "rho" in seen.lowest:
        tally.low("rollout_corr/rollout_is_min", seen.lowest["rho"])
    for lag, (log_rho, tokens) in enumerate(seen.log_rho_by_lag):
        if tokens:
            tally.ratio(f"rollout_corr/log_rho_by_lag/{lag}", log_rho, tokens)
    for lag, count in seen.kept_lags.items():
        tally.total(f"{KEPT}{lag}", count)


def batch_metrics(tally: Tally) -> dict[str, float]:
    """The metrics of a whole batch, from the tally merged over all ranks."""
    metrics = tally.metrics()
    hidden = {name: metrics.pop(name) for name in list(metrics) if name.startswith("_")}
    if hidden.get("_fresh"):
        metrics["rollout_corr/rollout_is_eff_sample_size"] = _ess(hidden, "rho", "fresh")
        metrics["rollout_corr/rollout_is_seq_eff_sample_size"] = _ess(hidden, "episode_w", "episodes")
    return metrics | _lags(_histogram(hidden, KEPT), _histogram(metrics, TAKEN))


def _ess(sums: dict[str, float], weight: str, count: str) -> float:
    """(Σ w)² / (n·Σ w²), in (0, 1]."""
    return sums[f"_{weight}"] ** 2 / (sums[f"_{weight}2"] * sums[f"_{count}"])


def _histogram(values: dict[str, float], prefix: str) -> LagHistogram:
    found = {name.removeprefix(prefix): n for name, n in values.items() if name.startswith(prefix)}
    return LagHistogram({int(lag): int(n) for lag, n in found.items()})


def _lags(kept: LagHistogram, taken: LagHistogram) -> dict[str, float]:
    """`staleness/lag/*` as measured on the tokens that entered the loss; `lag_taken/max` of all."""
    return {
        "staleness/lag/mean": kept.mean,
        "staleness/lag/p50": kept.quantile(0.5),
        "staleness/lag/p95": kept.quantile(0.95),
        "staleness/lag/max": kept.max,
        "staleness/lag_taken/max": taken.max,
    }
