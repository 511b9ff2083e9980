"""Whether prompts leave room for an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from asyncrl.config import RolloutConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.tools import Tool, Toolbox, ToolError
from asyncrl.types import Sample

MESSAGE_TOKENS = 64  # more than a template writes around a message
MEASURED = 1000  # prompts whose tokens are counted only for a warning


class Room:
    """Whether prompts leave a turn its room in a row.

    `tokens`: of a sample's prompt as the model reads it, with its tools, or with all of them where
    `extra_info` is `{}`.
    """

    def __init__(self, rollout: RolloutConfig, tokens: Callable[[Sample], int]) -> None:
        self.turn = min(rollout.max_new_tokens, rollout.max_tokens // 2)
        self.limit, self._tokens = rollout.max_tokens - self.turn, tokens
        self.fitting = self.over = self.longest = self.measured = self.unmeasured = 0
        self._fixed: int | None = None  # more than templates and tools take

    def fits(self, sample: Sample) -> bool:
        """Counted, too. A token is a byte of text at least, so most prompts need not be rendered."""
        if self._fixed is None:
            self._fixed = self._tokens(msgspec.structs.replace(sample, extra_info="{}"))
        text = len(msgspec.msgpack.encode(sample.prompt)) + MESSAGE_TOKENS * len(sample.prompt)
        found = 0
        if text + self._fixed > self.limit:
            found = self._tokens(sample)
            self.measured += 1
        fits = found <= self.limit
        self.fitting, self.over = self.fitting + fits, self.over + (not fits)
        self.longest = max(self.longest, found)
        return fits

    def keep(self, samples: Iterable[Sample], everything: bool) -> Iterator[Sample]:
        """Those that fit; or `everything`, and not all of it is measured."""
        for sample in samples:
            if everything and self.measured >= MEASURED:
                self.unmeasured += 1
                yield sample
            elif self.fits(sample) or everything:
                yield sample

    def complaint(self, filtered: bool) -> str:
        """What was found, in a line; '' if all fit. ConfigError if none does."""
        if not self.over:
            return ""
        none = not self.fitting and not self.unmeasured
        some = "all" if none else f"{self.over}" if filtered else f"at least {self.over}"
        found = (
            f"{some} prompts have more than {self.limit} tokens (the longest {self.longest}), which leaves a "
            f"turn less than {self.turn}: rollout.max_new_tokens, of rollout.max_tokens"
        )
        if none:
            raise ConfigError(f"{found}; raise rollout.max_tokens")
        if filtered:
            return f"{found}; they were left out (data.filter_overlong)"
        return f"{found}; their episodes are cut short or fail: set data.filter_overlong=true, or raise it"


def load_room(config: RunConfig, tools: Mapping[str, Tool]) -> Room:
    """Measures prompts as the model reads them."""
    from asyncrl.rollout.components import load_chat

    chat, box = load_chat(config), Toolbox(tools)

    def tokens(sample: Sample) -> int:
        try:
            return len(chat.prompt_ids(sample.prompt, box.schemas(sample)))
        except ToolError:  # `check_sample_tools` says what is wrong
            return 0
        except ConfigError:
            if config.rollout.environment:  # its first message follows, and may be what the template asks for
                return 0
            raise

    return Room(config.rollout, tokens)
