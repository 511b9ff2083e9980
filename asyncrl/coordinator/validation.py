"""Validation: held-out episodes at one pinned version, in their own ledger beside the training flow.

An embedded engine has a second one for it in each worker; of several servers one is set aside. With a single
server the weights go on changing, and the versions that sampled are reported.

consumes: validation episodes' records, from the worker handler
waits for: a share of the slots, engines that hold the pinned version; with a deadline
unblocks: the end of the run (the last validation)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from asyncrl.coordinator import transcripts
from asyncrl.coordinator.engines import LOAD_RETRY, EngineHandler
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.workers import WorkerHandler, WorkerRecord, sampling_key
from asyncrl.observe.held_out import (
    GREEDY,
    SAMPLED,
    SCORED,
    HeldOut,
    Judged,
    answer_of,
    losses,
    means,
    per_sample,
    sizes,
    succeeds,
    uid_prefix,
)
from asyncrl.observe.metrics import HIGHEST
from asyncrl.types import Sample
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsError, WeightsRef
from asyncrl.wire.messages.shared import Attempt, Loaded
from asyncrl.wire.messages.worker_bulk import Failed, Finished, Generated, Record, Replied
from asyncrl.wire.messages.worker_control import Assign, Cancel

MID_RUN_SHARE = 0.5  # of a worker's slots
NOTHING = "null"  # is under way, but something has been


class SessionStart(msgspec.Struct, frozen=True):
    """What is kept in the store of a session under way, beside the episodes that are over. `final`: at the
    start or the end of training. `settings`: under which it samples. `versions`: that sampled so far."""

    step: int
    final: bool
    ref: WeightsRef
    settings: str = ""
    versions: tuple[int, ...] = ()

    def goes_on(self, other: SessionStart) -> bool:
        """The episodes of `other` are as good as its own: of the same weights, under the same settings. Those
        of step 0 are the model's own, whoever has published them."""
        same = self.ref.version == other.ref.version or self.step == 0
        return same and (self.step, self.settings) == (other.step, other.settings)


class Given(NamedTuple):
    """An episode that a worker was sent, with Assign.seq, at that time."""

    worker: WorkerRecord
    seq: int
    at: float


@dataclass
class ValidationSession:
    """One validation. `start`: as it is stored."""

    start: SessionStart
    queue: list[str]
    deadline: float
    running: dict[str, Given] = field(default_factory=dict)  # by uid
    attempts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    scores: dict[str, Finished] = field(default_factory=dict)  # without texts, which are in the store
    fresh: dict[str, str] = field(default_factory=dict)  # texts of this turn, which are not yet
    failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # why, each time
    failed: list[str] = field(default_factory=list)  # given up

    @property
    def step(self) -> int:
        return self.start.step

    @property
    def ref(self) -> WeightsRef:
        return self.start.ref


