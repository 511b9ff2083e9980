"""What a loader does beside its server: files are prepared by one thread at a time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.engines.sglang.loader import Loader
from asyncrl.weights.disk import publish
from asyncrl.weights.manifest import WeightsRef


class Server:
    """Takes what it is told to load."""

    url = "http://server"

    def __init__(self) -> None:
        self.label, self.calls = "default", list[str]()

    async def pause(self, mode: str) -> None:
        self.calls.append("pause")

    async def resume(self, seconds: float) -> None:
        self.calls.append("resume")

    async def update_from_disk(self, path: str, label: str, flush: bool, seconds: float) -> None:
        self.label = label

    async def weight_label(self) -> str:
        return self.label


def test_a_load_that_was_given_up_is_out_of_the_way_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [publish({"w": torch.ones(2) * at}, tmp_path, 0, at) for at in range(2)]
    server, inside, most = Server(), list[int](), list[int]()
    entered, go = threading.Event(), threading.Event()
    loader = Loader(server, "in_place", 60.0, cache=tmp_path / "cache")  # type: ignore[arg-type]
    prepare = loader._whole

    def slow(ref: WeightsRef) -> Any:
        inside.append(ref.version)
        most.append(len(inside))
        entered.set()
        go.wait(60)
        inside.remove(ref.version)
        return prepare(ref)

    monkeypatch.setattr(loader, "_whole", slow)

    async def main() -> None:
        first = asyncio.create_task(loader.load(refs[0]))
        assert await asyncio.to_thread(entered.wait, 60)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(loader.load(refs[1]))
        await asyncio.sleep(0)
        assert inside == [0] and server.calls == []  # the thread goes on; the server was not touched
        go.set()
        assert (await second).version == 1

    asyncio.run(main())
    assert most == [1, 1] and server.label == "e0-v1" and server.calls == ["pause", "resume"]
