"""A chat model behind a real local server: what is sent, what is tried again, what is bounded."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from asyncrl.environments.openenv import OpenEnv, OpenEnvError
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.errors import ConfigError, waits_noted
from asyncrl.remote import RemoteError, RemoteModel, close_sessions, http
from asyncrl.rewards import RewardError, RewardInput, in_loop
from asyncrl.types import Message, ToolCall
from tests.fakes.chat import sample
from tests.fakes.sglang import Script, scripted

PATH = "/v1/chat/completions"
QUESTION = [Message("user", "how much?")]


def completion(text: str | None) -> bytes:
    return json.dumps({"id": "x", "choices": [{"index": 0, "message": {"content": text}}]}).encode()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.0)


@asynccontextmanager
async def server() -> AsyncIterator[Script]:
    try:
        async with scripted() as script:
            yield script
    finally:
        await close_sessions()


def in_turn(*answers: tuple[int, bytes], headers: dict[str, str] | None = None) -> Any:
    """Answers one after another, the last one for ever."""
    left = itertools.chain(answers, itertools.repeat(answers[-1]))

    async def answer(request: web.Request) -> web.Response:
        status, content = next(left)
        return web.Response(status=status, body=content, headers=headers if status != 200 else None)

    return answer


async def test_what_is_sent_and_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with server() as script:
        script.says(PATH, 200, completion("fine"))
        model = RemoteModel(f"{script.url}/v1/", "judge", "JUDGE_KEY", temperature=0.5, max_tokens=7)
        replies = [
            Message("system", "s"),
            Message("assistant", "", (ToolCall("add", '{"a": 1}', "c1"),), reasoning="private"),
            Message("tool", "2", tool_call_id="c1", name="add"),
        ]
        assert await model.chat(replies) == "fine"
        ((path, request_body, key),) = script.requests
        assert (path, key) == (PATH, "Bearer secret")
        assert request_body == {
            "model": "judge",
            "messages": [
                {"role": "system", "content": "s"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "add", "arguments": '{"a": 1}'},
                        }
                    ],
                },
                {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
            ],
            "temperature": 0.5,
            "max_tokens": 7,
        }


@pytest.mark.parametrize(
    ("answers", "reply"),
    [
        ([(200, completion("ok"))], "ok"),
        ([(200, completion(None))], ""),
        ([(503, b""), (429, b""), (200, completion("ok"))], "ok"),
    ],
)
async def test_what_passes_is_tried_again(answers: list[tuple[int, bytes]], reply: str) -> None:
    async with server() as script:
        script.answers[PATH] = in_turn(*answers)
        assert await RemoteModel(f"{script.url}/v1", "judge").chat(QUESTION) == reply
        assert len(script.requests) == len(answers)


@pytest.mark.parametrize(
    ("status", "content", "retries", "tries", "complaint"),
    [
        (500, b"out of\n memory", 1, 2, r"status 500 \(out of memory\), after 2 attempts"),
        (503, b"", 0, 1, "status 503, after 1 attempt"),
        (400, b"no such model", 2, 1, r"status 400 \(no such model\)"),
        (302, b"", 2, 1, "status 302"),
        (200, b"<html>", 2, 1, "not a chat completion"),
        (200, b'{"choices": []}', 2, 1, "not a chat completion"),
        (200, b'{"choices": [{"message": {"content": 3}}]}', 2, 1, "not a chat completion"),
    ],
)
async def test_refusals(status: int, content: bytes, retries: int, tries: int, complaint: str) -> None:
    async with server() as script:
        script.says(PATH, status, content)
        with pytest.raises(RemoteError, match=complaint):
            await RemoteModel(f"{script.url}/v1", "judge", retries=retries).chat(QUESTION)
        assert len(script.requests) == tries


async def test_what_some_models_refuse_can_be_left_out() -> None:
    async with server() as script:
        script.says(PATH, 200, completion("fine"))
        await RemoteModel(f"{script.url}/v1", "judge", temperature=-1, max_tokens=0).chat(QUESTION)
        assert script.requests[0][1].keys() == {"model", "messages"}


async def test_the_deadline_holds_over_silence_and_retry_after() -> None:
    async with server() as script:
        silent = asyncio.Event()

        async def never(request: web.Request) -> web.Response:
            await silent.wait()
            return web.Response()

        model = RemoteModel(f"{script.url}/v1", "judge", timeout=0.2)
        script.answers[PATH] = never
        with pytest.raises(RemoteError, match=r"no answer within 0.2 s"):
            await model.chat(QUESTION)
        silent.set()
        script.answers[PATH] = in_turn((429, b"slow down"), headers={"Retry-After": "60"})
        with pytest.raises(RemoteError, match=r"within 0.2 s \(last problem: status 429 \(slow down\)\)"):
            await model.chat(QUESTION)


async def test_a_cut_connection_is_tried_again_and_a_flood_is_refused() -> None:
    async with server() as script:

        async def cut(request: web.Request) -> web.Response:
            assert request.transport is not None
            request.transport.abort()
            script.answers[PATH] = in_turn((200, completion("back")))
            return web.Response()

        model = RemoteModel(f"{script.url}/v1", "judge")
        script.answers[PATH] = cut
        assert await model.chat(QUESTION) == "back"
        script.says(PATH, 200, b"x" * (http.MAX_BYTES + 1))
        with pytest.raises(RemoteError, match="larger than"):
            await model.chat(QUESTION)


async def test_nobody_listens(unused_port: int) -> None:
    async with server():
        with pytest.raises(RemoteError, match="after 2 attempts"):
            await RemoteModel(f"http://127.0.0.1:{unused_port}/v1", "judge", retries=1).chat(QUESTION)


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_no_request_waits_for_another() -> None:
    """All of them are under way at once: an answer waits for the last of them."""
    request_count = 120
    async with server() as script:
        all_arrived = asyncio.Event()

        async def answer(request: web.Request) -> web.Response:
            if len(script.requests) == request_count:
                all_arrived.set()
            await all_arrived.wait()
            return web.Response(body=b"{}")

        script.answers[PATH] = answer
        url = script.url + PATH
        await asyncio.gather(
            *(http.post_json(url, {}, seconds=10.0, retries=0) for _ in range(request_count))
        )


def test_bad_settings_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_KEY is unset or empty"):
        RemoteModel("http://x", "m", "NO_KEY")
    with pytest.raises(ConfigError, match="must begin with http"):
        RemoteModel("localhost:8000", "m")
    for url in ("http://judge:80000/v1", "http://judge:eight/v1", "http://[::1/v1"):
        with pytest.raises(ConfigError, match=r"the URL 'http://.*correct the host or the port"):
            RemoteModel(url, "m")


# -- proxies of the environment ------------------------------------------------------------------------


@asynccontextmanager
async def proxy(*, silent: bool = False) -> AsyncIterator[tuple[str, list[str]]]:
    """A proxy that answers every request itself, its address, and the first lines of what it was sent."""
    lines: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines.append(head.partition(b"\r\n")[0].decode())
        if not silent:
            body = completion("by the proxy")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*listener.sockets[0].getsockname()), lines
    finally:
        await close_sessions()
        listener.close()


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
@pytest.mark.usefixtures("no_proxies")
async def test_other_hosts_are_asked_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    async with proxy() as (address, lines):
        monkeypatch.setenv(variable, address)
        assert await RemoteModel("http://judge.example/v1", "judge").chat(QUESTION) == "by the proxy"
    assert lines == ["POST http://judge.example/v1/chat/completions HTTP/1.1"]


@pytest.mark.usefixtures("no_proxies")
async def test_openenv_is_asked_through_the_proxy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy() as (address, lines):
        monkeypatch.setenv("http_proxy", address)
        environment = OpenEnv(url="http://world.example")
        with pytest.raises(OpenEnvError, match=r"world\.example"):
            await environment.reset(sample())
        await environment.close()
    assert lines == ["GET http://world.example/ws HTTP/1.1"]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.usefixtures("no_proxies")
async def test_this_machine_and_servers_of_the_run_are_asked_directly(
    monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    async with proxy() as (address, lines), server() as script:
        monkeypatch.setenv("http_proxy", address)
        script.says(PATH, 200, completion("itself"))
        url = script.url.replace("127.0.0.1", "localhost") if not direct else script.url
        assert await RemoteModel(f"{url}/v1", "judge", direct=direct).chat(QUESTION) == "itself"
    assert lines == []


@pytest.mark.parametrize(
    ("url", "no_proxy", "used"),
    [
        ("http://judge.example/v1", "", "http://p:1"),
        ("https://judge.example/v1", "", "http://s:2"),
        ("wss://judge.example/ws", "", "http://s:2"),
        ("http://judge.example:8000/v1", "judge.example:8000", None),
        ("http://judge.example/v1", "other.org, .example", None),
        ("http://judge.example/v1", "*", None),
        ("http://10.1.2.3:8000/v1", "judge.example, 10.0.0.0/8", None),
        ("http://10.1.2.3/v1", "10.1.9.9/16", None),
        ("http://11.1.2.3/v1", "10.0.0.0/8, 10.0.0.0/99, fd00::/8", "http://p:1"),
        ("ws://[fd00::1]:8000/ws", "fd00::/8", None),
        ("http://[fd00::1]/v1", "fd00:0::1", None),
        ("http://127.0.0.1:8000/v1", "", None),
        ("http://127.8.8.8/v1", "", None),
        ("http://[::1]:8000/v1", "", None),
        ("http://localhost:8000/v1", "", None),
    ],
)
@pytest.mark.usefixtures("no_proxies")
def test_the_proxy_of_a_url(
    monkeypatch: pytest.MonkeyPatch, url: str, no_proxy: str, used: str | None
) -> None:
    monkeypatch.setenv("http_proxy", "p:1")
    monkeypatch.setenv("https_proxy", "http://s:2")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert http.proxy_of(url) == used


@pytest.mark.usefixtures("no_proxies")
def test_a_proxy_that_cannot_be_used_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://p:1")
    with pytest.raises(ConfigError, match=r"all_proxy: socks5://.*no_proxy"):
        RemoteModel("http://judge.example/v1", "judge")
    RemoteModel("http://127.0.0.1:8000/v1", "judge")
    RemoteModel("http://judge.example/v1", "judge", direct=True)
    with pytest.raises(ConfigError, match="must begin with http"):
        RemoteModel("judge.example", "judge", direct=True)


@pytest.mark.usefixtures("no_proxies")
async def test_a_reward_that_is_late_says_what_kept_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def judge(reward_input: RewardInput) -> float:
        await RemoteModel("http://judge.example/v1", "judge", "").chat(QUESTION)
        return 1.0

    async with proxy(silent=True) as (address, _):
        monkeypatch.setenv("http_proxy", address.replace("//", "//user:secret@"))
        reward = EpisodeReward([in_loop(judge)], timeout=0.2)
        with pytest.raises(RewardError) as late_error:
            await reward.score_episode(RewardInput(sample(), "42"))
    path = "http://judge.example/v1/chat/completions"
    assert (
        str(late_error.value)
        == f"no reward within 0.2 s (waiting for {path} through the proxy {address}: no answer)"
    )


async def test_only_a_server_that_keeps_a_call_waiting_is_named() -> None:
    async with server() as script:
        is_asked = asyncio.Event()
        never = asyncio.Event()

        async def silent(request: web.Request) -> web.Response:
            is_asked.set()
            await never.wait()
            return web.Response()

        script.answers["/silent"] = silent
        script.says("/fine", 200, b"{}")
        script.says("/busy", 503, b"")
        with waits_noted() as waits:
            waiting = asyncio.create_task(http.post_json(f"{script.url}/silent", {}, seconds=60.0))
            await is_asked.wait()
            await http.post_json(f"{script.url}/fine", {}, seconds=60.0)
            with pytest.raises(RemoteError, match="after 2 attempts"):
                await http.post_json(f"{script.url}/busy", {}, seconds=60.0, retries=1)
            assert list(waits.values()) == [f"{script.url}/silent: no answer"]
            never.set()
            await waiting
            assert not waits
