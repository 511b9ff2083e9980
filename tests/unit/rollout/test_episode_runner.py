"""Driving an episode: order of records, durability before tools, and every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from asyncrl.engines.base import Request
from asyncrl.episodes.recorded import turns_of
from asyncrl.episodes.scoring import Scorer
from asyncrl.errors import EngineError
from asyncrl.rewards import in_loop
from asyncrl.rollout import context
from asyncrl.rollout.context import EpisodeContext, generated
from asyncrl.rollout.episode_runner import EpisodeRunner
from asyncrl.rollout.samplers import LocalSampler
from asyncrl.rollout.turn_player import TurnPlayer
from asyncrl.runtime.activity import BusyTimer, Waits
from asyncrl.tools import Tool, Toolbox, tool
from asyncrl.types import EpisodeEnd, FailReason, Turn, TurnReply
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Assign, Failed, Finished, Generated, Record, Replied
from asyncrl.wire.outbox import Outbox
from tests.fakes.chat import call, rules, sample
from tests.fakes.engine import ScriptedEngine
from tests.fakes.loop import Intervals, settle

BAD = "<tool_call>{nonsense</tool_call>"
ATTEMPT = Attempt("u", 1)


def right(**arguments: Any) -> float:
    return float(arguments["solution_str"] == str(arguments["ground_truth"]))


class Bench:
    """A runner over a scripted engine, with an outbox whose receiver the test plays."""

    def __init__(
        self, turns: Sequence[str], reward: Any = right, environment: Any = None, **options: Any
    ) -> None:
        self.turns, self.sent, self.frames = list(turns), [], []
        self.calls: list[str] = []
        self.auto_ack, self.taken = True, 0.0
        self.waits, self.oldest = Waits(), 0
        self.engine = ScriptedEngine(self.script)
        self.lane = LocalSampler(
            "train", lambda: self.engine, self.waits, BusyTimer(Intervals()), Intervals(), 60.0
        )
        self.lane.engine = self.engine
        self.outbox = Outbox(self.send)
        self.tools = {"look": self.looker()}
        config = {"episode_timeout": 60.0, "reward_timeout": 60.0, **options}
        made = rules(environment=environment is not None, **config)
        scorer = Scorer([in_loop(reward)], made.config.reward_timeout)
        context = EpisodeContext(made, scorer, self.outbox, self.waits, oldest=lambda: self.oldest)
        self.runner = EpisodeRunner(
            context, lambda run: TurnPlayer(run, Toolbox(self.tools, made.config.tool_timeout), environment)
        )

    def looker(self, **options: Any) -> Tool:
        @tool(name="look", **options)
        async def look(what: str = "") -> str:
            """Look."""
            self.calls.append(what)
            return f"saw {what}"

        return look

    def script(self, request: Request) -> str:
        return self.turns.pop(0)

    async def send(self, record: Record, frames: Sequence[bytes]) -> None:
        self.sent.append(record)
        self.frames.append(list(frames))
        if self.auto_ack:
            self.outbox.ack(record.seq)

    @property
    def last(self) -> Finished | Failed:
        assert isinstance(self.sent[-1], Finished | Failed)
        return self.sent[-1]

    def play(
        self, frames: Sequence[bytes] = (), lane: str = "train", transcript: bool = False
    ) -> Finished | Failed:
        async def main() -> None:
            async with asyncio.timeout(60):
                service = asyncio.create_task(self.outbox.run())
                await self.runner.run(self.assign(lane, transcript), frames, self.lane)
                await settle()
                service.cancel()

        asyncio.run(main())
        assert [record.seq for record in self.sent] == list(range(1, len(self.sent) + 1))
        assert self.engine.released[-1:] == ["u/1"]
        return self.last

    def assign(self, lane: str = "train", transcript: bool = False) -> Assign:
        wanted = {"seconds": self.taken, "transcript": transcript}
        return Assign(1, ATTEMPT, sample(), lane, temperature=0.7, key=99, **wanted)


def look(what: str) -> str:
    return call("look", f'{{"what": "{what}"}}')


def test_an_episode_leaves_turns_replies_and_an_end_in_order() -> None:
    bench = Bench([look("left") + look("right"), "42"])
    end = bench.play()
    assert [type(record) for record in bench.sent] == [Generated, Replied, Generated, Finished]
    assert isinstance(end, Finished)
    assert (end.result.reward, end.result.end, end.stats.turns, end.stats.tool_calls) == (
        1.0,
        EpisodeEnd.ANSWERED,
        2,
        2,
    )
    assert end.text == ""
    assert sorted(bench.calls) == ["left", "right"]
    turn = msgspec.msgpack.decode(bench.frames[0][0], type=Turn)
    assert turn.replies == ()
    heard = msgspec.msgpack.decode(bench.frames[1][0], type=TurnReply)
    assert [reply.content for reply in heard.replies] == ["saw left", "saw right"]
    first = bench.sent[0]
    assert isinstance(first, Generated)
    assert (first.tokens, first.model_tokens) == (len(turn.context) + len(turn.ids), len(turn.ids))


def test_rewards_are_told_of_the_calls_that_were_made() -> None:
    told: list[Any] = []

    def watching(**arguments: Any) -> float:
        extra = arguments["extra_info"]
        told.extend((extra["num_turns"], extra["tool_calls"], [m["role"] for m in extra["messages"]]))
        return 0.0

    Bench([BAD + look("left"), "42"], watching).play()
    assert told == [2, 1, ["user", "assistant", "tool", "tool", "assistant"]]


def test_requests_carry_the_session_the_key_and_the_whole_prefix() -> None:
    bench = Bench([look("left"), "42"])
    bench.play()
    first, second = bench.engine.requests
    assert {first.session, second.session} == {"u/1"}
    assert (first.key, first.sampling.temperature, first.sampling.stop_ids) == (99, 0.7, (3,))
    assert second.ids[: len(first.ids)] == first.ids


def test_a_transcript_is_sent_where_it_is_wanted() -> None:
    end = Bench([look("left"), "42"]).play(transcript=True)
    assert isinstance(end, Finished)
    assert "saw left" in end.text
    assert end.text.endswith("42")


def test_a_long_transcript_keeps_its_beginning_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "TEXT_LIMIT", 20)
    end = Bench([look("left"), "42"]).play(transcript=True)
    assert isinstance(end, Finished)
    assert end.text.startswith('{"type') and "characters …]" in end.text and end.text.endswith("42")
    assert len(end.text) < 60


def test_tools_wait_until_their_turn_is_durable() -> None:
    async def main() -> None:
        bench = Bench([look("left"), "42"])
        bench.auto_ack = False
        service = asyncio.create_task(bench.outbox.run())
        episode = asyncio.create_task(bench.runner.run(bench.assign(), (), bench.lane))
        await settle()
        assert [type(record) for record in bench.sent] == [Generated]
        assert bench.calls == []
        bench.auto_ack = True
        bench.outbox.ack(1)
        await asyncio.wait_for(episode, 60)
        assert bench.calls == ["left"]
        service.cancel()

    asyncio.run(main())


def test_a_cancelled_episode_says_nothing_more() -> None:
    async def main() -> None:
        bench = Bench(["42"])
        bench.engine.gate.clear()
        service = asyncio.create_task(bench.outbox.run())
        episode = asyncio.create_task(bench.runner.run(bench.assign(), (), bench.lane))
        await settle()
        episode.cancel()
        await settle()
        assert episode.cancelled()
        assert bench.sent == []
        assert bench.engine.cancelled == bench.engine.released == ["u/1"]
        service.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("assigned", [0, 3])
def test_a_turn_does_not_start_on_weights_that_are_too_old(assigned: int) -> None:
    """Too old for the bound by now, or for what this episode was started on."""

    async def main() -> None:
        bench = Bench(["42"])
        bench.oldest = 3 - assigned
        service = asyncio.create_task(bench.outbox.run())
        assign = msgspec.structs.replace(bench.assign(), oldest=assigned)
        episode = asyncio.create_task(bench.runner.run(assign, (), bench.lane))
        await settle()
        assert bench.engine.requests == []
        bench.oldest, bench.engine._version = 0, assigned
        bench.lane.changed.notify()
        await asyncio.wait_for(episode, 60)
        assert isinstance(bench.last, Finished)
        service.cancel()

    asyncio.run(main())


def test_malformed_calls_and_unknown_tools_are_answered_and_counted() -> None:
    bench = Bench([BAD, call("nothing"), look("up") + call("fall"), "42"])

    @tool
    def fall() -> str:
        """Fall."""
        raise ValueError("down")

    bench.tools["fall"] = fall
    end = bench.play()
    assert isinstance(end, Finished)
    assert [type(record) for record in bench.sent] == [Generated, Replied] * 3 + [Generated, Finished]
    heard = msgspec.msgpack.decode(bench.frames[3][0], type=TurnReply)
    assert "unknown tool" in heard.replies[0].content
    assert (end.stats.answered, end.stats.failed, end.stats.refused) == (4, 1, 2)


# -- failures ----------------------------------------------------------------------------------------


def raising(error: Exception) -> Callable[..., Any]:
    def function(*arguments: Any, **options: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("bench", "reason"),
    [
        (lambda: Bench(["42"], reward=raising(ValueError("no"))), FailReason.REWARD_ERROR),
        (lambda: Bench([], reward=right), FailReason.EPISODE_ERROR),  # the script raises IndexError
        (lambda: broken_engine(EngineError("refused")), FailReason.ENGINE_ERROR),
        (lambda: broken_engine(TimeoutError("foreign")), FailReason.EPISODE_ERROR),
    ],
)
def test_a_failure_is_a_record_with_its_reason(bench: Callable[[], Bench], reason: FailReason) -> None:
    end = bench().play()
    assert isinstance(end, Failed)
    assert end.reason is reason
    assert end.detail
    assert "\n" not in end.detail


def broken_engine(error: Exception) -> Bench:
    bench = Bench([])
    bench.engine.script = raising(error)
    return bench


def test_an_episode_past_its_deadline_is_scored_on_what_it_did() -> None:
    """Its own slowness is the policy's doing: excluding it would train the survivors only."""
    bench = Bench([call("look"), "42"], reward=lambda **_: 0.25, episode_timeout=20.0)

    async def never(what: str = "") -> str:
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + 21.0  # type: ignore[method-assign]
        await asyncio.Event().wait()
        return ""

    bench.tools["look"] = tool(name="look")(never)
    bench.play()
    assert isinstance(bench.last, Finished)
    assert (bench.last.result.end, bench.last.stats.turns, bench.last.result.reward) == (
        EpisodeEnd.TIMEOUT,
        1,
        0.25,
    )


