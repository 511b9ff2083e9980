"""Formats that write each argument between tags, without its type: Qwen3-Coder, GLM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from asyncrl.conversation.parsers.base import (
    CallBlock,
    RawCall,
    Tags,
    call_format,
    enclosed,
    first_of,
    skip_space,
)
from asyncrl.conversation.parsers.untyped import Untyped
from asyncrl.conversation.parsers.values import Malformed, quote

_TOOL_CALL = Tags("<tool_call>", "</tool_call>")


def _value(text: str, at: int, tags: Tags, key: str, name: str) -> tuple[str, int]:
    """The text from `at` to the closing tag, and where that ends."""
    end, tag = first_of(text, at, tags)
    if tag != tags.close:
        raise Malformed(f"the argument {quote(key)} of {quote(name)} was not closed with {tags.close}")
    return text[at:end], end + len(tag)


def _add(arguments: dict[str, Any], name: str, key: str, value: str) -> None:
    if not key:
        raise Malformed(f"an argument of {quote(name)} has no name")
    if key in arguments:
        raise Malformed(f"the argument {quote(key)} of {quote(name)} is there twice")
    arguments[key] = Untyped(value)


# -- <tool_call><function=name><parameter=key>value</parameter></function></tool_call> -------------------

_FUNCTION = Tags("<function=", "</function>")
_NAME = re.compile(r"([^<>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_PARAMETER_TAGS = Tags("<parameter=", "</parameter>")


def _qwen3_call(text: str, at: int) -> tuple[RawCall, int]:
    head = _NAME.match(text, at)
    if not head:
        raise Malformed("a call begins <function=name>")
    name, at = head[1].strip(), skip_space(text, head.end())
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(text, at):
        key = parameter[1].strip()
        value, end = _value(text, parameter.end(), _PARAMETER_TAGS, key, name)
        _add(arguments, name, key, value.removeprefix("\n").removesuffix("\n"))
        at = skip_space(text, end)
    return RawCall(name, arguments), at


@call_format("qwen3_coder")
def qwen3_coder(text: str) -> Iterator[CallBlock]:
    return enclosed(text, _FUNCTION, _qwen3_call, _TOOL_CALL)


# -- <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call> -----------------------

_GLM_NAME = re.compile(r"\s*([^\s<>]+)\s*")
_ARGUMENT = Tags("<arg_value>", "</arg_value>")
_GLM_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")


def _glm_call(text: str, at: int) -> tuple[RawCall, int]:
    head = _GLM_NAME.match(text, at)
    if not head:
        raise Malformed("a call begins <tool_call>name")
    at = head.end()
    arguments: dict[str, Any] = {}
    while pair := _GLM_KEY.match(text, at):
        value, end = _value(text, pair.end(), _ARGUMENT, pair[1], head[1])
        _add(arguments, head[1], pair[1].strip(), value)
        at = skip_space(text, end)
    return RawCall(head[1], arguments), at


@call_format("glm")
def glm(text: str) -> Iterator[CallBlock]:
    return enclosed(text, _TOOL_CALL, _glm_call)
