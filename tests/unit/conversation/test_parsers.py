from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Iterator
from functools import cache
from keyword import iskeyword
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.conversation.parsers import Parsed, Parser, hermes, load_parser, parse_turn, parsers
from asyncrl.conversation.parsers.base import MAX_CALLS
from asyncrl.errors import ConfigError
from tests.unit.conversation.call_writers import WRITERS, can_write, values

CORPORA = Path(__file__).parents[2] / "fixtures" / "parsers"
NAMES = parsers.names()
few = settings(max_examples=25, deadline=None)  # of each format


@cache
def corpus(name: str) -> list[dict[str, Any]]:
    return yaml.load((CORPORA / f"{name}.yaml").read_text(), yaml.CSafeLoader)  # ten times as fast


CASES = [pytest.param(name, case, id=f"{name}: {case['case']}") for name in NAMES for case in corpus(name)]
TEXTS = {name: [case["text"] for case in corpus(name)] for name in NAMES}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_corpus(name: str, case: dict[str, Any]) -> None:
    parsed = parsers.get(name)(case["text"])
    assert [[call.name, json.loads(call.arguments)] for call in parsed.calls] == case.get("calls", [])
    assert parsed.content == case.get("content", "")
    assert parsed.reasoning == case.get("reasoning", "")
    assert len(parsed.errors) == len(case.get("errors", []))
    for error, complaint in zip(parsed.errors, case.get("errors", []), strict=True):
        assert complaint in error
        assert "\n" not in error and len(error) < 200
    if "ids" in case:
        assert [call.id for call in parsed.calls] == case["ids"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_has_a_corpus_of_malformed_calls(name: str) -> None:
    assert sum("errors" in case for case in corpus(name)) >= 15


def test_ids_count_the_calls_of_a_turn() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert [made.id for made in hermes(f"{call}<tool_call>{{</tool_call>{call}").calls] == [
        "call_0",
        "call_1",
    ]


def test_registry_suggests_names() -> None:
    assert parsers.get("hermes") is hermes
    with pytest.raises(ConfigError, match="did you mean hermes"):
        parsers.get("herms")


def test_a_parser_of_the_user_takes_the_tools(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def old(text): ...\ndef new(text, tools): ...\n")
    assert load_parser(f"{tmp_path}/mine.py:new")
    with pytest.raises(
        ConfigError, match=r"rollout\.parser: .* is not a parser; a parser takes \(text, tools\)"
    ):
        load_parser(f"{tmp_path}/mine.py:old")


@pytest.mark.parametrize("tools", [(), ("",)])
def test_the_end_of_the_prompt_says_whether_the_turn_begins_in_a_thought(tools: tuple[str, ...]) -> None:
    opened = "<|im_start|>assistant\n<think>\n"
    closed = "<think>\n\n</think>\n\n"
    other = "assistant\n"
    for text, prompt, reasoning, content in (
        ("It is </think> so.", opened, "It is", "so."),
        ("It is", opened, "It is", ""),
        ("<think>It is</think> so.", opened, "It is", "so."),
        ("A </think> closes.", closed, "", "A </think> closes."),
        ("\n</think>\n\nIt is </think> so.", closed, "", "It is </think> so."),
        ("<think>It is</think> so.", closed, "It is", "so."),
        ("It is</think> so.", other, "It is", "so."),
        ("It is", other, "", "It is"),
    ):
        assert parse_turn(hermes, text, tools, prompt) == Parsed(content, reasoning=reasoning), (text, prompt)


def test_a_parser_of_the_user_sees_the_thought_that_the_prompt_opened() -> None:
    def read(text: str, tools: tuple[str, ...]) -> Parsed:
        return Parsed(text)

    assert parse_turn(read, "Hm.", (), "<think>\n").content == "<think>Hm."
    assert parse_turn(read, "Hm.", (), "</think>\n\n").content == "Hm."


# -- what a format's writer writes is read back --------------------------------------------------------

names_made = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not iskeyword(name))
calls_made = st.lists(
    st.tuples(
        names_made,
        st.dictionaries(names_made, values, max_size=4),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject) -> None:
    written = data.draw(calls_made)
    written = [(tool, {k: v for k, v in made.items() if can_write(name, v)}) for tool, made in written]
    parsed = parsers.get(name)(WRITERS[name](written))
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == written
    assert not parsed.errors and not parsed.content


# -- any text ------------------------------------------------------------------------------------------

TAGS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>"),
    *("<function=f>", "</function>", "<parameter=a>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>"),
    *("<|python_start|>", "<|python_end|>", "[f(a=", "[f(a=1)]", "[TOOL_CALLS]", "[ARGS]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json", "```"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    *("functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *("<|start|>", "<|channel|>", "analysis", "final", "commentary", " to=functions.f", "<|message|>"),
    *(
        "<|end|>",
        "<|call|>",
        "<|return|>",
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "parameters": {"a": "',
    ),
    *("<|START_ACTION|>", "<|END_ACTION|>", '{"tool_name": "f"}', "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("call:f{", "a:", '<invoke name="f">', "</invoke>", '<parameter name="a">', "<seed:tool_call>"),
    *('<｜DSML｜invoke name="f"', "</｜DSML｜invoke>", '<｜DSML｜parameter name="a" string="false">', "/>"),
    *('<|open|>call tool="f"<|sep|>', '<|open|>argument key="a"<|sep|>', "<|close|>call<|sep|>"),
    *("[", "]", "{", "}", "(", ")", '"', "'", "\\", ";", ",", "=", "f", "a", "1", " ", "\n", "-", "<"),
    *("NaN", "1e999", "\ud800", "☃", "\0"),
]
pieces = st.lists(st.sampled_from(TAGS) | st.text(max_size=3), max_size=12).map("".join)


def test_a_tool_may_be_named_user() -> None:
    """`to=user` alone is a message for the user."""
    call = "<|channel|>commentary to=functions.user<|message|>{}<|call|>"
    assert [made.name for made in parsers.get("harmony")(call, ()).calls] == ["user"]


def test_a_call_without_tools_makes_no_answer_of_the_thought() -> None:
    call = "<|channel|>commentary to=f<|message|>{}"
    thought = "<|channel|>analysis<|message|>Is it 7?<|end|><|start|>assistant"
    assert parse_turn(parsers.get("harmony"), thought + call, ()) == Parsed("", reasoning="Is it 7?")
    assert parse_turn(parsers.get("harmony"), call, ()) == Parsed(call)


def tool_f(kind: str | None) -> str:
    """The schema of a tool `f` whose argument `a` is of one type."""
    properties = {"a": {"type": kind} if kind else {}}
    return json.dumps({"function": {"name": "f", "parameters": {"properties": properties}}})


shown = st.sampled_from([None, "string", "integer", "boolean", "array", "object", "null"]).map(
    lambda kind: (tool_f(kind),)
)


def cut_somewhere(texts: list[str]) -> st.SearchStrategy[str]:
    """Cases of the corpus, cut, repeated, joined."""
    part = st.sampled_from(texts).flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end]))
    return st.lists(part, min_size=1, max_size=3).map("".join)


@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_any_text_is_read_without_raising(name: str, data: st.DataObject) -> None:
    text = data.draw(pieces | cut_somewhere(TEXTS[name]))
    tools = data.draw(shown)
    parsed = parse_turn(
        parsers.get(name), text, tools, data.draw(st.sampled_from(["", "<think>", "</think>"]))
    )
    for call in parsed.calls:
        assert call.name and call.id
        assert isinstance(json.loads(call.arguments.encode(), parse_constant=pytest.fail), dict)
    assert all(error and "\n" not in error for error in parsed.errors)


GARBAGE = ["", "{", "[", '{"a":', '["', "(", "<", '\\"', "[[1,", " ", "\n", "-", '"x', "f(a="]
OPENERS = {
    "cohere": ["<|START_ACTION|>"],
    "deepseek_v32": ['<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">', "<｜DSML｜tool_calls>"],
    "gemma4": ["<|tool_call>call:f{", '<|tool_call>call:f{a:<|"|>', "<|tool_call>call:f{a"],
    "kimi_k3": ['<|open|>call tool="f"<|sep|><|open|>argument key="a"<|sep|>', "<|open|>tools<|sep|>"],
    "minimax": ['<invoke name="f"><parameter name="a">', "<minimax:tool_call>"],
    "seed_oss": ["<function=f><parameter=a>", "<seed:tool_call>"],
    "deepseek": ["<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>"],
    "glm": ["<tool_call>f"],
    "harmony": ["<|channel|>commentary to=functions.f<|message|>", "<|message|>"],
    "hermes": ["<tool_call>"],
    "kimi": ["<|tool_call_begin|>f:0<|tool_call_argument_begin|>", "<|tool_calls_section_begin|>"],
    "llama3": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]"],
    "pythonic": ["<|python_start|>", "<|tool_call_start|>"],
    "qwen3_coder": ["<function=f><parameter=a>", "<tool_call>"],
}


def timed(parser: Parser, text: str) -> tuple[float, Parsed]:
    began = time.process_time()
    parsed = parser(text, ())
    return time.process_time() - began, parsed


@pytest.fixture
def no_collection() -> Iterator[None]:
    """The garbage of the other tests is not counted."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("name", NAMES)
def test_linear_time_on_nested_garbage(name: str) -> None:
    """Openers of the format, each followed by what may begin a value, 100 kB in all."""
    parser = parsers.get(name)
    for opener, filler in itertools.product(OPENERS[name], GARBAGE):
        unit = opener + filler
        for text in (unit * (100_000 // len(unit)), unit + (filler or "x") * (100_000 // len(filler or "x"))):
            took, parsed = timed(parser, text)
            assert took < 0.2, text[:100]
            assert len(parsed.calls) + len(parsed.errors) <= MAX_CALLS + 1


def test_a_turn_has_a_bounded_number_of_calls() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert not hermes(call * MAX_CALLS).errors
    parsed = hermes(call * (MAX_CALLS + 1))
    assert len(parsed.calls) == MAX_CALLS
    assert parsed.errors == (
        f"a turn may have at most {MAX_CALLS} tool calls; any further calls were not read",
    )


def test_arguments_may_be_nested_only_so_deep() -> None:
    parsed = hermes('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}</tool_call>")
    assert parsed.errors == ('the arguments of "f" are nested deeper than 64 levels',)
