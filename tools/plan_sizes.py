"""What `asyncrl plan` predicts for the recipes of docs/guides/gpus.md, from assumptions: none has run on a
GPU.

    python tools/plan_sizes.py

Nothing here is measured. The assumptions are the constants below: what the GPU's data sheet says, what part
of it is used, and how long answers are. The prediction is the planner's, which plays them in its simulator.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
from accelerate import init_empty_weights
from size_model import COMMON, SIZES, qwen3
from transformers import Qwen3ForCausalLM

from asyncrl.algorithms.recipe import with_group_policy
from asyncrl.config import RunConfig
from asyncrl.config.composition import compose
from asyncrl.planning.forecast import Rates, predict, time_savings
from asyncrl.planning.simulator import Recorded, RecordedTurn

PAGE = Path(__file__).resolve().parents[1] / "docs/guides/gpus.md"
# an H100's: bfloat16 without sparsity; bytes/s of its memory
FLOPS = 989e12
BANDWIDTH = 3.35e12
# Used parts: of the FLOPs in training; of bandwidth and FLOPs in decoding.
TRAIN_USE = 0.35
DECODE_USE = 0.6
SHARED = 0.5  # part of a GPU's rates for each of trainer and server on the same GPU
PUSH = 2e9  # bytes/s from the trainer to the servers
COMMIT = 0.5  # seconds of a step beside the micro-batches
# tokens of a prompt; log-normal ones of an answer, cut at the limit
PROMPT = 150
MEDIAN = 600
SIGMA = 0.8
REWARD = 0.05  # seconds
GROUPS = 200
SEEDS = (0, 1, 2)


def parameters(name: str) -> int:
    with init_empty_weights():
        model = Qwen3ForCausalLM(qwen3(name))
    model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def answers(config: RunConfig) -> Recorded:
    """Draw groups of episodes of one turn."""
    members = config.buffer.episodes_per_group
    max_tokens = config.rollout.max_new_tokens
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, (GROUPS, members))
    return tuple(tuple((RecordedTurn(min(max_tokens, int(n)), REWARD),) for n in group) for group in drawn)


def assumed(config: RunConfig, name: str, gpus: int) -> Rates:
    """Return the assumed rates.

    A token of a batch reads the weights once for all, and its own KV cache; training computes 6 FLOPs a
    parameter and token, 8 where activations are recomputed.
    """
    count = parameters(name)
    layers = SIZES[name][2]
    tensor_parallel = config.engine.tp
    recorded = answers(config)
    lengths = [turn.tokens for group in recorded for (turn,) in group]
    tokens = float(np.mean(lengths)) + PROMPT
    kv_bytes = (
        2 * 2 * layers * COMMON["num_key_value_heads"] * COMMON["head_dim"] * (PROMPT + np.mean(lengths) / 2)
    )
    share = SHARED if gpus < config.engine.servers * tensor_parallel + config.trainer.ranks else 1.0
    memory = share * DECODE_USE * tensor_parallel * BANDWIDTH
    decode = share * DECODE_USE * tensor_parallel * FLOPS
    passes = 8 if config.trainer.activation_checkpointing == "full" else 6
    return Rates(
        recorded=recorded,
        base=2 * count / memory,
        slope=float(kv_bytes) / memory + 2 * count / decode,
        assumed=False,
        episode_s=passes * count * tokens / (share * TRAIN_USE * FLOPS),
        commit_s=COMMIT,
        publish_s=2 * count / PUSH,
        group_tokens=tokens * config.buffer.episodes_per_group,
        filtered=0.0,
    )


def main() -> None:
    print("| recipe | s/step | lag | trainer idle | rollout idle | tokens/s sampled | bottleneck |")
    print("|---|---|---|---|---|---|---|")

    for size, gpus, command in re.findall(
        r"^## (\S+) on (\d+) GPUs?$.*?^asyncrl train (.*?)^```$", PAGE.read_text(), re.M | re.S
    ):
        config = with_group_policy(compose(shlex.split(command.replace("\\\n", " "))))
        rates = assumed(config, f"Qwen3-{size}", int(gpus))
        forecast = predict(config, rates, seeds=SEEDS)
        saved = time_savings(config, rates, SEEDS)
        limit, saved_fraction = max(saved.items(), key=lambda item: item[1])

        cells = [
            f"{size} on {gpus}",
            f"{forecast.step_s:.1f}",
            f"{forecast.lag:.2f}",
            f"{forecast.trainer_idle:.0%}",
            f"{forecast.rollout_idle:.0%}",
            f"{forecast.tokens_per_s:.0f}",
            f"{limit} ({saved_fraction:.0%})",
        ]

        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
