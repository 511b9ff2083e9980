"""Write a task whose format a model has never seen, and demonstrations of the format on other questions.

    python tools/prepare_answer_format.py --out examples/multiturn/smollm2_sft/data

The tool `calculator` is to be called, and its result stated between tags: "<answer>2146</answer>". No prompt
holds an example. `train.parquet` and `test.parquet` (verl's columns) ask for products of two numbers with two
digits, and share no pair of factors. `demonstrations.jsonl` (a column `messages`) shows sums and differences,
worked by this program: no question of it is one of theirs. The same seed writes the same rows.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from task_script import write_task

from asyncrl.data.rows import verl_row

DEMONSTRATIONS = 256
SYSTEM = (
    "You cannot calculate. Call the tool calculator:\n"
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": …}}\n</tool_call>\n'
    "Then state its result between <answer> and </answer>."
)


def question_messages(expression: str) -> list[dict[str, str]]:
    """The prompt of a question."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"What is {expression}?"},
    ]


def demonstration(expression: str, result: int) -> list[dict[str, str]]:
    """The whole conversation. The call is text: the template of SmolLM2 shows no calls."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return [
        *question_messages(expression),
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": str(result)},
        {"role": "assistant", "content": f"<answer>{result}</answer>"},
    ]


def demonstrations(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return rows for `asyncrl sft`: sums, and differences that are not negative."""
    lines = []
    for _ in range(count):
        a, b = sorted(rng.sample(range(10, 100), 2), reverse=True)
        expression, result = rng.choice(((f"{b} + {a}", a + b), (f"{a} - {b}", a - b)))
        lines.append({"messages": demonstration(expression, result)})
    return lines


def rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Samples with verl's columns: products."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    return [
        verl_row("answer_format", question_messages(f"{a} * {b}"), str(a * b))
        for a, b in rng.sample(pairs, count)
    ]


def main() -> None:
    out: Path = write_task(__doc__, rows, train=1024, test=256)
    lines = map(json.dumps, demonstrations(random.Random(0), DEMONSTRATIONS))
    (out / "demonstrations.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
