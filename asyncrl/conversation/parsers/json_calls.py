"""Reads formats that write calls as JSON, or nearly: Hermes, Llama 3, Mistral, Cohere, Gemma 4.

And formats of a name with a JSON object: DeepSeek V3 and V3.1, Kimi K2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from asyncrl.conversation.parsers.base import CallBlock, RawCall, Tags, call_format, enclosed, skip_space
from asyncrl.conversation.parsers.values import Malformed, json_at, object_at, quote

_KNOWN_KEYS = {"arguments", "parameters", "id", "type", "tool_call_id"}


def _object_call(value: Any, key: str, named: str = "name") -> RawCall:
    """The call that a JSON object is. Its name is under `named`, its arguments under `key`; without it, there
    are none."""
    if not isinstance(value, dict) or not isinstance(value.get(named), str):
        raise Malformed(f'a tool call must be an object with "{named}" and "{key}"')
    name = value[named]
    if unknown := sorted(value.keys() - {named, *_KNOWN_KEYS}):
        raise Malformed(f'a tool call has "{named}" and "{key}", but {quote(name)} has {quote(unknown[0])}')
    arguments = value.get(key, value.get("arguments", value.get("parameters", {})))
    if not isinstance(arguments, dict):
        raise Malformed(f'the "{key}" of {quote(name)} must be an object')
    return RawCall(name, arguments)


# -- <tool_call>{"name": ..., "arguments": {...}}</tool_call> ------------------------------------------

_TOOL_CALL = Tags("<tool_call>", "</tool_call>")


def _hermes_call(text: str, at: int) -> tuple[RawCall, int]:
    value, end = json_at(text, at)
    return _object_call(value, "arguments"), end


@call_format("hermes")
def hermes(text: str) -> Iterator[CallBlock]:
    return enclosed(text, _TOOL_CALL, _hermes_call)


# -- {"name": ..., "parameters": {...}}; {...} ---------------------------------------------------------

_PYTHON = "<|python_tag|>"
_KEYED = re.compile(r'\s*\{\s*"(?:name|parameters|arguments|type|function)"\s*:')


@call_format("llama3")
def llama3(text: str) -> Iterator[CallBlock]:
    """The calls follow the tag, or begin the turn. Other JSON at the beginning is an answer."""
    first = _untagged(text)
    if first:
        yield first
    at = text.find(_PYTHON, first.end if first else 0)
    while at >= 0:
        block = _sequence(text, at, at + len(_PYTHON))
        yield block
        at = text.find(_PYTHON, block.end)


def _untagged(text: str) -> CallBlock | None:
    if not _KEYED.match(text):
        return None
    try:
        value, _ = json_at(text, 0)
    except Malformed:
        return _sequence(text, 0, 0)
    return _sequence(text, 0, 0) if {"parameters", "arguments"} & value.keys() else None


def _sequence(text: str, start: int, at: int) -> CallBlock:
    found: list[RawCall | Malformed] = []
    more = True
    while more:
        try:
            value, at = json_at(text, at)
        except Malformed as error:
            at = text.find(_PYTHON, at)
            return CallBlock(start, at if at >= 0 else len(text), (*found, error))
        try:
            found.append(_object_call(value, "parameters"))
        except Malformed as error:
            found.append(error)
        following = skip_space(text, at)
        more = text.startswith((";", "{"), following)
        at = following + text.startswith(";", following) if more else at
    return CallBlock(start, at, tuple(found))


# -- [TOOL_CALLS][{...}, ...] and [TOOL_CALLS]name[ARGS]{...} ------------------------------------------

_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]*)\s*)?\[ARGS\]")
_OWN_ID = re.compile(r"[A-Za-z0-9]{9}")


@call_format("mistral", think=Tags("[THINK]", "[/THINK]"), call_id="call{:05}")
def mistral(text: str) -> Iterator[CallBlock]:
    at = text.find(_CALLS)
    while at >= 0:
        inside = at + len(_CALLS)
        try:
            found, end = _mistral_calls(text, inside)
        except Malformed as error:
            following = text.find(_CALLS, inside)
            found = (error,)
            end = following if following >= 0 else len(text)
        yield CallBlock(at, end, found)
        at = text.find(_CALLS, end)


def _mistral_calls(text: str, at: int) -> tuple[tuple[RawCall | Malformed, ...], int]:
    if named := _NAMED.match(text, at):
        arguments, end = object_at(text, named.end(), named[1])
        return (RawCall(named[1], arguments, _own_id(named[2])),), end
    value, end = json_at(text, at)
    if not isinstance(value, list) or not value:
        raise Malformed(f"after {_CALLS} comes a list of calls, or name[ARGS] and an object")
    return tuple(map(_listed_call, value)), end


def listed_calls(text: str) -> tuple[RawCall | Malformed, ...]:
    """The calls of a JSON list, which is the whole text."""
    value, end = json_at(text, 0)
    if end < len(text) or not isinstance(value, list):
        raise Malformed("tool calls are a list of calls, and nothing else")
    return tuple(map(_listed_call, value))


def _listed_call(value: Any, key: str = "arguments", named: str = "name") -> RawCall | Malformed:
    try:
        call = _object_call(value, key, named)
    except Malformed as error:
        return error
    given = value.get("tool_call_id", "")
    return call._replace(id=_own_id(value.get("id")) or (str(given) if isinstance(given, str | int) else ""))


# -- <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|> ---


@call_format("cohere", think=Tags("<|START_THINKING|>", "<|END_THINKING|>"))
def cohere(text: str) -> Iterator[CallBlock]:
    return enclosed(text, Tags("<|START_ACTION|>", "<|END_ACTION|>"), _cohere_calls)


def _cohere_calls(text: str, at: int) -> tuple[list[RawCall | Malformed], int]:
    value, end = json_at(text, at)
    if not isinstance(value, list) or not value:
        raise Malformed('<|START_ACTION|> is followed by a list of calls with "tool_name" and "parameters"')
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


def _gemma_call(text: str, at: int) -> tuple[RawCall, int]:
    """Texts have quotes of their own, keys none, as in JavaScript; put into JSON's, the rest is JSON."""
    head = _GEMMA_NAME.match(text, at)
    if not head:
        raise Malformed(f"a call begins {_GEMMA.open}call:name{{")
    written = list[str]()
    depth = 0
    end = head.end()
    for part in _GEMMA_PARTS.finditer(text, end):
        if part[0] == _GEMMA.open:
            break
        end = part.end()
        kind = part.lastgroup
        quoted = part["text"] if kind == "text" else part[0].strip() if kind == "key" else None
        plain = "null" if part[0].strip() == "None" else part[0]
        written.append(plain if quoted is None else json.dumps(quoted))
        depth += (kind == "open") - (kind == "close")
        if not depth:
            break
    return RawCall(head[1], object_at("".join(written), 0, head[1])[0]), end


def _own_id(value: Any) -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    return value if isinstance(value, str) and _OWN_ID.fullmatch(value) else ""


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
