"""The parser that a template's marks name reads what the models of that template write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.conversation.chat import Chat
from asyncrl.conversation.parsers import Parsed, detect, parsers
from asyncrl.types import Message, ToolCall
from tests.fakes.families import FAMILIES, TEMPLATES, tokenizer_of

SILENT = {"gemma3", "llama3", "phi3.5"}  # templates without tools
CALLING = sorted(FAMILIES.keys() - SILENT)
CALLS = (
    ToolCall("weather", '{"city": "Ulm", "days": 2}', "abcdefgh1"),
    ToolCall("run", '{"code": "print(\\"é\\")\\n"}', "abcdefgh2"),
)


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_family_is_understood(name: str, count: int) -> None:
    family = FAMILIES[name]
    chat = Chat(tokenizer_of(name))
    calls = CALLS[: min(count, 1 if family.one_call else 2)]
    content = "" if calls and family.bare_calls else "I look."
    reasoning = "They ask for weather." if family.thinks else ""
    parser = detect(template(name), chat.written_call())
    assert parser
    assert chat.written_call() is None or detect(template(name), None) == parser, "the marks agree"
    read = parsers.get(parser)(family.writes(Message("assistant", content, calls, reasoning=reasoning)))
    said = chat.content(read.content)
    assert (said, read.reasoning, read.errors) == (content, reasoning, ())
    assert [(call.name, call.arguments) for call in read.calls] == [(c.name, c.arguments) for c in calls]


LFM2 = """{%- set ns.system_prompt = ns.system_prompt + "List of tools: <|tool_list_start|>[" -%}
{%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}"""


@pytest.mark.parametrize(
    ("model", "parser"),
    [
        ("... <|tool_calls_section_begin|><|tool_call_begin|>", "kimi"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=", "qwen3_coder"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<|tool_call_start|>[f()]<|tool_call_end|>", "pythonic"),
        (LFM2, "pythonic"),
        ("<seed:tool_call>\\n<function=f>\\n<parameter=a>1</parameter>", "seed_oss"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}", "minimax"),
        ("{%- set dsml_token = '｜DSML｜' -%}<｜tool▁call▁begin｜>", "deepseek_v32"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4"),
        ("{{- '<|open|>' + tag -}}{{- '<|sep|>' -}}", "kimi_k3"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        (template("gemma3"), None),
        ("", None),
    ],
)
def test_guess(model: str, parser: str | None) -> None:
    assert detect(model, None) == parser
    assert parser is None or parser in parsers


DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "guides/chat.md").read_text().partition("## Call formats")[2]


def test_the_page_names_every_format() -> None:
    assert len(QUOTED) == 9
    assert parsers.names() == sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


QUOTED = re.findall(
    r"^\| [\w ]+ \| `([^`]+)` \| `([^`]+)` \|$", (DOCS / "dev/chat.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("example", "complaint"), QUOTED)
def test_the_page_quotes_what_the_model_reads(example: str, complaint: str) -> None:
    written = f"<tool_call>{example}</tool_call>" if example[0] == "{" else example
    assert parsers.get("pythonic" if example[0] == "[" else "hermes")(written).errors == (complaint,)


def test_the_page_shows_a_parser_that_works() -> None:
    names: dict[str, Any] = {}
    exec(PAGE.partition("```python\n")[2].partition("```")[0], names)
    assert names["read"]("I look. SEARCH: cats", ()) == Parsed(
        "I look.", (ToolCall("search", '{"query": "cats"}', "call_0"),)
    )
