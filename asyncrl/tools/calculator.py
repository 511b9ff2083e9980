"""Calculators: one operation per call, optionally with a simulated latency, or an entire expression."""

from __future__ import annotations

import ast
import asyncio
import math
import operator
import random
from collections.abc import Callable
from typing import Any, Literal

from asyncrl.tools.base import Tool, ToolError, tool, tools

OPERATIONS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
MAX_CHARACTERS = 200  # characters of an expression
MAX_EXPONENT = 100
MAX_VALUE = 10**100  # limit of every intermediate value, so that no expression takes long

UNARY_OPERATIONS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
BINARY_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@tools.register("calculator")
def calculator(*, latency_mean: float = 0.0, latency_sigma: float = 1.0) -> Tool:
    """Make the tool. A `latency_mean` (seconds) above 0 makes each call wait a log-normal time with that
    mean; `latency_sigma` is the standard deviation of the logarithm: 1 gives a long tail, 2 a very long
    tail."""
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


@tools.register("expression_calculator")
@tool(name="calculator")
def expression_calculator(expression: str) -> str:
    """Compute an arithmetic expression, e.g. 3 * (17 - 2.5)."""
    try:
        tree = ast.parse(expression.strip(), mode="eval") if len(expression) <= MAX_CHARACTERS else None
        if tree is not None:
            value = _evaluate_node(tree.body)
            return str(int(value)) if value == int(value) else f"{value:.10g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ToolError(f"cannot compute {expression[:MAX_CHARACTERS]!r}: {error}") from None
    raise ToolError(f"the expression is longer than {MAX_CHARACTERS} characters")


def _evaluate_node(node: ast.expr) -> int | float:
    """Evaluate an expression. ValueError for anything but numbers, brackets and + - * / // % **."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op, operand) if type(op) in UNARY_OPERATIONS:
            return UNARY_OPERATIONS[type(op)](_evaluate_node(operand))  # type: ignore[no-any-return]
        case ast.BinOp(left, op, right) if type(op) in BINARY_OPERATIONS:
            left_value = _evaluate_node(left)
            right_value = _evaluate_node(right)
            if isinstance(op, ast.Pow) and abs(right_value) > MAX_EXPONENT:
                raise ValueError(f"the exponent {right_value} is too large")
            result = BINARY_OPERATIONS[type(op)](left_value, right_value)
            if isinstance(result, complex) or not abs(result) < MAX_VALUE:
                raise ValueError("the result is not a number, or is too large")
            return result  # type: ignore[no-any-return]
    raise ValueError("only numbers, brackets and + - * / // % ** are allowed")
