"""A model's weights in its safetensors files: each rank reads the slices that it holds, and no others.

Names in the files are those of whoever saved them; transformers knows how they became the model's. Experts
that it stacks are read one by one into their place. Where it computes anything else (quantized weights, other
conversions), there are no slices to be read.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from asyncrl.weights.model_files import weight_files
from asyncrl.weights.names import FilePiece, pieces

ROWS = 1024  # that are compared at once


class FileTensor(NamedTuple):
    """One tensor of a file."""

    file: str
    key: str


def open_slices(file: str) -> Any:
    """The file, of which only what is asked for is read into memory: a map of it would count as used."""
    return safe_open(file, "pt", backend="pread")


def locate(model: PreTrainedModel, path: str) -> dict[FilePiece, FileTensor]:
    """Finds the tensors of `model`, tied and on any device, in the files of `path`, whole or in parts. Empty
    where they do not hold them as they are: converted, quantized, of another shape, missing, twice with
    different values (of tied tensors), or no safetensors."""
    if getattr(model.config, "quantization_config", None):
        return {}
    tensors, found = model.state_dict(keep_vars=True), dict[FilePiece, FileTensor]()
    whole = (FilePiece(name, name, tuple(tensor.shape)) for name, tensor in tensors.items())
    wanted = {piece.name: piece for piece in (*pieces(model, tensors), *whole)}
    for file in map(str, weight_files(path)):
        with open_slices(file) as opened:
            for key, name in _named(model, list(opened.keys()), wanted):
                if opened.get_slice(key).get_shape() != list(wanted[name].shape):
                    return {}
                found[wanted[name]] = FileTensor(file, key)
    counts, first = Counter[str](), dict[tuple[int, int], FileTensor]()
    for piece, place in found.items():
        counts[piece.parameter] += piece.numel
        if not _equal(first.setdefault((id(tensors[piece.parameter]), piece.offset), place), place):
            return {}
    there = {id(tensors[name]) for name, count in counts.items() if count == tensors[name].numel()}
    return found if all(id(tensor) in there for tensor in tensors.values()) else {}


def _equal(one: FileTensor, other: FileTensor) -> bool:
    if one is other:
        return True
    with open_slices(one.file) as first, open_slices(other.file) as second:
        a, b = first.get_slice(one.key), second.get_slice(other.key)
        count = a.get_shape()[0]
        parts = (slice(start, min(start + ROWS, count)) for start in range(0, count, ROWS))
        return all(torch.equal(a[part], b[part]) for part in parts)


def _named(model: PreTrainedModel, keys: list[str], wanted: dict[str, FilePiece]) -> list[tuple[str, str]]:
    """The keys of a file that are wanted, each with the name that it is wanted under."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found = []
    for key in keys:
        for known in ((renamings, converters), ([], [])):  # as transformers tries it
            name, computed = rename_source_key(key, *known, model.base_model_prefix, wanted)
            if name in wanted and computed is None:
                found.append((key, name))
                break
    return found


@torch.no_grad()
def fill(model: PreTrainedModel, places: dict[FilePiece, FileTensor]) -> None:
    """Read this rank's shards, and whole what is not sharded, into the memory that `model` has."""
    tensors, by_file = model.state_dict(keep_vars=True), defaultdict[str, list[FilePiece]](list)
    for piece, place in places.items():
        by_file[place.file].append(piece)
    for file, inside in by_file.items():
        with open_slices(file) as opened:
            for piece in inside:
                copy_piece(opened.get_slice(places[piece].key), tensors[piece.parameter], piece)


@torch.no_grad()
def copy_piece(whole: Any, target: Tensor, piece: FilePiece) -> None:
    """Copy into `target` its part of a piece, a slice of a file."""
    if piece.shape == tuple(target.shape):
        copy_shard(whole, target)
        return
    start = 0
    if isinstance(target, DTensor):  # sharded by experts: all of a piece is on one rank
        (chunk,) = target.__create_chunk_list__()
        start, target = chunk.offsets[0] * math.prod(target.shape[1:]), target.to_local()
    if start <= piece.offset < start + target.numel():
        piece.within(target, start).copy_(whole[...])


@torch.no_grad()
def copy_shard(whole: Any, target: Tensor) -> None:
    """Copy into `target` its part of a tensor, or of a slice of a file."""
    region: Any = ...
    if isinstance(target, DTensor):
        (chunk,) = target.__create_chunk_list__()
        region = tuple(slice(start, start + n) for start, n in zip(chunk.offsets, chunk.sizes, strict=True))
        target = target.to_local()
    if target.numel():  # there may be more ranks than rows
        target.copy_(whole[region])
