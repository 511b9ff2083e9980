"""A calculator with one operation per call: two operations need a second call with the reply to the first."""

from __future__ import annotations

import operator
import re

from asyncrl.tools import ToolError, tool

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ONE = re.compile(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*")


@tool
def calculator(expression: str) -> int:
    """Do one operation on two whole numbers, e.g. 37 * 58."""
    if (found := ONE.fullmatch(expression)) is None:
        raise ToolError("one operation on two whole numbers, e.g. 37 * 58")
    a, sign, b = found.groups()
    return int(OPERATIONS[sign](int(a), int(b)))
