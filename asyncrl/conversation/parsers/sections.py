"""Formats with a section of calls, each a name and a JSON object: DeepSeek V3 and V3.1, Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.conversation.parsers.base import CallBlock, RawCall, Tags, call_format, enclosed, skip_space
from asyncrl.conversation.parsers.values import Malformed, object_at

# -- <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜> ---------------------------------------

_DEEPSEEK = Tags("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_ALL = Tags("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_V3 = re.compile(r"\s*function<｜tool▁sep｜>[ \t]*([^\s<`]+)\s*```json")
_V31 = re.compile(r"\s*([^\s<]+)\s*<｜tool▁sep｜>")
_FENCE = "```"


def _deepseek_call(text: str, at: int) -> tuple[RawCall, int]:
    """V3 writes the word "function", the name and a fenced object; V3.1 the name and the object."""
    head = _V3.match(text, at) or _V31.match(text, at)
    if not head:
        raise Malformed(f"a call begins {_DEEPSEEK.open}name<｜tool▁sep｜>")
    arguments, end = object_at(text, head.end(), head[1])
    if head.re is _V3:
        end = skip_space(text, end)
        if not text.startswith(_FENCE, end):
            raise Malformed(f"the arguments of {head[1]} must end with {_FENCE}")
        end += len(_FENCE)
    return RawCall(head[1], arguments), end


@call_format("deepseek")
def deepseek(text: str) -> Iterator[CallBlock]:
    return enclosed(text, _DEEPSEEK, _deepseek_call, _DEEPSEEK_ALL)


# -- <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|> ---------------

_KIMI = Tags("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_ALL = Tags("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_HEAD = re.compile(r"\s*((?:functions\.)?([^\s<:]+):\d+)\s*<\|tool_call_argument_begin\|>")


def _kimi_call(text: str, at: int) -> tuple[RawCall, int]:
    head = _KIMI_HEAD.match(text, at)
    if not head:
        raise Malformed(f"a call begins {_KIMI.open}functions.name:0<|tool_call_argument_begin|>")
    arguments, end = object_at(text, head.end(), head[2])
    return RawCall(head[2], arguments, head[1]), end


@call_format("kimi")
def kimi(text: str) -> Iterator[CallBlock]:
    return enclosed(text, _KIMI, _kimi_call, _KIMI_ALL)
