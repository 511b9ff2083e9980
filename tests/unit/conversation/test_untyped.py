"""Values of formats that do not write types are read by the schema of the tool."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.conversation.parsers import parsers
from asyncrl.tools.schema import signature_of
from tests.unit.conversation.call_writers import WRITERS, values

FORMATS = ("glm", "qwen3_coder")
ANY_TYPE: dict[str, Any] = {}
TEXT = {"type": "string"}
NUMBER = {"type": "number"}
MAYBE = {"anyOf": [TEXT, {"type": "null"}]}
LEVEL = {"$ref": "#/$defs/Level"}
DEFS = {"Level": {"enum": [1, 2]}, "Loop": {"$ref": "#/$defs/Loop"}}


def tool(name: str, **arguments: Any) -> str:
    parameters = {"type": "object", "properties": arguments, "$defs": DEFS}
    return json.dumps({"type": "function", "function": {"name": name, "parameters": parameters}})


def read(name: str, text: str, *tools: str) -> dict[str, Any]:
    """What the parser makes of the argument `a` of a call of `f`, written as it is."""
    written = {
        "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "qwen3_coder": f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>",
    }[name]
    (call,) = parsers.get(name)(written, tools).calls
    arguments: dict[str, Any] = json.loads(call.arguments)
    return arguments


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT, '{"a": 1}', '{"a": 1}'),
        (TEXT, "2024", "2024"),
        (TEXT, "null", "null"),
        (TEXT, "True", "True"),
        (TEXT, '"x"', '"x"'),
        (TEXT, " x ", " x "),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, " 7\n", 7),
        ({"type": "integer"}, "seven", "seven"),
        (NUMBER, "1.10", 1.1),
        (NUMBER, "1e-05", 1e-5),
        (NUMBER, "12", 12),
        ({"type": "float"}, "1.10", 1.1),
        ({"type": "null"}, "None", None),
        (MAYBE, "None", None),
        (MAYBE, "null", None),
        (MAYBE, "Nones", "Nones"),
        (MAYBE, "2024", "2024"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "2024", 2024),
        ({"type": ["string", "integer"]}, "02024", "02024"),
        ({"oneOf": [TEXT, NUMBER]}, "1.10", "1.10"),
        ({"oneOf": [TEXT, NUMBER]}, "1.5", 1.5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": None}, "None", None),
        (LEVEL, "2", 2),
        ({"$ref": "#/$defs/Loop"}, "2", 2),
        ({"$ref": "#/$defs/Lost"}, "2", 2),
        ({"type": "array"}, "[1, null]", [1, None]),
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "object"}, "{'a': {'b': 1}}", {"a": {"b": 1}}),
        ({"type": "object"}, "{'a': open('x')}", "{'a': open('x')}"),
        ({"type": ["string", "array"]}, "['a']", "['a']"),
        ({"type": ["string", "array"]}, '["a"]', ["a"]),
        (ANY_TYPE, '{"a": 1}', {"a": 1}),
        (ANY_TYPE, "3.10", "3.10"),
        (ANY_TYPE, "None", None),
        (ANY_TYPE, "True", True),
        ({"type": "any"}, "2024", 2024),
        (True, "2024", 2024),
        ({"enum": 3, "anyOf": {"x": 1}, "type": {"y": 2}}, "2024", 2024),
    ],
)
def test_a_text_is_what_the_schema_says(schema: Any, text: str, value: Any) -> None:
    for name in FORMATS:
        assert read(name, text, tool("other", a=TEXT), tool("f", a=schema)) == {"a": value}, name


@pytest.mark.parametrize("name", FORMATS)
def test_without_a_schema_a_text_is_what_json_and_python_call_so(name: str) -> None:
    for tools in (
        (),
        ("",),
        (tool("other", a=TEXT),),
        (tool("f", b=TEXT),),
        ('{"function": {"name": "f"}}',),
    ):
        assert read(name, "True", *tools) == {"a": True}
        assert read(name, "1.10", *tools) == {"a": "1.10"}


# -- what the template writes for a value comes back as that value ----------------------------------------


def kind(value: Any) -> dict[str, str]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": kinds.get(type(value), "null")}


def writable(value: Any) -> bool:
    """No tag anywhere in it, keys of nested objects included: the formats have no escape for one."""
    return not any(mark in json.dumps(value) for mark in ("<", ">"))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(made=st.dictionaries(st.sampled_from("abc"), values.filter(writable), min_size=1))
def test_every_value_comes_back(name: str, made: dict[str, Any]) -> None:
    shown = tool("f", **{key: kind(value) for key, value in made.items()})
    parsed = parsers.get(name)(WRITERS[name]([("f", made)]), (shown,))
    assert [json.loads(call.arguments) for call in parsed.calls] == [made], parsed.errors


class Mail(msgspec.Struct):
    to: str
    urgent: bool = False


def send(
    text: str,
    count: int,
    share: float,
    loud: bool,
    level: Literal[1, 2],
    mail: Mail,
    note: str | None,
    ids: list[str],
) -> str:
    """Send."""
    return text


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_gets_what_its_signature_says(name: str) -> None:
    schema, decode = signature_of(send)
    mail = {"to": "null", "urgent": True}
    made = {
        "text": '{"a": 1}',
        "count": 2024,
        "share": 1.0,
        "loud": True,
        "level": 2,
        "mail": mail,
        "note": None,
        "ids": ["1"],
    }
    (call,) = parsers.get(name)(WRITERS[name]([("send", made)]), (json.dumps(schema),)).calls
    assert decode(call.arguments) == {**made, "mail": Mail("null", True)}
