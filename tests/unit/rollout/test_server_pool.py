"""A turn ends whole or with a named error, whatever its servers do."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.config import parse
from asyncrl.errors import EngineError, NoEngineError
from asyncrl.rollout import server_pool
from asyncrl.runtime.activity import ASLEEP
from asyncrl.types import FailReason, Generation, StopReason, TokenScores, VersionSpan
from asyncrl.wire.messages.worker import EngineUse, Failed, Finished
from tests.fakes.chat import FakeChat
from tests.fakes.episodes import TurnBench, look
from tests.fakes.loop import settle
from tests.fakes.servers import (
    SECONDS,
    Busy,
    Lose,
    Part,
    Refuse,
    Servers,
    counts_up,
    entry,
    request,
)

# -- scorers ---------------------------------------------------------------------------------------------


async def test_a_turn_waits_by_name_for_a_scorer_and_goes_on_when_it_is_back() -> None:
    s = Servers("engine", lane="reference")
    reading = asyncio.create_task(s.pool.read("s", (0, 1, 2, 3), 2))
    await settle()
    s.now = 3.0
    assert s.waits.longest_wait() == "scorers.reference: no server (0 known, 0 healthy) (3 s)"
    s.tell(entry("scorer", lane="reference"))
    s["scorer"].gate.clear()  # it reads the turn, and is killed
    await s["scorer"].first_request.wait()
    s.tell(entry("scorer", lane="reference", incarnation="2", url="", healthy=False))
    s.clients[0].gate.set()
    s.tell(entry("scorer", lane="reference", incarnation="2"))
    assert await reading == TokenScores(np.array([-2, -3], "<f4").tobytes())
    assert [client.entry.name for client in s.clients] == ["scorer", "scorer"]  # no engine is asked


async def test_waits_for_a_scorers_room_and_for_its_address_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_PAUSE", 0.001)
    with pytest.raises(NoEngineError, match=r"scorers\.teacher: no server .*, after 0\.01 s"):
        await Servers(lane="teacher", patience=0.01).pool.url()
    s = Servers(lane="teacher")
    spans = list[str]()
    s.tell(*(entry(name, lane="teacher") for name in "ab"))
    assert [await s.pool.url() for _ in range(3)] == ["http://a", "http://b", "http://a"]

    def named(name: str, seconds: float = 0.0, span: str = "") -> AbstractContextManager[None]:
        spans.append(span)
        return nullcontext()

    monkeypatch.setattr(s.waits, "wait_named", named)
    s["a"].acts = [Busy()]
    s["b"].acts = [Busy()]
    await s.pool.score(request())
    assert [span for span in spans if span] == ["room on scorers.teacher"]


async def seen(condition: Callable[[], bool]) -> None:
    """Until it is true, which takes no time."""
    for _ in range(100):
        if condition():
            return
        await settle()
    raise AssertionError("it does not come")


@pytest.mark.parametrize(
    ("waits_s", "reads_s", "in_time"), [(4.5, 5.0, True), (4.5, 15.0, False), (15.0, 5.0, True)]
)
async def test_reading_costs_an_episode_time_and_waits_for_a_scorer_none(
    monkeypatch: pytest.MonkeyPatch, waits_s: float, reads_s: float, in_time: bool
) -> None:
    loop = asyncio.get_running_loop()
    passed = 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed)
    s = Servers(lane="teacher")
    bench = TurnBench(["42"], episode_timeout=10.0)
    bench.context.scorer_of = lambda source: s.pool

    def waits() -> bool:
        s.now += 1.0
        return "no server" in s.waits.longest_wait()

    episode = asyncio.create_task(bench.run())
    await seen(waits)
    for incarnation in ("1", "2"):  # it reads the turn, and the first one is killed
        passed += waits_s
        await settle()
        s.tell(entry("scorer", lane="teacher", incarnation=incarnation))
        s["scorer"].gate.clear()
        await seen(lambda: s["scorer"].first_request.is_set() or episode.done())
        if incarnation == "1":
            s.tell(entry("scorer", lane="teacher", url="", healthy=False))
            await seen(waits)
    passed += reads_s
    await settle()
    s["scorer"].gate.set()
    await seen(episode.done)
    await episode
    end = bench.sent[-1]
    if in_time:
        assert isinstance(end, Finished) and reads_s <= end.stats.seconds < 10.0
        assert [turn.generation.scores is not None for turn in bench.turns] == [True]
    else:
        assert isinstance(end, Failed) and end.reason is FailReason.DEADLINE


@pytest.mark.parametrize("privilege", ["", "It is {ground_truth}."])
def test_a_scorer_reads_each_turn_behind_the_prompt_of_a_teacher(privilege: str) -> None:
    """Which is told more in the first message (kl.prompt), and scores the same tokens; also after a restart,
    when turns before are recorded."""
    first = TurnBench([look("a"), look("b"), "42"])
    read = first.engine.read_ids
    for bench in (first, again := TurnBench(["42"])):
        bench.context.rules = dataclasses.replace(bench.context.rules, privilege=privilege)
        bench.context.scorer_of = partial(getattr, bench, "sampler")
    first.finished()
    turns = first.turns
    teacher_text = "It is 42.\n\n" * bool(privilege)
    prompt = FakeChat().decode(turns[0].context).replace("q\x02", f"{teacher_text}q\x02")
    assert FakeChat().decode(read[0]).startswith(prompt)
    assert all(
        row[-len(turn.generation.ids) :] == turn.generation.ids for row, turn in zip(read, turns, strict=True)
    )
    assert read[2][: len(read[1])] == read[1] and read[1][: len(read[0])] == read[0]
    assert len(read[2]) == sum(len(turn.context + turn.generation.ids) for turn in turns) + len(teacher_text)
    assert [turn.generation.scores and len(turn.generation.scores.logprobs) for turn in turns] == [
        4 * len(t.generation.ids) for t in turns
    ]
    again.finished(first.record[:4])
    assert again.engine.read_ids == read[2:]


def test_a_worker_need_not_know_a_reward_models_kind(tmp_path: Path) -> None:
    """It may be one of its own code, which servers alone run."""
    for name, kind in (("policy", "qwen2"), ("reward", "of_its_own")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    policy = {"path": str(tmp_path / "policy")}
    reward = {"path": str(tmp_path / "reward")}
    settings = {"name": "x", "model": policy, "data": {"train": "d"}, "scorers": {"reward": reward}}
    server_pool.connector(parse(settings), "reward")


# -- routing -----------------------------------------------------------------------------------------


async def test_the_turns_of_an_episode_stay_at_one_server() -> None:
    s = Servers("a", "b")
    for _ in range(3):
        assert counts_up(await s.pool.generate(request("s")))
        assert counts_up(await s.pool.generate(request("t")))
    assert [{r.session for r in client.requests} for client in s.clients] == [{"s"}, {"t"}]


async def test_a_turn_waits_by_name_for_a_server_that_is_fresh() -> None:
    s = Servers("a", "b")
    s.tell(entry("a", 3, healthy=False))
    oldest = 2
    waiting = asyncio.create_task(s.pool.wait_for_version(lambda: oldest))
    await settle()
    s.now = 3.0
    assert s.waits.longest_wait() == "engines: no server with v2 (2 known, 1 healthy) (3 s)"
    assert s.pool.version == 0
    s.tell(entry("b", 1))
    await settle()
    assert not waiting.done()
    oldest = 1
    s.pool.changed.notify()
    await waiting
    assert counts_up(await s.pool.generate(request()))
    assert s.request_counts() == ["a:0", "b:1"]


async def test_nobody_is_asked_without_an_address_or_while_unhealthy() -> None:
    s = Servers()
    s.tell(entry("a", url="", healthy=False), entry("b", healthy=False))
    turn = asyncio.create_task(s.pool.generate(request()))
    await settle()
    assert s.request_counts() == ["b:0"]
    s.tell(entry("a"))
    assert counts_up(await turn)
    assert s.request_counts() == ["b:0", "a:1"]


async def test_validation_uses_the_server_set_aside_for_it_whatever_it_holds() -> None:
    train = Servers("a", "b")
    validation = Servers("a", "b", lane="eval")
    for s in (train, validation):
        s.tell(entry("a", 1, lane="eval"), entry("b", 5))
        await s.pool.generate(request(), lambda: 5)
    assert (train.request_counts(), validation.request_counts()) == (["a:0", "b:1"], ["a:1", "b:0"])
    validation.tell(entry("a", 1, healthy=False), entry("b", 5))  # the validation is over
    await validation.pool.generate(request())
    assert validation.request_counts() == ["a:1", "b:1"]


async def test_each_turn_is_held_to_the_version_that_its_own_episode_needs() -> None:
    """A server back from validation, with weights of its own age."""
    s = Servers("a", "b")
    s.tell(entry("a", 5), entry("b", 4))
    for session in "stuv":
        await s.pool.generate(request(session), lambda: 5)
    assert s.request_counts() == ["a:4", "b:0"]
    await s.pool.generate(request("w"), lambda: 4)
    assert s.request_counts() == ["a:4", "b:1"]


async def test_a_text_is_scored_by_the_first_server_that_has_room_and_is_not_lost() -> None:
    s = Servers("a", "b", "c", lane="eval")
    s["a"].acts = [Busy()] * 2
    s["b"].acts = [Lose()]
    assert await s.pool.score(request()) == (-1.0, -2.0)
    assert s.request_counts() == ["a:2", "b:1", "c:1"] and [client.use.requests for client in s.clients] == [
        2,
        1,
        1,
    ]
    s["c"].acts = [Refuse()]
    s.tell(entry("a", healthy=False), entry("b", healthy=False))
    with pytest.raises(EngineError, match="refused"):
        await s.pool.score(request())


# -- full servers ------------------------------------------------------------------------------------


async def test_a_full_server_sends_the_turn_to_another() -> None:
    s = Servers("a", "b")
    s["a"].acts = [Busy()]
    assert counts_up(await s.pool.generate(request()))
    assert s.request_counts() == ["a:1", "b:1"]
    assert tuple(s.pool.usage_by_name.values())[1].moved == 0  # nobody had begun it


async def test_full_servers_are_asked_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_PAUSE", 0.001)
    s = Servers("a", "b")
    s["a"].acts = [Busy()] * 3
    s["b"].acts = [Busy()] * 3
    turn = asyncio.create_task(s.pool.generate(request()))
    names = set()
    while not turn.done():
        await asyncio.sleep(0)
        s.now += 2.0
        names.add(s.waits.longest_wait().split(" (")[0])
    assert counts_up(await turn)
    assert s.request_counts() == ["a:3", "b:4"]
    assert "engines: all 2 servers are full" in names


async def test_no_room_for_too_long_is_an_error() -> None:
    s = Servers("a", patience=0.05)
    s["a"].acts = [Busy()] * 1000
    with pytest.raises(NoEngineError, match=r"all 1 servers are full, after 0\.05 s"):
        await s.pool.generate(request())
    s = Servers("a", patience=0.05)
    s["a"].acts = [Lose()]
    with pytest.raises(NoEngineError, match="engines: no server"):
        await s.pool.generate(request())


# -- lost turns --------------------------------------------------------------------------------------


async def test_a_lost_turn_goes_on_from_its_last_token() -> None:
    s = Servers("a", "b")
    s.tell(entry("a", 7), entry("b", 6))
    s["a"].acts = [Lose(3)]
    turn = await s.pool.generate(request(limit=8))
    assert counts_up(turn)
    assert turn.spans == (VersionSpan(0, 3, 7, 7), VersionSpan(3, 8, 6, 6))
    assert (turn.stop, turn.seconds) == (StopReason.LENGTH, 2 * SECONDS)
    again = s["b"].requests[0]
    assert (again.ids, again.sampling.max_new_tokens) == (tuple(range(6)), 5)
    assert sum(use.tokens for use in s.pool.usage_by_name.values()) == 8


async def test_a_turn_that_a_server_ends_too_early_goes_on_there() -> None:
    s = Servers("a", "b")
    s["a"].acts = [Part(3), Part(2), Busy()]
    turn = await s.pool.generate(request(limit=8))
    assert counts_up(turn) and turn.stop is StopReason.LENGTH
    assert s.request_counts() == ["a:3", "b:1"]
    assert [(use.lost, use.busy, use.moved) for use in s.pool.usage_by_name.values()] == [
        (0, 1, 0),
        (0, 0, 1),
    ]


async def test_a_turn_that_is_lost_after_its_last_token_is_whole() -> None:
    s = Servers("a", "b")
    s["a"].acts = [Lose(8)]
    assert (await s.pool.generate(request("s"))).stop is StopReason.LENGTH
    s.tell()
    s["a"].acts = [Lose(4)]
    assert (await s.pool.generate(request("s", stops=[6]))).stop is StopReason.STOP
    assert s.request_counts() == ["a:2", "b:0"]


async def test_a_server_that_lost_a_turn_gets_none_until_the_table_vouches_for_it() -> None:
    s = Servers("a", "b")
    s["a"].acts = [Lose(1)]
    for session in "stu":
        await s.pool.generate(request(session))
    assert s.request_counts() == ["a:1", "b:3"]
    s.tell()
    await s.pool.generate(request("v"))
    assert s.request_counts() == ["a:2", "b:3"]


async def test_suspicion_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that is well the table has no news."""
    monkeypatch.setattr(server_pool, "SUSPECT_SECONDS", 0.01)
    s = Servers("a")
    s["a"].acts = [Lose(2), Lose(), Lose(1)]
    assert counts_up(await s.pool.generate(request()))
    assert s.request_counts() == ["a:4"]


