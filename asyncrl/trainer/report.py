"""Metrics of a batch, from numbers that add up: the same result for any cut into micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.credit import Scale
from asyncrl.algorithms.diagnostics import FieldSums, TokenReport, TokenState, TokenSums, metrics_of
from asyncrl.algorithms.normalise import Moments, end_factor, explained_variance
from asyncrl.buffer.prompts import REWARD_TOLERANCE
from asyncrl.buffer.staleness import LagHistogram, length_bucket, masked_by_quarter
from asyncrl.observe.metrics import LAG_TOKENS, NLL, ZERO_ADVANTAGE
from asyncrl.observe.transcripts import MAX_RATIO_TOKENS, TokenRatios, is_kept, save_ratios
from asyncrl.trainer.batch import TrainingSample
from asyncrl.trainer.objective import Terms

SAMPLED_METRICS = ("staleness/", "rollout_corr/by_lag/", ZERO_ADVANTAGE)  # metrics of sampled tokens
ADVANTAGE_METRICS = [f"critic/advantages/{kind}" for kind in ("mean", "max", "min")]
LEAST_ESS_FACTOR = 0.1
AGENT_PREFIX = "actor/agent/"  # + name / metric, of the samples that train an agent's adapter
NO_AGENT = "others"  # in place of an empty name: agents without an adapter of their own


class BatchSums(FieldSums):
    """Sums over a batch, or over a mini-batch behind a barrier, from which the optimizer step and several
    metrics are computed.

    `denominator`: D, by which the losses are divided. `tokens_by_lag`: all model tokens, stale ones included;
    `tokens.kept_by_lag`: those that enter the loss. `tokens.kept_tokens` and `tokens.kept_by_lag` also count
    episodes without advantage, which no model scores. The dicts by agent are filled where several agents have
    adapters. `varied_episodes`: episodes of groups with variance; `episode_advantages`: the means of the
    episodes' advantages. `returns` and `value_errors` (returns minus values): by token.
    """

    trajectories: int = 0
    denominator: float = 0.0
    tokens_by_lag: dict[int, int] = {}
    tokens: TokenSums = msgspec.field(default_factory=TokenSums)
    trainable_by_agent: dict[str, float] = {}
    kept_by_agent: dict[str, float] = {}
    loss_by_agent: dict[str, float] = {}
    varied_episodes: int = 0
    episode_advantages: Moments = Moments()
    token_advantages: Moments = Moments()
    returns: Moments = Moments()
    value_errors: Moments = Moments()


class MetricSums(msgspec.Struct):
    """Holds ratios (numerator and denominator apart), totals, and extremes, by metric name, and the `sums`
    that are no metrics themselves."""

    ratios: dict[str, tuple[float, float]] = {}
    totals: dict[str, float] = {}
    highest: dict[str, float] = {}
    lowest: dict[str, float] = {}
    sums: BatchSums = msgspec.field(default_factory=BatchSums)

    def add_ratio(self, name: str, numerator: float, denominator: float) -> None:
        old_numerator, old_denominator = self.ratios.get(name, (0.0, 0.0))
        self.ratios[name] = (old_numerator + numerator, old_denominator + denominator)

    def add_total(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value

    def add_highest(self, name: str, value: float) -> None:
        self.highest[name] = max(value, self.highest.get(name, value))

    def add_lowest(self, name: str, value: float) -> None:
        self.lowest[name] = min(value, self.lowest.get(name, value))

    def add_summary(self, name: str, values: Sequence[float] | np.ndarray) -> None:
        """Count `name`/mean, /max and /min of the values; nothing without values."""
        if len(values):
            numbers = np.asarray(values)
            self.add_ratio(f"{name}/mean", float(numbers.sum()), len(numbers))
            self.add_highest(f"{name}/max", float(numbers.max()))
            self.add_lowest(f"{name}/min", float(numbers.min()))

    def merge(self, addend: MetricSums) -> None:
        for name, (numerator, denominator) in addend.ratios.items():
            self.add_ratio(name, numerator, denominator)
        for name, value in addend.totals.items():
            self.add_total(name, value)
        for name, value in addend.highest.items():
            self.add_highest(name, value)
        for name, value in addend.lowest.items():
            self.add_lowest(name, value)
        self.sums += addend.sums

    def metrics(self) -> dict[str, float]:
        """Return one number per name. A ratio with denominator 0 is left out."""
        means = {name: a / b for name, (a, b) in self.ratios.items() if b}
        return {**means, **self.totals, **self.highest, **self.lowest}


def merged_sums(parts: Iterable[MetricSums]) -> MetricSums:
    """Add the sums of all parts, in order."""
    total_sums = MetricSums()
    for part in parts:
        total_sums.merge(part)
    return total_sums


def tally_samples(tally: MetricSums, samples: Sequence[TrainingSample], longest_prompt: int) -> None:
    """Count the samples, their scores, lengths and staleness. `longest_prompt`: tokens a prompt may have."""
    for sample in samples:
        tally.add_summary("critic/score", [sample.planned.own.score])
        tally.add_summary("response_length", [sample.model_tokens])
        tally.add_summary("prompt_length", [sample.prompt_tokens])
        tally.add_summary("global_seqlen", [sample.total_tokens])
        tally.add_ratio("response_length/clip_ratio", float(sample.planned.own.end.truncated), 1.0)
        tally.add_ratio("prompt_length/clip_ratio", float(sample.prompt_tokens >= longest_prompt), 1.0)
        tally.add_total("perf/total_num_tokens", sample.total_tokens)
        tally.sums.trajectories += 1
        tally.add_total("trainer/model_tokens", sample.model_tokens)
        _tally_staleness(tally, sample)


def tally_computed(tally: MetricSums, tokens: int, flops: float) -> None:
    """Count the tokens of one rank's policy forwards, including padding, shared prefixes once, and the
    floating point operations of these forwards."""
    tally.add_total("perf/model_tflop", flops / 1e12)
    tally.add_total("perf/computed_tokens", tokens)
    tally.add_highest("global_seqlen/balanced_max", tokens)
    tally.add_lowest("global_seqlen/balanced_min", tokens)


def tally_advantages(tally: MetricSums, samples: Sequence[TrainingSample]) -> None:
    """Count rewards (with the KL penalty, if there is one), and advantages, returns and values per token; add
    up the moments that divide the batch at its end."""
    for sample in samples:
        assert sample.advantage is not None
        tally.add_summary("critic/rewards", [sample.planned.own.reward])
        tally.add_summary("critic/advantages", sample.advantage)
        tally.add_ratio("critic/zero_advantage_frac", float(not sample.has_advantage), 1.0)

        if sample.returns is not None and sample.value is not None:
            tally.add_summary("critic/returns", sample.returns)
            tally.add_summary("critic/values", sample.value)
            tally.sums.returns += Moments.of(sample.returns)
            tally.sums.value_errors += Moments.of(sample.returns - sample.value)

        if sample.model_tokens:
            tally.sums.token_advantages += Moments.of(sample.advantage)

        for rewards, advantage in _compared_episodes(sample, sample.advantage):
            if len(advantage):
                tally.sums.episode_advantages += Moments(1.0, float(advantage.mean()))
                # A group varies in rewards or, by turn or by component, in advantages.
                tally.sums.varied_episodes += max(rewards) - min(rewards) > REWARD_TOLERANCE or bool(
                    np.abs(advantage).max() > REWARD_TOLERANCE
                )


def _compared_episodes(
    sample: TrainingSample, advantage: np.ndarray
) -> Iterator[tuple[list[float], np.ndarray]]:
    """Yield the group's rewards, and the advantages of the tokens. Each agent that earned a separate reward
    counts as an episode: the advantages of both sides of a game add up to nothing."""
    result = sample.planned.own
    members = (sample.planned.own, *sample.planned.siblings)
    if not result.agents:
        yield [member.reward for member in members], advantage
    for agent in dict.fromkeys(result.agents):
        rewards = [member.of(agent).reward for member in members if agent in member.agents]
        yield rewards, advantage[np.asarray(result.agents)[sample.turn] == agent]


def advantage_factor(scale: Scale, sums: BatchSums) -> float:
    """Return `end_factor` of a whole batch."""
    return end_factor(scale, sums.episode_advantages, sums.varied_episodes)


def ess_factor(sums: TokenSums) -> float:
    """Return √(ESS/N) of a whole batch's episodes (VCPO), at least 0.1."""
    if not sums.episodes:
        return 1.0
    ess_fraction = sums.episode_weight**2 / (sums.episode_weight_squared * sums.episodes)
    return max(LEAST_ESS_FACTOR, math.sqrt(ess_fraction))


