"""Defines the records of episodes and groups, and counts both by state. Payloads are in the store."""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections import Counter, defaultdict

import msgspec

from asyncrl.types import NO_STEP, EpisodeResult, EpisodeStats, FailReason, FilterReason

# Failures that another attempt would only repeat.
FINAL_FAILURES = frozenset({FailReason.PROMPT_TOO_LONG})
# An engine, a worker or a sandbox for tests that went away does not invalidate the turns that are durable.
RESUMABLE = frozenset(
    {
        *(FailReason.WORKER_LOST, FailReason.ENGINE_LOST, FailReason.ENGINE_ERROR),
        *(FailReason.SETUP_FAILED, FailReason.TESTS_FAILED_TO_RUN),
    }
)
# Losses hit long episodes most, so they must not use up the retries.
LOSSES = frozenset({FailReason.WORKER_LOST, FailReason.ENGINE_LOST, FailReason.NOT_REPEATED})
MAX_LOSSES = 100  # lost attempts of an episode; only a fault reaches this number


class State(enum.StrEnum):
    """The state of an episode. Every issued episode is in exactly one state (conservation)."""

    PENDING = "pending"  # issued, waiting for a worker
    RUNNING = "running"  # assigned
    LANDED = "landed"  # finished, in a group that is not settled
    READY = "ready"  # may be taken
    TAKEN = "taken"  # in the plan of a batch that is not committed
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({State.TRAINED, State.FILTERED, State.DROPPED, State.FAILED})
IN_FLIGHT = (State.PENDING, State.RUNNING, State.LANDED)
MAX_NAME_CHARACTERS = 80  # characters of a stored tool name, or of stored names of agents
NEVER_STALE = 1 << 60  # version of an episode without tokens, which is never stale


class OpenTurn(msgspec.Struct, gc=False, array_like=True):
    """The durable parts of a turn that is being sampled, or was when its attempt was lost."""

    prompt: bytes = b""  # see TurnPart
    parts: int = 0
    tokens: int = 0  # tokens in these parts
    oldest: int = NEVER_STALE  # oldest version of these tokens


