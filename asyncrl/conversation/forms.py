"""The form that an agent wants an answer to have, as a grammar for engines that can keep to one.

Only validation uses it: in training the log-probs must be of the distribution that the model has by itself.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from asyncrl.conversation.parsers import Parser, hermes
from asyncrl.conversation.parsers.base import THINK


class AnswerForm(msgspec.Struct, frozen=True):
    """`schema`: JSON schema of the content, as text (empty: any content), where there are no tools. `calls`:
    names of tools, one of which is called; `once`: and nothing after it."""

    schema: str = ""
    calls: tuple[str, ...] = ()
    once: bool = False


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


def _hermes(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}},
        "end": "}\n</tool_call>",
    }
