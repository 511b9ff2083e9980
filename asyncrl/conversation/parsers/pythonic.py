"""Calls as a Python list, `[f(a=1), g(b="x")]`: Llama 4, Llama 3.2, LFM2."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from asyncrl.conversation.parsers.base import CallBlock, RawCall, Tags, call_format
from asyncrl.conversation.parsers.literals import expression, kind, literal
from asyncrl.conversation.parsers.values import Malformed, quote

_WRAPPED = (Tags("<|python_start|>", "<|python_end|>"), Tags("<|tool_call_start|>", "<|tool_call_end|>"))
_OPEN = re.compile("|".join(re.escape(tags.open) for tags in _WRAPPED))
_CLOSE = {tags.open: tags.close for tags in _WRAPPED}
_BARE = re.compile(r"\s*\[\s*[^\W\d][\w.\-]*\s*\(")  # a list of anything else is an answer


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
        tree = expression(body.strip(), "tool calls are not a Python list such as [f(a=1)]")
        if not isinstance(tree, ast.List) or not tree.elts:
            raise Malformed("tool calls are a list of calls, such as [f(a=1)], and nothing else")
    except Malformed as error:
        return (error,)
    return tuple(map(_item, tree.elts))


def _item(node: ast.expr) -> RawCall | Malformed:
    try:
        return _call(node)
    except Malformed as error:
        return error


def _call(node: ast.expr) -> RawCall:
    if not isinstance(node, ast.Call):
        raise Malformed(f"{kind(node)} is no call such as f(a=1)")
    name = _name(node.func)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise Malformed(f"every argument of {quote(name)} must be named, once")
        arguments[keyword.arg] = literal(keyword.value)
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
            raise Malformed(f"{kind(node)} is no name of a tool")
