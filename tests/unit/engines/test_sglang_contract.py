"""Servers of other versions are taken by what they do, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from transformers import Qwen2Config

from asyncrl.config import RunConfig, parse
from asyncrl.engines.sglang import contract
from asyncrl.engines.sglang.contract import TESTED_VERSION, look_at_contract, needed_routes, try_contract
from asyncrl.engines.sglang.http import ServerApi, update_session
from asyncrl.engines.sglang.server import attach, look_at_server
from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import WeightsError
from tests.fakes.sglang import DONE, Script, event, scripted

OK = b'{"success":true,"message":"Success"}'
OPEN = b'{"success":false,"message":"a weight-update session is already open"}'
CHANGES = ("pause", "continue", "update", "flush", "begin", "end", "load", "generate")


def asked(script: Script) -> list[str]:
    return [path for path, _, _ in script.requests]


class NewerServer:
    """Answers as a server of SGLang 0.6.0 does, with log-probs of -id / 2, and remembers a label and a pause.

    `lacks`: a path, "FIELD in PATH" or "FIELD in the answer of PATH" that this server does not have.
    """

    def __init__(self, script: Script, config: RunConfig, *lacks: str, scorer: str = "") -> None:
        self.version = "0.6.0"
        self.label = "default"
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.logprob_factor = -0.5
        self._config = config
        self._scorer = scorer
        self._lacks = lacks
        self._script = script
        for path in ("/openapi.json", "/abort_request", *needed_routes(config, scorer)):
            if path not in lacks:
                script.answers[path] = self._answer

    def _openapi(self) -> dict[str, Any]:
        paths: dict[str, Any] = {}
        schemas: dict[str, Any] = {}
        for path, fields in needed_routes(self._config, self._scorer).items():
            if path in self._lacks:
                continue
            body = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{path[1:]}"}}}}
            paths[path] = {"post": {"requestBody": body} if fields else {"summary": "no body"}}
            properties = {
                field: {"type": "string"} for field in fields if f"{field} in {path}" not in self._lacks
            }
            schemas[path[1:]] = {"type": "object", "properties": properties}
        return {"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}}

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
            if f"{field} in the answer of {path}" not in self._lacks
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

        remaining_ids = range(2, contract.TRIAL_TOKENS + 1)
        finish = {"type": "length", "length": contract.TRIAL_TOKENS}
        await response.write(
            event(remaining_ids, contract.TRIAL_TOKENS, label=self.label, finish=finish) + DONE
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
        server = NewerServer(script, config)
        attached = await attach(config, script.url)
        await attached.api.close()
        assert server.resumed.is_set() and server.label == "default"
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING][-1:]
        assert f"{script.url} runs SGLang 0.6.0; tested is {TESTED_VERSION}. It does what this run ne" in line
        assert "a request across a pause (in_place), the label of the weights" in line


async def test_a_reward_server_of_another_version_is_asked_to_classify_alone(config: RunConfig) -> None:
    """It samples nothing: nobody pauses or relabels it."""
    async with scripted() as script:
        server = NewerServer(script, config, scorer="reward")
        api = ServerApi(script.url)
        await look_at_contract(config, api, server.version, "reward")
        await try_contract(config, api, server.version, "reward")
        await api.close()
    assert asked(script) == ["/openapi.json", "/server_info", "/model_info"]


async def test_the_tested_version_starts_without_a_line_or_a_trial(
    config: RunConfig, caplog: pytest.LogCaptureFixture
):
    async with scripted() as script:
        server = NewerServer(script, config)
        server.version = TESTED_VERSION
        attached = await attach(config, script.url)
        await attached.api.close()
        assert not [record for record in caplog.records if "tested" in record.getMessage()]
        assert {"/openapi.json", "/generate", "/pause_generation"}.isdisjoint(asked(script))


async def test_a_look_asks_a_server_in_use_without_changing_it(config: RunConfig):
    async with scripted() as script:
        NewerServer(script, config)
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
        "weight_version in the answer of /model_info",
        "max_req_input_len in the answer of /server_info",
    ],
)
async def test_a_server_that_lacks_a_route_or_a_field_is_refused_by_its_name(config: RunConfig, lacks: str):
    async with scripted() as script:
        NewerServer(script, config, lacks)
        with pytest.raises(ConfigError, match=f"SGLang 0.6.0, .*: it lacks {lacks}; tested is"):
            await look_at_server(config, script.url)


async def test_routes_are_needed_by_what_the_run_uses(config: RunConfig):
    """Version 0.5.20 has no sessions: without a process group nothing asks for them."""
    weights = msgspec.structs.replace(config.weights, transport="collective")
    broadcasting = msgspec.structs.replace(config, weights=weights)
    async with scripted() as script:
        NewerServer(script, config)
        await look_at_server(config, script.url)
        with pytest.raises(ConfigError, match=r"lacks /init_weights_update_group, /begin_weight_update"):
            await look_at_server(broadcasting, script.url)


async def test_a_server_without_a_list_of_routes_is_refused(config: RunConfig):
    async with scripted() as script:
        NewerServer(script, config)
        script.says("/openapi.json", 404, b'{"detail":"Not Found"}')
        with pytest.raises(ConfigError, match=r"its routes cannot be read .*/openapi.json answered 404"):
            await look_at_server(config, script.url)


async def test_a_step_that_fails_is_named(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contract, "TRIAL_SECONDS", 5.0)
    async with scripted() as script:
        server = NewerServer(script, config)
        script.says("/pause_generation", 400, b'{"error":{"message":"no such mode"}}')
        with pytest.raises(ConfigError, match=r"a request across a pause \(in_place\): .*no such mode"):
            await attach(config, script.url)

        server = NewerServer(script, config)
        server.logprob_factor = -3.0  # sampled at -0.5
        with pytest.raises(ConfigError, match=r"log-probs differ by 1\.2e\+02 nats"):
            await attach(config, script.url)

        server.logprob_factor = 0.5
        with pytest.raises(ConfigError, match=r"log-probs of a text: .*5.5 is not a valid log-prob"):
            await attach(config, script.url)

        server = NewerServer(script, config)
        script.says("/update_weight_version", 200, OK)  # and nothing changes
        with pytest.raises(ConfigError, match="the label 'broken' is read back as 'default'"):
            await attach(config, script.url)


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
