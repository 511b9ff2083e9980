"""Servers of other versions are taken by what they do, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from transformers import Qwen2Config

from asyncrl.config import RunConfig, parse
from asyncrl.engines.base import EngineRefused
from asyncrl.engines.sglang import version_check
from asyncrl.engines.sglang.http import ServerApi, update_session
from asyncrl.engines.sglang.server import attach, look_at_server
from asyncrl.engines.sglang.version_check import TESTED_VERSION, BehaviourCheck, check_behaviour, check_routes
from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import WeightsError
from tests.fakes.sglang import DONE, Script, event, scripted
from tests.fakes.sglang_openapi import OPENAPI

OK = b'{"success":true,"message":"Success"}'
OPEN = b'{"success":false,"message":"a weight-update session is already open"}'
CHANGES = ("pause", "continue", "update", "flush", "begin", "end", "load", "generate")


def asked(script: Script) -> list[str]:
    return [path for path, _, _ in script.requests]


class NewerServer:
    """Answers as a server of SGLang 0.6.0 does that has the routes of 0.5.23, with log-probs of -id / 2, and
    remembers a label and a pause.

    `lacks`: a path, "FIELD in PATH" or "FIELD in the response from PATH" that this server does not have.
    """

    def __init__(self, script: Script, *lacks: str) -> None:
        self.version = "0.6.0"
        self.label = "default"
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.logprob_factor = -0.5
        self._lacks = lacks
        self._script = script
        for path in ("/openapi.json", *OPENAPI["paths"]):
            if path not in lacks:
                script.answers[path] = self._answer

    def _openapi(self) -> dict[str, Any]:
        openapi = deepcopy(OPENAPI)
        for lacking in self._lacks:
            field, _, path = lacking.rpartition(" in ")
            if not field:
                del openapi["paths"][path]
            elif not path.startswith("the response from "):
                media_types = openapi["paths"][path]["post"]["requestBody"]["content"]
                reference = media_types["application/json"]["schema"]["$ref"]
                del openapi["components"]["schemas"][reference.rpartition("/")[2]]["properties"][field]

        return openapi

    def _described(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "version": self.version,
            "model_path": "/elsewhere",
            "tp_size": 1,
            "dp_size": 1,
            "max_req_input_len": 4096,
            "architectures": ["Qwen2ForCausalLM"],
            "weight_version": self.label,
        }
        return {
            field: value
            for field, value in answer.items()
            if f"{field} in the response from {path}" not in self._lacks
        }

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = self._script.requests[-1][1]
        match request.path:
            case "/openapi.json":
                return web.json_response(self._openapi())
            case "/ready":
                return web.Response(status=200 if self.resumed.is_set() else 503)
            case "/pause_generation":
                self.resumed.clear()
            case "/continue_generation":
                self.resumed.set()
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/generate" if body.get("stream"):
                return await self._sample(request)
            case "/generate":
                scores = [[id * self.logprob_factor, id, None] for id in body["input_ids"]]
                return web.json_response({"meta_info": {"input_token_logprobs": scores}})
        return web.json_response(self._described(request.path))

    async def _sample(self, request: web.Request) -> web.StreamResponse:
        """Stream a token, and the others when the pause is over that comes meanwhile."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event([1], 1, label=self.label))
        while self.resumed.is_set():
            self._script.came.clear()
            await self._script.came.wait()
        await self.resumed.wait()

        remaining_ids = range(2, version_check.SAMPLED_TOKENS + 1)
        finish = {"type": "length", "length": version_check.SAMPLED_TOKENS}
        await response.write(
            event(remaining_ids, version_check.SAMPLED_TOKENS, label=self.label, finish=finish) + DONE
        )
        return response


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    Qwen2Config(vocab_size=64, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    return parse(
        {
            "name": "x",
            "model": {"path": str(tmp_path)},
            "data": {"train": "t.parquet"},
            "rollout": {"max_tokens": 256, "max_new_tokens": 64},
            "engine": {"name": "sglang"},
        }
    )


async def test_a_newer_version_that_does_what_the_run_needs_starts_with_one_line(
    config: RunConfig, caplog: pytest.LogCaptureFixture
):
    async with scripted() as script:
        server = NewerServer(script)
        attached = await attach(config, script.url)
        await attached.api.close()
        assert server.resumed.is_set() and server.label == "default"
        labels = [
            body["new_version"] for path, body, _ in script.requests if path == "/update_weight_version"
        ]
        assert labels == ["default"], "workers discard tokens of other labels"
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING][-1:]
        assert f"{script.url} runs SGLang 0.6.0 (the tested version is {TESTED_VERSION}) and" in line
        assert "sampling a request across a pause (in_place), relabeling the weights" in line


async def test_a_reward_server_of_another_version_is_asked_to_classify_alone(config: RunConfig) -> None:
    """It samples nothing: nobody pauses or relabels it."""
    async with scripted() as script:
        server = NewerServer(script, "/generate", "/pause_generation", "/update_weight_version")
        api = ServerApi(script.url)
        await check_routes(config, api, server.version, "reward")
        await check_behaviour(config, api, server.version, "reward")
        await api.close()
    assert asked(script) == ["/openapi.json", "/server_info", "/model_info"]


