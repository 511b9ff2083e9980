"""The endpoint over real connections: who may ask, what a broken request gets, who is cancelled."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from asyncrl.conversation.requests import Refusal
from asyncrl.errors import ConfigError, EngineError
from asyncrl.gateway import Endpoint, Gateway, connections, exchange, server
from asyncrl.gateway.exchange import AgentReply
from asyncrl.types import EpisodeEnd, Message
from tests.fakes.agents import ask
from tests.fakes.dialects import DIALECTS, Dialect, events_of
from tests.fakes.hosts import FakeHost, fetch, served

USER = Message("user", "q")

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read bodies of 1,000 bytes at most."""
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.05)


@served
async def test_a_key_names_an_episode_and_dies_with_it(gateway: Gateway) -> None:
    first_host = FakeHost("one")
    second_host = FakeHost("two")
    async with gateway.admit_episode(first_host) as first, gateway.admit_episode(second_host) as second:
        assert first.api_key != second.api_key
        for endpoint, text in ((first, "one"), (second, "two")):
            status, body = await ask(endpoint, "q")
            assert (status, body["choices"][0]["message"]["content"]) == (200, text)
    for key in (first.api_key, "", "guess"):
        status, body = await ask(Endpoint(first.base_url, key), "q")
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (await fetch(first, "/models", key))[0] == 401
    assert len(first_host.requests) == len(second_host.requests) == 1


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (Refusal(EpisodeEnd.LENGTH, "too long", 9, 8), 400, "context_length_exceeded"),
        (Refusal(EpisodeEnd.MAX_TURNS, "enough"), 400, "max_turns"),
        (ConfigError("the chat template rejects messages with the roles"), 400, None),
        (EngineError("broke"), 500, None),
        (ZeroDivisionError(), 500, None),
        (ConnectionRefusedError("no engine"), 500, None),
        (TimeoutError("no engine"), 500, None),
    ],
    ids=str,
)
@every_dialect
@served
async def test_what_goes_wrong_is_an_answer(
    gateway: Gateway, dialect: Dialect, outcome: Any, status: int, code: str | None
) -> None:
    host = FakeHost(outcome)
    async with gateway.admit_episode(host) as endpoint:
        answer_status, body = await fetch(endpoint, dialect.path, json=dialect.body([USER]))
        is_anthropics = dialect.path == "/messages"
        assert (answer_status, body["error"].get("code")) == (status, None if is_anthropics else code)
        row_is_full = isinstance(outcome, Refusal) and outcome.tokens > 0 and is_anthropics
        assert (body["error"]["message"] == "prompt is too long: 9 tokens > 8 maximum") is row_is_full
        host.result = "42"
        assert (await ask(endpoint, "q"))[0] == 200  # the server goes on


async def never() -> Any:
    yield b"{"
    await asyncio.Event().wait()


BROKEN: dict[str, tuple[dict[str, Any], int, str]] = {
    "open": ({"data": b"{"}, 400, "cannot be read"),
    "too large": ({"data": b" " * 1001}, 413, "Too Large"),
    "it never arrives": ({"data": never}, 408, "body did not arrive within 0.05 s"),
    "a method that is not there": ({"method": "DELETE"}, 405, "unknown endpoint DELETE /v1/"),
}


@pytest.mark.parametrize(("options", "status", "why"), BROKEN.values(), ids=BROKEN)
@every_dialect
@served
async def test_broken_requests_get_errors(
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    dialect: Dialect,
    options: dict[str, Any],
    status: int,
    why: str,
) -> None:
    if options.get("data") is never:
        monkeypatch.setattr(server, "READ_SECONDS", 0.05)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        sent = {key: value() if callable(value) else value for key, value in options.items()}
        answer_status, body = await fetch(endpoint, dialect.path, **sent)
        assert (answer_status, why in body["error"]["message"]) == (status, True), body
        answer_status, body = await fetch(endpoint, "/embeddings", json={})
        assert (answer_status, body["error"]["code"]) == (404, "unknown_url")
        assert body["error"]["type"] == "invalid_request_error"
        assert f"POST /v1{dialect.path}" in body["error"]["message"].partition("; available:")[2]


