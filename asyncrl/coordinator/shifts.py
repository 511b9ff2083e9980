"""Moves the devices that engines and trainer share from one side to the other.

consumes: answers to Sleep; what handlers know of ranks, engines and the buffer
waits for: engines to fall asleep and to wake, ranks to rest, each with a deadline
unblocks: the ranks (plans, in their shift), the engines (the newest version, in theirs)

Nobody is given devices before the other side has said that it holds nothing there: engines by Slept or a
hello, ranks by a request or a checkpoint at rest. A process that does not say so in time is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from asyncrl.buffer.shifts import NOTHING_ASKED, Outlook, Shift, Shifts, Situation
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.peers import Peers
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.validation import Validation
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.types import NO_VERSION
from asyncrl.wire.messages.shared import Replace, Sleep, Slept

SLEEP_AGAIN = 2.0  # seconds after which an engine that has not answered is told again
META = "shift"  # in the store's meta


class ShiftHandler:
    """Does nothing in a run without shifts. `replace` has the launcher replace a process."""

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

        self.places: Peers[Any] = engines.keepers if engines.remote else workers.peers
        self.role = "engine" if engines.remote else "rollout"
        self._number = state.coordinator_epoch << 32  # of the newest order to sleep
        self._told = self._began = self._hopeless_at = 0.0
        self._sampled = self._sampled_at = 0.0  # seconds of all workers' engines; when they last grew

    def begin(self, now: float) -> None:
        """A new launch begins with engines that sleep; a restarted coordinator goes on."""
        if self.state.config.shifts:
            stored = self.state.store.read.meta(META) or Shift.SLEEPING
            self.state.shifts = Shifts(self.state.config.buffer.shift_fill, now, Shift(stored))
            self._began = now
            self._hopeless_at = now + self.state.liveness.start

    def slept(self, peer: bytes, message: Slept, now: float) -> None:
        """An engine answers the order to sleep."""
        engine = self.state.versions.engines.get(peer)
        told = self.state.shifts is not None and self.state.shifts.shift is Shift.SLEEPING
        if engine is None or message.number != self._number or not told:
            return  # of an earlier order, or twice of one

        if message.error:
            log.warning("%s does not sleep: %s", engine.name, message.error)
            return

        engine.asleep = True
        engine.woken = False
        self.state.liveness.alive(now)
        self.state.timeline.past("sleep", message.seconds, engine=engine.name)

        if (worker := self.workers.peers.get(peer)) is not None:
            worker.eval_version = None
            worker.eval_asked = 0.0

    def tick(self, now: float) -> None:
        shifts = self.state.shifts
        trainer = self.trainer
        if shifts is None:
            return

        request = trainer.ranks.request
        engines = self.state.versions.engines.values()
        waiting = [f"{self.role}-{index}" for index in self.places.vacant]
        seen = Situation(
            outlook=self._outlook(),
            starting=bool(trainer.asking),
            asked=trainer.ranks.told == "end" or request is not None,
            held=self.validation.needs_engines and (request is None or not request.micro),
            asleep=not waiting and all(engine.asleep for engine in engines),
            awake=any(engine.woken for engine in engines),
            resting=trainer.ranks.resting,
            idle=self._idle(),
        )

        if shifts.move(now, seen):
            self._entered(shifts.shift, now)
        self.engines.wakes = shifts.shift is Shift.WAKING and trainer.ranks.resting and self._written(now)

        if shifts.shift is Shift.SLEEPING:
            self._put_to_sleep(now)
        elif shifts.shift is Shift.WAKING and not trainer.ranks.resting:
            self._let_rest(now)

        self.state.waits += self._waits(shifts, waiting)

    def _outlook(self) -> Outlook:
        """Say what rank 0's request would find if the trainer had the devices."""
        state = self.state
        request = self.trainer.ranks.request
        if request is None or request.step > state.batches.committed:
            return NOTHING_ASKED

        if request.step in (state.config.total_steps, *range(state.batches.committed)):
            return Outlook(ready=True, share=1.0, complete=True)

        ranks = self.trainer.ranks.size // state.config.trainer.sequence_parallel
        return state.batches.outlook(request.step, request.micro, ranks)

    def _entered(self, shift: Shift, now: float) -> None:
        log.info("shift: %s", shift)
        self.state.store.put_meta(META, shift)
        self.state.liveness.alive(now)
        self._began = self._sampled_at = now

        if shift is Shift.SLEEPING:
            self._number += 1
            self._told = 0.0
            self._hopeless_at = now + self.state.liveness.start
            self.engines.refused.clear()  # by an engine, while another one held the version
            for engine in self.state.versions.engines.values():
                engine.resend(now)  # when it wakes it is sent a version, also the one that it had
                engine.woken = False

    def _put_to_sleep(self, now: float) -> None:
        versions = self.state.versions
        deadline = self.state.config.weights.deadline

        if now > self._told + SLEEP_AGAIN:
            self._told = now
            for peer in [peer for peer, engine in versions.engines.items() if not engine.asleep]:
                self.state.outbox.to_control(peer, Sleep(self._number))

        if now > self._began + deadline:
            self._began = now  # the next ones have as long
            names = [*self.places.vacant.values()]
            for place in self.places:
                engine = versions.engines[place.peer]
                if engine.up and not engine.asleep:  # a server that starts has a deadline of its own
                    names.append(place.hello.incarnation)

            for name in filter(None, names):
                why = f"{self.role} {name} has not fallen asleep within {deadline:g} s"
                self._replace(Replace(self.role, why, name))

            if "" in names and now > self._hopeless_at:  # not heard of since this coordinator began
                self._hopeless_at = now + self.state.liveness.start
                self._replace(
                    Replace(self.role, f"not all of {self.role} have reported in: they cannot sleep")
                )

    def _let_rest(self, now: float) -> None:
        """Replace ranks that do not rest within the time of a start, in which they read as much. It begins
        when they are told to."""
        ranks = self.trainer.ranks
        limit = self.state.liveness.start

        if ranks.told not in ("rest", ""):  # "": told by an earlier coordinator
            self._began = now
        elif now > self._began + limit:
            self._began = now  # the next ones have as long
            why = f"the trainer has not come to rest within {limit:g} s"
            self._replace(Replace("trainer", why, ranks.incarnation))

    def _written(self, now: float) -> bool:
        """The version of the committed steps is there to be loaded; or an earlier one is, and this one has
        not come for long."""
        versions = self.state.versions
        config = self.state.config
        late = now > self._began + config.weights.deadline and versions.newest != NO_VERSION
        return versions.newest.step >= self.state.batches.committed or late

    def _idle(self) -> float:
        """Seconds for which no engine has sampled, as far as all workers' beats tell."""
        beats = [(one.beat.busy_s, one.beat_at) for one in self.workers.peers if one.beat]
        sampled = sum(busy for busy, _ in beats)
        times = [at for _, at in beats]

        if beats and sampled != self._sampled:
            self._sampled = sampled
            self._sampled_at = max(times)

        return min(times, default=0.0) - self._sampled_at

    def _waits(self, shifts: Shifts, missing: list[str]) -> Iterator[str]:
        engines = self.state.versions.engines.values()
        versions = self.state.versions
        awake = [engine.name for engine in engines if not engine.asleep]

        if shifts.shift is Shift.SLEEPING:
            yield f"the trainer waits for its shift: {', '.join([*missing, *awake])} to sleep"
        elif shifts.shift is Shift.WAKING and self.engines.wakes:
            yield f"engines load v{versions.newest.step}"
        elif shifts.shift is Shift.WAKING:
            written = f"v{self.state.batches.committed} must be written first"
            lack = written if self.trainer.ranks.resting else "the trainer must rest first"
            yield f"engines wait for their shift: {lack}"
