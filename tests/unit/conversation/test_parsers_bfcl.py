"""The right calls of a public benchmark, written as templates do, are read as they are."""

from __future__ import annotations

import json

import pytest

from asyncrl.conversation.chat import Chat
from asyncrl.conversation.parsers import detect, parsers
from tests.fakes.bfcl import Calls, Question, questions
from tests.fakes.families import FAMILIES, tokenizer_of
from tests.unit.conversation.call_writers import WRITERS

TEMPLATES = ("deepseek-v3-0324", "glm4.5", "llama3.1", "mistral-v3", "mistral-v7", "qwen2.5", "qwen3")


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    question_list = questions()
    assert sum(len(question.calls) for question in question_list) > 2900
    return question_list


def check(name: str, written: list[tuple[str, Question, Calls]]) -> None:
    wrong = []
    for text, question, calls in written:
        parsed = parsers.get(name)(text, question.tools)
        read = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
        if (read, parsed.content, parsed.errors) != (calls, "", ()):
            wrong.append((parsed, calls))
    assert not wrong, f"{len(wrong)} of {len(written)} turns, the first: {wrong[0]}"


@pytest.mark.parametrize("name", parsers.names())
def test_right_calls_are_read_as_they_are(name: str, asked: list[Question]) -> None:
    check(name, [(WRITERS[name](question.calls), question, question.calls) for question in asked])


@pytest.mark.parametrize("name", TEMPLATES)
def test_right_calls_are_read_as_a_real_template_writes_them(name: str, asked: list[Question]) -> None:
    """A tenth of the questions: a template takes a millisecond for each."""
    chat = Chat(tokenizer_of(name))
    fitting = detect(tokenizer_of(name).chat_template, chat.written_call())
    assert fitting
    few = [(question, question.calls[: 1 if FAMILIES[name].one_call else None]) for question in asked[::10]]
    check(fitting, [(rendered(name, calls), question, calls) for question, calls in few])


def rendered(name: str, calls: Calls) -> str:
    """A turn of these calls, as the family's template writes it after a question."""
    openai_calls = [
        {"id": f"call{n:05}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for n, (tool, arguments) in enumerate(calls)
    ]
    turn = {"role": "assistant", "tool_calls": openai_calls}
    if name == "deepseek-v3-0324":  # arguments are text
        turn["content"] = None
        for call in openai_calls:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    elif not name.startswith("mistral"):
        turn["content"] = ""
    question = {"role": "user", "content": "q"}
    template = tokenizer_of(name).apply_chat_template
    prompt = template([question], tokenize=False, add_generation_prompt=True)
    text = template([question, turn], tokenize=False)
    assert text.startswith(prompt)
    return text.removeprefix(prompt).partition(FAMILIES[name].ends[1])[0]
