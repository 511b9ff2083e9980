"""Checkpoints beside training: where ranks may write, what a kill leaves, how long training waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.store.checkpoints import CheckpointError, CheckpointManifest, Checkpoints
from asyncrl.trainer import checkpoint, checkpointing
from asyncrl.trainer.checkpointing import Checkpointing, shared_checkpoints
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.world import World
from tests.fakes.forked import FORKED
from tests.fakes.models import save_llama
from tests.fakes.power import DurableFiles
from tests.fakes.ranks import run_ranks
from tests.fakes.traced import LiveBytes
from tests.fakes.training import (
    BuildLearner,
    Recorder,
    export,
    full_state,
    make_learner,
    plain_model,
    run_batch,
    save_tiny_model,
    tiny_config,
)

pytestmark = pytest.mark.slow


def place_of(world: World, folder: Path, directory: str) -> str:
    """What a rank says of its place for checkpoints; '' for nothing."""
    config = tiny_config("m", checkpoint={"directory": directory})
    try:
        place = shared_checkpoints(config, folder, world)
    except ConfigError as error:
        return str(error)
    world.gather(0, int)  # all have taken their tokens away
    return ",".join(path.name for path in Path(place.root).iterdir())


def try_places(world: World, folder: Path) -> Any:
    """As on two nodes without a shared disk, each rank with a directory of its own; with a shared one, where
    ranks that were killed have left tokens; and
    as if the directories had been parted after the start."""
    if world.rank == 0:
        Checkpoints(folder / "shared" / "t").put_token("killed")
    own, shared = (place_of(world, folder, str(folder / name)) for name in (f"node-{world.rank}", "shared"))
    learner = make_learner(tiny_config(str(folder.parent / "model")), world, "float32")
    apart = Checkpoints(folder / f"node-{world.rank}")
    manifest = checkpoint.manifest_of(learner, trainer_epoch=0)
    with pytest.raises(CheckpointError) as error:
        checkpoint.write_checkpoint(
            apart, checkpoint.snapshot(learner), manifest, learner, world, with_export=False
        )
    return world.gather((own, shared, str(error.value), apart.steps()), tuple[str, str, str, list[int]])


def test_ranks_that_do_not_share_their_directory_are_refused_on_all_ranks(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    for own, shared, unsealed, steps in run_ranks(2, try_places, tmp_path / "two"):
        assert "checkpoint.directory" in own and "rank 0 on" not in own and "rank 1 on" in own
        assert shared == ""
        assert "all ranks share" in unsealed and steps == [], "what rank 0 does not see is no checkpoint"


def saved_while_training(world: World, folder: Path) -> Any:
    """Save beside the next batch; what was saved must be the state before it."""
    path = str(folder.parent / "model")
    config = tiny_config(path, checkpoint={"directory": str(folder)})
    learner = make_learner(config, world, "float32")
    episodes = Recorder(plain_model(path), seed=1).groups(2, 4, [0])
    share = [[episodes[rank :: world.size] for rank in range(world.size)]]
    saving = Checkpointing(config, shared_checkpoints(config, folder, world), learner)
    run_batch(learner, share)
    saving.add_trained(["a", "b"])
    wanted = full_state(learner.policy)
    write = checkpoint.write_checkpoint
    trained = threading.Event()

    def write_late(*given: Any) -> None:
        assert trained.wait(60)
        write(*given)

    with mock.patch.object(checkpoint, "write_checkpoint", write_late):
        assert saving.begin_checkpoint(3)
        for _ in range(3):
            run_batch(learner, share)
        trained.set()
        while saving.is_writing:
            saving.poll_checkpoint()
    assert saving.newest_manifest is not None and not saving.problem
    other = make_learner(config, world, "float32")
    again = Checkpointing(config, saving.checkpoints, other)
    again.resume()
    assert again.newest_manifest == msgspec.structs.replace(
        saving.newest_manifest, files=again.newest_manifest.files
    )
    assert (other.step, again.trained_total, again.newest_manifest.trained) == (1, 2, ("a", "b"))
    weights = full_state(other.policy)
    same = all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
    return {
        "same": same,
        "files": sorted(again.newest_manifest.files),
        "place": saving.checkpoints.root,
        "hf": wanted,
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_the_state_at_its_step_whatever_is_trained_meanwhile(
    world: World, tmp_path: Path, ranks: int
) -> None:
    path = save_tiny_model(tmp_path / "model")
    if ranks == 1:
        saved_state = saved_while_training(world, tmp_path / "one")
    else:
        saved_state = run_ranks(ranks, saved_while_training, tmp_path / "two")
    assert saved_state["same"]
    states = {f"state/__{rank}_0.distcp" for rank in range(ranks)}
    assert states | {"state/.metadata", "hf/model.safetensors", "hf/config.json"} <= set(saved_state["files"])
    exported = plain_model(f"{saved_state['place']}/step-1/hf", torch.float32)
    assert all(torch.equal(p, saved_state["hf"][name]) for name, p in exported.named_parameters())
    assert path


def test_a_url_is_as_good_as_a_path(world: World, tmp_path: Path) -> None:
    """fsspec's memory file system stands for a bucket: it has neither renames at once nor fsync."""
    path = save_tiny_model(tmp_path / "model")
    config = tiny_config(path, checkpoint={"directory": "memory://bucket/runs", "keep": 1})
    place = shared_checkpoints(config, tmp_path, world)
    assert place.root == "/bucket/runs/t" and not list(tmp_path.glob("memory*"))
    learner = make_learner(config, world, "float32")
    wanted = full_state(learner.policy)
    saving = Checkpointing(config, place, learner)
    for step in (1, 2):
        learner.step = step
        saving.begin_checkpoint(0)
        while saving.is_writing:
            saving.poll_checkpoint()
    assert saving.checkpoints.steps() == [2] and checkpoint.newest_step(saving.checkpoints) == 2
    other = make_learner(config, world, "float32")
    with torch.no_grad():
        for parameter in other.policy.parameters():
            parameter.zero_()
    Checkpointing(config, place, other).resume()
    assert other.step == 2
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in full_state(other.policy).items())


