"""A plan on its way to the ranks: the real coordinator and real ranks over their sockets, each killed at one
moment after another. What was trained before is repeated bit for bit, and each episode is trained once."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from asyncrl.config import RunConfig
from asyncrl.coordinator import loop
from asyncrl.coordinator.journal import TransactionalOutbox
from asyncrl.coordinator.state import load_state
from asyncrl.data import Samples, samples_path
from asyncrl.data.run_images import RunImages
from asyncrl.store.checkpoints import Checkpoints
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import RunStore
from asyncrl.trainer import client, rank
from asyncrl.trainer.learner import Learner, PlannedWork
from asyncrl.trainer.model import PublishedShards
from asyncrl.trainer.retrain import retrain
from asyncrl.types import EpisodeResult, EpisodeStats, Generation, StopReason, Turn, VersionSpan
from asyncrl.wire.addresses import incarnation_of
from asyncrl.wire.messages.channels import ToObserver
from asyncrl.wire.messages.shared import ObserverHello, Stop, WireMessage
from asyncrl.wire.messages.trainer import Committed, WorkPlan
from asyncrl.wire.sockets import Endpoints, Hub, Link, choose_endpoints, identity
from tests.fakes.data import rows
from tests.fakes.forked import FORKED
from tests.fakes.models import VOCABULARY
from tests.fakes.training import save_tiny_qwen, tiny_config

pytestmark = pytest.mark.slow
DEADLINE = 120.0
STEPS = 3
GROUPS = 4
MEMBERS = 2


class Fault:
    """A process that ends by kill -9, once, at the place of that name."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def at(self, name: str) -> None:
        if (self.run_dir / f"{name}.due").exists():
            self.run_dir.joinpath(f"{name}.due").unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def plan(self, names: Sequence[str]) -> None:
        for name in names:
            self.run_dir.joinpath(f"{name}.due").touch()

    def left(self) -> list[Path]:
        return list(self.run_dir.glob("*.due"))


# -- the two kinds of processes ------------------------------------------------------------------------


def coordinate(config: RunConfig, endpoints: Endpoints) -> None:
    """Killed after the transaction of a plan, before it is sent; when it has sent some payloads of another;
    and after the transaction of a commit, before the ack."""
    fault = Fault(Path(config.run_dir) / config.name)
    send = Hub.send
    frames_sent = 0

    def sending(hub: Hub, peer: bytes, message: WireMessage, frames: Any = ()) -> bool:
        nonlocal frames_sent
        if isinstance(message, WorkPlan):
            fault.at("planned")
        frames_sent += bool(frames)
        if frames_sent == 2:
            fault.at("given")
        if isinstance(message, Committed) and message.step == 2:
            fault.at("committed")
        return send(hub, peer, message, frames)

    with mock.patch.object(Hub, "send", sending):
        raise SystemExit(loop.run(config, endpoints, "launch"))


def train(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str) -> None:
    """One rank: the last one is killed when it holds its part of the first plan; the first one when a batch
    is trained and not committed, and when a commit is acknowledged."""
    run_dir = Path(config.run_dir) / config.name
    fault = Fault(run_dir)
    save_if_due = rank.TrainerRank._save_if_due
    accumulate = Learner.accumulate
    finish = Learner.finish
    uids = list[str]()

    def accumulating(learner: Learner, work: PlannedWork) -> None:
        work = list(work)
        if index == config.trainer.ranks - 1:
            fault.at("handed out")
        uids.extend(planned.uid for planned, _ in work)
        accumulate(learner, work)

    def finishing(learner: Learner) -> dict[str, float]:
        metrics = finish(learner)
        noted = {"start": incarnation, "rank": index, "step": learner.step, "uids": [*uids]}
        with (run_dir / "trained.jsonl").open("a") as file:
            file.write(json.dumps(noted | {"digest": digest(learner)}) + "\n")
        uids.clear()
        if index == 0 and learner.step == 2:
            fault.at("trained")
        return metrics

    def acknowledged(trainer_rank: rank.TrainerRank) -> None:
        if index == 0 and trainer_rank.learner.step == STEPS:
            fault.at("acknowledged")
        save_if_due(trainer_rank)

    place = f"{run_dir}/{incarnation}" if config.trainer.ranks > 1 else ""
    patched = partial(mock.patch.object, Learner)
    with (
        mock.patch.multiple(client, RESEND_SECONDS=0.2, HEARTBEAT_SECONDS=0.05),
        mock.patch.object(rank, "SAVE_POLL_SECONDS", 0.01),
        mock.patch.object(rank.TrainerRank, "_save_if_due", acknowledged),
        patched("accumulate", accumulating),
        patched("finish", finishing),
    ):
        raise SystemExit(rank.run(config, endpoints, index, incarnation, place))


