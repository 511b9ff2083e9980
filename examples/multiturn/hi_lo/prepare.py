"""Write train.parquet, in verl's columns: python examples/multiturn/hi_lo/prepare.py"""

import random
from pathlib import Path

import datasets

RULES = "Guess the number."


def row(index: int, high: int, secret: int) -> dict:
    return {
        "data_source": "hi_lo",
        "prompt": [{"role": "system", "content": RULES}],
        "ability": "game",
        "reward_model": {"style": "environment", "ground_truth": ""},
        "extra_info": {"index": index, "low": 1, "high": high, "secret": secret},
    }


if __name__ == "__main__":
    rng = random.Random(0)
    games = [(high, rng.randint(1, high)) for high in (4, 8, 16, 32) for _ in range(32)]
    rng.shuffle(games)
    rows = [row(index, high, secret) for index, (high, secret) in enumerate(games)]
    datasets.Dataset.from_list(rows).to_parquet(Path(__file__).with_name("train.parquet"))
