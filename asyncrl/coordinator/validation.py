"""Validation: held-out episodes at one pinned version, in their own ledger beside the training flow.

An embedded engine has a second one for it in each worker; of several servers one is set aside. With a single
server the weights go on changing, and the versions that sampled are reported.

consumes: validation episodes' records, from the worker handler
waits for: a share of the slots, engines that hold the pinned version; with a deadline
unblocks: the end of the run (the last validation)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncrl.buffer.records import EpisodeRecord
from asyncrl.coordinator.engines import LOAD_RETRY, EngineHandler
from asyncrl.coordinator.reporting import earned, kept_questions, save_transcripts, transcript_entry
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.workers import WorkerHandler, WorkerRecord
from asyncrl.observe.held_out import (
    EVAL,
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
    threshold_of,
    uid_prefix,
)
from asyncrl.observe.metrics import ASKED, HIGHEST
from asyncrl.types import FailReason, Sample
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsError, WeightsRef
from asyncrl.wire.messages.shared import Loaded
from asyncrl.wire.messages.worker import Failed, Finished

MID_RUN_SHARE = 0.5  # of a worker's slots
NOTHING = "null"  # is under way, but something has been


class SessionStart(msgspec.Struct, frozen=True):
    """Describes a session under way, as the store keeps it beside its episodes. `final`: at the start or the
    end of training. `settings`: under which it samples."""

    step: int
    final: bool
    ref: WeightsRef
    settings: str = ""

    def goes_on(self, other: SessionStart) -> bool:
        """The episodes of `other` are as good as its own: of the same weights, under the same settings. Those
        of step 0 are the model's own, whoever has published them."""
        same = self.ref.version == other.ref.version or self.step == 0
        return same and (self.step, self.settings) == (other.step, other.settings)


