"""Write tasks of reasoning-gym as parquet files with verl's columns.

    python tools/prepare_reasoning_gym.py --tasks chain_sum gcd --out sums
    python tools/prepare_reasoning_gym.py --tasks gcd --config '{"gcd": {"max_numbers": 3}}' --out gcd

Score them with `rollout.reward=reasoning_gym`. Every task has as many rows as the others. The same seed
writes the same rows; the test rows are drawn with another seed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from asyncrl.rewards.reasoning_gym import KEY, packed


def entries(task: str, count: int, seed: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    """`count` questions of one task."""
    import reasoning_gym

    return list(reasoning_gym.create_dataset(task, size=count, seed=seed, **config))


def row(task: str, entry: dict[str, Any], system: str, split: str, index: int) -> dict[str, Any]:
    """One sample in verl's shape."""
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [*messages, {"role": "user", "content": entry["question"]}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
        "extra_info": {
            "split": split,
            "index": index,
            KEY: {"task": task, "entry": json.dumps(packed(dict(entry)))},
        },
    }


def rows(args: argparse.Namespace, split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` rows of all tasks together, in random order."""
    import reasoning_gym.utils

    configs, system = json.loads(args.config), reasoning_gym.utils.SYSTEM_PROMPTS.get(args.system, "")
    drawn = []
    for number, task in enumerate(args.tasks):
        share = count // len(args.tasks) + (number < count % len(args.tasks))
        drawn += [(task, entry) for entry in entries(task, share, seed, configs.get(task, {}))]
    random.Random(seed).shuffle(drawn)
    return [row(task, entry, system, split, index) for index, (task, entry) in enumerate(drawn)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--tasks", nargs="+", required=True, help="names, as reasoning_gym.create_dataset has them"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of train.parquet and test.parquet")
    parser.add_argument("--train", type=int, default=4096, help="training samples of all tasks together")
    parser.add_argument("--test", type=int, default=256, help="held-out samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="{}", help="per task, its options: a JSON object of objects")
    parser.add_argument(
        "--system", default="default", help="reasoning-gym's system prompt of this name; none: no one"
    )
    args = parser.parse_args()

    import datasets  # after parsing: it is slow to import

    datasets.disable_progress_bars()
    args.out.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", args.train, args.seed), ("test", args.test, args.seed + 1_000_003)):
        if count:
            found = rows(args, split, count, seed)
            datasets.Dataset.from_list(found).to_parquet(args.out / f"{split}.parquet")
    print(json.dumps({"out": str(args.out), "train": args.train, "test": args.test}))


if __name__ == "__main__":
    main()
