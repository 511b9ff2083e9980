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
CONFIDENCE_LEVEL = 0.95
Z_SCORE = 1.96  # of LEVEL

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
    earned_reward = any(episode.result.reward for episode in episodes if episode.result)
    rollout = config.rollout
    has_rewards = earned_reward or rollout.environment or rollout.reward != "none"
    return config.validation.success if has_rewards else None


def per_sample(episodes: Iterable[Judged], threshold: float | None) -> PerSample:
    """`val-core/<source>/<mode>/…` of each sample, for its source and for `all`: `success`, `mean@1`, with
    more than one episode `mean@k`, `pass@k` and, where rewards of that source report answers, `maj@k`; and
    `val-aux/<source>/<mode>/<component>/mean@1`. An episode that failed at every attempt is no success and
    has the lowest score of all, at most 0, so that a policy which makes its episodes fail gains nothing.
    Without a threshold there is no `val-core`."""
    played = [episode for episode in episodes if not episode.which.scored]
    lowest = min([0.0, *(episode.result.score for episode in played if episode.result)])
    sources_with_answers = {episode.source for episode in played if episode.answer}
    groups = defaultdict[tuple[str, int], list[Judged]](list)

    for episode in played:
        groups[episode.which.mode, episode.which.row].append(episode)

    numbers = defaultdict[str, dict[int, float]](dict)
    for (mode, row), members in groups.items():
        members.sort(key=lambda episode: episode.which.draw)
        votes = members[0].source in sources_with_answers
        core_numbers = {} if threshold is None else _core_numbers(members, lowest, threshold, votes)

        for source in (members[0].source, "all"):
            for name, value in core_numbers.items():
                numbers[f"val-core/{source}/{mode}/{name}"][row] = value

            for name, values in _component_values(members).items():
                numbers[f"val-aux/{source}/{mode}/{name}/mean@1"][row] = fmean(values)

    return dict(numbers)


def _core_numbers(
    members: Sequence[Judged], lowest: float, threshold: float, votes: bool
) -> dict[str, float]:
    """The numbers of one sample in one mode, from its episodes in order. `votes`: with `maj@k`."""
    scores = [episode.result.score if episode.result else lowest for episode in members]
    successes = [succeeds(episode.result, threshold) for episode in members]
    count = len(members)
    solved = sum(successes)
    core = {"success": solved / count, "mean@1": fmean(scores)}
    if count == 1:
        return core

    core[f"mean@{count}"] = core["mean@1"]
    for k in sorted({count, *(1 << power for power in range(1, count.bit_length()))}):
        core[f"pass@{k}"] = pass_at(k, count, solved)

    if votes:  # for the most frequent answer, as it was judged first; the earliest of equally frequent ones
        answers = [episode.answer for episode in members]
        frequent = Counter(filter(None, answers)).most_common(1)
        core[f"maj@{count}"] = float(bool(frequent) and successes[answers.index(frequent[0][0])])

    return core


def pass_at(k: int, count: int, solved: int) -> float:
    """Unbiased estimate of the probability that at least one of k episodes succeeds, when `solved` of `count`
    did (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(count - solved, k) / math.comb(count, k)


def succeeds(result: EpisodeResult | None, threshold: float) -> bool:
    return result is not None and result.judged >= threshold - ROUNDING


def _component_values(members: Iterable[Judged]) -> dict[str, list[float]]:
    """Return the components of rewards, and what each agent of an episode earned."""
    values_by_name = defaultdict[str, list[float]](list)
    for result in filter(None, (episode.result for episode in members)):
        for name, value in result.components.items():
            values_by_name[name].append(value)
        for name, part in result.parts.items():
            values_by_name[f"agent/{name}"].append(part.score)
    return values_by_name


def means(numbers: PerSample) -> dict[str, float]:
    """Over samples."""
    return {name: fmean(list(values.values())) for name, values in numbers.items()}


def sizes(episodes: Iterable[Judged]) -> dict[str, float]:
    """`val-aux/<mode>/{num_turns,tool_calls}/mean`, over episodes that have ended."""
    values_by_name = defaultdict[str, list[float]](list)
    for episode in episodes:
        if episode.stats is not None and not episode.which.scored:
            values_by_name[f"val-aux/{episode.which.mode}/num_turns/mean"].append(episode.stats.turns)
            values_by_name[f"val-aux/{episode.which.mode}/tool_calls/mean"].append(episode.stats.tool_calls)
    return {name: fmean(values) for name, values in values_by_name.items()}


def losses(episodes: Iterable[Judged]) -> dict[str, float]:
    """`val-core/<source>/nll`: -log pi per token of what demonstrations say, over all of their tokens. None
    of a source of which one failed: that of the others is not comparable."""
    scored_episodes = [episode for episode in episodes if episode.which.scored]
    failed_sources = {episode.source for episode in scored_episodes if episode.result is None}
    failed_sources |= {"all"} if failed_sources else set()
    sums: dict[str, tuple[float, int]] = {}

    for source, result in (
        (episode.source, episode.result) for episode in scored_episodes if episode.result is not None
    ):
        for name in {source, "all"} - failed_sources:
            total, tokens = sums.get(name, (0.0, 0))
            sums[name] = total + result.components["nll"] * result.tokens, tokens + result.tokens

    return {f"val-core/{name}/nll": total / tokens for name, (total, tokens) in sums.items()}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean, of LEVEL, over samples drawn with replacement; the same
    for the same values. Of a paired comparison: `values` are the differences."""
    import numpy as np  # here: the command line imports this module while it parses

    value_array = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)

    resampled_means = [
        value_array[generator.integers(len(value_array), size=len(value_array))].mean()
        for _ in range(RESAMPLES)
    ]

    low, high = np.quantile(resampled_means, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return float(low), float(high)


def wilson(share: float | None, count: float) -> tuple[float | None, float | None]:
    """Wilson's 95% interval of a share of `count` episodes: 5 of 10 lie between 0.24 and 0.76."""
    if share is None or count <= 0:
        return None, None
    centre = share + Z_SCORE * Z_SCORE / (2 * count)
    width = Z_SCORE * math.sqrt(share * (1 - share) / count + (Z_SCORE / (2 * count)) ** 2)
    denominator = 1 + Z_SCORE * Z_SCORE / count
    return (centre - width) / denominator, (centre + width) / denominator


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
    (_, low_end), (high_end, _) = low.interval, high.interval
    return high_end is not None and low_end is not None and low_end < high_end


def mean_clearly_below(low: Sequence[float], high: Sequence[float]) -> bool:
    """Tell whether one mean is below another by more than chance, by their standard errors."""
    if min(len(low), len(high)) < 2:
        return False
    error = math.sqrt(variance(low) / len(low) + variance(high) / len(high))
    return fmean(high) - fmean(low) > Z_SCORE * error
