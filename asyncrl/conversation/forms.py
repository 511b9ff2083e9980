"""The form that an agent wants an answer to have, as a grammar for engines that can keep to one.

Only validation uses the grammar: in training the log-probs must be of the distribution that the model has by
itself, and the form is a hint.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from asyncrl.conversation.parsers import Parser, hermes
from asyncrl.conversation.parsers.base import THINK
from asyncrl.errors import UNDECODABLE
from asyncrl.types import Message


class AnswerForm(msgspec.Struct, frozen=True):
    """`schema`: JSON schema of the content, as text (empty: any content), where there are no tools. `calls`:
    names of tools, one of which is called; `once`: and nothing after it."""

    schema: str = ""
    calls: tuple[str, ...] = ()
    once: bool = False


class JsonSchema(msgspec.Struct, frozen=True):
    """The part of a schema that shows if an answer followed it: that it is an object with these keys."""

    type: Any = None
    required: list[str] = []


def grammar(form: AnswerForm, tools: tuple[str, ...], parser: Parser, prompt: str) -> str:
    """A structural tag of xgrammar, which SGLang reads, as JSON text; '' where the form asks for nothing, or
    for calls in a format that is not known here. `prompt`: the end of it; a thought that it opens is free."""
    inner: dict[str, Any]
    if form.calls and parser is hermes:
        named = [tool for tool in map(json.loads, tools) if tool["function"]["name"] in form.calls]
        tags = [_hermes(tool["function"]) for tool in named]
        inner = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
        inner["stop_after_first"] = form.once
    elif form.schema and not tools:
        inner = {"type": "json_schema", "json_schema": json.loads(form.schema)}
    else:
        return ""
    if prompt.rstrip().endswith(THINK.open):
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THINK.close}
        inner = {"type": "sequence", "elements": [thought, inner]}
    return json.dumps({"type": "structural_tag", "format": inner})


def followed(form: AnswerForm, message: Message) -> bool:
    """True if an answer has the form, as far as `JsonSchema` says it. Instead of content there may be calls,
    where the agent sends tools."""
    called = {call.name for call in message.tool_calls}
    if form.once and len(message.tool_calls) > 1:
        return False
    if form.calls:
        return bool(called) and called <= set(form.calls)
    return bool(called) or not form.schema or _fits(message.content, form.schema)


def _fits(content: str, schema: str) -> bool:
    try:
        value, wanted = msgspec.json.decode(content), msgspec.json.decode(schema, type=JsonSchema)
    except UNDECODABLE:
        return False
    return wanted.type != "object" or (isinstance(value, dict) and value.keys() >= set(wanted.required))


def _hermes(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}},
        "end": "}\n</tool_call>",
    }
