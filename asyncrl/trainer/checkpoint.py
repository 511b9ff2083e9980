"""Writes and reads the contents of a checkpoint: models, optimizers and RNG by torch's distributed
checkpointing, and an export.

    snapshot (all ranks, in training) ──► write (all ranks, in the background or not) ──► manifest

Loading works with any number of ranks. Collectives: all of these.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, one_line, reason
from asyncrl.store.checkpoints import CheckpointError, CheckpointManifest, Checkpoints, Files
from asyncrl.trainer.export import export_hf
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.resting import Resting
from asyncrl.trainer.world import World
from asyncrl.weights.adapters import A, B, named, owner, peft_name
from asyncrl.weights.manifest import AdapterSpec, alone

logger = logging.getLogger(__name__)
State = dict[str, Any]


def snapshot(learner: Learner, *, copy: bool = True, resting: Resting | None = None) -> State:
    """The state of this rank, copied to main memory, or with `copy` False as it is: then it has to wake."""

    def copied(tensor: Tensor) -> Tensor:
        with resting.at_hand(tensor) if resting is not None else nullcontext():
            return tensor.detach().to("cpu", copy=True)

    if resting is not None and not copy:
        resting.wake()
    state = _state(learner)
    return tree_map_only(Tensor, copied, state) if copy else state


def size(state: State) -> int:
    """Return bytes of a state on this rank."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors(state))


def tensors(state: State) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def write(
    to: Checkpoints,
    state: State,
    manifest: CheckpointManifest,
    learner: Learner,
    world: World,
    hf: bool = True,
) -> None:
    """Write step-N in `to`; it is there when this returns. `state` is that of `snapshot`; of the learner only
    what never changes is read. `world`: the ranks, apart from training if this is in the background.

    `hf` adds an export that `from_pretrained` reads. An incomplete step-N is replaced. Raises
    CheckpointError, on all ranks alike, when it cannot be written; nothing of it is left then.
    """
    step = manifest.step
    first = world.rank == 0
    model = learner.config.model
    files = StepFiles(to, step)

    def save() -> None:
        save_shards(state, storage_writer=writer(files), process_group=world.group)

    def export() -> None:
        export_hf(files.create, learner.policy, state["model"], world, model.path, model.template)

    def seal() -> None:
        if first:
            to.seal(
                msgspec.structs.replace(manifest, files={n: f for part in found for n, f in part.items()})
            )

    try:
        _together(world, lambda: to.clear(step) if first else None)
        _together(world, save)
        if hf:
            _together(world, export)
        found = world.gather(files.written, Files)
        _together(world, seal)
    except CheckpointError as error:
        if first:
            to.remove(step)
        raise CheckpointError(f"{error}; checkpoint {to.path(step)}") from error


def manifest_of(learner: Learner, **lineage: Any) -> CheckpointManifest:
    return CheckpointManifest(step=learner.step, state=_carried(learner, learner.state), **lineage)


def _together(world: World, work: Callable[[], object]) -> None:
    """A part of saving. When it fails on one rank it has failed on all: CheckpointError."""
    problem = ""
    try:
        work()
    except CheckpointException as error:  # of all ranks already
        problem = one_line(next(iter(error.failures.values()))[0])
    except Exception as error:  # the others wait for this rank
        problem = reason(error) if isinstance(error, OSError | CheckpointError) else one_line(error)
    if problem := next(filter(None, world.gather(problem, str)), ""):
        raise CheckpointError(problem)


def load(checkpoints: Checkpoints, step: int, learner: Learner) -> CheckpointManifest:
    """Restore models, optimizers, RNG, `state` and `step` in place, not the reference: that stays the initial
    policy. The step must be one that `newest` gave. Raises CheckpointError when it is of other models."""
    manifest = checkpoints.manifest(step)
    path = checkpoints.path(step)
    source = reader(StepFiles(checkpoints, step))
    state = _state(learner)
    saved = source.read_metadata().state_dict_metadata
    if f"rng.{learner.world.rank}" not in saved:  # more ranks than were saved: they keep their seed
        state.pop("rng")
    if "critic" in state and not any(name.startswith("critic.") for name in saved):
        logger.warning("checkpoint %s has no critic: it starts anew", path)
        state.pop("critic")
    try:
        load_shards(state, storage_reader=source)
    except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise CheckpointError(f"{path} does not fit this model: {one_line(error)}") from error
    _restore(learner.policy.lm, learner.optimizer, state)
    if learner.critic is not None and "critic" in state:
        _restore(learner.critic, learner.critic.optimizer, state["critic"])
    if "rng" in state:
        torch.set_rng_state(state["rng"][str(learner.world.rank)])
    learner.state |= _carried(learner, manifest.state)
    learner.step = manifest.step
    return manifest


