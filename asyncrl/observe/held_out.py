"""Scores of held-out episodes: numbers per sample, their means, and intervals. Pure.

The numbers are named as verl names them where they mean the same (docs/evaluation.md). Intervals are
percentile bootstraps over samples, which are what was drawn at random: episodes of one sample are alike.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

from asyncrl.config import RunConfig
from asyncrl.types import EpisodeResult, EpisodeStats

EVAL = "val"  # uids of held-out episodes begin with it
# modes of prompts
SAMPLED = "sampled"
GREEDY = "greedy"
SCORED = "scored"  # of demonstrations: nothing is sampled
ROUNDING = 1e-6  # of a score that is a sum: ten times 0.1 is a success at 1
RESAMPLES = 1000
LEVEL = 0.95
Z = 1.96  # of LEVEL

PerSample = dict[str, dict[int, float]]  # metric → row of the sample → value


class HeldOut(NamedTuple):
    """An episode of a validation, with the uid `valSTEP/MODE/ROW`, and from the second draw on `/DRAW`."""

    step: int
    mode: str
    row: int
    draw: int = 0

    @classmethod
    def of(cls, uid: str) -> HeldOut:
        step, mode, *numbers = uid.removeprefix(EVAL).split("/")
        return cls(int(step), mode, *map(int, numbers))

    @property
    def uid(self) -> str:
        return f"{uid_prefix(self.step)}{self.mode}/{self.row}" + (f"/{self.draw}" if self.draw else "")

    @property
    def scored(self) -> bool:
        return self.mode == SCORED


def uid_prefix(step: int) -> str:
    """Return the beginning of the uids of all episodes of a validation."""
    return f"{EVAL}{step}/"


class Judged(NamedTuple):
    """A held-out episode that is over. `result` None: it failed at every attempt."""

    which: HeldOut
    source: str
    result: EpisodeResult | None
    stats: EpisodeStats | None = None
    answer: str = ""


def answer_of(result: EpisodeResult, notes: Mapping[str, str]) -> str:
    """Return the answer that the reward function found: verl's `pred`, of several functions the first one's
    (`NAME/pred`); '' where none names one."""
    for reported in (result.components, notes):
        for name, value in reported.items():
            if name.rpartition("/")[2] == "pred":
                return str(value)
    return ""


def threshold_of(config: RunConfig, episodes: Iterable[Judged]) -> float | None:
    """Return the score that makes an episode a success; None where nothing gives rewards and none came."""
    earned = any(one.result.reward for one in episodes if one.result)
    rollout = config.rollout
    known = earned or rollout.environment or rollout.reward != "none"
    return config.validation.success if known else None


def per_sample(episodes: Iterable[Judged], threshold: float | None) -> PerSample:
    """`val-core/<source>/<mode>/…` of each sample, for its source and for `all`: `success`, `mean@1`, with
    more than one episode `mean@k`, `pass@k` and, where rewards of that source report answers, `maj@k`; and
    `val-aux/<source>/<mode>/<component>/mean@1`. An episode that failed at every attempt is no success and
    has the lowest score of all, at most 0, so that a policy which makes its episodes fail gains nothing.
    Without a threshold there is no `val-core`."""
    played = [one for one in episodes if not one.which.scored]
    lowest = min([0.0, *(one.result.score for one in played if one.result)])
    answered = {one.source for one in played if one.answer}
    groups = defaultdict[tuple[str, int], list[Judged]](list)
    for one in played:
        groups[one.which.mode, one.which.row].append(one)
    found = defaultdict[str, dict[int, float]](dict)
    for (mode, row), members in groups.items():
        members.sort(key=lambda one: one.which.draw)
        votes = members[0].source in answered
        core = {} if threshold is None else _core(members, lowest, threshold, votes)
        for source in (members[0].source, "all"):
            for name, value in core.items():
                found[f"val-core/{source}/{mode}/{name}"][row] = value
            for name, values in _parts(members).items():
                found[f"val-aux/{source}/{mode}/{name}/mean@1"][row] = fmean(values)
    return dict(found)


def _core(members: Sequence[Judged], lowest: float, threshold: float, votes: bool) -> dict[str, float]:
    """The numbers of one sample in one mode, from its episodes in order. `votes`: with `maj@k`."""
    scores = [one.result.score if one.result else lowest for one in members]
    right = [succeeds(one.result, threshold) for one in members]
    count = len(members)
    solved = sum(right)
    core = {"success": solved / count, "mean@1": fmean(scores)}
    if count == 1:
        return core
    core[f"mean@{count}"] = core["mean@1"]
    for k in sorted({count, *(1 << power for power in range(1, count.bit_length()))}):
        core[f"pass@{k}"] = pass_at(k, count, solved)
    if votes:  # for the most frequent answer, as it was judged first; the earliest of equally frequent ones
        answers = [one.answer for one in members]
        frequent = Counter(filter(None, answers)).most_common(1)
        core[f"maj@{count}"] = float(bool(frequent) and right[answers.index(frequent[0][0])])
    return core


def pass_at(k: int, count: int, solved: int) -> float:
    """Unbiased estimate of the probability that at least one of k episodes succeeds, when `solved` of `count`
    did (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(count - solved, k) / math.comb(count, k)


def succeeds(result: EpisodeResult | None, threshold: float) -> bool:
    return result is not None and result.judged >= threshold - ROUNDING


def _parts(members: Iterable[Judged]) -> dict[str, list[float]]:
    """Return the components of rewards, and what each agent of an episode earned."""
    found = defaultdict[str, list[float]](list)
    for result in filter(None, (one.result for one in members)):
        for name, value in result.components.items():
            found[name].append(value)
        for name, part in result.parts.items():
            found[f"agent/{name}"].append(part.score)
    return found


def means(numbers: PerSample) -> dict[str, float]:
    """Over samples."""
    return {name: fmean(list(values.values())) for name, values in numbers.items()}


def sizes(episodes: Iterable[Judged]) -> dict[str, float]:
    """`val-aux/<mode>/{num_turns,tool_calls}/mean`, over episodes that have ended."""
    found = defaultdict[str, list[float]](list)
    for one in episodes:
        if one.stats is not None and not one.which.scored:
            found[f"val-aux/{one.which.mode}/num_turns/mean"].append(one.stats.turns)
            found[f"val-aux/{one.which.mode}/tool_calls/mean"].append(one.stats.tool_calls)
    return {name: fmean(values) for name, values in found.items()}


def losses(episodes: Iterable[Judged]) -> dict[str, float]:
    """`val-core/<source>/nll`: -log pi per token of what demonstrations say, over all of their tokens. None
    of a source of which one failed: that of the others is not comparable."""
    scored = [one for one in episodes if one.which.scored]
    failed = {one.source for one in scored if one.result is None}
    failed |= {"all"} if failed else set()
    sums: dict[str, tuple[float, int]] = {}
    for source, result in ((one.source, one.result) for one in scored if one.result is not None):
        for name in {source, "all"} - failed:
            total, tokens = sums.get(name, (0.0, 0))
            sums[name] = total + result.components["nll"] * result.tokens, tokens + result.tokens
    return {f"val-core/{name}/nll": total / tokens for name, (total, tokens) in sums.items()}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean, of LEVEL, over samples drawn with replacement; the same
    for the same values. Of a paired comparison: `values` are the differences."""
    import numpy as np  # here: the command line imports this module while it parses

    given = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(0)
    drawn = [given[draws.integers(len(given), size=len(given))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def wilson(share: float | None, count: float) -> tuple[float | None, float | None]:
    """Wilson's 95% interval of a share of `count` episodes: 5 of 10 lie between 0.24 and 0.76."""
    if share is None or count <= 0:
        return None, None
    centre = share + Z * Z / (2 * count)
    width = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    whole = 1 + Z * Z / count
    return (centre - width) / whole, (centre + width) / whole


class SuccessShare(NamedTuple):
    """A share of so many questions."""

    value: float
    questions: float

    @property
    def interval(self) -> tuple[float | None, float | None]:
        return wilson(self.value, self.questions)


def clearly_below(low: SuccessShare, high: SuccessShare) -> bool:
    """Tell whether one share is below another by more than chance: their intervals do not meet. For example
    100% of 24 questions is more than 86%, and 50% of them less than 69%."""
    (_, most), (least, _) = low.interval, high.interval
    return least is not None and most is not None and most < least


def mean_clearly_below(low: Sequence[float], high: Sequence[float]) -> bool:
    """Tell whether one mean is below another by more than chance, by their standard errors."""
    if min(len(low), len(high)) < 2:
        return False
    error = math.sqrt(variance(low) / len(low) + variance(high) / len(high))
    return fmean(high) - fmean(low) > Z * error
