"""From a model directory to a model sharded over the ranks.

    skeleton (meta device) ──additions──► fully_shard ──► empty shards ◄── each rank's slices of the files

Each rank reads only the slices of its shards. The files may use the names of another program; transformers
knows how to map these to the model's names. Experts that transformers stacks are read one by one into the
stack. A model that is converted in another way during reading has no such slices: rank 0 reads the whole
model, and broadcasts.

With dtype bfloat16, trained weights are float32 masters; frozen weights (`requires_grad` is False when the
model is sharded) are kept in bfloat16, in which forwards compute anyway.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from asyncrl.errors import ConfigError
from asyncrl.model_class import (
    ModelRole,
    auto_class_of,
    freeze_parts,
    frozen_parts,
    parts_beside_text,
    read_config,
)
from asyncrl.shrunk import attention_arguments
from asyncrl.trainer.footprint import LAYER_MIN_PARAMETERS
from asyncrl.trainer.layers import layers_of
from asyncrl.trainer.world import World
from asyncrl.weights.adapters import initial_values
from asyncrl.weights.checkpoint_match import check_finite, load_pretrained
from asyncrl.weights.model_files import StoredTensor, stored_tensors
from asyncrl.weights.names import FilePiece, pieces_in_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightsSource:
    """Holds a model without weights (on the meta device; its buffers are real), whose frozen parts do not
    train, and the file slices that each rank reads: the file of each piece. If `file_of_piece` is empty,
    `filled_model` has the weights on rank 0. `file_tensors`: the tensors of the files, by name.
    `error_label`: key and path, for errors. `parts_beside_text`: see the function."""

    model: PreTrainedModel
    file_of_piece: dict[FilePiece, str]
    filled_model: PreTrainedModel | None
    dtype: str
    file_tensors: dict[str, StoredTensor]
    error_label: str
    parts_beside_text: tuple[str, ...]


def read_model(
    role: ModelRole, path: str, dtype: str, world: World, key: str, *, train_vision: bool = False
) -> WeightsSource:
    """Read a directory for a role. `train_vision`: the parts beside the text part train, too. ConfigError
    names the key of the path."""
    transformers_logging.disable_progress_bar()  # ranks share a terminal with a live view

    with ConfigError.instead_of(
        OSError, ValueError, SafetensorError, text=f"{key} {path!r}: cannot be loaded"
    ):
        model = model_without_weights(role, path, dtype)
        freeze_parts(model, frozen_parts(model, train_vision=train_vision))
        file_tensors = stored_tensors(path)
        file_of_piece = locate_tensors(model, path, file_tensors)

        is_sliced = all(world.gather(bool(file_of_piece), bool))
        filled_model = None
        if not is_sliced and world.rank == 0:
            logger.warning(
                "%s: its files do not store the weights in the model's layout, so rank 0 reads all weights",
                path,
            )
            filled_model = load_pretrained(role, path, f"{key} {path}", dtype=master_dtype(dtype))

            # Of tied tensors with different values in the files, transformers would keep both.
            untied_names = model.all_tied_weights_keys.keys() - filled_model.all_tied_weights_keys.keys()
            if untied_names:
                raise ValueError(
                    f"config.json ties {', '.join(sorted(untied_names))} to another tensor, but the files "
                    "hold different values; set tie_word_embeddings=false in config.json"
                )

    return WeightsSource(
        model,
        file_of_piece if is_sliced else {},
        filled_model,
        dtype,
        file_tensors=file_tensors,
        error_label=f"{key} {path}",
        parts_beside_text=parts_beside_text(model),
    )


def model_without_weights(role: ModelRole, path: str, dtype: str) -> PreTrainedModel:
    """Return the model of a directory without weights. `cast_parameters` sets the final dtypes."""
    config = read_config(path, role)
    attention_options = attention_arguments(config)
    if dtype == "float64":  # no grouped products of experts exist for float64
        attention_options["experts_implementation"] = "eager"

    with init_empty_weights(include_buffers=False):
        model = auto_class_of(config, role).from_config(
            config, dtype=getattr(torch, dtype), **attention_options
        )

    model.tie_weights()  # emptying parameters one by one separates shared ones
    model.eval()  # no dropout, rho must be 1 at lag 0
    return cast(PreTrainedModel, model)


def master_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of trained weights where forwards compute in `dtype`. float64 is for exact tests."""
    return torch.float64 if dtype == "float64" else torch.float32


