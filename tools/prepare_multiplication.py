"""Write the multiplication task as parquet files with verl's columns: "What is 37 * 58?".

    python tools/prepare_multiplication.py --out examples/multiturn/smollm2/data

The factors have two digits. Each prompt begins with two worked examples as earlier turns, in which the
assistant calls the tool `calculator`: a small pretrained model has never seen a tool call. Train and test
share no pair of factors. The same seed writes the same rows.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

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


def row(a: int, b: int, split: str, index: int) -> dict[str, Any]:
    """One sample in verl's shape."""
    shown = [message for pair in EXAMPLES for message in worked(*pair)]
    return {
        "data_source": "multiplication",
        "prompt": [{"role": "system", "content": SYSTEM}, *shown, question(a, b)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="directory of train.parquet and test.parquet")
    parser.add_argument("--train", type=int, default=1024, help="training samples")
    parser.add_argument("--test", type=int, default=256, help="held-out samples")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import datasets  # after parsing: it is slow to import

    datasets.disable_progress_bars()
    args.out.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if (a, b) not in EXAMPLES]
    pairs = random.Random(args.seed).sample(pairs, args.train + args.test)
    for split, part in (("train", pairs[: args.train]), ("test", pairs[args.train :])):
        rows = [row(a, b, split, index) for index, (a, b) in enumerate(part)]
        datasets.Dataset.from_list(rows).to_parquet(args.out / f"{split}.parquet")
    print(json.dumps({"out": str(args.out), "train": args.train, "test": args.test}))


if __name__ == "__main__":
    main()
