"""Write the multiplication task as parquet files with verl's columns: "What is 37 * 58?".

    python tools/prepare_multiplication.py --out examples/multiturn/smollm2/data

The factors have two digits. Each prompt begins with two worked examples as earlier turns, in which the
assistant calls the tool `calculator`: a small pretrained model has never seen a tool call. Train and test
share no pair of factors. The same seed writes the same rows.
"""

from __future__ import annotations

import json
import random
from typing import Any

from asyncrl.data.written import verl_row, write_task

EXAMPLES = ((23, 41), (12, 67))
SYSTEM = "You cannot multiply. Call the tool calculator, then state the result."


def question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} * {b}?"}


def worked(a: int, b: int) -> list[dict[str, str]]:
    """One example: question, call, the tool's reply, answer."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{a} * {b}"}})
    return [
        question(a, b),
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": f"{a} * {b} = {a * b}"},
    ]


def rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Samples with verl's columns."""
    shown = [message for pair in EXAMPLES for message in worked(*pair)]
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if (a, b) not in EXAMPLES]
    rules = {"role": "system", "content": SYSTEM}
    return [
        verl_row("multiplication", [rules, *shown, question(a, b)], str(a * b))
        for a, b in rng.sample(pairs, count)
    ]


def main() -> None:
    write_task(__doc__, rows, train=1024, test=256)


if __name__ == "__main__":
    main()
