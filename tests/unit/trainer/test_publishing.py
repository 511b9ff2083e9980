"""What a rank publishes is what it trained, told to the coordinator; a failure reaches the trainer's loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from asyncrl.engines.sglang.receiver import Receiver
from asyncrl.engines.torch.engine import TorchEngine, build
from asyncrl.trainer.model import Policy, score_sequences
from asyncrl.trainer.publishing import PROBE_SEQUENCES
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import Manifest, Probe, TensorEntry, WeightsError, WeightsRef
from tests.fakes.group_server import FakeServer, ServerRank, described
from tests.fakes.publishing import DEADLINE, EPOCH, Trainer
from tests.fakes.ranks import run_ranks

pytestmark = pytest.mark.slow

Entries = dict[str, TensorEntry]
Found = tuple[Manifest, Entries]


class Broadcasts:
    """Server `index`, and its supervisor's end. The test has started the server's process: a trainer's rank
    would have to import everything again for that."""

    weights: ClassVar = {"transport": "collective"}

    def __init__(self, started: Sequence[ServerRank], index: int) -> None:
        self._server = FakeServer(started=started)
        self._loop = asyncio.Runner()
        self._receiver = Receiver(self._server, index, 1)

    def read(self, ref: WeightsRef) -> Found:
        return self._loop.run(self._pushed(ref))

    def close(self) -> None:
        self._loop.run(self._receiver.close())
        self._loop.close()

    async def _pushed(self, ref: WeightsRef) -> Found:
        async with self._receiver.push(ref, DEADLINE) as push:
            manifest = await push.load_buckets()
        label, entries = self._server.look()
        assert label == ref.label
        return manifest, entries


def publish_three(server: Sequence[ServerRank], world: World, folder: Path) -> Any:
    trainer = Trainer(world, folder, **Broadcasts.weights)
    found = []
    with nullcontext() if world.rank else closing(Broadcasts(server, 1)) as reading:
        for step in range(1, 4):
            forwards = count_forwards(trainer.policy)
            state = trainer.publish()
            assert not forwards, "the trainer waits for more than the copy"
            if reading is None:
                continue
            announcement = trainer.announced_version()
            assert announcement == trainer.publishing.announced and announcement.ref.version == (EPOCH, step)
            assert 0 < announcement.snapshot_s < DEADLINE and 0 < announcement.write_s < DEADLINE
            _, entries = reading.read(announcement.ref)
            trainer.publishing.raise_failure()
            found.append((_described(state), entries))
    world.gather(0, int)  # what every rank sends has arrived
    trainer.publishing.drain()
    return found


def count_forwards(policy: Policy) -> list[int]:
    forwards: list[int] = []
    policy.register_forward_pre_hook(lambda *_: forwards.append(1))
    return forwards


def score_the_probe(world: World, folder: Path) -> Any:
    trainer = Trainer(world, folder)
    forwards = count_forwards(trainer.policy)
    found = []
    pauses = list[int]()  # forwards before each
    texts = set[tuple[int, ...]]()
    trainer.publishing._pause = mock.Mock(allow_pause=lambda: pauses.append(len(forwards)))
    for _ in range(2):
        probe = trainer.publishing.score_probe()
        own = score_sequences(trainer.policy, probe.sequences, world.device)
        is_rounding = probe.rounding == trainer.publishing.rounding
        found.append((probe.logprobs == own, is_rounding, len(forwards)))
        texts |= set(probe.sequences)
        trainer.publish()
    trainer.publishing.drain()
    return found, probe.rounding, pauses, len(texts)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_probe_is_scored_with_the_weights_as_they_are(tmp_path: Path, ranks: int) -> None:
    """Rounding is measured the first time only, each probe has other texts, and servers may join after each
    forward."""
    comparisons, rounding, pauses, text_count = run_ranks(ranks, score_the_probe, tmp_path)
    assert pauses == [1, 2, 4] and text_count == 2 * PROBE_SEQUENCES
    assert comparisons == [(True, True, 3), (True, True, 5)]
    assert 0 <= rounding.median <= rounding.mean <= rounding.largest < 1e-5  # float32


def measure_rounding(world: World, folder: Path) -> Any:
    """The probe of a policy in bfloat16 with its output layer in bfloat16 and in float32."""
    probes = list[Probe]()
    for fp32_head in (False, True):
        directory = folder / str(fp32_head)
        directory.mkdir(exist_ok=True)
        trainer = Trainer(world, directory, model={"dtype": "bfloat16", "fp32_head": fp32_head})
        probes.append(trainer.publishing.score_probe())
        again = score_sequences(trainer.policy, probes[-1].sequences, world.device)
        assert again == probes[-1].logprobs, "later forwards have changed"
        trainer.publishing.drain()
    return probes


def test_rounding_is_that_of_an_engine_whose_output_layer_is_in_bfloat16(tmp_path: Path) -> None:
    narrow, wide = run_ranks(1, measure_rounding, tmp_path)
    assert narrow.sequences == wide.sequences and narrow.logprobs != wide.logprobs
    assert narrow.rounding == wide.rounding and 1e-4 < narrow.rounding.median < narrow.rounding.mean


def _described(tensors: dict[str, torch.Tensor]) -> Entries:
    return {name: described(name, tensor) for name, tensor in tensors.items()}


@pytest.fixture
def server() -> Iterator[list[ServerRank]]:
    server = FakeServer()
    yield server.ranks
    server.end()


@pytest.mark.parametrize("ranks", [1, 2])
def test_versions_are_broadcast_and_announced(server: list[ServerRank], tmp_path: Path, ranks: int) -> None:
    """Those in files: test_version_conformance.py."""
    rank_results = run_ranks(ranks, partial(publish_three, server), tmp_path)
    versions = [entries for _, entries in rank_results]
    assert versions == [state for state, _ in rank_results]
    assert all(versions.count(entries) == 1 for entries in versions)


def lose_a_rank(server: Sequence[ServerRank], world: World, folder: Path) -> Any:
    trainer = Trainer(world, folder, **Broadcasts.weights)
    trainer.publish()
    if world.rank:
        os._exit(0)
    with pytest.raises(RuntimeError):
        world.gather(0, int)  # it is gone, with all of its connections
    trainer.publishing.raise_failure()
    with closing(Broadcasts(server, 0)) as reading, pytest.raises(WeightsError):
        reading.read(trainer.announced_version().ref)
    with pytest.raises(WeightsError) as caught:
        trainer.publishing.raise_failure()
    return str(caught.value)


def test_a_rank_that_delivers_nothing_to_broadcast_ends_the_trainers_loop(
    server: list[ServerRank], tmp_path: Path
) -> None:
    assert "did not deliver its shards" in run_ranks(2, partial(lose_a_rank, server), tmp_path)


def fail_to_write(world: World, folder: Path) -> Any:
    trainer = Trainer(world, folder)
    (folder / "run").write_text("a file where the directory should be")
    trainer.publish()
    end = time.monotonic() + DEADLINE
    try:
        while time.monotonic() < end:
            trainer.publishing.raise_failure()
    except OSError as error:
        trainer.publishing.drain()
        return str(error)
    return ""


def test_a_write_that_failed_ends_the_trainers_loop(tmp_path: Path) -> None:
    assert "run" in run_ranks(1, fail_to_write, tmp_path)


def publish_adapters(world: World, folder: Path) -> Any:
    """Two versions of adapters that do something, loaded by an engine: how far it is from the trainer."""
    trainer = Trainer(world, folder, lora_rank=4)
    gaps = []
    with asyncio.Runner() as loop:
        engine = loop.run(_engine(folder / "model")) if not world.rank else None
        for step in range(2):
            for parameter in trainer.policy.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter.detach(), std=0.3)
            probe = trainer.publishing.score_probe()
            trainer.publishing.publish(PolicyVersion(EPOCH, step))
            if engine is not None:
                before = loop.run(_compare(engine, probe))
                manifest = loop.run(engine.load(trainer.announced_version().ref))
                assert manifest.adapters[""].rank == 4
                roles = {entry.name.rpartition(".lora_")[2] for entry in manifest.tensors}
                assert roles == {"A.weight", "B.weight"}, "nothing else is published"
                gaps.append([loop.run(_compare(engine, probe)), before])
            world.gather(0, int)
        if engine is not None:
            loop.run(engine.close())
    trainer.publishing.drain()
    return gaps


async def _compare(engine: TorchEngine, probe: Probe) -> float:
    return probe.compare([await engine.score(sequence) for sequence in probe.sequences]).largest


async def _engine(path: Path) -> TorchEngine:
    return build(str(path), "float32", slots=1, max_len=128)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_adapts_its_model_as_the_trainer_does(tmp_path: Path, ranks: int) -> None:
    gaps = run_ranks(ranks, publish_adapters, tmp_path)
    assert [own < 1e-5 < 1e-3 < before for own, before in gaps] == [True, True], gaps
