"""Write the chained-arithmetic task as parquet files with verl's columns.

    python tools/prepare_chain_math.py --out examples/multiturn/calculator/data

A sample asks "Start with 55, plus 95, times 3, minus 12." with 1 to 6 operations, few of them long.
Every value on the way lies in 0..9999. Train and test share no question. The same seed writes the same rows.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARES = {1: 0.30, 2: 0.25, 3: 0.18, 4: 0.13, 5: 0.09, 6: 0.05}  # of samples, by number of operations
LARGEST = 9999


@dataclass(frozen=True)
class Chain:
    """`start`, then operations (word, operand); `values[k]` is the result of operation k."""

    start: int
    operations: tuple[tuple[str, int], ...]
    values: tuple[int, ...]

    @property
    def question(self) -> str:
        return f"Start with {self.start}" + "".join(f", {op} {b}" for op, b in self.operations) + "."


def make_chain(rng: random.Random, length: int) -> Chain:
    """A random chain; operations that would leave 0..LARGEST are drawn again."""
    start = value = rng.randint(1, 99)
    operations, values = [], []
    while len(values) < length:
        op = rng.choice(("plus", "minus", "times"))
        b = rng.randint(2, 9) if op == "times" else rng.randint(1, 99)
        result = {"plus": value + b, "minus": value - b, "times": value * b}[op]
        if 0 <= result <= LARGEST:
            value = result
            operations.append((op, b))
            values.append(value)
    return Chain(start, tuple(operations), tuple(values))


def make_chains(rng: random.Random, count: int) -> list[Chain]:
    """`count` chains with different questions and lengths drawn from SHARES."""
    chains: dict[str, Chain] = {}
    while len(chains) < count:
        chain = make_chain(rng, rng.choices(list(SHARES), list(SHARES.values()))[0])
        chains.setdefault(chain.question, chain)
    return list(chains.values())


def row(chain: Chain, split: str, index: int) -> dict[str, Any]:
    """One sample in verl's shape."""
    return {
        "data_source": "chain_math",
        "prompt": [{"role": "user", "content": chain.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(chain.values[-1])},
        "extra_info": {"split": split, "index": index, "operations": len(chain.values)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="directory of train.parquet and test.parquet")
    parser.add_argument("--train", type=int, default=4096, help="training samples")
    parser.add_argument("--test", type=int, default=1024, help="held-out samples")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import datasets  # after parsing: it is slow to import

    datasets.disable_progress_bars()
    args.out.mkdir(parents=True, exist_ok=True)
    chains = make_chains(random.Random(args.seed), args.train + args.test)
    for split, part in (("train", chains[: args.train]), ("test", chains[args.train :])):
        rows = [row(chain, split, index) for index, chain in enumerate(part)]
        datasets.Dataset.from_list(rows).to_parquet(args.out / f"{split}.parquet")
    print(json.dumps({"out": str(args.out), "train": args.train, "test": args.test}))


if __name__ == "__main__":
    main()
