"""Gymnasium's games, played through the adapter: the real package."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from asyncrl.config import Options
from asyncrl.environments import load_environment
from asyncrl.errors import ConfigError
from asyncrl.isolation import calls
from asyncrl.types import Message, Observation
from tests.fakes.environments import play, row, text
from tests.fakes.loop import settle

LAKE = {"id": "FrozenLake-v1", "actions": "left, down, right, up"}
FIRM = LAKE | {"arguments": '{"is_slippery": false}'}
TAXI = {"id": "Taxi-v4", "actions": "south, north, east, west, pickup, dropoff"}
CARDS = {"id": "Blackjack-v1", "actions": "stick, hit"}
CLIFF = {"id": "CliffWalking-v1", "actions": "up, right, down, left"}


def test_the_frozen_lake_is_crossed_by_words() -> None:
    heard = play(
        {"gymnasium": FIRM},
        row(),
        ["down", "I go DOWN.", "right", "Not left, but right", "action: 1", "<b>right</b>"],
    )
    assert text(heard[0]) == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert text(heard[1]).endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [observation.reward for observation in heard[1:]] == [0, 0, 0, 0, 0, 1]
    assert [observation.done for observation in heard[1:]] == [False] * 5 + [True]


def test_an_unreadable_turn_gets_a_notice_and_does_not_move() -> None:
    heard = play({"gymnasium": FIRM | {"unreadable": -0.5}}, row(), ["hm", "7", "1.5", "upright", "right"])
    complaint = "No action found. Answer with one of: left, down, right, up."
    assert [text(observation) for observation in heard[1:5]] == [complaint] * 4
    assert [observation.reward for observation in heard[1:]] == [-0.5] * 4 + [0.0]
    assert "S[F]FF" in text(heard[5])


@pytest.mark.parametrize(
    ("game", "turns"),
    [
        (LAKE, ["right", "down", "right", "down"] * 5),
        (TAXI, ["south", "north", "east", "pickup", "west", "dropoff"]),
        (CARDS, ["hit", "hit", "stick"]),
        (CLIFF, ["up", "right", "right", "down"]),
    ],
)
def test_the_same_row_gives_the_same_world(game: Options, turns: list[str]) -> None:
    first = play({"gymnasium": game}, row(3), turns)
    assert play({"gymnasium": game}, row(3), turns) == first
    assert play({"gymnasium": game}, row(9, seed=3), turns) == first
    assert all(text(observation) for observation in first)


def test_rows_differ() -> None:
    worlds = {text(play({"gymnasium": {"id": "Taxi-v4"}}, row(number), [])[0]) for number in range(5)}
    assert len(worlds) > 1


def test_without_words_observations_and_numbers_of_actions_are_shown() -> None:
    first, second = play({"gymnasium": {"id": "Blackjack-v1"}}, row(3), ["hit"])
    assert text(first) == "(7, 10, 0)" and text(second).endswith("Answer with one of: 0, 1.")
    (seen,) = play({"gymnasium": {"id": "Taxi-v4", "show": "observation"}}, row(3), [])
    assert text(seen).isdigit()


def test_rewards_fall_on_their_turns() -> None:
    cliff = play({"gymnasium": CLIFF}, row(), ["right", "up"])
    assert [observation.reward for observation in cliff] == [0, -100, -1]


def test_the_sample_adds_arguments() -> None:
    lake = {"desc": ["SG", "HF"], "is_slippery": False}
    heard = play({"gymnasium": LAKE}, row(gymnasium=lake), ["right"])
    assert text(heard[0]) == "[S]G\nHF"
    assert (heard[1].reward, heard[1].done) == (1, True)


def test_other_words_for_an_observation_and_its_actions(tmp_path: Any) -> None:
    words = tmp_path / "words.py"
    words.write_text("def describe(seen, env):\n    return f'cell {seen} of {env.nrow * env.ncol}'\n")
    options = FIRM | {"describe": f"{words}:describe", "actions": "west, south, east, north"}
    heard = play({"gymnasium": options}, row(), ["south", "south, then east"])
    assert [text(observation) for observation in heard] == ["cell 0 of 16", "cell 4 of 16", "cell 5 of 16"]


SQUARES = """
import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

