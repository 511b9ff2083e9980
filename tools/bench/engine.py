"""Throughput of the embedded engine on one thread: generated tokens per second, median of repeats.

    python tools/bench/engine.py [--repeats 5] [--hidden 128] [--layers 4] [--kv-heads 4] [--continuous]
        [--plain]

Compared with `model.generate` at equal lengths (which flatters it: its rows neither join nor leave) and, with
--continuous, with transformers' continuous batching. Time is CPU time of this process: other jobs on the
machine then disturb it less.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for the KV board: fewer TLB misses

import torch
from replayed import LENGTHS, drawn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch import recorded
from asyncrl.engines.torch.engine import TorchEngine

VOCABULARY = 320
PROMPT = 64
NEW = 128
LONGEST = 832  # tokens of a response with a log-normal length, at most
TURNS = 6
DELTA = 12
TURN_NEW = 30


def build(hidden: int, layers: int, kv_heads: int) -> LlamaForCausalLM:
    """A random Llama: 0.85M parameters with the defaults."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )

    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def tokens(count: int, seed: str) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=count))


async def single_turn(engine: TorchEngine, streams: int, run: int) -> int:
    """Sample one turn of all streams at once; return the number of tokens generated."""
    sampling = Sampling(NEW, ())
    requests = [
        Request(f"{run}-{index}", tokens(PROMPT, f"{run}-{index}"), sampling, index)
        for index in range(streams)
    ]

    generations = await asyncio.gather(*map(engine.generate, requests))
    for request in requests:
        engine.release(request.session)
    return sum(len(generation.ids) for generation in generations)


async def multi_turn(engine: TorchEngine, streams: int, run: int, keep: bool) -> int:
    """Play two episodes per stream, one after the other.

    An episode has several turns, each turn adds a reply of DELTA tokens, and about 300 tokens stand at the
    end.
    """

    async def stream(index: int) -> int:
        return await episode(index) + await episode(index + streams)

    async def episode(index: int) -> int:
        session = f"{run}-{index}"
        ids = tokens(PROMPT, session)

        total = 0
        length = random.Random(session)
        for turn in range(TURNS):
            sampling = Sampling(length.randint(TURN_NEW // 2, TURN_NEW * 3 // 2), ())
            generation = await engine.generate(Request(session, ids, sampling, index))
            total += len(generation.ids)
            ids += generation.ids + tokens(DELTA, f"{session}-{turn}")
            if not keep:
                engine.release(session)

        engine.release(session)
        return total

    return sum(await asyncio.gather(*map(stream, range(streams))))


async def lengths(engine: TorchEngine, streams: int, run: int, at_once: bool) -> int:
    """Sample six batches of responses with log-normal lengths: batch after batch, as synchronous training
    does, or with each finished response replaced at once. Both ways sample the same responses."""
    batches = [[_response(f"{batch}-{index}", run) for index in range(streams)] for batch in range(6)]
    waiting = [request for batch in batches for request in batch]

    async def stream() -> None:
        while waiting:
            await answer(waiting.pop(0))

    async def answer(request: Request) -> None:
        await engine.generate(request)
        engine.release(request.session)

    before = engine.tokens
    if at_once:
        await asyncio.gather(*(stream() for _ in range(streams)))
    else:
        for batch in batches:
            await asyncio.gather(*map(answer, batch))

    return engine.tokens - before


def _response(name: str, run: int) -> Request:
    length = round(drawn(name, *LENGTHS))
    return Request(f"{run}-{name}", tokens(PROMPT, name), Sampling(min(max(1, length), LONGEST), ()))


def generate(model: LlamaForCausalLM, streams: int) -> int:
    ids = torch.tensor([tokens(PROMPT, str(index)) for index in range(streams)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        top_k=0,
    )
    return streams * (out.shape[1] - PROMPT)


def continuous(model: LlamaForCausalLM, streams: int) -> int:
    config = GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, eos_token_id=-1, top_k=0
    )
    prompts = [list(tokens(PROMPT, str(index))) for index in range(streams)]
    outputs = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    return sum(len(output.generated_tokens) for output in outputs.values())


def rate(work: Callable[[int], int], repeats: int) -> float:
    """Return the median tokens per second over the repeats, after an uncounted first run."""
    rates = []
    for run in range(repeats + 1):
        began = time.process_time()
        count = work(run)
        rates.append(count / (time.process_time() - began))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--kv-heads", type=int, default=4, help="of 4 heads; fewer read less memory per token"
    )
    parser.add_argument("--continuous", action="store_true", help="also transformers' continuous batching")
    parser.add_argument("--plain", action="store_true", help="steps are not recorded, as on a GPU")
    args = parser.parse_args()

    torch.set_num_threads(1)
    recorded.RECORD_AFTER = -1 if args.plain else NEW // 2  # in the repeat that is not counted
    shape = (args.hidden, args.layers, args.kv_heads)
    plain = build(*shape)
    loop = asyncio.new_event_loop()
    build_policy = partial(build, *shape)
    engine = TorchEngine(
        build_policy(), build_policy, slots=64, max_len=PROMPT + LONGEST, max_batch_tokens=4096
    )
    size = sum(parameter.numel() for parameter in plain.parameters()) / 1e6
    print(f"{size:.2f}M parameters, {PROMPT} prompt + {NEW} new tokens")

    def show(name: str, work: Callable[[int], int]) -> None:
        print(f"{name:67} {rate(work, args.repeats):8.0f} tok/s", flush=True)

    for streams in (1, 2, 8, 32, 64):
        show(
            f"engine, {streams} streams",
            lambda run, n=streams: loop.run_until_complete(single_turn(engine, n, run)),
        )
        show(f"model.generate, {streams} rows", lambda _, n=streams: generate(plain, n))

    if args.continuous:
        show("transformers continuous batching, 32 requests", lambda _: continuous(plain, 32))
    for keep in (True, False):
        name = f"engine, 64 multi-turn streams, prefix {'kept' if keep else 'dropped'}"
        show(name, lambda run, k=keep: loop.run_until_complete(multi_turn(engine, 64, run, k)))

    for at_once in (False, True):
        name = f"engine, 64 streams, log-normal lengths, {'replaced at once' if at_once else 'in batches'}"
        show(name, lambda run, o=at_once: loop.run_until_complete(lengths(engine, 64, run, o)))

    loop.run_until_complete(engine.close())
    loop.close()


if __name__ == "__main__":
    main()
