"""The check of versions that are not the tested one, on a real server: taken for one of another version."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl.config import RunConfig
from asyncrl.engines.sglang import version_check
from asyncrl.engines.sglang.http import ADMIN_SECONDS, PauseMode, ServerApi
from asyncrl.engines.sglang.server import attach, look_at_server
from asyncrl.engines.sglang.version_check import OpenApi
from asyncrl.errors import ConfigError
from tests.fakes.sglang_openapi import OPENAPI
from tests.fakes.sglang_process import SGLangServer
from tests.sglang.conformance import in_use
from tests.sglang.conftest import Shared
from tests.sglang.test_traps import attached as attached_config


@pytest.fixture
def server(shared_server: Shared) -> SGLangServer:
    return shared_server("qwen2")


@pytest.fixture
def config(server: SGLangServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(version_check, "TESTED_VERSION", "0.0.1")
    return attached_config(server, server.model, tmp_path)


@pytest.mark.parametrize(
    ("mode", "transport"), [("in_place", "collective"), ("retract", "disk"), ("abort", "disk")]
)
async def test_a_server_of_another_version_that_does_what_the_run_needs_is_taken(
    server: SGLangServer,
    config: RunConfig,
    mode: PauseMode,
    transport: str,
    caplog: pytest.LogCaptureFixture,
):
    weights = replace(config.weights, mode=mode, transport=transport)
    config = replace(config, weights=weights)
    async with in_use(ServerApi(server.url)) as api:
        label = await api.weight_label()
        await look_at_server(config, server.url)

        attached_server = await attach(config, server.url, started_here=True)
        async with in_use(attached_server.api):
            assert await api.ready() and await api.weight_label() == label
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    (line,) = [line for line in lines if "the tested version is" in line]
    assert f"a request across a pause ({mode})" in line
    assert ("opening an update session" in line) == (transport == "collective")


async def test_what_it_lacks_is_named(
    server: SGLangServer, config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    needed = {"/generate": ("input_ids", "teleport"), "/no/such/route": ()}
    monkeypatch.setattr(version_check, "SCORE_ROUTES", version_check.SCORE_ROUTES | needed)
    with pytest.raises(ConfigError, match=r"it lacks /no/such/route; the tested version is 0\.0\.1"):
        await look_at_server(config, server.url)
    monkeypatch.setattr(version_check, "SAMPLE_ROUTES", version_check.SAMPLE_ROUTES | needed)
    with pytest.raises(ConfigError, match="it lacks teleport in /generate, /no/such/route"):
        await look_at_server(config, server.url)


async def test_the_fake_server_of_unit_tests_has_the_routes_of_a_real_one(server: SGLangServer) -> None:
    excerpt = msgspec.json.decode(msgspec.json.encode(OPENAPI), type=OpenApi)
    async with in_use(ServerApi(server.url)) as api:
        served = await api.get_struct("/openapi.json", OpenApi, ADMIN_SECONDS)

    for path, operations in excerpt.paths.items():
        assert operations == {method: served.paths[path][method] for method in operations}, path
    for name, schema in excerpt.components.schemas.items():
        assert schema.properties.keys() <= served.components.schemas[name].properties.keys(), name
