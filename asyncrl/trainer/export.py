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
from asyncrl.weights.manifest import split
from asyncrl.weights.model_files import INDEX
from asyncrl.weights.ranges import write_file
from asyncrl.weights.shards import layout_of
from asyncrl.weights.snapshot import as_bytes

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
FILE_BYTES = 5_000_000_000
FOLDER = "hf"

Create = Callable[[str], Any]  # a new file of that name, to be written


def export_hf(
    create: Create, policy: Policy, weights: Mapping[str, Any], world: World, source: str, template: str = ""
) -> None:
    """Write what `from_pretrained` reads, in the configured dtype, buffers as they are, adapters merged, no
    value head. A collective of `world`; rank 0 writes, and holds one whole tensor at a time.

    `weights`: the model's, and its buffers, on the CPU, by name. Everything else (tokenizer, chat template,
    generation settings) is that of `source`; the chat template is `template`, if there is one.
    """
    tensors = _published(policy, weights, world)
    try:
        if world.rank == 0:
            _write_weights(create, policy, tensors, copied_buffers(policy, weights))
            _write_rest(create, policy, Path(source), template)
    finally:
        for _ in tensors:  # every rank takes part in the gathering to its end, also when a write has failed
            pass


def _published(policy: Policy, weights: Mapping[str, Any], world: World) -> Iterator[Tensor]:
    """The weights as they are published, one piece after another, whole on rank 0."""
    for name, own in groupby(policy.published, key=attrgetter("parameter")):
        tensor = world.collect(weights[name])
        names = policy.adapters.names(name) if policy.adapters is not None else None
        if policy.adapters is not None and names is not None:
            a, b = (world.collect(weights[adapter]) for adapter in names)
            if world.rank == 0:
                tensor = tensor + policy.adapters.change(name, a, b)
        flat = tensor.to(policy.export_dtype).flatten()
        yield from (flat[piece.offset : piece.offset + piece.numel] for piece in own)


def _write_weights(
    create: Create, policy: Policy, tensors: Iterator[Tensor], kept: Mapping[str, Tensor]
) -> None:
    layout = layout_of(policy.published, policy.export_dtype, kept)
    parts = [layout[part] for part in split(layout, FILE_BYTES)]
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else "model.safetensors"
        with create(f"{FOLDER}/{name}") as file:
            whole = (kept[spec.name] if spec.name in kept else next(tensors) for spec in part)
            write_file(file, part, map(as_bytes, whole))
        where |= {spec.name: name for spec in part}
    if len(parts) > 1:
        total = {"total_size": sum(spec.nbytes for spec in layout)}
        with create(f"{FOLDER}/{INDEX}") as file:
            file.write(json.dumps({"metadata": total, "weight_map": where}, indent=1).encode())


def _write_rest(create: Create, policy: Policy, source: Path, template: str) -> None:
    config = copy.deepcopy(policy.lm.config)  # it names the dtype of the master weights
    config.dtype = policy.export_dtype
    found = {
        file.name: file.read_bytes()
        for file in sorted(source.iterdir())
        if file.is_file() and not file.name.endswith(WEIGHT_FILES)
    }
    found["config.json"] = config.to_json_string().encode()
    if template:  # from_pretrained prefers this file to what tokenizer_config.json says
        found["chat_template.jinja"] = template.encode()
    for name, content in found.items():
        with create(f"{FOLDER}/{name}") as file:
            file.write(content)