def tally_terms(tally: MetricSums, terms: Terms, denominator: float) -> None:
    """Count the terms added to the policy loss; `denominator`: the micro-batch's part of D."""
    tensors = [tensor for pair in terms.values() for tensor in pair if tensor is not None]
    # A single transfer from the device.
    values = iter(torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else [])
    for name, (_, count) in terms.items():
        tally.add_ratio(name, next(values), denominator if count is None else next(values))


def _tally_staleness(tally: MetricSums, sample: TrainingSample) -> None:
    """Count lags, and the fraction over the bound by response length and by quarter of the response."""
    _count_lags(tally.sums.tokens_by_lag, sample.lag)
    masked_count = int(sample.stale.sum())
    tally.add_ratio("staleness/masked_token_frac", masked_count, sample.model_tokens)
    tally.add_total("staleness/fully_masked_trajectories", float(0 < sample.model_tokens == masked_count))
    by_length = f"staleness/by_length/{length_bucket(sample.model_tokens)}"
    tally.add_ratio(f"{by_length}/masked_frac", masked_count, sample.model_tokens)

    if masked_count:  # quarters only where there is something to place
        for quarter, (masked_tokens, quarter_tokens) in enumerate(
            masked_by_quarter(sample.stale.tolist()), start=1
        ):
            tally.add_ratio(f"{by_length}/masked_q{quarter}", masked_tokens, quarter_tokens)