class Validation:
    """Runs at most one session at a time. One that is not over by its deadline is abandoned and logged."""

    def __init__(
        self, state: RunState, workers: WorkerHandler, engines: EngineHandler, samples: Sequence[Sample]
    ) -> None:
        self.state = state
        self.workers = workers
        self.engines = engines
        self.samples = samples
        self.episodes = state.held_out
        self.session: SessionStart | None = None
        self.deadline = math.inf
        self.results: list[tuple[int, dict[str, float]]] = []
        self._held = ExitStack()
        self._resumed = False  # what was under way when the coordinator ended, if anything was

    def begin(self, step: int, final: bool, now: float) -> bool:
        """Start validating the latest published version; False when there is none, or nothing to do."""
        ref = self.state.versions.ref
        count = self._count

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
        self._resumed = True
        stored = self.state.store.read.meta("validation")
        start = self._stored()
        committed = self.state.batches.committed

        if not stored and committed == 0:
            self.begin(0, True, now)
        elif start is not None and not (over and start.step == committed):
            log.warning("the validation of step %d was cut short: it goes on", start.step)
            again = replace(start, settings=self.state.config.held_out_settings)
            if not self._start(again, now):
                self.begin(committed, start.final, now)

    def _stored(self) -> SessionStart | None:
        """Reads which session was under way when the coordinator ended."""
        stored = self.state.store.read.meta("validation", NOTHING)
        return msgspec.json.decode(stored, type=SessionStart | None)

    @property
    def _alone(self) -> bool:
        """Nothing is trained: everything that is sampled is kept, and there is no hurry."""
        return not self.state.config.total_steps

    @property
    def _transcribed(self) -> frozenset[int]:
        return frozenset(range(self._count)) if self._alone else kept_questions(self._count)

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
            if not self.engines.remote:  # workers load it themselves, some of them late: it is not pruned
                self._held.enter_context(disk.lock_version(start.ref))
        except WeightsError as error:
            log.warning("no validation of step %d: its weights are gone (%s)", start.step, error)
            if start.step:  # where one was cut short; the model's own weights are published again
                self.workers.cancel(self.episodes.end("the weights are gone"))
                self._keep(None)
            return False

        before = self._stored()
        step = start.step
        uids = [uid for row in range(self._count) for uid in self._episodes(step, row)]
        again = before is not None and before.goes_on(start)
        self.episodes.begin(uid_prefix(step), uids, again)

        until = self.state.engine_time(now) + self.state.config.rollout.episode_timeout * (1 + start.final)
        self.session = start
        self.deadline = math.inf if self._alone else until

        self._held.enter_context(self.state.timeline.span("validation", step=step))
        self._keep(start)
        return True

    def _keep(self, start: SessionStart | None) -> None:
        self.state.store.put_meta("validation", msgspec.json.encode(start).decode())

    def tick(self, now: float, exclusive: bool) -> None:
        """Assign what fits. `exclusive`: training has ended, and validation may use all slots."""
        session = self.session
        if session is None:
            return

        late = self.state.engine_time(now) > self.deadline
        if late:
            log.error("validation of step %d abandoned: not done by its deadline", session.step)
        if late or not self._in_flight:
            self._end(session)
            return

        if not self.engines.awake:
            return

        pinned = False
        if remote := self.engines.remote:  # servers with the version are set aside, as workers know before
            pinned = self.engines.pin(session.ref.version, all_servers=exclusive)
            self.engines.send_table([worker.peer for worker in self.workers.peers], now)

        waiting = iter(self.episodes.waiting)
        for worker in self.workers.peers:
            if not (pinned if remote else self._loaded(session, worker, now)):
                continue

            share = math.ceil((1.0 if exclusive else MID_RUN_SHARE) * worker.hello.slots)
            room = min(worker.free, share - sum(uid.startswith(EVAL) for uid in worker.running))
            for episode in islice(waiting, max(0, room)):
                row = HeldOut.of(episode.uid).row
                self.workers.give(worker, episode, self.samples[row], 0, row in self._transcribed, now)

        total = len(self.episodes.episodes)
        over = total - self._in_flight
        self.state.waits.append(f"the validation of step {session.step}: {over} of {total} episodes are over")

    @property
    def _in_flight(self) -> int:
        return self.episodes.flow().in_flight

    @property
    def busy(self) -> bool:
        return self.session is not None

    @property
    def needs_engines(self) -> bool:
        """One is under way, or will go on once the run is."""
        return self.busy or (not self._resumed and self._stored() is not None)

    def _loaded(self, session: SessionStart, worker: WorkerRecord, now: float) -> bool:
        """The worker's own engine has the version. It is sent it; again after a refusal or a long silence."""
        if worker.eval_version == session.ref.version:
            return True
        if now - worker.eval_asked > self.state.config.weights.deadline:
            worker.eval_asked = now
            self.state.versions.engines[worker.peer].asleep = False
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

    def _end(self, session: SessionStart) -> None:
        self.session = None
        self._keep(None)

        for episode in self.episodes.waiting:
            if episode.failures:  # no time to try it again
                self.episodes.give_up(episode, FailReason(episode.reason))

        found = list(self.episodes.episodes.values())
        unfinished = self._in_flight
        self.workers.cancel(self.episodes.end())
        for worker in self.workers.peers:
            worker.eval_asked = 0.0
        self.results.append((session.step, self._metrics(session, found, unfinished)))

        # Transcripts of the same questions at each validation, whatever became of them.
        uids = ((row, uid) for row in sorted(self._transcribed) for uid in self._episodes(session.step, row))
        entries = (transcript_entry(uid, self.samples[row], **self._became(uid)) for row, uid in uids)
        save_transcripts(self.state.run_dir, "validation", session.step, entries, anew=True)

        self._held.close()
        if self.engines.remote:
            self.engines.release()

    def _metrics(
        self, session: SessionStart, episodes: Sequence[EpisodeRecord], unfinished: int
    ) -> dict[str, float]:
        """See observe/held_out.py. Of a session that was not over in time there are no scores."""
        over = [self._judged(uid) for uid in self.episodes.over]
        scored = [one.result for one in over if one.result is not None]
        played = [one.result for one in over if one.result is not None and not one.which.scored]

        found: dict[str, float] = {}
        if not unfinished:  # the missing episodes are the long ones: the mean of the rest is biased
            threshold = threshold_of(self.state.config, over)
            found = means(per_sample(over, threshold)) | sizes(over) | losses(over)
            found |= {HIGHEST: max(result.judged for result in played)} if played else {}

        step = session.ref.version.step
        sampled = [one for one in episodes if one.oldest >= 0]
        return found | {
            ASKED: float(len({one.which.row for one in over})),
            "val-aux/episodes": float(len(scored)),
            "val-aux/failed": float(len(over) - len(scored)),
            "val-aux/policy_version": float(max((one.newest for one in sampled), default=step)),
            "val-aux/policy_version_min": float(min((one.oldest for one in sampled), default=step)),
        }

    def _judged(self, uid: str) -> Judged:
        which = HeldOut.of(uid)
        done = self.episodes.over[uid]
        source = self.samples[which.row].data_source

        if isinstance(done, Failed):
            return Judged(which, source, None)
        return Judged(which, source, done.result, done.stats, answer_of(done.result, done.notes))

    def _became(self, uid: str) -> dict[str, Any]:
        done = self.episodes.over[uid]
        mode = HeldOut.of(uid).mode

        if isinstance(done, Failed):
            return {"mode": mode, "failed": f"{done.reason}: {done.detail}"}

        judged: dict[str, Any] = {"components": done.result.components}
        if mode != SCORED:
            success = succeeds(done.result, self.state.config.validation.success)
            judged = {"success": success, **earned(done.result)}

        text = self.episodes.texts.get(uid)
        if text is None:
            text = msgspec.msgpack.decode(self.state.store.read.became(uid), type=Finished).text

        return {"mode": mode} | judged | {"turns": done.stats.turns, "notes": done.notes, "text": text}
