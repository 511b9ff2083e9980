"""Reads calls written as a Python list, `[f(a=1), g(b="x")]`: Llama 4, Llama 3.2, LFM2."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from asyncrl.conversation.parsers.base import CallBlock, RawCall, Tags, call_format
from asyncrl.conversation.parsers.json_calls import listed_calls
from asyncrl.conversation.parsers.values import Malformed, expression, kind, literal, quote

_WRAPPED = (Tags("<|python_start|>", "<|python_end|>"), Tags("<|tool_call_start|>", "<|tool_call_end|>"))
_OPEN_TAG = re.compile("|".join(re.escape(tags.open) for tags in _WRAPPED))
_CLOSE_TAGS = {tags.open: tags.close for tags in _WRAPPED}
_BARE_LIST = re.compile(r"\s*\[\s*[^\W\d][\w.\-]*\s*\(")  # a list of anything else is an answer
_TRIPLE = r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\''
_STRING = r'"(?:[^"\\]|\\.)*+"|\'(?:[^\'\\]|\\.)*+\''
_NAMED = r"(?P<before>[\[(,]\s*+)(?P<name>[^\W\d][\w.\-]*+)(?=\s*+(?:\(|=(?!=)))"  # a tool or an argument
_PARTS = re.compile(rf"\\.|{_TRIPLE}|(?P<string>{_STRING})|{_NAMED}", re.DOTALL)


@call_format("pythonic")
def pythonic(text: str) -> Iterator[CallBlock]:
    """Find calls in a list that is the whole turn, or stands between tags."""
    if _BARE_LIST.match(text):
        yield CallBlock(0, len(text), _calls_in_list(text))
        return

    position = 0
    while open_tag := _OPEN_TAG.search(text, position):
        close_tag = _CLOSE_TAGS[open_tag[0]]
        end = text.find(close_tag, open_tag.end())
        body = text[open_tag.end() : end] if end >= 0 else text[open_tag.end() :]
        position = end + len(close_tag) if end >= 0 else len(text)
        yield CallBlock(open_tag.start(), position, _calls_in_list(body))


def _calls_in_list(body: str) -> tuple[RawCall | Malformed, ...]:
    """Return the calls of a list; LFM2 may write the list as JSON."""
    body = body.strip()
    try:
        if body.startswith("[{"):
            return listed_calls(body)

        text, names = _without_names(body)
        syntax_tree = expression(text, "the tool calls are not a Python list such as [f(a=1)]")
        if not isinstance(syntax_tree, ast.List) or not syntax_tree.elts:
            raise Malformed("the tool calls must be a list of calls, such as [f(a=1)], and nothing else")
    except Malformed as error:
        return (error,)

    return tuple(_call(node, names) for node in syntax_tree.elts)


def _without_names(body: str) -> tuple[str, dict[str, str]]:
    """Return a text that Python can read, and the names of tools and arguments by placeholder. In the text, a
    placeholder replaces each name (`from`, `in` and `get-rain` are no names for Python), and line ends in
    strings are escaped."""
    names: dict[str, str] = {}

    def write_part(match: re.Match[str]) -> str:
        if not match["name"]:
            return match[0].replace("\n", r"\n") if match["string"] else match[0]
        name = f"asyncrl_{len(names)}"
        names[name] = match["name"]
        return f"{match['before']}{name}"

    return _PARTS.sub(write_part, body), names


def _call(node: ast.expr, tool_names: dict[str, str]) -> RawCall | Malformed:
    if not isinstance(node, ast.Call):
        return Malformed(f"{kind(node)} is not a call such as f(a=1)")

    name = tool_names.get(node.func.id) if isinstance(node.func, ast.Name) else None
    if name is None:
        return Malformed(f"{kind(node.func)} is not the name of a tool")

    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        argument_name = tool_names.get(keyword.arg or "")
        if argument_name is None or argument_name in arguments:
            return Malformed(f"every argument of {quote(name)} must be named, and only once")

        try:
            arguments[argument_name] = literal(keyword.value)
        except Malformed as error:
            return error

    if node.args:
        return Malformed(f"the arguments of {quote(name)} must be named, as in a=1")

    return RawCall(name, arguments)
