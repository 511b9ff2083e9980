"""Moves the devices that engines and trainer share from one side to the other.

consumes: answers to Sleep; the handlers' state of ranks, engines and the buffer
waits for: engines to fall asleep and to wake, ranks to offload, each with a deadline
unblocks: the ranks (plans, in the trainer's shift), the engines (the newest version, in the rollout shift)

A side gets the devices only after the other side has confirmed that it holds nothing there: engines by Slept
or a hello, ranks by a request or a checkpoint at rest. A process that does not confirm in time is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from asyncrl.buffer.shifts import NO_REQUEST, Outlook, Shift, Shifts, Situation
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.peers import Peers
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.validation import Validation
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.types import NO_VERSION
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
        self.state = state
        self.workers = workers
        self.engines = engines
        self.trainer = trainer
        self.validation = validation
        self._replace = replace

        self.engine_peers: Peers[Any] = engines.supervisors if engines.remote else workers.peers
        self.role = "engine" if engines.remote else "rollout"
        self._sleep_number = state.coordinator_epoch << 32  # number of the newest Sleep message
        self._sleep_sent_at = 0.0
        self._deadline_start = 0.0  # begin of the deadline of a change of the shift
        self._start_deadline = 0.0  # time by which all engines must have reported in

        # Seconds of all workers' engines, and the time of their last growth.
        self._sampled_seconds = 0.0
        self._sampled_at = 0.0

    def restore_shift(self, now: float) -> None:
        """Begin a new launch with sleeping engines, or continue the shift of a restarted coordinator."""
        if self.state.config.shifts:
            stored = self.state.store.reader.meta(SHIFT_KEY) or Shift.SLEEPING
            self.state.shifts = Shifts(self.state.config.buffer.shift_fill, now, Shift(stored))
            self._deadline_start = now
            self._start_deadline = now + self.state.liveness.start_seconds

    def confirm_sleep(self, peer: bytes, message: Slept, now: float) -> None:
        """Handle an engine's answer to Sleep."""
        engine = self.state.versions.engines.get(peer)
        sleep_requested = self.state.shifts is not None and self.state.shifts.shift is Shift.SLEEPING
        if engine is None or message.number != self._sleep_number or not sleep_requested:
            return  # an answer to an earlier message, or a repetition

        if message.error:
            log.warning("%s does not sleep: %s", engine.name, message.error)
            return

        engine.asleep = True
        engine.woken = False
        self.state.liveness.note_alive(now)
        self.state.timeline.record_past("sleep", message.seconds, engine=engine.name)

        if (worker := self.workers.peers.get(peer)) is not None:
            worker.eval_version = None
            worker.eval_requested_at = 0.0

    def advance_shift(self, now: float) -> None:
        shifts = self.state.shifts
        trainer = self.trainer
        if shifts is None:
            return

        request = trainer.ranks.open_request
        engines = self.state.versions.engines.values()
        vacant_names = [f"{self.role}-{index}" for index in self.engine_peers.vacant_indices]
        situation = Situation(
            outlook=self._request_outlook(),
            ranks_starting=bool(trainer.waiting_for_devices),
            trainer_waits=trainer.ranks.last_plan_kind == "end" or request is not None,
            validation_waits=self.validation.needs_engines and (request is None or not request.micro),
            engines_asleep=not vacant_names and all(engine.asleep for engine in engines),
            engine_awake=any(engine.woken for engine in engines),
            ranks_offloaded=trainer.ranks.offloaded,
            idle_seconds=self._engine_idle_seconds(),
        )

        if shifts.enter_next(now, situation):
            self._on_enter(shifts.shift, now)
        self.engines.may_wake = (
            shifts.shift is Shift.WAKING and trainer.ranks.offloaded and self._version_ready(now)
        )

        if shifts.shift is Shift.SLEEPING:
            self._put_to_sleep(now)
        elif shifts.shift is Shift.WAKING and not trainer.ranks.offloaded:
            self._replace_unrested(now)

        self.state.waits += self._shift_waits(shifts, vacant_names)

    def _request_outlook(self) -> Outlook:
        """Return the answer that rank 0's request would get if the trainer had the devices."""
        state = self.state
        request = self.trainer.ranks.open_request
        if request is None or request.step > state.batches.committed:
            return NO_REQUEST

        if request.step in (state.config.total_steps, *range(state.batches.committed)):
            return Outlook(ready=True, group_fraction=1.0, batch_complete=True)

        ranks = self.trainer.ranks.rank_count // state.config.trainer.sequence_parallel
        return state.batches.outlook(request.step, request.micro, ranks)

    def _on_enter(self, shift: Shift, now: float) -> None:
        log.info("shift: %s", shift)
        self.state.store.put_meta(SHIFT_KEY, shift)
        self.state.liveness.note_alive(now)
        self._deadline_start = now
        self._sampled_at = now

        if shift is Shift.SLEEPING:
            self._sleep_number += 1
            self._sleep_sent_at = 0.0
            self._start_deadline = now + self.state.liveness.start_seconds
            self.engines.refusals.clear()  # an engine may have refused a version that others held
            for engine in self.state.versions.engines.values():
                engine.resend(now)  # after waking, engines get a version even if they held it before
                engine.woken = False

    def _put_to_sleep(self, now: float) -> None:
        versions = self.state.versions
        deadline = self.state.config.weights.deadline

        if now > self._sleep_sent_at + SLEEP_RETRY:
            self._sleep_sent_at = now
            for peer in [peer for peer, engine in versions.engines.items() if not engine.asleep]:
                self.state.outbox.to_control(peer, Sleep(self._sleep_number))

        if now > self._deadline_start + deadline:
            self._deadline_start = now  # new processes have as much time
            incarnations = [*self.engine_peers.vacant_indices.values()]
            for process in self.engine_peers:
                engine = versions.engines[process.peer]
                if engine.is_up and not engine.asleep:  # a starting server has another deadline
                    incarnations.append(process.hello.incarnation)

            for name in filter(None, incarnations):
                reason = f"{self.role} {name} has not fallen asleep within {deadline:g} s"
                self._replace(Replace(self.role, reason, name))

            # A process has not reported in since the coordinator's start.
            if "" in incarnations and now > self._start_deadline:
                self._start_deadline = now + self.state.liveness.start_seconds
                self._replace(
                    Replace(self.role, f"not all of {self.role} have reported in: they cannot sleep")
                )

    def _replace_unrested(self, now: float) -> None:
        """Replace ranks that do not offload within the time of a start, in which ranks read as much.

        The time begins when the ranks are told to rest.
        """
        ranks = self.trainer.ranks
        time_limit = self.state.liveness.start_seconds

        if ranks.last_plan_kind not in ("rest", ""):  # "": an earlier coordinator has sent the plan
            self._deadline_start = now
        elif now > self._deadline_start + time_limit:
            self._deadline_start = now  # new processes have as much time
            reason = f"the trainer has not come to rest within {time_limit:g} s"
            self._replace(Replace("trainer", reason, ranks.incarnation))

    def _version_ready(self, now: float) -> bool:
        """Return True if the version of the committed steps can be loaded.

        After weights.deadline an earlier version is enough.
        """
        versions = self.state.versions
        config = self.state.config
        is_late = now > self._deadline_start + config.weights.deadline and versions.newest != NO_VERSION
        return versions.newest.step >= self.state.batches.committed or is_late

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

    def _shift_waits(self, shifts: Shifts, missing_names: list[str]) -> Iterator[str]:
        engines = self.state.versions.engines.values()
        versions = self.state.versions
        awake_names = [engine.name for engine in engines if not engine.asleep]

        if shifts.shift is Shift.SLEEPING:
            yield f"the trainer waits for its shift: {', '.join([*missing_names, *awake_names])} to sleep"
        elif shifts.shift is Shift.WAKING and self.engines.may_wake:
            yield f"engines load v{versions.newest.step}"
        elif shifts.shift is Shift.WAKING:
            written = f"v{self.state.batches.committed} must be written first"
            obstacle = written if self.trainer.ranks.offloaded else "the trainer must rest first"
            yield f"engines wait for their shift: {obstacle}"