OF_RANKS = ("handed out", "trained", "acknowledged")
OF_COORDINATOR = ("planned", "given", "committed")


def digest(learner: Learner) -> str:
    """This rank's part of the weights."""
    state = sorted(PublishedShards(learner.policy).items())
    parts = (tensor.detach().to_local().numpy().tobytes() for _, tensor in state)
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


# -- a run -----------------------------------------------------------------------------------------------


def landed_episodes(config: RunConfig) -> None:
    """A store in which all episodes of the run are ready: nobody has to sample any."""
    run_dir = Path(config.run_dir) / config.name
    dice = random.Random(0)
    file = samples_path(run_dir, "train")
    file.parent.mkdir(parents=True)
    with file.open("w+b") as data:
        Samples.write(data, [rows(STEPS * GROUPS)])
    store = RunStore(run_dir, config.store.keep_bytes)
    outbox: Any = mock.Mock(spec=TransactionalOutbox)
    state = load_state(config, run_dir, store, outbox)
    for _ in range(STEPS * GROUPS):
        state.ledger.buffer.admit_group(0.0)
    for episode in list(state.ledger.buffer.episodes.values()):
        context = tuple(dice.randrange(VOCABULARY) for _ in range(dice.randint(2, 6)))
        ids = tuple(dice.randrange(VOCABULARY) for _ in range(dice.randint(2, 14)))
        logprobs = (-math.log(VOCABULARY),) * len(ids)
        turn = Turn(0, context, Generation(ids, logprobs, (VersionSpan(0, len(ids), 0, 0),), StopReason.STOP))
        store.put_frame(episode.uid, 0, "generated", msgspec.msgpack.encode(turn))
        state.ledger.buffer.assign(episode, "w", 1, 0, 0.0)
        episode.add_turn(len(context) + len(ids), len(ids), 0, 0)
        result = EpisodeResult(float(episode.member), len(ids))
        stats = EpisodeStats(1)
        state.ledger.buffer.finish_episode(episode, result, stats, 0.0)
    state.journal.persist()
    store.close()


