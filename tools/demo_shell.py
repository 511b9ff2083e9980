"""The shell's demonstrations, for build_demo_model.py: run the test, read the source, edit it, end."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence

from shell_puzzles import SYLLABLES, Puzzle, Shell, make_puzzle, split_words

from asyncrl.tools import load_tool
from asyncrl.types import ToolCall

TEMPTED = {"guess": 0.3, "give up": 0.15, "wrong file": 0.6, "every line": 0.5}
"""Probability of each wrong decision: to edit what needs no reading (twice), to give up, to edit the test and
not the package, to edit every line. Above one half greedy decoding decides wrongly, too."""
# also by right demonstrations: first `ls`, last the test again
LOOK = 0.3
CHECK = 0.3
DONE = "Done."
GIVE_UP = "I give up."


class ShellTask:
    """The task of shell_puzzles.py: one level, with words of the training split only."""

    def __init__(self) -> None:
        self.tool = load_tool("shell")
        self.shares: Mapping[int, float] = {1: 1.0}
        self.words = split_words()["train"]
        self.units: Sequence[str] = SYLLABLES

    def make(self, rng: random.Random, level: int) -> Puzzle:
        return make_puzzle(rng, self.words)

    def question(self, problem: Puzzle) -> str:
        return problem.question

    def decisions(self, problem: Puzzle) -> int:
        return 4

    def for_tokenizer(self, rng: random.Random) -> tuple[Puzzle, list[str]]:
        puzzle = self.make(rng, 1)
        return puzzle, self.demonstration(puzzle, rng, tempted=True)

    def begin(self, problem: Puzzle) -> ShellTask.Episode:
        return self.Episode(problem)

    class Episode:
        def __init__(self, problem: Puzzle) -> None:
            self._shell = Shell(problem)

        def reply(self, call: ToolCall) -> str:
            return self._shell.run(json.loads(call.arguments).get("command", ""))

        def score(self, answer: str) -> float:
            return float(self._shell.solved)

    def demonstration(
        self, problem: Puzzle, rng: random.Random, tempted: bool, given_decisions: int = 0
    ) -> list[str]:
        def falls(temptation: str, decision: int) -> bool:
            return tempted and decision >= given_decisions and rng.random() < TEMPTED[temptation]

        source = f"{problem.package}.sh"
        commands = ["ls"] if rng.random() < LOOK else []

        edited = len(commands) + 2
        last = DONE
        for read in rng.sample(["sh test.sh", f"grep {problem.wrong_function} {source}"], 2):
            if falls("guess", len(commands)):
                commands.append(f"sed -i /{problem.wrong_function}/s/echo/printf/ {source}")
                break
            commands.append(read)
        else:
            line = "" if falls("every line", edited) else f"/{problem.wrong_function}/"
            file = "test.sh" if falls("wrong file", edited) else source
            if falls("give up", edited):
                last = GIVE_UP
            else:
                commands.append(f"sed -i {line}s/{problem.printed}/{problem.wanted}/ {file}")

        if last == DONE and rng.random() < CHECK:
            commands.append("sh test.sh")

        shell = Shell(problem)
        parts = []
        for command in commands:
            call = {"name": self.tool.name, "arguments": {"command": command}}
            parts += [f"<tool_call>\n{json.dumps(call)}\n</tool_call>", shell.run(command)]

        return [*parts, last]
