"""Shaping: terms added to an episode's reward, for example for its length, before its group is compared.

Filters, baselines and advantages all see the shaped reward; reports show it beside the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from asyncrl.registry import Call, Registry
from asyncrl.types import EpisodeEnd
from asyncrl.values import finite


@dataclass(frozen=True)
class ShapingInput:
    """Describes one scored episode. `tokens` and `turns` are the model's; `limit` is the most model tokens
    that the limits of `rollout` can let an episode have."""

    score: float
    tokens: int
    turns: int
    end: EpisodeEnd
    limit: int


Shaping = Callable[..., float]
"""`(given: ShapingInput, *, options…) -> float`: what is added to the reward, on the last turn."""

shapings: Registry[Shaping] = Registry("shaping")
CALL = Call("def shaping(given: ShapingInput, *, options)", ("given",))


@shapings.register("overlong")
def overlong(
    given: ShapingInput,
    *,
    buffer: Annotated[int, Meta(ge=0)] = 0,
    factor: Annotated[float, Meta(ge=0)] = 1.0,
    limit: Annotated[int, Meta(ge=0)] = 0,
) -> float:
    """min(-(len - (limit - buffer)) / buffer · factor, 0), len = model tokens (DAPO, arXiv 2503.14476).

    Use: where length grows without success; with tools too, since replies are not counted. At any staleness.
    `limit` 0: the most model tokens that an episode can have, min(rows · rollout.max_tokens, max_turns ·
    max_new_tokens), of one row unless its history is rewritten; the prompt counts against max_tokens, so set
    it where prompts are long. `buffer` 0: a fifth of the limit, DAPO's 4,096 of 20,480.
    """
    limit = limit or given.limit
    buffer = buffer or max(limit // 5, 1)
    return min(-(given.tokens - (limit - buffer)) / buffer * factor, 0.0)


def select_shapings(named: Mapping[str, Mapping[str, Any]], where: str) -> list[Shaping]:
    """The functions of `algorithm.shaping`, options bound. ConfigError that begins with `where`."""
    return [shapings.make({name: options}, where, CALL) for name, options in named.items()]


def shape(functions: Sequence[Shaping], given: ShapingInput) -> float:
    """The sum of all shapings. ValueError when it is no finite number."""
    return finite("the sum of algorithm.shaping", math.fsum(float(function(given)) for function in functions))
