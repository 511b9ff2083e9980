"""Rows of a micro-batch through the trainer's policy: padded, packed, as a tree, and by a plain torch loop.

    python tools/bench/packing.py [--model .models/smollm2-135m-instruct] [--dtype bfloat16] [--repeats 3]

Forward and backward of the log-probs of all responses, CPU seconds, median of repeats, one thread. Rows of
ragged lengths that share nothing, then groups of 8 with prompt and response in some ratios. The plain loop is
the model of transformers as it is, a row at a time without padding. The limit is that of arithmetic: matrix
products of the layers over the tokens computed, and of the output layer over those scored.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from common import ROOT, table
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig, Packing
from asyncrl.trainer.attention import FOREST_ATTENTION
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.packing import packing_for
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World, join_ranks, leave_ranks

sys.path.insert(0, str(ROOT / "tools" / "gpu_kit"))
from parts.rows import Rows, grouped, plain_backward

HEADER = ["rows", "way", "tokens computed", "s", "useful tokens/s", "of the plain loop", "of packed", "limit"]


def ragged(rng: np.random.Generator, vocabulary: int, count: int, typical: int) -> Rows:
    """Return lengths with a heavy tail; a fifth of each length is the prompt."""
    lengths = np.clip(rng.lognormal(np.log(typical), 0.7, count), 20, 8 * typical).astype(int)
    return Rows([rng.integers(0, vocabulary, n) for n in lengths], (lengths // 5).tolist())


def plain_loop(model: Any, rows: Rows) -> None:
    plain_backward(model, rows)
    model.zero_grad()


def in_policy(policy: Policy, chosen: Selected) -> None:
    policy(chosen).logp.sum().backward()
    policy.zero_grad()


def seconds(work: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Return the median CPU seconds, or seconds on a GPU, after an uncounted first call."""

    def now() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    durations = []
    for _ in range(repeats + 1):
        began = now()
        work()
        durations.append(now() - began)

    return statistics.median(durations[1:])


class Bench:
    """The policy, and the plain model beside the policy."""

    def __init__(self, path: str, dtype: str, repeats: int, world: World) -> None:
        self.repeats = repeats
        self.world = world
        self.policy = load_policy(ModelConfig(path=path, dtype=dtype), world)
        assert packing_for([self.policy], "tree", dtype, world) == "tree"

        self.plain = (
            AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval().to(world.device)
        )
        head = self.plain.get_output_embeddings().weight.numel()
        self.head = head
        self.layers = sum(parameter.numel() for parameter in self.plain.parameters()) - head
        self.vocabulary: int = self.plain.config.vocab_size

    def lines(self, name: str, rows: Rows, ways: Sequence[Packing]) -> list[list[str]]:
        plain = self.seconds(lambda: plain_loop(self.plain, rows))

        lines = [self.line(name, "plain loop", rows.useful, plain, rows, plain)]
        packed_s = packed_work = 0.0
        for way in ways:
            self.attend(way)
            chosen = rows.selected(way).to(self.world.device)

            spent = self.seconds(lambda rows_of_way=chosen: in_policy(self.policy, rows_of_way))
            work = self.layers * chosen.ids.numel() + self.head * len(chosen.labels)
            if way == "packed":
                packed_s = spent
                packed_work = work

            beside = [f"{packed_s / spent:.2f}", f"{packed_work / work:.2f}"] if way == "tree" else ["", ""]
            lines.append(self.line(name, way, chosen.ids.numel(), spent, rows, plain, *beside))

        return lines

    def seconds(self, work: Callable[[], None]) -> float:
        return seconds(work, self.repeats, self.world.device)

    def attend(self, way: Packing) -> None:
        self.policy.lm.set_attn_implementation("sdpa" if way == "padded" else FOREST_ATTENTION)

    def line(
        self, name: str, way: str, tokens: int, spent: float, rows: Rows, plain: float, *last_cells: str
    ) -> list[str]:
        rate = rows.useful / spent
        return [
            name,
            way,
            f"{tokens:,}",
            f"{spent:.2f}",
            f"{rate:.0f}",
            f"{plain / spent:.2f}",
            *(last_cells or ["", ""]),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / ".models" / "smollm2-135m-instruct"))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", type=int, default=2, help="of 8, in a micro-batch")
    parser.add_argument("--tokens", type=int, default=250, help="of a typical row")
    args = parser.parse_args()

    torch.set_num_threads(1)
    bench = Bench(args.model, args.dtype, args.repeats, join_ranks(0, 1, device=args.device))
    rng = np.random.default_rng(0)

    words = bench.vocabulary
    lines = bench.lines("ragged", ragged(rng, words, 16, args.tokens), ("padded", "packed"))
    for prompt, response in ((4, 1), (1, 1), (1, 4)):
        part = args.tokens // (prompt + response)
        rows = grouped(rng, words, args.groups, prompt * part, response * part)
        lines += bench.lines(f"{prompt}:{response}", rows, ("packed", "tree"))

    print(table(HEADER, lines))
    leave_ranks()


if __name__ == "__main__":
    main()
