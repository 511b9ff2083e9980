"""The right calls of a public benchmark, written as templates do, are read as they are."""

from __future__ import annotations

import json

import pytest

from asyncrl.conversation.parsers import parsers
from tests.fakes.bfcl import Question, questions
from tests.unit.conversation.call_writers import WRITERS


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    found = questions()
    assert sum(len(question.calls) for question in found) > 2900
    return found


@pytest.mark.parametrize("name", parsers.names())
def test_right_calls_are_read_as_they_are(name: str, asked: list[Question]) -> None:
    wrong = []
    for question in asked:
        parsed = parsers.get(name)(WRITERS[name](question.calls), question.tools)
        read = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
        if (read, parsed.content, parsed.errors) != (question.calls, "", ()):
            wrong.append((parsed, question.calls))
    assert not wrong, f"{len(wrong)} of {len(asked)} questions, the first: {wrong[0]}"
