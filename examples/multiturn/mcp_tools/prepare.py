"""Write train.parquet: python examples/multiturn/mcp_tools/prepare.py"""

import random
from pathlib import Path

import datasets
from shop import PRICES

TASK = "Ask the shop for prices. Answer with the sum."


def row(rng: random.Random, index: int) -> dict:
    wanted = [(rng.randint(1, 5), item) for item in rng.sample(sorted(PRICES), rng.randint(1, 3))]
    asked = " and ".join(f"{count} of the item {item}" for count, item in wanted)
    total = sum(count * PRICES[item] for count, item in wanted)
    return {
        "data_source": "shop",
        "prompt": [
            {"role": "system", "content": TASK},
            {"role": "user", "content": f"What do I pay for {asked}?"},
        ],
        "ability": "tools",
        "reward_model": {"style": "rule", "ground_truth": str(total)},
        "extra_info": {"index": index, "items": len(wanted)},
    }


if __name__ == "__main__":
    rng = random.Random(0)
    rows = [row(rng, index) for index in range(128)]
    datasets.Dataset.from_list(rows).to_parquet(Path(__file__).with_name("train.parquet"))
