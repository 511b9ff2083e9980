"""Reads the tool calls that a model writes. A parser turns the text of a turn into calls and never raises."""

from asyncrl.conversation.parsers import harmony, pythonic, tagged  # these modules register parsers
from asyncrl.conversation.parsers.base import Parsed, Parser, load_parser, parse_turn, parsers
from asyncrl.conversation.parsers.json_calls import hermes

# The first mark that a chat template contains tells the format; the rarest marks come first. None: no parser.
_PARSER_MARKS: tuple[tuple[str, str | None], ...] = (
    ("start_tag => `<function`", None),  # Functionary v3.1, Llama 3.1 with tools of the user
    (">>>all", None),  # Functionary v3
    ("]<]minimax[>[", None),  # MiniMax-M3
    ("<tool_calls>[", None),  # Apriel
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


def detect(template: str) -> str | None:
    """Return the parser that fits a chat template, as a hint for people; None if the template does not
    tell."""
    return next((parser for mark, parser in _PARSER_MARKS if mark in template), None)
