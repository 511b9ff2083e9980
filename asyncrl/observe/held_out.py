"""Computes scores of held-out episodes: numbers per sample, means, and intervals. Pure.

Numbers with the same meaning as verl's have verl's names (docs/guides/after_a_run.md). Intervals are
percentile bootstraps over samples, which were drawn at random, not over episodes, which are alike for one
sample.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

from asyncrl.config import RunConfig
from asyncrl.types import EpisodeResult, EpisodeStats

UID_START = "val"  # beginning of the uids of held-out episodes
SAMPLED = "sampled"  # mode of prompts that are sampled as in training
GREEDY = "greedy"  # mode of prompts that are sampled greedily
SCORED = "scored"  # mode of demonstrations: nothing is sampled
SCORE_ROUNDING = 1e-6  # error of a score that is a sum: ten times 0.1 is a success at 1
RESAMPLES = 1000  # resampled sets of a bootstrap
CONFIDENCE_LEVEL = 0.95
Z_SCORE = 1.96  # normal quantile of CONFIDENCE_LEVEL

NumbersPerSample = dict[str, dict[int, float]]  # metric → row of the sample → value


class HeldOut(NamedTuple):
    """Identifies a held-out episode by the uid `valSTEP/MODE/ROW`, with `/DRAW` from the second draw."""

    step: int
    mode: str
    row: int
    draw: int = 0

    @classmethod
    def from_uid(cls, uid: str) -> HeldOut:
        step, mode, *numbers = uid.removeprefix(UID_START).split("/")
        return cls(int(step), mode, *map(int, numbers))

    @property
    def uid(self) -> str:
        return f"{uid_prefix(self.step)}{self.mode}/{self.row}" + (f"/{self.draw}" if self.draw else "")

    @property
    def scored(self) -> bool:
        return self.mode == SCORED


def uid_prefix(step: int) -> str:
    """Return the beginning of the uids of all episodes of a validation."""
    return f"{UID_START}{step}/"


class JudgedEpisode(NamedTuple):
    """Holds a held-out episode that is over. `result` None: the episode failed at every attempt."""

    identity: HeldOut
    source: str
    result: EpisodeResult | None
    stats: EpisodeStats | None = None
    answer: str = ""


def answer_of(result: EpisodeResult, notes: Mapping[str, str]) -> str:
    """Return the answer that the reward function found: verl's `pred`, or the first `NAME/pred` of several
    functions; '' if no function reports an answer."""
    for reported in (result.components, notes):
        for name, value in reported.items():
            if name.rpartition("/")[2] == "pred":
                return str(value)
    return ""


def threshold_of(config: RunConfig, episodes: Iterable[JudgedEpisode]) -> float | None:
    """Return the score that makes an episode a success; None for a run without rewards."""
    earned_reward = any(episode.result.reward for episode in episodes if episode.result)
    rollout = config.rollout
    has_rewards = earned_reward or rollout.environment or rollout.reward != "none"
    return config.validation.success if has_rewards else None


def numbers_per_sample(episodes: Iterable[JudgedEpisode], threshold: float | None) -> NumbersPerSample:
    """Compute `val-core/<source>/<mode>/…` of each sample, for the sample's source and for `all`: `success`,
    `mean@1`, with more than one episode `mean@k`, `pass@k` and, if rewards of that source report answers,
    `maj@k`; and `val-aux/<source>/<mode>/<component>/mean@1`. An episode that failed at every attempt is no
    success and gets the lowest score of all, at most 0, so that a policy cannot gain by failing episodes.
    Without a threshold there is no `val-core`."""
    played = [episode for episode in episodes if not episode.identity.scored]
    lowest = min([0.0, *(episode.result.score for episode in played if episode.result)])
    sources_with_answers = {episode.source for episode in played if episode.answer}
    groups = defaultdict[tuple[str, int], list[JudgedEpisode]](list)

    for episode in played:
        groups[episode.identity.mode, episode.identity.row].append(episode)

    numbers = defaultdict[str, dict[int, float]](dict)
    for (mode, row), members in groups.items():
        members.sort(key=lambda episode: episode.identity.draw)
        votes = members[0].source in sources_with_answers
        core_numbers = {} if threshold is None else _core_numbers(members, lowest, threshold, votes)

        # The components of the rewards, and the score that each agent of an episode has earned.
        component_values = defaultdict[str, list[float]](list)
        for result in filter(None, (episode.result for episode in members)):
            for name, value in result.components.items():
                component_values[name].append(value)
            for name, part in result.agent_results.items():
                component_values[f"agent/{name}"].append(part.score)

        for source in (members[0].source, "all"):
            for name, value in core_numbers.items():
                numbers[f"val-core/{source}/{mode}/{name}"][row] = value
            for name, values in component_values.items():
                numbers[f"val-aux/{source}/{mode}/{name}/mean@1"][row] = fmean(values)

    return dict(numbers)


def _core_numbers(
    members: Sequence[JudgedEpisode], lowest: float, threshold: float, votes: bool
) -> dict[str, float]:
    """Compute the numbers of one sample in one mode from the episodes in order. `votes`: with `maj@k`."""
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

    if votes:  # the most frequent answer counts as judged first; the earliest of equally frequent answers
        answers = [episode.answer for episode in members]
        frequent = Counter(filter(None, answers)).most_common(1)
        core[f"maj@{count}"] = float(bool(frequent) and successes[answers.index(frequent[0][0])])

    return core


def pass_at(k: int, count: int, solved: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k episodes succeeds, when `solved`
    of `count` did (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(count - solved, k) / math.comb(count, k)


def succeeds(result: EpisodeResult | None, threshold: float) -> bool:
    return result is not None and result.judged >= threshold - SCORE_ROUNDING


def sample_means(numbers: NumbersPerSample) -> dict[str, float]:
    """Average each number over samples."""
    return {name: fmean(list(values.values())) for name, values in numbers.items()}


def mean_sizes(episodes: Iterable[JudgedEpisode]) -> dict[str, float]:
    """Compute `val-aux/<mode>/{num_turns,tool_calls}/mean` over episodes that have ended."""
    values_by_name = defaultdict[str, list[float]](list)
    for episode in episodes:
        if episode.stats is not None and not episode.identity.scored:
            values_by_name[f"val-aux/{episode.identity.mode}/num_turns/mean"].append(episode.stats.turns)
            values_by_name[f"val-aux/{episode.identity.mode}/tool_calls/mean"].append(
                episode.stats.tool_calls
            )
    return {name: fmean(values) for name, values in values_by_name.items()}


def mean_losses(episodes: Iterable[JudgedEpisode]) -> dict[str, float]:
    """Compute `val-core/<source>/nll`: the mean of -log pi over all learned tokens of demonstrations. Sources
    with a failed demonstration have no number, as the remaining demonstrations are not comparable."""
    scored_episodes = [episode for episode in episodes if episode.identity.scored]
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


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean at CONFIDENCE_LEVEL, over samples drawn with
    replacement; the same for the same values. For a paired comparison `values` are the differences."""
    import numpy as np  # not at the top, as the command line imports this module while parsing

    value_array = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)

    resampled_means = [
        value_array[generator.integers(len(value_array), size=len(value_array))].mean()
        for _ in range(RESAMPLES)
    ]

    low, high = np.quantile(resampled_means, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return float(low), float(high)


def wilson_interval(share: float | None, count: float) -> tuple[float | None, float | None]:
    """Return Wilson's 95% interval of a share of `count` episodes: for 5 of 10, 0.24 to 0.76."""
    if share is None or count <= 0:
        return None, None
    centre = share + Z_SCORE * Z_SCORE / (2 * count)
    width = Z_SCORE * math.sqrt(share * (1 - share) / count + (Z_SCORE / (2 * count)) ** 2)
    denominator = 1 + Z_SCORE * Z_SCORE / count
    return (centre - width) / denominator, (centre + width) / denominator


class SuccessShare(NamedTuple):
    """Holds the share of successes among a number of questions."""

    value: float
    questions: float

    @property
    def interval(self) -> tuple[float | None, float | None]:
        return wilson_interval(self.value, self.questions)


def clearly_below(low: SuccessShare, high: SuccessShare) -> bool:
    """Tell whether a share is below another by more than chance: the intervals do not meet. For example, of
    24 questions 100% is clearly more than 86%, and 50% is clearly less than 69%."""
    low_end = low.interval[1]
    high_end = high.interval[0]
    return high_end is not None and low_end is not None and low_end < high_end


def mean_clearly_below(low: Sequence[float], high: Sequence[float]) -> bool:
    """Tell whether a mean is below another by more than chance, by the standard errors."""
    if min(len(low), len(high)) < 2:
        return False
    error = math.sqrt(variance(low) / len(low) + variance(high) / len(high))
    return fmean(high) - fmean(low) > Z_SCORE * error
