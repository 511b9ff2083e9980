"""Reads formats that write calls as JSON, or nearly: Hermes, Llama 3, Mistral, Cohere, Gemma 4.

Also reads formats that write a name and a JSON object: DeepSeek V3 and V3.1, Kimi K2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from asyncrl.conversation.parsers.base import CallBlock, RawCall, Tags, call_format, enclosed, skip_space
from asyncrl.conversation.parsers.values import Malformed, json_at, object_at, quote

_KNOWN_KEYS = {"arguments", "parameters", "id", "type", "tool_call_id"}


def _object_call(value: Any, arguments_key: str, name_key: str = "name") -> RawCall:
    """Read a JSON object as a call. The name is under `name_key`, the arguments are under `arguments_key`;
    without that key, there are no arguments."""
    if not isinstance(value, dict) or not isinstance(value.get(name_key), str):
        raise Malformed(f'a tool call must be an object with "{name_key}" and "{arguments_key}"')

    name = value[name_key]
    if unknown_keys := sorted(value.keys() - {name_key, *_KNOWN_KEYS}):
        raise Malformed(
            f'a tool call has "{name_key}" and "{arguments_key}", '
            f"but the call to {quote(name)} also has {quote(unknown_keys[0])}"
        )

    arguments = value.get(arguments_key, value.get("arguments", value.get("parameters", {})))
    if not isinstance(arguments, dict):
        raise Malformed(f'the "{arguments_key}" of {quote(name)} must be an object')

    return RawCall(name, arguments)


# -- <tool_call>{"name": ..., "arguments": {...}}</tool_call> ------------------------------------------

_TOOL_CALL = Tags("<tool_call>", "</tool_call>")


def _hermes_call(text: str, start: int) -> tuple[RawCall, int]:
    value, end = json_at(text, start)
    return _object_call(value, "arguments"), end


@call_format("hermes")
def hermes(text: str) -> Iterator[CallBlock]:
    return enclosed(text, _TOOL_CALL, _hermes_call)


# -- {"name": ..., "parameters": {...}}; {...} ---------------------------------------------------------

_PYTHON_TAG = "<|python_tag|>"
_CALL_OBJECT = re.compile(r'\s*\{\s*"(?:name|parameters|arguments|type|function)"\s*:')


@call_format("llama3")
def llama3(text: str) -> Iterator[CallBlock]:
    """Find calls that follow the tag, or begin the turn. Any other JSON at the beginning is an answer."""
    first_block = _untagged(text)
    if first_block:
        yield first_block

    position = text.find(_PYTHON_TAG, first_block.end if first_block else 0)
    while position >= 0:
        block = _call_sequence(text, position, position + len(_PYTHON_TAG))
        yield block
        position = text.find(_PYTHON_TAG, block.end)


def _untagged(text: str) -> CallBlock | None:
    if not _CALL_OBJECT.match(text):
        return None
    try:
        value, _ = json_at(text, 0)
    except Malformed:
        return _call_sequence(text, 0, 0)
    return _call_sequence(text, 0, 0) if {"parameters", "arguments"} & value.keys() else None


def _call_sequence(text: str, block_start: int, position: int) -> CallBlock:
    raw_calls: list[RawCall | Malformed] = []
    has_more = True
    while has_more:
        try:
            value, position = json_at(text, position)
        except Malformed as error:
            position = text.find(_PYTHON_TAG, position)
            return CallBlock(block_start, position if position >= 0 else len(text), (*raw_calls, error))

        try:
            raw_calls.append(_object_call(value, "parameters"))
        except Malformed as error:
            raw_calls.append(error)

        next_position = skip_space(text, position)
        has_more = text.startswith((";", "{"), next_position)
        position = next_position + text.startswith(";", next_position) if has_more else position

    return CallBlock(block_start, position, tuple(raw_calls))


# -- [TOOL_CALLS][{...}, ...] and [TOOL_CALLS]name[ARGS]{...} ------------------------------------------

_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED_CALL = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]*)\s*)?\[ARGS\]")
_OWN_ID = re.compile(r"[A-Za-z0-9]{9}")


@call_format("mistral", think=Tags("[THINK]", "[/THINK]"), call_id="call{:05}")
def mistral(text: str) -> Iterator[CallBlock]:
    position = text.find(_TOOL_CALLS)
    while position >= 0:
        inner_start = position + len(_TOOL_CALLS)
        try:
            raw_calls, end = _mistral_calls(text, inner_start)
        except Malformed as error:
            next_position = text.find(_TOOL_CALLS, inner_start)
            raw_calls = (error,)
            end = next_position if next_position >= 0 else len(text)

        yield CallBlock(position, end, raw_calls)
        position = text.find(_TOOL_CALLS, end)


def _mistral_calls(text: str, start: int) -> tuple[tuple[RawCall | Malformed, ...], int]:
    if call_head := _NAMED_CALL.match(text, start):
        arguments, end = object_at(text, call_head.end(), call_head[1])
        return (RawCall(call_head[1], arguments, _own_id(call_head[2])),), end
    value, end = json_at(text, start)
    if not isinstance(value, list) or not value:
        raise Malformed(f"expected a list of calls, or name[ARGS] followed by an object, after {_TOOL_CALLS}")
    return tuple(map(_listed_call, value)), end


def listed_calls(text: str) -> tuple[RawCall | Malformed, ...]:
    """Return the calls of a JSON list, which must be the whole text."""
    value, end = json_at(text, 0)
    if end < len(text) or not isinstance(value, list):
        raise Malformed("the tool calls must be a list of calls and nothing else")
    return tuple(map(_listed_call, value))


def _listed_call(value: Any, arguments_key: str = "arguments", name_key: str = "name") -> RawCall | Malformed:
    try:
        call = _object_call(value, arguments_key, name_key)
    except Malformed as error:
        return error

    call_id = value.get("tool_call_id", "")
    return call._replace(
        id=_own_id(value.get("id")) or (str(call_id) if isinstance(call_id, str | int) else "")
    )


# -- <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|> ---


@call_format("cohere", think=Tags("<|START_THINKING|>", "<|END_THINKING|>"))
def cohere(text: str) -> Iterator[CallBlock]:
    return enclosed(text, Tags("<|START_ACTION|>", "<|END_ACTION|>"), _cohere_calls)


def _cohere_calls(text: str, start: int) -> tuple[list[RawCall | Malformed], int]:
    value, end = json_at(text, start)
    if not isinstance(value, list) or not value:
        raise Malformed(
            '<|START_ACTION|> must be followed by a list of calls with "tool_name" and "parameters"'
        )
    return [_listed_call(item, "parameters", "tool_name") for item in value], end


# -- <|tool_call>call:name{key:<|"|>text<|"|>,other:[1,{a:true}]}<tool_call|> ----------------------------

_GEMMA = Tags("<|tool_call>", "<tool_call|>")
_GEMMA_NAME = re.compile(r"\s*call:([^\s{}<>]+)\s*(?=\{)")
_GEMMA_WORD = r'[^\s:,{}\[\]<>"][^:,{}\[\]<>"]*+'
_GEMMA_PARTS = re.compile(
    rf'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>{_GEMMA_WORD})(?=:)|{_GEMMA_WORD}|(?P<open>[{{\[])'
    r"|(?P<close>[}\]])|<\|tool_call>|[\s,:]++|.",
    re.DOTALL,
)


@call_format("gemma4", think=Tags("<|channel>thought", "<channel|>"))
def gemma4(text: str) -> Iterator[CallBlock]:
    return enclosed(text, _GEMMA, _gemma_call)


def _gemma_call(text: str, start: int) -> tuple[RawCall, int]:
    """Read a call of Gemma 4. Texts have special quotes, and keys have none, as in JavaScript; with JSON's
    quotes, the arguments are JSON."""
    call_head = _GEMMA_NAME.match(text, start)
    if not call_head:
        raise Malformed(f"a call must begin with {_GEMMA.open}call:name{{")

    json_parts = list[str]()
    nesting_depth = 0
    end = call_head.end()
    for part in _GEMMA_PARTS.finditer(text, end):
        if part[0] == _GEMMA.open:
            break

        end = part.end()
        part_kind = part.lastgroup
        quoted_text = None

        if part_kind == "text":
            quoted_text = part["text"]
        elif part_kind == "key":
            quoted_text = part[0].strip()

        plain_text = "null" if part[0].strip() == "None" else part[0]
        json_parts.append(plain_text if quoted_text is None else json.dumps(quoted_text))
        nesting_depth += (part_kind == "open") - (part_kind == "close")
        if not nesting_depth:
            break

    return RawCall(call_head[1], object_at("".join(json_parts), 0, call_head[1])[0]), end


def _own_id(value: Any) -> str:
    """Return an id that Mistral's templates accept, nine letters and digits; '' for other values."""
    return value if isinstance(value, str) and _OWN_ID.fullmatch(value) else ""


