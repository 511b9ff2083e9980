"""Keeps the ledger of the run: groups, episodes and batches, with the failures of attempts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from asyncrl.buffer.batches import Batches
from asyncrl.buffer.flow_control import LiveLimit
from asyncrl.buffer.payloads import cut_back, decode_turn
from asyncrl.buffer.records import FINAL_STATES, IN_FLIGHT, EpisodeRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.config import RunConfig
from asyncrl.coordinator.failures import FailedAttempts, FirstAttempts, MemoryLimits
from asyncrl.coordinator.held_out import HeldOutEpisodes
from asyncrl.errors import ProtocolError
from asyncrl.observe.held_out import UID_START
from asyncrl.store.reader import part_kind
from asyncrl.store.runstore import RunStore
from asyncrl.store.schema import StoreError
from asyncrl.types import Sample, Turn

MAX_UNTRAINED_BATCHES = 50  # batches' worth of groups in a row without training, after which the run ends
MAX_SKIPPED_BATCHES = 20  # committed batches in a row without an optimizer step, after which the run ends
ABANDONED_KEY = "abandoned_tokens"  # key of the store's meta
REASONS_KEY = "reasons"  # key of the store's meta: episodes by final state and reason
UNTAKEN_STATES = (*IN_FLIGHT, State.READY)

log = logging.getLogger("asyncrl.coordinator")


class Ledger:
    """All episodes of the run, from the issue of a group to the commit of a batch.

    Training episodes are in `buffer` and `batches`, episodes of a validation in `held_out`. The store has
    the changes of a pass of the loop after `put_changes` and a commit, and the payloads of the episodes.

    Args:
        samples: data rows of the training groups.
    """

    def __init__(
        self,
        config: RunConfig,
        samples: Sequence[Sample],
        buffer: ReplayBuffer,
        batches: Batches,
        store: RunStore,
    ) -> None:
        self._config = config
        self._store = store
        self.samples = samples
        self.buffer = buffer
        self.batches = batches
        is_evaluation = not config.total_steps
        self.held_out = HeldOutEpisodes(store, config.rollout.retries, keeps_turns=is_evaluation)
        self.live_limit = LiveLimit(config, buffer)

        self.first_attempts = FirstAttempts(len(samples))
        self.skipped_batches = 0  # committed batches in a row without an optimizer step
        self._load_failures()

    def _load_failures(self) -> None:
        self.failed_attempts = FailedAttempts.load_from(self._store)
        self.memory_limits = MemoryLimits.load_from(
            self._store.reader, self._config.trainer.micro_batch_tokens
        )

    def restore(self) -> None:
        """Read the ledger from the store again, without uncommitted changes. Raises StoreError."""
        self._load_failures()
        restore_from_store(self._config, self._store, self.buffer, self.batches)
        self.held_out.restore_episodes()

    def put_changes(self) -> None:
        """Put all changes into the store's transaction."""
        groups, episodes, moved_episodes = self.buffer.pop_changes()
        self._store.put_groups(groups, self.buffer.live_groups)
        self._store.put_episodes(episodes, moved_episodes)

        if episodes or moved_episodes:  # without changed episodes no attempt was given up
            self._store.put_meta(ABANDONED_KEY, str(self.buffer.abandoned_tokens))
            self._store.put_meta(REASONS_KEY, msgspec.json.encode(self.buffer.reasons).decode())

        self._store.put_batches(self.batches.pop_changes())
        self.held_out.put_changes()

        for episode in (*episodes, *moved_episodes):
            if episode.state in FINAL_STATES and episode.state is not State.TRAINED:
                self._store.release_frames(episode.uid)

    def owner_of(self, uid: str) -> ReplayBuffer | HeldOutEpisodes:
        """Return the part of the ledger, training buffer or validation, that owns this episode."""
        return self.held_out if uid.startswith(UID_START) else self.buffer

    @property
    def all_episodes(self) -> list[EpisodeRecord]:
        """Episodes in memory, of training and of a validation."""
        return [*self.buffer.episodes.values(), *self.held_out.episodes.values()]

    @property
    def training_over(self) -> bool:
        """True if no batch is left to train: always, if nothing is trained."""
        return self.batches.over or self.batches.committed >= self._config.total_steps

    @property
    def total_batches(self) -> int:
        """Number of batches of the run: `total_steps`, or fewer if the data runs out before."""
        max_draws = self.buffer.prompts.max_draws
        if max_draws is None:
            return self._config.total_steps
        batches_of_data = -(-max_draws // self._config.buffer.groups_per_batch)
        return min(self._config.total_steps, batches_of_data)

    def futile_reason(self) -> str:
        """Return why the run should end as it learns nothing; '' if there is no such reason."""
        buffer = self.buffer

        if buffer.prompts.order_error and buffer.missing_groups > 0:
            return f"{buffer.prompts.order_error}; fix the error, then continue with resume=auto"

        running_numbers = (
            episode.assign_seq for episode in buffer.episodes.values() if episode.state is State.RUNNING
        )
        if common_failure := self.first_attempts.verdict(running_numbers):
            return (
                f"{common_failure}: {self.failed_attempts.newest}; fix the cause, then continue with "
                "resume=auto"
            )

        if buffer.untrained_groups > MAX_UNTRAINED_BATCHES * self._config.buffer.groups_per_batch:
            return (
                f"{buffer.untrained_groups} groups in a row could not be used for training (last reason: "
                f"{buffer.untrained_reason}); read the transcripts (asyncrl runs transcripts --of training) "
                "and the files in logs/"
            )

        if self.skipped_batches > MAX_SKIPPED_BATCHES:
            return (
                f"the last {self.skipped_batches} batches led to no optimizer step, because their gradients "
                "were not finite, all their tokens were masked, or each episode had lost a turn or an image; "
                "check the rewards, and rollout_corr/*, staleness/* and trainer/lost_episodes in "
                "metrics.jsonl"
            )

        return ""

    # -- payloads --------------------------------------------------------------------------------------

    def read_turns(self, episode: EpisodeRecord) -> list[bytes]:
        """Read the payloads of an episode's turns, without replies; [] if a payload cannot be read.

        Payloads were checked on arrival. Decoding them again would take most of the time of a plan.
        """
        try:
            turn_payloads = list(self._store.reader.turn_frames(episode.uid, episode.turns, ("generated",)))
        except StoreError as error:
            log.error("episode %s: %s", episode.uid, error)
            return []
        return turn_payloads if all(turn_payloads) else []

    def read_frames(self, episode: EpisodeRecord) -> list[bytes]:
        """Return the readable payloads of an episode, two per turn.

        An untaken episode with further turns is cut back to the readable turns.
        """
        turns: list[Turn] = []
        frames: list[bytes] = []
        if not episode.turns:
            return frames

        uid = episode.uid
        stored = self._store.reader.turn_frames(episode.uid, episode.turns)
        try:
            for payload, replied in zip(stored, stored, strict=True):
                turns.append(decode_turn(payload))
                frames += payload, replied
        except (StoreError, ProtocolError) as error:
            log.error(
                "episode %s: only %d of %d turns can be read: %s", uid, len(turns), episode.turns, error
            )
            if uid in self.held_out.episodes:
                episode.forget_turns()
                self.held_out.mark_changed(episode)
                self._store.forget_frames(uid)
                return []
            if episode.state in UNTAKEN_STATES:
                cut_back(self.buffer, episode, turns)
                self._store.forget_frames(uid, len(turns))

        return frames

    def read_turn_parts(self, episode: EpisodeRecord) -> list[bytes]:
        """Return the parts of turns that no attempt has ended. Unreadable turns are forgotten."""
        frames: list[bytes] = []

        for session, turn in list(episode.open.items()):
            kinds = [part_kind(number) for number in range(turn.parts)]
            try:
                frames += list(self._store.reader.turn_frames(episode.uid, session + 1, kinds, session))
            except StoreError as error:
                log.error("episode %s: restarting its unfinished turn: %s", episode.uid, error)
                del episode.open[session]

        return frames

    def cut_back_unreadable(self) -> None:
        """Cut back untaken episodes whose payloads were lost by a power cut or a bad sector.

        Called after a start, before anything is planned.
        """
        for episode in [e for e in self.buffer.episodes.values() if e.turns and e.state in UNTAKEN_STATES]:
            self.read_frames(episode)


def restore_from_store(config: RunConfig, store: RunStore, buffer: ReplayBuffer, batches: Batches) -> None:
    """Restore buffer and batches from the store."""
    stored_run = store.reader.load_run()
    buffer.restore_groups(stored_run.groups, stored_run.episodes, stored_run.pruned_counts, time.monotonic())

    buffer.next_group = stored_run.next_group
    buffer.prompts.cursor = stored_run.cursor
    buffer.prompts.retired_samples = stored_run.retired if config.buffer.retire_pass_rate < 1 else set()
    buffer.committed = stored_run.committed_steps

    buffer.abandoned_tokens = int(store.reader.meta(ABANDONED_KEY, "0"))
    buffer.reasons.update(msgspec.json.decode(store.reader.meta(REASONS_KEY, "{}"), type=dict[str, int]))

    batches.restore_plans(stored_run.batches, stored_run.planned_episodes, stored_run.baselines)
