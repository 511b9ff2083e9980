"""Moves the devices that engines and trainer share from one side to the other.

consumes: answers to Sleep; the handlers' state of ranks, engines and the buffer
waits for: engines to fall asleep and to wake, ranks to offload, each with a deadline
unblocks: the ranks (plans, in the trainer's shift), the engines (the newest version, in the rollout shift)

A side gets the devices only after the other side has confirmed that it holds nothing there: engines by Slept
or a hello, ranks by a request or a checkpoint at rest. A process that does not confirm in time is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.buffer.shifts import NO_REQUEST, Outlook, Shift, Shifts, Situation
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.peers import Peers
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.validation import Validation
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.types import NO_VERSION, start_version
from asyncrl.wire.messages.shared import Replace, Sleep, Slept

SLEEP_RETRY = 2.0  # seconds after which an engine without an answer gets Sleep again
SHIFT_KEY = "shift"  # key of the store's meta


class ShiftHandler:
    """Runs the shifts. Does nothing in a run without shifts.

    Args:
        replace: has the launcher replace a process.
    """

    def __init__(
        self,
        state: RunState,
        workers: WorkerHandler,
        engines: EngineHandler,
        trainer: TrainerHandler,
        validation: Validation,
        replace: Callable[[Replace], None],
    ) -> None:
        self.config = state.config
        self.batches = state.ledger.batches
        self.fleet = state.fleet
        self.versions = state.fleet.versions
        self.journal = state.journal
        self.workers = workers
        self.engines = engines
        self.trainer = trainer
        self.validation = validation
        self._replace = replace

        self.engine_peers: Peers[Any] = engines.supervisors if engines.remote else workers.peers
        self.role = "engine" if engines.remote else "rollout"
        self._sleep_number = state.journal.store.epoch << 32  # number of the newest Sleep message
        self._sleep_sent_at = 0.0
        self._deadline_start = 0.0  # begin of the deadline of a change of the shift
        self._start_deadline = 0.0  # time by which all engines must have reported in

        # Seconds of all workers' engines, and the time of their last growth.
        self._sampled_seconds = 0.0
        self._sampled_at = 0.0

    def restore_shift(self, now: float) -> None:
        """Begin a new launch with sleeping engines, or continue the shift of a restarted coordinator."""
        if self.config.shifts:
            stored = self.journal.store.reader.meta(SHIFT_KEY) or Shift.SLEEPING
            self.fleet.shifts = Shifts(self.config.buffer.shift_fill, now, Shift(stored))
            self._deadline_start = now
            self._start_deadline = now + self.fleet.liveness.start_seconds

    def confirm_sleep(self, peer: bytes, message: Slept, now: float) -> None:
        """Handle an engine's answer to Sleep."""
        engine = self.versions.engines.get(peer)
        sleep_requested = self.fleet.shifts is not None and self.fleet.shifts.shift is Shift.SLEEPING
        if engine is None or message.number != self._sleep_number or not sleep_requested:
            return  # an answer to an earlier message, or a repetition

        if message.error:
            log.warning("%s did not go to sleep: %s", engine.name, message.error)
            return

        engine.asleep = True
        engine.woken = False
        self.fleet.liveness.note_alive(now)
        self.journal.timeline.record_past("sleep", message.seconds, engine=engine.name)

        if (worker := self.workers.peers.get(peer)) is not None:
            worker.eval_version = None
            worker.eval_requested_at = 0.0

    def advance_shift(self, now: float) -> None:
        """Enter the next shift if it is time, and have the other side free the devices."""
        shifts = self.fleet.shifts
        ranks = self.trainer.ranks
        if shifts is None:
            return

        request = ranks.open_request
        engines = self.versions.engines.values()
        vacant_names = [f"{self.role}-{index}" for index in self.engine_peers.vacant_indices]
        situation = Situation(
            outlook=self._request_outlook(),
            ranks_starting=bool(self.trainer.waiting_for_devices),
            trainer_waits=ranks.last_plan_kind == "end" or request is not None,
            validation_waits=self.validation.needs_engines and (request is None or not request.part),
            engines_asleep=not vacant_names and all(engine.asleep for engine in engines),
            engine_awake=any(engine.woken for engine in engines),
            ranks_offloaded=ranks.offloaded,
            idle_seconds=self._engine_idle_seconds(),
        )

        if shifts.enter_next(now, situation):
            self._on_enter(shifts.shift, now)

        # Engines load the version of the committed steps; after weights.deadline an earlier version will do.
        is_late = now > self._deadline_start + self.config.weights.deadline
        version_ready = self.versions.newest.step >= self.batches.committed or (
            is_late and self.versions.newest != NO_VERSION
        )
        self.engines.may_wake = shifts.shift is Shift.WAKING and ranks.offloaded and version_ready

        waits = self.fleet.waits
        if shifts.shift is Shift.SLEEPING:
            self._put_to_sleep(now)
            awake_names = [engine.name for engine in engines if not engine.asleep]
            waits.append(
                f"the trainer waits for its shift: {', '.join(vacant_names + awake_names)} must sleep first"
            )
        elif self.engines.may_wake:
            waits.append(f"engines are loading v{self.versions.newest.step}")
        elif shifts.shift is Shift.WAKING and ranks.offloaded:
            waits.append(f"engines wait for their shift: v{self.batches.committed} must be written first")
        elif shifts.shift is Shift.WAKING:
            waits.append("engines wait for their shift: the trainer must offload first")

            # Ranks may take the time of a start from the order to rest on, as ranks read as much at a start.
            time_limit = self.fleet.liveness.start_seconds
            if ranks.last_plan_kind not in ("rest", ""):  # "": an earlier coordinator has sent the plan
                self._deadline_start = now
            elif now > self._deadline_start + time_limit:
                self._deadline_start = now  # new processes have as much time
                reason = f"the trainer has not offloaded within {time_limit:g} s"
                self._replace(Replace("trainer", reason, ranks.incarnation))

    def _request_outlook(self) -> Outlook:
        """Return the answer that rank 0's request would get if the trainer had the devices."""
        request = self.trainer.ranks.open_request
        if request is None or request.step > self.batches.buffer.current_step:
            return NO_REQUEST

        if start_version(request.step) in (self.config.total_steps, *range(self.batches.committed)):
            return Outlook(ready=True, group_fraction=1.0, batch_complete=True)

        ranks = self.trainer.ranks.rank_count // self.config.trainer.sequence_parallel
        return self.batches.outlook(request.step, request.part, ranks)

    def _on_enter(self, shift: Shift, now: float) -> None:
        log.info("shift: %s", shift)
        self.journal.store.put_meta(SHIFT_KEY, shift)
        self.fleet.liveness.note_alive(now)
        self._deadline_start = now
        self._sampled_at = now

        if shift is Shift.SLEEPING:
            self._sleep_number += 1
            self._sleep_sent_at = 0.0
            self._start_deadline = now + self.fleet.liveness.start_seconds
            self.engines.refusals.clear()  # an engine may have refused a version that others held
            for engine in self.versions.engines.values():
                engine.resend(now)  # after waking, engines get a version even if they held it before
                engine.woken = False

    def _put_to_sleep(self, now: float) -> None:
        engines = self.versions.engines
        deadline = self.config.weights.deadline

        if now > self._sleep_sent_at + SLEEP_RETRY:
            self._sleep_sent_at = now
            for peer, engine in engines.items():
                if not engine.asleep:
                    self.journal.outbox.to_control(peer, Sleep(self._sleep_number))

        if now > self._deadline_start + deadline:
            self._deadline_start = now  # new processes have as much time
            incarnations = [*self.engine_peers.vacant_indices.values()]
            for process in self.engine_peers:
                engine = engines[process.peer]
                if engine.is_up and not engine.asleep:  # a starting server has another deadline
                    incarnations.append(process.hello.incarnation)

            for name in filter(None, incarnations):
                reason = f"{self.role} {name} has not gone to sleep within {deadline:g} s"
                self._replace(Replace(self.role, reason, name))

            # A process has not reported in since the coordinator's start.
            if "" in incarnations and now > self._start_deadline:
                self._start_deadline = now + self.fleet.liveness.start_seconds
                self._replace(
                    Replace(
                        self.role,
                        f"some {self.role} processes have not reported in, so the engines cannot sleep",
                    )
                )

    def _engine_idle_seconds(self) -> float:
        """Return the seconds for which no engine has sampled, by the workers' heartbeats."""
        heartbeats = [
            (worker.heartbeat.busy_s, worker.heartbeat_at)
            for worker in self.workers.peers
            if worker.heartbeat
        ]
        sampled_seconds = sum(busy_seconds for busy_seconds, _ in heartbeats)
        times = [received_at for _, received_at in heartbeats]

        if heartbeats and sampled_seconds != self._sampled_seconds:
            self._sampled_seconds = sampled_seconds
            self._sampled_at = max(times)

        return min(times, default=0.0) - self._sampled_at
