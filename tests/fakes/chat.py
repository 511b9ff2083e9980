"""A chat template in which every character is a token, so that tests can read ids."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.rollout.episode import Limits, Rules
from asyncrl.rollout.parsers import hermes
from asyncrl.types import Message, Sample, ToolReply

END = 3
OPEN = 2


def encode(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def call(name: str, arguments: str = "{}") -> str:
    """What the model writes to call a tool."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class FakeChat:
    stop_ids = (END,)

    def prompt_ids(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return (*encode("".join(message.content for message in messages)), OPEN)

    def delta_ids(self, replies: tuple[ToolReply, ...]) -> tuple[int, ...]:
        return (*encode("".join(f"[{reply.content}]" for reply in replies)), OPEN)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids[:-1] if ids and ids[-1] == END else ids))


def rules(
    max_turns: int = 8, max_tokens: int = 4096, max_new_tokens: int = 512, max_bad_calls: int = 3
) -> Rules:
    return Rules(FakeChat(), hermes, Limits(max_turns, max_tokens, max_new_tokens, max_bad_calls))


def sample(prompt: str = "q", ground_truth: str = "42", row: int = 0) -> Sample:
    return Sample(row, "test", (Message("user", prompt),), ground_truth)
