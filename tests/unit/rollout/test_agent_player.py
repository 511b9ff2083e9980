"""An episode led by an agent: its records, its endings, its rows, and going on after a crash."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from functools import partial
from typing import Any, cast

import aiohttp
import pytest
from msgspec.structs import replace

from asyncrl.conversation.branches import Branches
from asyncrl.conversation.requests import AgentRequest
from asyncrl.conversation.turns import rows_of, without_untrained
from asyncrl.engines.base import Request
from asyncrl.errors import ConfigError, EngineError, SetupError
from asyncrl.gateway import CommandError, Endpoint, TimeUp, load_untrained
from asyncrl.rewards import RewardInput
from asyncrl.rollout.agent_player import AgentHost
from asyncrl.types import EpisodeEnd, FailReason, Generation, Message, Sample, StopReason
from asyncrl.wire.messages.worker import Finished, Generated
from tests.fakes.agents import AgentBench, ask, message
from tests.fakes.chat import FakeChat, encode
from tests.fakes.engine import ScriptedEngine, generation
from tests.fakes.episodes import read
from tests.fakes.loop import settle
from tests.fakes.raised import BASE_EXCEPTIONS

ANSWER = {"role": "assistant", "content": "42"}


async def two_turns(sample: Sample, endpoint: Endpoint) -> float:
    first = await message(endpoint, "q")
    await message(endpoint, "q", first, "sure?")
    return 0.5


def reason_of(bench: AgentBench) -> tuple[FailReason, str]:
    end = bench.failed()
    return end.reason, end.detail


def test_requests_become_turns_and_the_end_of_the_agent_ends_the_episode() -> None:
    seen: list[RewardInput] = []

    def reward(reward_input: RewardInput) -> float:
        seen.append(reward_input)
        return 1.5

    bench = AgentBench(two_turns, reward=reward)
    end = bench.finished()
    assert [type(record) for record in bench.sent] == [Generated, Generated, Finished]
    assert (end.result.reward, end.result.end, end.stats.turns, end.stats.rows) == (
        1.5,
        EpisodeEnd.DONE,
        2,
        1,
    )
    assert end.result.turn_rewards == (0.0, 1.5)
    assert bench.rows == ["q42sure?42"]
    assert bench.turns[0].generation.spans[0].version == 0
    (seen_input,) = seen
    assert (seen_input.result, seen_input.answer, seen_input.turns) == (0.5, "42", 2)
    assert seen_input.messages[-2:] == (Message("user", "sure?"), Message("assistant", "42"))


def test_the_agent_hears_a_turn_when_it_is_durable() -> None:
    heard: list[str] = []

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        heard.append((await message(endpoint, "q"))["content"])

    bench = AgentBench(agent)
    bench.auto_ack = False

    async def main() -> None:
        playing = asyncio.create_task(bench.run())
        while not playing.done() and "not yet durable" not in str(bench.waits._open_waits.values()):
            await settle()
        assert not playing.done()
        assert not heard
        bench.auto_ack = True
        bench.outbox.acknowledge(1)
        await playing

    asyncio.run(main())
    assert heard == ["42"]


def test_parallel_requests_become_rows_with_sessions_and_keys_of_their_own() -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await asyncio.gather(*(message(endpoint, "q") for _ in range(3)))

    bench = AgentBench(agent)
    assert bench.finished().stats.rows == 3
    assert bench.rows == ["q42"] * 3
    assert len({request.session for request in bench.engine.requests}) == 3
    assert len({request.key for request in bench.engine.requests}) == 3
    assert sorted(bench.engine.released) == ["u/1", "u/1#1", "u/1#2"]


@pytest.mark.parametrize(("cut", "end"), [(4, EpisodeEnd.LENGTH), (512, None)])
def test_an_agent_that_gives_up_after_a_turn_that_was_cut_has_not_failed(
    cut: int, end: EpisodeEnd | None
) -> None:
    """Claude Code does so, with exit code 1."""

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await message(endpoint, "q")
        raise RuntimeError("the answer was cut")

    bench = AgentBench(agent, lambda prompt: "a long answer", max_new_tokens=cut)
    if end is not None:
        assert bench.finished().result.end is end
    else:
        assert bench.failed().reason is FailReason.AGENT_ERROR


# -- side requests -----------------------------------------------------------------------------------


async def titled(sample: Sample, endpoint: Endpoint) -> None:
    """Asks for a title first, as opencode does, and for a commit message last, as aider does."""
    await message(endpoint, "a title?", model="small")
    first = await message(endpoint, "q")
    await message(endpoint, "q", first, "sure?")
    await message(endpoint, "q", first, "sure?", first, "commit message?", model="small-2")


def said(prompt: str) -> str:
    return "fix" if prompt.endswith("message?") else "42"


def side_bench(agent: Any = titled, **options: Any) -> tuple[AgentBench, list[RewardInput]]:
    seen: list[RewardInput] = []

    def reward(reward_input: RewardInput) -> float:
        seen.append(reward_input)
        return 1.0

    untrained = load_untrained(["small*"])
    return AgentBench(agent, said, reward, untrained=untrained, **options), seen


def test_a_side_request_is_answered_and_recorded_and_has_no_part_in_the_result() -> None:
    bench, seen = side_bench(limits={"max_turns": 2, "max_rows": 2})
    end = bench.finished()
    assert bench.rows == ["a title?42", "q42sure?42", "q42sure?42commit message?fix"]
    assert [turn.untrained for turn in bench.turns] == [True, False, False, True]
    assert (end.stats.turns, end.stats.untrained_turns, end.stats.rows) == (2, 2, 1)
    assert (end.result.end, end.result.turn_rewards, end.result.tokens) == (EpisodeEnd.DONE, (0.0, 1.0), 6)
    (reward_input,) = seen
    assert (reward_input.answer, reward_input.turns) == ("42", 2)
    assert reward_input.messages[-1] == Message("assistant", "42")
    (only,) = rows_of(without_untrained(bench.turns))
    assert read(only) == "q42sure?42"


@pytest.mark.parametrize(
    ("goes_on", "rows"), [(False, ["q42sure?42"]), (True, ["q42", "q42message?fixsure?42"])]
)
def test_a_side_request_leaves_the_trained_row_as_it_was(goes_on: bool, rows: list[str]) -> None:
    """A request that goes on from the answer to it begins a row, with that as context."""

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        first = await message(endpoint, "q")
        second = await message(endpoint, "q", first, "message?", model="small")
        await message(endpoint, "q", first, *(("message?", second) if goes_on else ()), "sure?")

    bench, _ = side_bench(agent, limits={"max_rows": len(rows)})
    end = bench.finished()
    assert (end.result.end, end.stats.rows) == (EpisodeEnd.DONE, len(rows))
    assert [read(row) for row in rows_of(without_untrained(bench.turns))] == rows


def test_side_requests_have_limits_of_their_own() -> None:
    """They are refused, and the episode goes on and ends as if they had not been asked."""
    statuses: list[int] = []

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        first = await message(endpoint, "q")
        for _ in range(3):
            statuses.append((await ask(endpoint, "a title?", model="small"))[0])
        await message(endpoint, "q", first, "sure?")

    bench, _ = side_bench(agent, limits={"max_turns": 2})
    end = bench.finished()
    assert statuses == [200, 200, 400]
    assert (end.result.end, end.stats.turns, end.stats.untrained_turns) == (EpisodeEnd.DONE, 2, 2)


def test_an_episode_of_side_requests_alone_fails() -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await message(endpoint, "a title?", model="small")

    bench, _ = side_bench(agent)
    end = bench.failed()
    assert (end.reason, end.detail) == (
        FailReason.AGENT_ERROR,
        "the agent exited without calling the model, except in side requests (from agents in "
        "rollout.untrained_agents, or not in `agents`)",
    )


def upkeep(request: AgentRequest) -> bool:
    return "title" in request.messages[-1].content


def test_side_requests_are_recognised_by_names_globs_and_functions() -> None:
    tell = load_untrained(["small", "mini-*", f"{__name__}:upkeep"])
    messages = (Message("user", "q"),)
    for agent, side in (("small", True), ("mini-2", True), ("policy", False), ("smaller", False)):
        assert tell(AgentRequest(messages, agent=agent)) is side
    assert tell(AgentRequest((Message("user", "a title?"),), agent="policy"))
    with pytest.raises(ConfigError, match=r"rollout\.untrained_agents .*no 'absent'"):
        load_untrained([f"{__name__}:absent"])


def broken(request: AgentRequest) -> bool:
    return request.messages[-1].content == "sure?" and 1 / 0 > 0


@pytest.mark.parametrize("counts", [False, True])
def test_a_function_about_side_requests_that_raises_fails_the_episode_by_name(counts: bool) -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        first = await message(endpoint, "q")
        path = "/messages/count_tokens" if counts else "/chat/completions"
        assert (await ask(endpoint, "q", first, "sure?", path=path))[0] == 500
        await asyncio.Event().wait()

    name = f"{__name__}:broken"
    reason, detail = reason_of(AgentBench(agent, untrained=load_untrained([name])))
    assert reason is FailReason.AGENT_ERROR
    assert detail.startswith(f"rollout.untrained_agents '{name}': ZeroDivisionError: ")
    assert "(test_agent_player.py:" in detail


# -- prompts without a template --------------------------------------------------------------------------


async def completed(endpoint: Endpoint, prompt: Any, **options: Any) -> str:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.base_url}/completions"
    body = {"prompt": prompt, **options}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["choices"][0]["text"])


@pytest.mark.parametrize("with_ids", [False, True])
def test_a_text_that_goes_on_continues_its_row(with_ids: bool) -> None:
    """The client puts the text behind it at which the turn ended. Another prompt begins a row."""

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        as_sent: Any = encode if with_ids else str
        assert await completed(endpoint, as_sent("once "), stop="p") == "u"
        await completed(endpoint, as_sent("once up and "))
        await completed(endpoint, as_sent("twice "))

    bench = AgentBench(agent, lambda prompt: "upon<think>")
    assert bench.finished().stats.rows == 2
    assert bench.rows == ["once up and upon<think>", "twice upon<think>"]


def test_a_text_continues_its_row_behind_the_token_that_begins_texts() -> None:
    """Llama's and Gemma's tokenizers put one there, which the client's text does not have."""

    class Beginning(FakeChat):
        def text_ids(self, text: str, beginning: bool) -> tuple[int, ...]:
            return encode(f"^{text}" if beginning else text)

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        assert await completed(endpoint, "once ", stop="p") == "u"
        await completed(endpoint, "once up and ")

    bench = AgentBench(agent, lambda prompt: "upon", chat=Beginning())
    assert bench.finished().stats.rows == 1
    assert bench.rows == ["^once up and upon"]


