"""Turns messages into tokens, by the tokenizer's own chat template; history is never tokenised again.

A row of an episode is `prompt_ids`, the model's tokens, `delta_ids` of the messages that answer them, the
model's tokens, and so on. A delta is the template's text between the end of the model's turn and the start of
its next one. It exists where the template only appends. Many templates rewrite earlier turns (they drop old
reasoning after a user message): then there is no delta, and a new row begins.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal

from msgspec.structs import replace

from asyncrl.conversation.chat_probe import TemplateProbe, alike
from asyncrl.conversation.chat_render import Renderer, Tokenizer, find_shape, fold
from asyncrl.conversation.tokenizer import CHARACTERS, ChunkEncoder, Cut, shorten
from asyncrl.errors import ConfigError
from asyncrl.types import Message

CACHED = 16_384  # characters of the longest messages whose tokens are cached
CONTINUATION_MARK = "asyncrl-goes-on"  # stands where the model's turn goes on
SHOWN = 60  # characters of a text that an error quotes


class Chat:
    """Holds the token side of one tokenizer's chat template.

    `today`: the date for templates that write it into the prompt; by default that of the construction.
    `options`: further arguments of the template. `ends`: more ids that end a turn. ConfigError if there is no
    template, or none that shows where a turn ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        today: datetime.date | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        ends: Iterable[int] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; use an instruct model, or set model.template"
            )
        day = (today or datetime.date.today()).strftime
        self._tokenizer = tokenizer
        self._render = Renderer(tokenizer, find_shape(tokenizer, day, options), day, options)
        texts = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        read = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts if text}
        # No ordinary words. A text that is read as several tokens (special ones can be switched off) is none.
        controls = {text: ids[0] for text, ids in read.items() if len(ids) == 1}
        self._probe = TemplateProbe(self._render, controls)
        written = self._probe.written(str(tokenizer.chat_template))
        self._leads, self._closings = self._probe.around()
        self._accepted = self._probe.accepted()
        self._encode = ChunkEncoder(tokenizer, written)
        no_words = {token for token in written if not token.isalnum() and not token.isspace()}
        added = getattr(tokenizer, "added_tokens_decoder", {})  # not every tokenizer has it
        special = {*tokenizer.all_special_tokens, *(str(token) for token in added.values() if token.special)}
        self._control = _any_of(no_words | special)
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        stops = [*(controls[token] for token in self._probe.stops()), *eos, *ends]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        self._stop = _any_of(token for token, number in controls.items() if number in self.stop_ids)
        # The episodes of a group share their prompt and most replies; a rendering costs 0.2 ms or more.
        self._prompt = lru_cache(maxsize=1024)(self._prompt_uncached)
        self._delta = lru_cache(maxsize=1024)(self._delta_uncached)
        self._rewrites = lru_cache(maxsize=64)(self._probe.rewrites)

    @cached_property
    def vocabulary(self) -> int:
        """Return a number above all ids of the tokenizer."""
        return 1 + max(self._tokenizer.get_vocab().values())

    def tokens_beyond(self, size: int) -> dict[str, int]:
        """Return the tokens that an embedding of `size` rows has no row for, with their ids."""
        return {token: number for token, number in self._tokenizer.get_vocab().items() if number >= size}

    def splits_at(self, tokens: Iterable[str]) -> bool:
        """Return True if only a text that contains one of these tokens as it is has their ids."""
        return self._tokenizer.get_added_vocab().keys() >= set(tokens)

    def prompt_ids(self, messages: tuple[Message, ...], tools: tuple[str, ...] = ()) -> tuple[int, ...]:
        """The conversation so far with the tools (JSON text) and the opening of the model's turn. If the last
        message is the model's, the turn goes on with it. ConfigError where the template does not write it."""
        own = any(message.role == "assistant" for message in messages)  # no other episode has this prompt
        render = self._prompt_uncached if own or _long(messages) else self._prompt
        return render(messages, tools)

    def delta_ids(self, messages: tuple[Message, ...], after: int) -> tuple[int, ...] | None:
        """The tokens that the template writes between a turn that ended with the token `after` and the next
        one. None if it rewrites earlier turns when these messages follow; ConfigError if it refuses their
        roles.

        Any stop token ends the turn. After a token that is none, the delta begins with the end of the turn.
        """
        runs = itertools.groupby(message.role for message in messages)  # of equal roles
        if self._rewrites(tuple(role for role, _ in runs)):
            return None
        ids = (self._delta_uncached if _long(messages) else self._delta)(messages)
        ended = bool(self._probe.end(messages).token) and after in self.stop_ids
        return ids[1:] if ended or ids[:1] == (after,) else ids

    def fold(self, messages: tuple[Message, ...], beginning: bool) -> tuple[Message, ...]:
        """Messages that the template would refuse or drop, in others that it accepts. See `fold`."""
        return fold(messages, self._accepted, beginning)

    def turn_ids(
        self, history: tuple[Message, ...], message: Message, tools: tuple[str, ...] = ()
    ) -> tuple[int, ...]:
        """The tokens with which the model would write this message after the prompt of `history`, the stop id
        at their end included. ConfigError where the template writes the message otherwise than as a turn of
        the model after its opening, or not all of it."""
        history = self._safe_replies(history)
        if prefill_of(history):
            opened = self._unfinished(history, tools)
            together = replace(message, content=history[-1].content + message.content)
            whole = self._render((*history[:-1], together), tools, opening=False)
        else:
            opened = self._render(history, tools)
            whole = self._render((*history, message), tools, opening=False)
        if not whole.startswith(opened):
            opens, writes = (text[len(alike(opened, whole)) :][:SHOWN] for text in (opened, whole))
            raise ConfigError(
                f"the chat template opens the model's turn with {opens!r}, but writes this one as {writes!r}"
            )
        text = whole.removeprefix(opened)
        end = self._stop.search(text)
        turn = text[: end.start()] if end else text
        if message.content.strip() not in turn or message.reasoning.strip() not in turn:
            raise ConfigError(
                f"the chat template writes {turn[:SHOWN]!r} where the turn says {message.content[:SHOWN]!r}"
            )
        return self._encode(text[: end.end()]) if end else (*self._encode(turn), self._begin(message))

    def _begin(self, turn: Message) -> int:
        """The token with which the answer to a turn begins, where that ends the turn. ConfigError if not."""
        replies = tuple(Message("tool", tool_call_id=call.id, name=call.name) for call in turn.tool_calls)
        first = self._encode(self._probe.rest(replies or (Message("user"),)))[0]
        if first not in self.stop_ids:
            raise ConfigError(f"the chat template writes no end of the turn {turn.content[:SHOWN]!r}")
        return first

    def text_ids(self, text: str, beginning: bool) -> tuple[int, ...]:
        """Text as it is, without the template; at the `beginning` of a row with the tokens that the tokenizer
        puts there."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=beginning))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a turn without its stop id; tags of tool calls stay, even as special tokens."""
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text: str = self._tokenizer.decode(
            list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def content(self, text: str) -> str:
        """Content that the model wrote, without the tags that the template writes around it by itself
        (Command R7B, Solar-Open): in another row they would stand there twice."""
        lead = next(filter(text.startswith, self._leads), "")
        closing = next(filter(text.endswith, self._closings), "")
        return text[len(lead) : len(text) - len(closing)].strip() if lead or closing else text

    def shorten(self, text: str, limit: int, where: Cut) -> str:
        """Text of a tool or an environment as the model reads it: at most `limit` tokens, without its head,
        middle or tail, and a note. A space breaks control tokens (`< |im_end|>`): such text must not end or
        begin turns."""
        most = CHARACTERS * limit
        missing = max(0, len(text) - 2 * most)  # these are cut in any case
        parts = (text[:most], text[-most:]) if missing else (text,)
        return shorten(self._tokenizer, "".join(map(self._without_control, parts)), limit, where, missing)

    def _safe_replies(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Replies of tools without control tokens, those that an agent sends, too, which nobody shortened."""
        return tuple(
            replace(message, content=self._without_control(message.content))
            if message.role == "tool"
            else message
            for message in messages
        )

    def _without_control(self, text: str) -> str:
        return self._control.sub(lambda token: f"{token[0][0]} {token[0][1:]}", text)

    def check(
        self, history: Literal["append", "fork", "fold"], roles: Iterable[str], shown: bool = False
    ) -> list[str]:
        """Raise ConfigError if messages of these roles (tool, user) cannot answer a turn under this
        `rollout.history`. Returns warnings about what works, but perhaps not as expected. `shown`: the
        prompts show calls of all tools."""
        roles = tuple(dict.fromkeys(roles))
        warnings = [_rewriting(history, role, why) for role in roles if (why := self._rewrites((role,)))]
        warnings += [
            f"the chat template reads {name}, which the tokenizer lacks: name it in tokenizer_config.json"
            for name in ("bos_token", "eos_token")
            if name in str(self._tokenizer.chat_template) and not getattr(self._tokenizer, name, "-")
        ]
        if "tool" not in roles:
            return warnings
        if self._render.shape.user_replies:
            warnings.append("the chat template has no tool role: replies are shown as messages of the user")
        if not (shown or self._probe.shows_tools()):
            chatml = "<|im_end|>" in self._tokenizer.get_added_vocab()
            ready = "=chatml_tools, which does" if chatml else " to a Jinja file that does"
            warnings.append(
                f"the chat template does not show the tools to the model: set model.template{ready}, or "
                "describe them in the prompts"
            )
        if history != "append" and not self._probe.shows_calls():
            warnings.append(
                "the chat template shows no tool calls: a row that begins anew misses the earlier ones"
            )
        return warnings

    def _prompt_uncached(self, messages: tuple[Message, ...], tools: tuple[str, ...]) -> tuple[int, ...]:
        messages = self._safe_replies(messages)
        if prefill_of(messages):
            return self._encode(self._unfinished(messages, tools))
        return self._encode(self._render(messages, tools))

    def _unfinished(self, messages: tuple[Message, ...], tools: tuple[str, ...]) -> str:
        """The text of a conversation up to the last word of its last message, as `continue_final_message` of
        transformers."""
        *history, last = messages
        marked = replace(last, content=last.content + CONTINUATION_MARK)
        text, mark, _ = self._render((*history, marked), tools, opening=False).rpartition(CONTINUATION_MARK)
        if not mark or last.content.strip() not in text:
            raise ConfigError(
                f"the chat template does not write {last.content[:SHOWN]!r}, with which the turn begins"
            )
        return text

    def _delta_uncached(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Encode the rest behind the end of the turn, to be tokenised as in the whole conversation."""
        rest = self._probe.rest(self._safe_replies(messages))
        return self._encode(self._probe.end(messages).token + rest)


def prefill_of(messages: Sequence[Message]) -> str:
    """Return the words of the model that end a conversation, with which its next turn begins; '' if that turn
    begins anew: after another role, tool calls, or a message without text."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls or not last.content.strip():
        return ""
    return last.content


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token))


def _long(messages: Sequence[Message]) -> bool:
    """Return True for messages too long to be cached a thousand times."""
    return sum(len(message.content) for message in messages) > CACHED


def _rewriting(history: str, role: str, why: str) -> str:
    """The warning about a template that rewrites; ConfigError where rows can only be appended to."""
    if history == "append":
        raise ConfigError(
            f"rollout.history is append, but the model's chat template {why} when a {role} message "
            "follows, so a row of tokens cannot just grow; set rollout.history=fork (a new row begins there, "
            "see rollout.max_rows), or use a chat template that keeps earlier turns as they are"
        )
    return f"the chat template {why} when a {role} message follows: each one begins a new row of tokens"
