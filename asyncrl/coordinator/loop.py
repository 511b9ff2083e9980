"""The coordinator: it alone decides what is sampled and what is trained. A loop around the state of the run.

consumes: all messages of the other processes (two ROUTER sockets)
waits for: the sockets, at most TICK seconds
unblocks: all other processes

Each turn of the loop calls, in order: `Poller.wait`, `_drain` (messages into the state), `_tick` (admission,
deadlines, assignments), `queue_acks`, `RunState.persist` (one transaction, then the replies). Replies go out
only after the transaction commits, so a kill -9 cannot undo anything that a peer knows of. Nothing else
commits: a turn that an error interrupts has not happened.
"""

from __future__ import annotations

import enum
import time
from pathlib import Path
from typing import Any

from asyncrl.buffer.freshness import drop_overdue
from asyncrl.config import RunConfig
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.reporting import Reporter
from asyncrl.coordinator.state import TransactionalOutbox, load_state, log
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.turn_writer import TurnWriter
from asyncrl.coordinator.validation import Validation
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.data.samples import load_samples
from asyncrl.errors import AsyncrlError, ProtocolError, one_line
from asyncrl.store.schema import StoreError, SupersededError
from asyncrl.types import DropReason
from asyncrl.wire.messages.channels import ToCoordinatorBulk, ToCoordinatorControl
from asyncrl.wire.messages.keeper import KeeperBeat, KeeperHello
from asyncrl.wire.messages.observer import ObserverHello, Replace, RunEnd, Status, StepReport
from asyncrl.wire.messages.shared import Loaded, Stop, WireMessage
from asyncrl.wire.messages.trainer import (
    Checkpointed,
    Commit,
    PlanReceived,
    PlanRequest,
    Published,
    TrainerBeat,
    TrainerHello,
)
from asyncrl.wire.messages.worker_bulk import Failed, Finished, Generated, Replied
from asyncrl.wire.messages.worker_control import Heartbeat, WorkerHello
from asyncrl.wire.sockets import Endpoints, Hub, Poller, bound

TICK = 0.05
DRAIN = 256  # messages per socket and turn of the loop
STATUS_EVERY = 0.5
FOLLOW = 4.0  # of the stop timeout: for the other processes to end