# -- <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜> ---------------------------------------

_DEEPSEEK = Tags("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_ALL = Tags("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_V3 = re.compile(r"\s*function<｜tool▁sep｜>[ \t]*([^\s<`]+)\s*```json")
_V31 = re.compile(r"\s*([^\s<]+)\s*<｜tool▁sep｜>")
_FENCE = "```"


def _deepseek_call(text: str, start: int) -> tuple[RawCall, int]:
    """Read a call. V3 writes the word "function", the name and a fenced object; V3.1 the name and the
    object."""
    call_head = _V3.match(text, start) or _V31.match(text, start)
    if not call_head:
        raise Malformed(f"a call must begin with {_DEEPSEEK.open}name<｜tool▁sep｜>")

    arguments, end = object_at(text, call_head.end(), call_head[1])
    if call_head.re is _V3:
        end = skip_space(text, end)
        if not text.startswith(_FENCE, end):
            raise Malformed(f"the arguments of {call_head[1]} must end with {_FENCE}")
        end += len(_FENCE)

    return RawCall(call_head[1], arguments), end


@call_format("deepseek")
def deepseek(text: str) -> Iterator[CallBlock]:
    return enclosed(text, _DEEPSEEK, _deepseek_call, _DEEPSEEK_ALL)


# -- <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|> ---------------

_KIMI = Tags("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_ALL = Tags("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_HEAD = re.compile(r"\s*((?:functions\.)?([^\s<:]+):\d+)\s*<\|tool_call_argument_begin\|>")


def _kimi_call(text: str, start: int) -> tuple[RawCall, int]:
    call_head = _KIMI_HEAD.match(text, start)
    if not call_head:
        raise Malformed(f"a call must begin with {_KIMI.open}functions.name:0<|tool_call_argument_begin|>")
    arguments, end = object_at(text, call_head.end(), call_head[2])
    return RawCall(call_head[2], arguments, call_head[1]), end


@call_format("kimi")
def kimi(text: str) -> Iterator[CallBlock]:
    return enclosed(text, _KIMI, _kimi_call, _KIMI_ALL)
