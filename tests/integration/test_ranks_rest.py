"""Whole ranks, and a coordinator that gives the devices now to engines, now to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from asyncrl.config import RunConfig
from asyncrl.observe.timeline import TimelineLine
from asyncrl.trainer import rank as module
from asyncrl.trainer.world import World
from asyncrl.weights import disk
from asyncrl.wire.messages import trainer
from asyncrl.wire.messages.channels import ToCoordinatorBulk, ToCoordinatorControl
from asyncrl.wire.messages.shared import Stop, Welcome, WireMessage
from asyncrl.wire.sockets import Endpoints, Gate, Hub, Poller, choose_endpoints
from tests.fakes.forked import FORKED
from tests.fakes.training import Recorder, full_state, make_learner, plain_model, save_tiny_qwen, tiny_config

DEADLINE = 40.0
EPOCH = 3


class Coordinator:
    """Grants devices, welcomes, gives payloads and acknowledges commits; tests answer requests for plans.
    `arrived`: all else, in order."""

    def __init__(self, episodes: list[Any]) -> None:
        self.endpoints = choose_endpoints("127.0.0.1", 0)
        self.gate = Gate(self.endpoints)
        self.control = Hub(self.endpoints.control, ToCoordinatorControl, self.gate)
        self.bulk = Hub(self.endpoints.bulk, ToCoordinatorBulk, self.gate)
        self.turns = {planned.uid: turns for planned, turns in episodes}
        self.arrived = list[Any]()
        self.waits = set[str]()
        self.asked = set[int]()
        self.peers = set[bytes]()
        self.first = b""
        self.grants = True
        self.ranks = list[Any]()

    def until(self, kind: type, **fields: Any) -> Any:
        """The next message of that kind and with these fields; what came before it is forgotten."""
        end = time.monotonic() + DEADLINE
        while True:
            while self.arrived:
                message = self.arrived.pop(0)
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                    return message
            assert time.monotonic() < end, f"no {kind.__name__} {fields}"
            assert not any(process.exitcode for process in self.ranks), "a rank has failed"
            Poller(self.control, self.bulk).wait(0.5)
            for hub in (self.control, self.bulk):
                while (received := hub.receive()) is not None:
                    self._handle(received[0], received[1])

    def plan(self, request: trainer.PlanRequest, kind: Any, **fields: Any) -> None:
        plan = trainer.WorkPlan(request.step, request.part, kind, **fields)
        assert self.bulk.send(self.first, plan)

    def stop(self) -> None:
        for peer in self.peers:
            self.control.send(peer, Stop("the test is over"))

    def _handle(self, peer: bytes, message: WireMessage) -> None:
        self.peers.add(peer)
        match message:
            case trainer.AskDevices(index):
                self.asked.add(index)
                for _ in range(2 * self.grants):  # a second one is of no harm
                    self.control.send(peer, trainer.GrantDevices())
            case trainer.TrainerHello(index):
                assert index in self.asked
                self.first = self.first if index else peer
                self.control.send(peer, Welcome(1, EPOCH, 0))
            case trainer.TrainerHeartbeat():
                self.waits.add(message.waiting)
            case trainer.PayloadRequest():
                frames = [msgspec.msgpack.encode(turn) for uid in message.uids for turn in self.turns[uid]]
                self.bulk.send(peer, trainer.Payloads(message.step, message.uids), frames)
            case trainer.Commit():
                self.control.send(peer, trainer.Committed(message.step, True))
        self.arrived.append(message)

    def close(self) -> None:
        for end in (self.control, self.bulk, self.gate):
            end.close()


class Run:
    def __init__(self, folder: Path) -> None:
        path = save_tiny_qwen(folder / "model")
        self.folder = folder
        engine = {"colocated": 1}
        config = tiny_config(path, engine=engine, checkpoint={"every": 10})
        self.config = replace(config, run_dir=str(folder))
        episodes = Recorder(plain_model(path, torch.float32), noise=0.2).groups(4, 4, [0], name="")
        self.episodes = [
            (replace(planned, tokens=n, width=n), turns)
            for planned, turns in episodes
            for n in [sum(len(turn.context) + len(turn.generation.ids) for turn in turns)]
        ]
        self.coordinator = Coordinator(self.episodes)

    @property
    def planned(self) -> tuple[trainer.PlannedTrajectory, ...]:
        return tuple(planned for planned, _ in self.episodes)

    def lines(self, rank: int) -> list[TimelineLine]:
        file = self.folder / "t" / "timeline" / f"trainer-{rank}.jsonl"
        return [msgspec.json.decode(line, type=TimelineLine) for line in file.read_text().splitlines()]

    @contextmanager
    def ranks(self, size: int) -> Iterator[None]:
        """They end in order when the body has stopped them."""
        arguments = self.coordinator.endpoints, size, f"{self.folder}/rendezvous"
        config = replace(self.config, trainer=replace(self.config.trainer, ranks=size))
        ranks = [FORKED.Process(target=_rank, args=(config, rank, *arguments)) for rank in range(size)]
        for process in ranks:
            process.start()
        self.coordinator.ranks = ranks
        try:
            yield
            self.coordinator.stop()
            for process in ranks:
                process.join(60)
            assert [process.exitcode for process in ranks] == [0] * size
        finally:
            for process in ranks:
                process.kill()
            self.coordinator.close()


def _rank(config: RunConfig, rank: int, endpoints: Endpoints, size: int, rendezvous: str) -> None:
    code = module.run(config, endpoints, rank, "1", rendezvous if size > 1 else "")
    assert code == 0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_rest_when_ordered_and_train_as_ever(size: int, run: Run, world: World) -> None:
    """Before the first micro-batch, where the order comes twice; within the batch; and at the end."""
    coordinator = run.coordinator
    requests = trainer.PlanRequest
    with run.ranks(size):
        request = coordinator.until(requests)
        assert request == requests(EPOCH, 1, 0) and coordinator.asked == {*range(size)}
        for _ in range(2):
            coordinator.plan(request, "rest")
        for _ in range(2):  # the second order has an answer, too
            request = coordinator.until(requests)
            assert request == requests(EPOCH, 1, 0, resting=True)
        half = len(run.planned) // 2
        coordinator.plan(request, "work", trajectories=run.planned[:half])
        request = coordinator.until(requests, part=1)
        assert not request.resting
        coordinator.plan(request, "rest")
        request = coordinator.until(requests, resting=True)
        assert request.part == 1
        coordinator.plan(request, "work", trajectories=run.planned[half:])
        request = coordinator.until(requests, part=2)
        assert not request.resting
        coordinator.plan(request, "step")
        commit = coordinator.until(trainer.Commit)
        ref = coordinator.until(trainer.Published).ref
        request = coordinator.until(requests, step=2)
        coordinator.plan(request, "rest")  # the version may not be written yet
        request = coordinator.until(requests, resting=True)
        coordinator.plan(request, "end")
        assert not coordinator.until(trainer.Checkpointed).resting
        assert coordinator.until(trainer.Checkpointed, resting=True).step == 1
        published = disk.read_tensors(ref)[1]
    phases = {f"timing_s/{name}" for name in ("rest", "wait_devices", "wake")}
    assert phases <= commit.metrics.keys() and ref.version == (EPOCH, 1)
    waiting_rank = "" if size == 1 else "rank 0, which is waiting for "
    assert f"{waiting_rank}trajectories of step 1 (offloaded while engines sample)" in coordinator.waits
    learner = make_learner(run.config, world, "float32")
    for part in (run.episodes[:half], run.episodes[half:]):
        learner.accumulate(part)
    learner.finish()
    for name, tensor in full_state(learner.policy).items():
        assert torch.allclose(published[name], tensor, atol=1e-4), name
    for rank in range(size):
        lines = run.lines(rank)
        names = [line.name for line in lines]
        assert [names.count(name) for name in ("wake", "train", "step")] == [3, 2, 1]
        assert names.count("rest") in (4, 5), "a second order that comes in a meeting is not read"
        spans = [
            line
            for line in lines
            if line.name in ("rest", "wait_devices", "wake", "wait_data", "train", "step")
        ]
        assert all(span.end <= next_span.start + 1e-3 for span, next_span in pairwise(spans)), "they overlap"


def test_a_stop_saves_what_rests(run: Run) -> None:
    coordinator = run.coordinator
    with run.ranks(2):
        coordinator.plan(coordinator.until(trainer.PlanRequest), "work", trajectories=run.planned)
        coordinator.plan(coordinator.until(trainer.PlanRequest, part=1), "rest")
        coordinator.plan(coordinator.until(trainer.PlanRequest, resting=True), "stop")
        assert coordinator.until(trainer.Checkpointed).step == 0
    exported, model = (
        plain_model(str(folder), torch.float32)
        for folder in (run.folder / "t" / "checkpoints" / "step-0" / "hf", run.folder / "model")
    )
    assert all(torch.equal(p, q) for p, q in zip(exported.parameters(), model.parameters(), strict=True))
    assert "wake" not in [line.name for rank in range(2) for line in run.lines(rank)]


def test_ranks_that_wait_for_devices_can_be_stopped(run: Run) -> None:
    """They ask again, and have loaded nothing."""
    coordinator = run.coordinator
    coordinator.grants = False
    with run.ranks(1):
        for _ in range(2):
            coordinator.until(trainer.AskDevices, index=0, incarnation="1")
    assert not (run.folder / "t").exists()
