"""Write train.jsonl, test.jsonl (held out) and demonstrations.jsonl. Seeds are fixed."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

PARTS = "123456789"
PAIRS = [(part, number) for part in PARTS for number in range(1, 10)]  # of the ordered part and its stock
random.Random(0).shuffle(PAIRS)
HELD_OUT = PAIRS[:16]  # in no row to train on
SEEN = PAIRS[16:]


def order(seed: int, pairs: list = SEEN) -> dict:
    generator = random.Random(seed)
    part, number = generator.choice(pairs)
    stock = {other: generator.randint(1, 9) for other in PARTS} | {part: number}
    return {
        "prompt": [{"role": "user", "content": f"Sell all of part {part}."}],
        "ground_truth": part,
        "extra_info": {"stock": stock},
    }


def demonstration(seed: int) -> dict:
    row = order(seed)
    part = row["ground_truth"]
    number = row["extra_info"]["stock"][part]
    return {
        "messages": [
            *row["prompt"],
            *tool_call("count", {"part": int(part)}, reply=number),
            *tool_call("take", {"part": int(part), "number": number}, reply=0),
            {"role": "assistant", "content": "Done."},
        ]
    }


def tool_call(name: str, arguments: dict[str, int], reply: int) -> list[dict]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(reply)},
    ]


def write(path: str, rows: Iterable[dict]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write("train.jsonl", map(order, range(1_000, 1_512)))
    write("test.jsonl", [order(seed, HELD_OUT) for seed in range(2_000, 2_128)])
    write("demonstrations.jsonl", map(demonstration, range(10_000, 12_400)))
