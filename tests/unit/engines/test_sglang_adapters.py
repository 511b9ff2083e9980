"""Adapters on servers: their names, what a load leaves, when old ones go, and who is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from asyncrl.config import AgentConfig, RunConfig, ScorerConfig
from asyncrl.engines.base import EngineLost
from asyncrl.engines.sglang import adapters
from asyncrl.engines.sglang.adapters import AdapterLoader
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi, ServerInfo
from asyncrl.engines.sglang.server import _check_adapters
from asyncrl.errors import ConfigError
from asyncrl.types import PolicyVersion, StopReason, VersionSpan
from asyncrl.weights.manifest import AdapterSpec, WeightsError, WeightsRef
from asyncrl.weights.ranges import write_file
from tests.fakes.loop import settle
from tests.fakes.sglang import DONE, Script, event, scripted, sglang_config
from tests.fakes.weights import publish

from .tiny import ask

LENGTH = {"type": "length", "length": 0}
LAYER = "model.layers.0.q_proj"
SPEC = AdapterSpec(2, 4.0, (LAYER,))
CONFIG = sglang_config(32, lora_rank=2)
LENT = msgspec.structs.replace(CONFIG, scorers={"reference": ScorerConfig(urls=["engines"])})
OLDEST = CONFIG.buffer.usual_staleness


class Server:
    """Keeps adapters by name, with what was in their directories."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.adapters = dict[str, dict[str, torch.Tensor]]()
        self.path = Path()
        self.label = "default"
        self.unloaded = asyncio.Event()
        script.answers |= {
            "/v1/models": self._models,
            "/model_info": self._info,
            "/load_lora_adapter": self._load,
            "/unload_lora_adapter": self._unload,
            "/update_weights_from_disk": self._update,
            "/generate": self._generate,
        }
        script.says("/flush_cache", 200)

    async def _models(self, request: web.Request) -> web.Response:
        names = [
            {"id": "base", "parent": None},
            *({"id": adapter, "parent": "base"} for adapter in self.adapters),
        ]
        return web.json_response({"data": names})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": self.label})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.path = Path(body["lora_path"])
        assert json.loads((self.path / "adapter_config.json").read_text())["target_modules"] == [LAYER]
        self.adapters[body["lora_name"]] = load_file(self.path / "adapter_model.safetensors")
        return web.json_response({"success": True})

    async def _unload(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        self.unloaded.set()
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.Response:
        """Score ids; each has the log-prob that the numbers of the adapter say."""
        body = await request.json()
        tensor = next(iter(self.adapters[body["lora_path"]].values()))
        read = [[float(tensor.mean()), id, None] for id in body["input_ids"]]
        return web.json_response({"meta_info": {"input_token_logprobs": read}})

    async def _update(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["weight_version"]
        return web.json_response({"success": True})


@asynccontextmanager
async def loading(
    tmp_path: Path, based: bool = True, config: RunConfig = CONFIG
) -> AsyncIterator[tuple[Server, AdapterLoader]]:
    async with asyncio.timeout(60), scripted() as script:
        server = Server(script)
        loader = AdapterLoader(ServerApi(script.url), config, tmp_path / "cache", "mine", based)
        try:
            yield server, loader
        finally:
            await loader.close()


def version(directory: Path, step: int, epoch: int = 1) -> WeightsRef:
    names = [f"base_model.model.{LAYER}.lora_{role}.weight" for role in "AB"]
    tensors = {name: torch.full((2, 2), float(step)) for name in names}
    return publish(tensors, directory, PolicyVersion(epoch, step), {"": SPEC})


async def test_a_version_is_loaded_under_a_name_of_its_own_and_its_files_go(tmp_path: Path) -> None:
    async with loading(tmp_path) as (server, loader):
        ref = version(tmp_path, 3)
        manifest = await loader.load(ref)
        assert manifest.adapters == {"": SPEC} and loader.loaded == ref
        assert [float(tensor.mean()) for tensor in server.adapters["e1-v3@mine"].values()] == [3.0, 3.0]
        assert not server.path.exists(), "the server would load it again for whoever names it"
        assert await loader.label() == "e1-v3"
        await loader.load(ref)  # whose answer was lost
        del server.adapters["e1-v3@mine"]
        assert await loader.label() == "no adapters from this run"
        server.label = "e9-v9"
        assert await loader.label() == "e9-v9"


async def test_what_is_no_version_of_adapters_or_is_refused_changes_nothing(tmp_path: Path) -> None:
    async with loading(tmp_path) as (server, loader):
        first = version(tmp_path, 0)
        await loader.load(first)
        whole_model = publish({"w": torch.ones(2)}, tmp_path / "whole", PolicyVersion(1, 1))
        with pytest.raises(WeightsError, match="e1-v1 does not contain adapters"):
            await loader.load(whole_model)
        refusal = b'{"success": false, "error_message": "rank 64 is incompatible"}'
        server.script.says("/load_lora_adapter", 400, refusal)
        with pytest.raises(WeightsError, match="rank 64 is incompatible"):
            await loader.load(version(tmp_path, 1))
        assert loader.loaded == first and not loader.broken and list(server.adapters) == ["e1-v0@mine"]
        assert not list((tmp_path / "cache").iterdir())


async def test_a_cancelled_load_leaves_no_files_and_nobody_who_writes_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    writing = asyncio.Event()
    go_on = threading.Event()
    write = write_file

    def slowly(*arguments: Any) -> None:
        loop.call_soon_threadsafe(writing.set)
        go_on.wait(30)
        write(*arguments)

    monkeypatch.setattr(adapters, "write_file", slowly)
    async with loading(tmp_path) as (server, loader):
        load = asyncio.create_task(loader.load(version(tmp_path, 1)))
        await writing.wait()
        load.cancel()
        await settle()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert not list((tmp_path / "cache").iterdir()) and not server.adapters


async def test_outdated_adapters_and_those_of_earlier_supervisors_are_unloaded(tmp_path: Path) -> None:
    async with loading(tmp_path) as (server, loader):
        server.adapters |= {"e1-v0@another": {}, "of somebody else": {}}
        for step in range(OLDEST + 3):
            await loader.load(version(tmp_path, step))
        assert loader._unload_task is not None
        await loader._unload_task
        expected_adapters = {f"e1-v{step}@mine" for step in range(1, OLDEST + 3)}
        assert (
            server.adapters.keys() == expected_adapters | {"of somebody else"}
            and len(expected_adapters) == CONFIG.adapters_held
        )
        for step in (1, 2):  # of another epoch nothing is in use once it was told of
            await loader.load(version(tmp_path, step, epoch=2))
        await loader._unload_task
        assert server.adapters.keys() == {"e2-v1@mine", "e2-v2@mine", "of somebody else"}


async def test_adapters_that_were_not_reported_may_be_in_use(tmp_path: Path) -> None:
    """Supervisors skip versions: requests name the one before until they hear of the new one."""
    async with loading(tmp_path) as (server, loader):
        for step in (0, OLDEST, 4 * OLDEST):
            await loader.load(version(tmp_path, step))
        assert loader._unload_task is not None
        await loader._unload_task
        assert {f"e1-v{OLDEST}@mine", f"e1-v{4 * OLDEST}@mine"} <= server.adapters.keys()


async def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with loading(tmp_path) as (_, loader):

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("asyncrl.engines.sglang.adapters.write_file", full)
        with pytest.raises(WeightsError, match="cannot copy"):
            await loader.load(version(tmp_path, 0))
        assert not [*(tmp_path / "cache").iterdir()]


async def test_a_server_with_other_weights_loads_those_of_the_model_first(tmp_path: Path) -> None:
    async with loading(tmp_path, based=False) as (server, loader):
        server.label = "e1-v7"  # of merged weights
        for step in range(2):
            await loader.load(version(tmp_path, step))
        paths = [path for path, _, _ in server.script.requests if "/update" in path or "load_lora" in path]
        assert paths == ["/update_weights_from_disk", *["/load_lora_adapter"] * 2]
        assert server.label == "default" and await loader.label() == "e1-v1"


async def test_an_adapter_that_a_server_refuses_after_it_woke_says_nothing_of_its_memory(
    tmp_path: Path,
) -> None:
    """It is awake, with the base alone, and tries again or sleeps as any other."""
    async with loading(tmp_path) as (server, loader):
        for path in ("pause_generation", "release_memory_occupation", "resume_memory_occupation"):
            server.script.says(f"/{path}", 200, b"{}")
        server.script.says("/continue_generation", 200, b"{}")
        await loader.sleep()
        answer = server.script.answers["/load_lora_adapter"]
        server.script.says("/load_lora_adapter", 400, b'{"success": false, "error_message": "no room"}')
        with pytest.raises(WeightsError, match="no room"):
            await loader.load(version(tmp_path, 0))
        assert not loader.sleeping.asleep and not loader.sleeping.unknown_reason
        server.script.answers["/load_lora_adapter"] = answer
        await loader.load(version(tmp_path, 1))
        paths = [path for path, _, _ in server.script.requests if "/update" in path]
        assert len(paths) == 1 and list(server.adapters) == ["e1-v1@mine"]


@asynccontextmanager
async def connected(config: RunConfig = CONFIG) -> AsyncIterator[tuple[Script, SGLangClient]]:
    async with asyncio.timeout(60), scripted() as script:
        client = SGLangClient(ServerApi(script.url), config, vocabulary=64, salt="mine")
        client.mark_version(PolicyVersion(1, 7))
        try:
            yield script, client
        finally:
            await client.close()


async def test_a_request_names_its_adapter_and_is_of_exactly_that_version() -> None:
    async with connected() as (script, client):
        script.streams(event([5], 1, "default"), event([6], 2, "default", LENGTH), DONE)
        generation = await client.generate(ask((1, 2), 2))
        assert generation.spans == (VersionSpan(0, 2, 7, 7),)
        [(_, body, _)] = script.requests
        assert body["lora_path"] == "e1-v7@mine" and "cache_salt" not in body


async def test_the_base_reads_turns_beside_adapters_under_one_key_of_the_cache() -> None:
    """And counts as one more of those that a server uses at once."""
    read = {"prompt_tokens": 3, "input_token_logprobs": [[None, 2, None], [-0.5, 3, None]]}
    async with connected(LENT) as (script, client):
        script.says("/generate", 200, msgspec.json.encode({"meta_info": read}))
        for step in (8, 9):
            await client.read((1, 2, 3), 1, 0)
            client.mark_version(PolicyVersion(1, step))
        assert [(body["cache_salt"], "lora_path" in body) for _, body, _ in script.requests] == [
            ("mine", False)
        ] * 2
    assert LENT.adapters_held == CONFIG.adapters_held + 1
    info = msgspec.convert(server_info(max_loaded_loras=None), ServerInfo)
    with pytest.raises(ConfigError, match="start it with --max-loras-per-batch 7"):
        _check_adapters(LENT, "http://s", info)


REFUSED = b'data: {"error": {"message": "Got LoRA adapter that has never been loaded: x", "code": 400}}\n\n'


@pytest.mark.parametrize(
    ("part", "why"),
    [(event([5], 1, "e1-v7"), "which this run never sent"), (REFUSED, "never been loaded")],
    ids=["another program loaded weights", "the server was restarted"],
)
async def test_a_server_without_the_adapter_has_lost_the_turn(part: bytes, why: str) -> None:
    async with connected() as (script, client):
        script.streams(part, DONE)
        with pytest.raises(EngineLost, match=why) as lost:
            await client.generate(ask((1, 2), 2))
        assert lost.value.partial.ids == ()


async def test_a_turn_with_an_outdated_adapter_ends_where_it_is() -> None:
    async with connected() as (script, client):
        heard = asyncio.Event()
        never = asyncio.Event()

        async def on_part(sampled: object) -> None:
            heard.set()

        script.streams(event([5], 1, "default"), then=never)
        request = msgspec.structs.replace(ask((1, 2), 9), part_seconds=0.0, on_part=on_part)
        turn = asyncio.create_task(client.generate(request))
        await heard.wait()
        client.mark_version(PolicyVersion(1, 7 + OLDEST))
        [call] = client._open_calls
        assert call.when() is None
        client.mark_version(PolicyVersion(1, 8 + OLDEST))
        generation = await turn
        assert generation.ids == (5,) and generation.stop is StopReason.ABORT
        assert generation.spans == (VersionSpan(0, 1, 7, 7),)


TWO = msgspec.structs.replace(
    CONFIG,
    model=msgspec.structs.replace(CONFIG.model, lora_rank=0),
    agents={"planner": AgentConfig(2), "coder": AgentConfig(4)},
)


async def test_a_version_of_several_agents_is_an_adapter_each(tmp_path: Path) -> None:
    specs = {
        agent: AdapterSpec(agent_config.lora_rank, 4.0, (LAYER,))
        for agent, agent_config in TWO.agents.items()
    }
    names = {
        f"base_model.model.{LAYER}.lora_{role}.{agent}.weight": agent for role in "AB" for agent in specs
    }
    tensors = {name: torch.full((2, 2), float(len(agent))) for name, agent in names.items()}
    async with loading(tmp_path, config=TWO) as (server, loader):
        for step in range(OLDEST + 3):
            await loader.load(publish(tensors, tmp_path, PolicyVersion(1, step), specs))
        assert await loader.label() == f"e1-v{step}"
        assert loader._unload_task is not None
        await loader._unload_task
        expected_adapters = {f"e1-v{at}/{agent}@mine" for at in range(1, step + 1) for agent in specs}
        assert (
            server.adapters.keys() == expected_adapters and len(expected_adapters) + 1 == TWO.adapters_held
        ), "and the base"
        for name, files in server.adapters.items():
            assert files.keys() == {f"base_model.model.{LAYER}.lora_{role}.weight" for role in "AB"}
            assert {float(tensor.mean()) for tensor in files.values()} == {7.0 if "planner" in name else 5.0}
        assert await loader.score((1, 2, 3)) == (7.0, 7.0, 5.0, 5.0), "the probe is compared with each"
        del server.adapters[f"e1-v{step}/coder@mine"]
        assert await loader.label() == "no adapters from this run"


@pytest.mark.parametrize(("agent", "path"), [("coder", "e1-v7/coder@mine"), ("other", None)])
async def test_a_request_names_the_adapter_of_its_agent(agent: str, path: str | None) -> None:
    async with connected(TWO) as (script, client):
        script.streams(event([5], 1, "default"), event([6], 2, "default", LENGTH), DONE)
        request = msgspec.structs.replace(ask((1, 2), 2), agent=agent)
        assert (await client.generate(request)).spans == (VersionSpan(0, 2, 7, 7),)
        [(_, body, _)] = script.requests
        assert body.get("lora_path") == path


def server_info(**changes: object) -> dict[str, object]:
    room = {"max_loras_per_batch": 6, "max_loaded_loras": 7, "max_lora_rank": 2}
    return {"version": "0.5.23", "model_path": "m", "enable_lora": True} | room | changes


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"enable_lora": None}, "--enable-lora"),
        ({"dp_size": 2}, "--dp-size 1"),
        ({"max_lora_rank": 1}, "--max-lora-rank 2"),
        ({"lora_target_modules": ["q_proj", "o_proj"]}, "--lora-target-modules o_proj q_proj up_proj"),
        ({"max_loras_per_batch": 5}, "--max-loras-per-batch 6"),
        ({"max_loaded_loras": 6}, "--max-loaded-loras 7"),
    ],
)
def test_a_server_that_cannot_take_adapters_is_refused(changes: dict[str, object], needed: str) -> None:
    model = msgspec.structs.replace(CONFIG.model, lora_modules=["q_proj", "o_proj", "up_proj"])
    config = msgspec.structs.replace(CONFIG, model=model)

    def check(**changes: object) -> None:
        _check_adapters(config, "http://s", msgspec.convert(server_info(**changes), ServerInfo))

    check()
    check(max_loaded_loras=None, max_lora_rank=None)
    check(lora_target_modules=["all"])
    check(lora_target_modules=["down_proj", "gate_up_proj", "o_proj", "v_proj"])
    with pytest.raises(ConfigError, match=f"start it with {needed}, or set weights.adapters=false"):
        check(**changes)
