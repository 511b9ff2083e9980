"""What all call formats share: a turn is reasoning, then content with calls between it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from asyncrl.conversation.parsers.values import Malformed, as_json
from asyncrl.registry import Registry
from asyncrl.types import ToolCall

MAX_CALLS = 256  # of one turn; it also bounds what a hostile text can cost, whatever one call costs


class Parsed(msgspec.Struct, frozen=True):
    """A turn, read. `content` is the text outside calls and reasoning; `errors` are one line per malformed
    call; `reasoning` is what the model thought, where its format marks that."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    reasoning: str = ""


Parser = Callable[[str], Parsed]

parsers: Registry[Parser] = Registry("tool-call format")


class Draft(NamedTuple):
    """A call as it is written. `id`: the model's own, if its format has one."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class Block(NamedTuple):
    """A stretch of the text that is no content, with the calls in it, or what is wrong with them."""

    start: int
    end: int
    found: tuple[Draft | Malformed, ...] = ()


class Tags(NamedTuple):
    """What encloses something."""

    open: str
    close: str


THINK = Tags("<think>", "</think>")


@dataclass(frozen=True)
class Format:
    """A parser: `blocks` finds the calls, in order, in what follows the reasoning.

    `opens`: what may begin a block anywhere; `leads`: the characters that may do so as the first of a turn.
    `call_id` names the k-th call of a turn unless the model did.
    """

    blocks: Callable[[str], Iterable[Block]]
    opens: tuple[str, ...]
    leads: str = ""
    think: Tags = THINK
    call_id: str = "call_{}"

    def __call__(self, text: str) -> Parsed:
        reasoning, rest = split(text, self.think)
        gaps: list[str] = []
        found: list[Draft | Malformed] = []
        at = 0
        for block in self.blocks(rest):
            gaps.append(rest[at : block.start])
            found += block.found
            at = block.end
            if len(found) > MAX_CALLS:
                break
        else:
            gaps.append(rest[at:])
        return assemble("".join(gaps).strip(), reasoning, found, self.call_id)

    def visible(self, text: str, thinking: bool) -> str:
        """See `visible`."""
        began = text.lstrip()
        if self.think.close in text:
            began = split(text, self.think)[1].lstrip()
        elif thinking or began.startswith(self.think.open) or self.think.open.startswith(began):
            return ""
        if began[:1] and began[0] in self.leads:
            return ""
        return before(began, (*self.opens, self.think.close)).rstrip()


def unread(parser: Parser, text: str) -> Parsed:
    """A turn where there are no tools: whatever looks like a call is content."""
    if isinstance(parser, Format):
        reasoning, rest = split(text, parser.think)
        return Parsed(rest.strip(), reasoning=reasoning)
    parsed = parser(text)
    return Parsed(text, reasoning=parsed.reasoning) if parsed.calls or parsed.errors else parsed


@runtime_checkable
class _Streamed(Protocol):
    def visible(self, text: str, thinking: bool) -> str: ...


def visible(parser: Parser, text: str, thinking: bool = True) -> str:
    """The part of the content that stays content whatever the model writes after `text`; it only ever grows.

    `thinking`: the prompt may have opened the reasoning, so that nothing is certain before its closing tag;
    say False where it has not. '' for parsers of which only the function is known.
    """
    return parser.visible(text, thinking) if isinstance(parser, _Streamed) else ""


def split(text: str, think: Tags) -> tuple[str, str]:
    """Reasoning and the rest. The opening tag may be part of the prompt; what was not closed is reasoning to
    the end."""
    head, closed, rest = text.partition(think.close)
    if not closed and not text.lstrip().startswith(think.open):
        return "", text
    return head.replace(think.open, "", 1).strip(), rest


def assemble(content: str, reasoning: str, found: Iterable[Draft | Malformed], call_id: str) -> Parsed:
    """The calls with ids, the complaints as lines."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    everything = list(found)
    for item in everything[:MAX_CALLS]:
        try:
            if isinstance(item, Malformed):
                raise item
            name, arguments = as_json(item.name, item.arguments)
            calls.append(ToolCall(name, arguments, item.id or call_id.format(len(calls))))
        except Malformed as error:
            errors.append(str(error))
    if len(everything) > MAX_CALLS:
        errors.append(f"a turn may have {MAX_CALLS} tool calls; what follows was not read")
    return Parsed(content, tuple(calls), tuple(errors), reasoning)


def before(text: str, tags: tuple[str, ...]) -> str:
    """The text up to the first of these tags, or to what may become one."""
    at, tag = first_of(text, 0, tags)
    return text[:at] if tag else settled(text, tags)


def settled(text: str, tags: Iterable[str]) -> str:
    """The text without an end that may become one of these tags."""
    return text[: min(len(text) - _partial(text, tag) for tag in tags)]


def _partial(text: str, tag: str) -> int:
    """How many characters at the end of the text are the first ones of the tag, but not all of it."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


Reader = Callable[[str, int], tuple[Draft, int]]


def enclosed(text: str, tags: Tags, read: Reader, section: Tags | None = None) -> Iterator[Block]:
    """Calls between tags. `read` is told where one begins, gives it and where it ends, or raises Malformed.
    A `section` encloses all calls of a turn; models forget its tags, so they bind nothing."""
    marks = (tags.open, *(section or ()))
    at, tag = first_of(text, 0, marks)
    while tag:
        inside = at + len(tag)
        if tag == tags.open:
            block = _one(text, at, tags, read, marks)
        elif section and tag == section.open and not text.startswith(tags.open, skip(text, inside)):
            stop = first_of(text, inside, marks)[0]
            block = Block(at, stop, (Malformed(f"{tag} must be followed by {tags.open}"),))
        else:
            block = Block(at, inside)
        yield block
        at, tag = first_of(text, block.end, marks)


def _one(text: str, at: int, tags: Tags, read: Reader, marks: tuple[str, ...]) -> Block:
    inside = at + len(tags.open)
    try:
        draft, end = read(text, inside)
        end = skip(text, end)
        if text.startswith(tags.close, end):
            return Block(at, end + len(tags.close), (draft,))
        error = Malformed(f"only the call belongs between {tags.open} and {tags.close}")
    except Malformed as raised:
        error = raised
    end, tag = first_of(text, inside, (*marks, tags.close))
    if tag == tags.close:
        return Block(at, end + len(tag), (error,))
    return Block(at, end, (Malformed(f"a {tags.open} was not closed with {tags.close}"),))


def first_of(text: str, at: int, tags: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of the tags is, and which; the end and '' if there is none."""
    match = _any(tags).search(text, at)
    return (match.start(), match[0]) if match else (len(text), "")


@cache
def _any(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def skip(text: str, at: int) -> int:
    """The first place from `at` on that is not white."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
