"""Whether prompts leave room for an answer, and conversations fit whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from asyncrl.config import RunConfig
from asyncrl.conversation.commands import Fail
from asyncrl.conversation.demonstration import demonstrated
from asyncrl.conversation.turns import rows_of
from asyncrl.errors import ConfigError
from asyncrl.tools import Tool, Toolbox, ToolError
from asyncrl.types import Message, Sample

MESSAGE_TOKENS = 64  # more than a template writes around a message
MEASURED = 1000  # samples whose tokens are counted only for a warning


@dataclass
class Room:
    """Whether samples of one kind have at most `limit` tokens.

    `tokens`: of a sample as the model reads it, with its tools. `fixed`: more than template and tools add to
    the text of any sample, found by one of them. `meaning`: of the limit; `fate`: of what is longer.
    """

    kind: str
    limit: int
    tokens: Callable[[Sample], int]
    fixed: Callable[[Sample], int]
    meaning: str = ""
    fate: str = "their episodes fail"
    fitting: int = 0
    over: int = 0
    empty: int = 0
    longest: int = 0
    measured: int = 0
    unmeasured: int = 0
    _fixed: int | None = field(default=None, init=False)

    def fits(self, sample: Sample) -> bool:
        """Also counts it. A token is a byte of text at least, so most samples need not be rendered."""
        if self._fixed is None:
            self._fixed = self.fixed(sample)
        text = len(msgspec.msgpack.encode((sample.prompt, sample.extra_info if sample.demonstration else "")))
        found = 0
        if text + MESSAGE_TOKENS * len(sample.prompt) + self._fixed > self.limit:
            found = self.tokens(sample)
            self.measured += 1
        fits = found <= self.limit
        self.fitting, self.over = self.fitting + fits, self.over + (not fits)
        self.longest = max(self.longest, found)
        return fits

    def keeps(self, sample: Sample, everything: bool) -> bool:
        """True if it fits, or if `everything` is kept, of which at most MEASURED are measured. An answer
        without content teaches the model to end its turn at once: it is left out in any case."""
        if sample.demonstration and any(map(_says_nothing, sample.prompt[sample.given :])):
            self.empty += 1
            return False
        if everything and self.measured >= MEASURED:
            self.unmeasured += 1
            return True
        return self.fits(sample) or everything

    def complaints(self, filtered: bool) -> list[str]:
        """What was found, in lines. ConfigError if no sample is kept that fits."""
        none = not self.fitting and not self.unmeasured
        some = "all" if none and not self.empty else f"{self.over}" if filtered else f"at least {self.over}"
        size = f"more than {self.limit} tokens (the longest {self.longest})"
        over = f"{some} {self.kind} have {size}{self.meaning}"
        empty = f"{self.empty} {self.kind} have an empty message of the assistant"
        if none and (self.over or self.empty):
            advice = f"{over}; raise rollout.max_tokens" if self.over else f"{empty}, and there are no others"
            raise ConfigError(advice)
        left_out = "; they were left out (data.filter_overlong)"
        fate = (
            left_out
            if filtered
            else f"; {self.fate}: set data.filter_overlong=true, or raise rollout.max_tokens"
        )
        return [f"{over}{fate}"] * bool(self.over) + [f"{empty}; they were left out"] * bool(self.empty)


def _says_nothing(message: Message) -> bool:
    said = message.content.strip() or message.reasoning.strip() or message.tool_calls
    return message.role == "assistant" and not said


def load_rooms(config: RunConfig, tools: Mapping[str, Tool]) -> dict[bool, Room]:
    """What measures prompts, and (True) demonstrations, as the model reads them. Agents write their own
    prompts."""
    from asyncrl.rollout.components import load_rules
    from asyncrl.rollout.demonstrations import shown_tools

    rules, box, rollout = load_rules(config), Toolbox(tools), config.rollout

    def tokens(sample: Sample) -> int:
        try:
            return len(rules.chat.prompt_ids(sample.prompt, box.schemas(sample)))
        except ToolError:  # `check_sample_tools` says what is wrong
            return 0
        except ConfigError:
            if rollout.environment:  # its first message follows, and may be what the template asks for
                return 0
            raise

    def whole(sample: Sample) -> int:
        turns = demonstrated(rules, sample, shown_tools(box, sample))
        return 0 if isinstance(turns, Fail) else max(map(len, rows_of(turns)))  # a Fail is refused later

    def shown(sample: Sample) -> int:
        """Its messages up to the first of the assistant, with all tools."""
        asked = tuple(takewhile(lambda message: message.role != "assistant", sample.prompt))
        return tokens(msgspec.structs.replace(sample, prompt=asked or sample.prompt, extra_info="{}"))

    longest = rollout.longest_prompt
    short = f", which leaves a turn less than {rollout.max_tokens - longest} tokens (rollout.max_new_tokens)"
    fate = "their episodes are cut short or fail"
    prompts = Room("prompts", longest, tokens, shown, short, fate)
    conversations = Room("conversations", rollout.max_tokens, whole, shown)
    return {True: conversations} | ({} if rollout.agent else {False: prompts})
