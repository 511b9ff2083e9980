"""An episode with an environment: what it says is recorded, repeated after a crash; it is always closed."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from asyncrl.conversation.commands import Done
from asyncrl.environments import Environment
from asyncrl.rollout.episode_run import EpisodeRun, Outcome
from asyncrl.types import EpisodeEnd, FailReason, Message, Observation, Sample, ToolCall, TurnReply
from asyncrl.wire.messages.worker import Finished, Generated, Replied
from tests.fakes.chat import call
from tests.fakes.episodes import BAD, TurnBench, look
from tests.fakes.loop import settle
from tests.fakes.raised import BASE_EXCEPTIONS

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
    bench = TurnBench(["7", "42"], nothing, Game)
    end = bench.finished()
    assert (end.result.end, end.result.reward, end.result.turn_rewards) == (
        EpisodeEnd.DONE,
        1.25,
        (0.25, 1.0),
    )
    assert [type(record) for record in bench.sent] == [Generated, Replied, Generated, Replied, Finished]
    heard = msgspec.msgpack.decode(bench.frames[1][0], type=TurnReply)
    assert heard.observation is not None
    assert heard.observation.messages == (Message("user", "higher"),)
    assert Game.log == ["reset", "7", "42", "close"]


def test_its_own_calls_go_to_it_and_others_to_tools() -> None:
    class Board(Game):
        tools = (MOVE,)

    bench = TurnBench([call("move"), look("left"), BAD, "42"], nothing, Board)
    end = bench.finished()
    assert (end.stats.turns, end.stats.tool_calls) == (4, 2)
    assert (Board.log, bench.calls) == (["reset", "move", "42", "close"], ["left"])
    assert '"move"' in "".join(map(chr, bench.engine.requests[0].ids))


def test_a_recorded_environment_is_repeated() -> None:
    uninterrupted = TurnBench(["7", "8", "42"], nothing, Game)
    uninterrupted.play()
    resumed = TurnBench(["42"], nothing, Game)
    end = resumed.finished(uninterrupted.record[:4])
    assert end.result.turn_rewards == (0.25, 0.25, 1.0)
    assert Game.log == ["reset", "7", "8", "42", "close"]
    assert resumed.frames[0] == uninterrupted.frames[4]


def test_a_turn_that_was_not_answered_yet_is_stepped() -> None:
    uninterrupted = TurnBench(["7", "42"], nothing, Game)
    uninterrupted.play()
    resumed = TurnBench(["42"], nothing, Game)
    resumed.play([uninterrupted.record[0], b""])
    assert [type(record) for record in resumed.sent] == [Replied, Generated, Replied, Finished]


class Generous(Game):
    async def cut_short(self, unanswered: Message | None) -> float:
        self.log.append(f"cut short: {unanswered.content if unanswered else 'heard'}")
        return 0.5


@pytest.mark.parametrize(
    ("limits", "turns", "said"),
    [({"max_turns": 1}, ["7"], "heard"), ({"max_bad_calls": 1}, ["7", "so " + BAD], "so " + BAD)],
)
def test_an_environment_that_a_limit_ends_is_asked_what_it_gives(
    limits: dict[str, Any], turns: list[str], said: str
) -> None:
    bench = TurnBench(turns, nothing, Generous, **limits)
    end = bench.finished()
    assert end.result.turn_rewards[-1] == (0.75 if len(turns) == 1 else 0.5)
    assert Generous.log[-2:] == [f"cut short: {said}", "close"]


class Moody(Game):
    async def step(self, message: Message) -> Observation:
        await super().step(message)
        return Observation((Message("user", "lower"),))


class Once(Game):
    replay = "no"


@pytest.mark.parametrize("other", [Moody, Once])
def test_an_environment_that_cannot_be_repeated_makes_the_episode_start_again(other: type[Game]) -> None:
    uninterrupted = TurnBench(["7", "42"], nothing, Game)
    uninterrupted.play()
    assert (
        TurnBench(["42"], nothing, other).failed(uninterrupted.record[:2]).reason is FailReason.NOT_REPEATED
    )  # which is issued again from the prompt
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


@pytest.mark.parametrize("kind", BASE_EXCEPTIONS)
@pytest.mark.parametrize("method", ["__init__", "reset", "step", "close"])
def test_whatever_an_environment_raises_fails_its_episode_only(
    kind: type[BaseException], method: str
) -> None:
    def quick(self: Game) -> None:
        raise kind("its text")

    async def waiting(self: Game, *arguments: Any) -> None:
        await asyncio.sleep(0)
        raise kind("its text")

    world = type("Raising", (Game,), {method: quick if method == "__init__" else waiting})
    bench = TurnBench(["42"], nothing, world)
    if method == "close":
        bench.finished()
        return
    end = bench.failed()
    assert end.reason is FailReason.ENVIRONMENT_ERROR
    assert f"{kind.__name__}: its text (test_turn_player.py:" in end.detail


@pytest.mark.parametrize("kind", BASE_EXCEPTIONS)
@pytest.mark.parametrize("method", ["generate", "release", "close"])
def test_whatever_a_registered_engine_raises_fails_its_episode_only(
    kind: type[BaseException], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raising(*arguments: Any) -> None:
        raise kind("its text")

    def release(session: str) -> None:
        bench.engine.released.append(session)
        raise kind("its text")

    bench = TurnBench(["42"], nothing)
    monkeypatch.setattr(bench.engine, method, release if method == "release" else raising)
    if method != "generate":
        bench.finished()
        asyncio.run(bench.sampler.close())
        return
    end = bench.failed()
    assert end.reason is FailReason.EPISODE_ERROR
    assert f"{kind.__name__}: its text (test_turn_player.py:" in end.detail


@pytest.mark.parametrize("kind", BASE_EXCEPTIONS)
def test_whatever_a_parser_raises_fails_its_episode_only(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*arguments: Any) -> None:
        raise kind("its text")

    monkeypatch.setattr("asyncrl.conversation.turns.parse_turn", raising)
    end = TurnBench(["42"], nothing).failed()
    assert end.reason is FailReason.EPISODE_ERROR
    assert f"{kind.__name__}: its text (test_turn_player.py:" in end.detail


@pytest.mark.parametrize("world", [Broken, Hung, Over])
def test_an_environment_that_fails_ends_its_episode_only(world: type[Game]) -> None:
    assert TurnBench(["7"], nothing, world, tool_timeout=0.05).failed().reason is FailReason.ENVIRONMENT_ERROR
    assert world.log[-1] == "close"


def test_the_reason_names_the_line_of_the_environment() -> None:
    end = TurnBench(["7"], nothing, Broken).failed()
    line = Broken.step.__code__.co_firstlineno + 1
    expected_reason = f"OSError: the board fell down (test_turn_player.py:{line})"
    assert end.detail == f"the environment's step failed: {expected_reason}"


class Stubborn(Game):
    """Its step ends when the test says so, and not before."""

    let_go: asyncio.Event

    async def step(self, message: Message) -> Observation:
        type(self).let_go = asyncio.Event()
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.log.append("no")
        return Observation()


def test_an_environment_that_ignores_its_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps neither its episode, nor the loop; and it is not closed while it is at work."""
    monkeypatch.setattr("asyncrl.isolation.calls.GRACE_SECONDS", 0.0)
    end = TurnBench(["7"], nothing, Stubborn, tool_timeout=0.02).failed()
    assert "the environment's step did not finish within 0.02 s" in end.detail
    assert not Stubborn.let_go.is_set()
    assert Stubborn.log == ["reset", "no", "close"]