def stored_dtype(parameter: nn.Parameter, dtype: str) -> torch.dtype:
    """Return the dtype that a parameter is kept in where forwards compute in `dtype`."""
    return master_dtype(dtype) if parameter.requires_grad else cast(torch.dtype, getattr(torch, dtype))


def cast_parameters(root: nn.Module, dtype: str) -> None:
    """Cast parameters without weights (on the meta device) to the dtypes of their storage. Which parameters
    train must be decided before. Buffers keep the dtype of a forward."""
    for parameter in root.parameters():
        parameter.data = parameter.data.to(stored_dtype(parameter, dtype))


def shard_and_fill(root: nn.Module, source: WeightsSource, world: World, *, offload: bool = False) -> None:
    """Shard `root`, which holds `source.model`, and fill in its weights. A collective.

    Weights added since the model was read get their initial values. `offload`: the shards stay in main
    memory, and go to the device during a forward.
    """
    cast_parameters(root, source.dtype)
    shard_empty(root, source.model, source.dtype, world, source.parts_beside_text, offload=offload)

    frozen = any(not parameter.requires_grad for parameter in source.model.parameters())
    file_dtypes = {tensor.dtype for tensor in source.file_tensors.values()}
    wider_dtypes = sorted(file_dtypes & {"F64", "F32", "F16"})
    if world.rank == 0 and frozen and wider_dtypes and source.dtype == "bfloat16":
        logger.info(
            "%s: stores tensors as %s; frozen weights are rounded to bfloat16 for the forward passes",
            source.error_label,
            ", ".join(wider_dtypes),
        )

    if source.file_of_piece:
        fill_shards(source.model, source.file_of_piece, source.error_label)
        state = source.model.state_dict(keep_vars=True)
        read_tensors = {id(state[piece.parameter]) for piece in source.file_of_piece}
        for name, tensor in state.items():
            if id(tensor) not in read_tensors:
                copy_shard(initial_values(name, tensor), tensor)
    else:
        all_weights: dict[str, Any] = {}  # on rank 0, which broadcasts
        if source.filled_model is not None:
            all_weights = source.filled_model.state_dict()
            all_weights |= {
                name: initial_values(name, parameter)
                for name, parameter in source.model.named_parameters()
                if name not in all_weights
            }
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(source.model, all_weights, options=options)

    assert all(isinstance(parameter, DTensor) for parameter in root.parameters()), "FSDP2 did not shard"


