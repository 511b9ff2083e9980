"""The commands of the episode machine (`episode.py`), the events that answer them, and its rules."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from asyncrl.config import RolloutConfig
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.parsers import Parser
from asyncrl.types import (
    EpisodeEnd,
    EpisodeResult,
    FailReason,
    Generation,
    ImageRef,
    Message,
    Observation,
    RewardResult,
    ToolCall,
    ToolReply,
)


@dataclass(frozen=True)
class Rules:
    """Settings that all episodes of a run share. `config` has the limits. `rows_apart`: a row belongs to one
    agent, since each agent has an adapter. `privilege`: the beginning of a teacher's prompt, `kl.prompt`."""

    chat: Chat
    parse: Parser
    config: RolloutConfig
    rows_apart: bool = False
    privilege: str = ""

    def shorten(self, text: str) -> str:
        """Cut a tool's reply, or an environment's message, to the length that the model reads."""
        return self.chat.shorten(text, self.config.max_reply_tokens, self.config.cut_replies)

    def shorten_content(self, content: str, images: tuple[ImageRef, ...]) -> str:
        """Cut the content of a reply or message with images; only the text counts."""
        config = self.config
        return self.chat.shorten_with_images(content, images, config.max_reply_tokens, config.cut_replies)


# -- commands: what the episode waits for ----------------------------------------------------------


class Open(msgspec.Struct, frozen=True):
    """Open the tools, reset the environment."""


class Generate(msgspec.Struct, frozen=True):
    """Sample a turn of row `row` after `ids`, the whole prefix."""

    ids: tuple[int, ...]
    max_new_tokens: int
    row: int = 0


class CallTools(msgspec.Struct, frozen=True):
    """Run these calls, once their turn is durable. `errors` describe the turn's malformed calls."""

    calls: tuple[ToolCall, ...]
    errors: tuple[str, ...] = ()


class Step(msgspec.Struct, frozen=True):
    """Give the model's message to the environment, once the turn is durable."""

    message: Message


class Score(msgspec.Struct, frozen=True):
    """Compute the reward. `answer` is the last turn's text outside tool calls."""

    answer: str
    end: EpisodeEnd


class Done(msgspec.Struct, frozen=True):
    """The episode is over and has a reward. The result has one turn reward per turn."""

    result: EpisodeResult


class Fail(msgspec.Struct, frozen=True):
    """The episode has no trajectory."""

    reason: FailReason
    detail: str


Command = Open | Generate | CallTools | Step | Score | Done | Fail


# -- events: the answers -----------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True):
    """Answers Open: schemas of the tools (JSON text), the names of the tools that the environment answers
    itself, the environment's messages after the sample's prompt, and the text with the images that objects of
    tools add to the prompt's last message of the user."""

    tools: tuple[str, ...] = ()
    own_tools: frozenset[str] = frozenset()
    messages: tuple[Message, ...] = ()
    opening_text: str = ""
    opening_images: tuple[ImageRef, ...] = ()


class TurnGenerated(msgspec.Struct, frozen=True):
    """Answers Generate."""

    generation: Generation


class ToolsReplied(msgspec.Struct, frozen=True):
    """Answers CallTools: one reply per call, in the order of the calls."""

    replies: tuple[ToolReply, ...]


class Observed(msgspec.Struct, frozen=True):
    """Answers Step."""

    observation: Observation


class EpisodeScored(msgspec.Struct, frozen=True):
    """Answers Score."""

    result: RewardResult


Event = Opened | TurnGenerated | ToolsReplied | Observed | EpisodeScored