def test_an_episode_without_a_turn_by_its_deadline_fails() -> None:
    bench = Bench(["42"], episode_timeout=0.05)
    bench.engine.gate.clear()
    end = bench.play()
    assert isinstance(end, Failed)
    assert end.reason is FailReason.DEADLINE


def test_a_prompt_that_is_too_long_fails_by_name() -> None:
    bench = Bench([], max_tokens=1)
    end = bench.play()
    assert isinstance(end, Failed)
    assert end.reason is FailReason.PROMPT_TOO_LONG


# -- resuming ----------------------------------------------------------------------------------------


def recorded(bench: Bench) -> list[bytes]:
    """The frames that an Assign carries after what this bench sent."""
    frames: list[bytes] = []
    for record, sent in zip(bench.sent, bench.frames, strict=True):
        match record:
            case Generated():
                frames += [sent[0], b""]
            case Replied():
                frames[-1] = sent[0]
    return frames


def test_an_episode_goes_on_from_its_recorded_turns() -> None:
    whole = Bench([look("left"), look("right"), "42"])
    expected = whole.play()
    frames = recorded(whole)[:4]
    rest = Bench(["42"])
    end = rest.play(frames)
    assert [type(record) for record in rest.sent] == [Generated, Finished]
    assert isinstance(end, Finished)
    assert isinstance(expected, Finished)
    assert (end.result.reward, end.stats.turns, end.stats.tool_calls) == (
        expected.result.reward,
        expected.stats.turns,
        expected.stats.tool_calls,
    )
    assert rest.calls == []
    assert rest.frames[0] == whole.frames[4]  # the same turn, token for token


