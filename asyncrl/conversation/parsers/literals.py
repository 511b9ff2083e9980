"""Python's literals, as models write them in calls."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from asyncrl.conversation.parsers.values import Malformed

_WORDS = {"true": True, "false": False, "null": None}
_LONGEST = 1 << 16  # Python's parser takes 2 us for a character


def expression(text: str, problem: str) -> ast.expr:
    """The syntax tree of `text`. Malformed, beginning with `problem`, if it is no expression."""
    if len(text) > _LONGEST:
        raise Malformed(f"{problem}: it has more than {_LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes in what the model wrote
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        detail = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise Malformed(f"{problem}: {detail}") from None


def literal(node: ast.expr) -> Any:
    """The value of a literal, JSON's words included; Malformed if it is none, or has no JSON type."""
    match node:
        case ast.Constant(value=str(text)):
            return text.encode("utf-16", "surrogatepass").decode(
                "utf-16", "replace"
            )  # pairs, as JSON has them
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _dict([literal(key) if key else None for key in keys], list(map(literal, values)))
        case _:
            raise Malformed(f"{kind(node)} is no literal; arguments are strings, numbers, lists, objects")


def kind(node: ast.expr) -> str:
    """The kind of expression; its text could be as long as the turn."""
    return f"an expression of kind {type(node).__name__}"


def _dict(keys: list[Any], values: list[Any]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in keys):
        raise Malformed("the keys of an object must be strings")
    if len(set(keys)) < len(keys):
        raise Malformed("a key of an object is there twice")
    return dict(zip(keys, values, strict=True))
