"""Data sets that this package writes: rows with verl's columns, as train.parquet and test.parquet."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.data.rows import Row


def verl_row(
    data_source: str, prompt: str | list[dict[str, Any]], truth: Any, ability: str = "math", **extra: Any
) -> Row:
    """One sample. `prompt`: messages, or the text of the user's one. `extra`: what extra_info holds beside
    the split and the number of the row."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write FILE.jsonl or FILE.parquet, whole or not at all; how many rows."""
    listed, work = list(rows), path.with_name(f"{path.name}.writing")
    if path.suffix == ".jsonl":
        work.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in listed))
    else:
        import pyarrow  # here: `--help` should not wait for it
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed), work)
    work.replace(path)
    return len(listed)


def write_splits(out: Path, splits: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Write `<out>/<split>.parquet`, each row with its split and number; none for a split without rows.
    Returns what was written, for a person to read."""
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        numbered = [
            row | {"extra_info": {"split": split, "index": index} | row["extra_info"]}
            for index, row in enumerate(rows)
        ]
        if numbered:
            write_rows(out / f"{split}.parquet", numbered)
    return {"out": str(out), **{split: len(rows) for split, rows in splits.items()}}


def write_task(
    description: str | None, make: Callable[[random.Random, int], Sequence[Row]], train: int, test: int
) -> Path:
    """The main function of a script that makes a task: `make` gives so many different rows, of which the
    first are for training. `train`, `test`: how many by default. Returns the directory."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of train.parquet and test.parquet")
    parser.add_argument("--train", type=int, default=train, help="training samples")
    parser.add_argument("--test", type=int, default=test, help="held-out samples")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = make(random.Random(args.seed), args.train + args.test)
    print(json.dumps(write_splits(args.out, {"train": rows[: args.train], "test": rows[args.train :]})))
    return Path(args.out)
