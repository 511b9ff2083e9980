"""Moves a run from phase to phase, reports what a phase waits for, and ends the run.

waits for: peers (to start); the last push, checkpoint and validation (to complete); a checkpoint (to stop)
unblocks: the end of the run
"""

from __future__ import annotations

import enum
import math

from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.reporting import Reporter
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.validation import Validation
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.errors import ProtocolError
from asyncrl.observe.summary import NOT_CONSERVED
from asyncrl.types import DropReason

EXIT_SECONDS = 4.0  # seconds of the stop timeout reserved for the other processes to end


class Phase(enum.StrEnum):
    """The parts of a run.

    STARTING and STOPPING have a deadline; in DRAINING the last push has one. EVALUATING ends with the
    validation, which has a deadline of its own, except in `asyncrl eval`.
    """

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"  # the last batch is committed: last push, last checkpoint
    EVALUATING = "evaluating"
    STOPPING = "stopping"  # asked to stop: the trainer writes a checkpoint
    CLOSED = "closed"


class Lifecycle:
    """The phase and its deadline; once CLOSED, the outcome (completed, stopped, failed) and its error."""

    def __init__(
        self,
        state: RunState,
        workers: WorkerHandler,
        engines: EngineHandler,
        trainer: TrainerHandler,
        validation: Validation,
        reporter: Reporter,
        now: float,
    ) -> None:
        self.config = state.config
        self.ledger = state.ledger
        self.batches = state.ledger.batches
        self.fleet = state.fleet
        self.workers = workers
        self.engines = engines
        self.trainer = trainer
        self.validation = validation
        self.reporter = reporter

        self.phase = Phase.STARTING
        self.error = ""
        self.outcome = ""

        self._deadline = now + state.fleet.liveness.start_seconds
        self._can_checkpoint = True  # there are trainer ranks to write a checkpoint

    @property
    def training(self) -> bool:
        """True while episodes are assigned and trained."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    @property
    def ending(self) -> bool:
        """True if the run was stopped, or is over."""
        return self.phase in (Phase.STOPPING, Phase.CLOSED)

    def advance_phase(self, now: float) -> None:
        """Enter the next phase if the present phase is over. ProtocolError if the start takes too long."""
        trains = self.config.total_steps > 0

        match self.phase:
            case Phase.STARTING if (
                self.fleet.versions.ref
                and self.workers.peers
                and not self.engines.missing_server
                and (trains or self.validation.has_probe)
            ):
                self._enter_phase(Phase.RUNNING, now)
                self.reporter.begin_running()
                self.validation.resume_session(now, training_over=trains and self.ledger.training_over)
                if not trains:
                    self._enter_phase(Phase.EVALUATING, now)

            case Phase.RUNNING if self.ledger.training_over:
                account = self.ledger.buffer.account()
                if self.batches.over and 0 < account.issued == account.failed:
                    cause = (
                        f"all episodes failed, and no samples are left: {self.ledger.failed_attempts.newest}"
                    )
                    self.abort_run(f"{cause}; fix the cause, then start a new run", now)
                    return

                self.workers.cancel_episodes(self.ledger.buffer.drop_all(DropReason.END_OF_DATA))
                self._enter_phase(Phase.DRAINING, now, math.inf)

            case Phase.DRAINING if self._drained(now) and not self.validation.is_busy:
                self.validation.begin_session(self.batches.committed, True, now)
                self._enter_phase(Phase.EVALUATING, now)

            case Phase.EVALUATING if not self.validation.is_busy:
                self._close_run("completed")
            case Phase.STOPPING if self.trainer.checkpoint_written:
                self._close_run("failed" if self.error else "stopped")

            case Phase.STOPPING if not self._can_checkpoint or now > self._deadline:
                overdue = (
                    f"none was written within launch.stop_timeout ({self.config.launch.stop_timeout:g} s)"
                )
                unsaved_stop = self.trainer.describe_unsaved_stop(
                    overdue if self._can_checkpoint else "the trainer was lost"
                )
                self.fail_run("; ".join(filter(None, (self.error, unsaved_stop))))

            case Phase.STOPPING:
                remaining = f"for at most {self._deadline - now:.0f} s more"
                self.fleet.waits.append(f"a checkpoint after the current part of the plan, {remaining}")

            # A trainer that repeats steps after a crash is alive.
            case Phase.STARTING if now > max(
                self._deadline, self.fleet.liveness.alive_at + self.fleet.liveness.start_seconds
            ):
                reasons = [] if self.workers.peers else ["no rollout worker has reported in"]
                if not self.fleet.versions.ref:
                    reasons.append("the trainer has not published the first version")
                    reasons += [f"{name}: {wait}" for name, wait in self.trainer.starting_waits(now)]
                elif not (trains or self.validation.has_probe):
                    reasons.append("the trainer has not scored the probe")
                if self.engines.missing_server:
                    reasons.append(f"still missing: {self.engines.missing_server}")

                time_limit = (
                    f"{self.fleet.liveness.start_seconds:.0f} s (launch.start_timeout plus the time to read "
                    "models)"
                )
                raise ProtocolError(
                    f"the run did not start within {time_limit}: {'; '.join(reasons) or 'unknown cause'}"
                )

    def stop_run(self, reason: str, now: float, save: bool = True) -> None:
        """Let the trainer write a checkpoint, then end the run. `save` is False if the trainer was lost."""
        self._can_checkpoint = self._can_checkpoint and save
        if self.ending:
            return

        log.info("stopping: %s", reason)
        self.fleet.stopping = True

        self.workers.peers.send_stop(reason)
        for supervisors in self.engines.supervised_peers:
            supervisors.send_stop(reason)
        self.trainer.request_checkpoint()
        self._enter_phase(Phase.STOPPING, now, max(1.0, self.config.launch.stop_timeout - EXIT_SECONDS))

    def abort_run(self, error: str, now: float) -> None:
        """Stop a run that cannot go on: the run writes a checkpoint first. The outcome is "failed"."""
        log.error("the run cannot continue: %s", error)
        self.error = error
        self.stop_run(error, now)

    def fail_run(self, error: str) -> None:
        """End the run at once, without a further checkpoint."""
        self.error = error
        self._close_run("failed")

    def conclude_run(self) -> None:
        """Write the summary. A run without an exact account has failed. Raises StoreError and OSError."""
        if not self.reporter.audit():
            self.fail_run("; ".join(filter(None, [self.error, f"episode counts: {NOT_CONSERVED}"])))
        self.reporter.write_summary(self.outcome, self.error)

    def _enter_phase(self, phase: Phase, now: float, seconds: float = 0.0) -> None:
        log.info("phase %s", phase)
        self.phase = phase
        self._deadline = now + seconds
        self.fleet.liveness.note_progress(now)

    def _close_run(self, outcome: str) -> None:
        self.outcome = outcome
        self.phase = Phase.CLOSED

    def _drained(self, now: float) -> bool:
        """Return True if the last checkpoint is written and all engines have the last version.

        Plans that the checkpoint covers must be forgotten, too. Engines may take no longer than
        weights.deadline.
        """
        committed = self.batches.committed
        versions = self.fleet.versions
        fully_pushed = versions.newest.step >= committed and all(
            engine.acked >= versions.newest for engine in versions.engines.values()
        )
        checkpoint_saved = self.trainer.checkpoint_step >= committed and not self.trainer.is_forgetting

        if checkpoint_saved and (self.engines.awake or self.engines.may_wake):  # engines may load now
            self._deadline = min(self._deadline, now + self.config.weights.deadline)

        return checkpoint_saved and (fully_pushed or now > self._deadline)
