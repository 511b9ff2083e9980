"""Reads the values of a call's arguments: strict JSON, Python's literals, or an error text for the model."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

from asyncrl.values import cut_after, encodable, is_deeper

_JSON_WORDS = {"true": True, "false": False, "null": None}
_MAX_EXPRESSION_CHARACTERS = 1 << 16  # Python's parser takes 2 us for a character
MAX_DEPTH = 64  # levels of nesting: later readers must not exceed the recursion limit either


class Malformed(ValueError):
    """A fault of a call, in one line that the model reads."""


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Malformed(f"the key {quote(next(k for k in keys if keys.count(k) > 1))} appears twice")
    return value


def _refuse_constant(name: str) -> Any:
    raise Malformed(f"JSON has no {name}")


_JSON = json.JSONDecoder(object_pairs_hook=_with_unique_keys, parse_constant=_refuse_constant)


def json_at(text: str, position: int, subject: str = "a tool call") -> tuple[Any, int]:
    """Read the JSON value at `position`, and return the value and its end. Malformed if there is no value,
    and for duplicate keys, NaN and numbers of thousands of digits."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1

    try:
        return _JSON.raw_decode(text, position)
    except json.JSONDecodeError as error:
        nearby_text = text[error.pos : error.pos + 20]
        problem = error.msg.removesuffix(" at")  # "Unterminated string starting at"
        raise Malformed(f"{subject} is not JSON: {problem} at {nearby_text!r}") from None
    except RecursionError:
        raise Malformed(f"{subject} is not JSON: the value is nested too deeply") from None
    except ValueError as error:
        raise Malformed(f"{subject} is not JSON: {error}") from None


def object_at(text: str, start: int, name: str) -> tuple[dict[str, Any], int]:
    """Read the JSON object with the arguments of a call, and return the object and its end."""
    value, end = json_at(text, start, f"the argument object of {quote(name)}")
    if not isinstance(value, dict):
        raise Malformed(f"the arguments of {quote(name)} must be an object")
    return value, end


def as_json(name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """Write a call's name and arguments as text that any JSON reader accepts. Malformed if that is
    impossible."""
    if not name:
        raise Malformed("a tool call has no name")
    if is_deeper(arguments, MAX_DEPTH):
        raise Malformed(f"the arguments of {quote(name)} are nested deeper than {MAX_DEPTH} levels")

    try:
        json_text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise Malformed(f"the arguments of {quote(name)} contain a number that JSON does not allow") from None

    return encodable(name), encodable(json_text)


def quote(text: str) -> str:
    """Quote a name for an error text: on one line, and short."""
    return json.dumps(cut_after(text, 60), ensure_ascii=False)


# -- Python's literals, as models write them in calls ----------------------------------------------------


def expression(text: str, problem: str) -> ast.expr:
    """Return the syntax tree of `text`. Malformed, beginning with `problem`, if the text is no expression."""
    if len(text) > _MAX_EXPRESSION_CHARACTERS:
        raise Malformed(f"{problem}: the text has more than {_MAX_EXPRESSION_CHARACTERS} characters")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes in what the model wrote
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        detail = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise Malformed(f"{problem}: {detail}") from None


def literal(node: ast.expr) -> Any:
    """Return the value of a literal, JSON's words included; Malformed for other nodes, and types JSON
    lacks."""
    match node:
        case ast.Constant(value=str(text)):
            # Join surrogate pairs, as JSON readers do.
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _text_keyed([literal(key) if key else None for key in keys], list(map(literal, values)))
        case _:
            raise Malformed(
                f"{kind(node)} is not a literal; arguments must be strings, numbers, lists or objects"
            )


def kind(node: ast.expr) -> str:
    """Return the kind of an expression, for error texts: the expression itself could be as long as the
    turn."""
    return f"an expression of type {type(node).__name__}"


def _text_keyed(keys: list[Any], values: list[Any]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in keys):
        raise Malformed("the keys of an object must be strings")
    if len(set(keys)) < len(keys):
        raise Malformed("a key appears twice in an object")
    return dict(zip(keys, values, strict=True))