class Launcher:
    """Starts what ended by a fault again: a coordinator alone, ranks all together."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.starts = 0
        self.endpoints = choose_endpoints("127.0.0.1", 0)
        self.run_dir = Path(config.run_dir) / config.name
        self.place = Checkpoints(self.run_dir / "checkpoints")
        self.ranks: list[BaseProcess] = []
        name = identity("observer", 0)
        self.link = Link(self.endpoints.control, ToObserver, name, self.endpoints.for_role("observer").keys)
        self.start_coordinator()
        self.start_ranks()

    def start_coordinator(self) -> None:
        self.coordinator = FORKED.Process(target=coordinate, args=(self.config, self.endpoints))
        self.coordinator.start()

    def start_ranks(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()
        self.starts += 1
        incarnation = incarnation_of("launch", self.starts)
        given = self.endpoints.for_role("trainer")
        self.ranks = [
            FORKED.Process(target=train, args=(self.config, given, index, incarnation))
            for index in range(self.config.trainer.ranks)
        ]
        for process in self.ranks:
            process.start()

    def run(self) -> None:
        """To the checkpoint of the last step, and the stop that follows; each process ends well then."""
        end = time.monotonic() + DEADLINE
        everyone = [self.coordinator, *self.ranks]
        while any(process.exitcode is None for process in everyone):
            assert time.monotonic() < end, f"no end; checkpoints {self.place.steps()}"
            everyone[0].join(0.02)
            if self.coordinator.exitcode == -signal.SIGKILL:
                self.start_coordinator()
            if any(process.exitcode == -signal.SIGKILL for process in self.ranks):
                self.start_ranks()
            everyone = [self.coordinator, *self.ranks]
            assert {process.exitcode for process in everyone} <= {None, 0, -signal.SIGKILL}
            if self.place.steps()[:1] == [STEPS]:
                self.link.send(ObserverHello())
                self.link.send(Stop("all is trained"))
            while self.link.receive(0) is not None:
                pass
        assert [process.exitcode for process in everyone] == [0] * len(everyone)

    def close(self) -> None:
        self.link.close()
        for process in (self.coordinator, *self.ranks):
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("ranks", "sharing", "faults"),
    [
        (1, 1, (*OF_RANKS, *OF_COORDINATOR)),
        pytest.param(2, 1, ("handed out", "trained", *OF_COORDINATOR), marks=pytest.mark.full),
        (4, 2, ("trained", "given")),
    ],
    ids=["1 rank", "2 ranks", "4 ranks, 2 of which share a micro-batch"],
)
def test_a_plan_is_trained_once_and_repeated_bit_for_bit(
    tmp_path: Path, ranks: int, sharing: int, faults: Sequence[str]
) -> None:
    config = tiny_config(
        save_tiny_qwen(tmp_path / "model"),
        total_steps=STEPS,  # type: ignore[arg-type]
        run_dir=str(tmp_path),  # type: ignore[arg-type]
        trainer={"ranks": ranks, "sequence_parallel": sharing, "micro_batch_tokens": 24, "on_spike": "stop"},
        buffer={"groups_per_batch": GROUPS, "episodes_per_group": MEMBERS, "max_staleness": STEPS},
        rollout={"max_tokens": 32, "max_new_tokens": 16},
        checkpoint={"every": 2, "keep": STEPS},
        weights={"directory": "run"},
    )
    landed_episodes(config)
    fault = Fault(tmp_path / "t")
    fault.plan(faults)
    launcher = Launcher(config)
    try:
        launcher.run()
    finally:
        launcher.close()
    assert fault.left() == [] and launcher.starts == 1 + len({*faults} & {*OF_RANKS})
    trained = check_trained(launcher, ranks // sharing)
    if ranks == 1:  # in a process of its own: this one may be a rank already
        process = FORKED.Process(target=check_retraining, args=(config, tmp_path, trained))
        process.start()
        process.join(DEADLINE)
        assert process.exitcode == 0


def check_trained(launcher: Launcher, parts: int) -> list[str]:
    """The digests of rank 0, by step."""
    with closing(RunReader.open(launcher.run_dir)) as reader:
        assert reader.trained_in_plans() == reader.counts()["trained"] == STEPS * GROUPS * MEMBERS  # type: ignore[index]
        plans = {step: reader.plan(step) for step in range(1, STEPS + 1)}
    manifests = launcher.place.lineage(STEPS, 0)
    once = [uid for manifest in manifests for uid in manifest.trained]
    assert len(once) == len(set(once)) == manifests[-1].trained_total == STEPS * GROUPS * MEMBERS
    lines = (launcher.run_dir / "trained.jsonl").read_text().splitlines()
    noted: dict[tuple[int, int], list[Any]] = {}
    for one in map(json.loads, lines):
        noted.setdefault((one["step"], one["rank"]), []).append((one["uids"], one["digest"]))
    size = launcher.config.trainer.ranks
    assert sorted(noted) == [(step, index) for step in plans for index in range(size)]
    for again in noted.values():  # whoever trains it again: the same, in the same order
        assert all(one == again[0] for one in again)
    assert any(len(again) > 1 for again in noted.values()), "a step was trained more than once"
    for step, plan in plans.items():
        assert (plan.ranks, plan.budget) == (parts, launcher.config.trainer.micro_batch_tokens)
        of_ranks = [noted[step, index][0][0] for index in range(0, size, size // parts)]
        assert sorted(chain(*of_ranks)) == sorted(plan.uids) and all(of_ranks), step
    assert len({again[0][1] for again in noted.values()}) == len(noted), "each step moves the weights"
    return [noted[step, 0][0][1] for step in plans]


def check_retraining(config: RunConfig, folder: Path, wanted: list[str]) -> None:
    """From the initial policy, all recorded plans anew."""
    found = list[str]()
    run_dir = Path(config.run_dir) / config.name
    finish = Learner.finish

    def finishing(learner: Learner) -> dict[str, float]:
        metrics = finish(learner)
        found.append(digest(learner))
        return metrics

    nowhere = Checkpoints(folder / "none")
    trainer = msgspec.structs.replace(config.trainer, micro_batch_tokens=1 << 12)  # less would be learned so
    config = msgspec.structs.replace(config, trainer=trainer)
    with closing(RunReader.open(run_dir)) as reader, mock.patch.object(Learner, "finish", finishing):
        images = RunImages.open(run_dir, reader)
        assert [step for step, _ in retrain(config, reader, images, nowhere, STEPS)] == [1, 2, 3]
    assert found == wanted