# array_like: each change is written, so records must be small. gc=False: to collect over 100,000 of them
# takes too long.
class EpisodeRecord(msgspec.Struct, gc=False, array_like=True):
    """An episode, member of a group.

    oldest, newest: policy versions of the episode's trained tokens.
    min_version: while the episode runs, no token is added that is older than this version.
    step: the step whose batch took the episode; the lag of tokens is counted from its start version.
    greedy: sampled at temperature 0 and never trained; the other members are compared with this reward.
    """

    uid: str
    group: int
    member: int
    attempt: int = 0
    state: State = State.PENDING
    reason: str = ""
    failures: int = 0  # attempts that failed, without lost attempts
    losses: int = 0  # attempts that ended for one of LOSSES; they use up no retries
    worker: str = ""  # incarnation of the assigned worker
    assign_seq: int = 0
    oldest: int = -1  # -1: no token yet
    newest: int = -1
    min_version: int = -1  # oldest version that turns of the episode may start on
    turns: int = 0  # durable turns
    rows: int = 0  # sequences of these turns
    tokens: int = 0  # tokens of trained turns
    untrained_tokens: int = 0  # tokens of untrained turns
    sampled: int = 0  # model tokens of all durable turns
    seconds: float = 0.0  # time from the beginning to the newest durable turn
    result: EpisodeResult = EpisodeResult(0.0)  # result of the attempt that landed
    stats: EpisodeStats = EpisodeStats(0)
    step: int = NO_STEP
    greedy: bool = False
    agent: str = ""  # names of the agents that asked for trained turns
    failed_tool: str = ""  # name of the first tool that failed
    open: dict[int, OpenTurn] = {}  # unfinished turns by session; counted in no other field

    @property
    def width(self) -> int:
        """Tokens that each sequence of the episode takes in a padded batch of this episode alone."""
        return self.stats.longest_row or self.tokens

    @property
    def oldest_possible_version(self) -> int:
        """The oldest version that a token of the episode has, or may still get while the episode runs."""
        oldest_sampled = self.oldest if self.oldest >= 0 else NEVER_STALE
        oldest_sampled = min([oldest_sampled, *(turn.oldest for turn in self.open.values())])
        return min(oldest_sampled, self.min_version) if self.state is State.RUNNING else oldest_sampled

    @property
    def ending(self) -> str:
        """The final state with its reason, as text for people."""
        zero_variance = self.reason == FilterReason.ZERO_VARIANCE
        reason = "all of its episodes have the same reward" if zero_variance else self.reason
        return f"{self.state} ({reason})"

    def prepare_retry(self, reason: FailReason, retries: int) -> bool:
        """Prepare the next attempt after a failed attempt. False if there is none.

        The next attempt goes on from the durable turns if the failure permits. There is none if it would only
        fail again, or if `retries` are used up.
        """
        self.losses += reason in LOSSES
        self.failures += reason not in LOSSES

        if reason in FINAL_FAILURES or self.failures > retries or self.losses > MAX_LOSSES:
            return False
        if reason not in RESUMABLE:
            self.forget_turns()

        self.attempt += 1
        self.worker = ""
        self.reason = reason
        return True

    def add_turn(
        self,
        tokens: int,
        model_tokens: int,
        oldest: int,
        newest: int,
        *,
        seconds: float = 0.0,
        row: int = 0,
        untrained: bool = False,
        agent: str = "",
    ) -> None:
        """Count a turn that became durable `seconds` after the episode's begin.

        Untrained turns never are stale.
        """
        self.turns += 1
        self.rows = max(self.rows, row + 1)
        self.seconds = max(self.seconds, seconds)
        self.sampled += model_tokens

        if untrained:
            self.untrained_tokens += tokens
            return

        self.tokens += tokens
        if agent and agent not in self.agent.split(", ") and len(self.agent) < MAX_NAME_CHARACTERS:
            separator = ", " if self.agent else ""
            self.agent += f"{separator}{agent}"[:MAX_NAME_CHARACTERS]

        if model_tokens:
            self.oldest = oldest if self.oldest < 0 else min(self.oldest, oldest)
            self.newest = max(self.newest, newest)

    def forget_turns(self) -> None:
        """Forget all turns, so that the next attempt starts from the prompt."""
        self.open = {}
        self.oldest = -1
        self.newest = -1
        self.turns = 0
        self.rows = 0
        self.tokens = 0
        self.untrained_tokens = 0
        self.sampled = 0
        self.seconds = 0.0
        self.agent = ""
        self.failed_tool = ""


class GroupRecord(msgspec.Struct, array_like=True):
    """The episodes of one sample. A greedy episode, if there is one, is the last member.

    baseline: members with which every member is compared, fixed when the group settles. Before that, the
        members that landed after the deadline, in order.
    first_only: a late member is compared with the first baseline member alone.
    filtered: the baseline members were filtered; only late members may still be trained.
    position: position of the sample in the order of the data.
    retires: the sample is not drawn again.
    issued_step: the step under way when the group was issued.
    step: the step whose batch first took a member; NO_STEP: untaken.
    """

    id: int
    sample: int  # index of the sample in the data
    issued_step: int
    members: list[str]
    patience: float = math.inf  # seconds from start to deadline; inf: no partial group
    started: float = math.nan  # time of the first assignment; -inf: before this process; nan: not yet
    deadline: float = math.inf  # time at which the baseline is fixed; on the caller's clock, like `started`
    settled: bool = False
    baseline: tuple[int, ...] = ()
    first_only: bool = False
    filtered: bool = False
    step: int = NO_STEP
    position: int = -1
    retires: bool = False

    @property
    def late_siblings(self) -> tuple[int, ...]:
        """The baseline members with which a late member is compared."""
        return self.baseline[:1] if self.first_only else self.baseline


class EpisodeAccount(msgspec.Struct, frozen=True):
    """The account of all issued episodes (conservation): `issued` is the sum of the other fields."""

    issued: int
    trained: int
    filtered: int
    dropped: int
    failed: int
    taken: int
    ready: int
    in_flight: int

    @classmethod
    def from_counts(cls, issued: int, counts: Counter[State]) -> EpisodeAccount:
        final_counts = {state.value: counts[state] for state in (*FINAL_STATES, State.TAKEN, State.READY)}
        return cls(issued, **final_counts, in_flight=sum(counts[state] for state in IN_FLIGHT))

    @property
    def conserved(self) -> bool:
        return self.issued == sum(msgspec.structs.astuple(self)[1:])


