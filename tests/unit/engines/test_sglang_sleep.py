"""What a loader asks of a server that sleeps and wakes, and what it makes of answers that do not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web
from msgspec.structs import replace

from asyncrl.config import WeightsConfig
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.loader import ServerLoader
from asyncrl.errors import EngineError
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import WeightsError, WeightsRef
from tests.fakes.sglang import Script, loader_of, scripted
from tests.fakes.weights import publish

PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
DISK = "/update_weights_from_disk"
RELEASE = "/release_memory_occupation"
RESUME = "/resume_memory_occupation"


@asynccontextmanager
async def loading(tmp_path: Path) -> AsyncIterator[tuple[Script, ServerLoader, WeightsRef]]:
    """A server that answers, its loader, and a version for it."""
    async with asyncio.timeout(60), scripted() as script:
        for path in (PAUSE, CONTINUE, RELEASE, RESUME, DISK, "/flush_cache"):
            script.says(path, 200, b"{}")
        script.says("/model_info", 200, b'{"model_path":"m","weight_version":"e0-v1"}')
        loader = loader_of(ServerApi(script.url), WeightsConfig(mode="retract"))
        yield script, loader, publish({"w": torch.ones(2)}, tmp_path, PolicyVersion(0, 1))
        await loader.close()


def changes(script: Script) -> list[str]:
    """What was changed, in the order in which it was asked for since the last look."""
    commands = [(path, body) for path, body, _ in script.requests if path != "/model_info"]
    script.requests = []
    return [path + (f" {' '.join(body['tags'])}" if "tags" in body else "") for path, body in commands]


async def test_memory_is_given_up_once_and_taken_again_around_the_load(tmp_path: Path) -> None:
    async with loading(tmp_path) as (script, loader, ref):
        await loader.sleep()
        await loader.sleep()
        assert changes(script) == [PAUSE, f"{RELEASE} kv_cache weights"]
        await loader.load(ref)
        assert changes(script) == [f"{RESUME} weights", DISK, f"{RESUME} kv_cache", CONTINUE]
        await loader.load(ref)  # awake again
        assert changes(script) == [PAUSE, DISK, "/flush_cache", CONTINUE]


async def test_a_version_that_cannot_be_read_wakes_nothing(tmp_path: Path) -> None:
    async with loading(tmp_path) as (script, loader, ref):
        await loader.sleep()
        changes(script)
        with pytest.raises(WeightsError):
            await loader.load(replace(ref, path="/nowhere"))
        assert loader.sleeping.asleep and not loader.sleeping.unknown_reason and changes(script) == []


async def test_a_wake_that_is_cancelled_is_not_finished(tmp_path: Path) -> None:
    async with loading(tmp_path) as (script, loader, ref):
        await loader.sleep()
        loads = asyncio.Event()

        async def hang(_: web.Request) -> web.Response:
            loads.set()
            await asyncio.Event().wait()
            raise AssertionError

        script.answers[DISK] = hang
        load = asyncio.create_task(loader.load(ref))
        await loads.wait()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert "waking did not finish" in loader.sleeping.unknown_reason


@pytest.mark.parametrize("path", [PAUSE, RELEASE])
async def test_after_an_answer_that_was_lost_nobody_knows_what_a_server_holds(
    tmp_path: Path, path: str
) -> None:
    async with loading(tmp_path) as (script, loader, _):
        script.says(path, 500)
        with pytest.raises(EngineError):
            await loader.sleep()
        assert "so the server's state is unknown" in loader.sleeping.unknown_reason


@pytest.mark.parametrize("path", [RESUME, DISK, CONTINUE])
async def test_a_server_whose_wake_fails_is_left_alone(tmp_path: Path, path: str) -> None:
    """A second release, or a second return, would end it; its supervisor does that anyway."""
    async with loading(tmp_path) as (script, loader, ref):
        await loader.sleep()
        script.says(path, 500)
        with pytest.raises(WeightsError):
            await loader.load(ref)
        assert (
            changes(script)[-1].startswith(path) and "waking did not finish" in loader.sleeping.unknown_reason
        )