@served
async def test_slow_bodies_of_one_episode_keep_no_other_waiting(gateway: Gateway) -> None:
    async with gateway.admit_episode(FakeHost()) as slow, gateway.admit_episode(FakeHost()) as endpoint:
        arrived = asyncio.Semaphore(0)

        async def body() -> Any:
            yield b"{"
            arrived.release()
            await asyncio.Event().wait()

        asking = [
            asyncio.create_task(fetch(slow, "/messages", data=body()))
            for _ in range(server.REQUEST_SLOTS + 40)
        ]
        for _ in asking:
            await arrived.acquire()
        assert (await ask(endpoint, "q"))[0] == 200
        for request in asking:
            request.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert (await ask(slow, "q"))[0] == 200


async def wait_until_slots_are_taken(gateway: Gateway, endpoint: Endpoint) -> None:
    while not gateway.running_episodes[endpoint.api_key].request_slots.locked():  # noqa: ASYNC110
        await asyncio.sleep(0)


@served
async def test_a_body_has_its_full_time_behind_a_slow_body(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_SLOTS", 1)
    monkeypatch.setattr(server, "READ_SECONDS", 0.5)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        slow_request = asyncio.create_task(fetch(endpoint, "/messages", data=never()))
        await wait_until_slots_are_taken(gateway, endpoint)

        async def late_body() -> Any:
            yield b'{"max_tokens": 9, "messages": [{"role": "user", '
            await asyncio.wait([slow_request])
            await asyncio.sleep(0.1)
            yield b'"content": "q"}]}'

        assert (await fetch(endpoint, "/messages", data=late_body()))[0] == 200
        assert (await slow_request)[0] == 408


@served
async def test_a_request_waits_for_earlier_requests_for_a_limited_time(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many slow bodies came before."""
    monkeypatch.setattr(server, "REQUEST_SLOTS", 1)
    monkeypatch.setattr(server, "REQUEST_WAIT_SECONDS", 0.2)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        slow_request = asyncio.create_task(fetch(endpoint, "/messages", data=never()))
        await wait_until_slots_are_taken(gateway, endpoint)
        status, answer = await ask(endpoint, "q")
        assert status == 408
        assert "earlier requests of the episode were not read within 0.2 s" in answer["error"]["message"]
        slow_request.cancel()
        await asyncio.gather(slow_request, return_exceptions=True)


@served
async def test_the_retry_of_an_unread_request_ends_no_equal_request(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost()
    host.gate.clear()
    async with gateway.admit_episode(host) as endpoint:
        equal_request = asyncio.create_task(ask(endpoint, "q"))
        await host.entered.wait()
        monkeypatch.setattr(server, "READ_SECONDS", 0.2)
        assert (await fetch(endpoint, "/chat/completions", data=never()))[0] == 408
        monkeypatch.setattr(server, "READ_SECONDS", 60.0)
        host.entered.clear()
        retry = asyncio.create_task(ask(endpoint, "q", headers={"x-stainless-retry-count": "1"}))
        await host.entered.wait()
        host.gate.set()
        assert [status for status, _ in await asyncio.gather(equal_request, retry)] == [200, 200]


@served
async def test_all_unread_tries_of_a_request_count_once(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a try of a later request would pass for ended, and be sampled beside its retry."""
    monkeypatch.setattr(server, "READ_SECONDS", 0.2)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        for attempt in ("0", "1"):
            headers = {"x-stainless-retry-count": attempt}
            assert (await fetch(endpoint, "/chat/completions", data=never(), headers=headers))[0] == 408
        monkeypatch.setattr(server, "READ_SECONDS", 60.0)
        assert (await ask(endpoint, "q", headers={"x-stainless-retry-count": "2"}))[0] == 200
        assert gateway.running_episodes[endpoint.api_key].unread_tries.total() == 0


@served
async def test_unread_tries_are_bounded_and_none_that_is_over_displaces_another(gateway: Gateway) -> None:
    async with gateway.admit_episode(FakeHost()) as endpoint:
        running_episode = gateway.running_episodes[endpoint.api_key]
        running_episode.note_unread(50)
        for attempt in range(2 * server.MAX_UNANSWERED):  # of one request: each takes the place of the last
            running_episode.note_unread(attempt)
        assert running_episode.unread_tries[50] == 1
        for attempt in range(100, 100 + 4 * server.MAX_UNANSWERED, 2):
            running_episode.note_unread(attempt)
        assert running_episode.unread_tries.total() == server.MAX_UNANSWERED


@served
async def test_headers_are_refused_without_a_wait_for_slow_bodies(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_SLOTS", 1)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        slow_request = asyncio.create_task(fetch(endpoint, "/messages", data=never()))
        await wait_until_slots_are_taken(gateway, endpoint)

        async with asyncio.timeout(5):
            options: dict[str, Any] = {"data": b" " * 1001}
            assert (await fetch(endpoint, "/messages", **options))[0] == 413
            options = {"data": b"{}", "headers": {"Content-Encoding": "zstd"}}
            assert (await fetch(endpoint, "/messages", **options))[0] == 415
        assert not slow_request.done()
        slow_request.cancel()
        await asyncio.gather(slow_request, return_exceptions=True)


@served
async def test_fields_without_effect_are_not_decoded(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway.admit_episode(FakeHost()) as endpoint:
        for field in (b'"x": 1e999', b'"y": "\xff"', b'"\xff": 1'):
            body = b'{"messages": [{"role": "user", "content": "q"}], %s}' % field
            status, answer = await fetch(endpoint, "/chat/completions", data=body)
            assert status == 200, answer
        assert [record.getMessage() for record in caplog.records] == [
            f"agents sent {name}, which has no effect" for name in "xy"
        ]


@served
async def test_the_models_are_listed_for_guests(gateway: Gateway) -> None:
    async with gateway.admit_episode(FakeHost()) as endpoint:
        _, listing = await fetch(endpoint, "/models")
        assert [model["id"] for model in listing["data"]] == [endpoint.model]
        for name in (endpoint.model, "org/model"):
            assert (await fetch(endpoint, f"/models/{name}"))[1]["id"] == name


@served
async def test_what_claude_code_asks_beside_messages(gateway: Gateway) -> None:
    async with gateway.admit_episode(FakeHost()) as endpoint:
        url = endpoint.anthropic_url
        headers = {"x-api-key": endpoint.api_key}
        body = {"messages": [{"role": "user", "content": "four"}], "model": "policy"}
        async with aiohttp.ClientSession() as session:
            async with session.head(url) as answer:
                assert answer.status == 200
            async with session.post(f"{url}/v1/messages/count_tokens", json=body, headers=headers) as answer:
                assert await answer.json() == {"input_tokens": 4}
            async with session.post(f"{url}/v1/messages/count_tokens", json=body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["type"]) == (401, "authentication_error")


@every_dialect
@served
async def test_a_stream_is_server_sent_events(gateway: Gateway, dialect: Dialect) -> None:
    async with gateway.admit_episode(FakeHost(streamed="4")) as endpoint:
        _, text = await fetch(endpoint, dialect.path, json=dialect.body([USER], stream=True))
    assert text.endswith("data: [DONE]\n\n") is (dialect.path != "/messages")
    assert dialect.heard(events_of(text)).content == "42"


@every_dialect
@served
async def test_a_stream_says_that_its_turn_goes_on(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, dialect: Dialect
) -> None:
    """Clients take a silent stream for a dead one, and ask again; Codex counts events only, no comments."""
    monkeypatch.setattr(server, "HEARTBEAT_SECONDS", 0.01)
    host = FakeHost(streamed="")
    host.gate.clear()
    async with gateway.admit_episode(host) as endpoint, aiohttp.ClientSession() as session:
        headers = {"x-api-key": endpoint.api_key}
        body = dialect.body([USER], stream=True)
        async with session.post(endpoint.base_url + dialect.path, json=body, headers=headers) as answer:
            beats = {"/messages": "event: ping", "/responses": "in_progress"}
            received = ""
            beat = beats.get(dialect.path, "\n:")
            while received.count(beat) < 5:
                received += (await answer.content.readany()).decode()
            host.gate.set()
            received += (await answer.content.read()).decode()
    assert dialect.heard(events_of(received)).content == "42"


@pytest.mark.parametrize("outcome", ["42", EngineError("broke")], ids=str)
@every_dialect
@served
async def test_a_whole_answer_that_takes_long_begins_with_line_breaks(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, dialect: Dialect, outcome: Any
) -> None:
    """Clients give up a silent server after minutes. What fails after the status was sent breaks off."""
    monkeypatch.setattr(server, "SILENT_SECONDS", 0.01)
    host = FakeHost(outcome)
    host.gate.clear()
    async with gateway.admit_episode(host) as endpoint, aiohttp.ClientSession() as session:
        headers = {"x-api-key": endpoint.api_key}
        body = dialect.body([USER])
        async with session.post(endpoint.base_url + dialect.path, json=body, headers=headers) as answer:
            assert (answer.status, await answer.content.readexactly(5)) == (200, b"\n" * 5)
            host.gate.set()
            if outcome == "42":
                assert dialect.parse_answer(await answer.json()).content == "42"
            else:
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()


@pytest.mark.parametrize("streamed", [None, "4"])
@every_dialect
@served
async def test_an_error_in_a_stream_is_a_status_or_an_event(
    gateway: Gateway, dialect: Dialect, streamed: str | None
) -> None:
    async with gateway.admit_episode(FakeHost(EngineError("broke"), streamed)) as endpoint:
        status, answer = await fetch(endpoint, dialect.path, json=dialect.body([USER], stream=True))
    if streamed:
        assert (status, "[DONE]" in answer) == (200, False)
        kind, answer = events_of(answer)[-1]
        assert kind == "error"
    else:
        assert status == 500
    assert answer["error"]["message"] == "EngineError: broke"


@served
async def test_log_probs_are_given_on_request(gateway: Gateway) -> None:
    async with gateway.admit_episode(FakeHost()) as endpoint:
        _, body = await ask(endpoint, "q", logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert [(token["token"], token["logprob"]) for token in content] == [("A", -0.5), ("B", -1.5)]


@pytest.mark.parametrize("slow", [False, True])
@served
async def test_a_client_that_leaves_takes_its_request_along(gateway: Gateway, slow: bool) -> None:
    """No request outlives its episode; one whose client has left may end slowly."""
    host = FakeHost(slow=slow)
    host.gate.clear()
    async with gateway.admit_episode(host) as endpoint:
        asking = asyncio.create_task(ask(endpoint, "q"))
        await host.entered.wait()
        asking.cancel()
        await host.cancelled.wait()
        assert host.has_ended is not slow
    assert host.has_ended


def reset(response: web.StreamResponse, body: bytes) -> None:
    """As where the client closes the connection while the answer is written."""
    assert response._req is not None and response._req.transport is not None
    response._req.transport.abort()
    raise ConnectionResetError


async def cancel(task: asyncio.Task[Any]) -> AgentReply:
    """As aiohttp does when the connection is lost just as the answer is there."""
    await task
    raise asyncio.CancelledError


@pytest.mark.parametrize(("step", "leave"), [("web.StreamResponse.write_eof", reset), ("_outcome", cancel)])
@served
async def test_an_answer_that_cannot_be_sent_is_lost(
    gateway: Gateway,
    step: str,
    leave: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = FakeHost()
    async with gateway.admit_episode(host) as endpoint:
        assert (await ask(endpoint, "q"))[0] == 200
        assert host.lost == []
        monkeypatch.setattr(f"{server.__name__}.{step}", leave)
        with pytest.raises(aiohttp.ClientError):
            await ask(endpoint, "q")
    assert len(host.lost) == 1
    assert "Traceback" not in caplog.text and "Error handling" not in caplog.text


class Samples(FakeHost):
    """Answers each request with the outcome that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[asyncio.Future[Any]] = []
        self.arrived = asyncio.Semaphore(0)

    async def answer(self, *request: Any, **options: Any) -> Any:
        outcome = asyncio.get_running_loop().create_future()
        self.outcomes.append(outcome)
        self.arrived.release()
        self.result = await outcome
        return await super().answer(*request, **options)


@pytest.mark.parametrize("ends", ["its client leaves", "it fails", "its answer is not read"])
@served
async def test_equal_requests_side_by_side_do_not_end_each_other(
    gateway: Gateway, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample of a prompt comes again, and once more, while another one goes on."""
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 60.0)  # the client may be slow to leave
    host = Samples()

    async def begin(attempt: int) -> asyncio.Task[Any]:
        headers = {"x-stainless-retry-count": str(attempt)}
        asking = asyncio.create_task(ask(endpoint, "q", headers=headers))
        await host.arrived.acquire()
        return asking

    async def end(asking: asyncio.Task[Any]) -> None:
        if ends == "its client leaves":
            asking.cancel()
            await asyncio.wait([host.outcomes[-1]])
        else:
            host.outcomes[-1].set_exception(EngineError("broke"))
            assert (await asking)[0] == 500

    async def leave_unread(attempt: int) -> None:
        host.lost.clear()
        address, _, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        body = json.dumps({"messages": [{"role": "user", "content": "q"}]})
        headers = {
            "Host": "x",
            "x-api-key": endpoint.api_key,
            "x-stainless-retry-count": attempt,
            "Content-Length": len(body),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        with socket.create_connection((address, int(port)), timeout=30) as client:
            client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n{body}".encode())
            await host.arrived.acquire()
            host.outcomes[-1].set_result("42")
            await asyncio.to_thread(client.recv, 1, socket.MSG_PEEK)  # the answer is there, and stays
        while not host.lost:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async with gateway.admit_episode(host) as endpoint:
        healthy = await begin(0)
        for attempt in (0, 1):
            if ends == "its answer is not read":
                await leave_unread(attempt)
            else:
                await end(await begin(attempt))
        last = await begin(2)
        assert not healthy.done()
        for outcome in (host.outcomes[0], host.outcomes[-1]):
            outcome.set_result("42")
        assert [(await asking)[0] for asking in (healthy, last)] == [200, 200]


@served
async def test_the_end_of_the_episode_answers_what_is_under_way(gateway: Gateway) -> None:
    host = FakeHost()
    host.gate.clear()
    async with gateway.admit_episode(host) as endpoint:
        asking = asyncio.create_task(ask(endpoint, "q"))
        await host.entered.wait()
    assert host.cancelled.is_set()
    status, body = await asking
    assert (status, body["error"]["code"]) == (410, "episode_over")


@served
async def test_ignored_parameters_are_reported_once(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway.admit_episode(FakeHost()) as endpoint:
        for _ in range(3):
            await ask(endpoint, "q", temperature=0.5)
    assert [record.message.count("temperature") for record in caplog.records] == [2]


@served
async def test_names_that_agents_choose_do_not_fill_the_log(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_LOGGED_FIELDS", 3)
    async with gateway.admit_episode(FakeHost()) as endpoint:
        for number in range(3):
            body = {
                "messages": [{"role": "user", "content": "q"}],
                f"{number}\n\x1b[2J\u202e{'x' * 200}": 1,
                f"b{number}": 1,
            }
            assert (await fetch(endpoint, "/messages", json=body))[0] == 200
    assert len(caplog.records) == 3
    assert all(record.message.isprintable() and len(record.message) < 200 for record in caplog.records)
