"""`asyncrl data NAME --out DIR`: public data sets with verl's columns."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.commands import command_parser
from asyncrl.data.benchmarks import BENCHMARKS, Benchmark, passages_of, rows_of
from asyncrl.data.rows import Row, verl_row, write_splits
from asyncrl.errors import ConfigError, one_line

GYM = "reasoning_gym:"
GYM_ROWS = {"train": 4096, "test": 256}  # there are as many as one asks for

HELP = """\
Write a public data set as train.parquet and test.parquet with verl's columns.

  asyncrl data gsm8k --out gsm8k                        openai/gsm8k, from the Hugging Face hub or its cache
  asyncrl data math --out math --source copy            from a directory or a file of it
  asyncrl data dapo_math --out dapo --test 256          17,000 questions; 256 of them are held out
  asyncrl data hotpotqa --out hotpot --train 5000       and corpus.jsonl, for the tool search
  asyncrl data reasoning_gym:chain_sum,gcd --out gym    made by the package reasoning-gym

Then: asyncrl train data.train=gsm8k/train.parquet data.test=gsm8k/test.parquet rollout.reward=gsm8k …
"""


def main(argv: list[str]) -> int:
    parser = command_parser("data", HELP, run_dir="")
    parser.add_argument("name", help=f"{', '.join(BENCHMARKS)}, or {GYM}TASK[,TASK]")
    parser.add_argument("--out", type=Path, required=True, help="directory of train.parquet and test.parquet")
    parser.add_argument("--source", default="", help="another repository of the hub, a directory or a file")
    parser.add_argument("--train", type=int, help="training samples, drawn at random; all by default")
    parser.add_argument("--test", type=int, help="held-out samples, drawn at random; all by default")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--instruction", help="text after each question, instead of the usual one")
    parser.add_argument("--system", default="", help="system prompt; reasoning_gym: also one of its names")
    parser.add_argument("--config", default="{}", help="reasoning_gym: options of each task, a JSON object")
    args = parser.parse_args(argv)

    if args.name.startswith(GYM):
        splits = _reasoning_gym(args)
        reward = "reasoning_gym"
    elif args.name in BENCHMARKS:
        splits = _benchmark(args, BENCHMARKS[args.name])
        reward = BENCHMARKS[args.name].reward
    else:
        raise ConfigError(f"{args.name} is no data set; there are {', '.join(BENCHMARKS)}, {GYM}TASK")

    print(json.dumps(write_splits(args.out, splits)))
    print(f"score it with 'rollout.reward={reward}'")
    return 0


def _benchmark(args: argparse.Namespace, benchmark: Benchmark) -> dict[str, Sequence[Row]]:
    """The rows of both splits. Where the publisher has one, or a file is given, the test rows are drawn from
    it, and only with --test."""
    source = args.source or benchmark.repository
    rng = random.Random(args.seed)
    one = not benchmark.held_out or Path(source).is_file()
    splits = {"train": "train"} if one else {"train": "train", "test": benchmark.held_out}

    found = dict[str, list[Row]]()
    for name, split in splits.items():
        found[name], left_out = rows_of(benchmark, source, split, args.instruction)
        if left_out:
            print(f"{split}: {left_out} rows without an answer that can be scored are left out")

    if one:
        rng.shuffle(found["train"])
        held_out = args.test or 0
        found = {"train": found["train"][held_out:], "test": found["train"][:held_out]}

    drawn = {name: _drawn(rng, rows, getattr(args, name)) for name, rows in found.items()}

    if args.system:
        rules = {"role": "system", "content": args.system}
        for rows in drawn.values():
            rows[:] = [row | {"prompt": [rules, *row["prompt"]]} for row in rows]

    if args.name == "hotpotqa":
        asked = {row["extra_info"].get("id") for rows in drawn.values() for row in rows}
        passages = (passages_of(source, benchmark.config, split, asked) for split in splits.values())
        _write_corpus(args.out / "corpus.jsonl", itertools.chain.from_iterable(passages))

    return dict(drawn)


def _drawn(rng: random.Random, rows: list[Row], count: int | None) -> list[Row]:
    return rows if count is None or count >= len(rows) else rng.sample(rows, count)


def _write_corpus(path: Path, passages: Iterable[Row]) -> None:
    """Each passage once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seen = set[str]()
    with path.open("w") as file:
        for line in (json.dumps(passage, ensure_ascii=False) for passage in passages):
            if line not in seen:
                seen.add(line)
                file.write(line + "\n")
    print(f"{path}: {len(seen)} passages, for rollout.tools=[search]")


def _reasoning_gym(args: argparse.Namespace) -> dict[str, Sequence[Row]]:
    """Make as many rows of each task as of the others, in random order. The test rows have another seed."""
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError:
        raise ConfigError("reasoning-gym is not installed; pip install 'asyncrl[reasoning-gym]'") from None

    tasks = args.name.removeprefix(GYM).split(",")
    if unknown := [task for task in tasks if task not in reasoning_gym.factory.DATASETS]:
        raise ConfigError(f"{unknown[0]!r} is no task of reasoning-gym; its gallery lists them")

    with ConfigError.instead_of(
        msgspec.DecodeError, text=f"--config {args.config!r}: a JSON object of a task's options each"
    ):
        options: dict[str, dict[str, Any]] = msgspec.json.decode(args.config, type=dict[str, dict[str, Any]])

    prompts = reasoning_gym.utils.SYSTEM_PROMPTS
    system = prompts.get(args.system or "default", args.system)

    splits = dict[str, Sequence[Row]]()
    for split, seed in (("train", args.seed), ("test", args.seed + 1_000_003)):
        given: int | None = getattr(args, split)
        count = GYM_ROWS[split] if given is None else given
        rows = list[Row]()
        for number, task in enumerate(tasks):
            share = count // len(tasks) + (number < count % len(tasks))
            rows += [_gym_row(task, made, system) for made in _made(task, share, seed, options.get(task, {}))]
        random.Random(seed).shuffle(rows)
        splits[split] = rows
    return splits


def _made(task: str, count: int, seed: int, options: dict[str, Any]) -> Iterable[Mapping[str, Any]]:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task, size=count, seed=seed, **options) if count else ()
    except (TypeError, ValueError, AssertionError) as error:  # of the task's own checks
        raise ConfigError(f"--config: {task} refuses {options} ({one_line(error)})") from None


def _gym_row(task: str, entry: Mapping[str, Any], system: str) -> Row:
    from asyncrl.rewards.reasoning_gym import KEY, packed  # here: `--help` should not wait for it

    rules = [{"role": "system", "content": system}] if system and system != "none" else []
    prompt = [*rules, {"role": "user", "content": entry["question"]}]
    extra = {KEY: {"task": task, "entry": json.dumps(packed(dict(entry)))}}
    return verl_row(f"reasoning_gym/{task}", prompt, str(entry["answer"]), "reasoning", **extra)
