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
from asyncrl.algorithms.diagnostics import TokenState, TokenSums, metrics_of
from asyncrl.algorithms.normalise import Moments, end_factor, explained_variance
from asyncrl.buffer.prompts import TOLERANCE
from asyncrl.buffer.staleness import LagHistogram, length_bucket, masked_by_quarter
from asyncrl.observe.metrics import LAG_TOKENS, NLL, ZERO_ADVANTAGE
from asyncrl.observe.transcripts import MOST_TOKENS, TokenRatios, is_kept, save_ratios
from asyncrl.trainer.batch import TrainingSample
from asyncrl.trainer.objective import Terms

OF_SAMPLED = ("staleness/", "rollout_corr/by_lag/", ZERO_ADVANTAGE)  # metrics of what a policy sampled
KEPT_PREFIX = "_kept_lag/"  # + lag: tokens of that lag that entered the loss
ADVANTAGES = [f"critic/advantages/{kind}" for kind in ("mean", "max", "min")]
LEAST_ESS_FACTOR = 0.1
VARIED_TOTAL = "_varied"  # episodes of groups with variance


class MetricSums(msgspec.Struct):
    """Ratios (numerator and denominator apart), totals, and extremes, by metric name; `moments`, by names of
    their own, are for what divides by the batch and are no metrics."""

    ratios: dict[str, tuple[float, float]] = {}
    totals: dict[str, float] = {}
    highest: dict[str, float] = {}
    lowest: dict[str, float] = {}
    moments: dict[str, Moments] = {}

    def ratio(self, name: str, numerator: float, denominator: float) -> None:
        a, b = self.ratios.get(name, (0.0, 0.0))
        self.ratios[name] = (a + numerator, b + denominator)

    def scale(self, name: str, factor: float) -> None:
        """Multiply a ratio."""
        a, b = self.ratios[name]
        self.ratios[name] = (a * factor, b)

    def total(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value

    def high(self, name: str, value: float) -> None:
        self.highest[name] = max(value, self.highest.get(name, value))

    def low(self, name: str, value: float) -> None:
        self.lowest[name] = min(value, self.lowest.get(name, value))

    def summary(self, name: str, values: Sequence[float] | np.ndarray) -> None:
        """Count `name`/mean, /max and /min of the values; nothing without values."""
        if len(values):
            numbers = np.asarray(values)
            self.ratio(f"{name}/mean", float(numbers.sum()), len(numbers))
            self.high(f"{name}/max", float(numbers.max()))
            self.low(f"{name}/min", float(numbers.min()))

    def moment(self, name: str, part: Moments) -> None:
        self.moments[name] = self.moments.get(name, Moments()) + part

    def merge(self, other: MetricSums) -> None:
        for name, (a, b) in other.ratios.items():
            self.ratio(name, a, b)
        for name, value in other.totals.items():
            self.total(name, value)
        for name, value in other.highest.items():
            self.high(name, value)
        for name, value in other.lowest.items():
            self.low(name, value)
        for name, part in other.moments.items():
            self.moment(name, part)

    def metrics(self) -> dict[str, float]:
        """Returns one number per name. A ratio with denominator 0 is left out."""
        means = {name: a / b for name, (a, b) in self.ratios.items() if b}
        return {**means, **self.totals, **self.highest, **self.lowest}


def merged(parts: Iterable[MetricSums]) -> MetricSums:
    """Add the sums of all parts, in order."""
    whole = MetricSums()
    for part in parts:
        whole.merge(part)
    return whole


def tally_examples(tally: MetricSums, examples: Sequence[TrainingSample], longest_prompt: int) -> None:
    """Count scores, lengths and staleness of a micro-batch. `longest_prompt`: tokens a prompt may have."""
    for e in examples:
        tally.summary("critic/score", [e.planned.own.score])
        tally.summary("response_length", [e.model_tokens])
        tally.summary("prompt_length", [e.prompt_tokens])
        tally.summary("global_seqlen", [e.total_tokens])
        tally.ratio("response_length/clip_ratio", float(e.planned.own.end.truncated), 1.0)
        tally.ratio("prompt_length/clip_ratio", float(e.prompt_tokens >= longest_prompt), 1.0)
        tally.total("perf/total_num_tokens", e.total_tokens)
        tally.total("trainer/trajectories", 1)
        tally.total("trainer/model_tokens", e.model_tokens)
        _tally_staleness(tally, e)


def tally_routes(tally: MetricSums, routes: Tensor | None, tokens: int) -> None:
    """The share of the tokens, padding included, that went to the experts that the server had chosen."""
    replayed = 0.0 if routes is None else float((routes[:, 0] >= 0).sum())
    tally.ratio("trainer/replayed_share", replayed, tokens)


def tally_computed(tally: MetricSums, tokens: int, flops: float) -> None:
    """Count the tokens of one rank's policy forwards, padding included, shared prefixes once, and the
    floating point operations for them."""
    tally.total("perf/model_tflop", flops / 1e12)
    tally.total("perf/computed_tokens", tokens)
    tally.high("global_seqlen/balanced_max", tokens)
    tally.low("global_seqlen/balanced_min", tokens)


def tally_credit(tally: MetricSums, examples: Sequence[TrainingSample]) -> None:
    """Count rewards (with the KL penalty, if there is one), and advantages, returns and values per token; add
    up what divides by the batch at its end."""
    for e in examples:
        assert e.advantage is not None
        tally.summary("critic/rewards", [e.planned.own.reward])
        tally.summary("critic/advantages", e.advantage)
        tally.ratio("critic/zero_advantage_frac", float(not e.has_advantage), 1.0)
        if e.returns is not None and e.value is not None:
            tally.summary("critic/returns", e.returns)
            tally.summary("critic/values", e.value)
            tally.moment("returns", Moments.of(e.returns))
            tally.moment("errors", Moments.of(e.returns - e.value))
        if e.model_tokens:
            tally.moment("advantages", Moments.of(e.advantage))
        for rewards, advantage in _comparisons(e, e.advantage):
            if len(advantage):
                tally.moment("episodes", Moments(1.0, float(advantage.mean())))
                tally.total(VARIED_TOTAL, _varied(rewards, advantage))


def _comparisons(e: TrainingSample, advantage: np.ndarray) -> Iterator[tuple[list[float], np.ndarray]]:
    """The group's rewards, and the advantages of the tokens. Each agent that earned a reward of its own
    counts as an episode: the advantages of both sides of a game add up to nothing."""
    own = e.planned.own
    members = (e.planned.own, *e.planned.siblings)
    if not own.agents:
        yield [member.reward for member in members], advantage
    for agent in dict.fromkeys(own.agents):
        rewards = [member.of(agent).reward for member in members if agent in member.agents]
        yield rewards, advantage[np.asarray(own.agents)[e.turn] == agent]


def _varied(rewards: Sequence[float], advantage: np.ndarray) -> bool:
    """The group has variance, in rewards or (by turn, by component) in advantages."""
    return max(rewards) - min(rewards) > TOLERANCE or bool(np.abs(advantage).max() > TOLERANCE)


def advantage_factor(scale: Scale, tally: MetricSums) -> float:
    """`end_factor` of a whole batch's tally."""
    return end_factor(scale, tally.moments.get("episodes", Moments()), tally.totals.get(VARIED_TOTAL, 0.0))


def ess_factor(tally: MetricSums) -> float:
    """√(ESS/N) of a whole batch's episodes (VCPO), at least 0.1."""
    totals = tally.totals
    if not totals.get("_episodes"):
        return 1.0
    share = totals["_episode_w"] ** 2 / (totals["_episode_w2"] * totals["_episodes"])
    return max(LEAST_ESS_FACTOR, math.sqrt(share))


def advantage_tokens(tally: MetricSums) -> Moments:
    """Return the advantages of a whole batch's tokens."""
    return tally.moments.get("advantages", Moments())


def tally_terms(tally: MetricSums, terms: Terms, denominator: float) -> None:
    """Count the terms added to the policy loss; `denominator`: the micro-batch's share of D."""
    flat = [x for pair in terms.values() for x in pair if x is not None]
    values = iter(torch.stack([x.double() for x in flat]).tolist() if flat else [])  # one transfer
    for name, (_, own) in terms.items():
        tally.ratio(name, next(values), denominator if own is None else next(values))


def _tally_staleness(tally: MetricSums, e: TrainingSample) -> None:
    """Lags, and the share over the bound by response length and by quarter of the response."""
    lags, counts = np.unique(e.lag, return_counts=True)
    for lag, count in zip(lags.tolist(), counts.tolist(), strict=True):
        tally.total(f"{LAG_TOKENS}{lag}", count)
    masked = int(e.stale.sum())
    tally.ratio("staleness/masked_token_frac", masked, e.model_tokens)
    tally.total("staleness/fully_masked_trajectories", float(0 < e.model_tokens == masked))
    by_length = f"staleness/by_length/{length_bucket(e.model_tokens)}"
    tally.ratio(f"{by_length}/masked_frac", masked, e.model_tokens)
    if masked:  # quarters only where there is something to place
        for quarter, (part, whole) in enumerate(masked_by_quarter(e.stale.tolist()), start=1):
            tally.ratio(f"{by_length}/masked_q{quarter}", part, whole)


def tally_tokens(tally: MetricSums, seen: TokenSums, denominator: float) -> None:
    """Loss and off-policyness of the tokens of one micro-batch. `denominator`: its share of D."""
    tally.ratio("actor/pg_loss", seen.sums["loss"], denominator)
    tally.total("trainer/kept_tokens", seen.sums["kept"])
    for name, value in seen.sums.items():
        tally.total(f"_{name}", value)
    for name, value in seen.highest.items():
        tally.high(name, value)
    for name, value in seen.lowest.items():
        tally.low(name, value)
    for lag, count in seen.kept_lags.items():
        tally.total(f"{KEPT_PREFIX}{lag}", count)


AGENT = "actor/agent/"  # + name / metric: of what trains the adapter of an agent
OTHERS = "others"  # in place of no name: those that have no adapter of their own


def tally_agents(
    tally: MetricSums, names: Sequence[str], agent: Tensor | None, state: TokenState, denominator: float
) -> None:
    """Count by agent, where several have adapters: tokens, and their part of the policy loss. `agent`: the
    place of each token's."""
    if agent is None:
        return
    kept = state.fresh & ~state.correction.masked
    columns = torch.stack([state.fresh.double(), kept.double(), torch.where(kept, state.loss, 0.0).double()])
    sums = columns.new_zeros(3, len(names)).index_add(1, agent, columns).T.tolist()
    for name, (fresh, entered, loss) in zip(names, sums, strict=True):
        tally.total(f"_fresh/{name}", fresh)
        tally.total(f"{AGENT}{name or OTHERS}/tokens", entered)
        tally.ratio(f"{AGENT}{name or OTHERS}/pg_loss", loss, denominator)


def without_tokens(whole: MetricSums, names: Sequence[str], beside: bool) -> list[str]:
    """Return the agents, of several, that have nothing to learn from a batch. `beside`: what the correction
    drops counts for terms beside the policy loss."""
    counts = {name: f"_fresh/{name}" if beside else f"{AGENT}{name or OTHERS}/tokens" for name in names}
    return [name for name in names if len(names) > 1 and not whole.totals.get(counts[name])]


def scale_losses(whole: MetricSums, factor: float) -> None:
    """Multiply the policy loss, and the agents' parts of it."""
    for name in whole.ratios:
        if name.endswith("/pg_loss"):
            whole.scale(name, factor)


def note_norms(whole: MetricSums, names: Sequence[str], norms: Sequence[float]) -> None:
    """Note the gradient norms of a step: of all, and of several agents' adapters."""
    whole.high("actor/grad_norm", math.hypot(*norms))
    for name, norm in zip(names, norms, strict=True) if len(names) > 1 else ():
        whole.high(f"{AGENT}{name or OTHERS}/grad_norm", norm)


def tally_unscored(tally: MetricSums, examples: Sequence[TrainingSample], names: Sequence[str]) -> None:
    """Episodes without advantage that no model scores: their share of D, and their tokens, of which the
    correction, whose ratios are not known, counts as keeping all. `names`: as in `tally_agents`."""
    denominator = math.fsum(e.denominator for e in examples)
    tally.total("_D", denominator)
    tally.ratio("actor/pg_loss", 0.0, denominator)
    for name in names if len(names) > 1 else ():
        tally.ratio(f"{AGENT}{name or OTHERS}/pg_loss", 0.0, denominator)
    for e in examples:
        enters = e.within_staleness & np.isfinite(e.rollout_logprobs)
        kept = e.lag[enters]
        tally.total("trainer/kept_tokens", len(kept))
        if e.sequence_adapters:
            counts = np.bincount(np.asarray(e.sequence_adapters)[e.sequence_of[enters]], minlength=len(names))
            for name, count in zip(names, counts.tolist(), strict=True):
                tally.total(f"{AGENT}{name or OTHERS}/tokens", count)
        for lag, count in zip(*np.unique(kept, return_counts=True), strict=True):
            tally.total(f"{KEPT_PREFIX}{lag}", int(count))


def batch_metrics(tally: MetricSums, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
    """The metrics of a whole batch, from the tally merged over all ranks. `change`: what the batch's
    statistics do to each advantage, which never changes their order."""
    metrics = tally.metrics()
    if "global_seqlen/max" in metrics:
        metrics["global_seqlen/minmax_diff"] = metrics["global_seqlen/max"] - metrics["global_seqlen/min"]
    for name in ADVANTAGES:
        if name in metrics:
            metrics[name] = float(change(np.asarray(metrics[name])))
    hidden = {name: metrics.pop(name) for name in list(metrics) if name.startswith("_")}
    metrics |= metrics_of({name.removeprefix("_"): value for name, value in hidden.items()})
    returns, errors = (tally.moments.get(name, Moments()) for name in ("returns", "errors"))
    fit = explained_variance(returns, errors)
    if fit is not None:
        metrics["critic/vf_explained_var"] = fit
    if NLL in metrics:  # demonstrations have no advantages, and no version sampled them that could be old
        return {name: value for name, value in metrics.items() if not name.startswith(OF_SAMPLED)}
    return metrics | _lags(_histogram(hidden, KEPT_PREFIX), _histogram(metrics, LAG_TOKENS))


def _histogram(values: dict[str, float], prefix: str) -> LagHistogram:
    found = {name.removeprefix(prefix): n for name, n in values.items() if name.startswith(prefix)}
    return LagHistogram({int(lag): int(n) for lag, n in found.items()})


def _lags(kept: LagHistogram, taken: LagHistogram) -> dict[str, float]:
    """`staleness/lag/*` as measured on the tokens that entered the loss; `lag_taken/max` of all."""
    return {
        "staleness/lag/mean": kept.mean,
        **{f"staleness/lag/p{q:02}": kept.quantile(q / 100) for q in (5, 25, 50, 75, 95)},
        "staleness/lag/min": kept.quantile(0.0),
        "staleness/lag/max": kept.max,
        "staleness/lag_taken/max": taken.max,
    }


class Ratios:
    """Saves pi/mu of a step's tokens, and what the correction dropped, for the viewer: of one rank, `note` in
    each micro-batch, `save` after the step."""

    def __init__(self, run_dir: Path, rank: int, groups_per_batch: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._groups = groups_per_batch
        self._found: dict[str, TokenRatios] = {}

    def note(self, examples: Sequence[TrainingSample], log_ratio: Tensor, dropped: Tensor) -> None:
        """Tensors are [N], over the model tokens of all examples in order. What was noted of an episode
        earlier in the step stays: the policy had not moved."""
        edges = np.cumsum([0, *(e.model_tokens for e in examples)]).tolist()
        for e, (start, end) in zip(examples, pairwise(edges), strict=True):
            uid = e.planned.uid
            member = int(e.planned.uid[len(e.group) + 1 :])
            if uid not in self._found and is_kept(int(e.group), member, self._groups):
                own = slice(start, min(end, start + MOST_TOKENS))
                values = [round(value, 5) for value in log_ratio[own].tolist()]
                self._found[uid] = TokenRatios(uid, values, dropped[own].tolist())

    def save(self, step: int) -> None:
        """Write what was noted, as of this step (counted from 1), and forget it."""
        save_ratios(self._run_dir, step, self._rank, self._found.values())
        self._found = {}
