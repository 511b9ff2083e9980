"""Finds out what a chat template does by rendering small conversations: how it ends a turn of the model, and
after which messages it leaves earlier turns as they are.

In these conversations the model's turns are marker words that no template contains; the text after a marker
is the template's. Only ENDS depends on model families.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from asyncrl.conversation.chat_render import Accepted, Render
from asyncrl.errors import ConfigError
from asyncrl.types import Message, ToolCall

ENDS = ("<|call|>", "<|eom_id|>")  # end a turn with tool calls where others end one without: gpt-oss, Llama

TURN = "asyncrl-turn"
CALL = "asyncrl-call"
THOUGHT = "asyncrl-thought"
_USER = Message("user", "asyncrl-question")
_TOOL = json.dumps(
    {
        "type": "function",
        "function": {
            "name": "asyncrl_probe",
            "description": "Nothing.",
            "parameters": {"type": "object", "properties": {"asyncrl": {"type": "string"}}},
        },
    }
)
_SYSTEM = Message("system", "asyncrl-rules")
_THINKING = (
    Message("assistant", TURN),
    Message("assistant", f"<think>\n{THOUGHT}\n</think>\n\n{TURN}"),
    Message("assistant", TURN, reasoning=THOUGHT),
)


@dataclass(frozen=True)
class TurnEnd:
    """The end of a turn: `tail` is what the model writes after the marker word `mark`, `token` then ends the
    turn. No token: the first token of the next message ends it (GLM)."""

    mark: str
    tail: str
    token: str

    def rest(self, text: str) -> str | None:
        """The text after the first turn; None if the turn does not end like this."""
        after = text.partition(self.mark)[2]
        ending = self.tail + self.token
        return after.removeprefix(ending) if after.startswith(ending) and self.mark in text else None


class TemplateProbe:
    """Describes the behaviour of one template. `controls`: texts of the tokens that are no ordinary words."""

    def __init__(self, render: Render, controls: Iterable[str]) -> None:
        self._render = render
        self._controls = sorted(filter(None, controls), key=len, reverse=True)
        self._plain_end = self._end(())
        self._end_cached = lru_cache(maxsize=1024)(self._end)  # by names and ids of calls

    def end(self, messages: Iterable[Message]) -> TurnEnd:
        """The end of a turn that is answered by these messages."""
        calls = _calls(messages)
        return self._end_cached(calls) if calls else self._plain_end

    def rest(self, messages: tuple[Message, ...]) -> str:
        """The text that the template writes after the end of a turn: the messages, and the start of the next
        turn. ConfigError where that cannot be found from the turn."""
        calls = _calls(messages)  # with tools, some tokenizers use another template
        text = self._render([_USER, _turn(calls), *messages], (_TOOL,) if calls else ())
        rest = self.end(messages).rest(text)
        if rest is None:
            raise ConfigError("the chat template does not show the model's words; use another one")
        return rest

    def stops(self) -> Iterator[str]:
        """Texts of the tokens that end a turn, the most usual first. ConfigError if there is none."""
        for answer in (_answers(("user",)), _answers(("tool",))):
            if token := self.end(answer).token:
                yield token
                continue
            try:
                rest = self.rest(answer)
            except ConfigError:  # the template has no such role
                continue
            first = next(filter(rest.startswith, self._controls), None)
            if first is None:
                raise ConfigError(
                    "the chat template writes no end of turn after the assistant; use another one"
                )
            yield first
        yield from (token for token in ENDS if token in self._controls)

    def written(self, source: str) -> list[str]:
        """The control tokens that the template writes, by its source and by what it renders: some are put
        together from parts."""
        texts = [source]
        for roles in (("user",), ("tool",)):
            answer = _answers(roles)
            for system in ((_SYSTEM,), ()):
                with suppress(ConfigError):
                    said = (*system, _USER, _turn(_calls(answer)), *answer)
                    texts.append(self._render(said, (_TOOL,) * (roles == ("tool",))))
        return [token for token in self._controls if any(token in text for text in texts)]

    def rewrites(self, roles: tuple[str, ...]) -> str:
        """The way in which the template changes earlier turns when messages of these roles follow; '':
        nothing, it only appends. ConfigError when it refuses or hides them."""
        answer = _answers(roles)
        rests = set()
        for beginning in self._beginnings(roles):
            rest = self._rest_of_two(beginning, answer)
            if rest.rewrites:
                return rest.rewrites
            rests |= {rest.first, rest.second}
        return "" if len(rests) == 1 else "writes the same message differently in other places"

    def accepted(self) -> Accepted:
        """The messages of system and user that the template writes, all of them and in their order."""
        rules = _SYSTEM
        laws = Message("system", "asyncrl-laws")
        turn = Message("assistant", TURN)
        more = Message("user", "asyncrl-more")
        return Accepted(
            system=self._shows(rules, _USER),
            several=self._shows(rules, laws, _USER),
            later=self._shows(rules, _USER, laws) and self._shows(rules, _USER, turn, laws, more),
            users=self._shows(_USER, more),
        )

    def _shows(self, *messages: Message) -> bool:
        try:
            text = self._render(messages)
        except ConfigError:
            return False
        places = [text.find(message.content) for message in messages]
        return min(places) >= 0 and places == sorted(places)

    def shows_tools(self) -> bool:
        return "asyncrl_probe" in self._render([_USER], (_TOOL,))

    def shows_calls(self) -> bool:
        return CALL in self._answered(_calls(_answers(("tool",))))

    def around(self) -> tuple[list[str], list[str]]:
        """The texts that the template itself may write before the content of a turn, after the opening of the
        turn, and between the content and the end of the turn; the longest first."""
        tail = self._plain_end.tail
        controls = re.compile("|".join(map(re.escape, self._controls)) or "(?!)")
        text = self._render([_USER, _turn(())], opening=False).partition(TURN)[0]
        opened = len(alike(self._render([_USER]), text))
        leads = [text[token.start() :] for token in controls.finditer(text) if token.end() > opened]
        return leads, [tail[: token.end()] for token in controls.finditer(tail)][::-1]

    def _beginnings(self, roles: tuple[str, ...]) -> Iterator[_Beginning]:
        """Beginnings after which a template may behave differently: with and without system message, tools,
        replies of tools, reasoning."""
        for (before, tools), turn in itertools.product(_before(roles), _THINKING):
            try:
                prompt = self._render(before, tools)
            except ConfigError:
                if before == (_USER,) and ("tool" in roles or not tools):
                    raise
                continue  # a template without system messages, or without tools
            if turn.reasoning or THOUGHT in turn.content or not prompt.rstrip().endswith("<think>"):
                yield _Beginning(before, tools, prompt, turn)

    def _rest_of_two(self, at: _Beginning, answer: tuple[Message, ...]) -> _Rests:
        """Render one turn and its answer, then two of each: the first must stand unchanged in the second."""
        exchange = (_turn(_calls(answer), at.turn), *answer)
        one = self._render((*at.before, *exchange), at.tools)
        two = self._render((*at.before, *exchange, *exchange), at.tools)
        if hidden := [message.role for message in answer if message.content not in one]:
            raise ConfigError(f"the chat template shows nothing of a message with the role {hidden[0]!r}")
        if self._drops_reasoning(at.turn, answer, one, two):
            return _Rests("drops the reasoning of earlier turns")
        if not (one.startswith(at.prompt) and two.startswith(one)):
            return _Rests("changes what stands before the new messages")
        end = self.end(answer)
        first = end.rest(one[len(at.prompt) :])
        second = end.rest(two[len(one) :])
        if first is None or second is None:
            return _Rests(f"no longer writes {end.token or 'the end of the turn'!r} where the turn ended")
        return _Rests("", first, second)

    def _drops_reasoning(self, turn: Message, answer: tuple[Message, ...], one: str, two: str) -> bool:
        if turn.reasoning:
            alone = self._render((_USER, _turn(_calls(answer), turn)), opening=False)
            return THOUGHT in alone and two.count(THOUGHT) < 2
        return THOUGHT in turn.content and THOUGHT not in one and TURN in one

    def _end(self, calls: tuple[ToolCall, ...]) -> TurnEnd:
        try:
            text = self._render([_USER, _turn(calls)], opening=False)
        except ConfigError:
            if calls:
                return self._plain_end
            raise
        at, mark = max((text.rfind(mark), mark) for mark in (TURN, CALL))
        if at < 0:
            raise ConfigError("the chat template does not show the model's words; use another one")
        later = self._answered(calls)
        tail = self._of_the_turn(text[at + len(mark) :], later, mark).rstrip()
        allowed = (self._plain_end.token, *ENDS) if calls else self._controls
        token = next((token for token in allowed if token and tail.endswith(token)), "")
        if not token and (follows := later.partition(mark)[2]).startswith(tail):
            follows = follows[len(tail) :]
            if follows.lstrip().startswith(
                tuple(self._controls)
            ):  # it ends the turn, after white space or not
                tail += follows[: len(follows) - len(follows.lstrip())]
            else:  # replies stand within the turn (Apertus): the tag behind the calls ends it
                token = next(filter(tail.endswith, self._controls), "")
        return TurnEnd(mark, tail.removesuffix(token), token)

    def _answered(self, calls: tuple[ToolCall, ...]) -> str:
        """A turn that is answered, rendered; '' where the template refuses that."""
        replies = [Message("tool", "asyncrl", tool_call_id=call.id, name=call.name) for call in calls]
        try:
            return self._render([_USER, _turn(calls), *(replies or _answers(("user",)))])
        except ConfigError:
            return ""

    def _of_the_turn(self, tail: str, later: str, mark: str) -> str:
        """The part that belongs to the turn, of the text that the template writes after the last one. Some
        end with more than the turn, asked for an opening or not: with one (Llama 3, Command R7B), or with the
        end of the text (Phi-3.5). So: what stands there too when somebody answers, up to the answer's first
        token."""
        after = later.partition(mark)[2]
        if not later or after.startswith(tail):
            return tail
        several = [token for token in self._controls if later.count(token) > 1]
        begins = min(several, key=later.find, default="\0")  # with the first of these, messages begin
        both = alike(tail, after).partition(begins)[0]
        end = max((both.rfind(token) + len(token) for token in self._controls if token in both), default=0)
        return both[:end] or tail  # nothing in common: a turn that is answered ends otherwise (gpt-oss)


def alike(one: str, other: str) -> str:
    """The beginning that both share."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(left for left, _ in pairs)