async def test_the_tested_version_starts_without_a_line_or_a_check(
    config: RunConfig, caplog: pytest.LogCaptureFixture
):
    async with scripted() as script:
        server = NewerServer(script)
        server.version = TESTED_VERSION
        attached = await attach(config, script.url)
        await attached.api.close()
        assert not [record for record in caplog.records if "tested" in record.getMessage()]
        assert {"/openapi.json", "/generate", "/pause_generation"}.isdisjoint(asked(script))


async def test_a_look_asks_a_server_in_use_without_changing_it(config: RunConfig):
    async with scripted() as script:
        NewerServer(script)
        await look_at_server(config, script.url)
        asked_paths = asked(script)
        assert "/openapi.json" in asked_paths
        assert not [path for path in asked_paths if path[1:].startswith(CHANGES)]


@pytest.mark.parametrize(
    "lacks",
    [
        "/pause_generation",
        "/update_weights_from_disk",
        "cache_salt in /generate",
        "weight_version in /update_weights_from_disk",
        "weight_version in the response from /model_info",
        "max_req_input_len in the response from /server_info",
    ],
)
async def test_a_server_that_lacks_a_route_or_a_field_is_refused_by_its_name(config: RunConfig, lacks: str):
    async with scripted() as script:
        NewerServer(script, lacks)
        with pytest.raises(ConfigError, match=f"SGLang 0.6.0, .*: it lacks {lacks}; the tested version is"):
            await look_at_server(config, script.url)


async def test_routes_are_needed_by_what_the_run_uses(config: RunConfig):
    """Nothing asks for sessions of updates without a process group."""
    weights = msgspec.structs.replace(config.weights, transport="collective")
    broadcasting = msgspec.structs.replace(config, weights=weights)
    async with scripted() as script:
        NewerServer(script, "/begin_weight_update", "/end_weight_update")
        await look_at_server(config, script.url)
        with pytest.raises(
            ConfigError, match=r"it lacks /begin_weight_update, /end_weight_update; the tested version"
        ):
            await look_at_server(broadcasting, script.url)


async def test_a_server_without_a_list_of_routes_is_refused(config: RunConfig):
    async with scripted() as script:
        NewerServer(script)
        script.says("/openapi.json", 404, b'{"detail":"Not Found"}')
        with pytest.raises(ConfigError, match=r"cannot read its routes .*/openapi.json returned 404"):
            await look_at_server(config, script.url)


async def test_a_step_that_fails_is_named(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(version_check, "STEP_SECONDS", 5.0)
    async with scripted() as script:
        server = NewerServer(script)
        script.says("/pause_generation", 400, b'{"error":{"message":"no such mode"}}')
        with pytest.raises(
            ConfigError, match=r"sampling a request across a pause \(in_place\) failed: .*no such mode"
        ):
            await attach(config, script.url)

        server = NewerServer(script)
        server.logprob_factor = -3.0  # sampled at -0.5
        with pytest.raises(ConfigError, match=r"log-probs differ by 1\.2e\+02 nats"):
            await attach(config, script.url)

        server.logprob_factor = 0.5
        with pytest.raises(ConfigError, match=r"scoring a text failed: .*5.5 is not a valid log-prob"):
            await attach(config, script.url)

        server = NewerServer(script)

        async def forget_label(request: web.Request) -> web.Response:
            server.label = ""
            return web.Response(body=OK)

        script.answers["/update_weight_version"] = forget_label
        with pytest.raises(ConfigError, match="the label 'default' was read back as ''"):
            await attach(config, script.url)


class SlowlyClosingServer(ServerApi):
    """A server whose streams take until `may_close` to close."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.closing = asyncio.Event()
        self.may_close = asyncio.Event()

    @asynccontextmanager
    async def generate(self, body: dict[str, Any], silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        async with super().generate(body, silence) as events:
            try:
                yield events
            finally:
                self.closing.set()
                await self.may_close.wait()


async def test_a_check_that_is_cancelled_while_its_own_request_ends_is_cancelled(config: RunConfig):
    """A cancellation of the request alone leaves the error of the pause."""
    async with asyncio.timeout(30), scripted() as script:
        NewerServer(script)
        script.says("/pause_generation", 400, b'{"error":{"message":"no such mode"}}')
        for is_cancelled, expected_error in ((True, asyncio.CancelledError), (False, EngineRefused)):
            server = SlowlyClosingServer(script.url)
            sampling = asyncio.create_task(BehaviourCheck(config, server).sample())
            await server.closing.wait()
            if is_cancelled:
                sampling.cancel()
            else:
                server.may_close.set()
            with pytest.raises(expected_error):
                await sampling
            await server.close()


async def test_a_session_is_closed_whatever_happens_in_it():
    async with scripted() as script:
        server = ServerApi(script.url)
        script.says("/begin_weight_update", 200, OK)
        script.says("/end_weight_update", 200, OK)
        async with update_session(server):
            assert asked(script) == ["/begin_weight_update"]
        assert asked(script)[1:] == ["/end_weight_update"]

        script.says("/end_weight_update", 400, OPEN)
        with pytest.raises(WeightsError, match="of the body"):
            async with update_session(server):
                raise WeightsError("of the body")
        assert asked(script)[3:] == ["/end_weight_update"]
        with pytest.raises(WeightsError, match="already open"):  # its own
            async with update_session(server):
                pass

        await server.close()
