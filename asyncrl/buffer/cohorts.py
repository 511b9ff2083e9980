"""Cohorts: whether the trained episodes are like the issued ones.

Short and easy episodes land first, so one batch alone is never a fair sample of the policy's episodes. Of
the groups issued at one step (a cohort), once all are over, both are known: what landed and what was trained.
"""

from __future__ import annotations

import msgspec

from asyncrl.buffer.records import EpisodeRecord


class Sums(msgspec.Struct):
    """Sums over some episodes of a cohort."""

    count: int = 0
    reward: float = 0.0
    tokens: int = 0

    def add(self, episode: EpisodeRecord) -> None:
        self.count += 1
        self.reward += episode.result.reward
        self.tokens += episode.result.tokens


class Cohort(msgspec.Struct):
    """The groups issued at one step; `open` of them are not over."""

    open: int = 0
    landed: Sums = msgspec.field(default_factory=Sums)
    trained: Sums = msgspec.field(default_factory=Sums)


class Cohorts:
    """Cohorts that are not reported yet, by the step they were issued at. A cohort that began
    before a restart of the coordinator is left out."""

    def __init__(self) -> None:
        self._cohorts: dict[int, Cohort] = {}
        self._excluded: set[int] = set()

    def exclude(self, step: int) -> None:
        """Not everything of this cohort is known."""
        self._excluded.add(step)
        self._cohorts.pop(step, None)

    def issued(self, step: int) -> None:
        if step not in self._excluded:
            self._cohorts.setdefault(step, Cohort()).open += 1

    def landed(self, step: int, episode: EpisodeRecord) -> None:
        if cohort := self._cohorts.get(step):
            cohort.landed.add(episode)

    def trained(self, step: int, episode: EpisodeRecord) -> None:
        if cohort := self._cohorts.get(step):
            cohort.trained.add(episode)

    def over(self, step: int) -> None:
        if cohort := self._cohorts.get(step):
            cohort.open -= 1

    def take(self, before: int) -> dict[str, float]:
        """`cohort/reward_gap` and `cohort/length_gap` (model tokens): trained mean minus landed mean of the
        same cohort, over the cohorts issued `before` a step that are complete and not reported yet, by their
        trained episodes. Empty when there is none."""
        done = [step for step, cohort in self._cohorts.items() if step < before and not cohort.open]
        cohorts = [cohort for cohort in map(self._cohorts.pop, done) if cohort.trained.count]

        trained = sum(cohort.trained.count for cohort in cohorts)
        if not trained:
            return {}

        shares = [(cohort, cohort.trained.count / cohort.landed.count) for cohort in cohorts]
        reward = sum(c.trained.reward - c.landed.reward * share for c, share in shares)
        tokens = sum(c.trained.tokens - c.landed.tokens * share for c, share in shares)
        return {"cohort/reward_gap": reward / trained, "cohort/length_gap": tokens / trained}
