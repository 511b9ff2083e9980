"""Turns messages into tokens by the tokenizer's own chat template; history is never tokenised again.

A row of an episode is `prompt_ids`, the model's tokens, `delta_ids` of the messages that answer them, the
model's tokens, and so on. A delta is the template's text between the end of the model's turn and the start of
the model's next turn. A delta exists where the template only appends. Many templates rewrite earlier turns,
for example by dropping old reasoning after a user message: then there is no delta, and a new row begins.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as replace_field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal

from msgspec.structs import replace

from asyncrl.conversation.chat_probe import (
    Continuation,
    TemplateProbe,
    WrittenCall,
    common_prefix,
    find_image_tokens,
)
from asyncrl.conversation.chat_render import Tokenizer, find_renderer, fold
from asyncrl.conversation.tokenizer import CHARACTERS_PER_TOKEN, ChunkEncoder, Cut, shorten
from asyncrl.errors import ConfigError
from asyncrl.types import IMAGE_MARK, ImageRef, Message
from asyncrl.vision.image_ids import collapse_runs
from asyncrl.vision.layout import ImageLayout, place_images

MAX_CACHED_CHARACTERS = 16_384  # characters of the longest messages whose tokens are cached
CONTINUATION_MARK = "asyncrl-goes-on"  # marks the point where the model's turn goes on
QUOTED_CHARACTERS = 60  # characters of a text that an error quotes


class Chat:
    """Writes and reads tokens by one tokenizer's chat template.

    `today`: the date for templates that write a date into the prompt; by default the day of construction.
    `options`: further arguments of the template. `extra_stop_ids`: more ids that end a turn. `image_layout`:
    of a model that reads images; a row then has the ids of vision/image_ids.py in the place of an image.
    ConfigError if there is no template, or if the template does not show where a turn ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        today: datetime.date | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        extra_stop_ids: Iterable[int] = (),
        image_layout: ImageLayout | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; use an instruct model, or set model.template"
            )

        format_date = (today or datetime.date.today()).strftime
        self._tokenizer = tokenizer
        self.image_layout = image_layout
        renderer = find_renderer(tokenizer, format_date, options)
        special_texts = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        ids_by_text = {
            text: tokenizer.encode(text, add_special_tokens=False) for text in special_texts if text
        }
        # A text that is read as several tokens (special tokens can be switched off) is no control token.
        controls = {text: ids[0] for text, ids in ids_by_text.items() if len(ids) == 1}

        image_tokens: set[str] = set()
        if image_layout is not None:
            image_tokens |= {
                token for token, token_id in controls.items() if token_id in image_layout.placeholders
            }
            image_tokens |= find_image_tokens(renderer, controls)
            renderer = replace_field(renderer, plain_text=self.plain_text)
        self._image_pattern = _pattern_of_any(image_tokens)
        self._render = renderer

        self._probe = TemplateProbe(self._render, controls)
        written_tokens = self._probe.written_tokens(str(tokenizer.chat_template))
        self._content_leads, self._content_closings = self._probe.texts_around_content()
        self._accepted_messages = self._probe.accepted_messages()
        self._encode = ChunkEncoder(tokenizer, written_tokens)
        markup_tokens = {token for token in written_tokens if not token.isalnum() and not token.isspace()}

        added_tokens = getattr(tokenizer, "added_tokens_decoder", {})  # not every tokenizer has this table
        special_tokens = {
            *tokenizer.all_special_tokens,
            *(str(token) for token in added_tokens.values() if token.special),
        }

        self._control_pattern = _pattern_of_any(markup_tokens | special_tokens | image_tokens)
        eos_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        all_stop_ids = [*(controls[token] for token in self._probe.stop_tokens()), *eos_ids, *extra_stop_ids]
        if image_layout is not None:
            # A sampled placeholder stands for no image: the turn, and the episode, ends there.
            all_stop_ids += image_layout.placeholders
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(all_stop_ids))
        self._stop_pattern = _pattern_of_any(
            token for token, token_id in controls.items() if token_id in self.stop_ids
        )

        # The episodes of a group share their prompt and most replies; a rendering costs 0.2 ms or more.
        self._cached_prompt = lru_cache(maxsize=1024)(self._prompt_uncached)
        self._cached_delta = lru_cache(maxsize=1024)(self._delta_uncached)
        self._cached_continuation = lru_cache(maxsize=64)(self._probe.continuation)

    @cached_property
    def vocabulary(self) -> int:
        """Return a number above all ids of the tokenizer."""
        return 1 + max(self._tokenizer.get_vocab().values())

    def tokens_beyond(self, embedding_rows: int) -> dict[str, int]:
        """Return the tokens, with ids, that an embedding of `embedding_rows` rows has no row for."""
        return {
            token: token_id
            for token, token_id in self._tokenizer.get_vocab().items()
            if token_id >= embedding_rows
        }

    def splits_at(self, tokens: Iterable[str]) -> bool:
        """Return True if the ids of these tokens appear only in texts that contain the tokens literally."""
        return self._tokenizer.get_added_vocab().keys() >= set(tokens)

    def prompt_ids(self, messages: tuple[Message, ...], tools: tuple[str, ...] = ()) -> tuple[int, ...]:
        """Return the ids of the conversation so far with the tools (JSON text) and the opening of the model's
        turn. The turn continues a last message of the model. ConfigError if the template does not write that
        message."""
        # A prompt with messages of the model belongs to one episode: caching would not help.
        has_model_message = any(message.role == "assistant" for message in messages)
        render = self._prompt_uncached if has_model_message or _is_long(messages) else self._cached_prompt
        return render(messages, tools)

    def delta_ids(
        self,
        messages: tuple[Message, ...],
        last_token: int,
        history: tuple[Message, ...],
        tools: tuple[str, ...] = (),
    ) -> tuple[int, ...] | None:
        """Return the tokens that the template writes between a turn that ended with the token `last_token`
        and the next turn. `history`: the row's messages up to that turn, read only if the delta
        `depends_on_history`. None if the template rewrites earlier turns when these messages follow;
        ConfigError if the template refuses the roles.

        Any stop token ends the turn. After any other token, the delta begins with the end of the turn.
        """
        continuation = self._continuation(messages)
        if continuation.rewriting:
            return None

        if continuation.depends_on_history:
            messages = self._without_control_tokens(messages)
            turn_end, following_text = self._probe.text_after_history(history, messages, tools)
            delta = self._encode_with_images(turn_end.token + following_text, messages)
        else:
            encode_delta = self._delta_uncached if _is_long(messages) else self._cached_delta
            turn_end = self._probe.turn_end(messages)
            delta = encode_delta(messages)

        turn_ended = bool(turn_end.token) and last_token in self.stop_ids
        return delta[1:] if turn_ended or delta[:1] == (last_token,) else delta

    def depends_on_history(self, messages: tuple[Message, ...]) -> bool:
        """Return True if `delta_ids` renders the complete history to write these messages. ConfigError if the
        template refuses the roles."""
        return self._continuation(messages).depends_on_history

    def fold(self, messages: tuple[Message, ...], beginning: bool) -> tuple[Message, ...]:
        """Fold messages that the template would refuse or drop into messages that the template accepts."""
        return fold(messages, self._accepted_messages, beginning)

    def turn_ids(
        self, history: tuple[Message, ...], message: Message, tools: tuple[str, ...] = ()
    ) -> tuple[int, ...]:
        """Return the tokens with which the model would write this message after the prompt of `history`, the
        stop id included. ConfigError if the template writes the message otherwise than as a turn of the model
        after the opening, or writes only a part of the message."""
        history = self._without_control_tokens(history)
        if prefill_of(history):
            prompt_text = self._unfinished(history, tools)
            joined_message = replace(message, content=history[-1].content + message.content)
            conversation_text = self._render((*history[:-1], joined_message), tools, opening=False)
        else:
            prompt_text = self._render(history, tools)
            conversation_text = self._render((*history, message), tools, opening=False)

        if not conversation_text.startswith(prompt_text):
            common_length = len(common_prefix(prompt_text, conversation_text))
            opens = prompt_text[common_length:][:QUOTED_CHARACTERS]
            writes = conversation_text[common_length:][:QUOTED_CHARACTERS]
            raise ConfigError(
                f"the chat template opens the model's turn with {opens!r}, but begins this turn "
                f"with {writes!r}"
            )

        if message.images:
            raise ConfigError("an assistant message contains an image, but models write only text")

        text = conversation_text.removeprefix(prompt_text)
        stop_match = self._stop_pattern.search(text)
        turn_text = text[: stop_match.start()] if stop_match else text
        model_texts = (message.content.strip(), message.reasoning.strip())
        if any(self.plain_text(model_text) not in turn_text for model_text in model_texts):
            raise ConfigError(
                f"the chat template writes {turn_text[:QUOTED_CHARACTERS]!r} where the turn says "
                f"{message.content[:QUOTED_CHARACTERS]!r}"
            )

        if stop_match:
            return self._encode(text[: stop_match.end()])

        # The token with which the answer begins ends the turn.
        replies = tuple(Message("tool", tool_call_id=call.id, name=call.name) for call in message.tool_calls)
        answer_token = self._encode(self._probe.text_after_turn(replies or (Message("user"),)))[0]
        if answer_token not in self.stop_ids:
            raise ConfigError(
                f"the chat template does not mark the end of the turn {message.content[:QUOTED_CHARACTERS]!r}"
            )
        return (*self._encode(turn_text), answer_token)

    def text_ids(self, text: str, beginning: bool) -> tuple[int, ...]:
        """Encode text without the template; at the `beginning` of a row with the tokens that the tokenizer
        puts at the start of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=beginning))

    def plain_text(self, text: str) -> str:
        """Return text in which a space breaks tokens of images (`< |image_pad|>`): only the template writes
        such tokens."""
        return _break_tokens(self._image_pattern, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a turn without the stop id; tags of tool calls stay, even as special tokens. An
        image becomes one placeholder."""
        turn_body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        if self.image_layout is not None:
            turn_body = collapse_runs(turn_body, self.image_layout.placeholder)
        text: str = self._tokenizer.decode(
            list(turn_body), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def image_token(self) -> str:
        """Return the text that `decode` writes for an image; "" for a model that reads text only."""
        if self.image_layout is None:
            return ""
        text: str = self._tokenizer.decode(
            [self.image_layout.placeholder], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def is_placeholder(self, token: int) -> bool:
        """Return True for a token that stands for a part of an image or a video."""
        return self.image_layout is not None and token in self.image_layout.placeholders

    def content(self, text: str) -> str:
        """Return content that the model wrote without the tags that the template itself writes around content
        (Command R7B, Solar-Open): in another row the tags would appear twice."""
        content_lead = next(filter(text.startswith, self._content_leads), "")
        content_closing = next(filter(text.endswith, self._content_closings), "")
        if not content_lead and not content_closing:
            return text
        return text[len(content_lead) : len(text) - len(content_closing)].strip()

    def shorten(self, text: str, limit: int, cut: Cut) -> str:
        """Return text of a tool or an environment as the model reads the text: at most `limit` tokens,
        without the head, middle or tail, and a note. A space breaks control tokens (`< |im_end|>`): a tool
        must not end or begin turns."""
        max_characters = CHARACTERS_PER_TOKEN * limit
        missing_characters = max(0, len(text) - 2 * max_characters)  # the middle is cut in any case
        text_parts = (text[:max_characters], text[-max_characters:]) if missing_characters else (text,)
        return shorten(
            self._tokenizer, "".join(map(self._without_control, text_parts)), limit, cut, missing_characters
        )

    def shorten_with_images(self, text: str, images: tuple[ImageRef, ...], limit: int, cut: Cut) -> str:
        """Return `shorten` of text that has an IMAGE_MARK for each of the images. The limit is for the text
        without the images; the images of a text that is cut follow the text."""
        if not images:
            # A mark in the text would count as an image of another message that a template joins to this one.
            return self.shorten(text.replace(IMAGE_MARK, "") if self.image_layout else text, limit, cut)

        parts = [self._without_control(part) for part in text.split(IMAGE_MARK)]
        whole_text = "".join(parts)
        shortened_text = self.shorten(whole_text, limit, cut)
        if shortened_text == whole_text:
            return IMAGE_MARK.join(parts)
        return shortened_text + IMAGE_MARK * len(images)

    def _continuation(self, messages: tuple[Message, ...]) -> Continuation:
        role_runs = itertools.groupby(message.role for message in messages)
        return self._cached_continuation(tuple(role for role, _ in role_runs))

    def _without_control_tokens(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Break control tokens in replies of tools, also in replies that an agent sends, which nobody
        shortened."""
        return tuple(
            replace(message, content=self._without_control(message.content))
            if message.role == "tool"
            else message
            for message in messages
        )

    def _without_control(self, text: str) -> str:
        return _break_tokens(self._control_pattern, text)

    def check_history(
        self, history: Literal["append", "fork", "fold"], roles: Iterable[str], calls_shown: bool = False
    ) -> list[str]:
        """Raise ConfigError if messages of these roles (tool, user) cannot answer a turn under this
        `rollout.history`. Return warnings about templates that work, but perhaps not as expected.
        `calls_shown`: the prompts show calls of all tools."""
        roles = tuple(dict.fromkeys(roles))
        warnings = [
            _rewriting_warning(history, role, rewriting)
            for role in roles
            if (rewriting := self._cached_continuation((role,)).rewriting)
        ]

        warnings += [
            f"the chat template uses {name}, but the tokenizer has none; define {name} in "
            "tokenizer_config.json"
            for name in ("bos_token", "eos_token")
            if name in str(self._tokenizer.chat_template) and not getattr(self._tokenizer, name, "-")
        ]
        if "tool" not in roles:
            return warnings
        if self._render.shape.user_replies:
            warnings.append("the chat template has no tool role, so tool replies are shown as user messages")

        if not (calls_shown or self._probe.shows_tools()):
            has_chatml = "<|im_end|>" in self._tokenizer.get_added_vocab()
            suggestion = "=chatml_tools" if has_chatml else " to a Jinja file that lists the tools"
            warnings.append(
                f"the chat template does not show the tools to the model; set model.template{suggestion}, or "
                "describe the tools in the prompts"
            )

        if history != "append" and not self._probe.shows_calls():
            warnings.append(
                "the chat template does not render tool calls, so a new row lacks the earlier calls"
            )

        return warnings

    def written_call(self) -> WrittenCall | None:
        """Return a turn with a call as the template writes the turn; None if the template does not show
        calls."""
        return self._probe.written_call()

    def _prompt_uncached(self, messages: tuple[Message, ...], tools: tuple[str, ...]) -> tuple[int, ...]:
        messages = self._without_control_tokens(messages)
        is_unfinished = bool(prefill_of(messages))
        text = self._unfinished(messages, tools) if is_unfinished else self._render(messages, tools)
        return self._encode_with_images(text, messages)

    def _encode_with_images(self, text: str, messages: Iterable[Message]) -> tuple[int, ...]:
        """Encode text that the template wrote of these messages, and put the ids of their images in the place
        of the model's placeholders. ConfigError if the text has another number of placeholders."""
        ids = self._encode(text)
        images = [image for message in messages for image in message.images]
        if self.image_layout is not None:
            return place_images(ids, images, self.image_layout)
        if images:
            raise ConfigError("a message contains an image, but the model reads text only")
        return ids

    def _unfinished(self, messages: tuple[Message, ...], tools: tuple[str, ...]) -> str:
        """Return the text of a conversation up to the last word of the last message, as
        `continue_final_message` of transformers does."""
        *history, last_message = messages
        marked_message = replace(last_message, content=last_message.content + CONTINUATION_MARK)

        text, mark, _ = self._render((*history, marked_message), tools, opening=False).rpartition(
            CONTINUATION_MARK
        )
        if not mark or self.plain_text(last_message.content.strip()) not in text:
            raise ConfigError(
                "the chat template does not write the beginning of the turn, "
                f"{last_message.content[:QUOTED_CHARACTERS]!r}"
            )

        return text

    def _delta_uncached(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Encode the text after the end of the turn, tokenised as in the whole conversation."""
        following_text = self._probe.text_after_turn(self._without_control_tokens(messages))
        return self._encode_with_images(self._probe.turn_end(messages).token + following_text, messages)


def prefill_of(messages: Sequence[Message]) -> str:
    """Return the words of the model that end a conversation and begin the next turn; '' if the next turn
    begins anew: after another role, tool calls, or a message without text."""
    if not messages or messages[-1].role != "assistant" or messages[-1].tool_calls:
        return ""
    return messages[-1].content if messages[-1].content.strip() else ""


def _pattern_of_any(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _break_tokens(tokens: re.Pattern[str], text: str) -> str:
    return tokens.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


def _is_long(messages: Sequence[Message]) -> bool:
    """Return True for messages too long to be cached a thousand times."""
    return sum(len(message.content) for message in messages) > MAX_CACHED_CHARACTERS


def _rewriting_warning(history: str, role: str, rewriting: str) -> str:
    """Return the warning about a template that rewrites; ConfigError if rows can only be appended to."""
    if history == "append":
        raise ConfigError(
            f"rollout.history is append, but the model's chat template {rewriting} when a {role} message "
            "follows, so new tokens cannot be appended to the row; set rollout.history=fork (which starts a "
            "new row in this case, see rollout.max_rows), or use a chat template that leaves earlier turns "
            "unchanged"
        )
    return (
        f"the chat template {rewriting} when a {role} message follows, so every such message starts a new "
        "row of tokens"
    )
