"""A worker and a trainer, played: what they say, without an engine or a model, on the clock of a `World`."""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.buffer.payloads import TurnPart, decode_part, decode_turn
from asyncrl.runtime.liveness import Contact, ContactState
from asyncrl.store.checkpoints import CheckpointManifest, Checkpoints, Files
from asyncrl.types import (
    NO_VERSION,
    EpisodeResult,
    EpisodeStats,
    FailReason,
    Generation,
    PolicyVersion,
    StopReason,
    VersionSpan,
)
from asyncrl.weights.disk import MANIFEST
from asyncrl.weights.manifest import Probe, WeightsRef
from asyncrl.wire.messages.shared import (
    Attempt,
    Loaded,
    LoadWeights,
    Sleep,
    Slept,
    Stop,
    Welcome,
    WireMessage,
)
from asyncrl.wire.messages.trainer import (
    AskDevices,
    Checkpointed,
    Commit,
    Committed,
    GaveUp,
    GrantDevices,
    PayloadRequest,
    Payloads,
    PlannedTrajectory,
    PlanRequest,
    Probed,
    Published,
    TrainerHeartbeat,
    TrainerHello,
    WorkPlan,
    is_answer,
)
from asyncrl.wire.messages.worker import (
    Ack,
    Assign,
    Cancel,
    Failed,
    Fenced,
    Finished,
    Generated,
    MinVersion,
    Records,
    Sampled,
    WorkerHeartbeat,
    WorkerHello,
)
from tests.unit.buffer.machine import turn_payload

if TYPE_CHECKING:
    from tests.fakes.world import World

RESEND = 2.0  # seconds after which what was not answered is said again
PART = 4  # tokens of the ten of a turn
EPISODE_SECONDS = 20.0  # after which an episode that hangs is given up


class PlayedLink:
    """A peer's two channels. Until `cut_until` everything is lost, until `held_until` everything waits; until
    `asleep_until` the process is stopped."""

    def __init__(self, world: World, peer: bytes) -> None:
        self.world = world
        self.peer = peer
        self.inbox: tuple[deque[Any], deque[Any]] = deque(), deque()  # control, bulk
        self.cut_until = self.held_until = self.asleep_until = 0.0

    def say(self, message: WireMessage, frames: list[bytes] | None = None, bulk: bool = False) -> None:
        if self.world.now >= self.cut_until:
            self.world.send(self.peer, message, frames or [], bulk, self.held_until)

    def received(self) -> Iterator[tuple[WireMessage, list[bytes]]]:
        """Yield the messages that have arrived by now."""
        while due_queues := [queue for queue in self.inbox if queue and queue[0][0] <= self.world.now]:
            yield self.world.dice.choice(due_queues).popleft()[1]

    def disconnect(self) -> None:
        """Lose the messages under way."""
        for queue in self.inbox:
            queue.clear()


class Running:
    """An episode of a worker."""

    def __init__(self, assign: Assign, turns: int, now: float) -> None:
        self.assign = assign
        self.turns = turns
        self.began = now
        self.sampled = self.version = 0  # tokens of the turn under way, and the oldest version of them
        self.repeats = True
        self.waits_for = 0  # the record that must be durable before it goes on

    def add(self, version: int) -> None:
        """A part of the turn under way is there."""
        self.version = min(self.version, version) if self.sampled else version
        self.sampled += PART


def part_payload(running: Running, version: int) -> bytes:
    spans = (VersionSpan(0, PART, version, version),)
    sampled = Generation((1,) * PART, (-0.5,) * PART, spans, StopReason.ABORT)
    return msgspec.msgpack.encode(TurnPart(0, bytes([running.turns]), running.sampled, sampled))


