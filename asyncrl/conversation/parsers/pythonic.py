"""Calls as a Python list, `[f(a=1), g(b="x")]`: Llama 4, Llama 3.2, LFM2."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from asyncrl.conversation.parsers.base import CallBlock, RawCall, Tags, call_format
from asyncrl.conversation.parsers.json_calls import listed_calls
from asyncrl.conversation.parsers.values import Malformed, expression, kind, literal, quote

_WRAPPED = (Tags("<|python_start|>", "<|python_end|>"), Tags("<|tool_call_start|>", "<|tool_call_end|>"))
_OPEN = re.compile("|".join(re.escape(tags.open) for tags in _WRAPPED))
_CLOSE = {tags.open: tags.close for tags in _WRAPPED}
_BARE = re.compile(r"\s*\[\s*[^\W\d][\w.\-]*\s*\(")  # a list of anything else is an answer
_TRIPLE = r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\''
_STRING = r'"(?:[^"\\]|\\.)*+"|\'(?:[^\'\\]|\\.)*+\''
_NAMED = r"(?P<before>[\[(,]\s*+)(?P<name>[^\W\d][\w.\-]*+)(?=\s*+(?:\(|=(?!=)))"  # a tool or an argument
_PARTS = re.compile(rf"\\.|{_TRIPLE}|(?P<string>{_STRING})|{_NAMED}", re.DOTALL)


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
    """The calls of a list; LFM2 can be told to write it as JSON."""
    body = body.strip()
    try:
        if body.startswith("[{"):
            return listed_calls(body)
        text, names = _without_names(body)
        tree = expression(text, "tool calls are not a Python list such as [f(a=1)]")
        if not isinstance(tree, ast.List) or not tree.elts:
            raise Malformed("tool calls are a list of calls, such as [f(a=1)], and nothing else")
    except Malformed as error:
        return (error,)
    return tuple(_call(node, names) for node in tree.elts)


def _without_names(body: str) -> tuple[str, dict[str, str]]:
    """Make a text that Python can read: each name of a tool or an argument replaced (`from`, `in` and
    `get-rain` are none), lines in strings not ended. And the names, by what replaces them."""
    names: dict[str, str] = {}

    def write(part: re.Match[str]) -> str:
        if not part["name"]:
            return part[0].replace("\n", r"\n") if part["string"] else part[0]
        name = f"asyncrl_{len(names)}"
        names[name] = part["name"]
        return f"{part['before']}{name}"

    return _PARTS.sub(write, body), names


def _call(node: ast.expr, names: dict[str, str]) -> RawCall | Malformed:
    if not isinstance(node, ast.Call):
        return Malformed(f"{kind(node)} is no call such as f(a=1)")
    name = names.get(node.func.id) if isinstance(node.func, ast.Name) else None
    if name is None:
        return Malformed(f"{kind(node.func)} is no name of a tool")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        argument = names.get(keyword.arg or "")
        if argument is None or argument in arguments:
            return Malformed(f"every argument of {quote(name)} must be named, once")
        try:
            arguments[argument] = literal(keyword.value)
        except Malformed as error:
            return error
    if node.args:
        return Malformed(f"the arguments of {quote(name)} must be named, such as a=1")
    return RawCall(name, arguments)
