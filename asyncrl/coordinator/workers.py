"""The coordinator's side of the rollout workers: leases, admission and assignment of episodes.

consumes: hellos, heartbeats, loads (control); records.py consumes the workers' records
waits for: a lease to run out, an engine to confirm a version
unblocks: workers (assignments, `MinVersion`)
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from asyncrl.buffer.records import LOSSES, NEVER_STALE, EpisodeRecord, State
from asyncrl.buffer.staleness import assignable_episodes
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.peers import Peers
from asyncrl.coordinator.state import RunState
from asyncrl.observe.files import cause_of_death
from asyncrl.observe.transcripts import is_kept
from asyncrl.types import FailReason, PolicyVersion, Sample
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Assign, Cancel, Fenced, MinVersion, WorkerHeartbeat, WorkerHello

MAX_ASSIGNED = 128  # episodes assigned in a pass of the loop, as messages must not wait for thousands


@dataclass
class WorkerRecord:
    """A connected rollout worker."""

    peer: bytes
    name: str
    hello: WorkerHello
    seen: float
    last_record: int  # highest number of a processed bulk record
    running: dict[str, tuple[int, float]] = field(default_factory=dict)  # uid -> (assign seq, sent at)
    heartbeat: WorkerHeartbeat | None = None
    heartbeat_at: float = 0.0
    eval_version: PolicyVersion | None = None
    eval_requested_at: float = 0.0  # time at which the eval lane was last sent a version
    leaving: bool = False  # told to end: episodes that the worker gives up are no loss

    @property
    def free_slots(self) -> int:
        return 0 if self.leaving else max(0, self.hello.slots - len(self.running))


class WorkerHandler:
    """Handles leases and assignments of training episodes and of held-out episodes."""

    def __init__(self, state: RunState, engines: EngineHandler) -> None:
        self.config = state.config
        self.run_dir = state.run_dir
        self.ledger = state.ledger
        self.buffer = state.ledger.buffer
        self.fleet = state.fleet
        self.store = state.journal.store
        self.outbox = state.journal.outbox
        self._send_welcome = state.send_welcome
        self.engines = engines
        self.peers = Peers(state, "rollout", state.config.rollout.workers, self._on_lost)
        self.reprefilled_tokens = 0  # by embedded engines of all workers, see WorkerHeartbeat
        self.assign_seq = self.store.epoch << 32  # grows across restarts of the coordinator
        self.work_left = False  # the last pass left episodes that can be assigned

        # Running episodes of the store, by worker incarnation.
        self._restored_episodes: defaultdict[str, list[EpisodeRecord]] = defaultdict(list)
        for episode in state.ledger.all_episodes:
            if episode.state is State.RUNNING:
                self._restored_episodes[episode.worker].append(episode)

    # -- control -------------------------------------------------------------------------------------

    def welcome_worker(self, peer: bytes, message: WorkerHello, now: float) -> None:
        """Handle the hello of a worker, first or repeated: each hello has the whole state."""
        new_worker = WorkerRecord(peer, f"worker {message.index}", message, now, message.acked)
        worker = self.peers.accept_hello(new_worker, now)
        if worker is None:
            return

        if worker is new_worker:
            # If only the coordinator was restarted, the worker still runs its episodes.
            for episode in self._restored_episodes.pop(message.incarnation, []):
                if episode.worker == message.incarnation and episode.state is State.RUNNING:
                    worker.running[episode.uid] = (episode.assign_seq, now)
            if not self.engines.remote:
                self.engines.add_engine(peer, worker.name)

        self._send_welcome(peer)
        self.outbox.to_control(peer, self._min_version_message())
        self.engines.resend_to_worker(peer, message.version, now)

    def note_heartbeat(self, peer: bytes, message: WorkerHeartbeat, now: float) -> None:
        worker = self.peers.get(peer)
        if worker is None:
            return  # the worker will say hello

        worker.leaving = worker.leaving or message.leaving
        if message.in_time or message.tokens > (worker.heartbeat.tokens if worker.heartbeat else 0):
            self.fleet.liveness.note_alive(now)

        held_uids = {attempt.uid for attempt in message.held}
        for uid, (assign_seq, sent_at) in [
            item for item in worker.running.items() if item[0] not in held_uids
        ]:
            has_arrived = assign_seq <= message.assigned
            overdue = worker.heartbeat_at - sent_at > self.config.launch.lease  # by the last heartbeat
            if has_arrived or overdue:
                self._lose_episode(worker, uid, "", now)

        self.engines.add_use(worker.heartbeat.engines if worker.heartbeat else (), message.engines)
        reported_tokens = worker.heartbeat.reprefilled_tokens if worker.heartbeat else 0
        self.reprefilled_tokens += message.reprefilled_tokens - reported_tokens
        worker.heartbeat = message
        worker.heartbeat_at = now
        # Acks may have overtaken the hello on the other channel.
        worker.last_record = max(worker.last_record, message.acked)

        owner_of = self.ledger.owner_of
        incarnation = worker.hello.incarnation
        for attempt in message.held:  # 100,000 a second in a large run
            episode = owner_of(attempt.uid).episodes.get(attempt.uid)
            if episode is None or episode.attempt != attempt.attempt or episode.worker != incarnation:
                # The episode was reassigned or given up while the worker was silent.
                self.outbox.to_control(peer, Cancel(attempt))

    def note_leaving(self, peer: bytes) -> None:
        """Note that a worker is about to end by a signal. Other peers are ignored."""
        if (worker := self.peers.get(peer)) is not None:
            worker.leaving = True

    def send_min_version(self) -> None:
        """Send all workers the oldest version that a turn may start on."""
        for worker in self.peers:
            self.outbox.to_control(worker.peer, self._min_version_message())

    def _min_version_message(self) -> MinVersion:
        return MinVersion(max(0, self.ledger.batches.committed - self.buffer.max_start_staleness))

    # -- losing --------------------------------------------------------------------------------------

    def extend_leases(self, now: float, gap: float) -> None:
        self.peers.extend_leases(now, gap)
        for worker in self.peers:
            worker.running = {uid: (seq, now) for uid, (seq, _) in worker.running.items()}

    def _on_lost(self, worker: WorkerRecord, reason: str, now: float) -> None:
        """Issue the episodes of a lost worker again."""
        log_file = self.run_dir / "logs" / f"rollout-{worker.hello.index}.log"
        cause = f"{worker.name} in step {self.buffer.current_step} ({reason})"
        if last_output := cause_of_death(log_file, worker.hello.incarnation, crashed=False):
            cause += f": {last_output}"

        self.lose_episodes(worker, cause, now)
        self.engines.remove_engine(worker.peer)

    def lose_episodes(self, worker: WorkerRecord, cause: str, now: float) -> None:
        """Issue all episodes of a worker again, from their last durable turns."""
        for uid in list(worker.running):
            self._lose_episode(worker, uid, cause, now)

    def reissue_orphans(self, now: float) -> None:
        """Issue episodes again whose worker is not connected, after a restart of the coordinator."""
        connected_workers = {worker.hello.incarnation for worker in self.peers}
        for episode in self.ledger.all_episodes:
            if episode.state is State.RUNNING and episode.worker not in connected_workers:
                # A stop of the run is no failed attempt.
                self._reissue_episode(episode, FailReason.WORKER_LOST, now)

    def _lose_episode(self, worker: WorkerRecord, uid: str, cause: str, now: float) -> None:
        if worker.running.pop(uid, None) is None:
            return  # the group was dropped with an episode that was lost just before

        episode = self.ledger.owner_of(uid).episodes.get(uid)
        if episode is None or episode.worker != worker.hello.incarnation or episode.state != "running":
            return

        if worker.leaving:
            self._reissue_episode(episode, FailReason.WORKER_LOST, now)
        else:
            self.fail_episode(episode, FailReason.WORKER_LOST, cause, now)

    def give_up_attempt(
        self, worker: WorkerRecord, episode: EpisodeRecord, reason: FailReason, detail: str, now: float
    ) -> None:
        worker.running.pop(episode.uid, None)
        self.outbox.to_bulk(worker.peer, Fenced(Attempt(episode.uid, episode.attempt)))
        self.fail_episode(episode, reason, detail, now)

    def fail_episode(self, episode: EpisodeRecord, reason: FailReason, detail: str, now: float) -> None:
        """Handle a failed attempt. `detail` is the cause in a line, if known.

        An attempt that is lost while the run stops is only issued again.
        """
        if self.fleet.stopping and reason in LOSSES:
            self._reissue_episode(episode, reason, now)
            return

        if episode.uid in self.ledger.held_out.episodes:
            self.ledger.held_out.causes[episode.uid] = detail
        else:
            self.ledger.failed_attempts.add_failure(reason, detail, self.store)
            sample = self.buffer.live_groups[episode.group].sample
            self.ledger.first_attempts.note_failure(episode.assign_seq, sample, reason)

        self._reissue_episode(episode, reason, now)

    def _reissue_episode(self, episode: EpisodeRecord, reason: FailReason, now: float) -> None:
        """Issue an episode again, or give the episode up."""
        owner = self.ledger.owner_of(episode.uid)
        self.cancel_episodes(owner.fail_attempt(episode, reason, self.fleet.engine_time(now)))
        if not episode.turns and not episode.open:
            self.store.forget_frames(episode.uid)

    def cancel_episodes(self, episodes: list[EpisodeRecord]) -> None:
        """Tell the workers to stop these running episodes."""
        connected_workers = {worker.hello.incarnation: worker for worker in self.peers} if episodes else {}
        for episode in episodes:
            worker = connected_workers.get(episode.worker)
            if worker is not None and worker.running.pop(episode.uid, None) is not None:
                self.outbox.to_control(worker.peer, Cancel(Attempt(episode.uid, episode.attempt)))

    # -- assigning ----------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        return sum(worker.free_slots for worker in self.peers if not self.engines.quarantined(worker.peer))

    def assign_pending(self, now: float) -> None:
        """Assign pending episodes, oldest first, to the least loaded worker with weights that are new enough.

        First, silent workers are removed, and all workers get the table of servers. At most MAX_ASSIGNED
        episodes are assigned; `work_left` is True if a further episode is waiting then.
        """
        self.peers.remove_silent(now)
        self.engines.send_table([worker.peer for worker in self.peers], now)

        self.work_left = False
        if not self.buffer.waiting_count:
            return

        if missing_server := self.engines.missing_server:
            if self.free_slots:
                self.fleet.waits.append(f"new episodes wait for {missing_server}")
            return

        usable_versions = self.engines.usable_versions(worker.peer for worker in self.peers)
        workers = [
            worker
            for worker in self.peers
            if usable_versions[worker.peer] and not self.engines.quarantined(worker.peer)
        ]
        slots_left = sum(worker.free_slots for worker in workers)
        assignments_left = MAX_ASSIGNED
        in_order = self.config.buffer.on_stale != "hold"  # later episodes never need older weights
        unmet_version = NEVER_STALE

        # A heap of the workers that have free slots and `heap_version` or a newer version, most free slots
        # first. Of 512 workers a heap takes 0.3 ms; looking at each worker for each episode, 5 ms of a pass.
        heap: list[tuple[int, int, WorkerRecord]] = []
        heap_version = NEVER_STALE

        for min_version, episode in assignable_episodes(self.buffer):
            self.work_left = assignments_left == 0
            if self.work_left or slots_left == 0:
                return
            if min_version >= unmet_version:
                if in_order:
                    return
                continue

            if min_version != heap_version:
                heap_version = min_version
                heap = [
                    (-worker.free_slots, number, worker)
                    for number, worker in enumerate(workers)
                    if worker.free_slots and usable_versions[worker.peer][-1] >= min_version
                ]
                heapq.heapify(heap)

            if not heap:
                unmet_version = min_version
                acked_steps = [engine.acked.step for engine in self.fleet.versions.engines.values()]
                acked_count = sum(step >= min_version for step in acked_steps)
                self.fleet.waits.append(
                    f"new episodes wait for weights v{max(0, min_version)}, "
                    f"acknowledged by {acked_count} of {len(acked_steps)} engines"
                )
                continue

            # The episode may start on the oldest version that is new enough.
            _, number, worker = heap[0]
            versions = usable_versions[worker.peer]
            oldest_usable = versions[bisect_left(versions, min_version)]
            group = self.buffer.live_groups[episode.group]
            is_transcribed = is_kept(group.id, episode.member, self.config.buffer.groups_per_batch)
            self.give_episode(
                worker, episode, self.ledger.samples[group.sample], oldest_usable, is_transcribed, now
            )

            assignments_left -= 1
            slots_left -= 1
            if worker.free_slots:
                heapq.heapreplace(heap, (-worker.free_slots, number, worker))
            else:
                heapq.heappop(heap)

    def admit_groups(self, now: float) -> None:
        """Admit groups whose episodes can be assigned in this pass of the loop."""
        buffer = self.buffer
        batches = self.ledger.batches
        if buffer.has_room:
            free_slots = self.free_slots - buffer.waiting_count
            total_slots = sum(worker.hello.slots for worker in self.peers)
            while buffer.waiting_count < MAX_ASSIGNED and buffer.can_admit(free_slots, total_slots):
                free_slots -= len(buffer.admit_group(self.fleet.engine_time(now)).members)

        if buffer.prompts.over and self.config.data.at_end == "drop":
            self.cancel_episodes(batches.drop_remainder())

    def give_episode(
        self,
        worker: WorkerRecord,
        episode: EpisodeRecord,
        sample: Sample,
        min_version: int,
        is_transcribed: bool,
        now: float,
    ) -> None:
        """Assign an episode to a worker, with its durable turns.

        `is_transcribed`: the text is to be stored.
        """
        frames = self.ledger.read_frames(episode)
        owner = self.ledger.owner_of(episode.uid)
        parts = self.ledger.read_turn_parts(episode)

        self.assign_seq += 1
        engine_time = self.fleet.engine_time(now)
        owner.assign(episode, worker.hello.incarnation, self.assign_seq, min_version, engine_time)

        is_training = owner is self.buffer
        if not episode.member:
            self.store.put_question(episode.group if is_training else -1 - episode.group, sample)

        # A held-out episode that is continued samples the same tokens, so an evaluation that was killed ends
        # with the same result.
        draw_number = episode.attempt if is_training else episode.failures
        worker.running[episode.uid] = (self.assign_seq, now)

        message = Assign(
            seq=self.assign_seq,
            attempt=Attempt(episode.uid, episode.attempt),
            sample=sample,
            lane="train" if is_training else "eval",
            temperature=0.0 if episode.greedy else self.config.rollout.temperature,
            key=sampling_key(self.config.seed, episode.uid, draw_number),
            transcript=is_transcribed,
            min_version=min_version,
            seconds=episode.seconds,
            parts=len(parts),
        )

        self.outbox.to_control(worker.peer, message, frames + parts)


def sampling_key(seed: int, uid: str, attempt: int) -> int:
    """Return the key of the counter RNG: samples depend on (seed, uid, attempt, position) and the weights."""
    digest = hashlib.blake2b(f"{seed}/{uid}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