def test_tools_of_a_durable_turn_without_replies_run_again() -> None:
    whole = Bench([look("left"), "42"])
    whole.play()
    rest = Bench(["42"])
    rest.play([recorded(whole)[0], b""])
    assert rest.calls == ["left"]
    assert [type(record) for record in rest.sent] == [Replied, Generated, Finished]


def test_an_episode_goes_on_with_what_is_left_of_its_time() -> None:
    whole = Bench([look("left"), "42"])
    whole.play()
    rest = Bench(["42"], reward=lambda **_: 0.5)
    rest.taken = 60.0  # all of it
    rest.engine.gate.clear()
    done = rest.play(recorded(whole)[:2])
    assert isinstance(done, Finished) and done.result.end is EpisodeEnd.TIMEOUT
    assert done.stats.turns == 1 and done.stats.seconds >= 60.0


def test_a_finished_but_unscored_episode_is_scored() -> None:
    whole = Bench(["42"])
    whole.play()
    rest = Bench([])
    assert isinstance(rest.play(recorded(whole)), Finished)
    assert rest.engine.requests == []


@pytest.mark.parametrize(("replay", "calls"), [("pure", []), ("reapply", ["left"])])
def test_tools_say_how_their_effects_are_rebuilt(replay: Any, calls: list[str]) -> None:
    whole = Bench([look("left"), "42"])
    whole.play()
    rest = Bench(["42"])
    rest.tools["look"] = rest.looker(replay=replay)
    assert isinstance(rest.play(recorded(whole)[:2]), Finished)
    assert rest.calls == calls


def test_an_episode_cannot_go_on_past_a_tool_that_forbids_it() -> None:
    whole = Bench([look("left"), "42"])
    whole.play()
    rest = Bench(["42"])
    rest.tools["look"] = rest.looker(replay="no")
    end = rest.play(recorded(whole)[:2])
    assert isinstance(end, Failed)
    assert end.reason is FailReason.NOT_REPEATED


def test_unreadable_frames_make_the_episode_start_again() -> None:
    for frames in ([b"\xc1", b""], [b""]):
        end = Bench([]).play(frames)
        assert isinstance(end, Failed)
        assert end.reason is FailReason.NOT_REPEATED


def test_a_turn_record_names_its_versions() -> None:
    whole = Bench(["42"])
    whole.engine._version = 7
    whole.play()
    turn = turns_of(recorded(whole))[0]
    record, _ = generated(ATTEMPT, turn)
    assert (record.oldest, record.newest) == (7, 7)
