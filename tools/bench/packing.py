"""Rows of a micro-batch through the trainer's policy: padded, packed, as a tree, and by a plain torch loop.

    python tools/bench/packing.py [--model .models/smollm2-135m-instruct] [--dtype bfloat16] [--repeats 3]
    python tools/bench/packing.py --family qwen3_5 --dtype float32 --rows ragged like --tokens 1000

Forward and backward of the log-probs of all responses, CPU seconds, one thread. The ways alternate: each
repeat runs each way once, so whatever else keeps the machine busy slows all of them. Seconds are medians; a
ratio to another way is the median of the ratios within repeats, with the lowest and the highest one.

Rows: `ragged` lengths that share nothing (with 1000 tokens: 15,817 useful of 39,856 padded, the rows of the
GPU reports), `like` lengths within a tenth of the typical one, and `groups` of 8 with prompt and response in
some ratios. `--family`: a random model of 8 layers with the layer layout of a family. The plain loop is the
model of transformers as it is, a row at a time without padding. The limit is that of arithmetic: matrix
products of the layers over the tokens computed, and of the output layer over those scored.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from common import ROOT, table

from asyncrl.config import ModelConfig, Packing
from asyncrl.model_class import auto_class_of, read_config
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.packing import packing_for, padded_meanwhile
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from tests.fakes.tiny_families import QWEN3_5_ROPE, QWEN_VISION, Sizes, build_family

sys.path.insert(0, str(ROOT / "tools" / "gpu_kit"))
from parts.rows import Rows, grouped, like, plain_backward, ragged

HEADER = ["rows", "way", "tokens computed", "s", "useful tokens/s", "of plain loop", "of padded", "of packed"]
PLAIN_LOOP = "plain loop"
WARM_UP = 1  # uncounted repeats
PROMPT_RATIOS = ((4, 1), (1, 1), (1, 4))  # prompt to response, of groups

MEDIUM_TEXT: Sizes = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
MEDIUM_FAMILIES: dict[str, Sizes] = {
    "qwen3": {},
    "qwen3_5": {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": QWEN3_5_ROPE | {"mrope_section": [4, 2, 2]},
    },
    "lfm2": {"layer_types": (["conv", "conv", "full_attention"] * 3)[:8]},
    "granitemoehybrid": {
        "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 2,
        "intermediate_size": 256,
        "shared_intermediate_size": 512,
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
        "mamba_chunk_size": 64,
    },
}
MEDIUM_PARTS: dict[str, Sizes] = {"qwen3_5": {"vision_config": QWEN_VISION | {"out_hidden_size": 256}}}


# ------------------------------------------------------------------- models and rows


def build_medium_family(family: str, directory: Path) -> str:
    """Write a random model of 8 layers, 256 wide, with the family's layer layout; return its path."""
    text = MEDIUM_TEXT | MEDIUM_FAMILIES[family]
    return str(build_family(family, directory / family, text=text, parts=MEDIUM_PARTS.get(family)))


# ------------------------------------------------------------------- measurements


def alternating_seconds(
    works: dict[str, Callable[[], None]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the CPU seconds of each piece of work in each repeat, or seconds on a GPU."""

    def now() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    durations: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(WARM_UP + repeats):
        for name, work in works.items():
            began = now()
            work()
            durations[name].append(now() - began)

    return {name: spent[WARM_UP:] for name, spent in durations.items()}


def ratio(base_seconds: Sequence[float], seconds: Sequence[float]) -> str:
    """Return how many times as fast as the base a way is: the median of the repeats, the lowest and the
    highest."""
    ratios = [base / spent for base, spent in zip(base_seconds, seconds, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


class Bench:
    """The policy, and the plain model beside the policy."""

    def __init__(self, path: str, dtype: str, repeats: int, world: World) -> None:
        self.repeats = repeats
        self.world = world
        self.policy: Policy = load_policy(ModelConfig(path=path, dtype=dtype), world)
        self.policy.packing = packing_for([self.policy], "tree", dtype, world)

        config = read_config(path)
        plain = auto_class_of(config).from_pretrained(path, dtype=getattr(torch, dtype))
        self.plain: Any = plain.eval().to(world.device)
        self.vocabulary: int = config.get_text_config().vocab_size

        self.head_size: int = self.plain.get_output_embeddings().weight.numel()
        trained_parameters = self.policy.trained_parameters[""]
        self.layer_size = sum(parameter.numel() for parameter in trained_parameters) - self.head_size

    def lines(self, rows_name: str, rows: Rows, ways: Sequence[Packing]) -> Iterator[list[str]]:
        """Yield the table's lines of these rows: the plain loop, then each way that the model allows."""
        if self.policy.packing == "padded":
            ways = [way for way in ways if way == "padded"]

        selected_rows: dict[str, Selected] = {way: rows.selected(way).to(self.world.device) for way in ways}
        works: dict[str, Callable[[], None]] = {PLAIN_LOOP: partial(self.run_plain_loop, rows)}
        for way in ways:
            works[way] = partial(self.run_policy, way, selected_rows[way])
        seconds = alternating_seconds(works, self.repeats, self.world.device)

        for name, spent in seconds.items():
            token_count = rows.useful if name == PLAIN_LOOP else selected_rows[name].ids.numel()
            ratios = [
                ratio(seconds[base], spent) if base in seconds and base != name else ""
                for base in (PLAIN_LOOP, "padded", "packed")
            ]
            if name == "tree":
                ratios[-1] += (
                    f", limit {self.work(selected_rows['packed']) / self.work(selected_rows[name]):.2f}"
                )

            median = statistics.median(spent)
            rate = rows.useful / median
            yield [rows_name, name, f"{token_count:,}", f"{median:.2f}", f"{rate:.0f}", *ratios]

    def run_plain_loop(self, rows: Rows) -> None:
        plain_backward(self.plain, rows)
        self.plain.zero_grad()

    def run_policy(self, way: Packing, selected: Selected) -> None:
        with padded_meanwhile(self.policy) if way == "padded" else nullcontext():
            self.policy(selected).logp.sum().backward()
        self.policy.zero_grad()

    def work(self, selected: Selected) -> int:
        """Return the multiply-adds of matrix products in one forward."""
        return self.layer_size * selected.ids.numel() + self.head_size * len(selected.labels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default=str(ROOT / ".models" / "smollm2-135m-instruct"))
    model.add_argument("--family", choices=MEDIUM_FAMILIES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--rows", nargs="+", default=["ragged", "groups"], choices=["ragged", "like", "groups"]
    )
    parser.add_argument("--groups", type=int, default=2, help="of 8, in a micro-batch")
    parser.add_argument("--tokens", type=int, default=250, help="of a typical row")
    args = parser.parse_args()

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = build_medium_family(args.family, Path(folder)) if args.family else args.model
        bench = Bench(path, args.dtype, args.repeats, join_ranks(0, 1, device=args.device))

    rng = np.random.default_rng(0)
    vocabulary = bench.vocabulary
    lines: list[list[str]] = []
    for kind in args.rows:
        if kind == "groups":
            for prompt, response in PROMPT_RATIOS:
                part = args.tokens // (prompt + response)
                rows = grouped(rng, vocabulary, args.groups, prompt * part, response * part)
                lines += bench.lines(f"{prompt}:{response}", rows, ("packed", "tree"))
        else:
            rows = (ragged if kind == "ragged" else like)(rng, vocabulary, 16, args.tokens)
            lines += bench.lines(kind, rows, ("padded", "packed"))

    print(table(HEADER, lines))
    leave_ranks()


if __name__ == "__main__":
    main()
