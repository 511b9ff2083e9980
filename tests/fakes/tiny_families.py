"""Tiny random checkpoints of today's model families, with the demo's tokenizer.

Layer layouts are the first layers of a published model of each family, not transformers' default
configurations, which often lack layers that published models have. Files have the tensor names of the hub,
which can differ from those of a transformers class. Weights are random and in float32.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

Sizes = dict[str, Any]
Tensors = dict[str, Tensor]

DEMO_MODEL = Path(__file__).parents[2] / "examples/multiturn/calculator/model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

# The demo's 515 tokens, room for a composite model's own special tokens, rounded up to a multiple of 64.
VOCABULARY_SIZE = 576
IMAGE_TOKENS = {
    "<|image_pad|>": VOCABULARY_SIZE - 8,
    "<|video_pad|>": VOCABULARY_SIZE - 7,
    "<|vision_start|>": VOCABULARY_SIZE - 6,
    "<|vision_end|>": VOCABULARY_SIZE - 5,
}
IMAGE_TOKEN = IMAGE_TOKENS["<|image_pad|>"]

# Prefixes of tensors outside the text part, as files and transformers classes name them.
VISION_PREFIXES = ("model.visual.", "vision_tower.", "multi_modal_projector.", "mm_projector.")
VISION_PREFIXES += ("model.vision_tower.", "model.embed_vision.", "vision_model.")

TEXT: Sizes = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
}
MINISTRAL3_TEXT: Sizes = TEXT | {"max_position_embeddings": 262144, "tie_word_embeddings": False}
DEFAULT_ROPE: Sizes = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Family:
    """A tiny configuration of a family, and how its published files differ from transformers' own."""

    published: str  # the published model that has this layer layout
    model_type: str
    text: Sizes
    parts: Sizes | None = None  # of a composite configuration: all but the text configuration
    preprocessor: Sizes | None = None  # preprocessor_config.json of a composite model
    rename: Callable[[Tensors], Tensors] | None = None  # from the names that transformers saves to the hub's
    mtp: str = (
        ""  # where the hub's files hold an MTP layer: `head` (mtp.*), `layer` (after the last one) or nowhere
    )

    @property
    def composite(self) -> bool:
        return self.parts is not None

    def configuration(self, *, mtp: bool = False) -> PreTrainedConfig:
        text = dict(self.text)
        if mtp and self.mtp == "layer":
            text["num_nextn_predict_layers"] = 1
        elif mtp and self.composite:
            text["mtp_num_hidden_layers"] = 1

        if self.parts is None:
            return AutoConfig.for_model(self.model_type, **text)
        return AutoConfig.for_model(self.model_type, text_config=text, **self.parts)


# ------------------------------------------------------------------- sizes


def without_head_dim(**sizes: Any) -> Sizes:
    """Return the text part of a family that has no `head_dim`, as heads share out the hidden size."""
    text = TEXT | sizes
    del text["head_dim"]
    return text


def gated_delta_text(**sizes: Any) -> Sizes:
    """Return the text part of Qwen3-Next and later: three layers of gated delta rule to one of attention."""
    return TEXT | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        # SGLang reads this key, transformers the one in `rope_parameters`.
        "partial_rotary_factor": 0.5,
        **sizes,
    }


def gemma_text(**sizes: Any) -> Sizes:
    """Return the text part of Gemma 3 and 4: five layers of sliding attention to one of full attention."""
    return TEXT | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 32,
        "bos_token_id": 2,
        "tie_word_embeddings": True,
        **sizes,
    }


def latent_attention_text(**sizes: Any) -> Sizes:
    """Return the text part of DeepSeek-V3 and Kimi K2: latent attention, a dense layer, then experts."""
    latent_text = TEXT | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "rope_parameters": DEFAULT_ROPE,
        "tie_word_embeddings": False,
        **sizes,
    }
    del latent_text["head_dim"]
    return latent_text


def llama4_text(**sizes: Any) -> Sizes:
    """Return the text part of Llama 4: three layers of chunked attention to one without rope.

    Positions from `floor_scale` on have scaled queries in the layers without rope.
    """
    return TEXT | {
        "num_hidden_layers": 4,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 32,
        "attn_temperature_tuning": True,
        "floor_scale": 16,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "rope_parameters": DEFAULT_ROPE,
        "tie_word_embeddings": False,
        **sizes,
    }


