"""The adapters of a checkpoint in PEFT's format, for what applies them to the base model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.store.checkpoints import Checkpoints
from asyncrl.trainer.checkpoint import StepFiles, reader
from asyncrl.trainer.lora import A, B

MODEL = "model."  # what the policy's tensors are under in a checkpoint
ROLES = {A: "lora_A.weight", B: "lora_B.weight"}


def write_adapters(checkpoints: Checkpoints, step: int, model: ModelConfig, out: Path) -> None:
    """Write adapter_model.safetensors (float32) and adapter_config.json; nothing else is read. ConfigError
    where the run trained all weights."""
    source = reader(StepFiles(checkpoints, step))
    stored = {
        name.removeprefix(MODEL): known
        for name, known in source.read_metadata().state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(known, TensorStorageMetadata)
    }
    tensors = {
        name: torch.empty(known.size, dtype=known.properties.dtype)
        for name, known in stored.items()
        if name.endswith((f".{A}", f".{B}"))
    }
    if not tensors:
        raise ConfigError(f"{checkpoints.path(step)}: has no adapters, all weights were trained; merge it")
    with warnings.catch_warnings():  # that there are no other processes is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_shards({"model": tensors}, storage_reader=source, no_dist=True)
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    named = {_peft_name(name): tensor for name, tensor in tensors.items()}
    save_file(named, out / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.path,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layers,
        "fan_in_fan_out": any(_transposed(layer, stored) for layer in layers),
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2))


def _peft_name(name: str) -> str:
    layer, _, role = name.rpartition(".")
    return f"base_model.model.{layer}.{ROLES[role]}"


def _transposed(layer: str, stored: Mapping[str, TensorStorageMetadata]) -> bool:
    """True for weights of transformers' Conv1D, which keeps its weight as [in, out]; seen where the two
    differ."""
    weight, (_, inside), (outside, _) = (stored[f"{layer}.{name}"].size for name in ("weight", A, B))
    return tuple(weight) == (inside, outside) != (outside, inside)
