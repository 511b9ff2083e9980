"""An episode with an environment: what it says is recorded, repeated after a crash; it is always closed."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
import pytest

from asyncrl.environments import Environment
from asyncrl.transport.messages import Failed, Finished, Generated, Replied
from asyncrl.types import EpisodeEnd, FailReason, Heard, Message, Observation, Sample
from tests.fakes.chat import call
from tests.fakes.loop import settle
from tests.unit.roles.test_episode_runner import BAD, Bench, look, recorded

MOVE = {"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}


class Game(Environment):
    """Says higher until it is told 42; the test sees all that happens."""

    replay: Literal["reapply", "no"] = "reapply"
    tools: tuple[dict[str, Any], ...] = ()
    log: list[str]

    def __init__(self) -> None:
        type(self).log = []
        self.closing = asyncio.Event()
        self.closing.set()

    async def reset(self, sample: Sample) -> Observation:
        self.log.append("reset")
        return Observation((Message("user", "guess"),))

    async def step(self, message: Message) -> Observation:
        self.log.append(message.content or message.tool_calls[0].name)
        if message.content == "42":
            return Observation(reward=1.0, done=True)
        return Observation((Message("user", "higher"),), reward=0.25)

    async def close(self) -> None:
        self.log.append("close")
        await self.closing.wait()


def nothing(**_: Any) -> float:
    return 0.0


def test_what_an_environment_says_is_recorded_and_rewarded() -> None:
    bench = Bench(["7", "42"], nothing, Game)
    end = bench.play()
    assert isinstance(end, Finished)
    assert (end.end, end.reward, end.turn_rewards) == (EpisodeEnd.DONE, 1.25, (0.25, 1.0))
    assert [type(record) for record in bench.sent] == [Generated, Replied, Generated, Replied, Finished]
    heard = msgspec.msgpack.decode(bench.frames[1][0], type=Heard)
    assert heard.observation is not None
    assert heard.observation.messages == (Message("user", "higher"),)
    assert Game.log == ["reset", "7", "42", "close"]


def test_its_own_calls_go_to_it_and_others_to_tools() -> None:
    class Board(Game):
        tools = (MOVE,)

    bench = Bench([call("move"), look("left"), BAD, "42"], nothing, Board)
    end = bench.play()
    assert isinstance(end, Finished)
    assert (end.turns, end.tool_calls) == (4, 2)
    assert (Board.log, bench.calls) == (["reset", "move", "42", "close"], ["left"])
    assert '"move"' in "".join(map(chr, bench.engine.requests[0].ids))


def test_a_recorded_environment_is_repeated() -> None:
    whole = Bench(["7", "8", "42"], nothing, Game)
    whole.play()
    rest = Bench(["42"], nothing, Game)
    end = rest.play(recorded(whole)[:4])
    assert isinstance(end, Finished)
    assert end.turn_rewards == (0.25, 0.25, 1.0)
    assert Game.log == ["reset", "7", "8", "42", "close"]
    assert rest.frames[0] == whole.frames[4]


def test_a_turn_that_was_not_answered_yet_is_stepped() -> None:
    whole = Bench(["7", "42"], nothing, Game)
    whole.play()
    rest = Bench(["42"], nothing, Game)
    rest.play([recorded(whole)[0], b""])
    assert [type(record) for record in rest.sent] == [Replied, Generated, Replied, Finished]


class Generous(Game):
    async def cut_short(self, unheard: Message | None) -> float:
        self.log.append(f"cut short: {unheard.content if unheard else 'heard'}")
        return 0.5


@pytest.mark.parametrize(
    ("limits", "turns", "said"),
    [({"max_turns": 1}, ["7"], "heard"), ({"max_bad_calls": 1}, ["7", "so " + BAD], "so " + BAD)],
)
def test_an_environment_that_a_limit_ends_is_asked_what_it_gives(
    limits: dict[str, Any], turns: list[str], said: str
) -> None:
    bench = Bench(turns, nothing, Generous)
    made = bench.runner.desk.rules
    object.__setattr__(made, "limits", msgspec.structs.replace(made.limits, **limits))
    end = bench.play()
    assert isinstance(end, Finished)
    assert end.turn_rewards[-1] == (0.75 if len(turns) == 1 else 0.5)
    assert Generous.log[-2:] == [f"cut short: {said}", "close"]


class Moody(Game):
    async def step(self, message: Message) -> Observation:
        await super().step(message)
        return Observation((Message("user", "lower"),))


class Once(Game):
    replay = "no"


@pytest.mark.parametrize("other", [Moody, Once])
def test_an_environment_that_cannot_be_repeated_makes_the_episode_start_again(other: type[Game]) -> None:
    whole = Bench(["7", "42"], nothing, Game)
    whole.play()
    end = Bench(["42"], nothing, other).play(recorded(whole)[:2])
    assert isinstance(end, Failed)
    assert end.reason is FailReason.EPISODE_ERROR  # which is issued again from the prompt
    assert other.log[-1] == "close"


class Broken(Game):
    async def step(self, message: Message) -> Observation:
        raise OSError("the board fell down")


class Hung(Game):
    async def step(self, message: Message) -> Observation:
        await asyncio.Event().wait()
        raise AssertionError


class Over(Game):
    async def reset(self, sample: Sample) -> Observation:
        return Observation(done=True)


@pytest.mark.parametrize("world", [Broken, Hung, Over])
def test_an_environment_that_fails_ends_its_episode_only(world: type[Game]) -> None:
    end = Bench(["7"], nothing, world, tool_timeout=0.05).play()
    assert isinstance(end, Failed)
    assert end.reason is FailReason.ENVIRONMENT_ERROR
    assert world.log[-1] == "close"


def test_a_cancelled_episode_closes_its_environment() -> None:
    async def main() -> None:
        bench = Bench(["7"], nothing, Game)
        bench.engine.gate.clear()
        episode = asyncio.create_task(bench.runner.run(bench.assign(), (), bench.lane))
        await settle()
        episode.cancel()
        await settle()
        assert episode.cancelled()
        assert Game.log == ["reset", "close"]

    asyncio.run(main())
