"""Reads arguments in formats that do not write types (Qwen3-Coder, GLM), by the tool's schema.

the tools' schemas ──_kinds──► the JSON types that an argument may have ─┐
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
# Types that JSON Schema has not, as functions of Python and other languages are described.
_ALIASES = {
    "str": "string",
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "list": "array",
    "tuple": "array",
    "dict": "object",
}
_PYTHON = {"True": True, "False": False, "None": None}  # as Qwen3-Coder's template writes them
_DEEPEST = 16  # references and alternatives within each other


class Untyped(NamedTuple):
    """The text of an argument."""

    text: str


def with_types(name: str, arguments: Mapping[str, Any], tools: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a call of the tool `name`, each text read by its schema."""
    if not any(isinstance(value, Untyped) for value in arguments.values()):
        return dict(arguments)
    kinds = _kinds_of(tools).get(name, {})
    return {
        key: value_of(value.text, kinds.get(key, ANY)) if isinstance(value, Untyped) else value
        for key, value in arguments.items()
    }


def value_of(text: str, kinds: Kinds) -> Any:
    """Read a text where values of these types are allowed. Where text is, it stays text unless it is spelled
    just as another allowed value would be (1.10 and "quoted" are not). What no allowed type reads stays text,
    too: the tool then says what is wrong."""
    value = _read(text, python="string" not in kinds)
    if "string" not in kinds:
        return value
    if isinstance(value, str) or _KINDS[type(value)] not in kinds:
        return text
    return value if isinstance(value, dict | list) or text in (json.dumps(value), str(value)) else text


def _read(text: str, *, python: bool) -> Any:
    """The JSON value that a text is, or one of Python's words; with `python`, also its lists and dicts."""
    stripped = text.strip()
    if stripped in _PYTHON:
        return _PYTHON[stripped]
    with suppress(Malformed):
        value, end = json_at(stripped, 0)
        if end == len(stripped):
            return value
    with suppress(Malformed):
        if python and stripped[:1] in ("[", "{"):
            return literal(expression(stripped, "no list"))
    return text


@lru_cache(maxsize=256)
def _kinds_of(tools: tuple[str, ...]) -> dict[str, dict[str, Kinds]]:
    """Return the types of each argument of each tool, by the tools' schemas."""
    found: dict[str, dict[str, Kinds]] = {}
    for tool in tools:
        function = _object(_object(json.loads(tool or "{}")).get("function"))
        parameters = _object(function.get("parameters"))
        found[str(function.get("name"))] = {
            key: _kinds(schema, parameters, _DEEPEST)
            for key, schema in _object(parameters.get("properties")).items()
        }
    return found


def _kinds(schema: Any, root: dict[str, Any], depth: int) -> Kinds:
    """The types of the values that a schema allows; ANY where it does not say."""
    if not isinstance(schema, dict) or not depth:
        return ANY
    if "$ref" in schema:
        return _kinds(_target(str(schema["$ref"]), root), root, depth - 1)
    if "const" in schema:
        return frozenset({_KINDS.get(type(schema["const"]), "string")})
    if values := _list(schema.get("enum")):
        return frozenset(_KINDS.get(type(value), "string") for value in values)
    if alternatives := _list(schema.get("anyOf")) or _list(schema.get("oneOf")):
        return frozenset().union(*(_kinds(each, root, depth - 1) for each in alternatives))
    types = _list(schema.get("type")) or [schema.get("type")]
    kinds = {_ALIASES.get(name, name) for name in map(str, types)}
    if "number" in kinds:
        kinds.add("integer")
    return frozenset(kinds) if kinds and kinds <= ANY else ANY


def _target(reference: str, root: dict[str, Any]) -> Any:
    """Follow a reference within the parameters (`#/$defs/name`); None if that is nothing."""
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = _object(found).get(part)
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