def test_ids_that_no_tokenizer_has_are_refused() -> None:
    statuses: list[int] = []

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await completed(endpoint, "once ")
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{endpoint.base_url}/completions", json={"prompt": [1 << 40]}) as answer,
        ):
            statuses.append(answer.status)

    assert AgentBench(agent).finished().stats.turns == 1
    assert statuses == [400]


# -- several agents ----------------------------------------------------------------------------------


async def duel(sample: Sample, endpoint: Endpoint) -> dict[str, float]:
    """White moves twice, black once; both see the same messages."""
    first = await message(endpoint, "q", model="white")
    second = await message(endpoint, "q", first, "your move", model="black")
    await message(endpoint, "q", first, "your move", second, "and?", model="white")
    return {"white": 1.0, "black": -1.0}


def of_program(reward_input: RewardInput) -> Any:
    return reward_input.result


def test_each_agent_earns_its_own_reward_on_its_last_turn() -> None:
    bench = AgentBench(duel, reward=of_program)
    result = bench.finished().result
    assert [turn.agent for turn in bench.turns] == ["white", "black", "white"]
    assert bench.rows == ["q42your move42and?42"]  # the row is told apart by its tokens, not by who asks
    assert (result.reward, result.turn_rewards) == (0.0, (0.0, -1.0, 1.0))
    parts = result.agent_results
    assert (parts["white"].reward, parts["white"].turn_rewards) == (1.0, (0.0, 1.0))
    assert (parts["black"].reward, parts["black"].turn_rewards) == (-1.0, (-1.0,))
    assert parts["white"].tokens + parts["black"].tokens == result.tokens
    again = AgentBench(duel, reward=of_program)
    assert again.finished(bench.record).result == result
    assert again.engine.requests == []


