"""Reads what all call formats share: a turn is reasoning, then content with calls between it."""

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

MAX_CALLS = 256  # of one turn; bounds the cost of a hostile text


class Parsed(msgspec.Struct, frozen=True):
    """A turn, read. `content` is the text outside calls and reasoning; `errors` are one line per malformed
    call; `reasoning` is what the model thought, where its format marks that."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    reasoning: str = ""


Parser = Callable[[str, tuple[str, ...]], Parsed]
"""`(text, tools) -> Parsed`. `tools`: OpenAI schemas, as JSON text. It never raises."""

parsers: Registry[Parser] = Registry("tool-call format")


class RawCall(NamedTuple):
    """A call before its arguments are checked. `id`: the model's own, if its format has one."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class CallBlock(NamedTuple):
    """The stretch [start, end) of the text that is no content: its calls, or what is wrong with them."""

    start: int
    end: int
    raw_calls: tuple[RawCall | Malformed, ...] = ()


class Tags(NamedTuple):
    """A pair of tags with something between them."""

    open: str
    close: str


THINK = Tags("<think>", "</think>")
FindBlocks = Callable[[str], Iterable[CallBlock]]


@dataclass(frozen=True)
class CallFormat:
    """A parser. `blocks` finds the calls, in order, in the text after the reasoning, which is between the
    tags `think`. `call_id` names the k-th call of a turn unless the model did."""

    blocks: FindBlocks
    think: Tags = THINK
    call_id: str = "call_{}"

    def __call__(self, text: str, tools: tuple[str, ...] = ()) -> Parsed:
        reasoning, rest = split_reasoning(text, self.think)
        content: list[str] = []
        found: list[RawCall | Malformed] = []
        at = 0
        for block in self.blocks(rest):
            content.append(rest[at : block.start])
            found += block.raw_calls
            at = block.end
            if len(found) > MAX_CALLS:
                break
        else:
            content.append(rest[at:])
        return assemble("".join(content).strip(), reasoning, found, tools, self.call_id)


def call_format(
    name: str, think: Tags = THINK, call_id: str = "call_{}"
) -> Callable[[FindBlocks], CallFormat]:
    """Decorator: make a parser of a function that finds the blocks of calls, and register it."""

    def register(blocks: FindBlocks) -> CallFormat:
        made = CallFormat(blocks, think, call_id)
        parsers.register(name)(made)
        return made

    return register


def load_parser(spec: str, where: str = "rollout.parser") -> Parser:
    """Load a parser by registered name, `module:function` or `file.py:function`. ConfigError that begins with
    `where`."""
    found = parsers.load(spec, where)
    try:
        inspect.signature(found).bind("", ())
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {spec!r} is no parser; (text, tools) is expected") from None
    return found


def parse_turn(parser: Parser, text: str, tools: tuple[str, ...], prompt: str = "") -> Parsed:
    """Read a turn. Without `tools` nothing is a call: text that looks like one is content. If the `prompt`
    ends by opening a thought, the turn is a thought until the model closes it. If the prompt ends by closing
    one, a closing tag in the turn is content, unless the turn begins with it. A thought is never content: if
    a parser that is no CallFormat found one beside a call in such text, the content is without the call's
    text."""
    think = think_tags(parser)
    prompt = prompt.rstrip()
    thinks = text.lstrip().startswith(think.open)
    if prompt.endswith(think.open) and not thinks:
        text = think.open + text
    if isinstance(parser, CallFormat):
        if prompt.endswith(think.close) and not thinks:  # a tag that closes it again is no content
            text = think.open + think.close * (not text.lstrip().startswith(think.close)) + text
        if not tools:
            reasoning, rest = split_reasoning(text, think)
            return Parsed(rest.strip(), reasoning=reasoning)
    parsed = parser(text, tools)
    if not tools and (parsed.calls or parsed.errors):
        return Parsed(parsed.content if parsed.reasoning else text, reasoning=parsed.reasoning)
    return parsed


def think_tags(parser: Parser) -> Tags:
    """Return the tags around the thoughts of the models that a parser reads."""
    return parser.think if isinstance(parser, CallFormat) else THINK


def split_reasoning(text: str, think: Tags) -> tuple[str, str]:
    """Reasoning and the rest. Some models close what they did not open; reasoning that is not closed goes on
    to the end."""
    head, closed, rest = text.partition(think.close)
    if not closed and not text.lstrip().startswith(think.open):
        return "", text
    return head.replace(think.open, "", 1).strip(), rest


def assemble(
    content: str,
    reasoning: str,
    found: list[RawCall | Malformed],
    tools: tuple[str, ...],
    call_id: str = "call_{}",
) -> Parsed:
    """Give the well-formed calls their ids, and each malformed one a line of `errors`."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    for item in found[:MAX_CALLS]:
        try:
            if isinstance(item, Malformed):
                raise item
            name, arguments = as_json(item.name, with_types(item.name, item.arguments, tools))
            calls.append(ToolCall(name, arguments, item.id or call_id.format(len(calls))))
        except Malformed as error:
            errors.append(str(error))
    if len(found) > MAX_CALLS:
        errors.append(f"a turn may have {MAX_CALLS} tool calls; what follows was not read")
    return Parsed(content, tuple(calls), tuple(errors), reasoning)


ReadCall = Callable[[str, int], tuple[RawCall | list[RawCall | Malformed], int]]


def enclosed(text: str, tags: Tags, read: ReadCall, *sections: Tags) -> Iterator[CallBlock]:
    """Calls between `tags`. `read(text, at)` returns the call that begins at `at`, or a list of them, and its
    end, or raises Malformed. The tags of `sections` around all calls of a turn are optional: models forget
    them."""
    marks = (tags.open, *itertools.chain(*sections))
    at, tag = first_of(text, 0, marks)
    while tag:
        inside = at + len(tag)
        if tag == tags.open:
            block = _one_call(text, at, tags, read, marks)
        elif any(tag == section.open for section in sections) and not text.startswith(
            tags.open, skip_space(text, inside)
        ):
            end = first_of(text, inside, marks)[0]
            block = CallBlock(at, end, (Malformed(f"{tag} must be followed by {tags.open}"),))
        else:
            block = CallBlock(at, inside)
        yield block
        at, tag = first_of(text, block.end, marks)


def _one_call(text: str, at: int, tags: Tags, read: ReadCall, marks: tuple[str, ...]) -> CallBlock:
    inside = at + len(tags.open)
    try:
        call, end = read(text, inside)
        found = (call,) if isinstance(call, RawCall) else tuple(call)
        if text.startswith("/>", end - 2):  # a tag that closes itself
            return CallBlock(at, end, found)
        end = skip_space(text, end)
        if text.startswith(tags.close, end):
            return CallBlock(at, end + len(tags.close), found)
        error = Malformed(f"only the call belongs between {tags.open} and {tags.close}")
    except Malformed as raised:
        error = raised
    end, tag = first_of(text, inside, (*marks, tags.close))
    if tag == tags.close:
        return CallBlock(at, end + len(tag), (error,))
    return CallBlock(at, end, (Malformed(f"a {tags.open} was not closed with {tags.close}"),))


def first_of(text: str, at: int, tags: tuple[str, ...]) -> tuple[int, str]:
    """Find the first of the tags from `at` on: its place and itself; the end of the text and '' without."""
    match = _any_of(tags).search(text, at)
    return (match.start(), match[0]) if match else (len(text), "")


@cache
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


_SPACE = re.compile(r"\s*")


def skip_space(text: str, at: int) -> int:
    """The first position from `at` on that is no white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at
