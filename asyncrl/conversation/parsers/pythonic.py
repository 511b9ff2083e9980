"""Calls as a Python list, `[f(a=1), g(b="x")]`: Llama 4, Llama 3.2, LFM2."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any

from asyncrl.conversation.parsers.base import CallBlock, RawCall, Tags, call_format
from asyncrl.conversation.parsers.values import Malformed, quote

_WRAPPED = (Tags("<|python_start|>", "<|python_end|>"), Tags("<|tool_call_start|>", "<|tool_call_end|>"))
_OPEN = re.compile("|".join(re.escape(tags.open) for tags in _WRAPPED))
_CLOSE = {tags.open: tags.close for tags in _WRAPPED}
_BARE = re.compile(r"\s*\[\s*[^\W\d][\w.\-]*\s*\(")  # a list of anything else is an answer
_WORDS = {"true": True, "false": False, "null": None}
_LONGEST = 1 << 16  # Python's parser takes 2 us for a character


@call_format("pythonic")
def pythonic(text: str) -> Iterator[CallBlock]:
    """The whole turn is the list, or it is between tags."""
    if _BARE.match(text):
        yield CallBlock(0, len(text), _listed(text))
        return
    at = 0
    while tag := _OPEN.search(text, at):
        close = _CLOSE[tag[0]]
        end = text.find(close, tag.end())
        body = text[tag.end() : end] if end >= 0 else text[tag.end() :]
        at = end + len(close) if end >= 0 else len(text)
        yield CallBlock(tag.start(), at, _listed(body))


def _listed(body: str) -> tuple[RawCall | Malformed, ...]:
    try:
        tree = _tree(body.strip())
        if not isinstance(tree, ast.List) or not tree.elts:
            raise Malformed("tool calls are a list of calls, such as [f(a=1)], and nothing else")
    except Malformed as error:
        return (error,)
    return tuple(map(_item, tree.elts))


def _tree(body: str) -> ast.expr:
    if len(body) > _LONGEST:
        raise Malformed(f"a list of tool calls may have {_LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes in what the model wrote
            return ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        detail = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise Malformed(f"tool calls are not a Python list such as [f(a=1)]: {detail}") from None


def _item(node: ast.expr) -> RawCall | Malformed:
    try:
        return _call(node)
    except Malformed as error:
        return error


def _call(node: ast.expr) -> RawCall:
    if not isinstance(node, ast.Call):
        raise Malformed(f"{_source(node)} is no call such as f(a=1)")
    name = _name(node.func)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise Malformed(f"every argument of {quote(name)} must be named, once")
        arguments[keyword.arg] = _value(keyword.value)
    if node.args:
        raise Malformed(f"the arguments of {quote(name)} must be named, such as a=1")
    return RawCall(name, arguments)


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{_name(value)}.{attribute}"
        case _:
            raise Malformed(f"{_source(node)} is no name of a tool")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _dict([_value(key) if key else None for key in keys], [_value(value) for value in values])
        case _:
            raise Malformed(f"{_source(node)} is no literal; arguments are strings, numbers, lists, objects")


def _dict(keys: list[Any], values: list[Any]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in keys):
        raise Malformed("the keys of an object must be strings")
    if len(set(keys)) < len(keys):
        raise Malformed("a key of an object is there twice")
    return dict(zip(keys, values, strict=True))


def _source(node: ast.expr) -> str:
    """The kind of expression; its text could be as long as the turn."""
    return f"an expression of kind {type(node).__name__}"
