"""Write the tasks of an environment of `verifiers` as parquet files with verl's columns.

    python tools/prepare_verifiers.py --taskset gsm8k_v1 --out gsm8k
    python tools/prepare_verifiers.py --taskset game --config '{"taskset": {"high": 9}}' --out game

Play them with `rollout.environment={verifiers: {taskset: ...}}` and the same options. A prompt is what the
environment says before the model's first turn. The first tasks are the test rows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Options
from asyncrl.data.rows import verl_row, write_splits
from asyncrl.environments import load_environment
from asyncrl.environments.verifiers import EXTRA_INFO_KEY, load_verifiers
from asyncrl.types import Message, Sample


async def row(options: Options, task: Any, index: int) -> dict[str, Any]:
    """Return a sample in verl's shape. The environment begins the episode, and is closed."""
    data = task.data.model_dump_json(exclude_none=True)
    world = load_environment({"verifiers": options}, "--")()
    try:
        extra = {EXTRA_INFO_KEY: data}
        observation = await world.reset(Sample(index, "", (), "null", extra_info_json=json.dumps(extra)))
    finally:
        await world.close()

    prompt = [plain(message) for message in observation.messages]
    data_row = verl_row(f"verifiers/{options['taskset']}", prompt, "", "verifiers", **extra)
    return data_row | {"reward_model": {"style": "environment", "ground_truth": ""}}


def plain(message: Message) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(message).items() if value}


async def rows(options: Options, tasks: Any, count: int) -> list[dict[str, Any]]:
    return [await row(options, task, i) for i, task in enumerate(itertools.islice(tasks, count))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--taskset", required=True, help="ID of an installed taskset")
    parser.add_argument("--env", default="", help="ID of the environment, if not the taskset's own")
    parser.add_argument("--config", default="{}", help="configuration of the environment, as a JSON object")
    parser.add_argument("--role", default="", help="the agent to train, if the environment has several")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for train.parquet and test.parquet"
    )
    parser.add_argument("--train", type=int, default=4096, help="maximum number of training samples")
    parser.add_argument("--test", type=int, default=0, help="number of held-out samples")
    args = parser.parse_args()

    options: Options = {key: getattr(args, key) for key in ("taskset", "env", "config", "role")}
    tasks = iter(load_verifiers(args.taskset, args.env, args.config).taskset)
    splits = {}
    for split, count in (("test", args.test), ("train", args.train)):
        splits[split] = asyncio.run(rows(options, tasks, count))

    print(json.dumps(write_splits(args.out, splits)))


if __name__ == "__main__":
    main()
