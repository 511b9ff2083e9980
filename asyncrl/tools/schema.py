"""Turns a typed signature and a docstring into a JSON schema and a check of what the model wrote."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from asyncrl.errors import ConfigError

Decode = Callable[[str], dict[str, Any]]
"""The text of a call's arguments -> keyword arguments. Raises what the model is to read."""


def signature_of(function: Callable[..., Any], name: str, described: Any) -> tuple[dict[str, Any], Decode]:
    """Read the signature of a function, or a method without its `self`: OpenAI's schema of it, and a check of
    arguments against that. `described` bears the docstring."""
    description, notes = docstring(described)
    struct = _struct(function, name, notes)
    decoder = msgspec.json.Decoder(struct, strict=False)
    schema = _schema(name, description, struct)
    return schema, lambda text: msgspec.structs.asdict(decoder.decode(text or "{}"))


def docstring(described: Any) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the notes of a Google-style `Args:` section (one line each)."""
    text = inspect.cleandoc(described.__doc__ or "")
    head, _, tail = text.partition("Args:\n")
    notes = {}
    for line in tail.splitlines():
        if not (match := re.match(r"\s+(\w+)(?:\s*\(.*?\))?:\s*(.+)", line)):
            break
        notes[match[1]] = match[2].strip()
    return " ".join(head.split("\n\n")[0].split()), notes


def outline(schema: dict[str, Any]) -> str:
    """The parameters in one line, for a reply to a wrong call: `word: string, limit?: integer`."""
    parameters = schema["function"].get("parameters", {})
    required = parameters.get("required", ())
    parts = [
        f"{name}{'' if name in required else '?'}: {_kind(part)}"
        for name, part in parameters.get("properties", {}).items()
    ]
    return ", ".join(parts) or "no arguments"


def _kind(part: Any) -> str:
    if not isinstance(part, dict):
        return "any"
    if "enum" in part:
        return " | ".join(map(str, part["enum"]))
    if "anyOf" in part:
        return " | ".join(map(_kind, part["anyOf"]))
    return str(part.get("type", "any"))


def _struct(function: Callable[..., Any], name: str, notes: dict[str, str]) -> type[msgspec.Struct]:
    """The parameters as a Struct that refuses unknown names."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for key, parameter in inspect.signature(function).parameters.items():
        if key == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name!r}: parameter {key!r} cannot be passed by name")
        if key not in hints:
            raise ConfigError(f"tool {name!r}: parameter {key!r} needs a type annotation")
        hint = Annotated[hints[key], msgspec.Meta(description=notes[key])] if key in notes else hints[key]
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((key, hint, *default))
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def _schema(name: str, description: str, struct: type[msgspec.Struct]) -> dict[str, Any]:
    _, parts = msgspec.json.schema_components((struct,), ref_template="#/$defs/{name}")
    parts = dict(parts)
    parameters = {k: v for k, v in parts.pop(name).items() if k in ("type", "properties", "required")}
    if parts:
        parameters["$defs"] = parts
    body = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": body}
