"""Reads the parts that all call formats share: a turn is reasoning, then content with calls in between."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import msgspec

from asyncrl.conversation.parsers.untyped import with_types
from asyncrl.conversation.parsers.values import Malformed, as_json
from asyncrl.errors import ConfigError
from asyncrl.registry import Registry
from asyncrl.types import ToolCall

MAX_CALLS = 256  # calls of one turn; bounds the cost of a hostile text


class Parsed(msgspec.Struct, frozen=True):
    """A turn that was read. `content` is the text outside calls and reasoning; `errors` are one line per
    malformed call; `reasoning` is the model's thought, if the format marks thoughts."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    reasoning: str = ""


Parser = Callable[[str, tuple[str, ...]], Parsed]
"""A function `(text, tools) -> Parsed` that never raises. `tools`: OpenAI schemas, as JSON text."""

parsers: Registry[Parser] = Registry("tool-call format")


class RawCall(NamedTuple):
    """A call whose arguments are not checked yet. `id`: the id that the model wrote, if the format has
    ids."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class CallBlock(NamedTuple):
    """The part [start, end) of the text that is no content, with the calls or the faults found in that
    part."""

    start: int
    end: int
    raw_calls: tuple[RawCall | Malformed, ...] = ()


class Tags(NamedTuple):
    """A pair of tags around a text."""

    open: str
    close: str


THINK = Tags("<think>", "</think>")
FindBlocks = Callable[[str], Iterable[CallBlock]]


@dataclass(frozen=True)
class CallFormat:
    """A parser. `blocks` finds the calls, in order, in the text after the reasoning, which is between the
    tags `think`. `call_id` formats the id of the k-th call of a turn unless the model wrote an id."""

    blocks: FindBlocks
    think: Tags = THINK
    call_id: str = "call_{}"

    def __call__(self, text: str, tools: tuple[str, ...] = ()) -> Parsed:
        reasoning, spoken_text = split_reasoning(text, self.think)
        content_parts: list[str] = []
        raw_calls: list[RawCall | Malformed] = []
        position = 0
        for block in self.blocks(spoken_text):
            content_parts.append(spoken_text[position : block.start])
            raw_calls += block.raw_calls
            position = block.end
            if len(raw_calls) > MAX_CALLS:
                break
        else:
            content_parts.append(spoken_text[position:])

        return assemble("".join(content_parts).strip(), reasoning, raw_calls, tools, self.call_id)


def call_format(
    name: str, think: Tags = THINK, call_id: str = "call_{}"
) -> Callable[[FindBlocks], CallFormat]:
    """Decorator: make a parser of a function that finds the blocks of calls, and register it."""

    def register(blocks: FindBlocks) -> CallFormat:
        parser = CallFormat(blocks, think, call_id)
        parsers.register(name)(parser)
        return parser

    return register


def load_parser(spec: str, config_key: str = "rollout.parser") -> Parser:
    """Load a parser by registered name, `module:function` or `file.py:function`. A ConfigError begins with
    `config_key`."""
    parser = parsers.load(spec, config_key)
    try:
        inspect.signature(parser).bind("", ())
    except (TypeError, ValueError):
        raise ConfigError(f"{config_key}: {spec!r} is not a parser; a parser takes (text, tools)") from None
    return parser


def parse_turn(parser: Parser, text: str, tools: tuple[str, ...], prompt: str = "") -> Parsed:
    """Read a turn. Without `tools` nothing is a call: text that looks like a call is content. If the `prompt`
    ends by opening a thought, the turn is a thought until the model closes the thought. If the prompt ends by
    closing a thought, a closing tag in the turn is content, unless the turn begins with the tag. A thought is
    never content: if a parser that is no CallFormat finds a thought beside a call in a text without tools,
    the content lacks the call's text."""
    think = think_tags(parser)
    prompt = prompt.rstrip()
    begins_thought = text.lstrip().startswith(think.open)
    if prompt.endswith(think.open) and not begins_thought:
        text = think.open + text

    if isinstance(parser, CallFormat):
        if prompt.endswith(think.close) and not begins_thought:
            # The turn begins after a closed thought. A tag that closes the thought again is no content.
            closes_again = text.lstrip().startswith(think.close)
            text = think.open + text if closes_again else think.open + think.close + text

        if not tools:
            reasoning, content = split_reasoning(text, think)
            return Parsed(content.strip(), reasoning=reasoning)

    parsed = parser(text, tools)
    if not tools and (parsed.calls or parsed.errors):
        return Parsed(parsed.content if parsed.reasoning else text, reasoning=parsed.reasoning)

    return parsed


