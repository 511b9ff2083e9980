"""From messages to tokens, by the tokenizer's own chat template, without ever re-tokenising history.

An episode's tokens are `prompt_ids`, what the model wrote, `delta_ids` of the tool replies, what the model
wrote, and so on. The delta is the template's text between the model's end of turn and its next turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

from asyncrl.errors import ConfigError, one_line
from asyncrl.types import Message, ToolReply

_Said = tuple[str, str, str]  # what a template sees of a tool reply: name, id of the call, content
_TURN = "asyncrl-turn"  # stands for what the model wrote; any text that templates leave alone


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...


class Chat:
    """Token deltas of one tokenizer and one set of tools (OpenAI schemas)."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] = ()) -> None:
        """ConfigError if the template is missing, or rewrites what was already said."""
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; use an instruct model, or add one to it")
        self._tokenizer = tokenizer
        self._tools = list(tools)
        # The episodes of a group share their prompt and most replies; a rendering costs 0.2 ms or more.
        self._prompt_cached = lru_cache(maxsize=1024)(self._prompt)
        self._delta_cached = lru_cache(maxsize=4096)(lambda said: self._encode(self._delta(said)))
        self._check_append_only()

    def prompt_ids(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """The prompt with the tools and the opening of the model's turn."""
        return self._prompt_cached(messages)

    def delta_ids(self, replies: tuple[ToolReply, ...]) -> tuple[int, ...]:
        """What the template writes between the model's end of turn and its next turn."""
        return self._delta_cached(tuple(_said(reply) for reply in replies))

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: the template's end of turn first, then the tokenizer's eos."""
        turn_end = self._encode(self._turn_end)[0]
        eos = self._tokenizer.eos_token_id
        return (turn_end,) if eos is None or eos == turn_end else (turn_end, eos)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a turn without its stop id; tags of tool calls stay, even as special tokens."""
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self._tokenizer.decode(
            list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return self._encode(self._render([_plain(message) for message in messages], opening=True))

    def _delta(self, replies: tuple[_Said, ...]) -> str:
        messages = [_USER, _ASSISTANT, *(_tool_message(reply) for reply in replies)]
        after_turn = self._render(messages, opening=True).partition(_TURN)[2]
        return after_turn.removeprefix(self._turn_end)

    @cached_property
    def _turn_end(self) -> str:
        """The text of the token that follows the model's words, e.g. `<|im_end|>`."""
        rest = self._render([_USER, _ASSISTANT], opening=False).partition(_TURN)[2]
        if not rest:
            raise ConfigError("the chat template writes no end of turn after the assistant; use another one")
        first = self._encode(rest)[:1]
        text = self._tokenizer.decode(
            list(first), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if not rest.startswith(text):
            raise ConfigError(f"the chat template's end of turn {rest!r} is no single token of the tokenizer")
        return text

    def _check_append_only(self) -> None:
        """Two turns with tools, rendered at once, must equal the prompt plus the deltas."""
        one, two = ("tool", "call_1", "reply 1"), ("tool", "call_2", "reply 2")
        whole = [_USER, _ASSISTANT, _tool_message(one), _ASSISTANT, _tool_message(two), _tool_message(one)]
        turn = _TURN + self._turn_end
        prompt = self._render([_USER], opening=True)
        pieces = prompt + turn + self._delta((one,)) + turn + self._delta((two, one))
        if pieces != self._render(whole, opening=True):
            raise ConfigError(
                "the chat template rewrites earlier turns when tool replies are added, so token-exact "
                "episodes are impossible; use one that only appends (e.g. without stripping of reasoning)"
            )

    def _render(self, messages: list[dict[str, Any]], *, opening: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=self._tools or None, tokenize=False, add_generation_prompt=opening
            )
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses the roles ({roles}): {one_line(error)}") from error

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


_USER = {"role": "user", "content": "asyncrl-question"}
_ASSISTANT = {"role": "assistant", "content": _TURN}


def _said(reply: ToolReply) -> _Said:
    return reply.call.name, reply.call.id, reply.content


def _tool_message(said: _Said) -> dict[str, Any]:
    name, call_id, content = said
    return {"role": "tool", "content": content, "name": name, "tool_call_id": call_id}


def _plain(message: Message) -> dict[str, Any]:
    """OpenAI's shape, with the arguments of tool calls as objects, which is what templates expect."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain
