"""A rank that rests holds nothing on its device, and goes on as if it had never rested."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from asyncrl.errors import ConfigError
from asyncrl.observe.timeline import Timeline
from asyncrl.store.checkpoints import Checkpoints
from asyncrl.trainer import device_offload, loading
from asyncrl.trainer.checkpointing import Checkpointing
from asyncrl.trainer.device_offload import DeviceOffload, PageLockedMemory
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from asyncrl.weights import memory as memories
from asyncrl.weights.memory import trim_heap
from tests.fakes.forked import FORKED
from tests.fakes.models import save_small
from tests.fakes.ranks import run_ranks
from tests.fakes.training import (
    BuildLearner,
    Recorder,
    make_learner,
    plain_model,
    random_cut,
    save_tiny_model,
    tiny_config,
)

pytestmark = pytest.mark.slow

PPO: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "buffer": {"filter_zero_variance": False}}
KL = {"where": "loss", "coef": 0.1}
RESTED: dict[str, dict[str, Any]] = {
    "the default": {},
    "packed": {"trainer": {"packing": "packed"}},
    "tree": {"trainer": {"packing": "tree"}},
    "padded, momentum": {"trainer": {"packing": "padded", "optimizer": {"sgd": {"momentum": 0.9}}}},
    "LoRA, its base as reference": {"model": {"lora_rank": 2}, "kl": KL},
    "a critic and a reference": PPO | {"kl": KL},
    "behind a barrier": {"algorithm": {"loss": "ppo", "epochs": 2, "steps_per_batch": 2}},
    "in main memory": {"trainer": {"offload_optimizer": True}},
}


@pytest.fixture
def whole_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of a tiny model moves, and it is sharded by layers. As in a run, what was imported is not scanned
    for garbage each time."""
    monkeypatch.setattr(device_offload, "SMALL_STORAGE", 0)
    monkeypatch.setattr(loading, "LAYER_MIN_PARAMETERS", 0)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def timeline(tmp_path: Path) -> Iterator[Timeline]:
    yield (timeline := Timeline(tmp_path / "timeline.jsonl"))
    timeline.close()


def seeded(make: Callable[[], Learner]) -> Learner:
    torch.manual_seed(0)  # of adapters
    return make()


def nobody(name: str) -> None:
    """In place of a meeting."""