def killed_in_the_middle(folder: str, model: str) -> None:
    """In a process of its own: the first checkpoint is whole, the second ends with the process."""
    from asyncrl.trainer.world import join_ranks

    learner = make_learner(tiny_config(model), join_ranks(0, 1, device="cpu"), "float32")
    to = Checkpoints(folder)
    for step in (1, 2):
        manifest = CheckpointManifest(step=step, trainer_epoch=0)
        if step == 2:
            to._count_written = die  # type: ignore[method-assign]
        checkpoint.write_checkpoint(to, checkpoint.snapshot(learner), manifest, learner, learner.world)


def die(count: int) -> None:
    if count > 1000:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_the_middle_of_a_write_leaves_the_one_before(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    process = FORKED.Process(target=killed_in_the_middle, args=(str(tmp_path / "saved"), path))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    to = Checkpoints(tmp_path / "saved")
    assert (tmp_path / "saved" / "step-2").exists(), "it was begun"
    assert to.steps() == [1] and checkpoint.newest_step(to) == 1
    to.prune_steps(1, keep=2)
    assert not (tmp_path / "saved" / "step-2").exists()


def test_a_checkpoint_survives_a_power_cut(tmp_path: Path) -> None:
    files = DurableFiles(tmp_path)
    to = Checkpoints(tmp_path / "saved")
    written: dict[str, tuple[int, str]] = {}
    with files.recorded():
        to.prepare_step(1)
        with to.create_file(1, "hf/model.safetensors", written) as file:
            file.write(b"weights")
        to.write_manifest(CheckpointManifest(step=1, trainer_epoch=1, files=written))
    files._note(tmp_path)  # the run directory
    files.cut_power()
    assert to.find_damage(1) == ""


def export_on_ranks(world: World, folder: Path) -> Any:
    """What each rank held at most beyond its shards while it took part in an export."""
    path = str(folder.parent / "model")
    policy = load_policy(ModelConfig(path=path, dtype="bfloat16"), world)
    with LiveBytes() as counted:
        export(folder / "out" if world.rank == 0 else folder / "nothing", policy, world, path)
    shard = sum(p.to_local().nbytes for p in policy.parameters())  # counted, too
    return world.gather(counted.peak - shard, int)


def test_an_export_holds_one_whole_tensor_at_a_time(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "model")
    first, second = run_ranks(2, export_on_ranks, tmp_path / "two")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    largest = max(p.nbytes for p in plain.parameters())
    assert largest <= first <= 1.6 * largest  # in float32 as it comes, and in bfloat16 as it goes
    assert second <= largest / 2
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "out" / "step-0" / "hf")
    assert all(
        torch.equal(p, q) for p, q in zip(exported.parameters(), plain.bfloat16().parameters(), strict=True)
    )