QWEN_EXPERTS: Sizes = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GATED_DELTA_ROPE = DEFAULT_ROPE | {"partial_rotary_factor": 0.5}
QWEN3_5_ROPE = GATED_DELTA_ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
QWEN3_VL_ROPE = DEFAULT_ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN2_VL_ROPE = DEFAULT_ROPE | {"mrope_section": [2, 3, 3]}
GLM4V_ROPE = DEFAULT_ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}

QWEN_VISION: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
QWEN3_5_VISION = QWEN_VISION | {"deepstack_visual_indexes": []}  # for SGLang, which has another default
QWEN_TOKENS: Sizes = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": IMAGE_TOKENS["<|video_pad|>"],
    "vision_start_token_id": IMAGE_TOKENS["<|vision_start|>"],
    "vision_end_token_id": IMAGE_TOKENS["<|vision_end|>"],
}
GLM4V_TOKENS: Sizes = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": IMAGE_TOKENS["<|video_pad|>"],
    "image_start_token_id": IMAGE_TOKENS["<|vision_start|>"],
    "image_end_token_id": IMAGE_TOKENS["<|vision_end|>"],
    "video_start_token_id": IMAGE_TOKENS["<|vision_start|>"],
    "video_end_token_id": IMAGE_TOKENS["<|vision_end|>"],
}
VISION_LAYER: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

