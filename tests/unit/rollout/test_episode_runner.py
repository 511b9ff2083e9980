"""Driving an episode: order of records, durability before tools, and every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asyncrl.errors import EngineError
from asyncrl.rewards import RewardError
from asyncrl.rollout import episode_run
from asyncrl.tools import ToolError, tool
from asyncrl.types import EpisodeEnd, FailReason, Turn, TurnReply
from asyncrl.wire.messages.worker import Finished, Generated, Replied
from tests.fakes.chat import call
from tests.fakes.episodes import BAD, TurnBench, look, looker
from tests.fakes.loop import settle


def test_an_episode_leaves_turns_replies_and_an_end_in_order() -> None:
    bench = TurnBench([look("left") + look("right"), "42"])
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


def test_n_grams_that_repeat_within_a_turn_are_counted() -> None:
    def repeated(*texts: str) -> int:
        end = TurnBench([*texts]).play()
        assert isinstance(end, Finished)
        return end.stats.repeated

    assert repeated("abcdefghijklmnopqrst") == 0
    assert repeated("abcdefghi" * 3) > 10
    assert repeated(look("left"), look("left"), "7") == 2 * repeated(look("left"), "7")


def test_rewards_see_the_calls_that_were_made() -> None:
    reward_arguments: list[Any] = []

    def watching(**arguments: Any) -> float:
        extra = arguments["extra_info"]
        reward_arguments.extend(
            (extra["num_turns"], extra["tool_calls"], [m["role"] for m in extra["messages"]])
        )
        return 0.0

    TurnBench([BAD + look("left"), "42"], watching).play()
    assert reward_arguments == [2, 1, ["user", "assistant", "tool", "tool", "assistant"]]


def test_requests_carry_the_session_the_key_and_the_whole_prefix() -> None:
    bench = TurnBench([look("left"), "42"])
    bench.play()
    first, second = bench.engine.requests
    assert {first.session, second.session} == {"u/1"}
    assert (first.key, first.sampling.temperature, first.sampling.stop_ids) == (99, 0.7, (3,))
    assert second.ids[: len(first.ids)] == first.ids


def test_a_transcript_is_sent_where_it_is_wanted() -> None:
    end = TurnBench([look("left"), "42"]).finished(transcript=True)
    assert "saw left" in end.text
    assert end.text.endswith("42")


def test_a_long_transcript_keeps_its_beginning_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_run, "TEXT_LIMIT", 20)
    end = TurnBench([look("left"), "42"]).finished(transcript=True)
    assert end.text.startswith('{"type') and "characters …]" in end.text and end.text.endswith("42")
    assert len(end.text) < 60


async def test_tools_wait_until_their_turn_is_durable() -> None:
    bench = TurnBench([look("left"), "42"])
    bench.auto_ack = False
    episode = asyncio.create_task(bench.run())
    await settle()
    assert [type(record) for record in bench.sent] == [Generated]
    assert bench.calls == []
    bench.auto_ack = True
    bench.outbox.acknowledge(1)
    await asyncio.wait_for(episode, 60)
    assert bench.calls == ["left"]


async def test_a_cancelled_episode_says_nothing_more() -> None:
    bench = TurnBench(["42"])
    bench.engine.gate.clear()
    episode = asyncio.create_task(bench.run())
    await settle()
    episode.cancel()
    await settle()
    assert episode.cancelled()
    assert bench.sent == []
    assert bench.engine.cancelled == bench.engine.released == ["u/1"]


@pytest.mark.parametrize("assigned", [0, 3])
async def test_a_turn_does_not_start_on_weights_that_are_too_old(assigned: int) -> None:
    """Too old for the bound by now, or for what this episode was started on."""
    bench = TurnBench(["42"])
    bench.oldest = 3 - assigned
    episode = asyncio.create_task(bench.run(min_version=assigned))
    await settle()
    assert bench.engine.requests == []
    bench.oldest = 0
    bench.engine._version = assigned
    bench.sampler.changed.notify()
    await asyncio.wait_for(episode, 60)
    assert isinstance(bench.sent[-1], Finished)


def test_malformed_calls_and_unknown_tools_are_answered_and_counted() -> None:
    bench = TurnBench([BAD, call("nothing"), look("up") + call("fall") + call("decline"), "42"])

    @tool
    def fall() -> str:
        """Fall."""
        raise ValueError("down")

    @tool
    def decline() -> str:
        """Decline."""
        raise ToolError("not today")

    bench.tools |= {"fall": fall, "decline": decline}
    end = bench.finished()
    assert [type(record) for record in bench.sent] == [Generated, Replied] * 3 + [Generated, Finished]
    heard = msgspec.msgpack.decode(bench.frames[3][0], type=TurnReply)
    assert "unknown tool" in heard.replies[0].content
    heard = msgspec.msgpack.decode(bench.frames[5][0], type=TurnReply)
    assert heard.replies[2].content == "error: not today" and heard.replies[2].declined
    stats = end.stats
    assert (stats.answered, stats.failed, stats.declined, stats.refused) == (5, 1, 1, 2)


# -- failures ----------------------------------------------------------------------------------------


def raising(error: Exception) -> Callable[..., Any]:
    def function(*arguments: Any, **options: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("bench", "reason"),
    [
        (lambda: TurnBench(["42"], reward=raising(ValueError("no"))), FailReason.REWARD_ERROR),
        (
            lambda: TurnBench(["42"], reward=raising(RewardError("no", FailReason.TESTS_FAILED_TO_RUN))),
            FailReason.TESTS_FAILED_TO_RUN,
        ),
        (lambda: TurnBench([]), FailReason.EPISODE_ERROR),  # the script raises IndexError
        (lambda: broken_engine(EngineError("refused")), FailReason.ENGINE_ERROR),
        (lambda: broken_engine(TimeoutError("foreign")), FailReason.EPISODE_ERROR),
    ],
)
def test_a_failure_is_a_record_with_its_reason(bench: Callable[[], TurnBench], reason: FailReason) -> None:
    end = bench().failed()
    assert end.reason is reason
    assert end.detail
    assert "\n" not in end.detail


def broken_engine(error: Exception) -> TurnBench:
    bench = TurnBench([])
    bench.engine.script = raising(error)
    return bench


def test_an_episode_past_its_deadline_is_scored_on_what_it_did() -> None:
    """Its own slowness is the policy's doing: excluding it would train the survivors only."""
    bench = TurnBench([call("look"), "42"], reward=lambda **_: 0.25, episode_timeout=20.0)

    async def never(what: str = "") -> str:
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + 21.0  # type: ignore[method-assign]
        await asyncio.Event().wait()
        return ""

    bench.tools["look"] = tool(name="look")(never)
    end = bench.finished()
    assert (end.result.end, end.stats.turns, end.result.reward) == (
        EpisodeEnd.TIMEOUT,
        1,
        0.25,
    )