async def test_a_turn_that_moves_is_held_to_freshness() -> None:
    s = Servers("a", "b")
    s.tell(entry("a", 5), entry("b", 4))
    s["a"].acts = [Lose(2)]
    turn = asyncio.create_task(s.pool.generate(request(), lambda: 5))
    await settle()
    assert s.request_counts() == ["a:1", "b:0"]  # b is too old, a is suspect
    s.tell(entry("a", 5, healthy=False), entry("b", 6))
    assert [span.version for span in (await turn).spans] == [5, 6]


async def test_a_turn_that_nobody_survives_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "SUSPECT_SECONDS", 0.0)
    s = Servers("a")
    s["a"].acts = [Lose(), Lose(1), *[Lose()] * server_pool.MAX_LOSSES]  # a token in between is progress
    with pytest.raises(EngineError, match="8 servers in a row lost the turn; last error: gone"):
        await s.pool.generate(request())
    assert s.request_counts() == [f"a:{server_pool.MAX_LOSSES + 2}"]


async def test_what_a_server_refuses_is_not_asked_of_another() -> None:
    s = Servers("a", "b")
    s["a"].acts = [Refuse()]
    with pytest.raises(EngineError, match="refused"):
        await s.pool.generate(request())
    assert s.request_counts() == ["a:1", "b:0"]


