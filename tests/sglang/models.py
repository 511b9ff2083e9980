"""Tiny random models of the families that the tests serve: a second each, the same on every machine.

python -m tests.sglang.models DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.fakes.chatml import save_tiny_chat_model

FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONTEXT = 1024  # tokens


def build(family: str, directory: Path, seed: int = 0, **changes: object) -> Path:
    """A model directory as a user has it: config, float32 safetensors, a tokenizer of single bytes with the
    two ChatML tokens, and its chat template."""
    save_tiny_chat_model(directory)  # its weights are replaced
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    random_model(family, len(tokenizer), seed, **changes).save_pretrained(directory)
    return directory


def random_model(family: str, vocabulary: int, seed: int, **changes: object) -> PreTrainedModel:
    """Two layers with grouped KV heads, whose distributions are far from uniform; never in training mode."""
    sizes: dict[str, object] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": vocabulary - 1,
        "pad_token_id": None,
    }
    name = FAMILIES[family]
    if name in ("Qwen3Moe", "Mixtral"):
        sizes |= EXPERTS
    config = getattr(transformers, f"{name}Config")(**sizes | changes)
    torch.manual_seed(seed)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


if __name__ == "__main__":
    for each in FAMILIES:
        print(build(each, Path(sys.argv[1]) / each))
