"""A model's weights in its safetensors files: each rank reads the slices that it holds, and no others.

Names in the files are those of whoever saved them; transformers knows how they became the model's. Where it
also computes (experts in one tensor, quantized weights), there are no slices to be read.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from asyncrl.weights.model_files import weight_files


class FileTensor(NamedTuple):
    """One tensor of a file."""

    file: str
    key: str


def open_slices(file: str) -> Any:
    """The file, of which only what is asked for is read into memory: a map of it would count as used."""
    return safe_open(file, "pt", backend="pread")


def locate(model: PreTrainedModel, path: str) -> dict[str, FileTensor]:
    """Where each tensor of `model`, tied and on any device, lies in the files of `path`, by its name. Empty
    where they do not hold it as it is: converted, quantized, of another shape, missing, or no safetensors."""
    if getattr(model.config, "quantization_config", None):
        return {}
    wanted, found = model.state_dict(keep_vars=True), dict[str, FileTensor]()
    for file in map(str, weight_files(path)):
        with open_slices(file) as opened:
            for key, name in _named(model, list(opened.keys()), wanted):
                if opened.get_slice(key).get_shape() != list(wanted[name].shape):
                    return {}
                found[name] = FileTensor(file, key)
    there = {id(wanted[name]) for name in found}  # of a shared tensor one name is enough
    return found if all(id(tensor) in there for tensor in wanted.values()) else {}


def _named(model: PreTrainedModel, keys: list[str], wanted: dict[str, Tensor]) -> list[tuple[str, str]]:
    """The keys of a file that are tensors of the model, each with its name there."""
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
def fill(model: PreTrainedModel, places: dict[str, FileTensor]) -> None:
    """Read this rank's shards, and whole what is not sharded, into the memory that `model` has."""
    wanted, by_file = model.state_dict(keep_vars=True), defaultdict[str, list[str]](list)
    for name, place in places.items():
        by_file[place.file].append(name)
    for file, names in by_file.items():
        with open_slices(file) as opened:
            for name in names:
                copy_shard(opened.get_slice(places[name].key), wanted[name])


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
