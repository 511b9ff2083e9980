"""Turns a typed signature and a docstring into a JSON schema and a check of the model's arguments."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from asyncrl.errors import ConfigError

Decode = Callable[[str], dict[str, Any]]
"""Converts the text of a call's arguments to keyword arguments. Raises errors for the model to read."""


def signature_of(
    function: Callable[..., Any], name: str = "", documented: Any = None
) -> tuple[dict[str, Any], Decode]:
    """Return OpenAI's schema of a function, or of a method without `self`, and a function that checks the
    text of arguments. `name`: for the model, by default the function's; `documented` has the docstring, by
    default the function. ConfigError for a parameter without a type, or one that has no name."""
    name = name or function.__name__
    description, argument_notes = read_docstring(documented or function)
    struct = _parameter_struct(function, name, argument_notes)
    decoder = msgspec.json.Decoder(struct, strict=False)

    _, components = msgspec.json.schema_components((struct,), ref_template="#/$defs/{name}")
    definitions = dict(components)
    struct_schema = definitions.pop(name)
    parameters = {
        keyword: struct_schema[keyword]
        for keyword in ("type", "properties", "required")
        if keyword in struct_schema
    }
    if definitions:
        parameters["$defs"] = definitions

    function_schema = {"name": name, "description": description, "parameters": parameters}
    schema = {"type": "function", "function": function_schema}
    return schema, lambda text: msgspec.structs.asdict(decoder.decode(text or "{}"))


def read_docstring(documented: Any) -> tuple[str, dict[str, str]]:
    """Return the first paragraph, and the notes of a Google-style `Args:` section (one line per argument)."""
    text = inspect.cleandoc(documented.__doc__ or "")
    description, _, argument_section = text.partition("Args:\n")
    argument_notes = {}

    for line in argument_section.splitlines():
        if not (match := re.match(r"\s+(\w+)(?:\s*\(.*?\))?:\s*(.+)", line)):
            break
        argument_notes[match[1]] = match[2].strip()
    return " ".join(description.split("\n\n")[0].split()), argument_notes


def outline_parameters(schema: dict[str, Any]) -> str:
    """Describe the parameters in one line, for a reply to a wrong call: `word: string, limit?: integer`."""
    parameters = schema["function"].get("parameters", {})
    required_names = parameters.get("required", ())
    parameter_texts = [
        f"{name}{'' if name in required_names else '?'}: {_type_name(part)}"
        for name, part in parameters.get("properties", {}).items()
    ]
    return ", ".join(parameter_texts) or "no arguments"


def _type_name(part: Any) -> str:
    if not isinstance(part, dict):
        return "any"
    if "enum" in part:
        return " | ".join(map(str, part["enum"]))
    if "anyOf" in part:
        return " | ".join(map(_type_name, part["anyOf"]))
    return str(part.get("type", "any"))


def _parameter_struct(
    function: Callable[..., Any], name: str, argument_notes: dict[str, str]
) -> type[msgspec.Struct]:
    """Make a Struct of the parameters that refuses unknown names."""
    type_hints = typing.get_type_hints(function, include_extras=True)
    fields: list[Any] = []

    for key, parameter in inspect.signature(function).parameters.items():
        if key == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name!r}: parameter {key!r} cannot be passed by name")
        if key not in type_hints:
            raise ConfigError(f"tool {name!r}: parameter {key!r} needs a type annotation")
        hint = type_hints[key]
        if key in argument_notes:
            hint = Annotated[hint, msgspec.Meta(description=argument_notes[key])]
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((key, hint, *default))

    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
