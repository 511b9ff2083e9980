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
    """Return the name of the parser that fits a chat template. `written_call`: the call that the template
    writes, which the parser must read back; None: the template writes no calls, so words of its text decide.
    None if no parser fits."""
    if written_call is not None:
        return next((name for name in parsers.names() if _reads_back(parsers.get(name), written_call)), None)
    return next((parser for mark, parser in _PARSER_MARKS if mark in template), None)


def _reads_back(parser: Parser, written_call: WrittenCall) -> bool:
    text, call, tools, prompt = written_call
    parsed = parse_turn(parser, text, tools, prompt)
    calls = [(parsed_call.name, json.loads(parsed_call.arguments)) for parsed_call in parsed.calls]
    return calls == [(call.name, json.loads(call.arguments))]
