"""Writes and reads the contents of a checkpoint: models, optimizers and RNG by torch's distributed
checkpointing, and an export.

    snapshot (all ranks, in training) ──► write (all ranks, in the background or not) ──► manifest

Loading works with any number of ranks. All functions here are collectives.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

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
from asyncrl.trainer.device_offload import DeviceOffload
from asyncrl.trainer.export import export_hf
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from asyncrl.weights.adapters import ROLE_A, ROLE_B, owning_agent, peft_name, role_name
from asyncrl.weights.manifest import AdapterSpec, agent_tensor_name

logger = logging.getLogger(__name__)
State = dict[str, Any]


def snapshot(learner: Learner, *, copy: bool = True, device_offload: DeviceOffload | None = None) -> State:
    """Return the state of this rank, copied to main memory. With `copy` False, return the tensors themselves,
    after onloading."""
    if not copy:
        if device_offload is not None:
            device_offload.onload()
        return _learner_state(learner)

    def host_copy(tensor: Tensor) -> Tensor:
        with device_offload.onloaded(tensor) if device_offload is not None else nullcontext():
            return tensor.detach().to("cpu", copy=True)

    return tree_map_only(Tensor, host_copy, _learner_state(learner))


def state_bytes(state: State) -> int:
    """Return the bytes of a state on this rank."""
    return sum(
        (leaf.to_local() if isinstance(leaf, DTensor) else leaf).nbytes
        for leaf in tree_leaves(state)
        if isinstance(leaf, Tensor)
    )


def write_checkpoint(
    checkpoints: Checkpoints,
    state: State,
    manifest: CheckpointManifest,
    learner: Learner,
    world: World,
    with_export: bool = True,
) -> None:
    """Write step-N of `checkpoints`; it is complete when this returns. `state`: from `snapshot`; of the
    learner only constant parts are read. `world`: the ranks, with their own group if this runs beside
    training.

    `with_export` adds an export that `from_pretrained` reads. An incomplete step-N is replaced. Raises
    CheckpointError on all ranks when the checkpoint cannot be written; nothing of it is left then.
    """
    step = manifest.step
    is_first_rank = world.rank == 0
    model = learner.config.model
    files = StepFiles(checkpoints, step)

    try:
        with _failing_together(world):
            if is_first_rank:
                checkpoints.prepare_step(step)

        with _failing_together(world):
            # Files are synchronised when they are closed.
            shard_writer = _use_files(FileSystemWriter(STATE_FOLDER, sync_files=False), files)
            save_shards(state, storage_writer=shard_writer, process_group=world.group)

        if with_export:
            with _failing_together(world):
                export_hf(
                    files.create_file, learner.policy, state["model"], world, model.path, model.template
                )

        # The manifest comes last, when all ranks have written: it makes the checkpoint complete.
        files_by_rank = world.gather(files.written, Files)
        with _failing_together(world):
            if is_first_rank:
                all_files = {name: file for files_of in files_by_rank for name, file in files_of.items()}
                checkpoints.write_manifest(msgspec.structs.replace(manifest, files=all_files))
    except CheckpointError as error:
        if is_first_rank:
            checkpoints.remove_step(step)
        raise CheckpointError(f"{error}; checkpoint {checkpoints.file_path(step)}") from error


def manifest_of(learner: Learner, **lineage: Any) -> CheckpointManifest:
    return CheckpointManifest(step=learner.step, state=_carried_state(learner, learner.state), **lineage)


@contextmanager
def _failing_together(world: World) -> Iterator[None]:
    """Raise CheckpointError on all ranks if the body, a part of saving, fails on one. A collective."""
    problem = ""
    try:
        yield
    except CheckpointException as error:  # torch has gathered the errors of all ranks
        problem = one_line(next(iter(error.failures.values()))[0])
    except Exception as error:  # the others wait for this rank
        problem = reason(error) if isinstance(error, OSError | CheckpointError) else one_line(error)

    if problem := next(filter(None, world.gather(problem, str)), ""):
        raise CheckpointError(problem)


def load_checkpoint(checkpoints: Checkpoints, step: int, learner: Learner) -> CheckpointManifest:
    """Restore models, optimizers, RNG, `state` and `step` in place, but not the reference: that stays the
    initial policy. `step` must come from `newest_step`. Raises CheckpointError when the checkpoint is of
    other models."""
    manifest = checkpoints.manifest(step)
    path = checkpoints.file_path(step)
    stored_reader = _use_files(FileSystemReader(STATE_FOLDER), StepFiles(checkpoints, step))
    state = _learner_state(learner)
    stored_tensors = stored_reader.read_metadata().state_dict_metadata
    if f"rng.{learner.world.rank}" not in stored_tensors:  # more ranks than were saved: they keep their seed
        state.pop("rng")

    if "critic" in state and not any(name.startswith("critic.") for name in stored_tensors):
        logger.warning("checkpoint %s has no critic; starting a new critic", path)
        state.pop("critic")

    try:
        load_shards(state, storage_reader=stored_reader)
    except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise CheckpointError(f"{path} does not fit this model: {one_line(error)}") from error

    _restore_model(learner.policy.lm, learner.optimizer, state)
    if learner.critic is not None and "critic" in state:
        _restore_model(learner.critic, learner.critic.optimizer, state["critic"])
    if "rng" in state:
        torch.set_rng_state(state["rng"][str(learner.world.rank)])
    learner.state |= _carried_state(learner, manifest.state)
    learner.step = manifest.step

    return manifest


def newest_step(checkpoints: Checkpoints, before_step: float = math.inf) -> int:
    """Return the newest undamaged step before `before_step`; -1: none. Damaged checkpoints are logged."""
    for step in (step for step in checkpoints.steps() if step < before_step):
        problem = checkpoints.find_damage(step)
        if not problem:
            return step
        logger.warning(
            "checkpoint %s is damaged (%s); falling back to the previous checkpoint",
            checkpoints.file_path(step),
            problem,
        )

    return -1


def _learner_state(learner: Learner) -> dict[str, Any]:
    state = _model_state(learner.policy.lm, learner.optimizer)
    if learner.critic is not None:
        state["critic"] = _model_state(learner.critic, learner.critic.optimizer)
    return state | {"rng": {str(learner.world.rank): torch.get_rng_state()}}


def _carried_state(learner: Learner, state: dict[str, float]) -> dict[str, float]:
    """Return the part of `state` that a resumed run takes over. A fixed KL coefficient comes from the
    configuration."""
    kl_config = learner.config.kl
    coefficient_adapts = kl_config.where != "none" and kl_config.target > 0
    return {name: value for name, value in state.items() if coefficient_adapts or name != "kl_coef"}


def _model_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _restore_model(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore weights and moments; the optimizer's settings stay as configured."""
    configured_settings = [
        {key: group[key] for key in group if key != "params"} for group in optimizer.param_groups
    ]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, group_settings in zip(optimizer.param_groups, configured_settings, strict=True):
        group.update(group_settings)