def _count_lags(tokens_by_lag: dict[int, int], lags: np.ndarray) -> None:
    """Count tokens of these lags in `tokens_by_lag`."""
    lag_values, counts = np.unique(lags, return_counts=True)
    for lag, count in zip(lag_values.tolist(), counts.tolist(), strict=True):
        tokens_by_lag[lag] = tokens_by_lag.get(lag, 0) + count


def tally_tokens(tally: MetricSums, token_report: TokenReport) -> None:
    """Count loss and off-policyness of a micro-batch's tokens."""
    tally.sums.tokens += token_report.sums
    for name, value in token_report.highest.items():
        tally.add_highest(name, value)
    for name, value in token_report.lowest.items():
        tally.add_lowest(name, value)


def tally_agents(
    tally: MetricSums,
    names: Sequence[str],
    adapter_index: Tensor | None,
    state: TokenState,
) -> None:
    """Count tokens and policy loss by agent, where several have adapters. `names`: of the adapters' agents;
    `adapter_index`: of each token."""
    if adapter_index is None:
        return
    enters_loss = state.trainable & ~state.correction.masked
    columns = torch.stack(
        [state.trainable.double(), enters_loss.double(), torch.where(enters_loss, state.loss, 0.0).double()]
    )

    sums = columns.new_zeros(3, len(names)).index_add(1, adapter_index, columns).tolist()
    trainable_tokens, kept_tokens, losses = (dict(zip(names, row, strict=True)) for row in sums)
    tally.sums += BatchSums(
        trainable_by_agent=trainable_tokens, kept_by_agent=kept_tokens, loss_by_agent=losses
    )


def record_norms(batch_tally: MetricSums, names: Sequence[str], norms: Sequence[float]) -> None:
    """Record the gradient norms of a step: in total, and of several agents' adapters."""
    batch_tally.add_highest("actor/grad_norm", math.hypot(*norms))
    for name, norm in zip(names, norms, strict=True) if len(names) > 1 else ():
        batch_tally.add_highest(f"{AGENT_PREFIX}{name or NO_AGENT}/grad_norm", norm)


def tally_unscored(tally: MetricSums, samples: Sequence[TrainingSample], names: Sequence[str]) -> None:
    """Count episodes without advantage that no model scores: their part of D, and their tokens. Their ratios
    are unknown, so the correction counts as keeping all tokens. `names`: as in `tally_agents`."""
    sums = tally.sums
    sums.denominator += math.fsum(sample.denominator for sample in samples)
    if len(names) > 1:
        sums.loss_by_agent = dict.fromkeys(names, 0.0) | sums.loss_by_agent

    for sample in samples:
        enters_loss = sample.within_staleness & np.isfinite(sample.rollout_logprobs)
        kept_lags = sample.lag[enters_loss]
        sums.tokens.kept_tokens += len(kept_lags)
        _count_lags(sums.tokens.kept_by_lag, kept_lags)

        if sample.sequence_adapters:
            counts = np.bincount(
                np.asarray(sample.sequence_adapters)[sample.sequence_of[enters_loss]], minlength=len(names)
            )
            for name, count in zip(names, counts.tolist(), strict=True):
                sums.kept_by_agent[name] = sums.kept_by_agent.get(name, 0.0) + count