def test_one_number_is_the_reward_of_all_and_a_missing_agent_is_reported() -> None:
    assert AgentBench(duel).finished().result.agents == ()
    reason, detail = reason_of(AgentBench(duel, reward=lambda given: {"white": 1.0, "blak": -1.0}))
    assert reason is FailReason.REWARD_ERROR
    assert detail.startswith(
        "the reward is a dict with the keys white, blak, but lacks 'black'; return 'score', or"
    )


# -- agents that fail --------------------------------------------------------------------------------


async def raising(sample: Sample, endpoint: Endpoint) -> None:
    await message(endpoint, "q")
    raise KeyError("no such thing")


def silent(sample: Sample, endpoint: Endpoint) -> None:
    """Asks nothing."""


async def cancelled(sample: Sample, endpoint: Endpoint) -> None:
    helper = asyncio.ensure_future(asyncio.sleep(60))
    helper.cancel()
    await helper


async def cancelling(sample: Sample, endpoint: Endpoint) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


async def odd(sample: Sample, endpoint: Endpoint) -> Any:
    await message(endpoint, "q")
    return "a string"


FAILURES = {
    "raises": (
        raising,
        f"KeyError: 'no such thing' (test_agent_player.py:{raising.__code__.co_firstlineno + 2})",
    ),
    "awaits what it cancelled": (cancelled, "CancelledError (test_agent_player.py"),
    "cancels itself": (cancelling, "cancelled by its own code"),
    "never asks": (silent, "exited without calling"),
    "returns what is no result": (odd, "returned a value of type str"),
}


