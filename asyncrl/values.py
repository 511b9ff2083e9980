"""Converts values of users' code, models and other programs into values that can be recorded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

import msgspec

MAX_LISTED_LENGTH = 200  # characters of a text in a list of episodes
MAX_RESULT_BYTES = 1 << 20  # bytes, as JSON, of the result of an agent or a tool for the reward


def finite_number(subject: str, value: Any) -> float:
    """Return a number of any type as a float. TypeError or ValueError, beginning with `subject`, if the value
    is no number, or no finite number."""
    try:
        number = float(value)
    except OverflowError:  # an int with hundreds of digits
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{subject} is {value!r}, which is not a number") from None

    if not math.isfinite(number):
        raise ValueError(f"{subject} is {number}, which is not a finite number")

    return number


def checked_result(value: Any, subject: str = "the agent") -> Any:
    """Return the value that an agent or a tool returned for the reward, as a JSON value. TypeError or
    ValueError where the value is no JSON value, or no result."""
    if isinstance(value, Real):
        value = finite_number(f"the result of {subject}", value)
    elif value is not None and not isinstance(value, Mapping):
        raise TypeError(
            f"{subject} returned a value of type {type(value).__name__}; expected None, a number or a dict"
        )

    encoded = msgspec.json.encode(value)
    if len(encoded) > MAX_RESULT_BYTES:
        raise ValueError(
            f"{subject} returned {len(encoded)} bytes, but at most {MAX_RESULT_BYTES} are allowed"
        )
    return msgspec.json.decode(encoded)


def encodable(text: str) -> str:
    """Return the text with a question mark for each half of a surrogate pair: JSON can write half a pair,
    UTF-8 cannot, and no tokenizer accepts it."""
    return text.encode(errors="replace").decode()


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether a JSON value is nested deeper than `levels`."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and (not levels or any(is_deeper(item, levels - 1) for item in value))


def cut_after(text: str, max_length: int) -> str:
    """Return the first `max_length` characters of the text, with an ellipsis after them if more follow."""
    return text if len(text) <= max_length else f"{text[:max_length]}…"


def without_middle(text: str, head: int, tail: int, note: str) -> str:
    """Return the text, or, if it is longer, the first `head` and the last `tail` characters, and between them
    `note` with the number of missing characters in place of `{}`."""
    missing_characters = len(text) - head - tail
    if missing_characters <= 0:
        return text
    return f"{text[:head]}{note.format(missing_characters)}{text[-tail:]}"


def shorten_to_line(text: str, max_length: int = MAX_LISTED_LENGTH) -> str:
    """Return the text on a single line of at most `max_length` characters."""
    line = " ".join(encodable(text[: 4 * max_length]).replace("\0", " ").split())
    return line if len(line) <= max_length and len(text) <= 4 * max_length else f"{line[: max_length - 1]}…"


def printable(text: str) -> str:
    """Return the text with control characters that a terminal would obey as `^[`; lines and tabs stay."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda control: f"^{chr(ord(control[0]) & 127 ^ 64)}", text
    )