def batch_metrics(
    tally: MetricSums, scale_advantages: Callable[[np.ndarray], np.ndarray]
) -> dict[str, float]:
    """Return the metrics of a whole batch, from the tally merged over all ranks. `scale_advantages`: the
    batch's normalisation of advantages, which never changes their order."""
    metrics = tally.metrics()
    if "global_seqlen/max" in metrics:
        metrics["global_seqlen/minmax_diff"] = metrics["global_seqlen/max"] - metrics["global_seqlen/min"]

    for name in ADVANTAGE_METRICS:
        if name in metrics:
            metrics[name] = float(scale_advantages(np.asarray(metrics[name])))

    sums = tally.sums
    metrics |= metrics_of(sums.tokens)
    metrics |= {f"{LAG_TOKENS}{lag}": float(count) for lag, count in sums.tokens_by_lag.items()}
    if sums.trajectories:
        metrics["trainer/trajectories"] = float(sums.trajectories)
        metrics["trainer/kept_tokens"] = sums.tokens.kept_tokens
    for agent, kept_tokens in sums.kept_by_agent.items():
        metrics[f"{AGENT_PREFIX}{agent or NO_AGENT}/tokens"] = kept_tokens

    if sums.denominator:
        metrics["actor/pg_loss"] = sums.tokens.loss / sums.denominator
        for agent, loss in sums.loss_by_agent.items():
            metrics[f"{AGENT_PREFIX}{agent or NO_AGENT}/pg_loss"] = loss / sums.denominator

    explained = explained_variance(sums.returns, sums.value_errors)
    if explained is not None:
        metrics["critic/vf_explained_var"] = explained
    if NLL in metrics:  # demonstrations have no advantages, and no version sampled them that could be old
        return {name: value for name, value in metrics.items() if not name.startswith(SAMPLED_METRICS)}

    kept_lags = LagHistogram(sums.tokens.kept_by_lag)
    for percent in (5, 25, 50, 75, 95):
        metrics[f"staleness/lag/p{percent:02}"] = kept_lags.quantile(percent / 100)

    return metrics | {
        "staleness/lag/mean": kept_lags.mean,
        "staleness/lag/min": kept_lags.quantile(0.0),
        "staleness/lag/max": kept_lags.max,
        "staleness/lag_taken/max": LagHistogram(sums.tokens_by_lag).max,
    }


class RatioRecorder:
    """Saves pi/mu of a step's tokens, and the tokens that the correction dropped, for the viewer. One rank
    calls `record_micro_batch` for each micro-batch, and `save_step` after the step."""

    def __init__(self, run_dir: Path, rank: int, groups_per_batch: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._groups_per_batch = groups_per_batch
        self._recorded: dict[str, TokenRatios] = {}

    def record_micro_batch(
        self, samples: Sequence[TrainingSample], log_ratio: Tensor, is_dropped: Tensor
    ) -> None:
        """Record ratios [N], over the model tokens of all samples in order. The first record of an episode in
        a step stays: the policy had not moved then."""
        token_edges = np.cumsum([0, *(sample.model_tokens for sample in samples)]).tolist()
        for sample, (start, end) in zip(samples, pairwise(token_edges), strict=True):
            uid = sample.planned.uid
            member = int(sample.planned.uid[len(sample.group) + 1 :])
            if uid not in self._recorded and is_kept(int(sample.group), member, self._groups_per_batch):
                token_range = slice(start, min(end, start + MAX_RATIO_TOKENS))
                values = [round(value, 5) for value in log_ratio[token_range].tolist()]
                self._recorded[uid] = TokenRatios(uid, values, is_dropped[token_range].tolist())

    def save_step(self, step: int) -> None:
        """Write the records of this step (counted from 1), and forget them."""
        save_ratios(self._run_dir, step, self._rank, self._recorded.values())
        self._recorded = {}
