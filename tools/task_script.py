"""What the scripts have in common that make the data of an example."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.data.rows import Row, write_splits


def write_task(
    description: str | None, make: Callable[[random.Random, int], Sequence[Row]], train: int, test: int
) -> Path:
    """The main function of a script that makes a task: `make` gives so many different rows, of which the
    first are for training. `train`, `test`: how many by default. Returns the directory."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for train.parquet and test.parquet"
    )
    parser.add_argument("--train", type=int, default=train, help="number of training samples")
    parser.add_argument("--test", type=int, default=test, help="number of held-out samples")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rows = make(random.Random(args.seed), args.train + args.test)
    print(json.dumps(write_splits(args.out, {"train": rows[: args.train], "test": rows[args.train :]})))
    return Path(args.out)