@pytest.mark.parametrize(("agent", "why"), FAILURES.values(), ids=FAILURES)
def test_a_failing_agent_is_a_recorded_reason(agent: Any, why: str) -> None:
    reason, detail = reason_of(AgentBench(agent))
    assert reason is FailReason.AGENT_ERROR
    assert why in detail


@pytest.mark.parametrize("kind", BASE_EXCEPTIONS)
@pytest.mark.parametrize("sync", [True, False])
def test_whatever_an_agent_raises_is_a_recorded_reason(kind: type[BaseException], sync: bool) -> None:
    def quick(sample: Sample, endpoint: Endpoint) -> None:
        raise kind("its text")

    async def waiting(sample: Sample, endpoint: Endpoint) -> None:
        await asyncio.sleep(0)
        raise kind("its text")

    reason, detail = reason_of(AgentBench(quick if sync else waiting))
    assert reason is FailReason.AGENT_ERROR
    assert f"{kind.__name__}: its text (test_agent_player.py:" in detail


def test_an_engine_error_fails_the_episode_whatever_the_agent_makes_of_it() -> None:
    async def patient(sample: Sample, endpoint: Endpoint) -> None:
        status, body = await ask(endpoint, "q")
        assert (status, body["error"]["type"]) == (500, "server_error")
        await asyncio.Event().wait()

    def broken(prompt: str) -> str:
        raise EngineError("out of memory")

    assert reason_of(AgentBench(patient, broken)) == (FailReason.ENGINE_ERROR, "out of memory")


def test_a_request_that_the_worker_cannot_read_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the agent, which might end by it and be scored."""

    def pending_rendering(self: Branches, request: AgentRequest) -> None:
        raise RuntimeError("can't start new thread")

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await message(endpoint, "q")
        monkeypatch.setattr(Branches, "pending_rendering", pending_rendering)
        await ask(endpoint, "q", {"role": "assistant", "content": "42"}, "more")

    reason, why = reason_of(AgentBench(agent))
    assert reason is FailReason.EPISODE_ERROR and "can't start new thread" in why


def test_an_agent_that_hangs_is_scored_by_what_it_did() -> None:
    cancelled = threading.Event()

    async def hung(sample: Sample, endpoint: Endpoint) -> None:
        await message(endpoint, "q")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    bench = AgentBench(hung, episode_timeout=1.5)
    end = bench.finished()
    assert (end.result.end, end.stats.turns) == (EpisodeEnd.TIMEOUT, 1)
    assert cancelled.is_set()


def test_an_agent_that_hangs_before_its_first_turn_fails() -> None:
    gate = threading.Event()

    def hung(sample: Sample, endpoint: Endpoint) -> None:
        gate.wait(60)

    reason, detail = reason_of(AgentBench(hung, episode_timeout=0.1))
    gate.set()
    assert reason is FailReason.DEADLINE
    assert "before the first turn was finished" in detail


async def test_an_episode_takes_one_thread_for_its_prompts_even_if_clients_leave() -> None:
    renderings = [0]
    gates = [threading.Event() for _ in range(3)]

    class Slow:
        def pending_rendering(self, request: AgentRequest) -> Any:
            renderings[0] += 1
            return partial(gates[renderings[0] - 1].wait, 30)

        def count_prompt_tokens(self, request: AgentRequest) -> int:
            return 1

    unused: Any = None
    host = AgentHost(unused, cast(Branches, Slow()), unused)
    slow = AgentRequest((Message("user", "q"),))
    asking = [asyncio.create_task(host.count(slow)) for _ in range(3)]
    await settle()
    assert renderings == [1]
    asking[0].cancel()
    await settle()
    assert renderings == [1]
    for gate in gates:
        gate.set()
    assert await asyncio.gather(*asking[1:]) == [1, 1] and renderings == [3]
    await asyncio.wait(asking)
    assert asking[0].cancelled()


class Held(ScriptedEngine):
    """Holds the second request until its client has left."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.entered = threading.Event()
        self.left = threading.Event()

    async def generate(self, request: Request) -> Generation:
        if not self.requests:
            return await super().generate(request)
        self.entered.set()
        try:
            return await super().generate(request)
        finally:
            self.left.set()


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_request_whose_client_left_gives_its_row_back(comes_back: bool) -> None:
    """The agent ends then, or asks the same again."""

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        first = await message(endpoint, "q")
        engine.gate.clear()
        asking = asyncio.ensure_future(ask(endpoint, "q", first, "sure?"))
        await asyncio.to_thread(engine.entered.wait, 30)
        asking.cancel()
        if comes_back:
            await asyncio.to_thread(engine.left.wait, 30)
            engine.gate.set()
            await message(endpoint, "q", first, "sure?")

    bench = AgentBench(agent)
    bench.engine = engine = Held(bench.script)
    assert bench.finished().stats.turns == 1 + comes_back
    assert bench.rows == (["q42sure?42"] if comes_back else ["q42"])
    assert engine.cancelled == ["u/1"]


