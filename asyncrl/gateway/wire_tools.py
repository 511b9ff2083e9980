"""Translates tools of OpenAI's Responses API.

To the model all of them are functions: those of a namespace have its name in front of theirs, and a free-form
tool has its text as the one argument. Tools that OpenAI would run are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from asyncrl.gateway.exchange import ApiError

FUNCTION = ("description", "parameters", "strict")  # parts of a function, beside its name
TEXT = "input"  # the argument of a free-form tool
FREE_FORM = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT]}


class WireTool(NamedTuple):
    """Holds a tool as the client knows it, and `function`, its schema for the model."""

    function: dict[str, Any]
    name: str
    namespace: str = ""
    free_form: bool = False

    def call(self, arguments: str) -> dict[str, Any]:
        """Return the parts of a call's item that depend on the tool."""
        named = {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}
        if not self.free_form:
            return {"type": "function_call", **named, "arguments": arguments}
        text = json.loads(arguments).get(TEXT)
        return {"type": "custom_tool_call", **named, "input": text if isinstance(text, str) else arguments}


def wire_tools(given: Any, namespace: str = "") -> Iterator[WireTool]:
    """Read the tools of a request that the model can call. ApiError for what is no tool."""
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise ApiError(400, f"the tools of the namespace {namespace!r} are no list of objects")
    for tool in given:
        name = str(tool.get("name", ""))
        function = {"name": known_as(name, namespace)}
        match tool.get("type"):
            case "function":
                kept = {key: tool[key] for key in FUNCTION if key in tool}
                yield WireTool(function | kept, name, namespace)
            case "custom":
                said = f"{tool.get('description', '')}{_grammar(tool.get('format'))}".strip()
                free_form = {"description": said, "parameters": FREE_FORM}
                yield WireTool(function | free_form, name, namespace, free_form=True)
            case "namespace":
                yield from wire_tools(tool.get("tools") or [], name)


def _grammar(form: Any) -> str:
    """Describe the form of a free-form tool's text in words; a grammar would change the sampling."""
    rules = form.get("definition") if isinstance(form, dict) else None
    return f"\nThe text has this form:\n{rules}" if rules else ""


def known_as(name: str, namespace: str) -> str:
    """Return the name of a tool as the model sees it."""
    return f"{namespace}__{name}" if namespace else name
