"""A calculator that does one operation per call, with a simulated latency if asked for."""

from __future__ import annotations

import asyncio
import math
import operator
import random
from typing import Literal

from asyncrl.tools.base import Tool, tool, tools

OPERATIONS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}


@tools.register("calculator")
def calculator(*, latency_mean: float = 0.0, latency_sigma: float = 1.0) -> Tool:
    """The tool. A `latency_mean` (seconds) above 0 makes each call wait a log-normal time of that mean;
    `latency_sigma` is the standard deviation of its logarithm: 1 gives a long tail, 2 a very long one."""
    if latency_mean < 0 or latency_sigma < 0:
        raise ValueError("latency_mean and latency_sigma must not be negative")

    @tool(name="calculator")
    async def calculate(a: int, op: Literal["plus", "minus", "times"], b: int) -> int:
        """Do one operation on two integers."""
        if latency_mean > 0:
            center = math.log(latency_mean) - latency_sigma**2 / 2  # so that the mean is latency_mean
            await asyncio.sleep(random.lognormvariate(center, latency_sigma))
        return OPERATIONS[op](a, b)

    return calculate
