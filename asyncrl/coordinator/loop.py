"""The coordinator alone decides what is sampled and trained: a loop around the state of the run.

consumes: all messages of the other processes (two ROUTER sockets)
waits for: the sockets, at most PASS_SECONDS
unblocks: all other processes

Each pass of the loop calls, in order: `Poller.wait`, `_drain_socket` (messages into the state), `_advance`
(admission, deadlines, assignments), `queue_acks`, `Journal.commit_pass` (one transaction, then the replies).
Replies go out only after the transaction commits, so a kill -9 cannot undo anything that a peer knows of.
While the store cannot be written, `commit_pass` returns False, and the next pass waits. Nothing else commits:
a pass that an error interrupts has not happened.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

import msgspec

from asyncrl.buffer.staleness import drop_overdue
from asyncrl.config import RunConfig
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.images import ImageHandler
from asyncrl.coordinator.journal import TransactionalOutbox
from asyncrl.coordinator.lifecycle import Lifecycle, Phase
from asyncrl.coordinator.peers import EnrolmentHandler, WrittenFiles, enrolled_keys
from asyncrl.coordinator.records import RecordHandler
from asyncrl.coordinator.reporting import Reporter
from asyncrl.coordinator.shifts import ShiftHandler
from asyncrl.coordinator.state import load_state, log
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.validation import Validation
from asyncrl.coordinator.workers import MAX_ASSIGNED, WorkerHandler
from asyncrl.data import Samples, samples_path
from asyncrl.errors import AsyncrlError, one_line
from asyncrl.runtime.version_server import root_server
from asyncrl.store.runstore import RunStore
from asyncrl.store.schema import StoreError, SupersededError
from asyncrl.wire.addresses import bind_address
from asyncrl.wire.messages import engine, shared, trainer, worker
from asyncrl.wire.messages.channels import AnyBulk, AnyControl, ToCoordinatorBulk, ToCoordinatorControl
from asyncrl.wire.sockets import Endpoints, Gate, Hub, Poller

PASS_SECONDS = 0.05  # longest wait for messages before a pass of the loop
DRAIN_MESSAGES = 128  # messages taken from a socket in a pass, at most
DRAIN_SECONDS = 0.01  # time for the messages of a socket in a pass, in seconds
STATUS_EVERY = 0.5  # seconds between two status reports
LAST_WORDS_SECONDS = 5.0  # time for processes on other machines to end and to send their files


def run(config: RunConfig, endpoints: Endpoints, incarnation: str) -> int:
    """Run the coordinator of the launch `incarnation` until the run is over, and return the exit code."""
    coordinator = Coordinator(config, endpoints, incarnation)
    gc.freeze()  # excludes modules from collections
    gc.set_threshold(10_000)  # hardly any of the many young objects of a step is in a cycle

    try:
        coordinator.loop()
    except SupersededError as error:
        log.error("%s; exiting", error)
        return 1
    finally:
        coordinator.close()
    return 1 if coordinator.lifecycle.error else 0


class Coordinator:
    """Owns the sockets, the phase and the loop; the handlers do the rest."""

    def __init__(self, config: RunConfig, endpoints: Endpoints, incarnation: str) -> None:
        self.config = config
        self.run_dir = Path(config.run_dir) / config.name
        # The gate needs the enrolled keys of the store.
        store = RunStore(self.run_dir, config.store.keep_bytes)

        host = config.launch.host
        self._gate = Gate(endpoints, enrolled_keys(store.reader, incarnation))
        self.control = Hub(bind_address(endpoints.control, host), ToCoordinatorControl, self._gate)
        self.bulk = Hub(bind_address(endpoints.bulk, host), ToCoordinatorBulk, self._gate)

        self.state = load_state(config, self.run_dir, store, TransactionalOutbox(self.control, self.bulk))
        self.ledger = self.state.ledger
        self.fleet = self.state.fleet
        self.journal = self.state.journal
        self._version_server = root_server(config, endpoints, self._gate, lambda: self.fleet.versions.ref)

        now = time.monotonic()
        self.engines = EngineHandler(self.state, now)
        self.workers = WorkerHandler(self.state, self.engines)
        self.trainer = TrainerHandler(self.state, self._on_commit)
        self.peers = *self.engines.supervised_peers, self.workers.peers, self.trainer.ranks.peers

        test_samples = Samples.open(samples_path(self.run_dir, "test")) if config.data.test else []
        self.validation = Validation(self.state, self.workers, self.engines, test_samples)
        handlers = self.workers, self.engines, self.trainer, self.validation
        self.shifts = ShiftHandler(self.state, *handlers, self._request_replacement)

        self.reporter = Reporter(self.state, self.workers, self.engines, self.trainer)
        self.images = ImageHandler(self.state)
        self.records = RecordHandler(self.state, self.workers, self.images, self.reporter)
        self.lifecycle = Lifecycle(self.state, *handlers, self.reporter, now)
        self.files = WrittenFiles(self.run_dir, self.journal.outbox)

        self.is_over = False  # the run is closed, and all processes were sent the end
        self.observers: set[bytes] = set()
        self._next_status_at = 0.0
        self._last_pass_at = now
        self._work_left = False  # the last pass left work that can be done at once
        self._missing_waits: list[str] = []  # waits for processes that are missing
        # Messages that came while the store was not writable.
        self._unread_messages: dict[object, tuple[bytes, Any, list[bytes]]] = {}

        self._resume_run(incarnation)

    def _resume_run(self, incarnation: str) -> None:
        """Continue the run of the store.

        Episodes of an earlier launch are issued again at once. Workers of this launch (if only the
        coordinator was restarted) have a lease's time to report their episodes.
        """
        self.fleet.launch = incarnation

        if self.journal.store.reader.meta("launch") != incarnation:
            self.workers.reissue_orphans(time.monotonic())
            self.fleet.versions.ref = None  # a power cut may have damaged the files
            self.journal.store.put_meta("shift", "")
            self.journal.store.put_meta("launch", incarnation)

        self.engines.restore_verdicts()
        self.shifts.restore_shift(time.monotonic())
        self.enrolment = EnrolmentHandler(self.state, self._gate)
        self.ledger.first_attempts.landed = self.journal.store.reader.meta("landed") == incarnation
        self._orphans_deadline: float | None = time.monotonic() + self.config.launch.lease

    # -- the loop --------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Run passes until the end of the run."""
        both_sockets = Poller(self.control, self.bulk)
        control_socket = Poller(self.control)

        while not self.is_over:
            poller = control_socket if self.journal.paused else both_sockets
            poller.wait(0.0 if self._work_left else PASS_SECONDS)

            pass_start = time.monotonic()
            self.run_pass(pass_start)
            self.reporter.longest_pass = max(self.reporter.longest_pass, time.monotonic() - pass_start)

        self._take_last_words()

    def _take_last_words(self) -> None:
        """Receive the last files of processes on other machines, for LAST_WORDS_SECONDS at most."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        bulk_poller = Poller(self.bulk)

        while (now := time.monotonic()) < deadline and self.files.expects_more(now):
            bulk_poller.wait(PASS_SECONDS)
            if (received := self.bulk.receive()) and isinstance(received[1], shared.WrittenBytes):
                self.files.append_bytes(*received, now)
            self.journal.outbox.flush()

    def run_pass(self, now: float) -> None:
        """Run a pass of the loop. An error undoes the pass and ends the run with a reason."""
        try:
            durable = self._run_pass(now)
        except SupersededError:
            raise  # another coordinator has taken over the run, with its peers and its summary
        except AsyncrlError as error:
            log.exception("the run cannot continue")
            self.lifecycle.fail_run(one_line(error))
            self.journal.roll_back()
            durable = True

        if durable and self.lifecycle.phase is Phase.CLOSED:
            self._finish()

    def _run_pass(self, now: float) -> bool:
        """Run a pass, and return True once the pass is durable.

        While the store cannot be written, no message is processed or acknowledged, and no group is admitted.
        """
        if self.journal.paused:
            self._receive_while_paused(now)
            if not self.journal.commit_pass(now, self._keep_contact):
                return False

        self.fleet.waits = []
        gap = now - self._last_pass_at - PASS_SECONDS
        self._last_pass_at = now
        if gap > self.config.launch.lease / 4:  # messages waited meanwhile
            log.warning("the coordinator was suspended for %.1f s; extending all leases", gap)
            self.workers.extend_leases(now, gap)
            for peers in (*self.engines.supervised_peers, self.trainer.ranks.peers):
                peers.extend_leases(now, gap)

        self._work_left = False

        for received in self._unread_messages.values():
            self._on_control(*received, now)
        self._unread_messages.clear()

        self._drain_socket(self.control, self._on_control, now)
        self._act_on_mismatches(now)  # before the records of an engine that was just proven wrong
        self._drain_socket(self.bulk, self._on_bulk, now)
        self._advance(now)
        self.records.queue_acks()

        return self.journal.commit_pass(now, self._keep_contact)

    def _receive_while_paused(self, now: float) -> None:
        """Receive messages while the store is not writable.

        Observers may stop the run. Other messages are queued, repeated messages once, and of each peer's
        heartbeats, which have absolute values, only the newest.
        """
        while (received := self.control.receive()) is not None:
            peer, message, _ = received
            if isinstance(message, shared.ObserverHello | shared.Stop):
                self._on_control(*received, now)
            elif isinstance(
                message, worker.WorkerHeartbeat | engine.SupervisorHeartbeat | trainer.TrainerHeartbeat
            ):
                self._unread_messages.pop((peer, type(message)), None)
                self._unread_messages[peer, type(message)] = received
            else:
                self._unread_messages.setdefault((peer, msgspec.msgpack.encode(message)), received)

    def _keep_contact(self, wait: str) -> None:
        """Tell all peers that the coordinator lives, during a pause.

        These messages bypass the outbox, whose messages may leave only after the commit.
        """
        self.fleet.waits = [wait]
        status = self.reporter.write_status(self.lifecycle.phase)
        for peer in self.observers:
            self.control.send(peer, status)

        for connected in (*self.workers.peers, *self.engines.supervisors, *self.engines.scorers.supervisors):
            self.control.send(connected.peer, self.state.welcome_message)

    def _drain_socket(self, hub: Hub, handle_message: Callable[..., None], now: float) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        for _ in range(DRAIN_MESSAGES):
            received = hub.receive()
            if received is None:
                break
            handle_message(*received, now)

            if time.monotonic() > deadline:
                break

    def _on_control(self, peer: bytes, message: AnyControl, frames: list[bytes], now: float) -> None:
        self._note_contact(peer, now)

        match message:
            case worker.Leave():
                self.workers.note_leaving(peer)
                for peers in self.peers:
                    peers.remove_process(peer, "it leaves", now)
            case worker.WorkerHeartbeat():
                self.workers.note_heartbeat(peer, message, now)
            case worker.WorkerHello():
                self.workers.welcome_worker(peer, message, now)
            case shared.Loaded() if message.lane == "eval":
                self.validation.confirm_load(peer, message, now)
            case shared.Loaded():
                self.engines.confirm_load(peer, message, now)
            case shared.ProbeSamples():
                self.engines.note_samples(peer, message)
            case shared.Slept():
                self.shifts.confirm_sleep(peer, message, now)
            case engine.SupervisorHello():
                self.engines.welcome_supervisor(peer, message, now)
            case engine.SupervisorHeartbeat():
                self.engines.note_heartbeat(peer, message, now)
            case trainer.AskDevices():
                self.trainer.note_device_request(peer, message)
            case trainer.TrainerHello():
                self.trainer.welcome_rank(peer, message, now)
            case trainer.TrainerHeartbeat():
                self.trainer.note_heartbeat(peer, message, now)
            case trainer.Commit():
                self.trainer.record_commit(peer, message, now)
            case trainer.GaveUp():
                self.workers.cancel_episodes(self.trainer.record_given_up(peer, message))
            case trainer.Probed():
                self.trainer.record_probe(message, now)
            case trainer.ScoredSamples():
                self.engines.judge_samples(message)
            case trainer.Published():
                self.trainer.record_version(message, now)
            case trainer.Checkpointed():
                self.trainer.record_checkpoint(peer, message, now)
            case shared.ObserverHello():
                self.observers.add(peer)
                self.state.send_welcome(peer)
            case shared.Invite():
                self.enrolment.add_token(message, now)
            case shared.Enrol():
                self.enrolment.enrol_process(peer, message)
            case shared.Stop() if peer in self.observers:
                self.lifecycle.stop_run(message.reason, now, message.save)
            case shared.Stop():
                log.warning(
                    "ignoring a stop request from %s, which is not a launcher of this run", peer.decode()
                )
            case _:
                assert_never(message)

    def _note_contact(self, peer: bytes, now: float) -> None:
        for peers in self.peers:
            peers.note_contact(peer, now)

    def _on_bulk(self, peer: bytes, message: AnyBulk, frames: list[bytes], now: float) -> None:
        self._note_contact(peer, now)

        match message:
            case worker.Records():
                for record, record_frames in message.with_frames(frames):
                    self.records.process_record(peer, record, record_frames, now)
            case trainer.PlanRequest():
                self.trainer.note_request(peer, message)
            case trainer.PayloadRequest():
                self.trainer.send_payloads(peer, message)
            case shared.ImageRequest():
                self.images.send_files(peer, message)
            case shared.WrittenBytes():
                self.files.append_bytes(peer, message, frames, now)
            case _:
                assert_never(message)

    # -- time ------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        self.lifecycle.advance_phase(now)
        self.enrolment.expire_tokens(now)

        if self._orphans_deadline is not None and now > self._orphans_deadline:
            self._orphans_deadline = None
            self.workers.reissue_orphans(now)

        if self.lifecycle.training:
            self.workers.admit_groups(now)
            self.ledger.buffer.settle_overdue(self.fleet.engine_time(now))
            self.workers.cancel_episodes(drop_overdue(self.ledger.buffer))
            if futile := self.ledger.futile_reason():
                self.lifecycle.abort_run(futile, now)

        if self.lifecycle.phase is not Phase.STOPPING:
            self.shifts.advance_shift(now)
            self.engines.push_newest(now)
            self.validation.assign_episodes(now, exclusive=self.lifecycle.phase is Phase.EVALUATING)

            waiting_before = self.ledger.buffer.waiting_count
            self.workers.assign_pending(now)
            self._work_left = (
                self.workers.work_left or waiting_before >= MAX_ASSIGNED > self.ledger.buffer.waiting_count
            )

            if now >= self._next_status_at:
                self._missing_waits = []
                for peers in self.peers:
                    missing_waits, replacements = peers.missing_processes(now)
                    self._missing_waits += missing_waits
                    for message in replacements:
                        self._request_replacement(message)

            self.fleet.waits += [*self._missing_waits, *self._gate.listeners.shortage]

        self.trainer.serve_request()
        self.trainer.forget_covered()
        self._report_validations()
        self._watch_stall(now)

        unreachable_peers = self.journal.outbox.unreachable
        self.observers -= unreachable_peers  # an observer that was only away says hello again
        unreachable_peers.clear()  # workers that missed a change of the table have the table by now

        if now >= self._next_status_at:
            self._next_status_at = now + STATUS_EVERY
            self._to_observers(self.reporter.write_status(self.lifecycle.phase))

    def _finish(self) -> None:
        """Write the summary, and send all processes the end."""
        self.is_over = True
        try:
            self.lifecycle.conclude_run()
        except (StoreError, OSError) as trouble:
            log.error("no summary: %s", trouble)

        outcome = self.lifecycle.outcome
        for peers in self.peers:
            peers.send_stop(outcome)
        for peer in (*self.trainer.waiting_for_devices, *self.trainer.starting_ranks):
            self.journal.outbox.to_control(peer, shared.Stop(outcome))

        self._to_observers(self.reporter.write_status(self.lifecycle.phase))
        self._to_observers(shared.RunEnd(outcome, self.lifecycle.error))
        self.journal.outbox.flush()

    # -- events of the handlers -----------------------------------------------------------------------

    def _on_commit(self, message: trainer.Commit) -> None:
        self.workers.send_min_version()
        row = self.reporter.step_row(message.step, message.metrics)
        self.engines.mismatches.judge_tokens(
            message.step,
            message.metrics.get("rollout_corr/logprob_diff_mean", 0.0),
            message.metrics.get("rollout_corr/logprob_diff_tokens", 0.0),
        )

        engines = map(bytes.decode, self.fleet.versions.engines)
        is_validating = self.validation.is_busy
        taken_groups = len(self.ledger.batches.by_step[message.step].groups)
        now = self.fleet.engine_time(time.monotonic())
        self.ledger.live_limit.update_limit(row, taken_groups, [*engines], is_validating, now)
        self._to_observers(shared.StepReport(message.step, row, self.reporter.episode_values))

        validation_interval = self.config.validation.every
        if (
            validation_interval
            and message.step % validation_interval == 0
            and message.step < self.config.total_steps
        ):
            self.validation.begin_session(message.step, False, time.monotonic())

    def _report_validations(self) -> None:
        for step, metrics in self.validation.results:
            row = {"training/step": float(step), "time_s": self.reporter.seconds} | metrics
            self.reporter.write_row(row)
            self.trainer.record_score(step, metrics)
            self._to_observers(shared.StepReport(step, row))
            self.fleet.liveness.note_progress(time.monotonic())
        self.validation.results = []

    # -- observers -------------------------------------------------------------------------------------

    def _to_observers(self, message: shared.WireMessage) -> None:
        for peer in self.observers:
            self.journal.outbox.to_control(peer, message)

    def _request_replacement(self, message: shared.Replace) -> None:
        log.error("%s: replaced", message.reason)
        self._to_observers(message)

    def _act_on_mismatches(self, now: float) -> None:
        """Replace engines that do not compute the trainer's model, or end the run with a checkpoint.

        The episodes of a worker that is to be replaced are issued again at once, so that later records of the
        worker do not count.
        """
        mismatches = self.engines.mismatches
        for peer, message in mismatches.replacements.items():
            if (worker := self.workers.peers.get(peer)) is not None:
                self.workers.lose_episodes(worker, message.reason, now)

        # After a restart, the launcher has not said hello yet.
        if self.observers and not self.lifecycle.ending:
            connected = self.fleet.versions.engines
            for peer, message, is_repeated in mismatches.due_replacements(now, connected):
                self._to_observers(message)
                if is_repeated:
                    self.journal.outbox.to_control(peer, shared.Stop(message.reason))

        if mismatches.fatal and not self.lifecycle.ending:
            self.lifecycle.abort_run(mismatches.fatal, now)
        if not self.lifecycle.ending:
            self.fleet.waits += self.engines.comparison_waits

        self.engines.store_verdicts()

    def _watch_stall(self, now: float) -> None:
        """Replace silent trainer ranks of a run that has stalled, or end the run with a checkpoint.

        The reason lists all waits. Ranks are also replaced if they wait for engines that cannot load the
        newest version, or for engines that have slept and have no other version, once the ranks have
        published a version.
        """
        ranks = self.trainer.ranks

        published = self.fleet.versions.newest.epoch == self.fleet.trainer_epoch
        waits_for_engines = ranks.open_request or (self.fleet.shifts and ranks.last_plan_kind == "end")
        ranks_wait = waits_for_engines and published and not self.lifecycle.ending

        if ranks_wait and (damage := self.engines.pop_load_failure()):
            damage += "; the next trainer publishes that version again"
            self._request_replacement(shared.Replace("trainer", damage, ranks.incarnation))
            # No second replacement before the next trainer sends a request.
            ranks.open_request = None
            ranks.last_plan_kind = ""

        stalled = self.fleet.liveness.stall_reason(now)
        if not stalled or self.lifecycle.ending:  # a stop has its own deadline
            return

        stall_report = f"{stalled}: {'; '.join(self.reporter.describe_waits()) or 'no known waits'}"
        is_training = self.lifecycle.phase in (Phase.RUNNING, Phase.DRAINING)
        if is_training and self.trainer.is_hanging(now):
            self._request_replacement(shared.Replace("trainer", f"the trainer is hanging; {stall_report}"))
            self.fleet.liveness.note_progress(now)  # the new ranks have the same time
        else:
            self.lifecycle.abort_run(stall_report, now)

    def close(self) -> None:
        self.journal.store.close()
        self.journal.timeline.close()
        self.control.close()
        self.bulk.close()
        if self._version_server is not None:
            self._version_server.close()
        self._gate.close()
