"""Finds out how a chat template behaves by rendering small conversations: how the template ends a turn of the
model, and after which messages the template leaves earlier turns unchanged.

In these conversations the model's turns are marker words that no template contains; the text after a marker
is the template's. As in real conversations, there are several exchanges, and every call has an id of its own.
Only CALL_TURN_ENDS depends on model families.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from asyncrl.conversation.chat_render import Accepted, Render
from asyncrl.errors import ConfigError
from asyncrl.types import IMAGE_MARK, MALFORMED_CALL, ImageRef, Message, ToolCall

# Tokens that end only turns with tool calls: gpt-oss, Llama, GLM.
CALL_TURN_ENDS = (
    "<|call|>",
    "<|eom_id|>",
    "<|observation|>",
)

TURN_MARK = "asyncrl-turn"
CALL_MARK = "asyncrl-call"
THOUGHT_MARK = "asyncrl-thought"
PROBE_EXCHANGES = 3  # turns with their answers
CALLS_IN_PROBE = 2  # calls in a turn that tools answer
_USER_MESSAGE = Message("user", "asyncrl-question")
_PROBE_TOOL = json.dumps(
    {
        "type": "function",
        "function": {
            "name": "asyncrl_probe",
            "description": "Nothing.",
            "parameters": {
                "type": "object",
                "properties": {"asyncrl": {"type": "string", "description": "Nothing."}},
            },
        },
    }
)
_SYSTEM_MESSAGE = Message("system", "asyncrl-rules")
_PROBE_ID = re.compile(r"asyncrl\d(?P<number>\d)")  # by exchange and call
_PROBE_TURNS = (
    Message("assistant", TURN_MARK),
    Message("assistant", f"<think>\n{THOUGHT_MARK}\n</think>\n\n{TURN_MARK}"),
    Message("assistant", TURN_MARK, reasoning=THOUGHT_MARK),
)


@dataclass(frozen=True)
class TurnEnd:
    """The end of a turn: the model writes `tail` after the marker word `mark`, and `token` then ends the
    turn. No token: the first token of the next message ends the turn (GLM)."""

    mark: str
    tail: str
    token: str

    def text_after_turn(self, text: str) -> str | None:
        """Return the text after the first turn; None if the turn ends otherwise."""
        _, mark, following_text = text.partition(self.mark)
        ending = self.tail + self.token
        return following_text.removeprefix(ending) if mark and following_text.startswith(ending) else None


@dataclass(frozen=True)
class Continuation:
    """How a template continues a conversation with messages of some roles.

    `rewriting`: how the template changes earlier turns; '': the template only appends.
    `depends_on_history`: the text of the new messages depends on the messages before them, as in Command A,
    which numbers the calls of the whole conversation.
    """

    rewriting: str = ""
    depends_on_history: bool = False


class WrittenCall(NamedTuple):
    """A turn with one call, as a template writes the turn."""

    text: str
    call: ToolCall
    tools: tuple[str, ...]  # the schema of the called tool
    prompt: str  # the text before the turn


class TemplateProbe:
    """Describes the behaviour of one template. `controls`: texts of the control tokens."""

    def __init__(self, render: Render, controls: Iterable[str]) -> None:
        self._render = render
        self._control_tokens = sorted(filter(None, controls), key=len, reverse=True)
        self._plain_end = self._find_end(())
        self._cached_end = lru_cache(maxsize=1024)(self._find_end)  # the key: names and ids of calls

    def turn_end(self, messages: Iterable[Message]) -> TurnEnd:
        """Return the end of a turn that these messages answer."""
        calls = _answered_calls(messages)
        return self._cached_end(calls) if calls else self._plain_end

    def text_after_turn(self, messages: tuple[Message, ...]) -> str:
        """Return the text that the template writes after the end of a turn: the messages, and the start of
        the next turn. ConfigError if the template does not show the turn."""
        calls = _answered_calls(messages)  # with tools, some tokenizers use another template
        text = self._render([_USER_MESSAGE, _model_turn(calls), *messages], (_PROBE_TOOL,) if calls else ())
        following_text = self.turn_end(messages).text_after_turn(text)
        if following_text is None:
            raise ConfigError("the chat template omits the model's text; use another template")
        return following_text

    def text_after_history(
        self, history: tuple[Message, ...], messages: tuple[Message, ...], tools: tuple[str, ...]
    ) -> tuple[TurnEnd, str]:
        """Return the end of the last turn in `history`, and the text that the template writes after that turn
        when the messages answer. ConfigError if the template does not show the turn."""
        *earlier_messages, turn = history
        calls = _marked_calls(turn.tool_calls)
        turn_end = self._cached_end(calls) if calls else self._plain_end
        marked_turn = _model_turn(calls, replace(turn, content=TURN_MARK))

        prompt = self._render(earlier_messages, tools)
        text = self._render([*earlier_messages, marked_turn, *messages], tools)
        turn_start = len(prompt) if text.startswith(prompt) else len(common_prefix(prompt, text))
        following_text = turn_end.text_after_turn(text[turn_start:])
        if following_text is None:
            raise ConfigError("the chat template omits the model's text; use another template")
        return turn_end, following_text

    def stop_tokens(self) -> Iterator[str]:
        """Yield the texts of the tokens that end a turn, the most usual first. ConfigError if no token
        does."""
        for replies in (_replies_of_roles(("user",)), _replies_of_roles(("tool",))):
            if token := self.turn_end(replies).token:
                yield token
                continue

            try:
                following_text = self.text_after_turn(replies)
            except ConfigError:  # the template has no such role
                continue

            first_token = next(filter(following_text.startswith, self._control_tokens), None)
            if first_token is None:
                raise ConfigError(
                    "the chat template does not mark the end of the assistant's turn; use another template"
                )

            yield first_token

        yield from (token for token in CALL_TURN_ENDS if token in self._control_tokens)

    def written_tokens(self, source: str) -> list[str]:
        """Return the control tokens that the template writes, by the source and by rendered texts: some
        tokens are put together from parts."""
        texts = [source]
        for roles in (("user",), ("tool",)):
            replies = _replies_of_roles(roles)
            for system_messages in ((_SYSTEM_MESSAGE,), ()):
                with suppress(ConfigError):
                    probe_messages = (
                        *system_messages,
                        _USER_MESSAGE,
                        _model_turn(_answered_calls(replies)),
                        *replies,
                    )
                    tools = (_PROBE_TOOL,) if roles == ("tool",) else ()
                    texts.append(self._render(probe_messages, tools))

        return [token for token in self._control_tokens if any(token in text for text in texts)]

    def continuation(self, roles: tuple[str, ...]) -> Continuation:
        """Return how the template continues a conversation when messages of these roles answer the turns.
        ConfigError when the template refuses or hides the messages."""
        following_texts: set[str] = set()
        for beginning in self._beginnings(roles):
            # Each text must begin the text of the conversation with one more exchange.
            turn = beginning.turn
            messages = beginning.messages
            texts = [beginning.prompt]
            turn_ends: list[TurnEnd] = []
            for exchange in range(1, 1 + PROBE_EXCHANGES):
                replies = _replies_of_roles(roles, exchange)
                messages = (*messages, _model_turn(_answered_calls(replies), turn), *replies)
                texts.append(self._render(messages, beginning.tools))
                turn_ends.append(self.turn_end(replies))

            if hidden_roles := [message.role for message in replies if message.content not in texts[1]]:
                raise ConfigError(f"the chat template omits messages with the role {hidden_roles[0]!r}")

            if turn.reasoning:
                turn_alone = self._render((_USER_MESSAGE, turn), opening=False)
                thought_count = texts[-1].count(THOUGHT_MARK) - beginning.prompt.count(THOUGHT_MARK)
                drops_reasoning = THOUGHT_MARK in turn_alone and thought_count < PROBE_EXCHANGES
            else:
                drops_reasoning = (
                    THOUGHT_MARK in turn.content and THOUGHT_MARK not in texts[1] and TURN_MARK in texts[1]
                )
            if drops_reasoning:
                return Continuation("drops the reasoning of earlier turns")
            if not all(text.startswith(earlier_text) for earlier_text, text in itertools.pairwise(texts)):
                return Continuation("changes the text before the new messages")

            for turn_end, (earlier_text, text) in zip(turn_ends, itertools.pairwise(texts), strict=True):
                following_text = turn_end.text_after_turn(text[len(earlier_text) :])
                if following_text is None:
                    if turn_end.token:
                        return Continuation(f"no longer writes {turn_end.token!r} at the end of the turn")
                    return Continuation("no longer marks the end of the turn")
                # Ids differ from exchange to exchange because the calls do, not because of the template.
                following_texts.add(_PROBE_ID.sub(_without_exchange, following_text))

        depends_on_history = len(following_texts) > 1 or ("tool" in roles and self._marks_missing_calls())
        return Continuation(depends_on_history=depends_on_history)

    def _marks_missing_calls(self) -> bool:
        """Return True if the template writes a tool message differently after a turn without calls: the
        error of a malformed call is such a message."""
        reply = Message("tool", "asyncrl-0", name=MALFORMED_CALL)
        try:
            text = self._render([_USER_MESSAGE, _model_turn(()), reply], (_PROBE_TOOL,))
        except ConfigError:
            return False

        following_text = self._plain_end.text_after_turn(text)
        return following_text is not None and following_text != self.text_after_turn((reply,))

    def accepted_messages(self) -> Accepted:
        """Return which messages of system and user the template writes completely and in order."""
        first_rules = _SYSTEM_MESSAGE
        second_rules = Message("system", "asyncrl-laws")
        model_turn = Message("assistant", TURN_MARK)
        second_user = Message("user", "asyncrl-more")

        return Accepted(
            system=self._shows(first_rules, _USER_MESSAGE),
            several=self._shows(first_rules, second_rules, _USER_MESSAGE),
            later=self._shows(first_rules, _USER_MESSAGE, second_rules)
            and self._shows(first_rules, _USER_MESSAGE, model_turn, second_rules, second_user),
            users=self._shows(_USER_MESSAGE, second_user),
        )

    def _shows(self, *messages: Message) -> bool:
        try:
            text = self._render(messages)
        except ConfigError:
            return False
        positions = [text.find(message.content) for message in messages]
        return min(positions) >= 0 and positions == sorted(positions)

    def shows_tools(self) -> bool:
        return "asyncrl_probe" in self._render([_USER_MESSAGE], (_PROBE_TOOL,))

    def shows_calls(self) -> bool:
        return CALL_MARK in self._answered_text(_answered_calls(_replies_of_roles(("tool",))))

    def written_call(self) -> WrittenCall | None:
        """Return a turn with a call as the template writes the turn; None if the template does not show
        calls."""
        call = ToolCall("asyncrl_probe", json.dumps({"asyncrl": CALL_MARK}), "asyncrl01")
        turn = Message("assistant", "", (call,))
        tools = (_PROBE_TOOL,)
        try:
            prompt = self._render([_USER_MESSAGE], tools)
            text = self._render([_USER_MESSAGE, turn], tools, opening=False)
        except ConfigError:
            return None

        if CALL_MARK not in text:
            return None

        # The opening of the turn may open a thought, too: the turn begins with the first token that differs.
        turn_start = len(common_prefix(prompt, text))
        control_pattern = self._control_pattern()
        for token in control_pattern.finditer(text):
            if token.start() < turn_start < token.end():
                turn_start = token.start()

        return WrittenCall(text[turn_start:], call, tools, prompt=text[:turn_start])

    def texts_around_content(self) -> tuple[list[str], list[str]]:
        """Return the texts that the template itself may write before the content of a turn (after the opening
        of the turn), and between the content and the end of the turn; the longest first."""
        turn_tail = self._plain_end.tail
        control_pattern = self._control_pattern()
        text_before = self._render([_USER_MESSAGE, _model_turn(())], opening=False).partition(TURN_MARK)[0]
        opening_length = len(common_prefix(self._render([_USER_MESSAGE]), text_before))
        content_leads = [
            text_before[token.start() :]
            for token in control_pattern.finditer(text_before)
            if token.end() > opening_length
        ]
        content_closings = [turn_tail[: token.end()] for token in control_pattern.finditer(turn_tail)]

        return content_leads, content_closings[::-1]

    def _control_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._control_tokens)) or "(?!)")

    def _beginnings(self, roles: tuple[str, ...]) -> Iterator[_Beginning]:
        """Yield beginnings after which a template may behave differently: with and without system message,
        tools, replies of tools, reasoning."""
        contexts_by_turn = [_contexts_before_turn(roles, turn) for turn in _PROBE_TURNS]
        for contexts in zip(*contexts_by_turn, strict=True):
            for (messages_before, tools), turn in zip(contexts, _PROBE_TURNS, strict=True):
                try:
                    prompt = self._render(messages_before, tools)
                except ConfigError:
                    if messages_before == (_USER_MESSAGE,) and ("tool" in roles or not tools):
                        raise
                    continue  # a template without system messages, or without tools

                if turn.reasoning or THOUGHT_MARK in turn.content or not prompt.rstrip().endswith("<think>"):
                    yield _Beginning(messages_before, tools, prompt, turn)

    def _find_end(self, calls: tuple[ToolCall, ...]) -> TurnEnd:
        try:
            text = self._render([_USER_MESSAGE, _model_turn(calls)], opening=False)
        except ConfigError:
            if calls:
                return self._plain_end
            raise

        mark_position, mark = max((text.rfind(mark), mark) for mark in (TURN_MARK, CALL_MARK))
        if mark_position < 0:
            raise ConfigError("the chat template omits the model's text; use another template")

        answered_text = self._answered_text(calls)
        turn_tail = self._turn_part(text[mark_position + len(mark) :], answered_text, mark).rstrip()
        possible_tokens = (self._plain_end.token, *CALL_TURN_ENDS) if calls else self._control_tokens

        token = next((token for token in possible_tokens if token and turn_tail.endswith(token)), "")
        if not token and (following_text := answered_text.partition(mark)[2]).startswith(turn_tail):
            following_text = following_text[len(turn_tail) :]
            # The control token after the turn ends the turn, with or without white space before.
            if following_text.lstrip().startswith(tuple(self._control_tokens)):
                turn_tail += following_text[: len(following_text) - len(following_text.lstrip())]
            else:  # replies stand within the turn (Apertus): the tag behind the calls ends the turn
                token = next(filter(turn_tail.endswith, self._control_tokens), "")

        return TurnEnd(mark, turn_tail.removesuffix(token), token)

    def _answered_text(self, calls: tuple[ToolCall, ...]) -> str:
        """Render a turn with an answer; '' if the template refuses the answer."""
        replies = [Message("tool", "asyncrl", tool_call_id=call.id, name=call.name) for call in calls]
        try:
            return self._render(
                [_USER_MESSAGE, _model_turn(calls), *(replies or _replies_of_roles(("user",)))]
            )
        except ConfigError:
            return ""

    def _turn_part(self, turn_tail: str, answered_text: str, mark: str) -> str:
        """Return the part that belongs to the turn, of the text that the template writes after the last turn.
        Some templates write more than the turn there, even if no opening is asked for: an opening (Llama 3,
        Command R7B), or the end of the text (Phi-3.5). The turn's part is the text that also appears if a
        message follows, up to the first token of that message."""
        answered_tail = answered_text.partition(mark)[2]
        if not answered_text or answered_tail.startswith(turn_tail):
            return turn_tail

        repeated_tokens = [token for token in self._control_tokens if answered_text.count(token) > 1]
        # Messages begin with this token.
        next_message_token = min(repeated_tokens, key=answered_text.find, default="\0")
        common_tail = common_prefix(turn_tail, answered_tail).partition(next_message_token)[0]
        turn_length = max(
            (common_tail.rfind(token) + len(token) for token in self._control_tokens if token in common_tail),
            default=0,
        )

        # Nothing in common: an answered turn ends otherwise (gpt-oss).
        return common_tail[:turn_length] or turn_tail


def find_image_tokens(render: Render, controls: Iterable[str]) -> set[str]:
    """Return the control tokens that the template writes for an image; none if it cannot write images."""
    image_message = Message("user", IMAGE_MARK, images=(ImageRef("", height=0, width=0),))
    try:
        text = render([_USER_MESSAGE])
        text_with_image = render([image_message])
    except ConfigError:
        return set()
    return {token for token in controls if token and text_with_image.count(token) > text.count(token)}


def common_prefix(first_text: str, second_text: str) -> str:
    """Return the beginning that both texts share."""
    equal_pairs = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(first_text, second_text, strict=False)
    )
    return "".join(character for character, _ in equal_pairs)


@dataclass(frozen=True)
class _Beginning:
    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    prompt: str  # `messages`, rendered
    turn: Message  # the turn of the model after `messages`, without calls


def _contexts_before_turn(
    roles: tuple[str, ...], turn: Message
) -> list[tuple[tuple[Message, ...], tuple[str, ...]]]:
    """Return messages and tools that may stand before a turn, if messages of these roles answer the turn. An
    earlier turn with calls has the reasoning of `turn`."""
    user_only = (_USER_MESSAGE,)
    with_system = (_SYSTEM_MESSAGE, _USER_MESSAGE)
    tool_schemas: tuple[str, ...] = (_PROBE_TOOL,)
    replies = _replies_of_roles(("tool",))
    call_and_replies = (_model_turn(_answered_calls(replies), turn), *replies)
    contexts_with_tools = [
        (user_only, tool_schemas),
        (with_system, tool_schemas),
        ((*user_only, *call_and_replies), tool_schemas),
        ((*with_system, *call_and_replies), tool_schemas),
    ]

    return (
        contexts_with_tools if "tool" in roles else [(user_only, ()), (with_system, ()), *contexts_with_tools]
    )


def _replies_of_roles(roles: tuple[str, ...], exchange: int = 0) -> tuple[Message, ...]:
    """Write one message of each role; for tools, CALLS_IN_PROBE messages, with ids that no other `exchange`
    has. The ids are as long as Mistral's."""
    messages: list[Message] = []
    for role in roles:
        if role == "tool":
            messages += [
                Message(
                    role,
                    f"asyncrl-{number}",
                    tool_call_id=f"asyncrl{exchange}{number}",
                    name=f"asyncrl_{number}",
                )
                for number in range(CALLS_IN_PROBE)
            ]
        else:
            messages.append(Message(role, "asyncrl-more"))

    return tuple(messages)


def _without_exchange(probe_id: re.Match[str]) -> str:
    return f"asyncrl0{probe_id['number']}"


def _answered_calls(messages: Iterable[Message]) -> tuple[ToolCall, ...]:
    """Return the calls that the tool messages answer, marked. The error of a malformed call answers a call
    only if no other reply does: in a conversation, too, a turn with well-formed calls shows only these."""
    tool_messages = [message for message in messages if message.role == "tool"]
    replies = [message for message in tool_messages if message.name != MALFORMED_CALL] or tool_messages
    return _marked_calls(
        [ToolCall(reply.name or "asyncrl_probe", "", reply.tool_call_id) for reply in replies]
    )


def _marked_calls(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Return the calls with other arguments: the arguments of the last call hold the marker."""
    return tuple(
        replace(call, arguments=json.dumps({"asyncrl": CALL_MARK if remaining == 1 else "asyncrl-other"}))
        for remaining, call in zip(range(len(calls), 0, -1), calls, strict=True)
    )


def _model_turn(calls: tuple[ToolCall, ...], turn: Message = _PROBE_TURNS[0]) -> Message:
    return Message(turn.role, turn.content, calls, reasoning=turn.reasoning)
