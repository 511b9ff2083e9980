"""The endpoint over real connections: who may ask, what a broken request gets, who is cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from asyncrl.conversation.branches import AgentRequest, Refusal
from asyncrl.errors import ConfigError, EngineError
from asyncrl.gateway import Endpoint, Gateway, server
from asyncrl.gateway.openai import AgentReply
from asyncrl.types import EpisodeEnd, Message, StopReason, Turn, VersionSpan
from tests.fakes.agents import ask

Test = Callable[[Gateway], Awaitable[None]]


class FakeHost:
    """Answers with `found`, when the gate is open; an exception is raised."""

    def __init__(self, found: Any = "42") -> None:
        self.found = found
        self.asked: list[AgentRequest] = []
        self.entered, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.cancelled = asyncio.Event()
        self.lost: list[AgentReply] = []

    def lose(self, reply: AgentReply) -> None:
        self.lost.append(reply)

    async def answer(self, ask: AgentRequest, count: int, told: Any) -> list[AgentReply] | Refusal:
        self.asked.append(ask)
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if isinstance(self.found, Exception):
            raise self.found
        if isinstance(self.found, Refusal):
            return self.found
        turn = Turn(0, (1,), (65, 66), (-0.5, -1.5), (VersionSpan(0, 2, 0, 0),), StopReason.STOP)
        return [AgentReply(Message("assistant", self.found), turn, 1)] * count


def serve(test: Test) -> None:
    """Run it with a gateway, for at most 30 s."""

    async def main() -> None:
        gateway = Gateway(lambda ids: "".join(map(chr, ids)))
        await gateway.start()
        try:
            async with asyncio.timeout(30):
                await test(gateway)
        finally:
            await gateway.close()

    asyncio.run(main())


async def post(endpoint: Endpoint, data: bytes, path: str = "/chat/completions") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    url = endpoint.base_url + path
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=data) as answer:
        return answer.status, await answer.json()


def test_a_key_names_an_episode_and_dies_with_it() -> None:
    async def test(gateway: Gateway) -> None:
        one, two = FakeHost("one"), FakeHost("two")
        async with gateway.admit(one) as first, gateway.admit(two) as second:
            assert first.api_key != second.api_key
            for endpoint, text in ((first, "one"), (second, "two")):
                status, body = await ask(endpoint, "q")
                assert (status, body["choices"][0]["message"]["content"]) == (200, text)
        for key in (first.api_key, "", "guess"):
            status, body = await ask(Endpoint(first.base_url, key), "q")
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert len(one.asked) == len(two.asked) == 1

    serve(test)


@pytest.mark.parametrize(
    ("found", "status", "code"),
    [
        (Refusal(EpisodeEnd.LENGTH, "too long"), 400, "context_length_exceeded"),
        (Refusal(EpisodeEnd.MAX_TURNS, "enough"), 400, "max_turns"),
        (ConfigError("the chat template refuses the roles"), 400, None),
        (EngineError("broke"), 500, None),
        (ZeroDivisionError(), 500, None),
    ],
    ids=str,
)
def test_what_goes_wrong_is_an_answer(found: Any, status: int, code: str | None) -> None:
    async def test(gateway: Gateway) -> None:
        host = FakeHost(found)
        async with gateway.admit(host) as endpoint:
            got, body = await ask(endpoint, "q")
            assert (got, body["error"]["code"]) == (status, code)
            host.found = "42"
            assert (await ask(endpoint, "q"))[0] == 200  # the server goes on

    serve(test)


def test_broken_requests_get_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 1000)

    async def test(gateway: Gateway) -> None:
        async with gateway.admit(FakeHost()) as endpoint:
            assert (await post(endpoint, b"{"))[0] == 400
            assert (await post(endpoint, b" " * 1001))[0] == 413
            status, body = await post(endpoint, b"{}", "/embeddings")
            assert (status, body["error"]["type"]) == (404, "invalid_request_error")
            assert "there is no POST /v1/embeddings; there are POST /v1/chat" in body["error"]["message"]
            url = endpoint.base_url + "/chat/completions"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                found = (answer.status, (await answer.json())["error"]["code"])
                assert found == (405, "unknown_url")

    serve(test)


def test_a_request_that_never_arrives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", 0.05)

    async def never() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    async def test(gateway: Gateway) -> None:
        async with gateway.admit(FakeHost()) as endpoint:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                url = endpoint.base_url + "/chat/completions"
                async with session.post(url, data=never()) as answer:
                    assert answer.status == 408

    serve(test)


def test_the_models_are_listed_for_guests() -> None:
    async def test(gateway: Gateway) -> None:
        async with gateway.admit(FakeHost()) as endpoint, aiohttp.ClientSession() as session:
            async with session.get(endpoint.base_url + "/models") as answer:
                assert answer.status == 401
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with session.get(endpoint.base_url + "/models", headers=headers) as answer:
                assert [model["id"] for model in (await answer.json())["data"]] == [endpoint.model]
            for name in (endpoint.model, "org/model"):
                async with session.get(f"{endpoint.base_url}/models/{name}", headers=headers) as answer:
                    assert (await answer.json())["id"] == name

    serve(test)


def test_a_stream_is_server_sent_events() -> None:
    async def test(gateway: Gateway) -> None:
        async with gateway.admit(FakeHost()) as endpoint:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            body = {"messages": [{"role": "user", "content": "q"}], "stream": True}
            url = endpoint.base_url + "/chat/completions"
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(url, json=body) as answer,
            ):
                assert answer.content_type == "text/event-stream"
                events = (await answer.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == "42"

    serve(test)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize("told", [False, True])
def test_an_error_in_a_stream_is_a_status_or_an_event(told: bool, path: str) -> None:
    class Breaking(FakeHost):
        async def answer(self, ask: AgentRequest, count: int, tell: Any) -> list[AgentReply] | Refusal:
            if told:
                tell(0, "", "4")
            raise EngineError("broke")

    async def test(gateway: Gateway) -> None:
        async with gateway.admit(Breaking()) as endpoint:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            body = {"messages": [{"role": "user", "content": "q"}], "input": "q", "stream": True}
            url = f"{endpoint.base_url}/{path}"
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(url, json=body) as answer,
            ):
                text = await answer.text()
                assert answer.status == (200 if told else 500)
                assert "EngineError: broke" in text
                assert ("data: [DONE]" in text) is False
                assert text.startswith("{") is not told

    serve(test)


def test_log_probs_are_given_on_request() -> None:
    async def test(gateway: Gateway) -> None:
        async with gateway.admit(FakeHost()) as endpoint:
            _, body = await ask(endpoint, "q", logprobs=True)
        content = body["choices"][0]["logprobs"]["content"]
        assert [(one["token"], one["logprob"]) for one in content] == [("A", -0.5), ("B", -1.5)]

    serve(test)


def test_a_client_that_leaves_takes_its_request_along() -> None:
    async def test(gateway: Gateway) -> None:
        host = FakeHost()
        host.gate.clear()
        async with gateway.admit(host) as endpoint:
            asking = asyncio.create_task(ask(endpoint, "q"))
            await host.entered.wait()
            asking.cancel()
            await host.cancelled.wait()

    serve(test)


def test_no_request_outlives_its_episode() -> None:
    """One whose client has left may end slowly."""

    class Slow(FakeHost):
        ended = False

        async def answer(self, ask: AgentRequest, count: int, told: Any) -> list[AgentReply] | Refusal:
            try:
                return await super().answer(ask, count, told)
            finally:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.ended = True

    async def test(gateway: Gateway) -> None:
        host = Slow()
        host.gate.clear()
        async with gateway.admit(host) as endpoint:
            asking = asyncio.create_task(ask(endpoint, "q"))
            await host.entered.wait()
            asking.cancel()
            await host.cancelled.wait()
            assert not host.ended
        assert host.ended

    serve(test)


def reset(*_: Any) -> dict[str, Any]:
    raise ConnectionResetError


async def cancel(task: asyncio.Task[Any]) -> AgentReply:
    """As aiohttp does when the connection is lost just as the answer is there."""
    await task
    raise asyncio.CancelledError


@pytest.mark.parametrize(("step", "leave"), [("_json", reset), ("_outcome", cancel)])
def test_an_answer_that_cannot_be_sent_is_lost(
    step: str, leave: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(gateway: Gateway) -> None:
        host = FakeHost()
        async with gateway.admit(host) as endpoint:
            assert (await ask(endpoint, "q"))[0] == 200
            assert host.lost == []
            monkeypatch.setattr(server, step, leave)
            with pytest.raises(aiohttp.ClientError):
                await ask(endpoint, "q")
        assert len(host.lost) == 1

    serve(test)


def test_the_end_of_the_episode_answers_what_is_under_way() -> None:
    async def test(gateway: Gateway) -> None:
        host = FakeHost()
        host.gate.clear()
        async with gateway.admit(host) as endpoint:
            asking = asyncio.create_task(ask(endpoint, "q"))
            await host.entered.wait()
        assert host.cancelled.is_set()
        status, body = await asking
        assert (status, body["error"]["code"]) == (410, "episode_over")

    serve(test)


def test_ignored_parameters_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(gateway: Gateway) -> None:
        async with gateway.admit(FakeHost()) as endpoint:
            for _ in range(3):
                await ask(endpoint, "q", temperature=0.5)

    serve(test)
    assert [record.message.count("temperature") for record in caplog.records] == [2]
