"""The policy as a Hugging Face directory, with the names, files and settings of the directory that it came
from."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from asyncrl.trainer.model import Policy, copied_buffers
from asyncrl.trainer.world import World
from asyncrl.weights.manifest import RawTensorSpec, TensorSpec, split_buckets
from asyncrl.weights.model_files import INDEX_FILE, SINGLE_FILE, read_json
from asyncrl.weights.ranges import write_file
from asyncrl.weights.shards import export_layout
from asyncrl.weights.snapshot import tensor_as_bytes

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
FILE_BYTES = 5_000_000_000
EXPORT_FOLDER = "hf"

ExportSpec = TensorSpec | RawTensorSpec  # a trained tensor, or one that is copied from the source
CreateFile = Callable[[str], Any]  # opens a new file of that name for writing


def export_hf(
    create_file: CreateFile,
    policy: Policy,
    weights: Mapping[str, Any],
    world: World,
    source: str,
    template: str = "",
) -> None:
    """Write a directory like `source`, in which the trained tensors have their new values, in the configured
    dtype, with adapters merged. A collective of `world`; rank 0 writes, and holds one whole tensor at a time.

    `weights`: the model's weights and buffers, on the CPU, by name. Tensors keep their names and files.
    Frozen tensors, and tensors that the model's class does not hold (layers for drafts), are copied byte by
    byte; so are all other files (configuration, tokenizer, generation settings). `template` replaces the chat
    template, if set.
    """
    buffers = copied_buffers(policy, weights)
    specs_by_file = _export_files(policy, buffers)
    tensors = _published_tensors(policy, weights, world, specs_by_file)
    try:
        if world.rank == 0:
            _write_weights(create_file, policy, specs_by_file, tensors, buffers, Path(source))
            _write_other_files(create_file, policy, Path(source), template)
    finally:
        for _ in tensors:  # every rank takes part in the gathering to its end, also when a write has failed
            pass


def _export_files(policy: Policy, buffers: Mapping[str, Tensor]) -> dict[str, list[ExportSpec]]:
    """Return the tensors of each file of the export, in the order of the file: the files of the source or,
    where the source holds tensors that were converted in reading, files of FILE_BYTES."""
    kept_layout = (
        RawTensorSpec(name, tensor.shape, tensor.dtype, tensor.nbytes)
        for name, tensor in policy.file_tensors.items()
        if name in policy.kept_names
    )
    trained_layout = export_layout(policy.published, policy.export_dtype, buffers)
    layout: list[ExportSpec] = [*kept_layout, *trained_layout]
    # A tensor must start at a multiple of its item size, so large items come first.
    layout.sort(key=lambda spec: -spec.nbytes / max(1, math.prod(spec.shape)))

    if all(spec.name in policy.file_tensors for spec in layout):
        specs_by_file = defaultdict[str, list[ExportSpec]](list)
        for spec in layout:
            specs_by_file[policy.file_tensors[spec.name].file].append(spec)
        return dict(sorted(specs_by_file.items()))

    buckets = [*split_buckets(layout, FILE_BYTES)]
    if len(buckets) == 1:
        return {SINGLE_FILE: layout}
    return {
        f"model-{number:05}-of-{len(buckets):05}.safetensors": layout[bucket]
        for number, bucket in enumerate(buckets, 1)
    }


def _published_tensors(
    policy: Policy,
    weights: Mapping[str, Any],
    world: World,
    specs_by_file: Mapping[str, Sequence[ExportSpec]],
) -> Iterator[Tensor]:
    """Yield the published weights piece by piece, in the order of the files, whole on rank 0."""
    piece_of_name = {piece.name: piece for piece in policy.published}
    for specs in specs_by_file.values():
        pieces = [piece_of_name[spec.name] for spec in specs if spec.name in piece_of_name]
        for name, parameter_pieces in groupby(pieces, key=attrgetter("parameter")):
            tensor = world.collect_on_rank_zero(weights[name])
            adapter_names = policy.adapters.adapter_names(name) if policy.adapters is not None else None
            if policy.adapters is not None and adapter_names is not None:
                lora_a, lora_b = (world.collect_on_rank_zero(weights[adapter]) for adapter in adapter_names)
                if world.rank == 0:
                    tensor = tensor + policy.adapters.weight_change(name, lora_a, lora_b)

            flat = tensor.to(policy.export_dtype).flatten()
            yield from (flat[piece.offset : piece.offset + piece.numel] for piece in parameter_pieces)


def _write_weights(
    create_file: CreateFile,
    policy: Policy,
    specs_by_file: Mapping[str, Sequence[ExportSpec]],
    tensors: Iterator[Tensor],
    buffers: Mapping[str, Tensor],
    source: Path,
) -> None:
    def tensor_bytes(spec: ExportSpec) -> np.ndarray:
        if spec.name in policy.kept_names:
            stored = policy.file_tensors[spec.name]
            return np.fromfile(source / stored.file, np.uint8, stored.nbytes, offset=stored.offset)
        return tensor_as_bytes(buffers[spec.name] if spec.name in buffers else next(tensors))

    for file_name, specs in specs_by_file.items():
        with create_file(f"{EXPORT_FOLDER}/{file_name}") as file:
            write_file(file, tuple(specs), map(tensor_bytes, specs))

    if [*specs_by_file] != [SINGLE_FILE]:
        weight_map = {spec.name: file_name for file_name, specs in specs_by_file.items() for spec in specs}
        total_size = sum(spec.nbytes for specs in specs_by_file.values() for spec in specs)
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        with create_file(f"{EXPORT_FOLDER}/{INDEX_FILE}") as file:
            file.write(json.dumps(index, indent=1).encode())


def _write_other_files(create_file: CreateFile, policy: Policy, source: Path, template: str) -> None:
    contents = {
        file.name: file.read_bytes()
        for file in sorted(source.iterdir())
        if file.is_file() and not file.name.endswith(WEIGHT_FILES)
    }
    contents["config.json"] = json.dumps(_exported_config(policy, source), indent=2).encode()
    if template:  # from_pretrained prefers this file to what tokenizer_config.json says
        contents["chat_template.jinja"] = template.encode()

    for name, content in contents.items():
        with create_file(f"{EXPORT_FOLDER}/{name}") as file:
            file.write(content)


def _exported_config(policy: Policy, source: Path) -> dict[str, Any]:
    """Return the source's config.json with the dtype of the exported text part, and the model's class where
    the source does not name one."""
    config = read_json(source / "config.json")
    config["architectures"] = config.get("architectures") or [type(policy.lm).__name__]
    config.pop("torch_dtype", None)  # the older name
    config["dtype"] = str(policy.export_dtype).removeprefix("torch.")

    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        text_config.pop("torch_dtype", None)
        text_config["dtype"] = config["dtype"]

    return config
