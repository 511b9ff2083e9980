"""Forms of answers are counted."""

from __future__ import annotations

import json

import pytest

from asyncrl.conversation.requests import AnswerForm, followed
from asyncrl.types import Message, ToolCall

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

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