def test_a_place_that_cannot_be_written_is_reported_from_the_start(
    build_learner: BuildLearner, tmp_path: Path
) -> None:
    """It is a file; once it is a directory, the first checkpoint ends the complaint."""
    (tmp_path / "t").touch()
    learner = build_learner(dtype="float32", checkpoint={"directory": str(tmp_path)})
    saving = Checkpointing(
        learner.config, shared_checkpoints(learner.config, tmp_path, learner.world), learner
    )
    assert saving.problem.startswith(f"cannot write to {tmp_path / 't'} (FileExistsError: ")
    for blocked in (True, False):
        saving.begin_checkpoint(0)
        while saving.is_writing:
            saving.poll_checkpoint()
        assert bool(saving.problem) is blocked
        assert not blocked or saving.problem.endswith(f"; checkpoint {tmp_path / 't' / 'step-0'}")
        if blocked:
            (tmp_path / "t").unlink()


@pytest.fixture
def saving(build_learner: BuildLearner, tmp_path: Path) -> Checkpointing:
    learner = build_learner(dtype="float32", checkpoint={"directory": str(tmp_path)})
    return Checkpointing(learner.config, shared_checkpoints(learner.config, tmp_path, learner.world), learner)


def test_training_waits_where_there_is_no_memory_for_a_copy(
    saving: Checkpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "main_memory", lambda: SimpleNamespace(available=saving._state_bytes))
    assert not saving.begin_checkpoint(0), "a copy and its room do not fit"
    while saving.is_writing:
        saving.poll_checkpoint()
    assert saving.checkpoints.steps() == [0] and checkpoint.newest_step(saving.checkpoints) == 0


def test_they_are_written_by_a_thread_that_uses_the_gpu_of_its_rank(
    build_learner: BuildLearner, world: World, tmp_path: Path
) -> None:
    """torch's writer asks for a stream of the thread's own device."""
    learner = build_learner(dtype="float32", checkpoint={"directory": str(tmp_path)})
    config = learner.config
    learner.world = replace(world, device=torch.device("cuda", 3))
    with mock.patch.object(torch.cuda, "set_device") as chosen:
        saving = Checkpointing(config, shared_checkpoints(config, tmp_path, world), learner)
        assert not chosen.called and saving.begin_checkpoint(1)
        while not saving.poll_checkpoint():
            pass
    chosen.assert_called_once_with(torch.device("cuda", 3))


def test_a_write_that_hangs_ends_the_rank(saving: Checkpointing, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 10 minutes, and the time for its bytes at 20 MB/s."""
    clock = SimpleNamespace(now=0.0)
    hangs = threading.Event()
    monkeypatch.setattr(checkpointing, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(checkpoint, "write_checkpoint", lambda *about: hangs.wait(60))
    try:
        saving.begin_checkpoint(0)
        assert not saving.poll_checkpoint()
        clock.now = saving._write_limit + 1
        assert saving._write_limit == pytest.approx(600.0, rel=0.01)
        with pytest.raises(DeadlineError, match="step 0 took longer than 600 s"):
            saving.poll_checkpoint()
    finally:
        hangs.set()


@pytest.mark.long
def test_training_waits_for_little_more_than_a_copy(world: World, tmp_path: Path) -> None:
    """The shortest of five of each: 1.5 times as long as a copy of the same bytes, at most."""
    path = save_tiny_model(tmp_path / "model")
    learner = make_learner(tiny_config(path), world, "float32")
    big = torch.nn.Parameter(learner.policy.lm.transformer.wte.weight.new_zeros(2_000_000, 16))
    learner.policy.lm.transformer.register_parameter("big", big)
    learner.optimizer.add_param_group({"params": [big]})
    learner.optimizer.state[big] = {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(big),
        "exp_avg_sq": torch.zeros_like(big),
    }
    state = checkpoint.snapshot(learner, copy=False)
    assert checkpoint.state_bytes(state) > 3 * 4 * 32_000_000

    def shortest(work: Any) -> float:
        times = []
        for _ in range(5):
            start = time.monotonic()
            kept = work()
            times.append(time.monotonic() - start)
            del kept
        return min(times)

    copied = shortest(
        lambda: [tensor.detach().clone() for tensor in tree_leaves(state) if isinstance(tensor, torch.Tensor)]
    )
    assert shortest(lambda: checkpoint.snapshot(learner)) <= 1.5 * copied