def test_an_environment_may_have_limits_of_its_own() -> None:
    class Quick(Hung):
        timeout = 0.02

    class Slow(Game):
        timeout = 60.0

        async def step(self, message: Message) -> Observation:
            await asyncio.sleep(0.02)
            return await super().step(message)

    end = TurnBench(["7"], nothing, Quick, tool_timeout=60.0).failed()
    assert "within 0.02 s" in end.detail
    assert isinstance(TurnBench(["42"], nothing, Slow, tool_timeout=1e-6).play(), Finished)


def answering(answer: Any, cut: Any = 0.0) -> type[Game]:
    class Answering(Game):
        async def step(self, message: Message) -> Any:
            return answer

        async def cut_short(self, unanswered: Message | None) -> Any:
            return cut

    return Answering


USER = Message("user", "so?")


@pytest.mark.parametrize(
    ("answer", "cut", "complaint"),
    [
        (Observation((USER,), float("nan"), True), 0.0, "step .* not a finite number"),
        (Observation((USER,), float("inf")), 0.0, "step .* not a finite number"),
        (Observation((USER,), None), 0.0, "step .* TypeError"),  # type: ignore[arg-type]
        (Observation(("so?",)), 0.0, "step .* must be Messages, not str"),  # type: ignore[arg-type]
        (Observation((Message("user", b"so?"),)), 0.0, "step .* content must be text, .* not bytes"),  # type: ignore[arg-type]
        (Observation((Message("user", reasoning=7),)), 0.0, "step .* reasoning .* text"),  # type: ignore[arg-type]
        (Observation((Message("assistant", "", (ToolCall("a", "{}"),)),)), 0.0, "step .* contain tool calls"),
        (Observation((Message("tool", "so?", name="n" * 257),)), 0.0, "step .* name .* at most 256"),
        (Observation((Message("tool", "so?", tool_call_id="n" * 257),)), 0.0, "tool_call_id .* at most 256"),
        (Observation((USER,) * 65), 0.0, "step .* at most 64 messages"),
        (("so?", 1.0, False), 0.0, "step .* expected an Observation, not tuple"),
        (Observation((USER,)), float("nan"), "cut_short .* not a finite number"),
        (Observation((USER,)), "much", "cut_short .* not a number"),
    ],
)
def test_what_an_environment_says_is_checked(answer: Any, cut: Any, complaint: str) -> None:
    bench = TurnBench(["7"], nothing, answering(answer, cut), max_turns=1)
    end = bench.failed()
    assert end.reason is FailReason.ENVIRONMENT_ERROR
    assert re.search(complaint, end.detail), end.detail