STATE_FOLDER = "state"  # the folder of torch's files
PathName = str | os.PathLike[str]


class StepFiles(FileSystemBase):
    """Presents one checkpoint as the file system that torch's distributed checkpointing asks for. Paths are
    relative to the checkpoint. `written`: the files of this rank."""

    def __init__(self, checkpoints: Checkpoints, step: int) -> None:
        self._checkpoints = checkpoints
        self._step = step
        self.written: Files = {}

    def create_file(self, name: str) -> Any:
        return self._checkpoints.create_file(self._step, name, self.written)

    @contextmanager
    def create_stream(self, path: PathName, mode: str) -> Iterator[Any]:
        name = os.fspath(path).removesuffix(".tmp")  # there is no need to rename: the manifest comes last
        with (
            self._checkpoints.open_file(self._step, name) if "r" in mode else self.create_file(name) as stream
        ):
            yield stream

    def rename(self, path: PathName, new_path: PathName) -> None:
        """Nothing: see `create_stream`."""

    def concat_path(self, path: PathName, suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def init_path(self, path: PathName) -> PathName:
        return path

    def mkdir(self, path: PathName) -> None:
        """Nothing: `create_file` makes directories."""

    def exists(self, path: PathName) -> bool:
        return False  # a checkpoint is written to an empty directory

    def rm_file(self, path: PathName) -> None:
        raise AssertionError("there is nothing to remove")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathName) -> bool:
        return True


Storage = TypeVar("Storage", FileSystemReader, FileSystemWriter)


def _use_files(storage: Storage, files: StepFiles) -> Storage:
    """Let a reader or writer of torch use the files of a checkpoint."""
    adapted_storage: Any = storage
    adapted_storage.fs = files
    adapted_storage.path = STATE_FOLDER
    return storage


MODEL_PREFIX = "model."  # prefix of the policy's tensors in a checkpoint


def write_adapters(checkpoints: Checkpoints, step: int, config: RunConfig, out_directory: Path) -> None:
    """Write adapter_model.safetensors (float32) and adapter_config.json, each agent's into a directory of its
    name; no other tensors are read. ConfigError where the run trained all weights."""
    stored_reader = _use_files(FileSystemReader(STATE_FOLDER), StepFiles(checkpoints, step))
    stored_tensors = {
        name.removeprefix(MODEL_PREFIX): metadata
        for name, metadata in stored_reader.read_metadata().state_dict_metadata.items()
        if name.startswith(MODEL_PREFIX) and isinstance(metadata, TensorStorageMetadata)
    }
    adapter_tensors = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in stored_tensors.items()
        if owning_agent(name) is not None
    }
    if not adapter_tensors:
        raise ConfigError(
            f"{checkpoints.file_path(step)}: contains no adapters, because all weights were trained; use "
            "--adapters merged"
        )

    with warnings.catch_warnings():  # loading without other processes is intended
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_shards({"model": adapter_tensors}, storage_reader=stored_reader, no_dist=True)

    layer_names = tuple(sorted({name.rpartition(".")[0] for name in adapter_tensors}))
    for agent, rank_and_alpha in config.adapters.items():
        agent_tensors = {
            agent_name: tensor
            for name, tensor in adapter_tensors.items()
            if (agent_name := agent_tensor_name(peft_name(name), agent))
        }
        (out_directory / agent).mkdir(exist_ok=True)
        save_file(agent_tensors, out_directory / agent / "adapter_model.safetensors", {"format": "pt"})
        is_transposed = any(_is_transposed(layer, agent, stored_tensors) for layer in layer_names)
        adapter_config = msgspec.json.encode(
            AdapterSpec(*rank_and_alpha, layer_names, is_transposed).peft(config.model.path)
        )
        (out_directory / agent / "adapter_config.json").write_bytes(
            msgspec.json.format(adapter_config, indent=2)
        )


def _is_transposed(layer: str, agent: str, stored_tensors: Mapping[str, TensorStorageMetadata]) -> bool:
    """True for weights of transformers' Conv1D, kept as [in, out]; visible only where the two sizes
    differ."""
    names = ("weight", role_name(ROLE_A, agent), role_name(ROLE_B, agent))
    weight, (_, input_width), (output_width, _) = (stored_tensors[f"{layer}.{name}"].size for name in names)
    return tuple(weight) == (input_width, output_width) != (output_width, input_width)