def think_tags(parser: Parser) -> Tags:
    """Return the tags around the thoughts of the models that a parser reads."""
    return parser.think if isinstance(parser, CallFormat) else THINK


def split_reasoning(text: str, think: Tags) -> tuple[str, str]:
    """Split a text into reasoning and the text after it. Some models close thoughts that were not opened;
    reasoning that is not closed goes on to the end."""
    head, closing_tag, text_after = text.partition(think.close)
    if not closing_tag and not text.lstrip().startswith(think.open):
        return "", text
    return head.replace(think.open, "", 1).strip(), text_after


def assemble(
    content: str,
    reasoning: str,
    raw_calls: list[RawCall | Malformed],
    tools: tuple[str, ...],
    call_id: str = "call_{}",
) -> Parsed:
    """Give an id to each well-formed call, and a line of `errors` to each malformed call."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    for raw_call in raw_calls[:MAX_CALLS]:
        try:
            if isinstance(raw_call, Malformed):
                raise raw_call
            name, arguments = as_json(raw_call.name, with_types(raw_call.name, raw_call.arguments, tools))
            calls.append(ToolCall(name, arguments, raw_call.id or call_id.format(len(calls))))
        except Malformed as error:
            errors.append(str(error))

    if len(raw_calls) > MAX_CALLS:
        errors.append(f"a turn may have at most {MAX_CALLS} tool calls; any further calls were not read")

    return Parsed(content, tuple(calls), tuple(errors), reasoning)


ReadCall = Callable[[str, int], tuple[RawCall | list[RawCall | Malformed], int]]


def enclosed(text: str, tags: Tags, read_call: ReadCall, *sections: Tags) -> Iterator[CallBlock]:
    """Find calls between `tags`. `read_call(text, position)` returns the call that begins at `position`, or a
    list of calls, and the end, or raises Malformed. The tags of `sections` around all calls of a turn are
    optional: models forget section tags."""
    all_tags = (tags.open, *itertools.chain(*sections))
    position, tag = first_of(text, 0, all_tags)
    while tag:
        inner_start = position + len(tag)
        if tag == tags.open:
            block = _call_block(text, position, tags, read_call, all_tags)
        elif any(tag == section.open for section in sections) and not text.startswith(
            tags.open, skip_space(text, inner_start)
        ):
            end = first_of(text, inner_start, all_tags)[0]
            block = CallBlock(position, end, (Malformed(f"{tag} must be followed by {tags.open}"),))
        else:
            block = CallBlock(position, inner_start)

        yield block
        position, tag = first_of(text, block.end, all_tags)


def _call_block(
    text: str, position: int, tags: Tags, read_call: ReadCall, all_tags: tuple[str, ...]
) -> CallBlock:
    inner_start = position + len(tags.open)
    try:
        call, end = read_call(text, inner_start)
        raw_calls = (call,) if isinstance(call, RawCall) else tuple(call)
        if text.startswith("/>", end - 2):  # the opening tag closes itself
            return CallBlock(position, end, raw_calls)

        end = skip_space(text, end)
        if text.startswith(tags.close, end):
            return CallBlock(position, end + len(tags.close), raw_calls)
        error = Malformed(f"only the call may appear between {tags.open} and {tags.close}")
    except Malformed as raised:
        error = raised

    end, tag = first_of(text, inner_start, (*all_tags, tags.close))
    if tag == tags.close:
        return CallBlock(position, end + len(tag), (error,))

    return CallBlock(position, end, (Malformed(f"a {tags.open} was not closed with {tags.close}"),))


def first_of(text: str, start: int, tags: tuple[str, ...]) -> tuple[int, str]:
    """Find the first of the tags from `start` on: its position and text; without a tag the end of the text
    and ''."""
    match = _any_of(tags).search(text, start)
    return (match.start(), match[0]) if match else (len(text), "")


@cache
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


_SPACE = re.compile(r"\s*")


def skip_space(text: str, start: int) -> int:
    """Return the first position from `start` on that is no white space."""
    match = _SPACE.match(text, start)
    return match.end() if match else start
