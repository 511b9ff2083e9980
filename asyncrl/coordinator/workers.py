"""The coordinator's side of the rollout workers.

consumes: hellos, heartbeats, loads (control); their records are `records.py`'s
waits for: a lease to run out, an engine to confirm a version
unblocks: workers (assignments, the clock)
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from asyncrl.buffer.records import LOSSES, NEVER, EpisodeRecord, State
from asyncrl.buffer.staleness import pending
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.peers import Peers
from asyncrl.coordinator.state import RunState
from asyncrl.observe.files import cause_of_death
from asyncrl.observe.transcripts import is_kept
from asyncrl.types import FailReason, PolicyVersion, Sample
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Assign, Cancel, Clock, Fenced, Heartbeat, WorkerHello

MOST_ASSIGNED = 128  # episodes per turn of the loop: messages must not wait until thousands are assigned

W = TypeVar("W")


@dataclass
class WorkerRecord:
    """Holds a connected rollout worker."""

    peer: bytes
    name: str
    hello: WorkerHello
    seen: float
    seq: int  # highest bulk record processed
    running: dict[str, tuple[int, float]] = field(default_factory=dict)  # uid -> (assign seq, sent at)
    beat: Heartbeat | None = None
    beat_at: float = 0.0
    eval_version: PolicyVersion | None = None
    eval_asked: float = 0.0  # when its eval lane was last sent a version
    leaving: bool = False  # told to end: what the worker gives up is no loss

    @property
    def free(self) -> int:
        return 0 if self.leaving else max(0, self.hello.slots - len(self.running))


class WorkerHandler:
    """Handles leases and assignments, of episodes to be trained and of a validation alike."""

    def __init__(self, state: RunState, engines: EngineHandler) -> None:
        self.state = state
        self.engines = engines
        self.peers = Peers(state, "rollout", state.config.rollout.workers, self._lost)
        self.assign_seq = state.coordinator_epoch << 32  # grows across restarts of the coordinator
        self.more = False  # the last tick left episodes that may be assigned now

        self._restored: defaultdict[str, list[EpisodeRecord]] = defaultdict(list)  # that ran, by incarnation
        for episode in state.all_episodes:
            if episode.state is State.RUNNING:
                self._restored[episode.worker].append(episode)

    # -- control -------------------------------------------------------------------------------------

    def hello(self, peer: bytes, message: WorkerHello, now: float) -> None:
        """A worker reports in, for the first time or again. Both are handled alike: its state is absolute."""
        if self.peers.hello(peer, message, now, lambda: self._join(peer, message, now)) is not None:
            self.state.welcome(peer)
            self.state.outbox.to_control(peer, self._clock())
            self.engines.worker_here(peer, message.version, now)

    def _join(self, peer: bytes, message: WorkerHello, now: float) -> WorkerRecord:
        """Episodes a restarted coordinator finds assigned to this very process go on."""
        worker = WorkerRecord(peer, f"worker {message.index}", message, now, message.acked)
        for episode in self._restored.pop(message.incarnation, []):
            if episode.worker == message.incarnation and episode.state is State.RUNNING:
                worker.running[episode.uid] = (episode.assign_seq, now)

        if not self.engines.remote:
            self.engines.join(peer, worker.name)
        return worker

    def heartbeat(self, peer: bytes, message: Heartbeat, now: float) -> None:
        worker = self.peers.get(peer)
        if worker is None:
            return  # it will say hello

        worker.leaving = worker.leaving or message.leaving
        if message.in_time or message.tokens > (worker.beat.tokens if worker.beat else 0):
            self.state.liveness.alive(now)

        held = {attempt.uid for attempt in message.held}
        for uid, (seq, sent) in [item for item in worker.running.items() if item[0] not in held]:
            arrived = seq <= message.assigned
            overdue = worker.beat_at - sent > self.state.config.launch.lease  # when it last ran
            if arrived or overdue:
                self._lose_episode(worker, uid, "", now)

        self.engines.add_use(worker.beat.engines if worker.beat else (), message.engines)
        worker.beat = message
        worker.beat_at = now
        worker.seq = max(worker.seq, message.acked)  # acks may have overtaken its hello on the other channel

        flow_of = self.state.flow_of
        name = worker.hello.incarnation
        for attempt in message.held:  # in a large run 100,000 a second
            episode = flow_of(attempt.uid).episodes.get(attempt.uid)
            if episode is None or episode.attempt != attempt.attempt or episode.worker != name:
                # it was given to another worker, or given up, while this one was silent
                self.state.outbox.to_control(peer, Cancel(attempt))

    def note_leaving(self, peer: bytes) -> None:
        """The worker, if it is one, was told to end, by a signal: it is about to."""
        if (worker := self.peers.get(peer)) is not None:
            worker.leaving = True

    def clock(self) -> None:
        """Send all workers the oldest version a turn may start on."""
        for worker in self.peers:
            self.state.outbox.to_control(worker.peer, self._clock())

    def _clock(self) -> Clock:
        return Clock(max(0, self.state.batches.committed - self.state.buffer.fresh))

    # -- losing --------------------------------------------------------------------------------------

    def extend_leases(self, now: float, gap: float) -> None:
        self.peers.extend(now, gap)
        for worker in self.peers:
            worker.running = {uid: (seq, now) for uid, (seq, _) in worker.running.items()}

    def tick(self, now: float) -> None:
        """Remove silent workers, assign."""
        self.peers.tick(now)
        self.engines.send_table([worker.peer for worker in self.peers], now)
        self._assign(now)

    def _lost(self, worker: WorkerRecord, why: str, now: float) -> None:
        """Its episodes go on elsewhere, from their last durable turns."""
        index = worker.hello.index
        step = self.state.batches.committed + 1
        log_file = self.state.run_dir / "logs" / f"rollout-{index}.log"
        said = cause_of_death(log_file, worker.hello.incarnation, crashed=False)
        cause = f"{worker.name} in step {step} ({why})" + f": {said}" * bool(said)

        for uid in list(worker.running):
            self._lose_episode(worker, uid, cause, now)
        self.engines.leave(worker.peer)

    def reissue_orphans(self, now: float) -> None:
        """Issue the episodes again whose worker is not connected (after a restart of the coordinator)."""
        here = {worker.hello.incarnation for worker in self.peers}
        for episode in self.state.all_episodes:
            if episode.state is State.RUNNING and episode.worker not in here:
                self._reissue(episode, FailReason.WORKER_LOST, now)  # a stop of the run is no failed attempt

    def _lose_episode(self, worker: WorkerRecord, uid: str, cause: str, now: float) -> None:
        if worker.running.pop(uid, None) is None:
            return  # its group was dropped with one that was lost just before

        episode = self.state.flow_of(uid).episodes.get(uid)
        if episode is None or episode.worker != worker.hello.incarnation or episode.state != "running":
            return

        if worker.leaving:
            self._reissue(episode, FailReason.WORKER_LOST, now)
        else:
            self.fail(episode, FailReason.WORKER_LOST, cause, now)

    def give_up(
        self, worker: WorkerRecord, episode: EpisodeRecord, reason: FailReason, detail: str, now: float
    ) -> None:
        worker.running.pop(episode.uid, None)
        self.state.outbox.to_bulk(worker.peer, Fenced(Attempt(episode.uid, episode.attempt)))
        self.fail(episode, reason, detail, now)

    def fail(self, episode: EpisodeRecord, reason: FailReason, detail: str, now: float) -> None:
        """An attempt failed; `detail` is the cause in a line, where it is known. One that is lost as the run
        stops is only issued again."""
        if self.state.stopping and reason in LOSSES:
            self._reissue(episode, reason, now)
            return

        if episode.uid in self.state.held_out.episodes:
            self.state.held_out.causes[episode.uid] = detail
        else:
            self.state.failed.add(reason, detail, self.state.store)
            sample = self.state.buffer.live[episode.group].sample
            self.state.first_attempts.fail(episode.assign_seq, sample, reason)

        self._reissue(episode, reason, now)

    def _reissue(self, episode: EpisodeRecord, reason: FailReason, now: float) -> None:
        """Issue it again, or give it up."""
        flow = self.state.flow_of(episode.uid)
        self.cancel(flow.fail(episode, reason, self.state.engine_time(now)))
        if not episode.turns and not episode.open:
            self.state.store.forget_frames(episode.uid)

    def cancel(self, episodes: list[EpisodeRecord]) -> None:
        """Let the workers stop these running episodes."""
        here = {worker.hello.incarnation: worker for worker in self.peers} if episodes else {}
        for episode in episodes:
            worker = here.get(episode.worker)
            if worker is not None and worker.running.pop(episode.uid, None) is not None:
                self.state.outbox.to_control(worker.peer, Cancel(Attempt(episode.uid, episode.attempt)))

    # -- assigning ----------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        return sum(worker.free for worker in self.peers if not self.engines.quarantined(worker.peer))

    @property
    def total_slots(self) -> int:
        return sum(worker.hello.slots for worker in self.peers)

    def _assign(self, now: float) -> None:
        """Give pending episodes, oldest first, to the least loaded worker whose weights are fresh enough; at
        most MOST_ASSIGNED."""
        state = self.state
        self.more = False
        if not state.buffer.waiting:
            return

        if lacks := self.engines.lacks:
            if self.free_slots:
                state.waits.append(f"new episodes wait for {lacks}")
            return

        usable = (worker for worker in self.peers if not self.engines.quarantined(worker.peer))
        steps = self.engines.steps()
        unmet = NEVER
        left = MOST_ASSIGNED
        slots = FreeSlots((worker, worker.free, steps(worker.peer)) for worker in usable)
        in_order = state.config.buffer.on_stale != "hold"  # later ones need no older weights

        for needed, episode in pending(state.buffer):
            self.more = left == 0
            if self.more or not slots:
                return

            if needed >= unmet:
                if in_order:
                    return
                continue

            if (found := slots.take(needed)) is None:
                unmet = needed
                held = [held.acked.step for held in state.versions.engines.values()]
                acked = f"{sum(step >= needed for step in held)} of {len(held)} engines acked"
                state.waits.append(f"new episodes wait for weights v{max(0, needed)}: {acked}")
                continue

            (worker, oldest), group = found, state.buffer.live[episode.group]
            kept = is_kept(group.id, episode.member, state.config.buffer.groups_per_batch)
            self.give(worker, episode, state.samples[group.sample], oldest, kept, now)
            left -= 1

    def admit(self, now: float) -> None:
        """Admit groups, as far as their episodes can be assigned in this turn of the loop."""
        buffer = self.state.buffer
        batches = self.state.batches
        if buffer.has_room:
            free = self.free_slots - buffer.waiting
            total = self.total_slots
            while buffer.waiting < MOST_ASSIGNED and buffer.can_admit(free, total):
                free -= len(buffer.admit(batches.committed, self.state.engine_time(now)).members)

        if buffer.prompts.over and self.state.config.data.at_end == "drop":
            self.cancel(batches.drop_remainder())

    def give(
        self,
        worker: WorkerRecord,
        episode: EpisodeRecord,
        sample: Sample,
        oldest: int,
        kept: bool,
        now: float,
    ) -> None:
        """Assign an episode to a worker, with its durable turns. `kept`: its text is wanted."""
        frames = self.state.readable(episode)
        flow = self.state.flow_of(episode.uid)
        parts = self.state.parts(episode)

        self.assign_seq += 1
        started = self.state.engine_time(now)
        flow.assign(episode, worker.hello.incarnation, self.assign_seq, oldest, started)

        trained = flow is self.state.buffer
        if not episode.member:
            self.state.store.put_question(episode.group if trained else -1 - episode.group, sample)

        # A held-out episode that goes on samples what it would have: an evaluation that is killed ends alike.
        drawn = episode.attempt if trained else episode.failures
        worker.running[episode.uid] = (self.assign_seq, now)

        message = Assign(
            seq=self.assign_seq,
            attempt=Attempt(episode.uid, episode.attempt),
            sample=sample,
            lane="train" if trained else "eval",
            temperature=0.0 if episode.greedy else self.state.config.rollout.temperature,
            key=sampling_key(self.state.config.seed, episode.uid, drawn),
            transcript=kept,
            oldest=oldest,
            seconds=episode.seconds,
            parts=len(parts),
        )

        self.state.outbox.to_control(worker.peer, message, frames + parts)


def sampling_key(seed: int, uid: str, attempt: int) -> int:
    """Key of the counter RNG: what is sampled depends on (seed, uid, attempt, position) and the weights."""
    digest = hashlib.blake2b(f"{seed}/{uid}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class FreeSlots(Generic[W]):
    """The free slots of the workers in one turn of the loop.

    Args:
        workers: each with the number of its free slots, and the policy versions that it can sample with,
            ascending: those of all servers, or that of its own engine.

    The cost of a `take` grows with the logarithm of the number of workers, and with the number of different
    newest versions.
    """

    def __init__(self, workers: Iterable[tuple[W, int, Sequence[int]]]) -> None:
        self._heaps: defaultdict[int, list[tuple[int, int, W, Sequence[int]]]] = defaultdict(list)
        for number, (worker, free, versions) in enumerate(workers):
            if free > 0 and versions:
                self._heaps[versions[-1]].append((-free, number, worker, versions))

        for heap in self._heaps.values():
            heapq.heapify(heap)

    def __bool__(self) -> bool:
        return any(self._heaps.values())

    def take(self, needed: int) -> tuple[W, int] | None:
        """Take a slot of the worker with the most free ones that has a version not older than `needed`.
        Returns the worker and the oldest such version that it has; None: there is none."""
        fit = [heap for newest, heap in self._heaps.items() if newest >= needed and heap]
        if not fit:
            return None

        heap = min(fit)
        free, number, worker, versions = heap[0]
        if free < -1:
            heapq.heapreplace(heap, (free + 1, number, worker, versions))
        else:
            heapq.heappop(heap)

        return worker, versions[bisect_left(versions, needed)]
