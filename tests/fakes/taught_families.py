"""Tiny checkpoints of today's families that nearly know the calculator: the demo's weights in other layers.

The demo's model is a Llama. Its weights are the start of a family's text part: the same function where the
layers are Llama's (Ministral 3), and near enough to learn the rest from demonstrations in a few steps where
they are not (norms of queries and keys in Qwen3, norms after a layer in Gemma 3, random layers of gated delta
rules in front of the demo's in Qwen3.5).
"""

from __future__ import annotations

import json
import math
import operator
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncrl.data import load_samples
from asyncrl.tools import load_tool
from tests.fakes.tiny_families import (
    DEFAULT_ROPE,
    DEMO_MODEL,
    FAMILIES,
    QWEN3_5_ROPE,
    VISION_PREFIXES,
    Sizes,
    build_family,
)

CALCULATOR_ROWS = DEMO_MODEL.parent / "data/train.parquet"

# Sizes of the demo's Llama. Windows are shorter than the longest conversations.
DEMO_TEXT: Sizes = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
MINISTRAL3_TEXT: Sizes = DEMO_TEXT | {
    "rope_parameters": DEFAULT_ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}
}
GEMMA3_LAYERS: Sizes = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 64,
    "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": DEFAULT_ROPE},
}
# A layer of the gated delta rule before each of the demo's, whose heads are rotated as a whole.
QWEN3_5_LAYERS: Sizes = {
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "full_attention"] * 3,
    "full_attention_interval": 2,
    "partial_rotary_factor": 1.0,
    "rope_parameters": QWEN3_5_ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]},
}
TAUGHT_TEXT: dict[str, Sizes] = {
    "ministral3": MINISTRAL3_TEXT,
    "mistral3": MINISTRAL3_TEXT,
    "qwen3_vl": DEMO_TEXT,
    "gemma3": DEMO_TEXT | GEMMA3_LAYERS,
    "qwen3_5": DEMO_TEXT | QWEN3_5_LAYERS,
}
# Families whose norms multiply by one more than their weight.
NORMS_FROM_ONE = ("gemma3", "qwen3_5")

OPERATORS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
# Share of operations in place of which a demonstration guesses: what is left for reinforcement learning.
GUESSES = 0.3

TEXT_TENSOR = re.compile(r"(embed_tokens|norm|layers\.\d+\..+)\.weight$")
NORMS_OF_HEADS = {"q_norm": "q_proj", "k_norm": "k_proj"}
GEMMA_NORMS = {
    "post_attention_layernorm": "self_attn",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp",
}


def build_taught_family(name: str, directory: Path) -> Path:
    """Write a checkpoint of family `name` with the demo's weights in its text part; return the directory."""
    parts = {"tie_word_embeddings": True} if FAMILIES[name].composite else {}
    build_family(name, directory, text=TAUGHT_TEXT[name], parts=parts)
    demo = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    demo_sizes = output_sizes(demo)

    weights_file = directory / "model.safetensors"
    tensors = load_file(weights_file)
    for tensor_name, tensor in tensors.items():
        match = TEXT_TENSOR.search(tensor_name)
        if match is None or tensor_name.startswith(VISION_PREFIXES):
            continue
        teach = taught_qwen3_5_tensor if name == "qwen3_5" else partial(taught_tensor, name)
        tensors[tensor_name] = teach(match[1], tensor, demo, demo_sizes)

    save_file(tensors, weights_file, metadata={"format": "pt"})
    return directory


