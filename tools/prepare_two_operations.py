"""Write the task of one or two operations as parquet files: "What is 37 * 58?", "What is 37 * 58 + 412?".

    python tools/prepare_two_operations.py --out examples/multiturn/smollm2/two_operations

The tool `calculator` does one operation a call, so that a second call needs the reply to the first. Each
prompt begins with a worked example of both kinds as earlier turns. Train and test share no question. The same
seed writes the same rows.
"""

from __future__ import annotations

import json
import random
from typing import Any

from task_script import write_task

from asyncrl.data.rows import verl_row

EXAMPLES = ("23 * 41", "12 * 67 - 195")
SYSTEM = "You cannot calculate. Call the tool calculator once for each operation, then state the result."


def worked(question: str) -> list[dict[str, str]]:
    """Return the messages after a question: a call and its reply for each operation, then the answer."""
    first, *operations = question.split()

    value = int(first)
    messages = []
    for sign, operand in zip(operations[::2], operations[1::2], strict=True):
        call = json.dumps({"name": "calculator", "arguments": {"expression": f"{value} {sign} {operand}"}})
        value = {"*": value * int(operand), "+": value + int(operand), "-": value - int(operand)}[sign]
        messages += [
            {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
            {"role": "tool", "content": str(value)},
        ]

    return [*messages, {"role": "assistant", "content": f"{question} = {value}"}]


def question_message(question: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is {question}?"}


def truth(question: str) -> str:
    return worked(question)[-2]["content"]


def rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return samples with verl's columns, about half of them with two operations."""
    example_messages = [
        message for example in EXAMPLES for message in (question_message(example), *worked(example))
    ]
    questions: dict[str, None] = {}
    while len(questions) < count:
        question = f"{rng.randint(10, 99)} * {rng.randint(10, 99)}"
        if rng.random() < 0.5:
            question += f" {rng.choice('+-')} {rng.randint(100, 999)}"
        if question not in EXAMPLES:
            questions[question] = None

    rules = {"role": "system", "content": SYSTEM}
    return [
        verl_row(
            "two_operations",
            [rules, *example_messages, question_message(q)],
            truth(q),
            operations=len(q.split()) // 2,
        )
        for q in questions
    ]


def main() -> None:
    write_task(__doc__, rows, train=1024, test=256)


if __name__ == "__main__":
    main()
