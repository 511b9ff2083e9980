from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rewards import ShapingInput, select_shapings, shapings, sum_of_shapings
from asyncrl.types import EpisodeEnd


def episode(tokens: int, limit: int = 100) -> ShapingInput:
    return ShapingInput(score=1.0, tokens=tokens, turns=1, end=EpisodeEnd.ANSWERED, limit=limit)


@pytest.mark.parametrize(
    ("tokens", "options", "added"),
    [
        (79, {"buffer": 20}, 0.0),
        (80, {"buffer": 20}, 0.0),
        (85, {"buffer": 20}, -0.25),
        (100, {"buffer": 20}, -1.0),
        (100, {"buffer": 20, "factor": 0.5}, -0.5),
        (85, {"buffer": 20, "limit": 90}, -0.75),
        (85, {}, -0.25),  # a fifth of the limit
        (45, {"limit": 50}, -0.5),
    ],
)
def test_overlong_is_a_ramp_over_the_last_tokens(tokens: int, options: dict[str, Any], added: float) -> None:
    functions = select_shapings({"overlong": options}, "algorithm.shaping")
    assert sum_of_shapings(functions, episode(tokens)) == added


def test_shapings_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapings._entries, "test_bonus", lambda given, *, size=0.5: size * given.score)
    both = {"overlong": {"buffer": 20}, "test_bonus": {}}
    assert sum_of_shapings(select_shapings(both, "x"), episode(90)) == 0.5 - 0.5
    assert sum_of_shapings([], episode(90)) == 0.0


@pytest.mark.parametrize(
    ("named", "complaint"),
    [
        ({"overlong": {"buffer": -1}}, r"algorithm\.shaping\.overlong\.buffer: .*>= 0"),
        ({"overlong": {"buffer": 5, "size": 1}}, "unknown option 'size'; options: buffer, factor, limit"),
        ({"overlnog": {}}, "did you mean overlong"),
        ({"math:pi": {}}, r"algorithm\.shaping\.math:pi is not a function"),
    ],
)
def test_what_cannot_be_is_refused_by_name(named: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        select_shapings(named, "algorithm.shaping")


def test_a_shaping_without_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        sum_of_shapings([lambda given: float("nan")], episode(1))
