"""Forms of answers as grammars; that SGLang keeps to them: tests/sglang."""

from __future__ import annotations

import json

import pytest

from asyncrl.conversation.forms import AnswerForm, followed, grammar
from asyncrl.conversation.parsers import Parser, hermes, parsers
from asyncrl.types import Message, ToolCall

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = tuple(
    json.dumps({"type": "function", "function": {"name": name, "parameters": SCHEMA}})
    for name in ("look", "see")
)


def test_a_schema_is_of_the_whole_turn() -> None:
    form = AnswerForm(schema=json.dumps(SCHEMA))
    found = json.loads(grammar(form, (), hermes, "<|im_start|>assistant\n"))
    assert found == {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}


def test_a_thought_that_the_prompt_opens_is_free() -> None:
    found = json.loads(grammar(AnswerForm(schema="{}"), (), hermes, "<think>\n"))["format"]
    thought, rest = found["elements"]
    assert (thought["content"], thought["end"]) == ({"type": "any_text"}, "</think>")
    assert rest == {"type": "json_schema", "json_schema": {}}


def test_calls_are_written_as_the_parser_reads_them() -> None:
    found = json.loads(grammar(AnswerForm(calls=("see",), once=True), TOOLS, hermes, ""))["format"]
    [tag] = found["tags"]
    assert (found["at_least_one"], found["stop_after_first"]) == (True, True)
    parsed = hermes(tag["begin"] + '{"a": 1}' + tag["end"], TOOLS)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("see", '{"a": 1}')]
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("form", "tools", "parser"),
    [
        (AnswerForm(), TOOLS, hermes),
        (AnswerForm(schema="{}"), TOOLS, hermes),  # it may call a tool
        (AnswerForm(calls=("see",)), TOOLS, parsers.load("llama3", "")),
    ],
)
def test_anything_else_is_free(form: AnswerForm, tools: tuple[str, ...], parser: Parser) -> None:
    assert grammar(form, tools, parser, "") == ""


OBJECT = AnswerForm(schema=json.dumps({**SCHEMA, "required": ["a"]}))


@pytest.mark.parametrize(
    ("form", "content", "calls", "does"),
    [
        (OBJECT, '{"a": "any value"}', "", True),
        (OBJECT, '{"b": 1}', "", False),
        (OBJECT, "[1]", "", False),
        (OBJECT, "a = 1", "", False),
        (OBJECT, "", "see", True),  # it may call a tool first
        (AnswerForm(schema='{"type": "array"}'), "[1]", "", True),
        (AnswerForm(calls=("see",)), "", "see see", True),
        (AnswerForm(calls=("see",)), "", "see look", False),
        (AnswerForm(calls=("see",)), "I see", "", False),
        (AnswerForm(once=True), "", "see see", False),
        (AnswerForm(once=True), "well", "", True),
    ],
)
def test_a_hint_is_followed_or_not(form: AnswerForm, content: str, calls: str, does: bool) -> None:
    message = Message("assistant", content, tuple(ToolCall(name, "{}") for name in calls.split()))
    assert followed(form, message) is does
