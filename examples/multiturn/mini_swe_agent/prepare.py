"""Write train.parquet, in verl's columns: python examples/multiturn/mini_swe_agent/prepare.py"""

import random
from pathlib import Path

import datasets

SYSTEM = "You work in a shell. Answer with exactly one command, in a bash block."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt"
SHOWN = (5, 81)


def task(number: int) -> dict:
    return {"role": "user", "content": f"Write {number} into answer.txt."}


def command(line: str) -> dict:
    return {"role": "assistant", "content": f"```bash\n{line}\n```"}


def solved(number: int) -> list:
    done = {"role": "user", "content": "returncode 0\n"}
    return [task(number), command(f"echo {number} > answer.txt"), done, command(SUBMIT)]


def row(index: int, number: int) -> dict:
    examples = [message for each in SHOWN for message in solved(each)]
    return {
        "data_source": "mini_swe_agent",
        "prompt": [{"role": "system", "content": SYSTEM}, *examples, task(number)],
        "ability": "shell",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": index},
    }


if __name__ == "__main__":
    numbers = random.Random(0).sample([n for n in range(1000) if n not in SHOWN], 256)
    rows = [row(index, number) for index, number in enumerate(numbers)]
    datasets.Dataset.from_list(rows).to_parquet(Path(__file__).with_name("train.parquet"))
