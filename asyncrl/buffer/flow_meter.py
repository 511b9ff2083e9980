"""What flow control measures of the groups under way: their lives, and the ages of their tokens.

Times are of the caller's clock, in seconds. A life begins when the first episode of the group gets a slot,
and ends when the group settles: then it may be trained. The waits for a slot and for the trainer count
neither in lives nor in ages: they depend on the limit that flow control sets, which would follow itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import chain, islice, takewhile

import numpy as np

from asyncrl.buffer.survival import RecentLifetimes

NEWEST = 128  # groups that the mean life is estimated from: few, so that it follows changes
WINDOW = 1024  # groups that the tail is estimated from: many, as only 1% of the tokens are in it
POINTS = 16  # ages that stand for those of all tokens of a group: less memory, the same curve
EPISODES = 256  # episodes that the sampling speed is measured over
SAMPLE = 4096  # episodes that stand for all that have tokens which are not ready, at least half as many
WARM = 32  # episodes before the sampling speed is used: the first ones find the engines empty
RELAX = 0.05  # how fast the highest speed follows today's, per batch, where the engines are idle
# A turn's tokens count as sampled in four quarters: at these parts of its duration before its end.
PARTS = np.array([0.875, 0.625, 0.375, 0.125])


class FlowMeter:
    """Estimates lives and ages. The buffer calls it when something happens to an episode or a group."""

    def __init__(self) -> None:
        self.newest, self.lives, self.ages = map(RecentLifetimes, (NEWEST, WINDOW, WINDOW))
        self.settled_groups = 0
        self._began: dict[int, float] = {}  # groups that have begun and not settled
        self._turns: defaultdict[str, list[float]] = defaultdict(list)  # by episode: end, tokens; end, …
        self._landed: deque[tuple[float, float, float]] = deque()  # tokens, seconds, seconds of sampling
        self._sums = np.zeros(3)  # of these
        self._fastest = 0.0  # tokens/s

    # -- events --------------------------------------------------------------------------------------

    def began(self, group: int, now: float) -> None:
        """An episode of the group has a slot."""
        self._began.setdefault(group, now)

    def sampled(self, uid: str, tokens: float, now: float) -> None:
        """A turn of `tokens` model tokens became durable: it ended now."""
        if tokens:
            self._turns[uid] += (now, tokens)

    def landed(self, tokens: float, seconds: float, tools: float) -> None:
        """An episode ended: model tokens that it sampled, seconds that it took, seconds of these in tools."""
        self._landed.append((tokens, seconds, max(0.0, seconds - tools)))
        self._sums += self._landed[-1]
        if len(self._landed) > EPISODES:
            self._sums -= self._landed.popleft()
        if len(self._landed) >= WARM:
            self._fastest = max(self._fastest, self._speed)

    def settled(self, group: int, now: float) -> None:
        """Its baseline is fixed: a batch can take it."""
        began = self._began.pop(group, None)
        if began is not None:
            self.settled_groups += 1
            self.newest.add(began, now)
            self.lives.add(began, now)

    def ready(self, uids: Iterable[str], now: float) -> None:
        """Episodes may be trained from now on."""
        sampled, tokens = self._sampled([self._turns.pop(uid, []) for uid in uids], PARTS)
        if tokens.size:
            order = np.argsort(sampled)
            places = (np.arange(POINTS) + 0.5) / POINTS * tokens.sum()
            points = sampled[order][np.searchsorted(np.cumsum(tokens[order]), places)]
            self.ages.add(points, now, np.full(POINTS, tokens.sum() / POINTS))

    def forget(self, uid: str) -> None:
        """The tokens of this episode need no age any more: its attempt failed, or it is over."""
        self._turns.pop(uid, None)

    def forget_group(self, group: int) -> None:
        self._began.pop(group, None)

    def committed(self, idle: float) -> None:
        """A batch was committed; the engines were idle for this share of it. Idle engines are not loaded: if
        they are slower than they were, that is their speed now. Of busy ones nothing is known."""
        self._fastest -= RELAX * idle * max(0.0, self._fastest - self._speed)

    # -- estimates -----------------------------------------------------------------------------------

    def life(self, now: float, limit: float) -> float:
        """Mean seconds from slot to settlement, those over `limit` counted as `limit`."""
        return self._mean(self.newest, now, limit)

    def token_age(self, q: float, now: float, limit: float) -> float:
        """The age, in seconds, that a share q of the tokens do not exceed, at most `limit`. It is the
        quantile over the last WINDOW groups, times the mean life of the last NEWEST, by the mean life of the
        last WINDOW: few groups are in the tail, so its shape needs many; the mean needs few.

        Of more than SAMPLE episodes with tokens that are not ready, every k-th in the order of their first
        turns stands for k: so of those older than any given age there are as many, to within k."""
        every = 1 + len(self._turns) // SAMPLE
        running = islice(self._turns.values(), 0, None, every)
        sampled, tokens = self._sampled(running, PARTS.mean(keepdims=True))
        ages = self.ages.curve([(sampled, every * tokens)], now)
        long = self._mean(self.lives, now, limit)
        return min(ages.quantile(q), ages.longest, limit) * (self.life(now, limit) / long if long else 1.0)

    def _mean(self, lives: RecentLifetimes, now: float, limit: float) -> float:
        began = np.fromiter(self._began.values(), np.float64)
        curve = lives.curve([(began, np.ones_like(began))], now)
        return curve.restricted_mean(min(limit, curve.longest))  # nothing is known beyond

    def older(self, than: float) -> float:
        """Tokens of turns that ended before `than`, on the caller's clock, that no batch may train yet."""
        begun = takewhile(lambda turns: turns[0] < than, self._turns.values())  # in the order of first turns
        return sum(
            tokens
            for turns in begun
            for end, tokens in zip(turns[::2], turns[1::2], strict=True)
            if end < than
        )

    @property
    def unloaded(self) -> float:
        """The share of a life that would remain at the highest sampling speed, of those seen so far."""
        if len(self._landed) < WARM or not self._fastest:
            return 1.0
        _, seconds, sampling = self._sums
        return float(1.0 - sampling / max(seconds, 1e-9) * (1.0 - self._speed / self._fastest))

    @property
    def _speed(self) -> float:
        tokens, _, sampling = self._sums
        return float(tokens / max(sampling, 1e-9))

    def _sampled(self, turns: Iterable[list[float]], parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(when tokens were sampled, how many): [turns * parts.size] each. A turn's tokens are spread evenly
        over `parts`, which are shares of its duration before its end."""
        ended, tokens = np.fromiter(chain.from_iterable(turns), np.float64).reshape(-1, 2).T
        took = tokens / self._speed if self._speed else np.zeros_like(tokens)
        return (ended - np.outer(parts, took)).ravel(), np.tile(tokens / parts.size, parts.size)
