"""Mixtures of experts on real servers: they sample with the weights that the trainer publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from asyncrl.weights.collective import Sender
from tests.sglang.conformance import TOLERANCE, Versions, prompt
from tests.sglang.conftest import Start
from tests.sglang.test_collective import BUCKET_BYTES, LONG, BroadcastServer, keeping, offer

pytestmark = pytest.mark.long


async def check(keeper: BroadcastServer, versions: Versions, version: int) -> None:
    """Of this version, by what it samples and by how it scores a text; no other is as near."""
    await keeper.check(versions, version)
    ids = prompt(40, "probe")
    found = torch.tensor(await keeper.loader.score(ids))
    gaps = [float((found - torch.tensor(versions.score(each, ids))).abs().max()) for each in range(4)]
    assert gaps[version] < TOLERANCE
    assert min(gap for each, gap in enumerate(gaps) if each != version) > 0.1


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_what_is_published_is_served(
    family: str,
    sglang_server: Start,
    tiny_models: dict[str, Path],
    versions_of: Callable[[str], Versions],
) -> None:
    """By files and by broadcast, under the names of single experts."""
    versions, server = versions_of(family), sglang_server(tiny_models[family])

    async def main() -> None:
        with closing(Sender("127.0.0.1", BUCKET_BYTES, LONG, torch.device("cpu"))) as sender:
            async with keeping(server) as keeper:
                for version in (1, 2):
                    await keeper.load(versions.refs[version])
                    await check(keeper, versions, version)
                for version in (3, 1):
                    await keeper.load(offer(sender, versions, version))
                    await check(keeper, versions, version)

    assert any(".experts.3." in name for name in versions.tensors(1))
    asyncio.run(main())
    server.kill()
