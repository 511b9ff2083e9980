"""Reads the tool calls that a model writes. A parser turns the text of a turn into calls and never raises."""

from __future__ import annotations

import json

from asyncrl.conversation.chat_probe import WrittenCall
from asyncrl.conversation.parsers import harmony, pythonic, tagged  # these modules register parsers
from asyncrl.conversation.parsers.base import Parsed, Parser, load_parser, parse_turn, parsers
from asyncrl.conversation.parsers.json_calls import hermes

# If a chat template does not write calls itself, the first of these marks in its text gives the format; the
# rarest marks come first.
_PARSER_MARKS = (
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax"),
    ("｜DSML｜", "deepseek_v32"),
    ("<|START_ACTION|>", "cohere"),
    ("<|tool_call>call:", "gemma4"),
    ("<|open|>", "kimi_k3"),
    ("<|channel|>", "harmony"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<parameter=", "qwen3_coder"),
    ("<|python_start|>", "pythonic"),
    ("<|tool_list_start|>", "pythonic"),
    ("<|tool_call_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument', "llama3"),
)


def detect(template: str, written_call: WrittenCall | None) -> str | None:
    """Return the name of the parser that fits a chat template; None if no parser fits. `written_call`: the
    call that the template writes, which the parser must read back; None: the template writes no calls, so
    words of its text decide."""
    if written_call is None:
        return next((parser for mark, parser in _PARSER_MARKS if mark in template), None)

    text, call, tools, prompt = written_call
    contents: dict[str, str] = {}
    for name in parsers.names():
        parsed = parse_turn(parsers.get(name), text, tools, prompt)
        calls = [(parsed_call.name, json.loads(parsed_call.arguments)) for parsed_call in parsed.calls]
        if calls == [(call.name, json.loads(call.arguments))]:
            contents[name] = parsed.content

    # A parser of another format may overlook tags around the call, which are then content.
    return min(contents, key=lambda name: len(contents[name]), default=None)
