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

from asyncrl.errors import ConfigError
from asyncrl.remote import RemoteError, RemoteModel, close_sessions, http
from asyncrl.types import Message, ToolCall
from tests.fakes.sglang import Script, scripted

PATH = "/v1/chat/completions"
QUESTION = [Message("user", "how much?")]


def completion(text: str | None) -> bytes:
    return json.dumps({"id": "x", "choices": [{"index": 0, "message": {"content": text}}]}).encode()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSE", 0.0)


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
        said = [
            Message("system", "s"),
            Message("assistant", "", (ToolCall("add", '{"a": 1}', "c1"),), reasoning="private"),
            Message("tool", "2", tool_call_id="c1", name="add"),
        ]
        assert await model.chat(said) == "fine"
        ((path, asked, key),) = script.asked
        assert (path, key) == (PATH, "Bearer secret")
        assert asked == {
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
    ("answers", "said"),
    [
        ([(200, completion("ok"))], "ok"),
        ([(200, completion(None))], ""),
        ([(503, b""), (429, b""), (200, completion("ok"))], "ok"),
    ],
)
async def test_what_passes_is_tried_again(answers: list[tuple[int, bytes]], said: str) -> None:
    async with server() as script:
        script.answers[PATH] = in_turn(*answers)
        assert await RemoteModel(f"{script.url}/v1", "judge").chat(QUESTION) == said
        assert len(script.asked) == len(answers)


@pytest.mark.parametrize(
    ("status", "content", "retries", "tries", "complaint"),
    [
        (500, b"out of\n memory", 1, 2, r"status 500 \(out of memory\), after 2 tries"),
        (503, b"", 0, 1, "status 503, after 1 tries"),
        (400, b"no such model", 2, 1, r"status 400 \(no such model\)"),
        (302, b"", 2, 1, "status 302"),
        (200, b"<html>", 2, 1, "no chat completion"),
        (200, b'{"choices": []}', 2, 1, "no chat completion"),
        (200, b'{"choices": [{"message": {"content": 3}}]}', 2, 1, "no chat completion"),
    ],
)
async def test_refusals(status: int, content: bytes, retries: int, tries: int, complaint: str) -> None:
    async with server() as script:
        script.says(PATH, status, content)
        with pytest.raises(RemoteError, match=complaint):
            await RemoteModel(f"{script.url}/v1", "judge", retries=retries).chat(QUESTION)
        assert len(script.asked) == tries


async def test_what_some_models_refuse_can_be_left_out() -> None:
    async with server() as script:
        script.says(PATH, 200, completion("fine"))
        await RemoteModel(f"{script.url}/v1", "judge", temperature=-1, max_tokens=0).chat(QUESTION)
        assert script.asked[0][1].keys() == {"model", "messages"}


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
        with pytest.raises(RemoteError, match=r"within 0.2 s \(last: status 429 \(slow down\)\)"):
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
        with pytest.raises(RemoteError, match="after 2 tries"):
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
    many = 120
    async with server() as script:
        there = asyncio.Event()

        async def answer(request: web.Request) -> web.Response:
            if len(script.asked) == many:
                there.set()
            await there.wait()
            return web.Response(body=b"{}")

        script.answers[PATH] = answer
        url = script.url + PATH
        await asyncio.gather(*(http.post(url, {}, seconds=10.0, retries=0) for _ in range(many)))


def test_bad_settings_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_KEY holds no key"):
        RemoteModel("http://x", "m", "NO_KEY")
    with pytest.raises(ConfigError, match="must begin with http"):
        RemoteModel("localhost:8000", "m")
