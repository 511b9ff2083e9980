"""Check tasks before training, in sandboxes like those of episodes."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
from typing import Any

import msgspec

from asyncrl.data.harbor import TaskFolder, read_tasks
from asyncrl.data.samples import RowLayout, read_question
from asyncrl.data.sources import RowOrigin
from asyncrl.data.task_sandboxes import DEFAULT_LIMITS, TaskSandbox
from asyncrl.data.tasks import UNNAMED_TESTS
from asyncrl.errors import AsyncrlError, ConfigError, reason
from asyncrl.isolation.sandbox.base import ISOLATION, RunEnding
from asyncrl.isolation.sandbox.changes import pack_entries
from asyncrl.rewards.base import RewardInput, evaluate
from asyncrl.rewards.task_tests import JudgedByTests, pack_directory
from asyncrl.values import encodable, printable, shorten_to_line

EXPECTED_SCORES = {
    "untouched": {"score": 0, "turn_green": 0, "stay_green": 1},
    "solved": {"score": 1, "turn_green": 1, "stay_green": 1},
}
SOLUTION_SECONDS = 600.0  # Seconds for a solution if the task sets no limit for agents.
LOOK_SECONDS = 10.0
SHOWN_OUTPUT = 200  # Characters of a solution's output in a fault.
LISTED_TASKS = 20  # Names of tasks in a warning.
LINE_FORMAT = "{:<32} {:>9} {:>6} {:>10} {:>7}  {:<14}  {}"


class Trial(msgspec.Struct):
    """The result of trying a task. `untouched`, `solved`: the scores without changes and with the changes of
    the solution. `network`: which of tests and solution tried to reach a network. `faults`: reasons not to
    train on the task; `warnings`: hints to follow before training."""

    task: str
    untouched: list[float] = []
    solved: list[float] = []
    solution_seconds: float = 0.0
    tests_seconds: float = 0.0
    network: list[str] = []
    faults: list[str] = []
    warnings: list[str] = []

    def add_fault(self, text: str) -> None:
        """Add a fault as one line, without the control characters that a program of the sandbox wrote."""
        self.faults.append(printable(" ".join(encodable(text).split())))

    def format_line(self) -> str:
        scores = [
            " ".join(f"{score:g}" for score in dict.fromkeys(scores))
            for scores in (self.untouched, self.solved)
        ]
        seconds = (f"{part:.2f}" for part in (self.solution_seconds, self.tests_seconds))
        cells = (*scores, *seconds, " ".join(self.network))
        verdict = "; ".join(self.faults) or ("ok, with a warning" if self.warnings else "ok")
        return LINE_FORMAT.format(self.task, *(cell or "-" for cell in cells), verdict)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="asyncrl tasks", description=__doc__)
    parser.add_argument("action", choices=("check",))
    parser.add_argument("directory", help="a task folder, or a directory of task folders")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of tasks to check at once"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="number of times to run the tests; 2 or more can reveal flaky tests",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON per task")
    arguments = parser.parse_args(argv)

    if min(arguments.jobs, arguments.repeats) < 1:
        raise ConfigError("--jobs and --repeats must be at least 1")

    folders = list(read_tasks(arguments.directory))
    return asyncio.run(check_tasks(folders, arguments.jobs, arguments.repeats, arguments.json))


async def check_tasks(folders: list[TaskFolder], jobs: int, repeats: int, as_json: bool) -> int:
    """Try tasks, `jobs` at once, and print a line for each task in the given order. Return 1 if a task has a
    fault."""
    judge = JudgedByTests(at_once=jobs)
    slots = asyncio.Semaphore(jobs)
    faulty_count = 0
    unnamed_tasks: list[str] = []

    async def try_folder(folder: TaskFolder) -> Trial:
        async with slots:
            return await try_task(folder, judge, repeats)

    if not as_json:
        print(LINE_FORMAT.format("task", "untouched", "solved", "solution s", "tests s", "network", ""))
    async with asyncio.TaskGroup() as group:
        for running_trial in [group.create_task(try_folder(folder)) for folder in folders]:
            trial = await running_trial
            faulty_count += bool(trial.faults)
            if trial.warnings:
                unnamed_tasks.append(trial.task)
            print(msgspec.json.encode(trial).decode() if as_json else trial.format_line(), flush=True)

    if not as_json:
        print(f"{len(folders) - faulty_count} of {len(folders)} tasks passed")
        if unnamed_tasks:
            names = ", ".join(unnamed_tasks[:LISTED_TASKS])
            if len(unnamed_tasks) > LISTED_TASKS:
                names += ", …"
            print(
                f"warning: {len(unnamed_tasks)} of {len(folders)} tasks name no tests ({names}): "
                f"{UNNAMED_TESTS}"
            )
    return 1 if faulty_count else 0


async def try_task(folder: TaskFolder, judge: JudgedByTests, repeats: int) -> Trial:
    """Judge a task without changes, and with the changes of its solution, `repeats` times each."""
    trial = Trial(printable(shorten_to_line(folder.task.name)))
    if not folder.tests.named:
        trial.warnings.append(f"the task names no tests: {UNNAMED_TESTS}")
    sample = read_question(RowOrigin(str(folder.path), 0), folder.row, RowLayout())
    for variant, scores in (("untouched", trial.untouched), ("solved", trial.solved)):
        try:
            result = await sandbox_result(folder, trial, variant == "solved")
            verdicts = []
            for _ in range(repeats):
                verdicts.append(await evaluate(judge, RewardInput(sample, "", result=result)))
        except AsyncrlError as error:
            trial.add_fault(f"{variant}: {reason(error)}")
            break

        scores += [verdict.score for verdict in verdicts]
        trial.tests_seconds = verdicts[0].components.get("seconds", 0.0)
        if any(verdict.components.get("network") for verdict in verdicts) and "tests" not in trial.network:
            trial.network.append("tests")

        # Compare the verdicts of the tests with the scores that a task needs.
        score_tables = [{"score": verdict.score, **verdict.components} for verdict in verdicts]
        for name, expected in EXPECTED_SCORES[variant].items():
            values = sorted({table[name] for table in score_tables if name in table})
            if values and values != [expected]:
                numbers = " and ".join(f"{value:g}" for value in values)
                flaky_text = "flaky, " if len(values) > 1 else ""
                trial.add_fault(f"{flaky_text}{variant}: {name} is {numbers}, not {expected}")
        if variant == "solved" and (notes := verdicts[0].notes.get("tests")):
            trial.add_fault(notes)
    return trial


async def sandbox_result(folder: TaskFolder, trial: Trial, solved: bool) -> Any:
    """Return the reward's input from an episode that did nothing, or that ran the solution."""
    sandbox = TaskSandbox(folder.task, DEFAULT_LIMITS, ISOLATION)
    try:
        await sandbox.start()
        if solved:
            await run_solution(folder, trial, sandbox)
        else:
            hidden_paths = shlex.join((str(folder.path), "/tests", "/solution"))
            look_command = f'for one in {hidden_paths}; do test ! -e "$one" || echo "$one"; done'
            if visible_paths := (await sandbox.jail.run("shell", look_command, LOOK_SECONDS)).output.split():
                trial.add_fault(f"agents can see {' '.join(visible_paths)}")
        return await sandbox.collect_changes()
    finally:
        await sandbox.jail.close()


async def run_solution(folder: TaskFolder, trial: Trial, sandbox: TaskSandbox) -> None:
    """Run the task's solution. Raises ConfigError if the task has none."""
    solution_folder = folder.path / "solution"
    if not (solution_folder / "solve.sh").is_file():
        raise ConfigError("solution/solve.sh is missing, so the check cannot show that the task is solvable")
    await sandbox.jail.apply_changes(pack_entries(pack_directory(solution_folder, "solution/solve.sh")))

    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in folder.solution.items())
    seconds = folder.task.seconds or SOLUTION_SECONDS
    result = await sandbox.jail.run("shell", f"{variables} /solution/solve.sh", seconds)
    trial.solution_seconds = result.seconds

    if result.ending is not RunEnding.DONE:
        output_end = " ".join(result.output.split())[-SHOWN_OUTPUT:]
        trial.add_fault(
            f"solution/solve.sh did not succeed ({result.ending}, exit status {result.status}): {output_end}"
        )
    if await sandbox.count_unreached():
        trial.network.append("solution")
