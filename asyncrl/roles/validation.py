"""Validation: held-out episodes at one pinned version, in their own ledger beside the training flow.

consumes: validation episodes' records, from the worker desk
waits for: a free share of slots, engines that hold the pinned version -- with a deadline
unblocks: the end of the run (the last validation)
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.roles.core import Core, log
from asyncrl.roles.worker_desk import EVAL, Record, Worker, WorkerDesk, sampling_key
from asyncrl.transport.messages import Assign, Attempt, Cancel, Failed, Finished, LoadWeights
from asyncrl.types import Sample
from asyncrl.weights.manifest import WeightsRef

MODES = ("sampled", "greedy")


@dataclass
class Session:
    """One validation. Episodes are (mode, index into samples)."""

    step: int
    ref: WeightsRef
    final: bool
    queue: list[str]
    deadline: float
    running: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # uid -> (worker, assign seq)
    attempts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    scores: dict[str, Finished] = field(default_factory=dict)
    failed: int = 0


class Validation:
    """Runs at most one session at a time; a session that cannot end in time is abandoned, with its name."""

    def __init__(self, core: Core, desk: WorkerDesk, samples: list[Sample]) -> None:
        self.core, self.desk, self.samples = core, desk, samples
        self.session: Session | None = None
        self.results: list[tuple[int, dict[str, float]]] = []

    def begin(self, step: int, count: int, final: bool, now: float) -> bool:
        """Start validating the latest published version; False when there is none, or nothing to do."""
        count = min(count, len(self.samples))
        if self.session is not None and count:
            log.warning(
                "validation of step %d left out: that of step %d is not over", step, self.session.step
            )
        if self.session is not None or self.core.latest is None or count == 0:
            return False
        queue = [f"{EVAL}{step}/{mode}/{row}" for row in range(count) for mode in MODES]
        queue.reverse()
        try:
            ref = self._pin(self.core.latest)
        except OSError as error:
            log.warning("no validation of step %d: its weights are gone (%s)", step, error)
            return False
        deadline = now + self.core.config.rollout.episode_timeout * (2 if final else 1)
        self.session = Session(step, ref, final, queue, deadline)
        return True

    def tick(self, now: float, exclusive: bool) -> None:
        """Assign what fits. `exclusive`: training has ended, all slots are ours."""
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
        for worker in self.desk.workers.values():
            if worker.eval_version != session.ref.order:
                self._load(session, worker, now)
                continue
            share = 1.0 if exclusive else self.core.config.validation.max_share
            while session.queue and worker.free and worker.eval_running < share * worker.hello.slots:
                self._give(session, worker)
        self._recover(session)

    def record(self, worker: Worker, message: Record) -> None:
        """A record of a validation episode; turns need no storage."""
        session, uid = self.session, message.attempt.uid
        if session is None or uid not in session.running:
            return
        if message.attempt.attempt != session.attempts[uid]:
            return
        if isinstance(message, Finished):
            session.scores[uid] = message
        elif isinstance(message, Failed):
            log.warning("validation episode %s failed: %s (%s)", uid, message.reason, message.detail)
            session.failed += 1
        else:
            return
        del session.running[uid]
        worker.eval_running -= 1

    @property
    def busy(self) -> bool:
        return self.session is not None

    def wanted(self, attempt: Attempt) -> bool:
        """True for an attempt of the session under way."""
        session = self.session
        return (
            session is not None
            and attempt.uid in session.running
            and session.attempts[attempt.uid] == attempt.attempt
        )

    def _load(self, session: Session, worker: Worker, now: float) -> None:
        """Send the pinned version; again after a refusal or a long silence."""
        if now - worker.eval_asked > self.core.config.weights.deadline:
            worker.eval_asked = now
            self.core.outbox.to_control(worker.peer, LoadWeights(session.ref, "eval"))

    def _give(self, session: Session, worker: Worker) -> None:
        uid = session.queue.pop()
        _, mode, row = uid.split("/")
        attempt = session.attempts[uid]
        worker.eval_running += 1
        self.desk.assign_seq += 1
        session.running[uid] = worker.peer, self.desk.assign_seq
        temperature = self.core.config.validation.temperature if mode == "sampled" else 0.0
        self.core.outbox.to_control(
            worker.peer,
            Assign(
                seq=self.desk.assign_seq,
                attempt=Attempt(uid, attempt),
                sample=self.samples[int(row)],
                lane="eval",
                temperature=temperature,
                key=sampling_key(self.core.config.seed, uid, attempt),
            ),
        )

    def _recover(self, session: Session) -> None:
        """Episodes of workers that are gone, or no longer hold them, are issued again."""
        for uid, (peer, seq) in list(session.running.items()):
            worker = self.desk.workers.get(peer)
            beat = worker.beat if worker is not None else None
            dropped = (
                beat is not None
                and beat.assigned >= seq
                and Attempt(uid, session.attempts[uid]) not in beat.held
            )
            if worker is None or dropped:
                if worker is not None:
                    worker.eval_running -= 1
                del session.running[uid]
                session.attempts[uid] += 1
                session.queue.append(uid)

    def _end(self, session: Session) -> None:
        self.session = None
        for uid, (peer, _) in session.running.items():  # an abandoned session's
            if (worker := self.desk.workers.get(peer)) is not None:
                worker.eval_running -= 1
                self.core.outbox.to_control(peer, Cancel(Attempt(uid, session.attempts[uid])))
        for worker in self.desk.workers.values():
            worker.eval_asked = 0.0
        self.results.append((session.step, self._metrics(session)))
        self._save(session)
        shutil.rmtree(session.ref.path, ignore_errors=True)

    def _metrics(self, session: Session) -> dict[str, float]:
        """`val-core/<source>/<mode>/mean@1` per data source, and over all of them."""
        scores: dict[str, list[float]] = defaultdict(list)
        for uid, finished in session.scores.items():
            _, mode, row = uid.split("/")
            scores[f"val-core/{self.samples[int(row)].data_source}/{mode}/mean@1"].append(finished.reward)
            scores[f"val-core/all/{mode}/mean@1"].append(finished.reward)
            scores[f"val-aux/{mode}/num_turns/mean"].append(finished.turns)
            scores[f"val-aux/{mode}/tool_calls/mean"].append(finished.tool_calls)
        means = {name: sum(values) / len(values) for name, values in scores.items()}
        unfinished = len(session.running) + len(session.queue)
        if unfinished:  # what is missing is long: the mean of the rest would flatter
            means = {}
        return means | {
            "val-aux/episodes": float(len(session.scores)),
            "val-aux/failed": float(session.failed + unfinished),
            "val-aux/policy_version": float(session.ref.version),
        }

    def _save(self, session: Session) -> None:
        directory = self.core.run_dir / "validation"
        directory.mkdir(exist_ok=True)
        kept = list(session.scores.items())[: 2 * self.core.config.observe.transcripts]
        lines = [
            json.dumps(
                {"uid": uid, "reward": done.reward, "end": done.end, "turns": done.turns, "text": done.text}
            )
            for uid, done in kept
        ]
        (directory / f"step-{session.step}.jsonl").write_text("\n".join(lines) + "\n")

    def _pin(self, ref: WeightsRef) -> WeightsRef:
        """Hard links to the version's files: the publisher may prune its own names meanwhile."""
        source = Path(ref.path)
        pinned = source.with_name(f"pinned-{source.name}")
        for stale in source.parent.glob("pinned-*"):  # of a coordinator that was killed
            shutil.rmtree(stale, ignore_errors=True)
        shutil.copytree(source, pinned, copy_function=os.link)
        return WeightsRef(ref.trainer_epoch, ref.version, str(pinned))
