"""The policy as a Hugging Face directory: weights in files of 5 GB, config, tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncrl.trainer.model import Policy, copied_buffers
from asyncrl.trainer.world import World
from asyncrl.weights.manifest import split_buckets
from asyncrl.weights.model_files import INDEX_FILE
from asyncrl.weights.ranges import write_file
from asyncrl.weights.shards import export_layout
from asyncrl.weights.snapshot import tensor_as_bytes

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
FILE_BYTES = 5_000_000_000
EXPORT_FOLDER = "hf"

CreateFile = Callable[[str], Any]  # opens a new file of that name for writing


def export_hf(
    create_file: CreateFile,
    policy: Policy,
    weights: Mapping[str, Any],
    world: World,
    source: str,
    template: str = "",
) -> None:
    """Write a directory for `from_pretrained`: weights in the configured dtype, buffers unchanged, adapters
    merged. A collective of `world`; rank 0 writes, and holds one whole tensor at a time.

    `weights`: the model's weights and buffers, on the CPU, by name. Everything else (tokenizer, chat
    template, generation settings) comes from `source`; `template` replaces the chat template, if set.
    """
    tensors = _published_tensors(policy, weights, world)
    try:
        if world.rank == 0:
            _write_weights(create_file, policy, tensors, copied_buffers(policy, weights))
            _write_other_files(create_file, policy, Path(source), template)
    finally:
        for _ in tensors:  # every rank takes part in the gathering to its end, also when a write has failed
            pass


def _published_tensors(policy: Policy, weights: Mapping[str, Any], world: World) -> Iterator[Tensor]:
    """Yield the published weights piece by piece, whole on rank 0."""
    for name, parameter_pieces in groupby(policy.published, key=attrgetter("parameter")):
        tensor = world.collect_on_rank_zero(weights[name])
        adapter_names = policy.adapters.adapter_names(name) if policy.adapters is not None else None
        if policy.adapters is not None and adapter_names is not None:
            lora_a, lora_b = (world.collect_on_rank_zero(weights[adapter]) for adapter in adapter_names)
            if world.rank == 0:
                tensor = tensor + policy.adapters.weight_change(name, lora_a, lora_b)

        flat = tensor.to(policy.export_dtype).flatten()
        yield from (flat[piece.offset : piece.offset + piece.numel] for piece in parameter_pieces)


def _write_weights(
    create_file: CreateFile, policy: Policy, tensors: Iterator[Tensor], buffers: Mapping[str, Tensor]
) -> None:
    layout = export_layout(policy.published, policy.export_dtype, buffers)

    file_specs = [layout[specs] for specs in split_buckets(layout, FILE_BYTES)]
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(file_specs, 1):
        file_name = (
            f"model-{number:05}-of-{len(file_specs):05}.safetensors"
            if len(file_specs) > 1
            else "model.safetensors"
        )

        with create_file(f"{EXPORT_FOLDER}/{file_name}") as file:
            file_tensors = (buffers[spec.name] if spec.name in buffers else next(tensors) for spec in specs)
            write_file(file, specs, map(tensor_as_bytes, file_tensors))

        weight_map |= {spec.name: file_name for spec in specs}

    if len(file_specs) > 1:
        metadata = {"total_size": sum(spec.nbytes for spec in layout)}
        with create_file(f"{EXPORT_FOLDER}/{INDEX_FILE}") as file:
            file.write(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1).encode())


def _write_other_files(create_file: CreateFile, policy: Policy, source: Path, template: str) -> None:
    config = copy.deepcopy(policy.lm.config)  # names the dtype of the master weights, so a copy is changed
    config.dtype = policy.export_dtype
    contents = {
        file.name: file.read_bytes()
        for file in sorted(source.iterdir())
        if file.is_file() and not file.name.endswith(WEIGHT_FILES)
    }
    contents["config.json"] = config.to_json_string().encode()
    if template:  # from_pretrained prefers this file to what tokenizer_config.json says
        contents["chat_template.jinja"] = template.encode()

    for name, content in contents.items():
        with create_file(f"{EXPORT_FOLDER}/{name}") as file:
            file.write(content)
