"""Values that users' code, models and other programs gave, as values that can be recorded."""

from __future__ import annotations

import math
import re
from typing import Any


def finite(what: str, value: Any) -> float:
    """A number of any type as a float. TypeError or ValueError, beginning with `what`, if it is no number, or
    no finite one."""
    try:
        number = float(value)
    except OverflowError:  # an int with hundreds of digits
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {value!r}, which is no number") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, which is no finite number")
    return number


def encodable(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair: JSON can write one, UTF-8 cannot, and
    no tokenizer takes it."""
    return text.encode(errors="replace").decode()


def printable(text: str) -> str:
    """The text with the control characters that a terminal would obey as `^[`; lines and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda one: f"^{chr(ord(one[0]) & 127 ^ 64)}", text)
