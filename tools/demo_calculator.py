"""The calculator's demonstrations, for build_demo_model.py: chains of operations, one call for each."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence

from prepare_chain_math import SHARES, Chain, make_chain

from asyncrl.rewards import final_number
from asyncrl.tools import call_tool, load_tool
from asyncrl.types import ToolCall

GUESS = {"plus": 0.25, "minus": 0.25, "times": 0.65}
"""Probability that a demonstration guesses instead of calling the tool for this operation. Above one half
greedy decoding guesses too; on average about 0.4."""


class CalculatorTask:
    """See prepare_chain_math.py. The level is the number of operations."""

    def __init__(self) -> None:
        self.tool = load_tool("calculator")
        self.shares: Mapping[int, float] = SHARES
        self.units: Sequence[str] = ()

    def make(self, rng: random.Random, level: int) -> Chain:
        return make_chain(rng, level)

    def question(self, problem: Chain) -> str:
        return problem.question

    def decisions(self, problem: Chain) -> int:
        return len(problem.values)

    def demonstration(
        self, problem: Chain, rng: random.Random, tempted: bool, given_decisions: int = 0
    ) -> list[str]:
        return self._demonstration(problem, rng, GUESS if tempted else {}, given_decisions)

    def for_tokenizer(self, rng: random.Random) -> tuple[Chain, list[str]]:
        chain = make_chain(rng, rng.randint(1, 6))
        return chain, self._demonstration(chain, rng, dict.fromkeys(GUESS, 0.3))

    def begin(self, problem: Chain) -> CalculatorTask.Episode:
        return self.Episode(self, problem)

    class Episode:
        def __init__(self, task: CalculatorTask, problem: Chain) -> None:
            self._task = task
            self._problem = problem

        def reply(self, call: ToolCall) -> str:
            return asyncio.run(call_tool(self._task.tool, call)).content

        def score(self, answer: str) -> float:
            return float(final_number("chain_math", answer, str(self._problem.values[-1]))["score"])

    def _demonstration(
        self, chain: Chain, rng: random.Random, guess: dict[str, float], given_decisions: int = 0
    ) -> list[str]:
        """Replace each call after the first `given_decisions` calls by a guess with probability
        guess[operation]."""
        parts: list[str] = []
        value = chain.start
        for at, ((op, b), result) in enumerate(zip(chain.operations, chain.values, strict=True)):
            if at >= given_decisions and rng.random() < guess.get(op, 0.0):
                return [*parts, f"I guess {rng.randrange(10 ** rng.randint(1, 4))}."]
            call = {"name": self.tool.name, "arguments": {"a": value, "op": op, "b": b}}
            parts += [f"<tool_call>\n{json.dumps(call)}\n</tool_call>", str(result)]
            value = result

        return [*parts, f"The answer is {value}."]
