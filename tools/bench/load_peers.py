"""The simulated peers of tools/bench/load.py: workers, server supervisors, a trainer and a launcher.

The peers send the real messages, and compute nothing.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from asyncrl.types import EpisodeResult, EpisodeStats
from asyncrl.weights.manifest import Probe, WeightsRef
from asyncrl.wire.messages import channels
from asyncrl.wire.messages.engine import SupervisorHeartbeat, SupervisorHello
from asyncrl.wire.messages.shared import (
    Attempt,
    Loaded,
    LoadWeights,
    ObserverHello,
    RunEnd,
    Status,
    Welcome,
    WireMessage,
)
from asyncrl.wire.messages.trainer import (
    Checkpointed,
    Commit,
    Committed,
    PayloadRequest,
    Payloads,
    PlanRequest,
    Probed,
    Published,
    TrainerHeartbeat,
    TrainerHello,
    WorkPlan,
)
from asyncrl.wire.messages.worker import (
    Ack,
    Assign,
    Cancel,
    EngineEntry,
    Engines,
    EngineUse,
    Fenced,
    Finished,
    Generated,
    Record,
    Records,
    Replied,
    WorkerHeartbeat,
    WorkerHello,
)
from asyncrl.wire.sockets import Codec, encode_message, identity, set_identity

if TYPE_CHECKING:
    from load import Bench

# What a scripted engine scores, too: engines of a real worker play only after a comparison.
PROBE = Probe(sequences=((1, 2, 3, 4),), logprobs=((-1.0, -1.0, -1.0),))


class Peer:
    """The sockets of a simulated process. `receive` is called with each message that arrives."""

    def __init__(self, bench: Bench, role: str, index: int, control: Any, bulk: Any = None) -> None:
        self.bench = bench
        self.index = index
        self.incarnation = f"{bench.launch}.{index + 1}"
        name = identity(role, index, self.incarnation)
        self.control = self._open(name, bench.endpoints.control, control)
        self.bulk = self._open(name, bench.endpoints.bulk, bulk) if bulk else None
        self.welcomed = False

    def _open(self, name: bytes, endpoint: str, union: Any) -> zmq.Socket:
        socket: zmq.Socket = self.bench.context.socket(zmq.DEALER)
        set_identity(socket, name, self.bench.endpoints.keys)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        self.bench.add(socket, self, Codec(union))
        return socket

    def receive(self, message: Any, frames: list[bytes]) -> None:
        raise NotImplementedError

    def beat(self) -> None:
        raise NotImplementedError


class Worker(Peer):
    """A rollout worker: holds an episode until its end is acknowledged."""

    def __init__(self, bench: Bench, index: int) -> None:
        super().__init__(bench, "rollout", index, channels.ToWorkerControl, channels.ToWorkerBulk)
        self.seq = self.assigned = self.tokens = 0
        self.version = 0  # newest that it may sample with
        self.servers: dict[str, EngineEntry] = {}
        self.attempts: set[Attempt] = set()
        self.ends: deque[tuple[int, Attempt]] = deque()  # sent and not acknowledged
        self.uses = [EngineUse(f"engine {number}") for number in range(bench.options.servers)]

    def beat(self) -> None:
        if not self.welcomed:
            hello = WorkerHello(self.index, self.incarnation, self.bench.options.slots, os.getpid())
            self.send(self.control, hello)
            return
        beat = WorkerHeartbeat(
            self.assigned, tuple(self.attempts), 1.0, 1.0, self.tokens, engines=tuple(self.uses)
        )
        self.send(self.control, beat)

    def send(self, socket: zmq.Socket, message: WireMessage, *frames: bytes) -> None:
        socket.send_multipart(encode_message(message, frames), flags=zmq.DONTWAIT)

    def receive(self, message: Any, frames: list[bytes]) -> None:
        match message:
            case Assign():
                self.assigned = message.seq
                self.attempts.add(message.attempt)
                self.bench.play(self, message.attempt, 0)
            case Ack():
                while self.ends and self.ends[0][0] <= message.seq:
                    self.attempts.discard(self.ends.popleft()[1])
                    self.bench.landed()
            case Engines():
                self.servers = message.updated_table(self.servers)
                steps = [entry.version.step for entry in self.servers.values() if entry.healthy]
                self.version = max([self.version, *steps])
            case LoadWeights():
                self.version = message.ref.version.step
                self.send(self.control, Loaded(message.ref, message.lane, "same", 0.0))
            case Welcome():
                self.welcomed = True
            case Cancel() | Fenced():
                self.attempts.discard(message.attempt)

    def record(self, record: Record, *frames: bytes) -> None:
        self.send(self.bulk, Records(((record, len(frames)),)), *frames)

    def play(self, attempt: Attempt, turn: int) -> None:
        """Sample a turn of an episode; end the episode after its last turn."""
        if attempt not in self.attempts:
            return
        half = self.bench.options.tokens // 2
        turns = self.bench.options.turns
        self.seq += 1
        self.tokens += half
        report = Generated(self.seq, attempt, turn, 1.0)
        self.record(report, self.bench.payload(turn, self.version))

        if self.uses:
            use = self.uses[self.seq % len(self.uses)]
            use.requests = use.requests + 1
            use.tokens = use.tokens + half

        self.seq += 1
        if turn + 1 < turns:
            self.record(Replied(self.seq, attempt, turn), self.bench.reply)
            self.bench.play(self, attempt, turn + 1)
            return

        result = EpisodeResult(float(self.bench.random.random() < 0.5), turns * half)
        stats = EpisodeStats(turns, longest_row=2 * turns * half, prompt=half, seconds=1.0)
        self.record(Finished(self.seq, attempt, result, stats))
        self.ends.append((self.seq, attempt))


class SupervisorPeer(Peer):
    """The supervisor of a server that loads versions at once."""

    def __init__(self, bench: Bench, index: int) -> None:
        super().__init__(bench, "engine", index, channels.ToSupervisor)

    def beat(self) -> None:
        hello = SupervisorHello(
            self.index, self.incarnation, f"http://server-{self.index}:30000", os.getpid()
        )
        beat = SupervisorHeartbeat(healthy=True, starting=False)
        self.control.send_multipart(encode_message(beat if self.welcomed else hello, []))

    def receive(self, message: Any, frames: list[bytes]) -> None:
        if isinstance(message, Welcome):
            self.welcomed = True
        elif isinstance(message, LoadWeights):
            self.control.send_multipart(encode_message(Loaded(message.ref, message.lane, "same", 0.0), []))


class Trainer(Peer):
    """The only rank, which trains a micro-batch in no time."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench, "trainer", 0, channels.ToTrainerControl, channels.ToTrainerBulk)
        self.epoch = self.step = self.micro = self.work = self.trained = 0
        self.batch: list[str] = []

    def beat(self) -> None:
        hello = TrainerHello(0, 1, self.incarnation, 0)
        beat = TrainerHeartbeat(0, 1.0, 1.0, work=self.work)
        self._tell(beat if self.welcomed else hello)

    def _tell(self, message: WireMessage) -> None:
        self.control.send_multipart(encode_message(message, []))

    def _ask(self, message: WireMessage) -> None:
        self.bulk.send_multipart(encode_message(message, []))

    def _publish(self) -> None:
        ref = WeightsRef((self.epoch, self.step), "weights")  # type: ignore[arg-type]
        self._tell(Published(ref, 0.0, 0.0))

    def _next(self) -> None:
        self._ask(PlanRequest(self.epoch, self.step + 1, self.micro))

    def receive(self, message: Any, frames: list[bytes]) -> None:
        match message:
            case Welcome() if not self.welcomed:
                self.welcomed = True
                self.epoch = message.trainer_epoch
                self._publish()
                self._next()
            case WorkPlan(kind="probe"):
                self._tell(Probed((self.epoch, self.step), PROBE))  # type: ignore[arg-type]
                self._next()
            case WorkPlan(kind="probe_samples"):  # scores nothing
                self._next()
            case WorkPlan(kind="work"):
                uids = tuple(planned.uid for planned in message.trajectories)
                self.batch += uids
                self._ask(PayloadRequest(self.epoch, message.step, uids))
            case Payloads():
                self.micro = self.micro + 1
                self.work = self.work + 1
                self._next()
            case WorkPlan(kind="step"):
                uids = tuple(self.batch)
                self.batch = []
                self.trained += len(uids)
                metrics = {"actor/grad_norm": 1.0}
                self._tell(Commit(self.epoch, self.step + 1, message.plan_hash, uids, metrics))
            case Committed():
                self.step = message.step
                self.micro = 0
                if self.step % self.bench.options.checkpoint_every == 0:
                    self._checkpoint()
                self._publish()
                self._next()
            case WorkPlan():  # end or stop
                self._checkpoint()

    def _checkpoint(self) -> None:
        self._tell(Checkpointed(self.epoch, self.step, self.trained))


class Observer(Peer):
    """The launcher's console."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench, "observer", 0, channels.ToObserver)

    def beat(self) -> None:
        if not self.welcomed:
            self.control.send_multipart(encode_message(ObserverHello(), []))

    def receive(self, message: Any, frames: list[bytes]) -> None:
        self.welcomed = True
        if isinstance(message, RunEnd):
            self.bench.ending = message
        elif isinstance(message, Status):
            self.bench.status = message