def shard_empty(
    root: nn.Module,
    model: PreTrainedModel,
    dtype: str,
    world: World,
    separate_parts: Sequence[str],
    *,
    offload: bool = False,
) -> None:
    """Shard `root`, which holds `model`, and allocate the shards without values. Parameters are DTensors
    afterwards, on every device. `separate_parts`: names of parts that a forward of text does not run; these
    are groups of their own, which are gathered for images only."""
    pin_memory = world.device.type == "cuda"
    offload_policy = CPUOffloadPolicy(pin_memory=pin_memory) if offload else OffloadPolicy()
    mixed_precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype == "bfloat16":
        mixed_precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    modules = dict(model.named_modules())
    for part_name in separate_parts:
        if part_name in modules:  # a part may be a parameter alone
            fully_shard(
                modules[part_name], mesh=world.mesh, mp_policy=mixed_precision, offload_policy=offload_policy
            )

    if sum(parameter.numel() for parameter in root.parameters()) >= LAYER_MIN_PARAMETERS:
        for layer in layers_of(model):
            fully_shard(layer, mesh=world.mesh, mp_policy=mixed_precision, offload_policy=offload_policy)

    # Embedding and head (often one tied tensor) stay in the root's group.
    fully_shard(root, mesh=world.mesh, mp_policy=mixed_precision, offload_policy=offload_policy)

    # `to_empty` allocates buffers, too, without their values.
    buffers = [
        (module, name, buffer.to(world.device))
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    root.to_empty(device=torch.device("cpu") if offload else world.device)
    for module, name, buffer in buffers:
        setattr(module, name, buffer)
    model.tie_weights()


COMPARED_ROWS = 1024  # rows of two tensors that are compared at once


def open_slices(file: str) -> Any:
    """Open a file so that only requested slices are read: a memory map of the file would count as used
    memory."""
    return safe_open(file, "pt", backend="pread")


def locate_tensors(
    model: PreTrainedModel, path: str, file_tensors: Mapping[str, StoredTensor]
) -> dict[FilePiece, str]:
    """Find the tensors of `model`, tied and on any device, among `file_tensors`, those in the files of
    `path`, whole or in parts. Returns the file of each piece; empty where the files do not hold the tensors
    unchanged: converted, of another shape, missing, twice with different values (of tied tensors), or no
    safetensors."""
    file_of_piece = {
        piece: str(Path(path) / file_tensors[piece.name].file)
        for piece in pieces_in_files(model, file_tensors)
    }

    tensors = model.state_dict(keep_vars=True)
    counts = Counter[str]()
    first_copies = dict[tuple[int, int], FilePiece]()
    for piece in file_of_piece:
        counts[piece.parameter] += piece.numel
        first_copy = first_copies.setdefault((id(tensors[piece.parameter]), piece.offset), piece)
        if not _equal_tensors(first_copy, piece, file_of_piece):
            return {}

    complete_tensors = {id(tensors[name]) for name, count in counts.items() if count == tensors[name].numel()}
    return file_of_piece if all(id(tensor) in complete_tensors for tensor in tensors.values()) else {}


def _equal_tensors(left: FilePiece, right: FilePiece, file_of_piece: dict[FilePiece, str]) -> bool:
    if left is right:
        return True

    with open_slices(file_of_piece[left]) as left_file, open_slices(file_of_piece[right]) as right_file:
        left_slice = left_file.get_slice(left.name)
        right_slice = right_file.get_slice(right.name)
        row_count = left_slice.get_shape()[0]
        parts = (
            slice(start, min(start + COMPARED_ROWS, row_count))
            for start in range(0, row_count, COMPARED_ROWS)
        )
        return all(torch.equal(left_slice[part], right_slice[part]) for part in parts)


@torch.no_grad()
def fill_shards(model: PreTrainedModel, file_of_piece: dict[FilePiece, str], error_label: str) -> None:
    """Read this rank's shards, and whole all unsharded tensors, into the memory of `model`. ConfigError,
    which begins with `error_label`, where weights are not finite."""
    tensors = model.state_dict(keep_vars=True)
    pieces_by_file = defaultdict[str, list[FilePiece]](list)
    for piece, file in file_of_piece.items():
        pieces_by_file[file].append(piece)

    for file, pieces in pieces_by_file.items():
        with open_slices(file) as opened:
            for piece in pieces:
                copy_piece(opened.get_slice(piece.name), tensors[piece.parameter], piece)

    for name in dict.fromkeys(piece.parameter for piece in file_of_piece):
        tensor = tensors[name]
        check_finite(tensor.to_local() if isinstance(tensor, DTensor) else tensor, name, error_label)


@torch.no_grad()
def copy_piece(stored_slice: Any, target_tensor: Tensor, piece: FilePiece) -> None:
    """Copy a rank's part of a piece, a slice of a file, into `target_tensor`."""
    if piece.shape == tuple(target_tensor.shape):
        copy_shard(stored_slice, target_tensor)
        return

    first_number = 0
    if isinstance(target_tensor, DTensor):
        (chunk,) = target_tensor.__create_chunk_list__()
        first_number = chunk.offsets[0] * math.prod(target_tensor.shape[1:])
        target_tensor = target_tensor.to_local()

    # This rank has all of an expert, or whole rows of joined tensors.
    start = max(piece.offset, first_number)
    stop = min(piece.offset + piece.numel, first_number + target_tensor.numel())
    if start < stop:
        row_size = math.prod(piece.shape[1:])
        rows = slice((start - piece.offset) // row_size, (stop - piece.offset) // row_size)
        numbers_here = target_tensor.view(-1)[start - first_number : stop - first_number]
        numbers_here.view(-1, *piece.shape[1:]).copy_(stored_slice[rows])


@torch.no_grad()
def copy_shard(stored_slice: Any, target_tensor: Tensor) -> None:
    """Copy a rank's part of a tensor, or of a slice of a file, into `target_tensor`."""
    region: Any = ...
    if isinstance(target_tensor, DTensor):
        (chunk,) = target_tensor.__create_chunk_list__()
        region = tuple(
            slice(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        target_tensor = target_tensor.to_local()

    if target_tensor.numel():  # there may be more ranks than rows
        target_tensor.copy_(stored_slice[region])