def test_numbers_may_be_numpys_and_messages_a_list() -> None:
    half = "half a pair: \ud800"
    message = Message("user", half, name=half, tool_call_id=half, reasoning=half)
    answer = Observation([message], np.float32(0.5), np.bool_(True))  # type: ignore[arg-type]
    bench = TurnBench(["7"], nothing, answering(answer))
    end = bench.finished()
    assert (end.result.end, end.result.reward) == (EpisodeEnd.DONE, 0.5)
    heard = msgspec.msgpack.decode(bench.frames[1][0], type=TurnReply)
    assert heard.observation is not None
    mended = "half a pair: ?"
    expected = Message("user", mended, name=mended, tool_call_id=mended, reasoning=mended)
    assert heard.observation.messages == (expected,)


def out_of_time(bench: TurnBench, busy: asyncio.Event) -> Outcome:
    """How an episode ends whose time is up when it is `busy`."""

    async def main() -> Outcome:
        service = asyncio.create_task(bench.outbox.run_sender())
        player = bench.player(EpisodeRun(bench.context, bench.assign(), bench.sampler, asyncio.timeout(60)))
        play = asyncio.create_task(player.play(()))
        async with asyncio.timeout(60):
            await busy.wait()
            play.cancel()
            await asyncio.wait([play])
            outcome = await player.expire()
            await player.close()
        service.cancel()
        return outcome

    return asyncio.run(main())


def test_a_step_that_the_episodes_time_ends_was_heard() -> None:
    busy = asyncio.Event()

    class Long(Generous):
        async def step(self, message: Message) -> Observation:
            observation = await super().step(message)
            if message.content == "8":
                busy.set()
                await asyncio.Event().wait()
            return observation

    done = out_of_time(TurnBench(["7", "8"], nothing, Long), busy).command
    assert isinstance(done, Done)
    assert (done.result.end, done.result.turn_rewards) == (EpisodeEnd.TIMEOUT, (0.25, 0.5))
    assert Long.log == ["reset", "7", "8", "cut short: heard", "close"]


def test_an_episode_that_is_over_keeps_its_end_when_its_time_is_up() -> None:
    busy = asyncio.Event()
    ends = []

    async def slow(**arguments: Any) -> float:
        ends.append(arguments["extra_info"]["end"])
        if not busy.is_set():
            busy.set()
            await asyncio.Event().wait()
        return 1.0

    done = out_of_time(TurnBench(["42"], slow, Game), busy).command
    assert isinstance(done, Done)
    assert (done.result.end, done.result.reward, ends) == (EpisodeEnd.DONE, 2.0, ["done", "done"])


async def test_a_cancelled_episode_closes_its_environment() -> None:
    bench = TurnBench(["7"], nothing, Game)
    bench.engine.gate.clear()
    episode = asyncio.create_task(bench.run())
    await settle()
    episode.cancel()
    await settle()
    assert episode.cancelled()
    assert Game.log == ["reset", "close"]
