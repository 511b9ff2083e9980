"""`asyncrl data NAME --out DIR`: public data sets with verl's columns."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.commands import command_parser
from asyncrl.data.benchmarks import BENCHMARKS, Benchmark, benchmark_rows, question_passages
from asyncrl.data.rows import Row, verl_row, write_splits
from asyncrl.errors import ConfigError, one_line

GYM_PREFIX = "reasoning_gym:"
# Rows by default; reasoning-gym makes as many as are asked for.
GYM_DEFAULT_ROWS = {"train": 4096, "test": 256}

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
    parser = command_parser("data", HELP, run_dir_help="")
    parser.add_argument("name", help=f"{', '.join(BENCHMARKS)}, or {GYM_PREFIX}TASK[,TASK]")
    parser.add_argument("--out", type=Path, required=True, help="directory of train.parquet and test.parquet")
    parser.add_argument("--source", default="", help="another repository of the hub, a directory or a file")
    parser.add_argument("--train", type=int, help="training samples, drawn at random; all by default")
    parser.add_argument("--test", type=int, help="held-out samples, drawn at random; all by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draw")
    parser.add_argument("--instruction", help="text after each question, instead of the usual one")
    parser.add_argument("--system", default="", help="system prompt; reasoning_gym: also one of its names")
    parser.add_argument("--config", default="{}", help="reasoning_gym: options of each task, a JSON object")
    args = parser.parse_args(argv)

    if args.name.startswith(GYM_PREFIX):
        splits = _gym_splits(args)
        reward = "reasoning_gym"
    elif args.name in BENCHMARKS:
        splits = _benchmark_splits(args, BENCHMARKS[args.name])
        reward = BENCHMARKS[args.name].reward
    else:
        raise ConfigError(f"{args.name} is no data set; there are {', '.join(BENCHMARKS)}, {GYM_PREFIX}TASK")

    print(json.dumps(write_splits(args.out, splits)))
    print(f"score it with 'rollout.reward={reward}'")
    return 0


def _benchmark_splits(args: argparse.Namespace, benchmark: Benchmark) -> dict[str, Sequence[Row]]:
    """Return the rows of both splits. If the publisher has only one split, or if a file is given, test rows
    are drawn from that split, and only with --test."""
    source = args.source or benchmark.repository
    rng = random.Random(args.seed)
    is_single = not benchmark.held_out or Path(source).is_file()
    splits = {"train": "train"} if is_single else {"train": "train", "test": benchmark.held_out}

    rows_by_split = dict[str, list[Row]]()
    for name, split in splits.items():
        rows_by_split[name], left_out = benchmark_rows(benchmark, source, split, args.instruction)
        if left_out:
            print(f"{split}: {left_out} rows without an answer that can be scored are left out")

    if is_single:
        rng.shuffle(rows_by_split["train"])
        held_out = args.test or 0
        rows_by_split = {
            "train": rows_by_split["train"][held_out:],
            "test": rows_by_split["train"][:held_out],
        }

    for name, rows in rows_by_split.items():
        row_count: int | None = getattr(args, name)
        if row_count is not None and row_count < len(rows):
            rows_by_split[name] = rng.sample(rows, row_count)

    if args.system:
        system_message = {"role": "system", "content": args.system}
        for rows in rows_by_split.values():
            rows[:] = [row | {"prompt": [system_message, *row["prompt"]]} for row in rows]

    if args.name == "hotpotqa":
        sample_ids = {row["extra_info"].get("id") for rows in rows_by_split.values() for row in rows}
        corpus_path = args.out / "corpus.jsonl"
        corpus_path.parent.mkdir(parents=True, exist_ok=True)
        written_lines = set[str]()
        with corpus_path.open("w") as file:
            for split in splits.values():
                for passage in question_passages(source, benchmark.config, split, sample_ids):
                    line = json.dumps(passage, ensure_ascii=False)
                    if line not in written_lines:  # each passage once
                        written_lines.add(line)
                        file.write(line + "\n")
        print(f"{corpus_path}: {len(written_lines)} passages, for rollout.tools=[search]")

    return dict(rows_by_split)


def _gym_splits(args: argparse.Namespace) -> dict[str, Sequence[Row]]:
    """Make equally many rows of each task, in random order. The test rows have another seed."""
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError:
        raise ConfigError("reasoning-gym is not installed; pip install 'asyncrl[reasoning-gym]'") from None

    tasks = args.name.removeprefix(GYM_PREFIX).split(",")
    if unknown_tasks := [task for task in tasks if task not in reasoning_gym.factory.DATASETS]:
        raise ConfigError(f"{unknown_tasks[0]!r} is no task of reasoning-gym; its gallery lists them")

    with ConfigError.instead_of(
        msgspec.DecodeError, text=f"--config {args.config!r}: a JSON object of a task's options each"
    ):
        options: dict[str, dict[str, Any]] = msgspec.json.decode(args.config, type=dict[str, dict[str, Any]])

    system_prompts = reasoning_gym.utils.SYSTEM_PROMPTS
    system_prompt = system_prompts.get(args.system or "default", args.system)

    splits = dict[str, Sequence[Row]]()
    for split, seed in (("train", args.seed), ("test", args.seed + 1_000_003)):
        requested_count: int | None = getattr(args, split)
        row_count = GYM_DEFAULT_ROWS[split] if requested_count is None else requested_count
        rows = list[Row]()
        for task_number, task in enumerate(tasks):
            task_rows = row_count // len(tasks) + (task_number < row_count % len(tasks))
            if not task_rows:
                continue
            task_options = options.get(task, {})
            try:
                entries = reasoning_gym.create_dataset(task, size=task_rows, seed=seed, **task_options)
            except (TypeError, ValueError, AssertionError) as error:  # raised by the task's own checks
                raise ConfigError(f"--config: {task} refuses {task_options} ({one_line(error)})") from None
            rows += [_gym_row(task, entry, system_prompt) for entry in entries]
        random.Random(seed).shuffle(rows)
        splits[split] = rows
    return splits


def _gym_row(task: str, entry: Mapping[str, Any], system: str) -> Row:
    from asyncrl.rewards.reasoning_gym import (  # `--help` should not wait for this import
        EXTRA_KEY,
        pack_entry,
    )

    system_messages = [{"role": "system", "content": system}] if system and system != "none" else []
    prompt = [*system_messages, {"role": "user", "content": entry["question"]}]
    extra_columns = {EXTRA_KEY: {"task": task, "entry": json.dumps(pack_entry(dict(entry)))}}
    return verl_row(f"reasoning_gym/{task}", prompt, str(entry["answer"]), "reasoning", **extra_columns)
