"""Shaping adds terms to an episode's reward, for example for length, before the group is compared.

Filters, baselines and advantages all see the shaped reward; reports show the shaped reward beside the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from asyncrl.registry import Call, Registry
from asyncrl.types import EpisodeEnd
from asyncrl.values import finite_number


@dataclass(frozen=True)
class ShapingInput:
    """Describes one scored episode. `tokens` and `turns` are the model's; `limit` is the highest number of
    model tokens that the limits of `rollout` allow an episode."""

    score: float
    tokens: int
    turns: int
    end: EpisodeEnd
    limit: int


Shaping = Callable[..., float]
"""`(given: ShapingInput, *, options…) -> float`: the number to add to the reward of the last turn."""

shapings: Registry[Shaping] = Registry("shaping")
SHAPING_CALL = Call("def shaping(given: ShapingInput, *, options)", ("given",))


@shapings.register("overlong")
def overlong(
    episode: ShapingInput,
    *,
    buffer: Annotated[int, Meta(ge=0)] = 0,
    factor: Annotated[float, Meta(ge=0)] = 1.0,
    limit: Annotated[int, Meta(ge=0)] = 0,
) -> float:
    """min(-(len - (limit - buffer)) / buffer · factor, 0), len = model tokens (DAPO, arXiv 2503.14476).

    Use: answers that grow longer without succeeding more often, at any staleness. Tool replies are not
    counted. `limit` 0: the largest number of model tokens that an episode can have, min(rows ·
    rollout.max_tokens, max_turns · max_new_tokens); set `limit` if prompts are long. `buffer` 0: a fifth of
    the limit.
    """
    limit = limit or episode.limit
    buffer = buffer or max(limit // 5, 1)
    return min(-(episode.tokens - (limit - buffer)) / buffer * factor, 0.0)


def select_shapings(options_by_name: Mapping[str, Mapping[str, Any]], where: str) -> list[Shaping]:
    """Load the functions of `algorithm.shaping`, options bound. ConfigError that begins with `where`."""
    return [shapings.make({name: options}, where, SHAPING_CALL) for name, options in options_by_name.items()]


def sum_of_shapings(functions: Sequence[Shaping], episode: ShapingInput) -> float:
    """Return the sum of all shapings. ValueError if the sum is not finite."""
    return finite_number(
        "the sum of algorithm.shaping", math.fsum(float(function(episode)) for function in functions)
    )
