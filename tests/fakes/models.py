"""Small models of any family that transformers has, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
}


def small_model(family: str, **sizes: Any) -> PreTrainedModel:
    """Return a model of two layers whose logits are far from uniform.

    `family`: as in the names of its classes, e.g. Qwen2.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def save_small(path: Path, family: str, **sizes: Any) -> str:
    small_model(family, **sizes).save_pretrained(path)
    return str(path)


def save_llama(path: Path) -> str:
    """4 MB: two layers of 0.4 MB, an embedding and an output layer of 1.5 MB; in bfloat16, in three files."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 3000}
    model = small_model("Llama", **sizes, num_key_value_heads=2, tie_word_embeddings=False)
    model.bfloat16().save_pretrained(path, max_shard_size="800KB")
    assert len(list(path.glob("*.safetensors"))) > 2 and (path / "model.safetensors.index.json").exists()
    return str(path)