@dataclass(frozen=True)
class _Beginning:
    before: tuple[Message, ...]
    tools: tuple[str, ...]
    prompt: str  # `before`, rendered
    turn: Message  # of the model after it, without its calls


@dataclass(frozen=True)
class _Rests:
    """How the template rewrites earlier turns ('': not), and the texts after the first and second turn."""

    rewrites: str
    first: str = ""
    second: str = ""


def _before(roles: tuple[str, ...]) -> list[tuple[tuple[Message, ...], tuple[str, ...]]]:
    """Messages, and tools, before a turn that messages of these roles answer."""
    plain = (_USER,)
    ruled = (_SYSTEM, _USER)
    tools = (_TOOL,)
    if "tool" in roles:
        return [(plain, tools), (ruled, tools)]
    replies = _answers(("tool",))
    called = (_turn(_calls(replies)), *replies)
    befores = (plain, ruled, (*plain, *called), (*ruled, *called))
    return [(plain, ()), (ruled, ()), *((before, tools) for before in befores)]


def _answers(roles: tuple[str, ...]) -> tuple[Message, ...]:
    """Write one message of each role; two of a tool."""
    messages: list[Message] = []
    for role in roles:
        if role == "tool":
            messages += [
                Message(role, f"asyncrl-{n}", tool_call_id=f"call_{n}", name=f"asyncrl_{n}") for n in "01"
            ]
        else:
            messages.append(Message(role, "asyncrl-more"))
    return tuple(messages)


def _calls(messages: Iterable[Message]) -> tuple[ToolCall, ...]:
    """The calls that the tool messages among these answer; the arguments of the last hold the marker."""
    replies = [message for message in messages if message.role == "tool"]
    return tuple(
        ToolCall(
            reply.name or "asyncrl_probe",
            json.dumps({"asyncrl": CALL if left == 1 else "asyncrl-other"}),
            reply.tool_call_id,
        )
        for left, reply in zip(range(len(replies), 0, -1), replies, strict=True)
    )


def _turn(calls: tuple[ToolCall, ...], turn: Message = _THINKING[0]) -> Message:
    return Message(turn.role, turn.content, calls, reasoning=turn.reasoning)