class Squares(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    action_space = observation_space = Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self._brightness = 0
        return 0, {}

    def step(self, action):
        self._brightness += 100 * int(action)
        return self._brightness, 0.5, self._brightness > 100, False, {}

    def render(self):
        return np.full((48, 64, 3), self._brightness, np.uint8)

gymnasium.register("Squares-v0", Squares)

def describe(observation, env):
    return f"brightness {observation}"
"""


def test_a_rendered_image_is_the_observation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asyncrl_squares.py").write_text(SQUARES)
    monkeypatch.syspath_prepend(tmp_path)
    squares = {"id": "asyncrl_squares:Squares-v0", "show": "image", "describe": "asyncrl_squares:describe"}
    heard = play({"gymnasium": squares}, row(), ["1", "hm", "1"])

    def brightness(observation: Observation) -> tuple[Any, tuple[int, int], int]:
        words, image = observation.messages[0].content  # before the worker reads the image
        return words, image.size, image.getpixel((5, 5))[0]

    assert brightness(heard[0]) == ("brightness 0", (64, 48), 0)
    assert brightness(heard[1]) == ("brightness 100", (64, 48), 100)
    assert text(heard[2]).startswith("No action found")
    assert (heard[3].done, heard[3].reward) == (True, 0.5)
    with pytest.raises(ConfigError, match=r"cannot render text \(render modes: rgb_array\)"):
        load_environment({"gymnasium": squares | {"show": "text"}})


def test_the_frozen_lake_is_a_picture() -> None:
    pytest.importorskip("pygame", reason="Gymnasium draws its toy maps with pygame")
    first, second = play({"gymnasium": FIRM | {"show": "image"}}, row(), ["down"])
    pictures = [observation.messages[0].content[0] for observation in (first, second)]
    assert pictures[0].size == pictures[1].size
    assert pictures[0].tobytes() != pictures[1].tobytes()


SLOW = """
import threading
import gymnasium
from gymnasium.spaces import Discrete

inside, gate, log = threading.Event(), threading.Event(), []

class Slow(gymnasium.Env):
    action_space = observation_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        inside.set()
        assert gate.wait(30)
        log.append(threading.current_thread() is threading.main_thread())
        self.stepped_in = threading.current_thread()
        return 1, 0.5, True, False, {}

    def close(self):
        same = getattr(self, "stepped_in", None) in (None, threading.current_thread())
        log.append("close" if same else "close in another thread")

gymnasium.register("Slow-v0", Slow, disable_env_checker=True)
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module whose environment steps when the test lets it."""
    (tmp_path / "asyncrl_slow.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "asyncrl_slow", raising=False)
    yield importlib.import_module("asyncrl_slow")
    del gymnasium.registry["Slow-v0"]


def test_a_slow_step_holds_up_nobody_and_is_not_disturbed(slow: Any) -> None:
    async def run() -> Observation:
        world = load_environment({"gymnasium": {"id": "asyncrl_slow:Slow-v0"}})()
        await world.reset(row())
        step = asyncio.create_task(world.step(Message("assistant", "1")))
        assert await asyncio.to_thread(slow.inside.wait, 30)
        closing = asyncio.create_task(world.close())
        await settle()
        assert slow.log == []
        slow.gate.set()
        await closing
        return await step

    seen = asyncio.run(run())
    assert (text(seen), seen.reward, seen.done) == ("1", 0.5, True)
    assert slow.log == [False, "close"]


def test_hung_worlds_cost_a_thread_each_and_are_limited(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ABANDONED_THREADS", 2)
    make = load_environment({"gymnasium": {"id": "asyncrl_slow:Slow-v0"}})

    async def hang() -> None:
        world = make()
        await world.reset(row())
        slow.inside.clear()
        step = asyncio.create_task(world.step(Message("assistant", "1")))
        assert await asyncio.to_thread(slow.inside.wait, 30)
        for late_task in (step, asyncio.create_task(world.close())):
            await settle()
            late_task.cancel()
            await asyncio.wait([late_task], timeout=30)

    async def run() -> None:
        await hang()
        await hang()
        hung = [thread for thread in threading.enumerate() if thread.name == "gymnasium"]
        assert len(hung) == 2
        refused = make()
        with pytest.raises(calls.CallTimeout, match="2 earlier calls"):
            await refused.reset(row())
        await refused.close()
        slow.gate.set()
        for thread in hung:
            await asyncio.to_thread(thread.join, 30)
        world = make()
        await world.reset(row())
        await world.close()

    asyncio.run(run())
    assert sorted(map(str, slow.log)) == ["False", "False", "close", "close", "close"]


def test_a_world_may_want_one_thread(slow: Any) -> None:
    slow.gate.set()
    play({"gymnasium": {"id": "asyncrl_slow:Slow-v0", "thread": False}}, row(), ["1"])
    assert slow.log == [True, "close"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"id": "FrozenLake-v7"}, "unknown environment 'FrozenLake-v7'"),
        ({"id": "no_such_module:Game-v0"}, "unknown environment"),
        ({"id": "Blackjack-v1", "show": "text"}, "cannot render text"),
        ({"id": "FrozenLake-v1", "arguments": "[1]"}, "must be a JSON object"),
        ({"id": "FrozenLake-v1", "arguments": "{"}, "must be a JSON object"),
        ({"id": "FrozenLake-v1", "describe": "nothing:here"}, "cannot import"),
    ],
)
def test_gymnasium_options(options: Options, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.environment\.gymnasium: .*{complaint}"):
        load_environment({"gymnasium": options})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"id": "FrozenLake-v1", "actions": "a, b"}, "must list 4 names, one for each action, not 2"),
        ({"id": "CartPole-v1", "arguments": '{"none": 1}'}, "none"),
        ({"id": "Pendulum-v1"}, "Box cannot be read from text"),
    ],
)
def test_what_only_the_made_world_tells_fails_its_episode(options: Options, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        play({"gymnasium": options}, row(), [])