def newest(checkpoints: Checkpoints, before: float = math.inf) -> int:
    """The newest step, of those `before` one, that is undamaged; -1: none. Damaged ones are logged."""
    for step in (step for step in checkpoints.steps() if step < before):
        problem = checkpoints.damage(step)
        if not problem:
            return step
        logger.warning(
            "checkpoint %s is damaged (%s): falling back to the one before", checkpoints.path(step), problem
        )
    return -1


def _state(learner: Learner) -> dict[str, Any]:
    state = _of(learner.policy.lm, learner.optimizer)
    if learner.critic is not None:
        state["critic"] = _of(learner.critic, learner.critic.optimizer)
    return state | {"rng": {str(learner.world.rank): torch.get_rng_state()}}


def _carried(learner: Learner, state: dict[str, float]) -> dict[str, float]:
    """The part of `state` that a resumed run takes over. A fixed KL coefficient comes from the config."""
    kl = learner.config.kl
    adapts = kl.where != "none" and kl.target > 0
    return {name: value for name, value in state.items() if adapts or name != "kl_coef"}


def _of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _restore(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Weights and moments; the optimizer's settings are those of the config."""
    settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


STATE = "state"  # the folder of torch's files
Name = str | os.PathLike[str]


class StepFiles(FileSystemBase):
    """The files of one checkpoint, as the file system that torch's distributed checkpointing wants. Paths are
    relative to the checkpoint. `written`: the files of this rank."""

    def __init__(self, checkpoints: Checkpoints, step: int) -> None:
        self._all = checkpoints
        self._step = step
        self.written: Files = {}

    def create(self, name: str) -> Any:
        return self._all.create(self._step, name, self.written)

    @contextmanager
    def create_stream(self, path: Name, mode: str) -> Iterator[Any]:
        name = os.fspath(path).removesuffix(".tmp")  # there is no need to rename: the manifest comes last
        with self._all.open(self._step, name) if "r" in mode else self.create(name) as stream:
            yield stream

    def rename(self, path: Name, new_path: Name) -> None:
        """Nothing: see `create_stream`."""

    def concat_path(self, path: Name, suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def init_path(self, path: Name) -> Name:
        return path

    def mkdir(self, path: Name) -> None:
        """Nothing: `create` makes directories."""

    def exists(self, path: Name) -> bool:
        return False  # a checkpoint is written to an empty directory

    def rm_file(self, path: Name) -> None:
        raise AssertionError("nothing is there to be removed")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Name) -> bool:
        return True


def writer(files: StepFiles) -> FileSystemWriter:
    found: Any = FileSystemWriter(STATE, sync_files=False)  # they are synchronised when they are closed
    found.fs = files
    found.path = STATE
    return cast(FileSystemWriter, found)


def reader(files: StepFiles) -> FileSystemReader:
    found: Any = FileSystemReader(STATE)
    found.fs = files
    found.path = STATE
    return cast(FileSystemReader, found)


MODEL = "model."  # what the policy's tensors are under in a checkpoint


def write_adapters(checkpoints: Checkpoints, step: int, config: RunConfig, out: Path) -> None:
    """Write adapter_model.safetensors (float32) and adapter_config.json, those of an agent in a directory of
    its name; nothing else is read. ConfigError where the run trained all weights."""
    source = reader(StepFiles(checkpoints, step))
    stored = {
        name.removeprefix(MODEL): known
        for name, known in source.read_metadata().state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(known, TensorStorageMetadata)
    }
    tensors = {
        name: torch.empty(known.size, dtype=known.properties.dtype)
        for name, known in stored.items()
        if owner(name) is not None
    }
    if not tensors:
        raise ConfigError(f"{checkpoints.path(step)}: has no adapters, all weights were trained; merge it")
    with warnings.catch_warnings():  # that there are no other processes is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_shards({"model": tensors}, storage_reader=source, no_dist=True)
    layers = tuple(sorted({name.rpartition(".")[0] for name in tensors}))
    for agent, size in config.adapters.items():
        every = {alone(peft_name(name), agent): tensor for name, tensor in tensors.items()}
        mine = {name: tensor for name, tensor in every.items() if name}
        (out / agent).mkdir(exist_ok=True)
        save_file(mine, out / agent / "adapter_model.safetensors", {"format": "pt"})
        transposed = any(_transposed(layer, agent, stored) for layer in layers)
        settings = msgspec.json.encode(AdapterSpec(*size, layers, transposed).peft(config.model.path))
        (out / agent / "adapter_config.json").write_bytes(msgspec.json.format(settings, indent=2))


def _transposed(layer: str, agent: str, stored: Mapping[str, TensorStorageMetadata]) -> bool:
    """True for weights of transformers' Conv1D, kept as [in, out]; seen where the two differ."""
    names = ("weight", named(A, agent), named(B, agent))
    weight, (_, inside), (outside, _) = (stored[f"{layer}.{name}"].size for name in names)
    return tuple(weight) == (inside, outside) != (outside, inside)
