"""The game of the example, and that any environment of ours can be stepped again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.environments import load_environment
from asyncrl.errors import ConfigError
from asyncrl.types import Message, Observation, Sample

HI_LO = f"{Path(__file__).parents[3] / 'examples' / 'multiturn' / 'hi_lo' / 'hi_lo.py'}:HiLo"

GAME = Sample(0, "hi_lo", (), "null", extra_info_json=json.dumps({"low": 1, "high": 16, "secret": 7}))


def play(secret: int, turns: Sequence[str], **options: float) -> list[Observation]:
    sample = Sample(
        0, "hi_lo", (), "null", extra_info_json=json.dumps({"low": 1, "high": 16, "secret": secret})
    )

    async def run() -> list[Observation]:
        game = load_environment({HI_LO: options})()
        heard = [await game.reset(sample)]
        for turn in turns:
            if heard[-1].done:
                break
            heard.append(await game.step(Message("assistant", turn)))
        return heard

    return asyncio.run(run())


def lines(heard: Sequence[Observation]) -> list[tuple[str, float, bool]]:
    return [(said.messages[0].content, said.reward, said.done) for said in heard]


@pytest.mark.parametrize(
    ("guesses", "expected"),
    [
        (["7"], [("Right!", 1.0, True)]),
        (["it is 12", "3", "7"], [("Lower.", 0, False), ("Higher.", 0, False), ("Right!", 1.0, True)]),
        (["12", "13", "99"], [("Lower.", 0, False), ("Lower.", -0.1, False), ("Lower.", -0.1, False)]),
        (["no"], [("Say a number.", -0.1, False)]),
        (["2"] * 4, [("Higher.", 0, False)] + [("Higher.", -0.1, False)] * 2 + [("Higher.", -0.1, True)]),
    ],
)
def test_a_game(guesses: list[str], expected: list[tuple[str, float, bool]]) -> None:
    heard = lines(play(7, guesses, guesses=4))
    assert heard[0] == ("1 to 16.", 0.0, False)
    assert heard[1:] == expected


def test_a_game_that_is_cut_costs_the_guesses_that_were_not_made() -> None:
    async def cut() -> float:
        game = load_environment({HI_LO: {"guesses": 4}})()
        await game.reset(GAME)
        await game.step(Message("assistant", "3"))
        return await game.cut_short(Message("assistant", "hm hm hm"))

    assert asyncio.run(cut()) == pytest.approx(-0.3)


def test_a_player_needs_a_guess() -> None:
    with pytest.raises(ConfigError, match="guesses must be at least 1"):
        load_environment({HI_LO: {"guesses": 0}})


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 16), st.lists(st.integers(0, 20).map(str) | st.text(max_size=5), max_size=8))
def test_a_game_stepped_again_says_the_same_and_ends(secret: int, guesses: list[str]) -> None:
    heard = play(secret, guesses)
    assert play(secret, guesses) == heard
    assert len(heard) <= 7 and heard[-1].done == (len(heard) == 7 or heard[-1].reward == 1.0)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"]),
    st.integers(0, 1000),
    st.lists(st.integers(0, 6).map(str) | st.text(max_size=5), max_size=12),
)
def test_a_gymnasium_world_stepped_again_says_the_same(id: str, row: int, turns: list[str]) -> None:
    async def once() -> list[Observation]:
        world = load_environment({"gymnasium": {"id": id}})()
        heard = [await world.reset(Sample(row, "game", (), "null"))]
        for turn in turns:
            if not heard[-1].done:
                heard.append(await world.step(Message("assistant", turn)))
        await world.close()
        return heard

    first = asyncio.run(once())
    assert asyncio.run(once()) == first
    assert all(said.messages[0].content for said in first)