class Tally:
    """Counts over all groups in memory.

    state_counts: number of episodes in each state.
    groups_by_state: ids of the groups with a member in a state.
    untaken_groups: ids of the groups of which no batch has taken a member yet, without filtered groups.
    groups_by_step: ids of the groups by the step that took their first member, without filtered groups.
    filtered_groups: ids of filtered groups. Only their late members may still be trained, and these do not
        count as a group of a batch.
    """

    def __init__(self) -> None:
        self.state_counts: Counter[State] = Counter()
        self.groups_by_state: defaultdict[State, set[int]] = defaultdict(set)
        self.untaken_groups: set[int] = set()
        self.groups_by_step: defaultdict[int, set[int]] = defaultdict(set)
        self.filtered_groups: set[int] = set()
        self._member_counts: defaultdict[int, Counter[State]] = defaultdict(Counter)
        self._group_ids: list[int] = []  # ids of all groups, ascending

    def add_group(self, group: GroupRecord, members: list[EpisodeRecord]) -> None:
        """Add a group that is newer than all groups before."""
        self._group_ids.append(group.id)
        self._index_group(group)
        for episode in members:
            self._change_count(group.id, episode.state, 1)

    def remove_group(self, group: GroupRecord) -> None:
        self._group_ids.pop(bisect_left(self._group_ids, group.id))
        self._unindex_group(group)
        for state, count in self._member_counts.pop(group.id).items():
            self.state_counts[state] -= count
            self.groups_by_state[state].discard(group.id)

    def move_episode(self, episode: EpisodeRecord, state: State) -> None:
        """Set the state of an episode of a live group. No other code sets this state."""
        self._change_count(episode.group, episode.state, -1)
        self._change_count(episode.group, state, 1)
        episode.state = state

    def mark_taken(self, group: GroupRecord, step: int) -> None:
        """Note that a batch has taken the first member of a group."""
        self._unindex_group(group)
        group.step = step
        self._index_group(group)

    def mark_filtered(self, group: GroupRecord) -> None:
        """Count the landed members of a group as filtered."""
        self._unindex_group(group)
        group.filtered = True
        self._index_group(group)

    def count_live(self, committed: int) -> int:
        """Return the number of groups that are neither filtered nor taken by a committed batch."""
        return len(self._group_ids) - len(self._closed_groups(committed))

    def count_older(self, groups: list[int], committed: int) -> list[int]:
        """Return for each of these groups the number of live groups that are older."""
        closed_groups = sorted(self._closed_groups(committed))
        return [bisect_left(self._group_ids, group) - bisect_left(closed_groups, group) for group in groups]

    def is_over(self, group: GroupRecord) -> bool:
        """Return True if all members of a group are in a final state."""
        return all(state.over for state, count in self._member_counts[group.id].items() if count)

    def _closed_groups(self, committed: int) -> set[int]:
        return self.filtered_groups.union(
            *(group_ids for step, group_ids in self.groups_by_step.items() if step <= committed)
        )

    def _index_group(self, group: GroupRecord) -> None:
        if group.filtered:
            self.filtered_groups.add(group.id)
        elif group.step == NO_STEP:
            self.untaken_groups.add(group.id)
        else:
            self.groups_by_step[group.step].add(group.id)

    def _unindex_group(self, group: GroupRecord) -> None:
        for group_ids in (self.filtered_groups, self.untaken_groups, self.groups_by_step[group.step]):
            group_ids.discard(group.id)

        if not self.groups_by_step[group.step]:
            del self.groups_by_step[group.step]

    def _change_count(self, group: int, state: State, change: int) -> None:
        self.state_counts[state] += change
        member_counts = self._member_counts[group]
        member_counts[state] += change
        if not member_counts[state]:
            self.groups_by_state[state].discard(group)
        elif member_counts[state] == change:  # the first member in this state
            self.groups_by_state[state].add(group)
