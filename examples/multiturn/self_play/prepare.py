"""Write train.parquet, in verl's columns: python examples/multiturn/self_play/prepare.py"""

import random
from pathlib import Path

import datasets

RULES = "Take 1, 2 or 3 stones. Who takes the last one wins."


def row(index: int, stones: int) -> dict:
    return {
        "data_source": "nim",
        "prompt": [{"role": "user", "content": f"{RULES} Nim: {stones}"}],
        "ability": "game",
        "reward_model": {"style": "agent", "ground_truth": ""},
        "extra_info": {"index": index, "stones": stones},
    }


if __name__ == "__main__":
    games = [stones for stones in range(2, 10) for _ in range(16)]
    random.Random(0).shuffle(games)
    rows = [row(index, stones) for index, stones in enumerate(games)]
    datasets.Dataset.from_list(rows).to_parquet(Path(__file__).with_name("train.parquet"))
