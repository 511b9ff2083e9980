"""Write train.parquet, in verl's columns: python examples/multiturn/python_math/prepare.py"""

import math
import random
from pathlib import Path

import datasets

RULES = "Solve the problem. You may run Python code. Put the answer in \\boxed{}."


def primes(rng: random.Random) -> tuple[str, int]:
    n = rng.randint(50, 500)
    return f"What is the sum of all primes below {n}?", sum(
        p for p in range(2, n) if all(p % d for d in range(2, math.isqrt(p) + 1))
    )


def multiples(rng: random.Random) -> tuple[str, int]:
    a = rng.randint(2, 12)
    b = rng.randint(2, 12)
    n = rng.randint(100, 1000)
    question = f"How many whole numbers from 1 to {n} are divisible by {a} or by {b}?"
    return question, sum(k % a == 0 or k % b == 0 for k in range(1, n + 1))


def power(rng: random.Random) -> tuple[str, int]:
    a = rng.randint(2, 99)
    b = rng.randint(20, 200)
    return f"What is the remainder of {a}^{b} divided by 1000?", pow(a, b, 1000)


def divisors(rng: random.Random) -> tuple[str, int]:
    n = rng.randint(1000, 9999)
    return f"How many divisors has {n}?", sum(n % d == 0 for d in range(1, n + 1))


def row(index: int, question: str, answer: int) -> dict:
    return {
        "data_source": "python_math",
        "prompt": [{"role": "system", "content": RULES}, {"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"index": index},
    }


if __name__ == "__main__":
    rng = random.Random(0)
    drawn = dict(make(rng) for make in (primes, multiples, power, divisors) for _ in range(64))
    problems = list(drawn.items())
    rng.shuffle(problems)
    rows = [row(index, *problem) for index, problem in enumerate(problems)]
    datasets.Dataset.from_list(rows).to_parquet(Path(__file__).with_name("train.parquet"))
