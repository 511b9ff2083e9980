"""The episodes of the validation under way. They are leased, fenced, retried and continued as those that are
trained, but are never live, taken or filtered: they have an account of their own.

The store has a record of each until the session ends, and in its place the result of each that is over, which
lists show as well.
"""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec.structs import replace

from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.observe.held_out import SAMPLED, HeldOut, uid_prefix
from asyncrl.store.runstore import RunStore
from asyncrl.types import FailReason
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Failed, Finished

META = "held_out"
RECORD = "record:"  # before the uid, in the store


class HeldOutFlow(msgspec.Struct, frozen=True):
    """The account of held-out episodes: `issued` is the sum of the others. `begun_anew`: those that were not
    over when their session was cut short, and began again from the start under other weights or settings."""

    issued: int = 0
    scored: int = 0
    failed: int = 0
    in_flight: int = 0
    begun_anew: int = 0

    @property
    def conserved(self) -> bool:
        return self.issued == self.scored + self.failed + self.in_flight + self.begun_anew


class HeldOutEpisodes:
    """At most one session's, which `begin` issues. `keeps`: it is an evaluation, and all turns are kept; else
    those of episodes that are over as far as `store.keep_bytes` allows."""

    def __init__(self, store: RunStore, retries: int, keeps: bool) -> None:
        self._store = store
        self._retries = retries
        self._keeps = keeps
        self.restore()

    def restore(self) -> None:
        """Take over what the store holds."""
        read = self._store.read
        decode = msgspec.msgpack.Decoder(EpisodeRecord).decode
        records = (decode(record) for _, record in read.held_out(RECORD))
        self.episodes = {episode.uid: episode for episode in records}
        self._prefix = uid_prefix(HeldOut.of(next(iter(self.episodes))).step) if self.episodes else ""

        stored = read.held_out(self._prefix) if self._prefix else ()
        result = Finished | Failed
        self.over: dict[str, Finished | Failed] = {  # results without texts, which are in the store,
            uid: _without_text(msgspec.msgpack.decode(record, type=result)) for uid, record in stored
        }

        self.texts: dict[str, str] = {}  # but for those of this turn
        self.causes: dict[str, str] = {}  # of the newest failure, by uid
        self._dirty: dict[str, EpisodeRecord] = {}

        self._before = msgspec.json.decode(read.meta(META, "{}"), type=HeldOutFlow)  # of earlier sessions
        self._issued = len(self.episodes)
        self._count()

    # -- a session -----------------------------------------------------------------------------------

    def begin(self, prefix: str, uids: list[str], again: bool) -> None:
        """Issue the episodes of a session, whose uids begin with `prefix`. `again`: it goes on with what the
        store has of it; else nothing of it stays."""
        known = self.episodes

        if not again:
            self.end(anew=True)  # one that was cut short, and cannot go on
            self._store.forget_held_out(prefix)
            for uid in known.keys() & set(uids):
                self._store.forget_frames(uid)
            self.over = {}  # else it has what ended in this turn, which the store does not show yet

        self._issued = len(uids)
        self._prefix = prefix
        self.episodes = {uid: _issue(uid, known.get(uid), again) for uid in uids}
        self._dirty = dict(self.episodes)
        self._count()

    def _count(self) -> None:
        self._counts = Counter(episode.state for episode in self.episodes.values())
        self._pending = {uid: e for uid, e in self.episodes.items() if e.state is State.PENDING}

    def end(self, cause: str = "not over in time", anew: bool = False) -> list[EpisodeRecord]:
        """The session is over: what is in flight has failed, or with `anew` counts apart. Returns what was
        running."""
        left = [
            episode for episode in self.episodes.values() if episode.state in (State.PENDING, State.RUNNING)
        ]
        running = [episode for episode in left if episode.state is State.RUNNING]
        for episode in left:
            self.give_up(episode, FailReason.DEADLINE, cause)

        flow = self.flow()
        unfinished = len(left) if anew else 0
        failed = flow.failed - unfinished
        begun_anew = flow.begun_anew + unfinished
        self._before = replace(flow, failed=failed, begun_anew=begun_anew)

        self._issued = 0
        self._store.put_meta(META, msgspec.json.encode(self._before).decode())
        self._store.forget_held_out(RECORD)
        self.episodes = {}
        self._dirty = {}
        self._count()

        return running

    @property
    def waiting(self) -> list[EpisodeRecord]:
        """Episodes that are to be assigned, in their order."""
        return list(self._pending.values())

    # -- running: see ReplayBuffer -------------------------------------------------------------------

    def assign(self, episode: EpisodeRecord, worker: str, seq: int, acked: int, now: float) -> None:
        episode.worker = worker
        episode.assign_seq = seq
        episode.bound = acked
        self._move(episode, State.RUNNING)

    def touch(self, episode: EpisodeRecord) -> None:
        self._dirty[episode.uid] = episode

    def finish(self, episode: EpisodeRecord, message: Finished) -> None:
        self._end(episode, State.LANDED, message)

    def fail(self, episode: EpisodeRecord, reason: FailReason, now: float) -> list[EpisodeRecord]:
        """An attempt ended without a result: issue the episode again, or give it up."""
        if episode.retry(reason, self._retries):
            self._move(episode, State.PENDING)
        else:
            self.give_up(episode, reason)
        return []

    def give_up(self, episode: EpisodeRecord, reason: FailReason, cause: str = "") -> None:
        cause = cause or self.causes.get(episode.uid, "")
        self._end(episode, State.FAILED, Failed(0, Attempt(episode.uid, episode.attempt), reason, cause))

    def _end(self, episode: EpisodeRecord, state: State, result: Finished | Failed) -> None:
        self._move(episode, state)
        self.over[episode.uid] = _without_text(result)
        if isinstance(result, Finished):
            self.texts[episode.uid] = result.text

        self._store.put_held_out(episode.uid, msgspec.msgpack.encode(result))
        if isinstance(result, Finished):
            ended = replace(episode, reason="", result=result.result, stats=result.stats)
        else:
            ended = replace(episode, reason=result.reason)

        which = HeldOut.of(episode.uid)
        self._store.list_held_out(ended, which.step, which.mode)

        if not self._keeps:
            self._store.release_frames(episode.uid)

    def _move(self, episode: EpisodeRecord, state: State) -> None:
        self._counts[episode.state] -= 1
        self._counts[state] += 1
        episode.state = state

        if state is State.PENDING:
            self._pending[episode.uid] = episode
        else:
            self._pending.pop(episode.uid, None)

        self.touch(episode)

    def put_changes(self) -> None:
        """Let the store write what has changed."""
        for uid, episode in self._dirty.items():
            self._store.put_held_out(RECORD + uid, msgspec.msgpack.encode(episode))
        self._dirty = {}
        self.texts = {}

    # -- numbers -------------------------------------------------------------------------------------

    def flow(self) -> HeldOutFlow:
        counts = self._counts
        before = self._before
        return HeldOutFlow(
            issued=before.issued + self._issued,
            scored=before.scored + counts[State.LANDED],
            failed=before.failed + counts[State.FAILED],
            in_flight=counts[State.PENDING] + counts[State.RUNNING],
            begun_anew=before.begun_anew,
        )

    def audit(self) -> bool:
        """The account is exact, and the store has as many results of the session as are counted here."""
        stored = self._store.read.count_held_out(self._prefix) if self._prefix else 0
        ended = self._counts[State.LANDED] + self._counts[State.FAILED] if self.episodes else stored
        return self.flow().conserved and stored == len(self.over) == ended


def _without_text(result: Finished | Failed) -> Finished | Failed:
    return replace(result, text="") if isinstance(result, Finished) else result


def _issue(uid: str, known: EpisodeRecord | None, again: bool) -> EpisodeRecord:
    """An attempt of the same number may still run somewhere: that of a session that begins anew is higher."""
    if known is not None and again:
        return known

    which = HeldOut.of(uid)
    attempt = known.attempt + 1 if known is not None else 0
    return EpisodeRecord(uid, which.row, which.draw, attempt, greedy=which.mode != SAMPLED)
