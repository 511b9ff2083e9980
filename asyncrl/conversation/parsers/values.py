"""The values of a call's arguments: strict JSON, or an error text for the model."""

from __future__ import annotations

import json
from typing import Any

from asyncrl.values import encodable

MAX_DEPTH = 64  # levels of nesting: later readers must not exceed the recursion limit either


class Malformed(ValueError):
    """A fault of a call, in one line that the model reads."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Malformed(f"the key {quote(next(k for k in keys if keys.count(k) > 1))} is there twice")
    return value


def _no_constant(name: str) -> Any:
    raise Malformed(f"JSON has no {name}")


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def json_at(text: str, at: int, what: str = "a tool call") -> tuple[Any, int]:
    """The JSON value at `at`, and where it ends. Malformed if there is none, and for duplicate keys, NaN and
    numbers of thousands of digits."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    try:
        return _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 20]
        raise Malformed(f"{what} is not JSON: {error.msg} at {near!r}") from None
    except RecursionError:
        raise Malformed(f"{what} is not JSON: it is nested too deep") from None
    except ValueError as error:
        raise Malformed(f"{what} is not JSON: {error}") from None


def object_at(text: str, at: int, name: str) -> tuple[dict[str, Any], int]:
    """The JSON object with the arguments of a call."""
    value, end = json_at(text, at, f"what {quote(name)} is called with")
    if not isinstance(value, dict):
        raise Malformed(f"the arguments of {quote(name)} must be an object")
    return value, end


def as_json(name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """A call's name and arguments as text that any JSON reader takes. Malformed if that is impossible."""
    if not name:
        raise Malformed("a tool call has no name")
    if _deeper(arguments, MAX_DEPTH):
        raise Malformed(f"the arguments of {quote(name)} are nested deeper than {MAX_DEPTH} levels")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise Malformed(f"the arguments of {quote(name)} have a number that JSON has not") from None
    return encodable(name), encodable(written)


def quote(text: str) -> str:
    """A name in an error text: on one line, and short."""
    return json.dumps(text[:60] + "…" * (len(text) > 60), ensure_ascii=False)


def _deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and (not levels or any(_deeper(item, levels - 1) for item in value))
