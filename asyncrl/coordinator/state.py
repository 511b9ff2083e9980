"""The state that the coordinator's handlers share: buffer, batches, versions, store, outbox and journal."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.algorithms.advantages import configured_advantage
from asyncrl.buffer.batches import Batches
from asyncrl.buffer.flow_control import LiveLimit
from asyncrl.buffer.payloads import cut_back, decode_turn
from asyncrl.buffer.prompts import ComparedParts, Prompts
from asyncrl.buffer.records import FINAL_STATES, IN_FLIGHT, EpisodeRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.buffer.shifts import Shifts
from asyncrl.config import RunConfig
from asyncrl.coordinator.failures import FailedAttempts, FirstAttempts, MemoryLimits
from asyncrl.coordinator.held_out import HeldOutEpisodes
from asyncrl.coordinator.versions import VersionLedger
from asyncrl.data import EpochOrder, Samples, check_same_data, samples_path
from asyncrl.errors import ProtocolError
from asyncrl.observe.held_out import UID_START
from asyncrl.observe.timeline import START_EVENT, Timeline
from asyncrl.runtime.liveness import Liveness
from asyncrl.store import launches
from asyncrl.store.reader import part_kind
from asyncrl.store.runstore import RunStore
from asyncrl.store.schema import StoreError, StorePaused
from asyncrl.types import MAX_VOCABULARY, NO_VERSION, Sample, Turn
from asyncrl.weights.manifest import WeightsRef
from asyncrl.weights.model_files import MODEL_KEY, model_identity
from asyncrl.wire.messages.shared import Welcome, WireMessage
from asyncrl.wire.sockets import Hub

MAX_UNTRAINED_BATCHES = 50  # batches' worth of groups in a row without training, after which the run ends
ABANDONED_KEY = "abandoned_tokens"  # key of the store's meta
REASONS_KEY = "reasons"  # key of the store's meta: episodes by final state and reason
MAX_SKIPPED_BATCHES = 20  # committed batches in a row without an optimizer step, after which the run ends

log = logging.getLogger("asyncrl.coordinator")
UNTAKEN_STATES = (*IN_FLIGHT, State.READY)


@dataclass
class TransactionalOutbox:
    """Messages of a pass of the loop, sent after the store's commit.

    So a kill -9 cannot undo anything that a peer knows of.
    """

    control: Hub
    bulk: Hub
    _queue: list[tuple[Hub, bytes, WireMessage, Sequence[bytes]]] = field(default_factory=list)
    unreachable: set[bytes] = field(default_factory=set)  # peers that a message did not reach

    @property
    def refused(self) -> int:
        """Number of received messages that could not be read."""
        return self.control.refused_count + self.bulk.refused_count

    def to_control(self, peer: bytes, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        self._queue.append((self.control, peer, message, frames))

    def to_bulk(self, peer: bytes, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        self._queue.append((self.bulk, peer, message, frames))

    def clear(self) -> None:
        """Discard the messages of a pass that was undone."""
        self._queue = []

    def flush(self) -> None:
        """Send all messages. A peer that misses a message requests the message again, by its protocol."""
        queue = self._queue
        self._queue = []
        for hub, peer, message, frames in queue:
            if not hub.send(peer, message, frames):
                self.unreachable.add(peer)
                log.warning("%s not delivered to %s", type(message).__name__, peer.decode(errors="replace"))


@dataclass
class RunState:
    """The state of the run. Only the coordinator's thread reads and writes it."""

    config: RunConfig
    run_dir: Path
    samples: Sequence[Sample]
    buffer: ReplayBuffer
    batches: Batches
    versions: VersionLedger
    store: RunStore
    outbox: TransactionalOutbox
    coordinator_epoch: int
    trainer_epoch: int = 0
    vocabulary: int = MAX_VOCABULARY  # token ids are smaller; known once a rank has reported in
    launch: str = ""  # incarnation of the launch of this coordinator
    skipped_batches: int = 0  # committed batches in a row without an optimizer step
    waits: list[str] = field(default_factory=list)
    damage: str = ""  # why the store could not be read again, so that memory and store differ
    stopping: bool = False  # the run was told to stop: processes that end from then on are no loss
    shifts: Shifts | None = None  # None unless engines and trainer share devices

    def __post_init__(self) -> None:
        is_evaluation = not self.config.total_steps
        self.held_out = HeldOutEpisodes(self.store, self.config.rollout.retries, keeps_turns=is_evaluation)

        self.liveness = Liveness(self.config, time.monotonic())
        self.timeline = Timeline(self.run_dir / "timeline" / "coordinator-0.jsonl")
        self.timeline.record_past(START_EVENT, 0.0)

        self.failed_attempts = FailedAttempts.load_from(self.store)
        self.memory_limits = MemoryLimits.load_from(self.store.reader, self.config.trainer.micro_batch_tokens)
        self.first_attempts = FirstAttempts(len(self.samples))

        self.live_limit = LiveLimit(self.config, self.buffer)
        self.launches = launches.decode_launches(self.store.reader.meta(launches.LAUNCHES_KEY, "[]"))
        self.record_launch(self.batches.committed)

    def futile_reason(self) -> str:
        """Return why the run should end as it learns nothing; '' if there is no such reason."""
        buffer = self.buffer

        if buffer.prompts.order_error and buffer.missing_groups > 0:
            return f"{buffer.prompts.order_error}; mend that, then go on with resume=auto"

        running_numbers = (
            episode.assign_seq for episode in buffer.episodes.values() if episode.state is State.RUNNING
        )
        if common_failure := self.first_attempts.verdict(running_numbers):
            return f"{common_failure}: {self.failed_attempts.newest}; mend that, then go on with resume=auto"

        if buffer.untrained_groups > MAX_UNTRAINED_BATCHES * self.config.buffer.groups_per_batch:
            return (
                f"{buffer.untrained_groups} groups in a row could not be trained; the last one: "
                f"{buffer.untrained_reason}; read what the model wrote (asyncrl runs transcripts --of "
                "training) and logs/"
            )

        if self.skipped_batches > MAX_SKIPPED_BATCHES:
            return (
                f"the last {self.skipped_batches} batches took no optimizer step: "
                "their gradients were not finite, "
                "or all their tokens masked; see rewards, rollout_corr/* and staleness/* in metrics.jsonl"
            )

        return ""

    def engine_time(self, now: float) -> float:
        """Return the time of the engines' clock, which stands still while they sleep.

        Groups age by this time.
        """
        return now if self.shifts is None else self.shifts.clock(now)

    def ledger_of(self, uid: str) -> ReplayBuffer | HeldOutEpisodes:
        """Return the ledger (training buffer or validation) that owns this episode."""
        return self.held_out if uid.startswith(UID_START) else self.buffer

    @property
    def all_episodes(self) -> list[EpisodeRecord]:
        """Episodes in memory, of training and of a validation."""
        return [*self.buffer.episodes.values(), *self.held_out.episodes.values()]

    @property
    def total_batches(self) -> int:
        """Number of batches of the run: `total_steps`, or fewer if the data runs out before."""
        max_draws = self.buffer.prompts.max_draws
        if max_draws is None:
            return self.config.total_steps
        batches_of_data = -(-max_draws // self.config.buffer.groups_per_batch)
        return min(self.config.total_steps, batches_of_data)

    def send_welcome(self, peer: bytes) -> None:
        """Answer a hello."""
        self.outbox.to_control(peer, self.welcome_message)

    @property
    def welcome_message(self) -> Welcome:
        return Welcome(
            self.coordinator_epoch,
            self.trainer_epoch,
            self.batches.committed,
            self.memory_limits.tokens,
            self.memory_limits.recompute_every,
        )

    def record_launch(self, step: int) -> None:
        """Record that this launch trains all steps after `step`, perhaps again, with the configuration of
        this launch."""
        self.launches = launches.with_launch(self.launches, step, self.config)
        self.store.put_meta(launches.LAUNCHES_KEY, msgspec.json.encode(self.launches).decode())

    def persist(self) -> None:
        """Write all changes in a transaction, then send the messages of this pass.

        After StorePaused neither has happened, and `persist` must be called again before any further change.
        """
        groups, episodes, moved_episodes = self.buffer.pop_changes()
        self.store.put_groups(groups, self.buffer.live_groups)
        self.store.put_episodes(episodes, moved_episodes)

        if episodes or moved_episodes:  # without changed episodes no attempt was given up
            self.store.put_meta(ABANDONED_KEY, str(self.buffer.abandoned_tokens))
            self.store.put_meta(REASONS_KEY, msgspec.json.encode(self.buffer.reasons).decode())

        self.store.put_batches(self.batches.pop_changes())
        self.held_out.put_changes()

        for episode in (*episodes, *moved_episodes):
            if episode.state in FINAL_STATES and episode.state is not State.TRAINED:
                self.store.release_frames(episode.uid)

        self.store.commit()
        self.outbox.flush()
        self.store.copies.start_copy(self.buffer.state_counts())

    def read_turns(self, episode: EpisodeRecord) -> list[bytes]:
        """Read the payloads of an episode's turns, without replies; [] if a payload cannot be read.

        Payloads were checked on arrival. Decoding them again would take most of the time of a plan.
        """
        try:
            turn_payloads = list(self.store.reader.turn_frames(episode.uid, episode.turns, ("generated",)))
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
        stored = self.store.reader.turn_frames(episode.uid, episode.turns)
        try:
            for payload, replied in zip(stored, stored, strict=True):
                turns.append(decode_turn(payload))
                frames += payload, replied
        except (StoreError, ProtocolError) as error:
            log.error("episode %s: %d of %d turns can be read: %s", uid, len(turns), episode.turns, error)
            if uid in self.held_out.episodes:
                episode.forget_turns()
                self.held_out.mark_changed(episode)
                self.store.forget_frames(uid)
                return []
            if episode.state in UNTAKEN_STATES:
                cut_back(self.buffer, episode, turns)
                self.store.forget_frames(uid, len(turns))

        return frames

    def read_parts(self, episode: EpisodeRecord) -> list[bytes]:
        """Return the parts of turns that no attempt has ended. Unreadable turns are forgotten."""
        frames: list[bytes] = []

        for session, turn in list(episode.open.items()):
            kinds = [part_kind(number) for number in range(turn.parts)]
            try:
                frames += list(self.store.reader.turn_frames(episode.uid, session + 1, kinds, session))
            except StoreError as error:
                log.error("episode %s: a turn that was under way begins anew: %s", episode.uid, error)
                del episode.open[session]

        return frames

    def cut_back_unreadable(self) -> None:
        """Cut back untaken episodes whose payloads were lost by a power cut or a bad sector.

        Called after a start, before anything is planned.
        """
        for episode in [e for e in self.buffer.episodes.values() if e.turns and e.state in UNTAKEN_STATES]:
            self.read_frames(episode)

    def roll_back(self) -> None:
        """Forget all uncommitted changes, and read the state from the store again, as far as possible."""
        self.outbox.clear()
        self.store.rollback()
        try:
            self.failed_attempts = FailedAttempts.load_from(self.store)
            self.memory_limits = MemoryLimits.load_from(
                self.store.reader, self.config.trainer.micro_batch_tokens
            )
            restore_from_store(self.config, self.store, self.buffer, self.batches)
            self.held_out.restore_episodes()
        except StoreError as error:
            log.error("%s", error)
            self.damage = str(error)


def load_state(config: RunConfig, run_dir: Path, store: RunStore, outbox: TransactionalOutbox) -> RunState:
    """Return the state of a run, restored from the store, or a new state if the store is empty."""
    samples = Samples.open(samples_path(run_dir, "train"))
    check_same_data(samples, store.reader.meta("data"))
    store.put_meta("data", samples.fingerprint)

    sample_order = EpochOrder(samples, config.data, config.seed, samples_path(run_dir, "train").parent)
    buffer = _new_buffer(config, Prompts(len(samples), sample_order, config.data.epochs))
    trainer = config.trainer
    flush = config.data.at_end == "flush"
    batches = Batches(buffer, trainer.micro_batch_tokens, flush, trainer.packing)
    restore_from_store(config, store, buffer, batches)

    if not store.reader.meta(MODEL_KEY):
        store.put_meta(MODEL_KEY, json.dumps(model_identity(config.model.path)))

    ref = msgspec.json.decode(store.reader.meta("version", "null"), type=WeightsRef | None)
    version = ref.version if ref else NO_VERSION

    return RunState(
        config=config,
        run_dir=run_dir,
        samples=samples,
        buffer=buffer,
        batches=batches,
        versions=VersionLedger(version, ref if ref and Path(ref.path).is_dir() else None),
        store=store,
        outbox=outbox,
        coordinator_epoch=store.epoch,
        trainer_epoch=int(store.reader.meta("trainer_epoch", "0")),
    )


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


def _new_buffer(config: RunConfig, prompts: Prompts) -> ReplayBuffer:
    buffer_config = config.buffer
    advantage_inputs = configured_advantage(config)
    return ReplayBuffer(
        buffer_config,
        prompts,
        total_groups=config.total_steps * buffer_config.groups_per_batch,
        retries=config.rollout.retries,
        group_bytes=config.group_bytes
        + advantage_inputs.greedy * config.group_bytes // buffer_config.episodes_per_group,
        greedy=advantage_inputs.greedy,
        compared=ComparedParts(turns=advantage_inputs.turns, components=advantage_inputs.components),
        publish_every=config.weights.every,
    )


# -- the journal -------------------------------------------------------------------------------------------


CONTACT_INTERVAL = 0.5


class Journal:
    """Commits each pass of the loop, and waits while the store cannot be written.

    Args:
        keep_contact: called from time to time during a pause with the reason, as peers must not give the
            coordinator up.
    """

    def __init__(self, state: RunState, keep_contact: Callable[[str], None]) -> None:
        self._state = state
        self._keep_contact = keep_contact
        self._paused_at: float | None = None
        self._next_contact_at = 0.0

    @property
    def paused(self) -> bool:
        """True while the last pass is not written."""
        return self._paused_at is not None

    def commit_pass(self, now: float) -> bool:
        """Return True once the pass is durable and its messages are sent. Until then no other pass may begin.

        Raises StoreError after launch.stall_timeout.
        """
        try:
            self._state.persist()
        except StorePaused as error:
            self._note_pause(error, now)
            return False

        if self._paused_at is not None:
            log.info("the run store can be written again, after %.1f s", now - self._paused_at)
            self._paused_at = None
            self._state.liveness.note_progress(now)

        return True

    def _note_pause(self, error: StorePaused, now: float) -> None:
        if self._paused_at is None:
            self._paused_at = now
            log.error("%s", error)

        stall_timeout = self._state.config.launch.stall_timeout
        if now - self._paused_at > stall_timeout:
            raise StoreError(f"not written within {stall_timeout:g} s: {error}")

        if now >= self._next_contact_at:
            self._next_contact_at = now + CONTACT_INTERVAL
            self._keep_contact(str(error))
