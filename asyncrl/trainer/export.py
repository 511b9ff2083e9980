"""The policy as a Hugging Face directory: weights, config, tokenizer."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from asyncrl.trainer.model import Policy, shards, whole_tensors
from asyncrl.weights import tensorfile
from asyncrl.weights.manifest import Layout
from asyncrl.weights.shards import layout_of
from asyncrl.weights.snapshot import as_bytes

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def export_hf(directory: Path, policy: Policy, source: str, template: str = "") -> None:
    """Write what `from_pretrained` reads, in the configured dtype, adapters merged, no value head. A
    collective; rank 0 writes.

    Everything but the weights (tokenizer, chat template, generation settings) is that of `source`; the chat
    template is `template`, if there is one.
    """
    layout = layout_of(shards(policy), policy.export_dtype)
    tensors = whole_tensors(policy)
    try:
        if dist.get_rank() == 0:
            _write(directory, policy, source, layout, tensors)
            if template:  # from_pretrained prefers this file to what tokenizer_config.json says
                (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    finally:
        for _ in tensors:  # every rank takes part in the gathering to its end, also when a write has failed
            pass


def _write(
    directory: Path,
    policy: Policy,
    source: str,
    layout: Layout,
    tensors: Iterator[tuple[str, Tensor]],
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, directory / file.name)
    chunks = ((spec, as_bytes(tensor)) for spec, (_, tensor) in zip(layout, tensors, strict=True))
    tensorfile.write(directory / "model.safetensors", layout, chunks)
    config = copy.deepcopy(policy.lm.config)  # it names the dtype of the master weights
    config.dtype = policy.export_dtype
    config.save_pretrained(directory)
