"""A chat template in which every character is a token, so that tests can read ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.config import RolloutConfig
from asyncrl.conversation.commands import Opened, Rules
from asyncrl.conversation.episode import Episode, advance_episode, begin_episode
from asyncrl.conversation.parsers import hermes
from asyncrl.conversation.tokenizer import Cut
from asyncrl.types import IMAGE_MARK, ImageRef, Message, Sample
from asyncrl.vision.image_ids import FIRST_IMAGE_ID
from asyncrl.vision.layout import ImageLayout, place_images
from tests.fakes.layouts import qwen_layout

END = 3
OPEN = 2
IMAGE_LAYOUT = qwen_layout(ord(IMAGE_MARK), patch_size=8, min_side=32, max_side=128)


def encode(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def read(ids: Sequence[int]) -> str:
    """The text of a prompt, without images."""
    return "".join(chr(token) for token in ids if 3 < token < FIRST_IMAGE_ID)


def call(name: str, arguments: str = "{}") -> str:
    """Return the model's text for a tool call."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class FakeChat:
    """A chat template of single characters.

    `rewrites`: messages of these roles make the template rewrite earlier text. `thoughts`: the template
    writes the reasoning of messages. `image_layout`: the model reads images; IMAGE_LAYOUT or none.
    """

    stop_ids = (END,)
    vocabulary = 1 << 20

    def __init__(
        self,
        rewrites: tuple[str, ...] = (),
        thoughts: bool = False,
        image_layout: ImageLayout | None = None,
    ) -> None:
        self._rewrites = rewrites
        self._thoughts = thoughts
        self.image_layout = image_layout

    def prompt_ids(self, messages: tuple[Message, ...], tools: tuple[str, ...] = ()) -> tuple[int, ...]:
        return (*encode("".join(tools)), *self._encode_messages(messages), OPEN)

    def delta_ids(
        self,
        messages: tuple[Message, ...],
        after: int,
        history: tuple[Message, ...] = (),
        tools: tuple[str, ...] = (),
    ) -> tuple[int, ...] | None:
        delta = self.delta_after_end(messages)
        if delta and after not in self.stop_ids:  # the turn ended at a text: its end comes first
            return (END, *delta)
        return delta

    def delta_after_end(self, messages: tuple[Message, ...]) -> tuple[int, ...] | None:
        """Return the delta after a turn with its end; None if the template rewrites earlier text."""
        if any(message.role in self._rewrites for message in messages):
            return None
        return (*self._encode_messages(messages), OPEN)

    def depends_on_history(self, messages: tuple[Message, ...]) -> bool:
        return False

    def fold(self, messages: tuple[Message, ...], beginning: bool) -> tuple[Message, ...]:
        return messages

    def turn_ids(
        self, history: tuple[Message, ...], message: Message, tools: tuple[str, ...] = ()
    ) -> tuple[int, ...]:
        return (*encode(self._written(message)), END)

    def text_ids(self, text: str, beginning: bool) -> tuple[int, ...]:
        return encode(text)

    def plain_text(self, text: str) -> str:
        return text

    def decode(self, ids: Sequence[int]) -> str:
        text_ids = [token for token in ids if token < FIRST_IMAGE_ID]
        return "".join(map(chr, text_ids[:-1] if text_ids and text_ids[-1] == END else text_ids))

    def content(self, text: str) -> str:
        return text

    def shorten(self, text: str, limit: int, where: Cut) -> str:
        return text[:limit]

    def shorten_with_images(self, text: str, images: tuple[ImageRef, ...], limit: int, where: Cut) -> str:
        return self.shorten(text, limit, where)

    @property
    def image_token(self) -> str:
        return ""  # texts are decoded without images

    def is_placeholder(self, token: int) -> bool:
        return False

    def _encode_messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        ids = encode("".join(self._written(message) for message in messages))
        images = [image for message in messages for image in message.images]
        return place_images(ids, images, self.image_layout) if self.image_layout is not None else ids

    def _written(self, message: Message) -> str:
        calls = "".join(call(tool_call.name, tool_call.arguments) for tool_call in message.tool_calls)
        thought = f"({message.reasoning})" if message.reasoning and self._thoughts else ""
        return f"[{message.content}]" if message.role == "tool" else thought + message.content + calls


def rules(
    *, chat: FakeChat | None = None, environment: bool = False, max_tokens: int = 4096, **config: Any
) -> Rules:
    config = {"max_turns": 8, "max_new_tokens": 512, "environment": "fake" if environment else "", **config}
    return Rules(chat or FakeChat(), hermes, RolloutConfig(max_tokens=max_tokens, **config))


def sample(prompt: str = "q", ground_truth: str = "42", row: int = 0) -> Sample:
    return Sample(row, "test", (Message("user", prompt),), ground_truth)


OPENED = Opened(tools=("",))
"""There are tools; the prompt does not show them."""


def start(rules: Rules, row: Sample | None = None, opened: Opened = OPENED) -> Episode:
    """Return an episode that requests its first turn, or has failed for want of room."""
    return advance_episode(rules, begin_episode(row or sample()), opened)