def test_an_episode_without_a_turn_by_its_deadline_fails() -> None:
    bench = TurnBench(["42"], episode_timeout=0.05)
    bench.engine.gate.clear()
    assert bench.failed().reason is FailReason.DEADLINE


def test_a_prompt_that_is_too_long_fails_by_name() -> None:
    bench = TurnBench([], max_tokens=1)
    assert bench.failed().reason is FailReason.PROMPT_TOO_LONG


# -- resuming ----------------------------------------------------------------------------------------


def test_an_episode_goes_on_from_its_recorded_turns() -> None:
    uninterrupted = TurnBench([look("left"), look("right"), "42"])
    expected = uninterrupted.play()
    frames = uninterrupted.record[:4]
    resumed = TurnBench(["42"])
    end = resumed.play(frames)
    assert [type(record) for record in resumed.sent] == [Generated, Finished]
    assert isinstance(end, Finished)
    assert isinstance(expected, Finished)
    assert (end.result.reward, end.stats.turns, end.stats.tool_calls) == (
        expected.result.reward,
        expected.stats.turns,
        expected.stats.tool_calls,
    )
    assert resumed.calls == []
    assert resumed.frames[0] == uninterrupted.frames[4]  # the same turn, token for token


def test_tools_of_a_durable_turn_without_replies_run_again() -> None:
    uninterrupted = TurnBench([look("left"), "42"])
    uninterrupted.play()
    resumed = TurnBench(["42"])
    resumed.play([uninterrupted.record[0], b""])
    assert resumed.calls == ["left"]
    assert [type(record) for record in resumed.sent] == [Replied, Generated, Finished]


def test_an_episode_goes_on_with_what_is_left_of_its_time() -> None:
    uninterrupted = TurnBench([look("left"), "42"])
    uninterrupted.play()
    resumed = TurnBench(["42"], reward=lambda **_: 0.5)
    resumed.earlier_seconds = 60.0  # all of it
    resumed.engine.gate.clear()
    done = resumed.finished(uninterrupted.record[:2])
    assert done.result.end is EpisodeEnd.TIMEOUT
    assert done.stats.turns == 1 and done.stats.seconds >= 60.0


def test_a_finished_but_unscored_episode_is_scored() -> None:
    uninterrupted = TurnBench(["42"])
    uninterrupted.play()
    resumed = TurnBench([])
    resumed.finished(uninterrupted.record)
    assert resumed.engine.requests == []


@pytest.mark.parametrize(("replay", "calls"), [("pure", []), ("reapply", ["left"])])
def test_tools_say_how_their_effects_are_rebuilt(replay: Any, calls: list[str]) -> None:
    uninterrupted = TurnBench([look("left"), "42"])
    uninterrupted.play()
    resumed = TurnBench(["42"])
    resumed.tools["look"] = looker(resumed.calls, replay=replay)
    resumed.finished(uninterrupted.record[:2])
    assert resumed.calls == calls


def test_an_episode_cannot_go_on_past_a_tool_that_forbids_it() -> None:
    uninterrupted = TurnBench([look("left"), "42"])
    uninterrupted.play()
    resumed = TurnBench(["42"])
    resumed.tools["look"] = looker(resumed.calls, replay="no")
    assert resumed.failed(uninterrupted.record[:2]).reason is FailReason.NOT_REPEATED


def test_unreadable_frames_make_the_episode_start_again() -> None:
    for frames in ([b"\xc1", b""], [b""]):
        assert TurnBench([]).failed(frames).reason is FailReason.NOT_REPEATED
