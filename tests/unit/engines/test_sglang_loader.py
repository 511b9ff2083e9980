"""What a loader does beside its server: files are prepared by one thread at a time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import WeightsConfig
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.errors import EngineError
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import WeightsRef
from tests.fakes.sglang import loader_of, scripted
from tests.fakes.weights import publish


class Server:
    """Takes what it is told to load."""

    url = "http://server"

    def __init__(self) -> None:
        self.label = "default"
        self.calls = list[str]()

    async def pause(self, mode: str) -> None:
        self.calls.append("pause")

    async def resume(self, seconds: float) -> None:
        self.calls.append("resume")

    async def update_from_disk(self, path: str, label: str, seconds: float) -> None:
        self.label = label

    async def weight_label(self) -> str:
        return self.label

    async def close(self) -> None: ...


async def test_a_load_that_was_given_up_is_out_of_the_way_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [publish({"w": torch.ones(2) * at}, tmp_path, PolicyVersion(0, at)) for at in range(2)]
    server = Server()
    inside = list[int]()
    concurrent_loads = list[int]()
    entered = threading.Event()
    go = threading.Event()
    loader = loader_of(server, WeightsConfig(), cache=tmp_path / "cache")  # type: ignore[arg-type]
    prepare = loader._verified_whole

    def slow(ref: WeightsRef) -> Any:
        inside.append(ref.version.step)
        concurrent_loads.append(len(inside))
        entered.set()
        go.wait(60)
        inside.remove(ref.version.step)
        return prepare(ref)

    monkeypatch.setattr(loader, "_verified_whole", slow)
    first = asyncio.create_task(loader.load(refs[0]))
    assert await asyncio.to_thread(entered.wait, 60)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(loader.load(refs[1]))
    await asyncio.sleep(0)
    assert inside == [0] and server.calls == []  # the thread goes on; the server was not touched
    go.set()
    assert (await second).version.step == 1
    assert concurrent_loads == [1, 1] and server.label == "e0-v1" and server.calls == ["pause", "resume"]


async def test_a_cache_is_deleted_when_no_load_that_was_given_up_fills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, entered, go, over = tmp_path / "cache", *(threading.Event() for _ in range(3))
    loader = loader_of(Server(), WeightsConfig(), cache=cache)  # type: ignore[arg-type]

    def fill(ref: WeightsRef) -> None:
        cache.mkdir()
        entered.set()
        go.wait(60)
        (cache / "late").mkdir(parents=True)
        over.set()

    monkeypatch.setattr(loader, "_verified_whole", fill)
    load = asyncio.create_task(loader.load(publish({"w": torch.ones(2)}, tmp_path, PolicyVersion(0, 0))))
    assert await asyncio.to_thread(entered.wait, 60)
    load.cancel()
    await asyncio.wait([load])
    closing = asyncio.create_task(loader.close())
    asyncio.get_running_loop().call_later(0.05, go.set)  # time to delete it, if nothing kept it from that
    await closing
    assert await asyncio.to_thread(over.wait, 60)
    assert not await asyncio.to_thread(cache.exists)


async def test_scores_are_computed_anew() -> None:
    async with scripted() as script:
        answer = b'{"meta_info":{"input_token_logprobs":[[null,4,null],[-1.5,5,null],[-2.5,6,null]]}}'
        script.says("/generate", 200, answer)
        loader = loader_of(ServerApi(script.url), WeightsConfig())
        assert await loader.score((4, 5, 6)) == (-1.5, -2.5)
        with pytest.raises(EngineError, match="did not score the token IDs"):
            await loader.score((4, 6, 5))
        salts = {body["cache_salt"] for _, body, _ in script.requests}
        assert len(salts) == 2 and "" not in salts
        await loader.close()