NORMALIZED: Sizes = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
QWEN_PREPROCESSOR = NORMALIZED | {
    "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "do_convert_rgb": True,
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
}
QWEN2_VL_PREPROCESSOR = NORMALIZED | {
    "size": {"shortest_edge": 28 * 28, "longest_edge": 256 * 256},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "do_convert_rgb": True,
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
GLM4V_PREPROCESSOR = NORMALIZED | {
    "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 256 * 256},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "do_convert_rgb": True,
    "image_processor_type": "Glm4vImageProcessor",
    "processor_class": "Glm4vProcessor",
}
GEMMA3_PREPROCESSOR = NORMALIZED | {
    "size": {"height": 28, "width": 28},
    "image_seq_length": 4,
    "image_processor_type": "Gemma3ImageProcessor",
    "processor_class": "Gemma3Processor",
}
MISTRAL3_PREPROCESSOR = NORMALIZED | {
    "size": {"longest_edge": 28},
    "patch_size": 14,
    "image_processor_type": "PixtralImageProcessor",
    "processor_class": "PixtralProcessor",
}


# ------------------------------------------------------------------- names of the hub


def hub_gemma3(tensors: Tensors) -> Tensors:
    """Return Gemma 3's tensors under the hub's names, which keep SigLIP's own prefix in the vision tower."""
    hub_prefix = "vision_tower.vision_model."
    return {re.sub(r"^vision_tower\.", hub_prefix, name): tensor for name, tensor in tensors.items()}


def hub_kimi_k25(tensors: Tensors) -> Tensors:
    """Return Kimi K2.5's tensors under the hub's names, which transformers' renames cannot restore."""
    hub_prefixes = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
    renamed = {}
    for name, tensor in tensors.items():
        for saved_prefix, hub_prefix in hub_prefixes.items():
            if name.startswith(saved_prefix):
                name = hub_prefix + name.removeprefix(saved_prefix)
        renamed[name] = tensor
    return renamed


def hub_kimi_linear(tensors: Tensors) -> Tensors:
    """Return Kimi Linear's tensors under the hub's names: `mlp` where a layer has no experts."""
    dense_layer = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.")
    return {dense_layer.sub(r".mlp.\1_proj.", name): tensor for name, tensor in tensors.items()}


def hub_fused_experts(tensors: Tensors) -> Tensors:
    """Return the tensors with a layer's experts in two tensors, as the files of Qwen3.5's MoE hold them."""
    fused = dict(tensors)
    for name in tensors:
        match = re.fullmatch(r"(.*\.mlp\.experts)\.0\.down_proj\.weight", name)
        if match is None:
            continue

        prefix = match[1]
        count = sum(
            re.fullmatch(rf"{re.escape(prefix)}\.\d+\.down_proj\.weight", tensor_name) is not None
            for tensor_name in tensors
        )
        down_weights = [fused.pop(f"{prefix}.{expert}.down_proj.weight") for expert in range(count)]
        gate_weights = [fused.pop(f"{prefix}.{expert}.gate_proj.weight") for expert in range(count)]
        up_weights = [fused.pop(f"{prefix}.{expert}.up_proj.weight") for expert in range(count)]
        gate_up_weights = [torch.cat(pair) for pair in zip(gate_weights, up_weights, strict=True)]
        fused[f"{prefix}.down_proj"] = torch.stack(down_weights)
        fused[f"{prefix}.gate_up_proj"] = torch.stack(gate_up_weights)

    return fused


# ------------------------------------------------------------------- families

FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3-0.6B", "qwen3", TEXT | {"tie_word_embeddings": True}),
    "qwen3_next": Family(
        "Qwen3-Next-80B-A3B",
        "qwen3_next",
        gated_delta_text(
            **QWEN_EXPERTS,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            rope_parameters=GATED_DELTA_ROPE,
            tie_word_embeddings=False,
        ),
        mtp="head",
    ),
    "qwen3_5": Family(
        "Qwen3.5-4B",
        "qwen3_5",
        gated_delta_text(rope_parameters=QWEN3_5_ROPE, tie_word_embeddings=True),
        parts={"vision_config": QWEN3_5_VISION, "tie_word_embeddings": True, **QWEN_TOKENS},
        preprocessor=QWEN_PREPROCESSOR,
        mtp="head",
    ),
    "qwen3_5_moe": Family(
        "Qwen3.5-35B-A3B",
        "qwen3_5_moe",
        gated_delta_text(**QWEN_EXPERTS, rope_parameters=QWEN3_5_ROPE, tie_word_embeddings=False),
        parts={"vision_config": QWEN3_5_VISION, "tie_word_embeddings": False, **QWEN_TOKENS},
        preprocessor=QWEN_PREPROCESSOR,
        rename=hub_fused_experts,
        mtp="head",
    ),
    "gemma3_text": Family("gemma-3-1b-it", "gemma3_text", gemma_text(query_pre_attn_scalar=16)),
    "gemma3": Family(
        "gemma-3-4b-it",
        "gemma3",
        gemma_text(query_pre_attn_scalar=16),
        parts={
            "vision_config": VISION_LAYER | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": IMAGE_TOKENS["<|vision_start|>"],
            "eoi_token_index": IMAGE_TOKENS["<|vision_end|>"],
            "tie_word_embeddings": True,
        },
        preprocessor=GEMMA3_PREPROCESSOR,
        rename=hub_gemma3,
    ),
    "gemma4_text": Family(
        "gemma-4-31B-it, text part",
        "gemma4_text",
        gemma_text(global_head_dim=32, hidden_size_per_layer_input=0, num_kv_shared_layers=0),
    ),
    "gemma4": Family(
        "gemma-4-31B-it",
        "gemma4",
        gemma_text(global_head_dim=32, hidden_size_per_layer_input=0, num_kv_shared_layers=0),
        parts={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 64,
            },
            "audio_config": None,
            "image_token_id": IMAGE_TOKEN,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": Family(
        "gpt-oss-20b, without its quantization",
        "gpt_oss",
        TEXT
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": Family(
        "Devstral-2-123B, in bfloat16",
        "ministral3",
        MINISTRAL3_TEXT,
    ),
    "mistral3": Family(
        "Ministral-3-8B, Devstral-Small-2, in bfloat16",
        "mistral3",
        MINISTRAL3_TEXT | {"model_type": "ministral3"},
        parts={
            "vision_config": VISION_LAYER | {"model_type": "pixtral", "head_dim": 16},
            "image_token_index": IMAGE_TOKEN,
            "tie_word_embeddings": False,
        },
        preprocessor=MISTRAL3_PREPROCESSOR,
    ),
    "qwen3_vl": Family(
        "Qwen3-VL-4B",
        "qwen3_vl",
        TEXT | {"rope_parameters": QWEN3_VL_ROPE, "tie_word_embeddings": True},
        parts={
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
            "tie_word_embeddings": True,
            **QWEN_TOKENS,
        },
        preprocessor=QWEN_PREPROCESSOR,
    ),
    "glm4v": Family(
        "GLM-4.6V-Flash",
        "glm4v",
        TEXT | {"rope_parameters": GLM4V_ROPE, "tie_word_embeddings": False},
        parts={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 64,
                "image_size": 28,
                "patch_size": 14,
            },
            "tie_word_embeddings": False,
            **GLM4V_TOKENS,
        },
        preprocessor=GLM4V_PREPROCESSOR,
    ),
    "kimi_k25": Family(
        "Kimi-K2.5, without its quantization",
        "kimi_k25",
        latent_attention_text(model_type="deepseek_v3"),
        parts={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
            **QWEN_TOKENS,
        },
        rename=hub_kimi_k25,
    ),
    "kimi_linear": Family(
        "Kimi-Linear-48B-A3B",
        "kimi_linear",
        {
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 2,
        },
        rename=hub_kimi_linear,
    ),
    "glm4_moe": Family(
        "GLM-4.5",
        "glm4_moe",
        TEXT
        | {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": GATED_DELTA_ROPE,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
        },
        mtp="layer",
    ),
    "deepseek_v3": Family("DeepSeek-V3, in bfloat16", "deepseek_v3", latent_attention_text(), mtp="layer"),
    "minimax_m2": Family(
        "MiniMax-M2, in bfloat16",
        "minimax_m2",
        TEXT
        | {
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": GATED_DELTA_ROPE,
            "tie_word_embeddings": False,
        },
    ),
    "seed_oss": Family(
        "Seed-OSS-36B", "seed_oss", TEXT | {"attention_bias": True, "tie_word_embeddings": False}
    ),
    "smollm3": Family(
        "SmolLM3-3B",
        "smollm3",
        TEXT | {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True},
    ),
    "olmo3": Family(
        "Olmo-3-7B",
        "olmo3",
        TEXT
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": 32,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": Family(
        "LFM2-1.2B",
        "lfm2",
        TEXT
        | {
            "num_hidden_layers": 6,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid": Family(
        "granite-4.0-h-tiny",
        "granitemoehybrid",
        TEXT
        | {
            "num_hidden_layers": 6,
            "layer_types": ["mamba"] * 5 + ["attention"],
            "position_embedding_type": "nope",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": Family(
        "NVIDIA-Nemotron-Nano-9B-v2",
        "nemotron_h",
        TEXT
        | {
            "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        TEXT
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_unified_text": Family(
        "gemma-4-12B-it, text part",
        "gemma4_unified_text",
        gemma_text(global_head_dim=32, num_kv_shared_layers=0),
    ),
    "mimo_v2_flash": Family(
        "MiMo-V2-Flash, in bfloat16",
        "mimo_v2_flash",
        TEXT
        | {
            "num_hidden_layers": 6,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 4 + ["full_attention"],
            "mlp_layer_types": ["dense"] + ["sparse"] * 5,
            "sliding_window": 32,
            # Layers with a window have twice as many key-value heads as the others.
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "rope_parameters": {
                "full_attention": DEFAULT_ROPE | {"partial_rotary_factor": 0.334},
                "sliding_attention": DEFAULT_ROPE | {"partial_rotary_factor": 0.334},
            },
            "tie_word_embeddings": False,
        },
    ),
    "llama4_text": Family("Llama-4-Scout-17B-16E-Instruct, text part", "llama4_text", llama4_text()),
    "llama4": Family(
        "Llama-4-Scout-17B-16E-Instruct",
        "llama4",
        llama4_text(),
        parts={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "rope_parameters": DEFAULT_ROPE,
            },
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": IMAGE_TOKENS["<|vision_start|>"],
            "eoi_token_index": IMAGE_TOKENS["<|vision_end|>"],
            "tie_word_embeddings": False,
        },
    ),
    "cohere2": Family(
        "c4ai-command-r7b-12-2024",
        "cohere2",
        without_head_dim(
            num_hidden_layers=4,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            sliding_window=32,
            logit_scale=0.25,
            rope_parameters=DEFAULT_ROPE,
            tie_word_embeddings=True,
        ),
    ),
    "glm4_moe_lite": Family("GLM-4.7-Flash", "glm4_moe_lite", latent_attention_text(), mtp="layer"),
    "glm_moe_dsa": Family(
        "GLM-5, in bfloat16",
        "glm_moe_dsa",
        latent_attention_text(
            num_hidden_layers=4,
            first_k_dense_replace=3,
            mlp_layer_types=["dense"] * 3 + ["sparse"],
            n_group=1,
            index_topk=16,
            index_head_dim=32,
            index_n_heads=8,  # scores of fewer heads are often equal
        ),
        mtp="layer",
    ),
    "deepseek_v4": Family(
        "DeepSeek-V4-Flash, in bfloat16",
        "deepseek_v4",
        TEXT
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 2
            + ["compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["hash_moe"] * 3 + ["moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "hc_mult": 2,
            "sliding_window": 32,
            "index_n_heads": 8,
            "index_head_dim": 16,
            "index_topk": 4,
            "tie_word_embeddings": False,
        },
    ),
    "olmo_hybrid": Family(
        "Olmo-Hybrid-7B",
        "olmo_hybrid",
        without_head_dim(
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            num_key_value_heads=4,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            linear_value_head_dim=24,
            linear_conv_kernel_dim=4,
            linear_allow_neg_eigval=True,
            rope_parameters=None,
            tie_word_embeddings=False,
        ),
    ),
    "lfm2_moe": Family(
        "LFM2-8B-A1B",
        "lfm2_moe",
        without_head_dim(
            num_hidden_layers=4,
            layer_types=["conv", "conv", "full_attention", "conv"],
            conv_L_cache=3,
            num_dense_layers=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            rope_parameters=DEFAULT_ROPE,
            tie_word_embeddings=True,
        ),
    ),
    "falcon_h1": Family(
        "Falcon-H1-0.5B-Instruct",
        "falcon_h1",
        TEXT
        | {
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            "mamba_rms_norm": False,
            "rope_parameters": DEFAULT_ROPE,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4_5": Family("ERNIE-4.5-0.3B-PT", "ernie4_5", TEXT | {"tie_word_embeddings": True}),
    "phi3": Family(
        "phi-4",
        "phi3",
        without_head_dim(sliding_window=None, rope_parameters=DEFAULT_ROPE, tie_word_embeddings=False),
    ),
}

# Families that the table of docs/dev/model_matrix.md leaves out: tests of images alone build them.
EARLIER_VISION_FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(
        "Qwen2-VL-2B",
        "qwen2_vl",
        without_head_dim(rope_parameters=QWEN2_VL_ROPE, tie_word_embeddings=True),
        parts={
            "vision_config": {
                "embed_dim": 32,
                "hidden_size": 64,
                "depth": 1,
                "num_heads": 2,
                "in_chans": 3,  # published files have the name that SGLang reads
            },
            "tie_word_embeddings": True,
            **QWEN_TOKENS,
        },
        preprocessor=QWEN2_VL_PREPROCESSOR,
    ),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL-3B",
        "qwen2_5_vl",
        without_head_dim(rope_parameters=QWEN2_VL_ROPE, tie_word_embeddings=True),
        parts={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "depth": 2,
                "num_heads": 2,
                "out_hidden_size": 64,
                # Windows of 2 x 2 merged patches, in the first layer alone.
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            "tie_word_embeddings": True,
            **QWEN_TOKENS,
        },
        preprocessor=QWEN2_VL_PREPROCESSOR,
    ),
}


# ------------------------------------------------------------------- files


def build_family(
    name: str,
    directory: Path,
    *,
    seed: int = 0,
    mtp: bool = False,
    shards: int = 1,
    text: Sizes | None = None,
    parts: Sizes | None = None,
) -> Path:
    """Write a tiny random checkpoint of family `name` into `directory`, and return the directory.

    `text` and `parts` replace values of the configuration of the text part and of the composite model.
    `mtp` adds the tensors of a multi-token-prediction layer, as the hub's files of the family have them. With
    `shards=2` the tensors are in two files with an index. The first file of a composite model then holds
    vision tensors alone, the second one tensors of both parts.
    """
    family = (FAMILIES | EARLIER_VISION_FAMILIES)[name]
    family = replace(family, text=family.text | (text or {}))
    if parts and family.parts is not None:
        family = replace(family, parts=family.parts | parts)
    if mtp and not family.mtp:
        raise ValueError(f"{name}: published files of this family hold no MTP layer")

    configuration = family.configuration(mtp=mtp)
    random_model(family, configuration, seed=seed).save_pretrained(directory)
    write_tokenizer(family, directory)

    weights_file = directory / "model.safetensors"
    saved_tensors = load_file(weights_file)
    tensors = saved_tensors if family.rename is None else family.rename(saved_tensors)
    if mtp:
        # Experts of an MTP layer are one tensor each, even where other layers' experts are fused.
        layers = configuration.get_text_config().num_hidden_layers
        tensors |= mtp_tensors(saved_tensors, style=family.mtp, layers=layers, seed=seed)

    if shards == 1:
        save_file(tensors, weights_file, metadata={"format": "pt"})
    else:
        weights_file.unlink()
        write_two_files(tensors, directory, composite=family.composite)
    return directory


def random_model(family: Family, configuration: PreTrainedConfig, *, seed: int) -> PreTrainedModel:
    """Return a random model whose logits are far from uniform."""
    torch.manual_seed(seed)
    auto_class = AutoModelForImageTextToText if family.composite else AutoModelForCausalLM
    model = auto_class.from_config(configuration, dtype=torch.float32)

    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in parameter_name:
                parameter.mul_(4.0)
    return model  # type: ignore[no-any-return]


def write_tokenizer(family: Family, directory: Path) -> None:
    """Write the demo's tokenizer. A composite model's has image tokens with the ids of its configuration."""
    for file_name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / file_name, directory)
    if not family.composite:
        return

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    unused_ids = range(len(tokenizer), IMAGE_TOKEN)
    tokenizer.add_tokens([f"<|reserved_{token_id}|>" for token_id in unused_ids], special_tokens=True)
    tokenizer.add_tokens(list(IMAGE_TOKENS), special_tokens=True)
    tokenizer.save_pretrained(directory)

    if family.preprocessor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
        if family.preprocessor is QWEN_PREPROCESSOR:
            video = family.preprocessor | {"video_processor_type": "Qwen3VLVideoProcessor"}
            (directory / "video_preprocessor_config.json").write_text(json.dumps(video))


def mtp_tensors(tensors: Tensors, *, style: str, layers: int, seed: int) -> Tensors:
    """Return the tensors of an MTP layer: a copy of the last layer in shape, and what joins two streams."""
    generator = torch.Generator().manual_seed(seed)
    random_weights = partial(torch.randn, generator=generator)
    last_layer = re.compile(rf"model\.(?:language_model\.)?layers\.{layers - 1}\.")
    layer_prefix = "mtp.layers.0." if style == "head" else f"model.layers.{layers}."

    added = {}
    for name, tensor in tensors.items():
        match = last_layer.match(name)
        if match is not None:
            added[layer_prefix + name[match.end() :]] = random_weights(tensor.shape) / 10

    hidden_size = TEXT["hidden_size"]
    joining = random_weights(hidden_size, 2 * hidden_size) / 10
    if style == "head":
        added["mtp.fc.weight"] = joining
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            added[f"mtp.{norm}.weight"] = torch.ones(hidden_size)
    else:
        added[f"{layer_prefix}eh_proj.weight"] = joining
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            added[f"{layer_prefix}{norm}.weight"] = torch.ones(hidden_size)
        for shared in ("embed_tokens", "shared_head.head"):
            added[f"{layer_prefix}{shared}.weight"] = random_weights(VOCABULARY_SIZE, hidden_size) / 10
    return added


def write_two_files(tensors: Tensors, directory: Path, *, composite: bool) -> None:
    names = sorted(tensors)
    if composite:
        vision_names = [name for name in names if name.startswith(VISION_PREFIXES)]
        first_names = set(vision_names[: len(vision_names) // 2])
    else:
        first_names = set(names[: len(names) // 2])

    weight_map = {}
    for number, in_first in ((1, True), (2, False)):
        file_name = f"model-{number:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in names if (name in first_names) == in_first}
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)

    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
