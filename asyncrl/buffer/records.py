"""Records of an episode and of a group. Their payloads are in the store's segments."""

from __future__ import annotations

import enum
import math
from collections import Counter

import msgspec

from asyncrl.types import EpisodeResult, EpisodeStats, FailReason, FilterReason

# Failures that another attempt would only repeat.
FINAL_FAILURES = frozenset({FailReason.PROMPT_TOO_LONG})
# An engine or worker that went away does not invalidate the turns that are already durable.
RESUMABLE = frozenset({FailReason.WORKER_LOST, FailReason.ENGINE_LOST, FailReason.ENGINE_ERROR})
# They hit long episodes most, so they must not use up the retries; a number that only a fault reaches.
LOSSES = frozenset({FailReason.WORKER_LOST, FailReason.ENGINE_LOST, FailReason.NOT_REPEATED})
MAX_LOSSES = 100


class State(enum.StrEnum):
    """The state of an episode. Every issued episode is in exactly one state (conservation)."""

    PENDING = "pending"  # issued, waiting for a worker
    RUNNING = "running"  # assigned
    LANDED = "landed"  # finished, its group is not settled
    READY = "ready"  # may be taken
    TAKEN = "taken"  # in the plan of a batch that is not committed
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in OVER


OVER = frozenset({State.TRAINED, State.FILTERED, State.DROPPED, State.FAILED})
IN_FLIGHT = (State.PENDING, State.RUNNING, State.LANDED)
NEVER = 1 << 60  # the floor of what has no token: it is never over the bound


class EpisodeRecord(msgspec.Struct, gc=False):  # no cycles; a collection of 100,000 takes too long
    """One member of a group. `oldest` and `newest` are policy versions of its model tokens; while it runs, no
    token is added that is older than `bound`. `step` is the batch it was taken into (the lag is counted from
    it). The `greedy` one is sampled at temperature 0 and never trained: the others are compared with it."""

    uid: str
    group: int
    member: int
    attempt: int = 0
    state: State = State.PENDING
    reason: str = ""
    failures: int = 0  # attempts that failed; those that were lost apart
    losses: int = 0
    worker: str = ""  # incarnation it is assigned to
    assign_seq: int = 0
    oldest: int = -1  # -1: no token yet
    newest: int = -1
    bound: int = -1  # version that it was started on, at least
    turns: int = 0  # durable turns
    rows: int = 0  # that they are of
    tokens: int = 0  # of all rows
    seconds: float = 0.0  # that its durable turns took
    result: EpisodeResult = EpisodeResult(0.0)  # of the attempt that landed
    stats: EpisodeStats = EpisodeStats(0)
    step: int = -1
    greedy: bool = False

    @property
    def width(self) -> int:
        """Tokens that each of its rows takes in a padded batch by itself."""
        return self.stats.longest_row or self.tokens

    @property
    def floor(self) -> int:
        """No token that it has, or may still get while it runs, is older."""
        sampled = self.oldest if self.oldest >= 0 else NEVER
        return min(sampled, self.bound) if self.state is State.RUNNING else sampled

    @property
    def ending(self) -> str:
        """The state in which it is over, and why, for people."""
        alike = self.reason == FilterReason.ZERO_VARIANCE
        return f"{self.state} ({'all of its episodes earned the same' if alike else self.reason})"

    def retry(self, reason: FailReason, retries: int) -> bool:
        """An attempt failed: prepare the next one, which may go on from the durable turns. False: there is
        none, as it would fail again, or `retries` are used up."""
        self.losses += reason in LOSSES
        self.failures += reason not in LOSSES
        if reason in FINAL_FAILURES or self.failures > retries or self.losses > MAX_LOSSES:
            return False
        if reason not in RESUMABLE:
            self.restart()
        self.attempt += 1
        self.worker, self.reason = "", reason
        return True

    def extend(
        self, tokens: int, model_tokens: int, oldest: int, newest: int, *, seconds: float = 0.0, row: int = 0
    ) -> None:
        """A turn became durable, `seconds` after the episode began."""
        self.turns += 1
        self.rows = max(self.rows, row + 1)
        self.seconds = max(self.seconds, seconds)
        self.tokens += tokens
        if model_tokens:
            self.oldest = oldest if self.oldest < 0 else min(self.oldest, oldest)
            self.newest = max(self.newest, newest)

    def restart(self) -> None:
        """Forget the turns: the next attempt starts from the prompt."""
        self.oldest = self.newest = -1
        self.turns = self.rows = self.tokens = 0
        self.seconds = 0.0


class GroupRecord(msgspec.Struct):
    """The episodes of one sample, the greedy one (where there is one) last. `baseline`: the members that
    others are compared with, fixed when the group settles; before that those that landed after the deadline,
    in order. `first_only`: a late member is compared with the first of them alone. `filtered`: those of the
    baseline were filtered; only late members may still be trained. `position`: of the sample in the order of
    the data. `retires`: its sample is not drawn again."""

    id: int
    sample: int  # its index in the data
    issued_step: int
    members: list[str]
    patience: float = math.inf  # seconds from its start to its deadline; inf: it is not a partial group
    started: float = math.nan  # when the first member was assigned; -inf: before this process; nan: not yet
    deadline: float = math.inf  # when its baseline is fixed; both are on the caller's clock
    settled: bool = False
    baseline: tuple[int, ...] = ()
    first_only: bool = False
    filtered: bool = False
    step: int = -1  # batch that first took a member; -1: untaken
    position: int = -1
    retires: bool = False

    @property
    def late_siblings(self) -> tuple[int, ...]:
        """The members that a late member is compared with."""
        return self.baseline[:1] if self.first_only else self.baseline


class Flow(msgspec.Struct, frozen=True):
    """The conservation identity, in episodes: `issued` is the sum of the others."""

    issued: int
    trained: int
    filtered: int
    dropped: int
    failed: int
    taken: int
    ready: int
    in_flight: int

    @classmethod
    def of(cls, issued: int, counts: Counter[State]) -> Flow:
        over = {state.value: counts[state] for state in (*OVER, State.TAKEN, State.READY)}
        return cls(issued, **over, in_flight=sum(counts[state] for state in IN_FLIGHT))

    @property
    def conserved(self) -> bool:
        return self.issued == sum(msgspec.structs.astuple(self)[1:])