class Lingering(Held):
    """Ends the second request, once its client has left, only when the test says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.let_go = threading.Event()

    async def generate(self, request: Request) -> Generation:
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.let_go.wait, 30)
            raise


RETRIED = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize("leaves", [True, False])
def test_a_request_that_comes_again_waits_for_the_end_of_the_one_before(leaves: bool) -> None:
    """A client that does not close its connection counts its tries."""

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        first = await message(endpoint, "q")
        engine.gate.clear()
        asking = asyncio.ensure_future(ask(endpoint, "q", first, "sure?"))
        await asyncio.to_thread(engine.entered.wait, 30)
        if leaves:
            asking.cancel()
            await asyncio.to_thread(engine.left.wait, 30)
        again = asyncio.ensure_future(ask(endpoint, "q", first, "sure?", headers={} if leaves else RETRIED))
        await asyncio.to_thread(engine.left.wait, 30)
        await settle()
        engine.gate.set()
        engine.let_go.set()
        assert (await again)[0] == 200
        await asyncio.gather(asking, return_exceptions=True)

    bench = AgentBench(agent)
    bench.engine = engine = Lingering(bench.script)
    assert bench.finished().stats.turns == 2
    assert bench.rows == ["q42sure?42"]


@pytest.mark.parametrize(
    ("headers", "turns"),
    [({}, 2), ({"x-stainless-retry-count": "0"}, 2), ({"x-stainless-retry-count": "²"}, 2), (RETRIED, 1)],
)
def test_a_client_that_counts_its_tries_gets_the_turn_that_it_did_not_read(
    headers: dict[str, str], turns: int
) -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await message(endpoint, "q")
        assert (await ask(endpoint, "q", headers=headers))[0] == 200

    bench = AgentBench(agent)
    assert bench.finished().stats.turns == turns


def test_an_answer_that_a_client_leaves_unread_is_given_again() -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        body = json.dumps({"messages": [{"role": "user", "content": "q"}]})
        head = f"Authorization: Bearer {endpoint.api_key}\r\nContent-Length: {len(body)}"
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n{body}".encode()
            )
            await asyncio.to_thread(connection.recv, 1, socket.MSG_PEEK)  # the answer is there, and stays
        await message(endpoint, "q")

    assert AgentBench(agent).finished().stats.turns == 1


class Parted(ScriptedEngine):
    """Makes half of each of its next `hold` turns durable, and holds them until their clients have left."""

    def __init__(self, script: Any, hold: int) -> None:
        super().__init__(script)
        self.hold = hold
        self.parted = threading.Semaphore(0)
        self.left = threading.Semaphore(0)

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        if not self.hold:
            return generation("2", self._version)
        self.hold -= 1
        await request.on_part(generation("4", self._version, StopReason.ABORT))
        self.parted.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.release()
        raise AssertionError

    async def leave(self, asking: asyncio.Future[Any], answers: int = 1) -> None:
        asking.cancel()
        for _ in range(answers):
            assert await asyncio.to_thread(self.left.acquire, timeout=30)

    async def begun(self, endpoint: Endpoint, *texts: Any, n: int = 1) -> asyncio.Future[Any]:
        """A request, half of each of whose answers is durable."""
        asking = asyncio.ensure_future(ask(endpoint, *texts, n=n))
        for _ in range(n):
            assert await asyncio.to_thread(self.parted.acquire, timeout=30)
        return asking


def parted(agent: Any, hold: int) -> tuple[list[str], list[str]]:
    """The rows of an episode, and what the engine was asked after the first `hold` turns."""
    bench = AgentBench(lambda sample, endpoint: agent(endpoint, engine))
    bench.engine = engine = Parted(bench.script, hold)
    bench.finished()
    return bench.rows, [read(request.ids) for request in engine.requests[hold:]]


@pytest.mark.parametrize("continues", [False, True])
def test_a_request_that_comes_again_goes_on_with_what_is_durable(continues: bool) -> None:
    """Its client gave up in the midst of a turn, in a row that it began or went on with."""

    async def agent(endpoint: Endpoint, engine: Parted) -> None:
        conversation: list[Any] = ["q"]
        if continues:
            engine.hold = 0
            conversation += [await message(endpoint, "q"), "sure?"]
            engine.hold = 1
        await engine.leave(await engine.begun(endpoint, *conversation))
        assert (await message(endpoint, *conversation))["content"] == "42"

    rows, requests = parted(agent, hold=1)
    assert rows == ["q2sure?42" if continues else "q42"] and requests[-1][-1] == "4"


def test_both_answers_to_a_request_that_comes_again_go_on() -> None:
    async def agent(endpoint: Endpoint, engine: Parted) -> None:
        await engine.leave(await engine.begun(endpoint, "q", n=2), answers=2)
        await ask(endpoint, "q", n=2)

    assert parted(agent, hold=2) == (["q42", "q42"], ["q4", "q4"])


@pytest.mark.parametrize("meanwhile", [False, True])
def test_requests_of_several_rows_that_come_again_go_on(meanwhile: bool) -> None:
    """As of an agent and its sub-agent. The older one leaves first, and may be back while the other runs."""

    async def agent(endpoint: Endpoint, engine: Parted) -> None:
        first, second = [await engine.begun(endpoint, prompt) for prompt in "ab"]
        await engine.leave(first)
        if meanwhile:
            await message(endpoint, "a")
        await engine.leave(second)
        for prompt in "b" if meanwhile else "ab":
            await message(endpoint, prompt)

    assert parted(agent, hold=2) == (["a42", "b42"], ["a4", "b4"])


def test_what_is_durable_of_a_turn_is_kept_until_the_turn_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client leaves while it waits for room among the records that are sent."""
    full = threading.Event()
    waits = threading.Event()

    def is_full(outbox: Any) -> bool:
        if full.is_set():
            waits.set()
        return full.is_set()

    class Sampled(ScriptedEngine):
        async def generate(self, request: Request) -> Generation:
            self.requests.append(request)
            if not waits.is_set():
                await request.on_part(generation("4", self._version, StopReason.ABORT))
                full.set()
            return generation("2", self._version)

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        asking = asyncio.ensure_future(ask(endpoint, "q"))
        assert await asyncio.to_thread(waits.wait, 30)
        asking.cancel()
        while bench.shared.gateway.running_episodes[endpoint.api_key].answer_tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        full.clear()
        await message(endpoint, "q")

    bench = AgentBench(agent)
    bench.engine = engine = Sampled(bench.script)
    monkeypatch.setattr(type(bench.outbox), "is_full", property(is_full))
    bench.finished()
    assert bench.rows == ["q42"] and [read(request.ids) for request in engine.requests] == ["q", "q4"]


