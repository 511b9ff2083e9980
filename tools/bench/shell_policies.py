"""Scripted policies on the shell's held-out tasks: which of them solve tasks, and what an episode costs.

    python tools/bench/shell_policies.py --tasks 256

Each works in a sandbox of the task's image, through the tool `shell`, and the reward `tests` judges what it
left. Prints a row for each policy: solved tasks, and the CPU seconds of an episode and of its tests, both
with their sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import sys
from collections.abc import Callable, Generator
from itertools import islice
from pathlib import Path

from common import ROOT, table, wilson

from asyncrl.data.harbor import TaskFolder, read_tasks
from asyncrl.data.samples import RowLayout, read_question
from asyncrl.data.sources import RowOrigin
from asyncrl.rewards.base import RewardInput, evaluate
from asyncrl.rewards.task_tests import JudgedByTests
from asyncrl.tools import load_tool

sys.path.insert(0, str(ROOT / "tools"))
from shell_puzzles import split_words

Commands = Generator[str, str, None]
"""Gives commands, and is sent their replies."""


def reads_both_and_edits_the_line(function: str, package: str, rng: random.Random) -> Commands:
    wanted, printed = yield from _read(function, package)
    yield f"sed -i /{function}/s/{printed}/{wanted}/ {package}.sh"


def reads_both_and_edits_every_line(function: str, package: str, rng: random.Random) -> Commands:
    wanted, printed = yield from _read(function, package)
    yield f"sed -i s/{printed}/{wanted}/ {package}.sh"


def edits_the_test(function: str, package: str, rng: random.Random) -> Commands:
    wanted, printed = yield from _read(function, package)
    yield f"sed -i /{function}/s/{wanted}/{printed}/ test.sh"


def ignores_replies(function: str, package: str, rng: random.Random) -> Commands:
    """Put one of the 64 held-out messages, which it knows beforehand, in the right place."""
    guess = rng.choice(split_words()["test"].messages)
    yield f"sed -i '/{function}/s/echo [a-z]*/echo {guess}/' {package}.sh"


POLICIES = (
    reads_both_and_edits_the_line,
    reads_both_and_edits_every_line,
    edits_the_test,
    ignores_replies,
)


def _read(function: str, package: str) -> Generator[str, str, tuple[str, str]]:
    wanted = re.findall(r"expected (\w+)", (yield "sh test.sh"))
    printed_words = re.findall(r"echo (\w+)", (yield f"grep {function} {package}.sh"))
    return wanted[0], printed_words[0]


async def play(
    folder: TaskFolder, policy: Callable[..., Commands], judge: JudgedByTests
) -> tuple[float, ...]:
    """Play an episode: return its score, and the CPU seconds of its sandbox and of the tests' sandbox."""
    sample = read_question(RowOrigin(str(folder.path), 0), folder.row, RowLayout())
    function, package = re.findall(r"test of (\w+) in (\w+)\.sh", folder.instruction)[0]
    began = _cpu()
    shell = load_tool("shell")
    workspace = shell.state()
    await workspace.open(sample)

    commands = policy(function, package, random.Random(package))
    command = next(commands)
    try:
        while True:
            command = commands.send(await workspace.shell(command))
    except StopIteration:
        result = await workspace.result()

    await workspace.close()
    worked = _cpu()
    judged = await evaluate(judge, RewardInput(sample, "", result=result))
    return judged.score, worked - began, _cpu() - worked


def _cpu() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    return sum(os.times()[:4])


async def run(folders: list[TaskFolder]) -> list[list[str]]:
    judge = JudgedByTests()
    lines = []
    for policy in POLICIES:
        played = [await play(folder, policy, judge) for folder in folders]
        solved = sum(score == 1.0 for score, *_ in played)
        low, high = wilson(solved, len(played))
        episode, tests = (sum(result[column] for result in played) / len(played) for column in (1, 2))
        share = f"{solved / len(played):.1%} ({low:.0%}–{high:.0%})"
        lines.append([policy.__name__.replace("_", " "), share, f"{episode:.3f}", f"{tests:.3f}"])

    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "examples/multiturn/shell_tasks/tasks/test")
    parser.add_argument("--tasks", type=int, default=256)
    args = parser.parse_args()

    folders = list(islice(read_tasks(args.directory), args.tasks))
    lines = asyncio.run(run(folders))
    print(table(["policy", "solved", "CPU s of an episode", "CPU s of its tests"], lines))


if __name__ == "__main__":
    main()