def taught_qwen3_5_tensor(
    module: str, tensor: Tensor, demo: PreTrainedModel, demo_sizes: dict[str, float]
) -> Tensor:
    """Return a tensor of Qwen3.5's text part: every second layer is one of the demo's, with half-open gates
    behind its attention. The other layers stay random."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if match is None:
        return taught_tensor("qwen3_5", module, tensor, demo, demo_sizes)

    demo_layer, is_demo_layer = divmod(int(match[1]), 2)
    part = match[2]
    if not is_demo_layer:
        return tensor

    weight = taught_tensor("qwen3_5", f"layers.{demo_layer}.{part}", tensor, demo, demo_sizes)
    if part == "self_attn.q_proj":
        queries = weight.unflatten(0, (demo.config.num_attention_heads, -1))
        half_open_gates = torch.zeros_like(queries)
        return torch.cat([queries, half_open_gates], dim=1).flatten(0, 1)
    return 2 * weight if part == "self_attn.o_proj" else weight


def taught_tensor(
    family: str, module: str, tensor: Tensor, demo: PreTrainedModel, demo_sizes: dict[str, float]
) -> Tensor:
    """Return a tensor of the text part that does what the demo's model does, or nearly."""
    layer, _, part = module.rpartition(".")
    demo_tensors = demo.model.state_dict()

    if part in NORMS_OF_HEADS:
        scale = demo_sizes[f"{layer}.{NORMS_OF_HEADS[part]}"]
        weight = torch.full_like(tensor, scale)
    elif family == "gemma3" and part in GEMMA_NORMS:
        demo_part = f"{layer}.{GEMMA_NORMS[part]}"
        if part == "pre_feedforward_layernorm":
            weight = demo_tensors[f"{demo_part}.weight"]
        else:
            # Gemma multiplies embeddings, so what is added to them has to be as much larger.
            weight = torch.full_like(tensor, demo_sizes[demo_part] * math.sqrt(demo.config.hidden_size))
    else:
        weight = demo_tensors[f"{module}.weight"]

    if module == "embed_tokens":
        # Tokens of pictures are as unlikely as a byte that the calculator never shows.
        unused = weight[demo.config.eos_token_id + 1]
        return torch.cat([weight, unused.expand(len(tensor) - len(weight), -1)])
    return weight - 1 if family in NORMS_FROM_ONE and "norm" in part else weight.clone()


@torch.no_grad()
def output_sizes(demo: PreTrainedModel) -> dict[str, float]:
    """Return the root mean square of what each part of each layer puts out, in conversations."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    squares: dict[str, list[float]] = defaultdict(list)

    def note(module_name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        squares[module_name].append(float(tensor.square().mean()))

    def hook_of(module_name: str) -> Any:
        return lambda _module, _inputs, output: note(module_name, output)

    handles = [
        module.register_forward_hook(hook_of(module_name))
        for module_name, module in demo.model.named_modules()
        if module_name.endswith(("q_proj", "k_proj", "self_attn", "mlp"))
    ]
    tools = [load_tool("calculator").schema]
    for messages in demonstrations(16):
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        demo(input_ids=torch.tensor([tokenizer.encode(text)]))

    for handle in handles:
        handle.remove()
    return {module_name: math.sqrt(sum(values) / len(values)) for module_name, values in squares.items()}


# ------------------------------------------------------------------- demonstrations


def write_demonstrations(file: Path, count: int) -> Path:
    """Write conversations about the calculator's first questions, for `asyncrl sft`; return the file."""
    rows = [json.dumps({"messages": messages}) for messages in demonstrations(count)]
    file.write_text("\n".join(rows))
    return file


def demonstrations(count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations that call the calculator for each operation of a question, until they guess."""
    generator = random.Random(0)
    for sample in load_samples(CALCULATOR_ROWS)[:count]:
        question = sample.prompt[0].content
        turns = demonstrated_turns(question, generator)
        yield [{"role": "user", "content": question}, *turns]


def demonstrated_turns(question: str, generator: random.Random) -> Iterator[dict[str, Any]]:
    start, *operations = question.removeprefix("Start with ").removesuffix(".").split(", ")
    value = int(start)

    for number, operation in enumerate(operations):
        if generator.random() < GUESSES:
            yield {"role": "assistant", "content": f"I guess {generator.randrange(1000)}."}
            return

        word, operand = operation.split()
        yield calculator_call(str(number), value, word, int(operand))
        value = OPERATORS[word](value, int(operand))
        yield {"role": "tool", "tool_call_id": str(number), "content": str(value)}

    yield {"role": "assistant", "content": f"The answer is {value}."}


def calculator_call(call_id: str, value: int, word: str, operand: int) -> dict[str, Any]:
    arguments = json.dumps({"a": value, "op": word, "b": operand})
    function = {"name": "calculator", "arguments": arguments}
    tool_call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [tool_call]}
