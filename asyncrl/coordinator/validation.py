"""Validation: held-out episodes at one pinned version, in their own ledger beside the training flow.

An embedded engine has a second one for it in each worker; of several servers one is set aside. With a single
server the weights go on changing, and the versions that sampled are reported.

consumes: validation episodes' records, from the worker handler
waits for: a share of the slots, engines that hold the pinned version; with a deadline
unblocks: the end of the run (the last validation)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from asyncrl.coordinator import transcripts
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.workers import EVAL, WorkerHandler, WorkerRecord, sampling_key
from asyncrl.observe.summary import HIGHEST
from asyncrl.types import EpisodeResult, Sample
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsError, WeightsRef
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker_bulk import Failed, Finished, Generated, Record
from asyncrl.wire.messages.worker_control import Assign, Cancel

MODES = ("sampled", "greedy")  # of prompts
SCORED = "scored"  # of demonstrations: nothing is sampled
MID_RUN_SHARE = 0.5  # of a worker's slots
ROUNDING = 1e-6  # of a score that is a sum: ten times 0.1 is a success at 1
NOTHING = "null"  # is under way, but something has been


class HeldOut(NamedTuple):
    """An episode of a validation: `valSTEP/MODE/ROW` is its uid."""

    step: int
    mode: str
    row: int

    @classmethod
    def of(cls, uid: str) -> HeldOut:
        step, mode, row = uid.removeprefix(EVAL).split("/")
        return cls(int(step), mode, int(row))

    @property
    def uid(self) -> str:
        return f"{EVAL}{self.step}/{self.mode}/{self.row}"

    @property
    def scored(self) -> bool:
        return self.mode == SCORED


class SessionStart(msgspec.Struct, frozen=True):
    """What is kept in the store of a session under way. `final`: at the start or the end of training."""

    step: int
    final: bool
    ref: WeightsRef


class Given(NamedTuple):
    """An episode that a worker was sent, with Assign.seq, at that time."""

    worker: WorkerRecord
    seq: int
    at: float


@dataclass
class ValidationSession:
    """One validation. Episodes are (mode, index into samples)."""

    step: int
    ref: WeightsRef
    queue: list[str]
    deadline: float
    running: dict[str, Given] = field(default_factory=dict)  # by uid
    attempts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    scores: dict[str, Finished] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # why, each time
    failed: list[str] = field(default_factory=list)  # given up
    versions: set[int] = field(default_factory=set)  # that sampled its tokens


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
        return self._start(SessionStart(step, final, ref), now)

    def resume(self, now: float, over: bool) -> None:
        """Begin again what was under way when the coordinator ended, or the first validation of a new run.
        `over`: training has ended, and the last validation is still to come."""
        stored = self.state.store.read.meta("validation")
        start = msgspec.json.decode(stored, type=SessionStart | None) if stored else None
        committed = self.state.batches.committed
        if not stored and committed == 0:
            self.begin(0, True, now)
        elif start is not None and not (over and start.step == committed):
            log.warning("the validation of step %d was cut short: it begins again", start.step)
            if not self._start(start, now):
                self.begin(committed, start.final, now)

    @property
    def _transcribed(self) -> frozenset[int]:
        return transcripts.kept_questions(self._count)

    @property
    def _count(self) -> int:
        return min(self.state.config.validation.samples, len(self.samples))

    def _episodes(self, step: int, row: int) -> list[str]:
        modes = (SCORED,) if self.samples[row].demonstration else MODES
        return [HeldOut(step, mode, row).uid for mode in modes]

    def _start(self, start: SessionStart, now: float) -> bool:
        try:
            self._hold(start.ref)
        except WeightsError as error:
            log.warning("no validation of step %d: its weights are gone (%s)", start.step, error)
            return False
        queue = [uid for row in range(self._count) for uid in self._episodes(start.step, row)]
        queue.reverse()
        deadline = now + self.state.config.rollout.episode_timeout * (2 if start.final else 1)
        self.session = ValidationSession(start.step, start.ref, queue, deadline)
        self.state.store.put_meta("validation", msgspec.json.encode(start).decode())
        return True

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
        remote = self.engines.remote
        pinned = remote and self._pinned(session, exclusive, now)
        for worker in self.workers.workers.values():
            if not (pinned if remote else self._loaded(session, worker, now)):
                continue
            share = 1.0 if exclusive else MID_RUN_SHARE
            while session.queue and worker.free and worker.eval_running < share * worker.hello.slots:
                self._assign(session, worker, now)
        self._recover(session)
        over = len(session.scores) + len(session.failed)
        total = over + len(session.queue) + len(session.running)
        self.state.waits.append(f"the validation of step {session.step}: {over} of {total} episodes are over")

    def record(self, worker: WorkerRecord, message: Record) -> None:
        """A record of a validation episode; turns need no storage."""
        session, uid = self.session, message.attempt.uid
        if session is None or uid not in session.running:
            return
        if session.running[uid].worker is not worker or message.attempt.attempt != session.attempts[uid]:
            return
        if isinstance(message, Finished):
            session.scores[uid] = message
        elif isinstance(message, Failed):
            log.warning("validation episode %s failed: %s (%s)", uid, message.reason, message.detail)
            session.failures[uid].append(f"{message.reason}: {message.detail}")
            self._retry(session, uid)
        else:
            if isinstance(message, Generated) and message.model_tokens:
                session.versions |= {message.oldest, message.newest}
            return
        del session.running[uid]
        worker.eval_running -= 1

    def _retry(self, session: ValidationSession, uid: str) -> None:
        """An attempt failed: try again as often as in training."""
        if len(session.failures[uid]) > self.state.config.rollout.retries:
            session.failed.append(uid)
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
        self.engines.send_table(self.workers.workers, now)  # ahead of the episodes
        return pinned

    def _loaded(self, session: ValidationSession, worker: WorkerRecord, now: float) -> bool:
        """The worker's own engine has the version. It is sent it; again after a refusal or a long silence."""
        if worker.eval_version == session.ref.version:
            return True
        if now - worker.eval_asked > self.state.config.weights.deadline:
            worker.eval_asked = now
            self.state.outbox.to_control(worker.peer, self.state.versions.order(session.ref, "eval"))
        return False

    def _assign(self, session: ValidationSession, worker: WorkerRecord, now: float) -> None:
        uid = session.queue.pop()
        _, mode, row = HeldOut.of(uid)
        attempt = session.attempts[uid]
        worker.eval_running += 1
        self.workers.assign_seq += 1
        session.running[uid] = Given(worker, self.workers.assign_seq, now)
        temperature = self.state.config.rollout.temperature if mode == "sampled" else 0.0
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
            lost = self.workers.workers.get(worker.peer) is not worker  # it may have joined again since
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
        self.state.store.put_meta("validation", NOTHING)
        for uid in [uid for uid in session.queue if session.failures[uid]]:  # no time to try them again
            session.queue.remove(uid)
            session.failed.append(uid)
        for uid, given in session.running.items():  # an abandoned session's
            given.worker.eval_running -= 1
            self.state.outbox.to_control(given.worker.peer, Cancel(Attempt(uid, session.attempts[uid])))
        for worker in self.workers.workers.values():
            worker.eval_asked = 0.0
        self.results.append((session.step, self._metrics(session)))
        self._save(session)
        self._held.close()
        if self.engines.remote:
            self.engines.release()

    def _metrics(self, session: ValidationSession) -> dict[str, float]:
        """Per data source and over all of them: `val-core/<source>/<mode>/success`, the share of episodes
        that succeed, `…/mean@1`, the mean score, and `val-aux/<source>/<mode>/<component>/mean@1`. An episode
        that failed at every attempt is no success and has the lowest score of all, at most 0, so that a
        policy which makes its episodes fail gains nothing."""
        numbers: dict[str, list[float]] = defaultdict(list)
        played = {uid: done for uid, done in session.scores.items() if not HeldOut.of(uid).scored}
        failed = [uid for uid in session.failed if not HeldOut.of(uid).scored]
        earned = {uid: finished.result for uid, finished in played.items()}
        nothing = EpisodeResult(min([0.0, *(result.score for result in earned.values())]))
        for uid, result in (earned | dict.fromkeys(failed, nothing)).items():
            mode = HeldOut.of(uid).mode
            for source in (self._source(uid), "all"):
                numbers[f"val-core/{source}/{mode}/mean@1"].append(result.score)
                numbers[f"val-core/{source}/{mode}/success"].append(uid in earned and self._succeeds(result))
                for name, value in result.components.items():
                    numbers[f"val-aux/{source}/{mode}/{name}/mean@1"].append(value)
                for name, part in result.parts.items():
                    numbers[f"val-aux/{source}/{mode}/agent/{name}/mean@1"].append(part.score)
        for uid, finished in played.items():
            mode = HeldOut.of(uid).mode
            numbers[f"val-aux/{mode}/num_turns/mean"].append(finished.stats.turns)
            numbers[f"val-aux/{mode}/tool_calls/mean"].append(finished.stats.tool_calls)
        means = {name: sum(values) / len(values) for name, values in numbers.items()} | self._losses(session)
        if earned:
            means[HIGHEST] = max(result.judged for result in earned.values())
        unfinished = len(session.running) + len(session.queue)
        if unfinished:  # the missing episodes are the long ones: the mean of the rest is biased
            means = {}
        return means | {
            "val-aux/episodes": float(len(session.scores)),
            "val-aux/failed": float(len(session.failed) + unfinished),
            "val-aux/policy_version": float(max(session.versions, default=session.ref.version.step)),
            "val-aux/policy_version_min": float(min(session.versions, default=session.ref.version.step)),
        }

    def _losses(self, session: ValidationSession) -> dict[str, float]:
        """`val-core/<source>/nll`: -log pi per token of what demonstrations say, over all of their tokens.
        None of a source of which one failed: that of the others is not comparable."""
        sums: dict[str, tuple[float, int]] = {}
        failed = {self._source(uid) for uid in session.failed if HeldOut.of(uid).scored}
        failed |= {"all"} if failed else set()
        for uid, result in (
            (uid, done.result) for uid, done in session.scores.items() if HeldOut.of(uid).scored
        ):
            for source in {self._source(uid), "all"} - failed:
                total, tokens = sums.get(source, (0.0, 0))
                sums[source] = total + result.components["nll"] * result.tokens, tokens + result.tokens
        return {f"val-core/{source}/nll": total / tokens for source, (total, tokens) in sums.items()}

    def _source(self, uid: str) -> str:
        return self.samples[HeldOut.of(uid).row].data_source

    def _succeeds(self, result: EpisodeResult) -> bool:
        return result.judged >= self.state.config.validation.success - ROUNDING

    def _save(self, session: ValidationSession) -> None:
        """The transcripts: the same questions at each validation, whatever became of them."""
        entries = []
        for row in sorted(self._transcribed):
            for uid in self._episodes(session.step, row):
                became = self._became(session, uid)
                entries.append(transcripts.entry(uid, self.samples[row], mode=HeldOut.of(uid).mode, **became))
        transcripts.save(self.state.run_dir, "validation", session.step, entries, anew=True)

    def _became(self, session: ValidationSession, uid: str) -> dict[str, Any]:
        done = session.scores.get(uid)
        if done is None:
            return {"failed": session.failures[uid][-1] if uid in session.failed else "not over in time"}
        judged: dict[str, Any] = {"components": done.result.components}
        if not HeldOut.of(uid).scored:
            judged = {"success": self._succeeds(done.result), **transcripts.earned(done.result)}
        return judged | {"turns": done.stats.turns, "notes": done.notes, "text": done.text}
