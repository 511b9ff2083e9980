"""A real OpenEnv server in a process of its own, and what it does wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.config import Options
from asyncrl.environments import load_environment
from asyncrl.environments.openenv import OpenEnvError, _last_fenced_object
from asyncrl.errors import ConfigError
from tests.fakes.environments import play, row, summary_of, talk

SERVER = """
import random
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    number: int

class Answer(Observation):
    text: str
    span: list[int]

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, high=9):
        self._secret, self._span = random.Random(seed).randint(1, high), [1, high]
        return Answer(text=f"Guess 1 to {high}.", span=self._span)

    def step(self, action):
        if action.number < 0:
            raise RuntimeError("negative")
        if action.number == self._secret:
            return Answer(text="Right!", span=self._span, reward=1, done=True)
        word = "Higher." if action.number < self._secret else "Lower."
        return Answer(text=word, span=self._span, reward=-0.25)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=0, log_level="info", ws="websockets")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    path: Path = tmp_path_factory.mktemp("openenv") / "server.py"
    path.write_text(SERVER)
    quiet = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen([sys.executable, str(path)], stderr=subprocess.PIPE, text=True, env=quiet)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:  # it ends when the process does; pytest's timeout is the deadline
            lines.append(line)
            if match := re.search(r"running on (http://[\d.:]+)", line):
                yield match[1]
                return
        raise AssertionError("the server did not start:\n" + "".join(lines))
    finally:
        process.kill()
        process.wait(10)


def at(url: str, **options: Any) -> dict[str, Options]:
    return {"openenv": {"url": url, **options}}


def test_an_episode(server: str) -> None:
    turns = ['{"number": 9}', 'I say\n```json\n{"number": 1}\n```', '{"number": 7}']
    heard = play(at(server, show="text"), row(), turns)
    assert list(map(summary_of, heard)) == [
        ("Guess 1 to 9.", 0.0, False),
        ("Lower.", -0.25, False),
        ("Higher.", -0.25, False),
        ("Right!", 1.0, True),
    ]
    assert play(at(server, show="text"), row(), turns) == heard  # as after a crash


def test_seeds_arguments_and_what_is_shown(server: str) -> None:
    heard = play(at(server + "/"), row(openenv={"high": 1}), ['{"number": 1}'])
    assert [json.loads(summary_of(observation)[0]) for observation in heard] == [
        {"text": "Guess 1 to 1.", "span": [1, 1]},
        {"text": "Right!", "span": [1, 1]},
    ]
    (seen,) = play(at(server, show="span"), row(3, openenv={"seed": 5}), [])
    assert summary_of(seen)[0] == "[1, 9]"


def test_an_action_may_be_one_field(server: str) -> None:
    heard = play(at(server, show="text", action="number"), row(), ["7"])
    assert summary_of(heard[1]) == ("Right!", 1.0, True)


@pytest.mark.parametrize(
    ("turn", "complaint"),
    [
        ("seven", "error: write the action as one JSON object."),
        ("[7]", "error: write the action as one JSON object."),
        ('{"number": NaN}', "error: write the action as one JSON object."),
        ("[" * 5000, "error: write the action as one JSON object."),
        ('{"number": ' + "[" * 5000, "error: write the action as one JSON object."),
        ('{"number": "x"}', "error: number: Input should be a valid integer"),
        ('{"nubmer": 7}', "error: number: Field required; nubmer: Extra inputs are not permitted"),
    ],
)
def test_an_invalid_action_is_answered_with_the_error(server: str, turn: str, complaint: str) -> None:
    heard = play(at(server, show="text", unreadable=-1.0), row(), [turn, '{"number": 7}'])
    text, reward, done = summary_of(heard[1])
    assert text.startswith(complaint) and (reward, done) == (-1.0, False)
    assert summary_of(heard[2]) == ("Right!", 1.0, True)


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ('```{"a": 1}```', '{"a": 1}'),
        ('```python\nx = {}\n```\nso\n```json\n{"a": 1}\n```\nyes', '{"a": 1}'),
        ('```{"a": 1}``` or ```{"a": 2}``` or ```three```', '{"a": 2}'),
        ('{"a": 1}', ""),
        ('```{"a": 1}', ""),
        ("```" * 200_000, ""),
        ("```{}" + " " * 400_000, ""),
        ("```{" + ("}" + " " * 20) * 20_000, ""),
    ],
)
def test_the_last_fence_with_an_object_is_found_in_one_pass(text: str, body: str) -> None:
    """A quadratic search would take minutes over these."""
    assert _last_fenced_object(text) == body


def test_what_the_server_refuses_fails_the_episode(server: str) -> None:
    with pytest.raises(OpenEnvError, match="EXECUTION_ERROR: negative"):
        play(at(server), row(), ['{"number": -1}'])
    with pytest.raises(OpenEnvError, match="no field 'txt'; its fields are text, span"):
        play(at(server, show="txt"), row(), [])


def test_more_episodes_than_sessions(server: str) -> None:
    async def three() -> None:
        worlds = [load_environment(at(server))() for _ in range(3)]
        try:
            for world in worlds:
                await world.reset(row())
        finally:
            for world in worlds:
                await world.close()

    with pytest.raises(OpenEnvError, match="CAPACITY_REACHED"):
        asyncio.run(three())


Handler = Callable[[web.WebSocketResponse], Awaitable[None]]


def against(handler: Handler, **options: Any) -> None:
    """One reset against a server that does as it likes."""

    async def run() -> None:
        async def serve(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.receive()
            await handler(socket)
            return socket

        app = web.Application()
        app.router.add_get("/ws", serve)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            await talk(at(f"http://127.0.0.1:{port}", **options), row(), [])
        finally:
            await runner.cleanup()

    asyncio.run(run())


async def hangs(socket: web.WebSocketResponse) -> None:
    await socket.receive()  # until the other side has gone


async def leaves(socket: web.WebSocketResponse) -> None:
    await socket.close()


async def babbles(socket: web.WebSocketResponse) -> None:
    await socket.send_str('{"type": 3}')


async def floods(socket: web.WebSocketResponse) -> None:
    await socket.send_str("x" * (5 << 20))


@pytest.mark.parametrize(
    ("handler", "complaint"),
    [
        (hangs, "no answer to reset within 0.2 s"),
        (leaves, r"the connection was closed \(CLOS"),
        (babbles, "reset failed"),
        (floods, r"the connection was closed|reset failed"),
    ],
)
def test_a_server_that_misbehaves(handler: Handler, complaint: str) -> None:
    with pytest.raises(OpenEnvError, match=complaint):
        against(handler, timeout=0.2 if handler is hangs else 10.0)


def test_nobody_there() -> None:
    with pytest.raises(OpenEnvError, match="cannot connect"):
        play(at("http://127.0.0.1:9"), row(), [])
    with pytest.raises(ConfigError, match="must begin with http"):
        load_environment(at("localhost:8000"))