class PlayedWorker:
    """Plays episodes of one to three turns, of which not all repeat the recorded turns.

    Half of the turns come in parts before they are whole. `hangs_until`: the worker answers, and its episodes
    do not go on.
    """

    def __init__(self, world: World, index: int, incarnation: str) -> None:
        self.world = world
        self.index = index
        self.incarnation = incarnation
        self.link = PlayedLink(world, f"rollout/{index}/{incarnation}".encode())
        self.hangs_until = 0.0
        self.up_at = world.now + world.dice.choice([0.5, 2.0])
        self.contact = Contact(world.config.launch.lease, 1e9, world.now)
        self.attempts: dict[Attempt, Running] = {}
        self.unacked: dict[int, tuple[Any, list[bytes]]] = {}
        self.seq = self.assigned = self.oldest = 0
        self.epoch = -1
        self.tick_at = 0.0
        self.resend_at = 0.0
        self.loaded = {"train": NO_VERSION, "eval": NO_VERSION}
        self.refuses = 0  # loads that fail
        self.asleep = world.config.shifts
        self.orders: deque[tuple[float, LoadWeights | Sleep]] = deque()  # when the first is done

    def tick(self) -> None:
        now = self.world.now
        if now < max(self.up_at, self.tick_at):
            return
        self.tick_at = now + 0.3

        for received in self.link.received():
            self.contact.message_arrived(now)
            self._take(*received)

        while self.orders and self.orders[0][0] <= now:
            self._obey(self.orders.popleft()[1])
        match self.contact.contact_state(now):
            case ContactState.FINE:
                held_attempts = tuple(
                    {record.attempt for record, _ in self.unacked.values()} | self.attempts.keys()
                )
                self.link.say(
                    WorkerHeartbeat(self.assigned, held_attempts, now, 0.0, self.seq, acked=self._acked)
                )
            case ContactState.QUIET:
                self._hello()
            case _:
                self.attempts.clear()
                self._hello()

        if now < self.hangs_until:
            return
        for attempt in list(self.attempts):
            if self.world.dice.random() < 0.7:
                self._go_on(attempt)

        if self.unacked and now > self.resend_at:
            self._resend()

    def _take(self, message: WireMessage, frames: list[bytes]) -> None:
        match message:
            case Welcome():
                self.contact.welcomed = True
                if message.coordinator_epoch != self.epoch:
                    self.epoch = message.coordinator_epoch
                    self.assigned = 0
                self._resend()
            case Assign():
                self.assigned = message.seq
                for other_attempt in [
                    attempt for attempt in self.attempts if attempt.uid == message.attempt.uid
                ]:
                    if other_attempt != message.attempt:
                        del self.attempts[other_attempt]

                if message.attempt not in self.attempts:
                    self.world.continued += message.lane == "eval" and bool(frames)
                    count = len(frames) - message.parts
                    running = Running(message, count // 2, self.world.now)
                    self._recall(running, [decode_part(frame) for frame in frames[count:]])
                    running.repeats = not frames or self.world.dice.random() < 0.7
                    self.attempts[message.attempt] = running
            case Cancel() | Fenced():
                self.attempts.pop(message.attempt, None)
            case MinVersion():
                self.oldest = message.min_version
            case LoadWeights():
                self.asleep = False  # from the first byte on
                seconds = self.world.dice.choice([0.0, 0.5, 3.0]) if self.world.config.shifts else 0.0
                self.orders.append((self.world.now + seconds, message))
            case Sleep():
                self.orders.append((self.world.now, message))
            case Ack():
                self.unacked = {seq: record for seq, record in self.unacked.items() if seq > message.seq}

    def _recall(self, running: Running, parts: list[TurnPart]) -> None:
        """Go on after the parts of the turn under way: each follows the one before. Others are of a turn that
        is whole, which were sent again to a restarted coordinator."""
        for part in parts:
            if part.prompt == bytes([running.turns]):
                assert part.start == running.sampled
                running.add(part.sampled.spans[0].version)

    def _obey(self, message: LoadWeights | Sleep) -> None:
        if isinstance(message, Sleep):
            self.asleep = True
            self.loaded = {"train": NO_VERSION, "eval": NO_VERSION}
            self.link.say(Slept(message.number, 0.1))
            return

        if self.refuses:
            self.refuses -= 1
            self.asleep = self.world.config.shifts and self.loaded["train"] == NO_VERSION
            self.link.say(Loaded(message.ref, message.lane, "", 0.1, error="damaged"))
            return

        self.loaded[message.lane] = message.ref.version
        self.link.say(Loaded(message.ref, message.lane, message.ref.label, 0.1))

    def _go_on(self, attempt: Attempt) -> None:
        running = self.attempts[attempt]
        version = self.loaded[running.assign.lane].step
        if self.world.now - running.began > EPISODE_SECONDS:
            del self.attempts[attempt]
            self._post(Failed(0, attempt, FailReason.DEADLINE, "it hung"))
        elif not running.repeats:
            del self.attempts[attempt]
            self._post(Failed(0, attempt, FailReason.NOT_REPEATED, "other messages"))
        elif running.waits_for in self.unacked:
            return  # not durable yet
        elif running.turns == 1 + sum(map(ord, attempt.uid)) % 3:
            del self.attempts[attempt]
            reward = float(self.world.dice.random() < 0.5)
            self._post(
                Finished(0, attempt, EpisodeResult(reward, 10 * running.turns), EpisodeStats(running.turns))
            )
        elif self.asleep:
            return
        elif running.assign.lane == "eval" or version >= max(running.assign.min_version, self.oldest):
            seconds = self.world.now - running.began
            if running.sampled < PART * (zlib.crc32(f"{attempt.uid} {running.turns}".encode()) % 4 - 1):
                self._post(Sampled(0, attempt, seconds), part_payload(running, version))
                running.add(version)
                return

            payload = turn_payload(running.turns, running.version if running.sampled else version)
            generated = Generated(0, attempt, running.turns, seconds)
            running.turns = running.turns + 1
            running.waits_for = self._post(generated, payload)
            running.sampled = 0

    def _post(self, record: Any, *frames: bytes) -> int:
        self.seq += 1
        self.resend_at = self.world.now + RESEND
        self.unacked[self.seq] = (msgspec.structs.replace(record, seq=self.seq), list(frames))
        self._send([self.unacked[self.seq]])
        return self.seq

    def _send(self, records: list[tuple[Any, list[bytes]]]) -> None:
        counted = tuple((record, len(frames)) for record, frames in records)
        self.link.say(Records(counted), [frame for _, frames in records for frame in frames], bulk=True)

    def _resend(self) -> None:
        self.resend_at = self.world.now + RESEND
        waiting = [*self.unacked.values()]
        for start in range(0, len(waiting), 3):
            self._send(waiting[start : start + 3])

    def _hello(self) -> None:
        self.link.say(WorkerHello(self.index, self.incarnation, 6, 1, self._acked))

    @property
    def _acked(self) -> int:
        return min(self.unacked, default=self.seq + 1) - 1


class PlayedRank:
    """A rank of a played trainer: its open question, and its plan."""

    def __init__(self, trainer: PlayedTrainer, rank: int) -> None:
        self.trainer = trainer
        self.world = trainer.world
        self.rank = rank
        self.link = PlayedLink(self.world, f"trainer/{rank}/{trainer.incarnation}".encode())
        self.question: tuple[WireMessage, bool] | None = None  # to be answered, and on which channel
        self.plan: WorkPlan | None = None  # the plan of rank 0, of which this rank has its part
        self.uids = list[str]()
        self.turns = dict[str, int]()
        self.greeted = self.ready = False
        self.resend_at = self.tick_at = self.beat_at = 0.0

    def tick(self) -> None:
        trainer = self.trainer
        now = self.world.now
        if now < max(trainer.up_at, self.tick_at) or trainer.has_ended:
            return

        if not self.greeted:
            self.greeted = True
            if trainer.granted:
                trainer.resume()
                self.ask(self._greeting(), bulk=False)
            else:
                self.ask(AskDevices(self.rank, trainer.incarnation), bulk=False)

        self.tick_at = now + 0.1
        for received in self.link.received():
            trainer.take(self, *received)

        if now >= self.beat_at:
            self.beat_at = now + 1.0
            self.link.say(TrainerHeartbeat(self.rank, now, 0.0, "", trainer.work))

        if self.question is not None and now >= self.resend_at:
            self.resend_at = now + RESEND
            if self.world.dice.random() < 0.5 and trainer.granted:
                self.link.say(self._greeting())  # as after silence
            self.link.say(self.question[0], bulk=self.question[1])

    def _greeting(self) -> TrainerHello:
        trainer = self.trainer
        return TrainerHello(self.rank, len(trainer.ranks), trainer.incarnation, trainer.acknowledged)

    def ask(self, message: WireMessage, bulk: bool) -> None:
        self.question = (message, bulk)
        self.resend_at = self.world.now + RESEND
        self.link.say(message, bulk=bulk)


class PlayedTrainer:
    """Ranks whose model is the list of trained episodes. The trainer's checkpoints are real files."""

    def __init__(self, world: World, incarnation: str) -> None:
        self.world = world
        self.incarnation = incarnation
        self.ranks = [PlayedRank(self, rank) for rank in range(world.config.trainer.ranks)]
        self.first = self.ranks[0]
        self.link = self.first.link
        self.up_at = world.now + world.dice.choice([1.0, 3.0])
        self.checkpoints = Checkpoints(world.run_dir / "checkpoints")
        self.step = 0
        self.part_index = 0
        self.parent = -1
        self.epoch = 0
        self.trained: list[str] = []
        self.batch: list[str] = []
        self.lost: list[str] = []  # of the batch
        self.unsaved: list[str] = []
        self.repeating = self.has_ended = self.spikes = False
        self.published: Published | None = None
        self.resumed = self.resting = False
        self.granted = self.holds_devices = not world.config.shifts
        self.waits_for = len(self.ranks)  # to be granted the devices
        self.work = 0

    def resume(self) -> None:
        """Resume, once, from the newest checkpoint whose files are as written."""
        if self.resumed:
            return
        self.resumed = True

        sound = (step for step in self.checkpoints.steps() if not self.checkpoints.find_damage(step))
        if (step := next(sound, -1)) >= 0:
            with self.checkpoints.open_file(step, "state") as file:
                self.trained = json.loads(file.read())
            self.step = self.parent = step

    @property
    def acknowledged(self) -> int:
        """Return the step whose commit is answered: the trainer is ahead by a step while its commit is
        not."""
        question = self.first.question
        return self.step - (question is not None and isinstance(question[0], Commit))

    def take(self, rank: PlayedRank, message: WireMessage, frames: list[bytes]) -> None:
        question = rank.question[0] if rank.question else None
        match message:
            case _ if self.has_ended:
                pass
            case Stop():
                self.has_ended = True
                if self.first.question and isinstance(self.first.question[0], GaveUp):
                    self.world.start_trainer()
            case GrantDevices() if isinstance(question, AskDevices):
                self.holds_devices = True
                rank.question = None
                self.waits_for -= 1
                self.granted = not self.waits_for
                for other_rank in self.ranks if self.granted else []:
                    other_rank.greeted = False
            case Welcome() if isinstance(question, TrainerHello):
                self.epoch = message.trainer_epoch
                if rank is self.first:
                    self.repeating = self.step < message.step
                    if not self.repeating:
                        self._publish()

                rank.question = None
                rank.ready = True
                if all(other_rank.ready for other_rank in self.ranks):
                    self._request()
            case Welcome() if rank is self.first and self.published is not None:
                self.link.say(self.published)
            case WorkPlan() if isinstance(question, PlanRequest) and is_answer(message, question):
                rank.question = None
                for index, other_rank in enumerate(self.ranks):
                    self._hand(other_rank, message, message.trajectories[index :: len(self.ranks)])
                self._start()
            case Payloads() if isinstance(question, PayloadRequest) and is_answer(message, question):
                self._check_lag(frames)
                assert len(frames) == sum(rank.turns[uid] for uid in message.uids if uid not in message.lost)
                rank.question = None
                rank.uids = [uid for uid in message.uids if uid not in message.lost]
                self.lost += message.lost
                self._start()
            case Committed() if isinstance(question, Commit) and is_answer(message, question):
                self._committed(message)

    def _request(self) -> None:
        self.first.ask(PlanRequest(self.epoch, self.step + 1, self.part_index, self.resting), bulk=True)

    def _hand(self, rank: PlayedRank, plan: WorkPlan, part: tuple[PlannedTrajectory, ...]) -> None:
        """Hand a plan of rank 0 to a rank, which requests its part."""
        rank.plan = plan
        rank.uids = []
        rank.turns = {planned.uid: planned.frames for planned in part}
        if part:
            rank.ask(PayloadRequest(self.epoch, plan.step, tuple(rank.turns)), bulk=True)

    def _start(self) -> None:
        """Train once the last rank has its part."""
        plan = self.first.plan
        if plan is None or any(
            isinstance(rank.question and rank.question[0], PayloadRequest) for rank in self.ranks
        ):
            return

        self.first.plan = None
        self.batch += [uid for rank in self.ranks for uid in rank.uids]
        self._run(plan)

    def _run(self, plan: WorkPlan) -> None:
        if plan.kind != "stop":  # a stop's checkpoint is written from the offloaded shards
            self.resting = plan.kind == "rest"
            self.holds_devices = not self.resting
        match plan.kind:
            case "rest":
                self._request()
            case "work":
                self.part_index = self.part_index + 1
                self.work = self.work + 1
                self._request()
            case "step" if self.spikes and not self.repeating:
                self.first.ask(GaveUp(self.epoch, 0, self.step + 1, "spike", "its norm is nan"), bulk=False)
            case "step":
                batch = self.batch
                self.batch = []
                self.trained = self.trained + batch
                self.unsaved += batch
                self.part_index = 0
                self.step = self.step + 1
                metrics = {"actor/grad_norm": 1.0}
                lost = tuple(self.lost)
                self.lost = []
                commit = Commit(self.epoch, self.step, plan.plan_hash, tuple(batch), metrics, lost)
                self.first.ask(commit, bulk=False)
            case "end" | "stop":
                if self.parent != self.step:
                    self._save()
                self.holds_devices = self.holds_devices and not (
                    self.world.config.shifts and plan.kind == "end"
                )
                self.first.ask(self._checkpointed(resting=not self.holds_devices), bulk=False)
            case "probe":
                assert self.world.config.shifts, "no engine asked for a probe"
                self._publish()
                probe = Probe(((1, 2),), ((-0.5,),))
                self.first.link.say(Probed(PolicyVersion(self.epoch, self.step), probe))
                self._request()

    def _check_lag(self, frames: list[bytes]) -> None:
        """Assert the bound on staleness, which the real trainer's masks enforce last."""
        buffer = self.world.config.buffer
        oldest = min(
            (span.version for frame in frames for span in decode_turn(frame).generation.spans),
            default=self.step,
        )
        assert buffer.on_stale == "mask" or self.step - oldest <= buffer.max_staleness, (
            f"lag {self.step - oldest} at step {self.step} with {buffer.on_stale}: {self.world.log[-20:]}"
        )

    def _committed(self, message: Committed) -> None:
        self.first.question = None
        if message.publish:
            self.repeating = False
            self._publish()
        if self.step % self.world.config.checkpoint.every == 0:
            self._save()
            self.link.say(self._checkpointed())
        self._request()

    def _publish(self) -> None:
        version = PolicyVersion(self.epoch, self.step)
        directory = self.world.run_dir / "weights" / version.label
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST).touch()
        self.published = Published(WeightsRef(version, str(directory)), 0.0, 0.0)
        self.link.say(self.published)

    def _save(self) -> None:
        files: Files = {}
        self.checkpoints.prepare_step(self.step)
        with self.checkpoints.create_file(self.step, "state", files) as file:
            file.write(json.dumps(self.trained).encode())

        manifest = CheckpointManifest(
            step=self.step,
            trainer_epoch=self.epoch,
            parent=self.parent,
            trained=tuple(self.unsaved),
            trained_total=len(self.trained),
            files=files,
        )

        self.checkpoints.write_manifest(manifest)
        self.checkpoints.prune_steps(self.step, self.world.config.checkpoint.keep)
        self.parent = self.step
        self.unsaved = []

    def _checkpointed(self, resting: bool = False) -> Checkpointed:
        return Checkpointed(self.epoch, self.parent, len(self.trained), resting)