@given(
    acts=st.lists(
        st.lists(
            st.one_of(
                st.just(Busy()), st.builds(Lose, st.integers(0, 5)), st.builds(Part, st.integers(1, 5))
            ),
            max_size=6,
        )
    ),
    limit=st.integers(1, 20),
    stop=st.integers(3, 25),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_or_sampled_twice(
    acts: list[list[Busy | Lose | Part]], limit: int, stop: int
) -> None:
    async def main() -> None:
        s = Servers("a", "b", "c")
        for client, client_acts in zip(s.clients, acts, strict=False):
            client.acts = list(client_acts)
        turn = asyncio.create_task(s.pool.generate(request(limit=limit, stops=[stop])))
        while not turn.done():
            await asyncio.sleep(0)
            s.tell()
        try:
            generation = await turn
        except EngineError:
            assert (
                sum(act == Lose(0) for client_acts in acts for act in client_acts) >= server_pool.MAX_LOSSES
            )
            return
        assert counts_up(generation)
        assert len(generation.ids) == min(limit, stop - 2)
        assert generation.stop is (StopReason.STOP if stop - 2 <= limit else StopReason.LENGTH)
        assert (
            sum(use.tokens for use in s.pool.usage_by_name.values())
            == len(generation.ids)
            == sum(usage.tokens for usage in s.pool.usage_by_name.values())
        )

    asyncio.run(asyncio.wait_for(main(), 60))


# -- a changing table --------------------------------------------------------------------------------


async def test_the_turns_of_a_server_that_leaves_go_on_elsewhere() -> None:
    s = Servers("a", "b")
    s["a"].gate.clear()
    s["a"].streamed = 2
    turn = asyncio.create_task(s.pool.generate(request()))
    await s["a"].first_request.wait()
    leaving_server = s["a"]
    s.tell(entry("a", 1, incarnation="2"))
    assert counts_up(await turn)
    assert leaving_server.closed and not s["a"].closed
    assert s.request_counts() == ["a:1", "b:0", "a:1"]
    assert s["a"].version == 1


async def test_a_new_version_leaves_turns_and_clients_alone() -> None:
    s = Servers("a")
    s["a"].gate.clear()
    turn = asyncio.create_task(s.pool.generate(request()))
    await s["a"].first_request.wait()
    s.tell(entry("a", 1, lane="eval"))
    s.tell(entry("a", 2))
    s["a"].gate.set()
    assert counts_up(await turn)
    assert s.request_counts() == ["a:1"]
    assert s["a"].version == s.pool.version == 2


# -- endings -----------------------------------------------------------------------------------------


async def test_cancelling_a_turn_cancels_it_at_the_server() -> None:
    s = Servers("a")
    s["a"].gate.clear()
    turn = asyncio.create_task(s.pool.generate(request()))
    await s["a"].first_request.wait()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    assert s["a"].cancelled == ["s"]
    s["a"].gate.set()
    assert counts_up(await s.pool.generate(request()))  # the session is free again


async def test_close_closes_every_client() -> None:
    s = Servers("a", "b")
    s.tell(entry("b", incarnation="2"))
    await s.pool.close()
    assert [client.closed for client in s.clients] == [True, True, True]


async def test_use_is_counted_over_all_incarnations_of_a_server() -> None:
    s = Servers("a", "b")
    s["a"].acts = [Lose(2)]
    await s.pool.generate(request("s", limit=8))
    s.tell(entry("a", incarnation="2"))
    await s.pool.generate(request("t", limit=4))
    assert tuple(s.pool.usage_by_name.values()) == (
        EngineUse("a", requests=2, prompt_tokens=6, tokens=6, lost=1),
        EngineUse("b", requests=1, prompt_tokens=5, tokens=6, moved=1),
    )


async def test_what_a_lost_server_has_sampled_is_a_part_at_once() -> None:
    heard = []

    async def on_part(sampled: Generation) -> None:
        heard.append(sampled.ids)

    s = Servers("a", "b")
    s["a"].acts = [Lose(2)]
    s["b"].acts = [Part(3)]
    assert counts_up(await s.pool.generate(replace(request(), on_part=on_part)))
    assert heard == [(3, 4)]


# -- servers that sleep ----------------------------------------------------------------------------------


async def test_turns_wait_by_name_while_servers_sleep_and_lose_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    passed = 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed)
    s = Servers("a", patience=60.0)
    s["a"].gate.clear()
    running = asyncio.create_task(s.pool.generate(request("running")))
    await s["a"].first_request.wait()
    s.tell(entry("a", healthy=False, asleep=True))
    waiting = asyncio.create_task(s.pool.generate(request("waiting")))
    await settle()
    # more than a turn waits for a server
    s.now = 1000.0
    passed = 1000.0
    assert s.waits.longest_wait() == f"{ASLEEP} (17 minutes, 2 episodes)"
    s.tell(entry("a", healthy=False, asleep=True, url="", incarnation="2"))  # killed, and not started yet
    await settle()
    assert s.pool.sleeps.asleep and not waiting.done() and not running.done()
    s.tell(entry("a", healthy=False, url="", incarnation="2"))  # it starts
    await settle()
    s.now += 10.0
    assert not s.pool.sleeps.asleep and "no server" in s.waits.longest_wait()
    s.tell(entry("a", incarnation="2"))
    assert counts_up(await running) and counts_up(await waiting)


async def test_a_server_that_sleeps_keeps_its_turns_and_the_same_client_wakes() -> None:
    s = Servers("a")
    s["a"].gate.clear()
    turn = asyncio.create_task(s.pool.generate(request()))
    await s["a"].first_request.wait()
    s.tell(entry("a", healthy=False, asleep=True))
    s.tell(entry("a", version=1))
    s["a"].gate.set()
    assert counts_up(await turn)
    assert s.request_counts() == ["a:1"] and s.pool.usage_by_name["a"].lost == 0
