"""Prints what `trainer.activation_checkpointing=auto` chooses for sizes of Qwen3 on GPUs of 80 GiB.

    python tools/recomputation_sizes.py

A micro-batch is one packed row of the given length. The model directories have no weights; nothing runs on a
GPU: this is the choice of a rank at its start, which is made by the estimate of memory.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from size_model import SIZES, write

from asyncrl.config import RunConfig, parse
from asyncrl.trainer.footprint import USABLE_FRACTION, footprint, least_recomputation, with_recomputation

MEMORY = 80 * 2**30  # bytes of each GPU
LENGTHS = (4096, 16_384, 32_768, 65_536)
LORA_RANK = 32
RANKS = {"Qwen3-14B": (1, 16), "Qwen3-32B": (8, 32)}  # trainer ranks with LoRA, and without; else (1, 8)


def settings(model: Path, length: int, lora_rank: int, ranks: int) -> RunConfig:
    """Return the settings of a run whose servers have GPUs of their own."""
    return parse(
        {
            "name": "sizes",
            "model": {"path": str(model), "dtype": "bfloat16", "lora_rank": lora_rank},
            "data": {"train": "none"},
            "engine": {"name": "sglang"},
            "rollout": {"max_tokens": length, "max_new_tokens": length // 2},
            "trainer": {"ranks": ranks, "micro_batch_tokens": length, "packing": "packed"},
        }
    )


def choice(config: RunConfig) -> str:
    """Return the chosen level with the estimate of a rank's memory."""
    every = least_recomputation(config, MEMORY, gpu=0, gpus=config.trainer.ranks + 1)
    needed_bytes = footprint(with_recomputation(config, every)).total
    level = {0: "none", 1: "full"}.get(every, str(every))
    verdict = level if needed_bytes <= USABLE_FRACTION * MEMORY else "too large"
    return f"{verdict} ({needed_bytes / 2**30:.0f} GiB)"


def main() -> None:
    print("| model | trained | GPUs | " + " | ".join(f"{length // 1024}k" for length in LENGTHS) + " |")
    print("|---|---|---|" + "---|" * len(LENGTHS))

    with tempfile.TemporaryDirectory() as folder:
        for name in SIZES:
            model = Path(folder, name)
            write(name, model)
            for lora_rank, ranks in zip((LORA_RANK, 0), RANKS.get(name, (1, 8)), strict=True):
                choices = [choice(settings(model, length, lora_rank, ranks)) for length in LENGTHS]
                trained = f"LoRA r={lora_rank}" if lora_rank else "all weights"
                print(f"| {name} | {trained} | {ranks} | " + " | ".join(choices) + " |", flush=True)


if __name__ == "__main__":
    main()
