"""Peak memory of log-probs and entropy, forward and backward: all logits at once against chunks of them.

    python tools/bench/head.py [--tokens 8192] [--vocab 151936] [--hidden 64] [--dtype float32]

Each way runs in a process of its own. `naive` is what one writes first: logits of all tokens, log_softmax,
gather, Σ p·log p. Its peak at the default size is about 15 GB; `--only chunked` leaves it out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import table
from torch import Tensor
from torch.nn.functional import linear
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl.config import ModelConfig
from asyncrl.trainer.model import Policy, Scores, Selected, load_policy
from asyncrl.trainer.world import join_ranks, leave_ranks

WAYS = ("naive", "chunked")
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    model: ModelConfig
    tokens: int
    way: str


@dataclass(frozen=True)
class Measured:
    """Bytes resident before the first forward and at the peak; seconds of forward and backward; Σ log p."""

    before: int
    peak: int
    seconds: float
    total: float


def save_model(path: Path, vocabulary: int, hidden: int) -> None:
    """Save a model of one small layer: nearly all computation is in the output layer."""
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )

    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(path)


def naive(policy: Policy, tokens: Selected) -> Scores:
    """All logits at once."""
    hidden = policy.lm.base_model(input_ids=tokens.ids, use_cache=False).last_hidden_state[0, :-1]
    logits = linear(hidden, policy.lm.get_output_embeddings().weight).float()
    logits = logits / tokens.temperature[:, None]  # in place of the first, to be fair
    logps = logits.log_softmax(-1)
    del logits
    logp = logps.gather(1, tokens.labels[:, None]).sum(1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(-1)
    return Scores(logp, entropy)


def measure(case: Case) -> Measured:
    """Measure a case in a fresh process, whose peak memory is the peak of this case."""
    torch.set_num_threads(1)
    policy = load_policy(case.model, join_ranks(0, 1, device="cpu"))
    if case.way == "naive":
        policy.forward = naive.__get__(policy)  # in the FSDP root's forward, where weights are whole
    torch.manual_seed(0)

    ids = torch.randint(0, policy.lm.config.vocab_size, (1, case.tokens + 1))
    position = np.arange(1, case.tokens + 1)
    tokens = Selected.lay_out(list(ids.numpy()), np.zeros_like(position), position, torch.ones(case.tokens))
    before = resident()
    start = time.perf_counter()
    total: Tensor = policy(tokens).logp.sum()
    total.backward()

    seconds = time.perf_counter() - start
    leave_ranks()
    return Measured(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, seconds, total.item())


def resident() -> int:
    """Return this process's bytes in main memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--fp32-head", action="store_true")
    parser.add_argument("--only", choices=WAYS)
    args = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        transformers_logging.disable_progress_bar()
        save_model(Path(folder), args.vocab, args.hidden)
        model = ModelConfig(path=folder, dtype=args.dtype, fp32_head=args.fp32_head)
        for way in [args.only] if args.only else WAYS:
            with context.Pool(1) as pool:
                measured = pool.apply(measure, (Case(model, args.tokens, way),))
            sizes = [f"{size / GIB:.2f}" for size in (measured.peak, measured.peak - measured.before)]
            lines.append([way, *sizes, f"{measured.seconds:.1f}", f"{measured.total:.2f}"])

    print(f"{args.tokens} tokens × {args.vocab} words, hidden {args.hidden}, {args.dtype}, one thread")
    print(table(["way", "peak GiB", "above the model, GiB", "forward + backward s", "Σ log p"], lines))


if __name__ == "__main__":
    main()
