"""Write the chained-arithmetic task as parquet files with verl's columns.

    python tools/prepare_chain_math.py --out examples/multiturn/calculator/data

A sample asks "Start with 55, plus 95, times 3, minus 12." with 1 to 6 operations, few of them long.
Every value on the way lies in 0..9999. Train and test share no question. The same seed writes the same rows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from task_script import write_task

from asyncrl.data.rows import verl_row

SHARES = {1: 0.30, 2: 0.25, 3: 0.18, 4: 0.13, 5: 0.09, 6: 0.05}  # shares of samples by number of operations
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
    """Draw a random chain. Operations that would leave 0..LARGEST are drawn again."""
    start = value = rng.randint(1, 99)

    operations = []
    values = []
    while len(values) < length:
        operation = rng.choice(("plus", "minus", "times"))
        operand = rng.randint(2, 9) if operation == "times" else rng.randint(1, 99)
        result = {"plus": value + operand, "minus": value - operand, "times": value * operand}[operation]
        if 0 <= result <= LARGEST:
            value = result
            operations.append((operation, operand))
            values.append(value)

    return Chain(start, tuple(operations), tuple(values))


def make_chains(rng: random.Random, count: int) -> list[Chain]:
    """`count` chains with different questions and lengths drawn from SHARES."""
    chains: dict[str, Chain] = {}
    while len(chains) < count:
        chain = make_chain(rng, rng.choices(list(SHARES), list(SHARES.values()))[0])
        chains.setdefault(chain.question, chain)
    return list(chains.values())


def rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Samples with verl's columns."""
    return [
        verl_row("chain_math", chain.question, str(chain.values[-1]), operations=len(chain.values))
        for chain in make_chains(rng, count)
    ]


def main() -> None:
    write_task(__doc__, rows, train=4096, test=1024)


if __name__ == "__main__":
    main()
