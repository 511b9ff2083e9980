"""How a model writes tool calls. A parser turns the text of a turn into calls; it never raises."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec

from asyncrl.registry import Registry
from asyncrl.types import ToolCall


class Parsed(msgspec.Struct, frozen=True):
    """A turn, read. `content` is the text outside calls and reasoning; `errors` are one line per malformed
    call; `reasoning` is what the model thought, where its format marks that."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    reasoning: str = ""


Parser = Callable[[str], Parsed]

parsers: Registry[Parser] = Registry("tool-call format")

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@parsers.register("hermes")
def hermes(text: str) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    for index, match in enumerate(_HERMES.finditer(text)):
        if not match[0].endswith("</tool_call>"):
            errors.append("a <tool_call> was not closed")
            continue
        outcome = _call(match[1], f"call_{index}")
        (calls if isinstance(outcome, ToolCall) else errors).append(outcome)  # type: ignore[arg-type]
    return Parsed(_HERMES.sub("", text).strip(), tuple(calls), tuple(errors))


def _call(body: str, call_id: str) -> ToolCall | str:
    """One call, or what is wrong with it in one line."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"a tool call is not JSON: {error}"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'a tool call must be an object with "name" and "arguments"'
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return f'the "arguments" of {value["name"]} must be an object'
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False), call_id)
