"""Delays and lengths that runs replay from a seed: the tool and the engine of async_ratio.py.

The k-th call of a member of a sample's group waits equally long in every run that is compared. A worker opens
the episodes of a sample in the order of its members, so a tool can count them: with one worker and without
retries that is the member's number (two members that are opened in the other order swap their delays).
"""

from __future__ import annotations

import asyncio
import json
import operator
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.engines.base import Engine, Request, engines
from asyncrl.tools import Tool, tool
from asyncrl.tools.calculator import expression_calculator
from asyncrl.types import Generation, Sample

OPERATIONS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
# (mu, sigma) of the logarithm of a response's tokens.
LENGTHS = 4.16, 1.0  # median 64, mean 106
ANSWERS = 3.178, 2.0  # median 24, with 1,536 at most mean 123


def drawn(name: str, mu: float, sigma: float) -> float:
    """Draw a log-normal number that depends on the arguments only."""
    return random.Random(name).lognormvariate(mu, sigma)


def slow_calculator(*, mu: float = 0.0, sigma: float = -1.0, seed: int = 0, log: str) -> Tool:
    """The demo's calculator. Each call waits LN(mu, sigma) seconds; a negative `sigma`: not at all. When an
    episode ends, one line goes to the file `log`: its sample, its member, begin and end by the wall clock."""
    opened: Counter[int] = Counter()

    class Calculator:
        def open(self, sample: Sample) -> None:
            self.sample = sample.row
            self.member = opened[sample.row]
            self.calls = 0
            self.began = time.time()
            opened[sample.row] += 1

        async def call(self, a: int, op: Literal["plus", "minus", "times"], b: int) -> int:
            """Do one operation on two integers."""
            self.calls += 1
            if sigma >= 0:
                await asyncio.sleep(drawn(f"{seed}/{self.sample}/{self.member}/{self.calls}", mu, sigma))
            return OPERATIONS[op](a, b)

        def close(self) -> None:
            with Path(log).open("a") as file:
                file.write(json.dumps([self.sample, self.member, self.began, time.time()]) + "\n")

    return tool(name="calculator", replay="pure")(Calculator)


def slow_expressions(*, mu: float, sigma: float, seed: int = 0) -> Tool:
    """SmolLM2's calculator. The k-th call for a sample and an expression waits LN(mu, sigma) seconds."""
    call_counts: Counter[tuple[int, str]] = Counter()

    class Calculator:
        def open(self, sample: Sample) -> None:
            self.sample = sample.row

        async def call(self, expression: str) -> str:
            """Compute an arithmetic expression, e.g. 3 * (17 - 2.5)."""
            call_counts[self.sample, expression] += 1
            call = call_counts[self.sample, expression]
            await asyncio.sleep(drawn(f"{seed}/{self.sample}/{expression}/{call}", mu, sigma))
            return expression_calculator.function(expression)  # type: ignore[no-any-return]

    return tool(name="calculator", replay="pure")(Calculator)


def forced_lengths(**arguments: Any) -> Engine:
    """Return the embedded engine with responses as long as the episode's key says, whatever the tokens
    are."""
    return _ForcedLengths(engines.load("torch")(**arguments), *LENGTHS)  # type: ignore[return-value]


def forced_answers(**arguments: Any) -> Engine:
    """The same with a heavy tail."""
    return _ForcedLengths(engines.load("torch")(**arguments), *ANSWERS)  # type: ignore[return-value]


class _ForcedLengths:
    def __init__(self, engine: Engine, mu: float, sigma: float) -> None:
        self._engine = engine
        self._mu = mu
        self._sigma = sigma

    async def generate(self, request: Request) -> Generation:
        length = max(1, round(drawn(str(request.key), self._mu, self._sigma)))
        limit = min(request.sampling.max_new_tokens, length)
        sampling = msgspec.structs.replace(request.sampling, max_new_tokens=limit, stop_ids=())
        return await self._engine.generate(msgspec.structs.replace(request, sampling=sampling))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