class Phase(enum.StrEnum):
    """Where the run is. Each phase but RUNNING has a deadline."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"  # the last batch is committed: last push, last checkpoint
    EVALUATING = "evaluating"
    STOPPING = "stopping"  # asked to stop: the trainer writes a checkpoint
    CLOSED = "closed"


def run(config: RunConfig, endpoints: Endpoints, incarnation: str) -> int:
    """Run the coordinator until the run is over. `incarnation` names this launch of the run: the same
    after a restart of this process alone, another after a resume. Returns the exit code."""
    coordinator = Coordinator(config, endpoints, incarnation)
    try:
        coordinator.loop()
    except SupersededError as error:
        log.error("%s: this one leaves", error)
        return 1
    finally:
        coordinator.close()
    return 1 if coordinator.error else 0


class Coordinator:
    """Owner of the sockets, the phase and the loop; the handlers do the rest."""

    def __init__(self, config: RunConfig, endpoints: Endpoints, incarnation: str) -> None:
        self.config = config
        self.run_dir = Path(config.run_dir) / config.name
        host = config.launch.host
        self.control = Hub(bound(endpoints.control, host), ToCoordinatorControl)
        self.bulk = Hub(bound(endpoints.bulk, host), ToCoordinatorBulk)
        self.state = load_state(config, self.run_dir, TransactionalOutbox(self.control, self.bulk))
        self.engines = EngineHandler(self.state, time.monotonic())
        self.validation: Validation
        self.workers = WorkerHandler(
            self.state,
            self.engines,
            on_landed=lambda episode: self.reporter.on_landed(episode),
            on_eval=lambda worker, message: self.validation.record(worker, message),
            is_current_eval=lambda attempt: self.validation.is_current(attempt),
        )
        self.trainer = TrainerHandler(self.state, self._committed)
        test = load_samples(config.data.test) if config.data.test else []
        self.validation = Validation(self.state, self.workers, self.engines, test)
        self.reporter = Reporter(self.state, self.workers, self.engines, self.trainer)
        self.phase, self.error, self.outcome = Phase.STARTING, "", ""
        self.over = False  # CLOSED, and everybody was sent the end
        self.observers: set[bytes] = set()
        self.deadline = time.monotonic() + config.launch.start_timeout
        self._status_at, self._turned_at = 0.0, time.monotonic()
        self.writer = TurnWriter(self.state, self._keep_contact)
        self._can_save = True  # there are trainer ranks to write a checkpoint
        self._resume(incarnation)

    def _resume(self, incarnation: str) -> None:
        """Continue what the store holds. Episodes of an earlier launch are issued again at once; the workers
        of this launch (only the coordinator was restarted) have a lease's time to report theirs."""
        state = self.state
        state.launch = incarnation
        if state.store.read.meta("launch") != incarnation:
            self.workers.reissue_orphans(time.monotonic())
            state.versions.ref = None  # its files may have been damaged by a power cut
            state.store.put_meta("launch", incarnation)
        self._orphans_at: float | None = time.monotonic() + self.config.launch.lease

    # -- the loop --------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Run until the end. An error ends the run with its reason, after what is known is written."""
        poller = Poller(self.control, self.bulk)
        while not self.over:
            poller.wait(TICK)
            self.turn(time.monotonic())

    def turn(self, now: float) -> None:
        """One turn of the loop. While the store cannot be written, nothing is taken in, acknowledged or
        admitted; an error undoes the turn and ends the run."""
        try:
            if not self.writer.write(now):  # what the turn before could not write
                return
            self.state.waits = []
            self._extend_leases(now, gap=now - self._turned_at - TICK)
            self._turned_at = now
            self._drain(now)
            self._tick(now)
            self.workers.queue_acks()
            if not self.writer.write(now):
                return
        except SupersededError:
            raise  # the run is another coordinator's: neither its summary nor its peers are ours
        except AsyncrlError as error:
            log.exception("the run cannot go on")
            self._fail(one_line(error))
            self.state.rollback()  # that turn never happened
        if self.phase is Phase.CLOSED:
            self._finish()

    def _keep_contact(self, wait: str) -> None:
        """Past the outbox, whose messages may leave only after the commit."""
        self.state.waits = [wait]
        for peer in self.observers:
            self.control.send(peer, self._status())
        for peer in (*self.workers.workers, *self.engines.keepers):
            self.control.send(peer, self.state.welcome_message)

    def _drain(self, now: float) -> None:
        for hub, handle in ((self.control, self._on_control), (self.bulk, self._on_bulk)):
            for _ in range(DRAIN):
                received = hub.receive()
                if received is None:
                    break
                handle(*received, now)

    def _on_control(self, peer: bytes, message: Any, frames: list[bytes], now: float) -> None:
        match message:
            case Heartbeat():
                self.workers.heartbeat(peer, message, now)
            case WorkerHello():
                self.workers.hello(peer, message, now)
            case Loaded():
                confirm = self.engines.confirmed if self.engines.remote else self.workers.loaded
                confirm(peer, message, now)
            case KeeperHello():
                self.engines.hello(peer, message, now)
            case KeeperBeat():
                self.engines.beat(peer, message, now)
            case TrainerHello():
                self.trainer.hello(peer, message, now)
            case TrainerBeat():
                self.trainer.beat(peer, message, now)
            case Commit():
                self.trainer.commit(peer, message, now)
            case Published():
                self.trainer.publish(message, now)
            case Checkpointed():
                self.trainer.checkpointed(peer, message, now)
            case ObserverHello():
                self.observers.add(peer)
                self.state.welcome(peer)
            case Stop() if peer in self.observers:
                self._stop(message.reason, now)
                self._can_save = self._can_save and message.save
            case Stop():
                log.warning("a stop from %s, which is no launcher of this run, is ignored", peer.decode())

    def _on_bulk(self, peer: bytes, message: Any, frames: list[bytes], now: float) -> None:
        match message:
            case Generated() | Replied() | Finished() | Failed():
                self.workers.record(peer, message, frames, now)
            case PlanRequest():
                self.trainer.plan_requested(peer, message)
            case PlanReceived():
                self.trainer.plan_received(peer, message)

    # -- time ------------------------------------------------------------------------------------------

    def _extend_leases(self, now: float, gap: float) -> None:
        """Nobody is judged by messages that waited for `gap` seconds while the coordinator did not run."""
        if gap > self.config.launch.lease / 4:
            log.warning("the coordinator did not run for %.1f s: all leases are extended", gap)
            self.workers.extend_leases(now)
            self.engines.extend_leases(now)

    def _tick(self, now: float) -> None:
        state = self.state
        self._advance(now)
        if self._orphans_at is not None and now > self._orphans_at:
            self._orphans_at = None
            self.workers.reissue_orphans(now)
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            self._admit(now)
            state.buffer.tick(now)
            self.workers.cancel(drop_overdue(state.buffer))
            if futile := state.futile():
                self._abort(futile, now)
        if self.phase is not Phase.STOPPING:
            self.engines.tick(now)
            self.validation.tick(now, exclusive=self.phase is Phase.EVALUATING)
            self.workers.tick(now)
        self.trainer.serve()
        self._report_validations()
        self._watch(now)
        if now >= self._status_at:
            self._status_at = now + STATUS_EVERY
            self.trainer.look_at_checkpoint(now)
            self._to_observers(self._status())

    def _admit(self, now: float) -> None:
        buffer, free = self.state.buffer, self.workers.free_slots
        free -= buffer.waiting
        while buffer.can_admit(free, self.workers.total_slots):
            free -= len(buffer.admit(self.state.batches.committed, now).members)
        if buffer.data_over and self.config.data.at_end == "drop":
            self.workers.cancel(self.state.batches.drop_remainder())

    # -- phases ----------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        match self.phase:
            case Phase.STARTING if self.state.versions.ref and self.workers.workers and self.engines.ready:
                self._enter(Phase.RUNNING, now)
                self.reporter.begin()
                self.validation.resume(now, over=self._training_over())
            case Phase.RUNNING if self._training_over():
                self.workers.cancel(self.state.buffer.drop_all(DropReason.END_OF_DATA))
                self._enter(Phase.DRAINING, now, self.config.weights.deadline)
            case Phase.DRAINING if self._drained(now) and not self.validation.busy:
                step = self.state.batches.committed
                self.validation.begin(step, True, now)
                self._enter(Phase.EVALUATING, now)
            case Phase.EVALUATING if not self.validation.busy:
                self._report_validations()
                self._end("completed")
            case Phase.STOPPING if self.trainer.finished:
                self._end("failed" if self.error else "stopped")
            case Phase.STOPPING if not self._can_save or now > self.deadline:
                self._fail("; ".join(filter(None, (self.error, self._unsaved()))))
            case Phase.STOPPING:
                left = f"for at most {self.deadline - now:.0f} s more"
                self.state.waits.append(f"a checkpoint after the micro-batch under way, {left}")
            case Phase.STARTING if now > max(
                self.deadline, self.state.alive_at + self.config.launch.start_timeout
            ):  # a trainer that repeats steps after a crash is alive
                raise ProtocolError(f"not started within launch.start_timeout: {self._missing()}")

    def _enter(self, phase: Phase, now: float, seconds: float = 0.0) -> None:
        log.info("phase %s", phase)
        self.phase, self.deadline = phase, now + seconds
        self.state.progress(now)

    def _training_over(self) -> bool:
        """No batch is left to train."""
        batches = self.state.batches
        return batches.committed >= self.config.total_steps or batches.over

    def _drained(self, now: float) -> bool:
        """The last checkpoint is in place, and the last version acked by all, or its time is up."""
        if self.trainer.checkpoint_step < self.state.batches.committed:
            return False
        versions = self.state.versions
        pushed = versions.newest.step >= self.state.batches.committed and versions.all_acked
        return pushed or now > self.deadline

    def _missing(self) -> str:
        waits = [] if self.workers.workers else ["no rollout worker has reported in"]
        waits += [] if self.state.versions.ref else ["the trainer has not published the first version"]
        waits += [] if self.engines.ready else ["no server holds a published version"]
        return "; ".join(waits) or "unknown"

    def _stop(self, reason: str, now: float) -> None:
        if self.phase in (Phase.STOPPING, Phase.CLOSED):
            return
        log.info("stopping: %s", reason)
        self.workers.stop(reason)
        self.engines.stop(reason)
        self.trainer.finish()
        self._enter(Phase.STOPPING, now, max(1.0, self.config.launch.stop_timeout - FOLLOW))

    def _unsaved(self) -> str:
        late = f"none within launch.stop_timeout ({self.config.launch.stop_timeout:g} s)"
        return self.trainer.unsaved(late if self._can_save else "the trainer was lost")

    def _abort(self, error: str, now: float) -> None:
        """The run cannot go on, but what was trained can be saved: a stop, after which it has failed."""
        log.error("the run cannot go on: %s", error)
        self.error = error
        self._stop(error, now)

    def _fail(self, error: str) -> None:
        self.error = error
        self._end("failed")

    def _end(self, outcome: str) -> None:
        self.outcome, self.phase = outcome, Phase.CLOSED

    def _finish(self) -> None:
        """Write the summary, send all processes the end."""
        self.over = True
        try:
            self.reporter.write_summary(self.outcome, self.error)
        except (StoreError, OSError) as error:
            log.error("no summary: %s", error)
        self.workers.stop(self.outcome)
        self.engines.stop(self.outcome)
        self.trainer.stop(self.outcome)
        self._to_observers(self._status())
        self._to_observers(RunEnd(self.outcome, self.error))
        self.state.outbox.flush()

    # -- events of the handlers -----------------------------------------------------------------------

    def _committed(self, message: Commit) -> None:
        self.workers.clock()
        row = self.reporter.step_row(message.step, message.metrics)
        self._to_observers(StepReport(message.step, row))
        every = self.config.validation.every
        if every and message.step % every == 0 and message.step < self.config.total_steps:
            self.validation.begin(message.step, False, time.monotonic())

    def _report_validations(self) -> None:
        for step, metrics in self.validation.results:
            row = {"training/step": float(step), "time_s": self.reporter.seconds} | metrics
            self.reporter.write(row)
            self._to_observers(StepReport(step, row))
            self.state.progress(time.monotonic())
        self.validation.results = []

    # -- observers -------------------------------------------------------------------------------------

    def _status(self) -> Status:
        step, total = self.state.batches.committed, self.config.total_steps
        return Status(self.phase, step, total, self.reporter.gauges(), self.reporter.waits())

    def _to_observers(self, message: WireMessage) -> None:
        """One that has left is forgotten; if it was only away, it says hello again."""
        self.observers -= self.state.outbox.unreachable
        self.state.outbox.unreachable.clear()
        for peer in self.observers:
            self.state.outbox.to_control(peer, message)

    def _watch(self, now: float) -> None:
        """In a run that has stalled, a role whose processes are silent is replaced; else it ends, with a
        checkpoint. Either way it is said who waits for what."""
        stalled = self.state.stalled(now)
        if not stalled or self.phase in (Phase.STOPPING, Phase.CLOSED):  # a stop has its own deadline
            return
        why = f"{stalled}: {'; '.join(self.reporter.waits()) or 'no wait is known'}"
        training = self.phase in (Phase.RUNNING, Phase.DRAINING)
        silent = "trainer" if training and self.trainer.hangs(now) else ""
        silent = silent or ("rollout" if not self.workers.workers else "")
        if silent:
            log.error("the %s processes are replaced: %s", silent, why)
            self._to_observers(Replace(silent, why))
            self.state.progress(now)  # the next ones are given the same time
        else:
            self._abort(why, now)

    def close(self) -> None:
        self.state.store.close()
        self.control.close()
        self.bulk.close()
