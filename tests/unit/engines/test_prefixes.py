"""The embedded engine computes the beginning of prompts once, and copies it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from asyncrl.engines.torch.engine import TorchEngine
from asyncrl.types import PolicyVersion, StopReason, VersionSpan
from tests.fakes import weights as fake_weights

from .tiny import FAMILIES, Forwarded, ask, assert_logprobs, generated, prompt, serve, tiny


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_groups_prompt_is_computed_once(family: str):
    model = tiny(family)
    forwarded = Forwarded(model)
    engine = serve(model)
    same = prompt(70)
    requests = [ask(same, 4, f"member {member}", member) for member in range(8)]
    for request, generation in zip(
        requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
    ):
        assert_logprobs(tiny(family), request, generation)
    # One prompt, the 6 ids beyond the last whole block of the other seven, 3 decoded ids of each; a slot
    # that is done sits out a step or two.
    assert 0 <= forwarded.tokens - (70 + 7 * 6 + 8 * 3) < 8
    before = forwarded.tokens
    block_sharer = ask(same[:40] + prompt(9, "other"), 4, "shares one block")
    assert_logprobs(tiny(family), block_sharer, await engine.generate(block_sharer))
    assert forwarded.tokens - before == (8 + 9) + 3
    await engine.close()


@pytest.mark.parametrize("version", [3, 0], ids=["newer", "of the same number"])
async def test_only_what_the_present_weights_computed_is_copied(tmp_path: Path, version: int):
    new = tiny(seed=1)
    ref = fake_weights.publish(dict(new.named_parameters()), tmp_path, PolicyVersion(1, version))
    engine = serve(tiny(), stepwise=True)
    same = prompt(40)
    first = asyncio.create_task(engine.generate(ask(same, 30, "first")))
    await generated(engine, 5)
    await engine.load(ref)
    second = ask(same, 6, "second")
    generation = await engine.generate(second)
    assert generation.spans == (VersionSpan(0, 6, version, version),)
    assert_logprobs(new, second, generation)
    assert {span.kv_version for span in (await first).spans} == {0}
    await engine.close()


@pytest.mark.parametrize(
    ("family", "seed"), [*(("Qwen2", seed) for seed in range(8)), ("Qwen3Next", 0), ("Qwen3Next", 1)]
)
async def test_requests_that_come_and_go_while_others_wait_for_their_prompts(family: str, seed: int):
    async def turns(engine: TorchEngine, index: int) -> None:
        stem = prompt(rng.choice((0, 32, 40, 64, 70)), rng.randrange(2))
        ids = stem + prompt(rng.randrange(1, 12), rng.randrange(3))
        for turn in range(rng.randrange(1, 3)):
            request = ask(ids, rng.randrange(1, 8), str(index), 10 * index + turn)
            task = asyncio.create_task(engine.generate(request))
            if rng.random() < 0.3:
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
                engine.release(str(index))
            generation = await task
            assert_logprobs(reference, request, generation)
            if generation.stop is StopReason.ABORT:
                break
            ids += generation.ids + prompt(2, turn)
        engine.release(str(index))

    rng = random.Random(seed)
    reference = tiny(family)
    engine = serve(tiny(family), slots=4, max_len=112, budget=24)
    await asyncio.wait_for(asyncio.gather(*(turns(engine, index) for index in range(16))), 60)
    await engine.close()
