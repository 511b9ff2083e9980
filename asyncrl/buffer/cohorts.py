"""Measure by cohorts whether the trained episodes are a fair sample of the issued episodes.

Short and easy episodes land first, so one batch alone is never a fair sample of the policy's episodes. A
cohort is all groups issued at one step. Once all its groups are over, its landed and its trained episodes are
known.
"""

from __future__ import annotations

import msgspec

from asyncrl.buffer.records import EpisodeRecord


class EpisodeSums(msgspec.Struct):
    """Sums over some episodes of a cohort."""

    episode_count: int = 0
    reward_sum: float = 0.0
    token_count: int = 0

    def add_episode(self, episode: EpisodeRecord) -> None:
        self.episode_count += 1
        self.reward_sum += episode.result.reward
        self.token_count += episode.result.tokens


class Cohort(msgspec.Struct):
    """The groups issued at one step. `open_groups` counts the groups that are not over."""

    open_groups: int = 0
    landed: EpisodeSums = msgspec.field(default_factory=EpisodeSums)
    trained: EpisodeSums = msgspec.field(default_factory=EpisodeSums)


class Cohorts:
    """Cohorts that are not reported yet. A cohort from before a restart of the coordinator is left out."""

    def __init__(self) -> None:
        self._open_cohorts: dict[int, Cohort] = {}
        self._excluded_steps: set[int] = set()

    def exclude_step(self, step: int) -> None:
        """Leave out a cohort of which some episodes are not known."""
        self._excluded_steps.add(step)
        self._open_cohorts.pop(step, None)

    def add_group(self, step: int) -> None:
        if step not in self._excluded_steps:
            self._open_cohorts.setdefault(step, Cohort()).open_groups += 1

    def add_landed(self, step: int, episode: EpisodeRecord) -> None:
        if cohort := self._open_cohorts.get(step):
            cohort.landed.add_episode(episode)

    def add_trained(self, step: int, episode: EpisodeRecord) -> None:
        if cohort := self._open_cohorts.get(step):
            cohort.trained.add_episode(episode)

    def close_group(self, step: int) -> None:
        if cohort := self._open_cohorts.get(step):
            cohort.open_groups -= 1

    def pop_gaps(self, before_step: int) -> dict[str, float]:
        """Return `cohort/reward_gap` and `cohort/length_gap` (model tokens), and forget complete cohorts.

        A gap is the mean of a cohort's trained episodes minus the mean of its landed episodes, averaged over
        trained episodes of the cohorts issued before `before_step`. The result is empty without such cohorts.
        """
        complete_steps = [
            step
            for step, cohort in self._open_cohorts.items()
            if step < before_step and not cohort.open_groups
        ]
        cohorts = [
            cohort for cohort in map(self._open_cohorts.pop, complete_steps) if cohort.trained.episode_count
        ]

        trained_count = sum(cohort.trained.episode_count for cohort in cohorts)
        if not trained_count:
            return {}

        reward_gap = 0.0
        token_gap = 0.0
        for cohort in cohorts:
            trained_fraction = cohort.trained.episode_count / cohort.landed.episode_count
            reward_gap += cohort.trained.reward_sum - cohort.landed.reward_sum * trained_fraction
            token_gap += cohort.trained.token_count - cohort.landed.token_count * trained_fraction

        return {
            "cohort/reward_gap": reward_gap / trained_count,
            "cohort/length_gap": token_gap / trained_count,
        }
