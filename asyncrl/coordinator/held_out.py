"""Keeps the ledger of held-out episodes: the episodes of the validation under way.

Held-out episodes are leased, fenced, retried and continued like training episodes, but are never live, taken
or filtered, and have an account of their own.

The store has a record of each held-out episode until the session ends, and the result of each episode that is
over, which lists show as well.
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

ACCOUNT_KEY = "held_out"
RECORD_PREFIX = "record:"  # precedes the uid in the store's keys


class HeldOutAccount(msgspec.Struct, frozen=True):
    """The account of held-out episodes: `issued` is the sum of the other fields.

    begun_anew: episodes that were not over when their session was cut short, and that started again from the
        beginning under other weights or settings.
    """

    issued: int = 0
    scored: int = 0
    failed: int = 0
    in_flight: int = 0
    begun_anew: int = 0

    @property
    def conserved(self) -> bool:
        return self.issued == self.scored + self.failed + self.in_flight + self.begun_anew


class HeldOutEpisodes:
    """The held-out episodes of at most one session, issued by `begin_session`.

    Args:
        keeps_turns: store all turns (an evaluation). False: turns of ended episodes are stored as far as
            `store.keep_bytes` allows.
    """

    def __init__(self, store: RunStore, retries: int, keeps_turns: bool) -> None:
        self._store = store
        self._retries = retries
        self._keeps_turns = keeps_turns
        self.restore_episodes()

    def restore_episodes(self) -> None:
        """Take over the session of the store."""
        reader = self._store.reader
        decode = msgspec.msgpack.Decoder(EpisodeRecord).decode
        records = (decode(record) for _, record in reader.held_out(RECORD_PREFIX))
        self.episodes = {episode.uid: episode for episode in records}
        self._prefix = uid_prefix(HeldOut.from_uid(next(iter(self.episodes))).step) if self.episodes else ""

        stored_results = reader.held_out(self._prefix) if self._prefix else ()
        result_type = Finished | Failed
        self.results: dict[str, Finished | Failed] = {  # without texts, which are in the store
            uid: _without_text(msgspec.msgpack.decode(record, type=result_type))
            for uid, record in stored_results
        }

        self.texts: dict[str, str] = {}  # texts of results that ended in the current pass of the loop
        self.causes: dict[str, str] = {}  # cause of the newest failure, by uid
        self._changed_episodes: dict[str, EpisodeRecord] = {}

        # The account at the end of the last session.
        self._earlier_account = msgspec.json.decode(reader.meta(ACCOUNT_KEY, "{}"), type=HeldOutAccount)
        self._issued_count = len(self.episodes)
        self._count_states()

    # -- a session -----------------------------------------------------------------------------------

    def begin_session(self, prefix: str, uids: list[str], continues: bool) -> None:
        """Issue the episodes of a session, whose uids begin with `prefix`.

        If the session `continues`, stored episodes and results are reused; else they are forgotten.
        """
        known_episodes = self.episodes

        if not continues:
            self.end_session(counts_apart=True)  # a session that was cut short and cannot go on
            self._store.forget_held_out(prefix)
            for uid in known_episodes.keys() & set(uids):
                self._store.forget_frames(uid)
            self.results = {}  # a continued session has results of this pass that the store does not show yet

        self._issued_count = len(uids)
        self._prefix = prefix
        self.episodes = {}
        for uid in uids:
            episode = known_episodes.get(uid)
            if episode is None or not continues:
                # An old attempt may still run somewhere: the attempts of a new episode get higher numbers.
                identity = HeldOut.from_uid(uid)
                attempt = episode.attempt + 1 if episode is not None else 0
                is_greedy = identity.mode != SAMPLED
                episode = EpisodeRecord(uid, identity.row, identity.draw, attempt, greedy=is_greedy)
            self.episodes[uid] = episode

        self._changed_episodes = dict(self.episodes)
        self._count_states()

    def _count_states(self) -> None:
        self._state_counts = Counter(episode.state for episode in self.episodes.values())
        self._pending_episodes = {uid: e for uid, e in self.episodes.items() if e.state is State.PENDING}

    def end_session(
        self, cause: str = "not finished in time", counts_apart: bool = False
    ) -> list[EpisodeRecord]:
        """End the session. Return the episodes that were running.

        Unfinished episodes have failed, or are counted as begun anew if `counts_apart`.
        """
        unfinished_episodes = [
            episode for episode in self.episodes.values() if episode.state in (State.PENDING, State.RUNNING)
        ]
        running_episodes = [episode for episode in unfinished_episodes if episode.state is State.RUNNING]
        for episode in unfinished_episodes:
            self.give_up_episode(episode, FailReason.DEADLINE, cause)

        account = self.account()
        unfinished_count = len(unfinished_episodes) if counts_apart else 0
        failed = account.failed - unfinished_count
        begun_anew = account.begun_anew + unfinished_count
        self._earlier_account = replace(account, failed=failed, begun_anew=begun_anew)

        self._issued_count = 0
        self._store.put_meta(ACCOUNT_KEY, msgspec.json.encode(self._earlier_account).decode())
        self._store.forget_held_out(RECORD_PREFIX)
        self.episodes = {}
        self._changed_episodes = {}
        self._count_states()

        return running_episodes

    @property
    def waiting(self) -> list[EpisodeRecord]:
        """Episodes that are to be assigned, in order."""
        return list(self._pending_episodes.values())

    # -- running: see ReplayBuffer -------------------------------------------------------------------

    def assign(
        self, episode: EpisodeRecord, worker: str, sequence_number: int, min_version: int, now: float
    ) -> None:
        episode.worker = worker
        episode.assign_seq = sequence_number
        episode.min_version = min_version
        self._set_state(episode, State.RUNNING)

    def mark_changed(self, episode: EpisodeRecord) -> None:
        self._changed_episodes[episode.uid] = episode

    def finish_episode(self, episode: EpisodeRecord, message: Finished) -> None:
        self._end_episode(episode, State.LANDED, message)

    def fail_attempt(self, episode: EpisodeRecord, reason: FailReason, now: float) -> list[EpisodeRecord]:
        """Issue an episode again after a failed attempt, or give the episode up."""
        if episode.prepare_retry(reason, self._retries):
            self._set_state(episode, State.PENDING)
        else:
            self.give_up_episode(episode, reason)
        return []

    def give_up_episode(self, episode: EpisodeRecord, reason: FailReason, cause: str = "") -> None:
        cause = cause or self.causes.get(episode.uid, "")
        self._end_episode(
            episode, State.FAILED, Failed(0, Attempt(episode.uid, episode.attempt), reason, cause)
        )

    def _end_episode(self, episode: EpisodeRecord, state: State, result: Finished | Failed) -> None:
        self._set_state(episode, state)
        self.results[episode.uid] = _without_text(result)
        if isinstance(result, Finished):
            self.texts[episode.uid] = result.text

        self._store.put_held_out(episode.uid, msgspec.msgpack.encode(result))
        if isinstance(result, Finished):
            ended_episode = replace(episode, reason="", result=result.result, stats=result.stats)
        else:
            ended_episode = replace(episode, reason=result.reason)

        identity = HeldOut.from_uid(episode.uid)
        self._store.list_held_out(ended_episode, identity.step, identity.mode)

        if not self._keeps_turns:
            self._store.release_frames(episode.uid)

    def _set_state(self, episode: EpisodeRecord, state: State) -> None:
        self._state_counts[episode.state] -= 1
        self._state_counts[state] += 1
        episode.state = state

        if state is State.PENDING:
            self._pending_episodes[episode.uid] = episode
        else:
            self._pending_episodes.pop(episode.uid, None)

        self.mark_changed(episode)

    def put_changes(self) -> None:
        """Put changed records into the store's transaction."""
        for uid, episode in self._changed_episodes.items():
            self._store.put_held_out(RECORD_PREFIX + uid, msgspec.msgpack.encode(episode))
        self._changed_episodes = {}
        self.texts = {}

    # -- numbers -------------------------------------------------------------------------------------

    def account(self) -> HeldOutAccount:
        counts = self._state_counts
        earlier = self._earlier_account
        return HeldOutAccount(
            issued=earlier.issued + self._issued_count,
            scored=earlier.scored + counts[State.LANDED],
            failed=earlier.failed + counts[State.FAILED],
            in_flight=counts[State.PENDING] + counts[State.RUNNING],
            begun_anew=earlier.begun_anew,
        )

    def audit(self) -> bool:
        """Return True if the account is exact, and the store has as many results of the session as are
        counted here."""
        stored_count = self._store.reader.count_held_out(self._prefix) if self._prefix else 0
        if self.episodes:
            ended_count = self._state_counts[State.LANDED] + self._state_counts[State.FAILED]
        else:
            ended_count = stored_count
        return self.account().conserved and stored_count == len(self.results) == ended_count


def _without_text(result: Finished | Failed) -> Finished | Failed:
    return replace(result, text="") if isinstance(result, Finished) else result
