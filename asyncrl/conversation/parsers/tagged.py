"""Reads formats that write each argument between tags: Qwen3-Coder, Seed-OSS, GLM, MiniMax-M2, DeepSeek V3.2
and V4, Kimi K3. Each format is a `TaggedCalls`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from asyncrl.conversation.parsers.base import (
    THINK,
    CallBlock,
    RawCall,
    Tags,
    call_format,
    enclosed,
    first_of,
    skip_space,
)
from asyncrl.conversation.parsers.untyped import NO_TEXT, Untyped, value_of
from asyncrl.conversation.parsers.values import Malformed, object_at, quote


class TaggedCalls(NamedTuple):
    """The form of calls. `call`: the tags around a call; `begins`: the beginning of a call, for errors;
    `head`: the pattern after the opening tag, with the `name`. `argument`: the pattern before a value, with
    the `key`, and with `text` if the format tells whether the value is text; else the tool's schema tells.
    `value`: a tag that a value must not contain, and the tag that ends a value. `sections`: optional tags
    around all calls."""

    call: Tags
    begins: str
    head: re.Pattern[str]
    argument: re.Pattern[str]
    value: Tags
    sections: tuple[Tags, ...] = ()
    think: Tags = THINK
    lines: bool = False  # a value stands on lines of its own
    objects: bool = False  # all arguments may be written as one JSON object

    def blocks(self, text: str) -> Iterator[CallBlock]:
        return enclosed(text, self.call, self._read_call, *self.sections)

    def _read_call(self, text: str, position: int) -> tuple[RawCall, int]:
        head_match = self.head.match(text, position)
        if not head_match:
            raise Malformed(f"a call must begin with {self.begins}")

        name = head_match["name"].strip()
        position = head_match.end()
        arguments: dict[str, Any] = {}
        if self.objects and text.startswith("{", skip_space(text, position)):
            arguments, position = object_at(text, position, name)

        while argument_match := self.argument.match(text, skip_space(text, position)):
            position = self._add_argument(arguments, name, text, argument_match)

        return RawCall(name, arguments), position

    def _add_argument(
        self, arguments: dict[str, Any], name: str, text: str, argument_match: re.Match[str]
    ) -> int:
        """Read the value after `argument_match` into the arguments. Return the end of the value."""
        key = argument_match["key"].strip()
        value_end, tag = first_of(text, argument_match.end(), self.value)
        if tag != self.value.close:
            raise Malformed(
                f"the argument {quote(key)} of {quote(name)} was not closed with {self.value.close}"
            )

        value = text[argument_match.end() : value_end]
        if not key:
            raise Malformed(f"an argument of {quote(name)} has no name")
        if key in arguments:
            raise Malformed(f"the argument {quote(key)} of {quote(name)} appears twice")

        type_text = argument_match.groupdict().get("text")
        if type_text is None:
            arguments[key] = Untyped(value.removeprefix("\n").removesuffix("\n") if self.lines else value)
        elif type_text in ("true", "string"):
            arguments[key] = value
        elif (json_value := value_of(value, NO_TEXT)) == value:
            raise Malformed(
                f"the argument {quote(key)} of {quote(name)} is declared as JSON, but is not valid JSON"
            )
        else:
            arguments[key] = json_value

        return value_end + len(tag)


_TOOL_CALL = Tags("<tool_call>", "</tool_call>")
_QWEN3 = TaggedCalls(
    call=Tags("<function=", "</function>"),
    begins="<function=name>",
    head=re.compile(r"(?P<name>[^<>\n]*)(?<!/)>"),
    argument=re.compile(r"<parameter=(?P<key>[^<>\n]*)>"),
    value=Tags("<parameter=", "</parameter>"),
    sections=(_TOOL_CALL,),
    lines=True,
)
_ATTRIBUTE = r'name="(?P<{}>[^"<>\n]*)"\s*'

FORMATS = {
    "qwen3_coder": _QWEN3,
    "seed_oss": _QWEN3._replace(
        sections=(Tags("<seed:tool_call>", "</seed:tool_call>"),),
        think=Tags("<seed:think>", "</seed:think>"),
        lines=False,
    ),
    "glm": TaggedCalls(
        call=_TOOL_CALL,
        begins="<tool_call>name",
        head=re.compile(r"\s*(?P<name>[^\s<>]+)"),
        argument=re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
        value=Tags("<arg_value>", "</arg_value>"),
    ),
    "minimax": TaggedCalls(
        call=Tags("<invoke ", "</invoke>"),
        begins='<invoke name="name">',
        head=re.compile(_ATTRIBUTE.format("name") + ">"),
        argument=re.compile(f"<parameter {_ATTRIBUTE.format('key')}>"),
        value=Tags("<parameter name=", "</parameter>"),
        sections=(Tags("<minimax:tool_call>", "</minimax:tool_call>"),),
    ),
    "deepseek_v32": TaggedCalls(
        call=Tags("<｜DSML｜invoke ", "</｜DSML｜invoke>"),
        begins='<｜DSML｜invoke name="name">',
        head=re.compile(_ATTRIBUTE.format("name") + "/?>"),
        argument=re.compile(
            rf'<｜DSML｜parameter {_ATTRIBUTE.format("key")}(?:string="(?P<text>true|false)"\s*)?>'
        ),
        value=Tags("<｜DSML｜parameter ", "</｜DSML｜parameter>"),
        sections=tuple(
            Tags(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>")
            for section in ("function_calls", "tool_calls")
        ),
        objects=True,
    ),
    "kimi_k3": TaggedCalls(
        call=Tags("<|open|>call ", "<|close|>call<|sep|>"),
        begins='<|open|>call tool="name" index="1"<|sep|>',
        head=re.compile(r'tool="(?P<name>[^"<>\n]*)"(?: index="\d+")?\s*<\|sep\|>'),
        argument=re.compile(
            r'<\|open\|>argument key="(?P<key>[^"<>\n]*)"(?: type="(?P<text>\w+)")?\s*<\|sep\|>'
        ),
        value=Tags("<|open|>argument ", "<|close|>argument<|sep|>"),
        sections=(Tags("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
        think=Tags("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
}
for _name, _format in FORMATS.items():
    call_format(_name, _format.think)(_format.blocks)