class Validation:
    """Runs at most one session at a time. One that is not over by its deadline is abandoned and logged."""

    def __init__(
        self, state: RunState, workers: WorkerHandler, engines: EngineHandler, samples: Sequence[Sample]
    ) -> None:
        self.state, self.workers, self.engines, self.samples = state, workers, engines, samples
        self.session: ValidationSession | None = None
        self.results: list[tuple[int, dict[str, float]]] = []
        self._held = ExitStack()

    def begin(self, step: int, final: bool, now: float) -> bool:
        """Start validating the latest published version; False when there is none, or nothing to do."""
        ref, count = self.state.versions.ref, self._count
        if self.session is not None and count:
            log.warning(
                "validation of step %d left out: that of step %d is not over", step, self.session.step
            )
        if self.session is not None or ref is None or count == 0:
            return False
        return self._start(SessionStart(step, final, ref, self.state.config.held_out_settings), now)

    def resume(self, now: float, over: bool) -> None:
        """Begin again what was under way when the coordinator ended, or the first validation of a new run.
        `over`: training has ended, and the last validation is still to come."""
        stored, start = self.state.store.read.meta("validation"), self._stored()
        committed = self.state.batches.committed
        if not stored and committed == 0:
            self.begin(0, True, now)
        elif start is not None and not (over and start.step == committed):
            log.warning("the validation of step %d was cut short: it goes on", start.step)
            again = replace(start, settings=self.state.config.held_out_settings)
            if not self._start(again, now):
                self.begin(committed, start.final, now)

    def _stored(self) -> SessionStart | None:
        """What was under way when the coordinator ended."""
        stored = self.state.store.read.meta("validation", NOTHING)
        return msgspec.json.decode(stored, type=SessionStart | None)

    @property
    def _alone(self) -> bool:
        """Nothing is trained: everything that is sampled is kept, and there is no hurry."""
        return not self.state.config.total_steps

    @property
    def _transcribed(self) -> frozenset[int]:
        return frozenset(range(self._count)) if self._alone else transcripts.kept_questions(self._count)

    @property
    def _count(self) -> int:
        return min(self.state.config.validation.samples, len(self.samples))

    def _episodes(self, step: int, row: int) -> list[str]:
        if self.samples[row].demonstration:
            return [HeldOut(step, SCORED, row).uid]
        wanted = self.state.config.validation
        sampled = [HeldOut(step, SAMPLED, row, draw).uid for draw in range(wanted.episodes)]
        return sampled + [HeldOut(step, GREEDY, row).uid] * wanted.greedy

    def _start(self, start: SessionStart, now: float) -> bool:
        try:
            self._hold(start.ref)
        except WeightsError as error:
            log.warning("no validation of step %d: its weights are gone (%s)", start.step, error)
            return False
        start, scores = self._continued(start)
        queue = [uid for row in range(self._count) for uid in self._episodes(start.step, row)]
        queue = [uid for uid in reversed(queue) if uid not in scores]
        seconds = self.state.config.rollout.episode_timeout * (2 if start.final else 1)
        self.session = ValidationSession(start, queue, math.inf if self._alone else now + seconds)
        self.session.scores = scores
        self._held.enter_context(self.state.timeline.span("validation", step=start.step))
        self._keep(start)
        return True

    def _continued(self, start: SessionStart) -> tuple[SessionStart, dict[str, Finished]]:
        """With the episodes that are over of the same session before: they are not sampled again."""
        store, before = self.state.store, self._stored()
        if before is None or not before.goes_on(start):
            store.forget_held_out(uid_prefix(start.step))
            return replace(start, versions=()), {}
        decode = msgspec.msgpack.Decoder(Finished | Failed).decode
        kept = ((uid, decode(one)) for uid, one in store.read.held_out(uid_prefix(start.step)))
        scores = {uid: replace(one, text="") for uid, one in kept if isinstance(one, Finished)}
        return replace(start, versions=before.versions), scores

    def _keep(self, start: SessionStart | None) -> None:
        self.state.store.put_meta("validation", msgspec.json.encode(start).decode())

    def tick(self, now: float, exclusive: bool) -> None:
        """Assign what fits. `exclusive`: training has ended, and validation may use all slots."""
        session = self.session
        if session is None:
            return
        if not session.queue and not session.running:
            self._end(session)
            return
        if now > session.deadline:
            log.error("validation of step %d abandoned: not done by its deadline", session.step)
            self._end(session)
            return
        session.fresh.clear()
        remote = self.engines.remote
        pinned = remote and self._pinned(session, exclusive, now)
        for worker in self.workers.peers:
            if not (pinned if remote else self._loaded(session, worker, now)):
                continue
            share = 1.0 if exclusive else MID_RUN_SHARE
            while session.queue and worker.free and worker.eval_running < share * worker.hello.slots:
                self._assign(session, worker, now)
        self._recover(session)
        over = len(session.scores) + len(session.failed)
        total = over + len(session.queue) + len(session.running)
        self.state.waits.append(f"the validation of step {session.step}: {over} of {total} episodes are over")

    def record(self, worker: WorkerRecord, message: Record, frames: Sequence[bytes] = ()) -> None:
        """A record of a validation episode. Its turns are stored only where nothing is trained."""
        session, uid = self.session, message.attempt.uid
        if session is None or uid not in session.running:
            return
        if session.running[uid].worker is not worker or message.attempt.attempt != session.attempts[uid]:
            return
        if isinstance(message, Finished):
            session.scores[uid], session.fresh[uid] = replace(message, text=""), message.text
            self._store(uid, message)
        elif isinstance(message, Failed):
            log.warning("validation episode %s failed: %s (%s)", uid, message.reason, message.detail)
            session.failures[uid].append(f"{message.reason}: {message.detail}")
            self._retry(session, uid, message)
        else:
            self._turn(session, message, frames)
            return
        del session.running[uid]
        worker.eval_running -= 1

    def _turn(
        self, session: ValidationSession, message: Generated | Replied, frames: Sequence[bytes]
    ) -> None:
        """A turn of an episode under way, or what answered it."""
        sampled = isinstance(message, Generated)
        if isinstance(message, Generated) and message.model_tokens:
            seen = {*session.start.versions, message.oldest, message.newest}
            if len(seen) > len(session.start.versions):
                session.start = replace(session.start, versions=tuple(sorted(seen)))
                self._keep(session.start)
        for frame in frames if self._alone else ():
            kind = "generated" if sampled else "replied"
            self.state.store.put_frame(message.attempt.uid, message.turn, kind, frame)

    def _store(self, uid: str, over: Finished | Failed) -> None:
        self.state.store.put_held_out(uid, msgspec.msgpack.encode(over))

    def _retry(self, session: ValidationSession, uid: str, message: Failed) -> None:
        """An attempt failed: try again as often as in training."""
        if len(session.failures[uid]) > self.state.config.rollout.retries:
            session.failed.append(uid)
            self._store(uid, message)
        else:
            session.attempts[uid] += 1
            session.queue.append(uid)

    @property
    def busy(self) -> bool:
        return self.session is not None

    def is_current(self, attempt: Attempt) -> bool:
        """True for an attempt of the session under way."""
        session = self.session
        return (
            session is not None
            and attempt.uid in session.running
            and session.attempts[attempt.uid] == attempt.attempt
        )

    def _hold(self, ref: WeightsRef) -> None:
        """Workers load the version themselves, some of them late: it is not pruned during the session."""
        if not self.engines.remote:
            self._held.enter_context(disk.lock_version(ref))

    def _pinned(self, session: ValidationSession, exclusive: bool, now: float) -> bool:
        """Servers with the version are set aside, as the workers know."""
        pinned = self.engines.pin(session.ref.version, all_servers=exclusive)
        self.engines.send_table([worker.peer for worker in self.workers.peers], now)  # ahead of the episodes
        return pinned

    def _loaded(self, session: ValidationSession, worker: WorkerRecord, now: float) -> bool:
        """The worker's own engine has the version. It is sent it; again after a refusal or a long silence."""
        if worker.eval_version == session.ref.version:
            return True
        if now - worker.eval_asked > self.state.config.weights.deadline:
            worker.eval_asked = now
            self.state.outbox.to_control(worker.peer, self.state.versions.order(session.ref, "eval"))
        return False

    def loaded(self, peer: bytes, message: Loaded, now: float) -> None:
        """The worker's second engine confirmed a version, or could not load it."""
        if (worker := self.workers.peers.get(peer)) is None:
            return
        if message.error:
            log.warning("%s could not load v%d: %s", worker.name, message.ref.version.step, message.error)
            worker.eval_asked = now + LOAD_RETRY - self.state.config.weights.deadline
        else:
            self.engines.record_probe(message)
            worker.eval_version = message.ref.version

    def _assign(self, session: ValidationSession, worker: WorkerRecord, now: float) -> None:
        uid = session.queue.pop()
        _, mode, row, _ = HeldOut.of(uid)
        attempt = session.attempts[uid]
        worker.eval_running += 1
        self.workers.assign_seq += 1
        session.running[uid] = Given(worker, self.workers.assign_seq, now)
        if self._alone:
            self.state.store.forget_frames(uid)  # of an attempt that did not come to its end
        temperature = self.state.config.rollout.temperature if mode == SAMPLED else 0.0
        self.state.outbox.to_control(
            worker.peer,
            Assign(
                seq=self.workers.assign_seq,
                attempt=Attempt(uid, attempt),
                sample=self.samples[row],
                lane="eval",
                temperature=temperature,
                key=sampling_key(self.state.config.seed, uid, attempt),
                transcript=row in self._transcribed,
            ),
        )

    def _recover(self, session: ValidationSession) -> None:
        """Episodes of workers that are gone, hold them no more, or never got them are issued again."""
        lease = self.state.config.launch.lease
        for uid, (worker, seq, at) in list(session.running.items()):
            lost = self.workers.peers.get(worker.peer) is not worker  # it may have joined again since
            beat = worker.beat
            dropped = (
                beat is not None
                and (beat.assigned >= seq or worker.seen - at > lease)
                and Attempt(uid, session.attempts[uid]) not in beat.held
            )
            if lost or dropped:
                worker.eval_running -= 1
                del session.running[uid]
                session.attempts[uid] += 1
                session.queue.append(uid)

    def _end(self, session: ValidationSession) -> None:
        self.session = None
        self._keep(None)
        for uid in [uid for uid in session.queue if session.failures[uid]]:  # no time to try them again
            session.queue.remove(uid)
            session.failed.append(uid)
        for uid, given in session.running.items():  # an abandoned session's
            given.worker.eval_running -= 1
            self.state.outbox.to_control(given.worker.peer, Cancel(Attempt(uid, session.attempts[uid])))
        for worker in self.workers.peers:
            worker.eval_asked = 0.0
        self.results.append((session.step, self._metrics(session)))
        self._save(session)
        self._held.close()
        if self.engines.remote:
            self.engines.release()

    def _metrics(self, session: ValidationSession) -> dict[str, float]:
        """See observe/held_out.py. Of a session that was not over in time there are no scores."""
        played = [done.result for uid, done in session.scores.items() if not HeldOut.of(uid).scored]
        found: dict[str, float] = {}
        unfinished = len(session.running) + len(session.queue)
        if not unfinished:  # the missing episodes are the long ones: the mean of the rest is biased
            over = [self._judged(session, uid) for uid in (*session.scores, *session.failed)]
            found = means(per_sample(over, self.state.config.validation.success)) | sizes(over) | losses(over)
            found |= {HIGHEST: max(result.judged for result in played)} if played else {}
        return found | {
            "val-aux/episodes": float(len(session.scores)),
            "val-aux/failed": float(len(session.failed) + unfinished),
            "val-aux/policy_version": float(max(session.start.versions, default=session.ref.version.step)),
            "val-aux/policy_version_min": float(
                min(session.start.versions, default=session.ref.version.step)
            ),
        }

    def _judged(self, session: ValidationSession, uid: str) -> Judged:
        which, done = HeldOut.of(uid), session.scores.get(uid)
        source = self.samples[which.row].data_source
        if done is None:
            return Judged(which, source, None)
        return Judged(which, source, done.result, done.stats, answer_of(done.result, done.notes))

    def _save(self, session: ValidationSession) -> None:
        """The transcripts: the same questions at each validation, whatever became of them."""
        uids = ((row, uid) for row in sorted(self._transcribed) for uid in self._episodes(session.step, row))
        entries = (
            transcripts.entry(uid, self.samples[row], **self._became(session, uid)) for row, uid in uids
        )
        transcripts.save(self.state.run_dir, "validation", session.step, entries, anew=True)

    def _became(self, session: ValidationSession, uid: str) -> dict[str, Any]:
        done, mode = session.scores.get(uid), HeldOut.of(uid).mode
        if done is None:
            failed = session.failures[uid][-1] if uid in session.failed else "not over in time"
            return {"mode": mode, "failed": failed}
        judged: dict[str, Any] = {"components": done.result.components}
        if mode != SCORED:
            success = succeeds(done.result, self.state.config.validation.success)
            judged = {"success": success, **transcripts.earned(done.result)}
        text = session.fresh.get(uid)
        if text is None:
            text = msgspec.msgpack.decode(self.state.store.read.became(uid), type=Finished).text
        return {"mode": mode} | judged | {"turns": done.stats.turns, "notes": done.notes, "text": text}
