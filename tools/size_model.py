"""A model directory of the size of a Qwen3, without its weights, for `asyncrl train … --dry-run`.

    python tools/size_model.py Qwen3-8B --out /tmp/sizes/Qwen3-8B

The sizes are those of the published config.json files. model.safetensors has the right header and length, and
nothing but a hole after it, which takes no disk: do not train it. Tokenizer and chat template are the demo's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.weights.manifest import TensorSpec
from asyncrl.weights.ranges import file_header

DEMO = Path(__file__).resolve().parents[1] / "examples/multiturn/calculator/model"
COMMON = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
# hidden size, that of feed-forward layers, layers, attention heads, whether input and output share a table
SIZES = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12_288, 36, 32, False),
    "Qwen3-14B": (5120, 17_408, 40, 40, False),
    "Qwen3-32B": (5120, 25_600, 64, 64, False),
}


def qwen3(name: str) -> Qwen3Config:
    hidden, feed_forward, layers, heads, tied = SIZES[name]
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
        architectures=["Qwen3ForCausalLM"],
        **COMMON,
    )


def write(name: str, directory: Path) -> int:
    """Write the directory, which must not exist; returns the number of parameters."""
    config = qwen3(name)
    with init_empty_weights():
        model = Qwen3ForCausalLM(config)
    model.tie_weights()  # emptying parameters one by one separates shared ones
    layout = tuple(TensorSpec(name, tuple(p.shape), "bfloat16") for name, p in model.named_parameters())

    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    for file in DEMO.glob("tokenizer*.json"):
        shutil.copy(file, directory)

    with (directory / "model.safetensors").open("wb") as weights:
        begin = weights.write(file_header(layout))
        weights.truncate(begin + sum(spec.nbytes for spec in layout))

    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SIZES)
    parser.add_argument("--out", type=Path, required=True, help="a directory that does not exist yet")
    args = parser.parse_args()

    if args.out.exists():
        parser.error(f"{args.out} exists; name another directory, or remove it")
    print(f"{args.out}: {args.name}, {write(args.name, args.out) / 1e9:.2f} B parameters, no weights")


if __name__ == "__main__":
    main()
