"""Checks of arguments by a server's schema: none holds the event loop, and none goes on for ever."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.isolation.calls import CallTimeout
from asyncrl.tools import Tool, Toolbox, checking
from asyncrl.tools.checking import Checker, check_schema
from tests.fakes.chat import sample

SLOW = "^(a+)+$"
HOSTILE = "a" * 40 + "!"


def chain(length: int) -> dict[str, Any]:
    """Each schema checks the next one twice, so that the last is checked 2 ** length times."""
    next_twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(length)}
    return {"$defs": {**next_twice, f"d{length}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


COSTLY = {
    "pattern": ({"properties": {"x": {"pattern": SLOW}}}, {"x": HOSTILE}),
    "patternProperties": ({"patternProperties": {SLOW: {}}}, {HOSTILE: 1}),
    "propertyNames": ({"propertyNames": {"pattern": SLOW}}, {HOSTILE: 1}),
    "references": (chain(40), {}),
    "uniqueItems": ({"properties": {"x": {"uniqueItems": True}}}, {"x": [{"a": n} for n in range(20_000)]}),
    "anyOf": (
        {"properties": {"x": {"items": {"anyOf": [{"const": -n} for n in range(1, 200)]}}}},
        {"x": list(range(2_000))},
    ),
    "texts": ({"properties": {"x": {"anyOf": [{"const": -n} for n in range(100)]}}}, {"x": "a" * 200_000}),
    "keys": ({"anyOf": [{"type": "string"} for _ in range(100)]}, {"a" * 200_000: 1}),
}


def complaints(schemas: dict[str, Any], *calls: tuple[str, dict[str, Any]]) -> tuple[list[Any], float]:
    """What is said of each call, and the longest time for which the event loop stood still."""
    pauses = [0.0]

    async def watch() -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.01)
            pauses.append(time.monotonic() - started - 0.01)

    async def main() -> list[Any]:
        checker = Checker(schemas)
        watching = asyncio.create_task(watch())
        answers = [await asyncio.gather(checker.complaint(*call), return_exceptions=True) for call in calls]
        watching.cancel()
        await checker.close()
        return [answer for (answer,) in answers]

    return asyncio.run(main()), max(pauses)


def test_a_costly_schema_costs_its_call_a_deadline_and_the_loop_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checking, "CHECK_SECONDS", 0.05)
    for name in ("pattern", "references"):
        schema, arguments = COSTLY[name]
        check_schema(name, schema)
        (answer,), longest = complaints({name: schema}, (name, arguments))
        assert isinstance(answer, CallTimeout), (name, answer)
        assert "checking the arguments took more than 0.05 s" in str(answer)
        assert longest < 1.0


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_schema_is_not_checked_in_the_loop(name: str) -> None:
    schema, arguments = COSTLY[name]
    check_schema(name, schema)
    checker = Checker({name: schema})
    assert checker._node_counts[name] * checking._count_nodes(arguments) > checking.MAX_INLINE_STEPS


def test_after_a_costly_call_others_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "PROCESS_COUNT", 1)
    monkeypatch.setattr(checking, "CHECK_SECONDS", 1.0)
    schema = COSTLY["pattern"][0]
    answers, _ = complaints({"t": schema}, ("t", {"x": HOSTILE}), ("t", {"x": "b"}), ("t", {"x": "aa"}))
    assert isinstance(answers[0], CallTimeout)
    assert answers[1:] == ["'b' does not match '^(a+)+$' - at `$.x`", ""]


def test_a_schema_of_an_old_draft_is_checked_in_a_process() -> None:
    old = {"$schema": "http://json-schema.org/draft-03/schema#", "properties": {"x": {"required": True}}}
    check_schema("t", old)
    assert Checker({"t": old})._node_counts["t"] == float("inf")


PLAIN = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 1},
        "y": {"anyOf": [{"type": "string"}, {"const": 0}]},
    },
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"x": 1, "y": "a"}, ""),
        ({"x": 0}, "0 is less than the minimum of 1 - at `$.x`"),
        ({}, "'x' is a required property - at `$`"),
        ({"x": 1, "z": 1}, "Additional properties are not allowed"),
    ],
)
def test_a_plain_schema_is_checked_at_once(arguments: dict[str, Any], complaint: str) -> None:
    async def main() -> str:
        checker = Checker({"t": PLAIN})
        complaint = await checker.complaint("t", arguments)
        assert checker._process_pool is None
        return complaint

    assert complaint in asyncio.run(main())


@pytest.mark.parametrize(("schema", "processes"), [(PLAIN, 0), (COSTLY["pattern"][0], 1)])
def test_the_start_of_a_process_does_not_count_as_time_of_a_call(
    schema: dict[str, Any], processes: int
) -> None:
    async def main() -> int:
        checker = Checker({"t": schema})
        tool = Tool("t", {}, len, json.loads, begin=checker.warm, end=checker.close, check=checker.complaint)
        toolbox = Toolbox({"t": tool})
        await toolbox.session(sample()).open()
        ready = len(checker._process_pool.children) if checker._process_pool else 0
        await toolbox.close()
        return ready

    assert asyncio.run(main()) == processes


def test_a_process_that_cannot_start_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def warm() -> None:
        raise OSError("no process")

    tool = Tool("t", {}, len, json.loads, begin=warm)
    asyncio.run(Toolbox({"t": tool}).session(sample()).open())
    assert "tool t failed (later failures are not logged): OSError: no process" in caplog.text


def ref(where: str) -> dict[str, Any]:
    return {"$ref": where}


def through_components(properties: dict[str, Any]) -> dict[str, Any]:
    """A schema whose other schemas are where the standard has none, as in OpenAPI's documents."""
    components = {
        "A": {"properties": properties},
        "B": {"allOf": [ref("#/components/B")]},
        "tree": {"items": ref("#/components/tree")},
        "nothing": 7,
        "typed": {"properties": {"x": {"type": 3}}},
    }
    return {"components": components, "properties": {"a": ref("#/components/A")}}


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        (ref("#"), "contains a reference loop at '#'"),
        ({"properties": {"x": ref("#/properties/x")}}, "contains a reference loop at '#/properties/x'"),
        (
            {"$defs": {"a": ref("#/$defs/b"), "b": ref("#/$defs/a")}, **ref("#/$defs/a")},
            "contains a reference loop",
        ),
        ({"allOf": [{"anyOf": [ref("#")]}]}, "contains a reference loop"),
        ({"if": {"not": ref("#")}}, "contains a reference loop"),
        (
            {"$anchor": "here", "items": {"$anchor": "item", "oneOf": [ref("#item")]}},
            "contains a reference loop",
        ),
        ({"dependentSchemas": {"x": ref("#")}}, "contains a reference loop"),
        ({"$dynamicAnchor": "top", "allOf": [{"$dynamicRef": "#top"}]}, "contains a reference loop"),
        (
            ref("https://example.org/schema.json"),
            "refers to 'https://example.org/schema.json', which the schema lacks",
        ),
        (
            {"properties": {"x": ref("file:///etc/passwd")}},
            "refers to 'file:///etc/passwd', which the schema lacks",
        ),
        ({"items": ref("#/$defs/none")}, "refers to '/$defs/none', which the schema lacks"),
        (through_components({"b": ref("#/components/B")}), "contains a reference loop at '#/components/B'"),
        (
            through_components({"b": ref("#/components/none")}),
            "refers to '/components/none', which the schema",
        ),
        ({**ref("#/default/a"), "default": 7}, "refers to '#/default/a', which the schema lacks"),
        ({**ref("#/type/a"), "type": "object"}, "refers to '#/type/a', which the schema lacks"),
        (
            through_components({"b": ref("#/components/nothing")}),
            "is not a valid JSON schema: 7 is not of type",
        ),
        (through_components({"b": ref("#/components/typed")}), "is not a valid JSON schema: 3 is not valid"),
        ({"type": 3}, "not a valid JSON schema"),
        ({"$schema": 7}, "not a valid JSON schema: 7 is not of type 'string'"),
        (7, "not a valid JSON schema: 7 is not of type"),
        (nested(3000), "nested too deeply"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_at_the_start(schema: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=r"^the schema of 't'") as refused:
        check_schema("t", schema)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"children": {"items": ref("#")}}},  # a tree
        {"$defs": {"a": {"items": ref("#/$defs/a")}}, "properties": {"x": ref("#/$defs/a")}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"a": {}},
            "properties": {"x": ref("#/definitions/a")},
        },
        {"$defs": {"a": {"type": "string"}}, "allOf": [ref("#/$defs/a"), ref("#/$defs/a")]},
        ref("https://json-schema.org/draft/2020-12/schema"),
        {"properties": {"x": ref("http://json-schema.org/draft-04/schema#")}},  # of an older draft
        through_components({"b": ref("#/components/tree")}),
        {},
        True,
    ],
)
def test_a_schema_that_goes_into_the_value_is_taken(schema: Any) -> None:
    check_schema("t", schema)
