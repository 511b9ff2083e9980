"""Reads arguments in formats that do not write types (Qwen3-Coder, GLM), by the tool's schema.

the tools' schemas ──_allowed_kinds──► the JSON types that an argument may have ─┐
                                       what the model wrote ─────────────────────┴─value_of──► the value
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from asyncrl.conversation.parsers.values import Malformed, expression, json_at, literal

Kinds = frozenset[str]

_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
ANY: Kinds = frozenset(_KINDS.values())
NO_TEXT = ANY - {"string"}
# Type names that JSON Schema lacks, by which functions of Python and of other languages are described.
_ALIASES = {
    "str": "string",
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "list": "array",
    "tuple": "array",
    "dict": "object",
}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}  # as Qwen3-Coder's template writes them
_MAX_NESTING = 16  # levels of nested references and alternatives


class Untyped(NamedTuple):
    """The text of an argument whose type is not known yet."""

    text: str


def with_types(name: str, arguments: Mapping[str, Any], tools: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a call of the tool `name`, each text read by the tool's schema."""
    if not any(isinstance(value, Untyped) for value in arguments.values()):
        return dict(arguments)
    kinds = _kinds_of(tools).get(name, {})
    return {
        key: value_of(value.text, kinds.get(key, ANY)) if isinstance(value, Untyped) else value
        for key, value in arguments.items()
    }


def value_of(text: str, allowed_kinds: Kinds) -> Any:
    """Read a text as a value of the allowed types. If strings are allowed, the text stays a string unless it
    is spelled exactly as a value of another allowed type (1.10 and "quoted" are not). A text that no allowed
    type reads stays a string, too: the tool then reports the fault."""
    value = _read_value(text, python_literals="string" not in allowed_kinds)
    if "string" not in allowed_kinds:
        return value
    if isinstance(value, str) or _KINDS[type(value)] not in allowed_kinds:
        return text
    return value if isinstance(value, dict | list) or text in (json.dumps(value), str(value)) else text


def _read_value(text: str, *, python_literals: bool) -> Any:
    """Read a text as JSON or as a word of Python; with `python_literals`, also as a list or dict of Python.
    Any other text is returned unchanged."""
    stripped = text.strip()
    if stripped in _PYTHON_WORDS:
        return _PYTHON_WORDS[stripped]

    with suppress(Malformed):
        value, end = json_at(stripped, 0)
        if end == len(stripped):
            return value

    with suppress(Malformed):
        if python_literals and stripped[:1] in ("[", "{"):
            return literal(expression(stripped, "no list"))

    return text


@lru_cache(maxsize=256)
def _kinds_of(tools: tuple[str, ...]) -> dict[str, dict[str, Kinds]]:
    """Return the types of each argument of each tool, by the tools' schemas."""
    kinds_by_tool: dict[str, dict[str, Kinds]] = {}
    for tool in tools:
        function = _as_object(_as_object(json.loads(tool or "{}")).get("function"))
        parameters = _as_object(function.get("parameters"))
        kinds_by_tool[str(function.get("name"))] = {
            key: _allowed_kinds(schema, parameters, _MAX_NESTING)
            for key, schema in _as_object(parameters.get("properties")).items()
        }

    return kinds_by_tool


def _allowed_kinds(schema: Any, root: dict[str, Any], levels_left: int) -> Kinds:
    """Return the types of the values that a schema allows; ANY if the schema does not tell."""
    if not isinstance(schema, dict) or not levels_left:
        return ANY
    if "$ref" in schema:
        return _allowed_kinds(_resolve_reference(str(schema["$ref"]), root), root, levels_left - 1)
    if "const" in schema:
        return frozenset({_KINDS.get(type(schema["const"]), "string")})
    if values := _as_list(schema.get("enum")):
        return frozenset(_KINDS.get(type(value), "string") for value in values)

    if alternatives := _as_list(schema.get("anyOf")) or _as_list(schema.get("oneOf")):
        return frozenset().union(
            *(_allowed_kinds(alternative, root, levels_left - 1) for alternative in alternatives)
        )

    type_names = _as_list(schema.get("type")) or [schema.get("type")]
    kinds = {_ALIASES.get(name, name) for name in map(str, type_names)}
    if "number" in kinds:
        kinds.add("integer")

    return frozenset(kinds) if kinds and kinds <= ANY else ANY


def _resolve_reference(reference: str, root: dict[str, Any]) -> Any:
    """Follow a reference within the parameters (`#/$defs/name`); None if the reference leads nowhere."""
    target: Any = root
    for part in reference.removeprefix("#/").split("/"):
        target = _as_object(target).get(part)
    return target


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