def held(learner: Learner) -> dict[str, Tensor]:
    """All values that last, by place: weights, buffers, gradients and moments of all models."""
    found: dict[str, Tensor] = {}
    reference = learner.reference.policy if learner.reference else None
    for of, model in {"policy": learner.policy, "critic": learner.critic, "reference": reference}.items():
        if model is None:
            continue
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found[f"{of}.{name}"] = tensor.detach()
            if tensor.grad is not None:
                found[f"{of}.{name}.grad"] = tensor.grad
    for of, optimizer in {
        "policy": learner.optimizer,
        "critic": getattr(learner.critic, "optimizer", None),
    }.items():
        leaves = tree_leaves([*optimizer.state.values()]) if optimizer is not None else []
        found |= {f"{of}.moment.{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in found.items()}


def train(
    learner: Learner, cut: list[list[Any]], rest: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """A batch; this rank rests before, after each micro-batch, and after the step."""
    rest()
    for micro in cut:
        learner.accumulate(micro[learner.world.rank])
        rest()
    metrics = learner.finish()
    rest()
    return metrics


def rests(learner: Learner, timeline: Timeline, folder: Path) -> tuple[Callable[[], None], list[int]]:
    """A function that rests and wakes, and the bytes that moved each time."""
    own = DeviceOffload(learner, timeline, folder)
    moved = list[int]()

    def rest() -> None:
        before = {name: (t, t.clone()) for name, t in held(learner).items()}
        own.offload(nobody)
        assert own.is_offloaded and all(not t.untyped_storage().nbytes() for t, _ in before.values())
        own.offload(nobody)  # the order may come twice
        own.onload()
        own.onload()
        assert not own.is_offloaded and held(learner).keys() == before.keys()
        for name, tensor in held(learner).items():
            was, value = before[name]
            assert tensor.data_ptr() == was.data_ptr() and torch.equal(tensor, value), name
        moved.append(sum(t.nbytes for _, t in before.values()))

    return rest, moved


@pytest.mark.parametrize("case", RESTED)
def test_training_goes_on_as_if_it_had_never_rested(
    case: str, build_learner: BuildLearner, model: Any, timeline: Timeline, tmp_path: Path, whole_model: None
) -> None:
    """To the bit: gradients of a batch under way, moments, and what waits behind a barrier."""
    cut = random_cut(Recorder(model, noise=0.2, prompt=5).groups(4, 4, [0]), 1, 3, seed=0)
    plain, learner = (seeded(partial(build_learner, dtype="float32", **RESTED[case])) for _ in range(2))
    rest, moved = rests(learner, timeline, tmp_path)
    for _ in range(2):
        train(plain, cut)
        train(learner, cut, rest)
    wanted = held(plain)
    held_tensors = held(learner)
    assert held_tensors.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in held_tensors.items())
    # Gradients move, too, but not before the first micro-batch, nor behind a barrier.
    assert (moved[1] > moved[0]) == (not learner.behind_barrier)
    assert learner.stopwatch.idle_s > 0 and {"rest", "wake"} <= learner.stopwatch.lap()[1].keys()
    assert os.listdir(tmp_path) == ["timeline.jsonl"]


def test_memory_that_cannot_be_pinned_is_used_and_leaves_no_error_to_cuda(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that stays would be raised by the next kernel."""
    calls = mock.Mock()
    calls.cudaHostRegister.return_value = 2
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(memories, "_clear_cuda_error", calls.clear)
    memory = PageLockedMemory(world)
    assert [len(memory.reserve(size)) for size in (10, 20)] == [10, 20]
    assert [name for name, *_ in calls.mock_calls if name != "cudaHostRegister().__int__"] == [
        *["cudaHostRegister", "clear"] * 2
    ]
    assert "cannot be pinned" in caplog.text


def test_a_gpu_s_copies_lie_one_behind_another_in_memory_that_is_kept(
    world: World,
    model: Any,
    build_learner: BuildLearner,
    timeline: Timeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole_model: None,
) -> None:
    """As many bytes are registered as are needed at most, and given back before there are more."""
    registered = dict[int, int]()
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: registered.update({address: size}) or 0,
        cudaHostUnregister=lambda address: registered.pop(address),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    learner = build_learner(dtype="float32")
    own = DeviceOffload(learner, timeline, tmp_path)
    own._host_memory = PageLockedMemory(world).reserve
    cut = random_cut(Recorder(model, noise=0.2).groups(4, 4, [0]), 1, 2, seed=0)
    for step in range(3):
        before = {name: tensor.clone() for name, tensor in held(learner).items()}
        own.offload(nobody)
        size = sum(len(part) for _, part in own._host_copies.values())
        own.onload()
        assert all(torch.equal(tensor, before[name]) for name, tensor in held(learner).items())
        (kept,) = registered.values()
        assert kept == size if step < 2 else kept > size, "gradients are there in the second only"
        learner.accumulate(cut[step % 2][0]) if step == 0 else learner.finish()
    monkeypatch.setattr(device_offload, "main_memory", lambda: SimpleNamespace(available=10))
    own._host_memory = PageLockedMemory(world).reserve
    learner.micro_batch_size = 1000, 4
    with pytest.raises(
        ConfigError, match=r"engine.colocated: .* more main memory, but only 0.00 GB is free.*; free"
    ):
        own.offload(nobody)
    assert learner.micro_batch_size == (0, 0), "smaller micro-batches would not help"
    assert not own.is_offloaded and all(t.untyped_storage().nbytes() for t in held(learner).values())


def test_a_kill_at_any_time_leaves_no_file_of_a_rank_that_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel frees what has no name."""
    allocate = os.posix_fallocate
    from_file = torch.from_file
    names = list[Path]()

    def looked(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            names.extend(tmp_path.iterdir())
            return act(*given, **named)

        return call

    monkeypatch.setattr(os, "posix_fallocate", looked(allocate))
    monkeypatch.setattr(torch, "from_file", looked(from_file))
    room = device_offload.unlinked_file(tmp_path, 10_000)
    room.fill_(7)
    gc.collect()
    assert names == [] and int(room.sum()) == 70_000


def test_without_room_on_the_disk_it_rests_in_main_memory(
    build_learner: BuildLearner, timeline: Timeline, tmp_path: Path, whole_model: None
) -> None:
    learner = build_learner(dtype="float32")
    own = DeviceOffload(learner, timeline, tmp_path / "missing")
    before = {name: tensor.clone() for name, tensor in held(learner).items()}
    own.offload(nobody)
    assert (
        own.is_offloaded
        and own._host_copies
        and not any(t.untyped_storage().nbytes() for t in held(learner).values())
    )
    own.onload()
    assert all(torch.equal(tensor, before[name]) for name, tensor in held(learner).items())


def saved(config: Any, learner: Learner, folder: Path, own: DeviceOffload | None) -> dict[str, bytes]:
    """Files of a checkpoint."""
    saving = Checkpointing(config, Checkpoints(folder), learner)
    saving.begin_checkpoint(1, own)
    assert saving._write_job is not None
    saving._write_job.result.result(60)
    assert saving.poll_checkpoint()
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("room", [True, False])
def test_a_checkpoint_of_shards_that_rest_is_the_same(
    room: bool,
    build_learner: BuildLearner,
    model: Any,
    timeline: Timeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole_model: None,
) -> None:
    """They stay at rest, one after another is copied; if there is no room for copies they wake."""
    learner = build_learner(dtype="float32", **PPO, model={"lora_rank": 2})
    train(learner, random_cut(Recorder(model, noise=0.2).groups(4, 4, [0]), 1, 2, seed=0))
    wanted = saved(learner.config, learner, tmp_path / "awake", None)
    own = DeviceOffload(learner, timeline, tmp_path)
    own.offload(nobody)
    if not room:
        monkeypatch.setattr("asyncrl.trainer.checkpointing.COPY_ROOM", float("inf"))
    saved_tensors = saved(learner.config, learner, tmp_path / "rests", own)
    assert own.is_offloaded == room
    if room:
        assert all(not tensor.untyped_storage().nbytes() for tensor in held(learner).values())
    assert saved_tensors.keys() == wanted.keys() and len(wanted) > 3
    assert all(
        saved_tensors[n] == content
        for n, content in wanted.items()
        if n.endswith((".safetensors", ".distcp"))
    )
    own.onload()


def measure(folder: Path, results: Any) -> None:
    """In a process of its own, as others have freed memory to reuse."""
    from asyncrl.trainer.world import join_ranks, leave_ranks

    world = join_ranks(0, 1, device="cpu")
    path = save_small(folder / "model", "Qwen2", hidden_size=256, intermediate_size=1024, vocab_size=4096)
    learner = make_learner(tiny_config(path), world, "float32")
    own = DeviceOffload(learner, Timeline(folder / "timeline.jsonl"), folder)
    process = psutil.Process()
    own_pages = list[int]()
    files = list[int]()

    def note() -> None:
        memory = process.memory_info()
        own_pages.append(memory.rss - memory.shared)
        files.append(memory.shared)

    gc.collect()
    gc.freeze()  # as in a run
    trim_heap()
    note()
    for _ in range(50):
        own.offload(nobody)
        note()
        own.onload()
        note()
    results.put((sum(t.nbytes for t in held(learner).values()), own_pages, files))
    leave_ranks()


def test_memory_falls_while_it_rests_and_does_not_grow(tmp_path: Path) -> None:
    results = FORKED.Queue()
    process = FORKED.Process(target=measure, args=(tmp_path, results))
    process.start()
    size, own, files = results.get(timeout=120)
    process.join(60)
    assert process.exitcode == 0 and size > 40e6
    awake = own[2::2]
    asleep = own[1::2]
    assert max(asleep) < own[0] - 0.9 * size
    assert max(awake) < own[0] + 0.1 * size and max(asleep) - min(asleep) < 0.1 * size
    assert max(files[::2]) < files[0] + 0.1 * size, "a file is still mapped"


def on_ranks(world: World, folder: Path, **sections: Any) -> bool:
    """Rank 1 has nothing of the last micro-batch."""
    loading.LAYER_MIN_PARAMETERS = device_offload.SMALL_STORAGE = 0
    config = tiny_config(str(folder.parent / "model"), **sections)
    model = plain_model(config.model.path, torch.float32)
    cut = random_cut(Recorder(model, noise=0.2).groups(4, 4, [0]), 2, 3, seed=0)
    cut[2][1] = []
    plain, learner = (seeded(partial(make_learner, config, world, "float32")) for _ in range(2))
    timeline = Timeline(folder / f"{world.rank}.jsonl")
    rest, _ = rests(learner, timeline, folder)
    for _ in range(2):
        metrics = train(learner, cut, rest)
        assert metrics == train(plain, cut)
    wanted = held(plain)
    held_tensors = held(learner)
    same = all(torch.equal(tensor, wanted[name]) for name, tensor in held_tensors.items())
    timeline.close()
    return all(world.gather(same, bool))


@pytest.mark.parametrize("case", ["the default", "a critic and a reference", "behind a barrier"])
def test_two_ranks_rest(case: str, tmp_path: Path) -> None:
    """Shards are views of what FSDP2 pads, gradients of what it reduces."""
    save_tiny_model(tmp_path / "model")
    assert run_ranks(2, partial(on_ranks, **RESTED[case]), tmp_path / "two")