class Leaver:
    """A client that leaves when `count` turns are sampled but not yet durable, and is back when the endpoint
    knows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._posted = threading.Event()
        self._left = threading.Event()

    async def leave(self, endpoint: Endpoint, **body: Any) -> None:
        asking = asyncio.ensure_future(ask(endpoint, "q", **body))
        await asyncio.to_thread(self._posted.wait, 30)
        asking.cancel()
        await asyncio.to_thread(self._left.wait, 30)

    async def play(self, bench: AgentBench) -> None:
        def in_doubt() -> bool:
            return "not yet durable" in str(bench.waits._open_waits.values())

        bench.auto_ack = False
        playing = asyncio.create_task(bench.run())
        while not playing.done() and (len(bench.turns) < self.count or not in_doubt()):
            await settle()
        self._posted.set()
        while not playing.done() and in_doubt():
            await settle()
        self._left.set()
        bench.auto_ack = True
        bench.outbox.acknowledge(self.count)
        await playing


def test_a_request_that_timed_out_is_answered_when_it_comes_again() -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await leaver.leave(endpoint)
        reply = await message(endpoint, "q")
        await message(endpoint, "q", reply, "sure?")

    leaver = Leaver(1)
    bench = AgentBench(agent)
    asyncio.run(leaver.play(bench))
    assert bench.rows == ["q42sure?42"]
    assert len(bench.engine.requests) == 2
    again = AgentBench(two_turns)
    again.finished(bench.record)
    assert again.engine.requests == []

    async def several(sample: Sample, endpoint: Endpoint) -> None:
        await leaver.leave(endpoint, n=2)
        assert (await ask(endpoint, "q", n=3))[0] == 200

    leaver = Leaver(2)
    bench = AgentBench(several)
    asyncio.run(leaver.play(bench))
    assert len(bench.turns) == len(bench.engine.requests) == 3


def test_a_slow_reward_is_not_charged_to_the_agent() -> None:
    seen: list[tuple[EpisodeEnd, Any]] = []

    async def reward(reward_input: RewardInput) -> float:
        seen.append((reward_input.end, reward_input.result))
        if len(seen) == 1:
            await asyncio.Event().wait()  # until the time of the episode is up
        return 1.0

    end = AgentBench(two_turns, reward=reward, episode_timeout=1.5).finished()
    assert (end.result.end, end.result.reward) == (EpisodeEnd.DONE, 1.0)
    assert seen == [(EpisodeEnd.DONE, 0.5)] * 2


# -- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "end", "code"),
    [
        ({"max_turns": 1}, EpisodeEnd.MAX_TURNS, "max_turns"),
        ({"max_tokens": 9}, EpisodeEnd.LENGTH, "context_length_exceeded"),
        ({"max_rows": 1}, EpisodeEnd.MAX_ROWS, "max_rows"),
    ],
)
@pytest.mark.parametrize("patient", [True, False])
def test_a_limit_is_announced_and_ends_the_episode(
    limits: Any, end: EpisodeEnd, code: str, patient: bool
) -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> float | None:
        first = await message(endpoint, "q")
        history = ["other"] if code == "max_rows" else ["q", first, "and then?"]
        status, body = await ask(endpoint, *history)
        assert (status, body["error"]["code"]) == (400, code)
        if patient:
            return 0.5
        raise RuntimeError("BadRequestError")

    finished = AgentBench(agent, limits=limits).finished()
    assert (finished.result.end, finished.stats.turns) == (end, 1)


def test_a_prompt_that_is_too_long_at_once_says_so() -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await message(endpoint, "a long prompt")

    reason, detail = reason_of(AgentBench(agent, limits={"max_tokens": 4, "max_new_tokens": 4}))
    assert reason is FailReason.PROMPT_TOO_LONG
    assert (
        detail
        == "This model's maximum context length is 4 tokens (rollout.max_tokens); the messages have 14 tokens"
    )


# -- going on after a crash --------------------------------------------------------------------------


async def three_turns(sample: Sample, endpoint: Endpoint) -> None:
    history: list[Any] = ["q"]
    for number in range(3):
        history += [await message(endpoint, *history), f"n{number}"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_recorded_turns_are_not_sampled_again(count: int) -> None:
    first = AgentBench(three_turns, lambda prompt: "first")
    first.finished()
    second = AgentBench(three_turns, lambda prompt: "second")
    stats = second.finished(first.record[: 2 * count]).stats
    assert stats.turns == 3 and stats.seconds >= 5.0  # goes on with the time that the turns had taken
    assert len(second.engine.requests) == len(second.turns) == 3 - count
    assert [turn.index for turn in second.turns] == list(range(count, 3))


def test_parallel_turns_are_recalled_in_any_order() -> None:
    def agent_of(order: list[str]) -> Any:
        async def agent(sample: Sample, endpoint: Endpoint) -> None:
            await asyncio.gather(*(message(endpoint, prompt) for prompt in order))

        return agent

    first = AgentBench(agent_of(["a", "b", "c"]), lambda prompt: prompt + "!")
    first.finished()
    second = AgentBench(agent_of(["c", "b", "a"]))
    assert second.finished(first.record).stats.rows == 3
    assert second.turns == []


def test_an_agent_that_does_something_else_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    async def other(sample: Sample, endpoint: Endpoint) -> None:
        await message(endpoint, "other")

    async def black(sample: Sample, endpoint: Endpoint) -> None:
        await ask(endpoint, "q", model="black")
        await asyncio.Event().wait()

    for first, agent in ((three_turns, other), (three_turns, silent), (duel, black)):
        before = AgentBench(first)
        bench = AgentBench(agent)
        before.finished()
        end = bench.failed(before.record)
        assert (end.reason, "repeat" in end.detail) == (FailReason.NOT_REPEATED, True)
    assert not caplog.records, "the coordinator tells it"


def test_an_agent_that_thinks_is_waited_for_by_name() -> None:
    thinking = threading.Event()
    gate = threading.Event()

    def agent(sample: Sample, endpoint: Endpoint) -> None:
        asyncio.run(message(endpoint, "q"))
        thinking.set()
        gate.wait(30)

    bench = AgentBench(agent)
    bench.engine.gate.clear()

    async def main() -> None:
        playing = asyncio.create_task(bench.run())
        while not bench.engine.requests:
            await settle()
        assert not bench.waits._open_waits  # it is the engine that is waited for
        bench.engine.gate.set()
        await asyncio.to_thread(thinking.wait, 30)
        await settle()
        assert [name for _, name, _ in bench.waits._open_waits.values()] == ["the agent program"]
        gate.set()
        await playing
        assert not bench.waits._open_waits

    asyncio.run(main())
    end = bench.sent[-1]
    assert isinstance(end, Finished)
    assert 0 < end.stats.tool_s <= end.stats.seconds


# -- turns that end at a text, several answers, streams ------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "rows"),
    [("a </code>", ["qa </code>sure?42"]), ("a ", ["qa </code>", "qa sure?42"])],
)
def test_a_text_ends_the_turn_and_its_row_goes_on_if_the_agent_sends_it_back(
    returned: str, rows: list[str]
) -> None:
    """The row keeps the token in which the text ends. An agent that leaves the text out begins a new row:
    its next turn does not follow these tokens."""
    replies: list[str] = []

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        _, body = await ask(endpoint, "q", stop=["</code>", "never"])
        choice = body["choices"][0]
        replies.extend((choice["message"]["content"], choice["finish_reason"]))
        await message(endpoint, "q", {"role": "assistant", "content": returned}, "sure?")

    bench = AgentBench(agent, lambda prompt: "42" if "sure" in prompt else "a </code> and on")
    bench.finished()
    assert replies == ["a ", "stop"]
    assert [turn.generation.stop for turn in bench.turns] == [StopReason.TEXT, StopReason.STOP]
    assert [len(turn.generation.ids) for turn in bench.turns] == [len("a </code>"), 3]
    assert bench.rows == rows
    again = AgentBench(agent)
    assert again.finished(bench.record).stats.turns == 2
    assert again.engine.requests == []


def test_several_answers_become_rows() -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        _, body = await ask(endpoint, "q", n=3)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        second = body["choices"][1]["message"]
        await message(endpoint, "q", second, "sure?")

    texts = iter(["a", "b", "c", "yes"])
    bench = AgentBench(agent, lambda prompt: next(texts))
    assert bench.finished().stats.rows == 3
    assert bench.rows == ["qa", "qbsure?yes", "qc"]
    assert len({request.key for request in bench.engine.requests[:3]}) == 3


def test_a_stream_tells_the_text_before_the_turn_is_over() -> None:
    heard: list[str] = []
    text_arrived = threading.Event()

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        body = {"messages": [{"role": "user", "content": "q"}], "stream": True}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        url = endpoint.base_url + "/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as answer:
            async for line in answer.content:
                heard.append(line.decode())
                if '"content":"4"' in heard[-1]:
                    text_arrived.set()

    class Slow(ScriptedEngine):
        async def generate(self, request: Request) -> Generation:
            assert request.stop_check is not None
            assert not request.stop_check(encode("4"))
            await asyncio.to_thread(
                text_arrived.wait, 30
            )  # the rest is sampled when the agent has read this much
            assert text_arrived.is_set()
            return await super().generate(request)

    bench = AgentBench(agent)
    bench.engine = Slow(bench.script)
    bench.finished()
    assert sum('"content":"2"' in line for line in heard) == 1


TASK_INFO = '{"task": {"name": "t", "image": "i"}}'


@pytest.mark.parametrize(
    ("error", "limits", "end", "result"),
    [
        (TimeUp("late"), {}, EpisodeEnd.TIMEOUT, {"changes": "YQ=="}),
        (CommandError("refused"), {"max_turns": 1}, EpisodeEnd.MAX_TURNS, {"changes": "YQ=="}),
        (CommandError("killed"), {}, EpisodeEnd.DONE, {"changes": "YQ=="}),
        (None, {"episode_timeout": 0.5}, EpisodeEnd.TIMEOUT, "the time limit expired before"),
    ],
)
def test_what_changed_is_judged_however_the_agent_ended(
    error: CommandError | None, limits: dict[str, Any], end: EpisodeEnd, result: Any
) -> None:
    seen: list[RewardInput] = []

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        assert max(endpoint.seconds, endpoint.clock()) <= limits.get("episode_timeout", 60.0)
        await message(endpoint, "q")
        await ask(endpoint, "another")
        if error is None:
            await asyncio.Event().wait()
        else:
            error.result = {"changes": "YQ=="}
            raise error

    def reward(reward_input: RewardInput) -> float:
        seen.append(reward_input)
        return 1.0

    bench = AgentBench(agent, reward=reward, limits=limits)
    bench.earlier_seconds = 0.0
    bench.sample = replace(bench.sample, extra_info_json=TASK_INFO)
    assert bench.finished().result.end is end
    (seen_input,) = seen
    assert seen_input.result == result or str(result) in seen_input.result["failed"]


def test_a_place_that_cannot_be_made_is_a_failed_setup() -> None:
    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        raise SetupError("task t: no image named 'i'")

    assert reason_of(AgentBench(agent)) == (FailReason.SETUP_FAILED, "task t: no image named 'i'")
