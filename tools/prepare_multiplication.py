"""Write the multiplication task as parquet files with verl's columns: "What is 37 * 58?".

    python tools/prepare_multiplication.py --out examples/multiturn/smollm2/data

The factors have two digits. Each prompt begins with two worked examples as earlier turns, in which the
assistant calls the tool `calculator`: a small pretrained model has never seen a tool call. Train and test
share no pair of factors. The same seed writes the same rows.
"""

from __future__ import annotations

import random
from typing import Any

from prepare_two_operations import question_message, truth, worked
from task_script import write_task

from asyncrl.data.rows import verl_row

EXAMPLES = ((23, 41), (12, 67))
SYSTEM = "You cannot multiply. Call the tool calculator, then state the result."


def rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Samples with verl's columns."""
    example_messages = [
        message for a, b in EXAMPLES for message in (question_message(f"{a} * {b}"), *worked(f"{a} * {b}"))
    ]
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if (a, b) not in EXAMPLES]
    rules = {"role": "system", "content": SYSTEM}
    questions = [f"{a} * {b}" for a, b in rng.sample(pairs, count)]
    return [
        verl_row("multiplication", [rules, *example_messages, question_message(q)], truth(q))
        for q in questions
    ]


def main() -> None:
    write_task(__doc__, rows, train=1024, test=256)


if __name__ == "__main__":
    main()
