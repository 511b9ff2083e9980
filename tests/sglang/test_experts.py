"""Mixtures of experts on real servers: they sample with the weights that the trainer publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.engines.base import Request
from asyncrl.types import Generation
from asyncrl.weights.collective import Sender
from tests.sglang.conformance import TOLERANCE, Served, Versions, ask, in_use, prompt, seen, under_way
from tests.sglang.conftest import Start
from tests.sglang.test_collective import BUCKET_BYTES, LONG, BroadcastServer, keeping, offer

pytestmark = pytest.mark.long


async def check(broadcast_server: BroadcastServer, versions: Versions, version: int) -> None:
    """Of this version, by what it samples and by how it scores a text; no other is as near."""
    await broadcast_server.check(versions, version)
    ids = prompt(40, "probe")
    scores = torch.tensor(await broadcast_server.loader.score(ids))
    gaps = [
        float((scores - torch.tensor(versions.score(candidate, ids))).abs().max()) for candidate in range(4)
    ]
    assert gaps[version] < TOLERANCE
    assert min(gap for candidate, gap in enumerate(gaps) if candidate != version) > 0.1


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
async def test_what_is_published_is_served(
    family: str,
    sglang_server: Start,
    tiny_models: dict[str, Path],
    versions_of: Callable[[str], Versions],
) -> None:
    """By files and by broadcast, under the names of single experts."""
    versions = versions_of(family)
    server = sglang_server(tiny_models[family])

    assert any(".experts.3." in name for name in versions.tensors(1))
    with closing(Sender("127.0.0.1", BUCKET_BYTES, LONG, torch.device("cpu"))) as sender:
        async with keeping(server) as broadcast_server:
            for version in (1, 2):
                await broadcast_server.load(versions.refs[version])
                await check(broadcast_server, versions, version)
            for version in (3, 1):
                await broadcast_server.load(offer(sender, versions, version))
                await check(broadcast_server, versions, version)
    server.kill()


@torch.no_grad()
def routes_of(path: Path, ids: tuple[int, ...]) -> np.ndarray:
    """What the routers of a model choose for all tokens but the last, [tokens, layers, k], sorted."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda module, args, output: seen.append(output[2]))
    model(torch.tensor([ids[:-1]]))
    return torch.stack(seen, 1).sort(-1).values.numpy()


def assert_routes(path: Path, request: Request, generation: Generation, first: int = 0) -> None:
    """From `first` on; where two experts are nearly equal, rounding decides."""
    ids = request.ids + generation.ids
    routes = generation.routes
    assert routes is not None and (routes.start, routes.end) == (request.routes_from, len(ids) - 1)
    experts = np.sort(np.frombuffer(routes.data, "<u2").reshape(routes.tokens, 2, 2), -1)
    wanted = routes_of(path, ids)[routes.start :]
    assert (experts == wanted)[max(0, first - routes.start) :].mean() > 0.95


async def test_routes_are_those_of_the_trainers_model(
    sglang_server: Start, tiny_models: dict[str, Path], versions_of: Callable[[str], Versions]
) -> None:
    """Of a first turn, of one that follows it, and of one that an update ends and a request continues."""
    versions = versions_of("qwen3_moe")
    server = sglang_server(tiny_models["qwen3_moe"], "--enable-return-routed-experts")
    served = Served(server.url, "abort", replay=True)
    async with asyncio.timeout(4 * LONG), in_use(served) as engine:
        await engine.load(versions.refs[0])
        first_request = replace(ask(prompt(30), 20), routes_from=0)
        first = await engine.generate(first_request)
        assert_routes(versions.paths[0], first_request, first)
        assert first.routes is not None
        second_request = replace(
            ask(first_request.ids + first.ids + prompt(5), 12), routes_from=first.routes.end
        )
        assert_routes(versions.paths[0], second_request, await engine.generate(second_request))
        cut = replace(ask(prompt(40, "cut"), 900), routes_from=0)
        (task,) = await under_way(engine, cut)
        await engine.load(versions.refs[1])
        generation = await task
        assert seen(generation) == [0, 1]
        assert_routes(versions.paths[1], cut, generation, first=len(cut.ids) + generation.spans[0].end)
    server.kill()
