from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.rollout.parsers import hermes, parsers

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


def test_plain_text_has_no_calls() -> None:
    parsed = hermes("The answer is 4.")
    assert (parsed.content, parsed.calls, parsed.errors) == ("The answer is 4.", (), ())


def test_calls_and_content_are_separated() -> None:
    parsed = hermes(f"Let me see. {CALL}{CALL} Done.")
    assert parsed.content == "Let me see.  Done."
    assert [(call.name, json.loads(call.arguments), call.id) for call in parsed.calls] == [
        ("add", {"a": 1}, "call_0"),
        ("add", {"a": 1}, "call_1"),
    ]
    assert not parsed.errors


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<tool_call>{</tool_call>", "not JSON"),
        ("<tool_call>[]</tool_call>", "must be an object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "must be an object"),
        ('<tool_call>{"name": 3}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '"arguments" of f'),
        ('<tool_call>{"name": "f"}', "not closed"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "not JSON"),
    ],
)
def test_malformed_calls_are_recorded(text: str, complaint: str) -> None:
    parsed = hermes(text)
    assert not parsed.calls
    assert len(parsed.errors) == 1
    assert complaint in parsed.errors[0]
    assert "\n" not in parsed.errors[0]


def test_a_good_call_survives_an_unclosed_one() -> None:
    parsed = hermes('<tool_call>{"name": ' + CALL)
    assert len(parsed.calls) == len(parsed.errors) == 1


@given(
    st.text() | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"', "x"])).map("".join)
)
def test_never_raises(text: str) -> None:
    parsed = hermes(text)
    assert "<tool_call>" not in parsed.content


@given(st.text(min_size=1), st.dictionaries(st.text(), json_values))
def test_what_json_can_say_comes_back(name: str, arguments: dict[str, object]) -> None:
    body = json.dumps({"name": name, "arguments": arguments})
    parsed = hermes(f"<tool_call>\n{body}\n</tool_call>")
    if "tool_call>" not in body:
        assert parsed.calls[0].name == name
        assert json.loads(parsed.calls[0].arguments) == arguments


def test_registry_suggests_names() -> None:
    assert parsers.get("hermes") is hermes
    with pytest.raises(ConfigError, match="did you mean hermes"):
        parsers.get("herms")
