"""Agents with adapters of their own, served by one engine side by side."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from asyncrl.engines.torch import recorded, step_layout
from asyncrl.types import PolicyVersion
from asyncrl.weights.adapters import Adapters
from asyncrl.weights.manifest import WeightsError, WeightsRef
from tests.fakes.weights import publish

from .tiny import ask, assert_logprobs, generated, prompt, serve, tiny

pytestmark = pytest.mark.slow

WEIGHT_SCALES = {"Qwen2": 0.3, "Qwen3Next": 0.1}  # of adapters, by family
SIZES = {"planner": (3, 6.0), "coder": (2, 8.0)}


def published(
    folder: Path, version: int, sizes: dict[str, tuple[int, float]] = SIZES, family: str = "Qwen2"
) -> tuple[WeightsRef, dict[str, PreTrainedModel]]:
    """A version of such adapters, and of each agent the model with its adapter alone; 'other' has none."""
    both = tiny(family)
    adapters = Adapters(both, sizes)
    alone = {"other": tiny(family)} | {agent: tiny(family) for agent in sizes}
    draw = torch.Generator().manual_seed(version)
    tensors = {}
    with torch.no_grad():
        for piece in adapters.published:
            parameter = both.get_parameter(piece.parameter)
            weights = torch.randn(parameter.shape, generator=draw)
            tensors[piece.name] = WEIGHT_SCALES[family] * weights
        for agent, size in sizes.items():
            for piece in Adapters(alone[agent], {"": size}).published:
                name = piece.name.replace(".weight", f".{agent}.weight")
                alone[agent].get_parameter(piece.parameter).copy_(tensors[name])
    return publish(tensors, folder, PolicyVersion(1, version), adapters.specs), alone


@pytest.mark.parametrize("family", WEIGHT_SCALES)
@pytest.mark.parametrize("after", [999, pytest.param(2, marks=pytest.mark.full)], ids=["code", "recorded"])
async def test_rows_of_several_agents_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, after: int
) -> None:
    """From a recording, too; and slots that move take their agents along. What agents share in their prompts
    is computed for each, and a session that another agent goes on with, anew."""
    monkeypatch.setattr(recorded, "RECORD_AFTER", after)
    monkeypatch.setattr(step_layout, "_WORTHWHILE_CELLS", 32)
    monkeypatch.setattr(step_layout, "_SHORT_LENGTH", 8)
    engine = serve(tiny(family), slots=6, budget=64)
    same = prompt(40)
    await engine.generate(ask(same, 8))  # recorded without adapters

    async def turns(index: int, agent: str, alone: dict[str, PreTrainedModel]) -> None:
        ids = same + prompt(1 + index, index)
        for turn in range(2):
            request = replace(ask(ids, 4 + 3 * index % 7, f"{version}/{index}", turn), agent=agent)
            generation = await engine.generate(request)
            assert_logprobs(alone[agent], request, generation)
            ids += generation.ids + prompt(3, turn)
        request = replace(ask(ids, 4, f"{version}/{index}"), agent="coder")
        assert_logprobs(alone["coder"], request, await engine.generate(request))

    for version in (1, 2):
        ref, alone = published(tmp_path, version, family=family)
        manifest = await engine.load(ref)
        assert manifest.adapters.keys() == SIZES.keys()
        agents = ["planner", "other", "coder"] * 3
        await asyncio.gather(*(turns(index, agent, alone) for index, agent in enumerate(agents)))
        scored = await engine.score(same)
        row = torch.tensor([same])
        with torch.no_grad():
            tables = [alone[agent](row).logits[0, :-1].log_softmax(-1) for agent in SIZES]
        wanted = torch.cat([table.gather(1, row[0, 1:, None])[:, 0] for table in tables])
        assert torch.allclose(torch.tensor(scored), wanted, atol=2e-5)
        base = await engine.read(same, 7, 3)
        with torch.no_grad():
            table = alone["other"](row).logits[0, -8:-1].log_softmax(-1)
        id_logprobs, (top, ids) = table.gather(1, torch.tensor(same)[-7:, None]), table.topk(3)
        for packed_values, expected in ((base.logprobs, id_logprobs), (base.top, top)):
            assert np.allclose(np.frombuffer(packed_values, "<f4"), expected.flatten(), atol=2e-5)
        assert np.frombuffer(base.ids, "<i4").tolist() == ids.flatten().tolist()
    await engine.close()


async def test_no_agent_copies_the_prefix_of_another_after_a_sleep_that_the_first_adapters_end(
    tmp_path: Path,
) -> None:
    """The prompts are the same, and before the adapters arrive, so is their KV. The coder's request waits for
    the planner's when the engine wakes up."""
    engine = serve(slots=2, stepwise=True)
    requests = [replace(ask(prompt(40), 30, agent), agent=agent) for agent in SIZES]
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await generated(engine, 6)
    await engine.sleep()
    ref, alone = published(tmp_path, 1)
    await engine.load(ref)

    for request, generation in zip(requests, await asyncio.gather(*tasks), strict=True):
        early_span, late_span = generation.spans
        assert (early_span.version, late_span.version) == (0, 1)
        cut = late_span.start
        late_request = replace(request, ids=request.ids + generation.ids[:cut])
        late_part = replace(generation, ids=generation.ids[cut:], logprobs=generation.logprobs[cut:])
        assert_logprobs(alone[request.agent], late_request, late_part)
    await engine.close()


async def test_the_opponent_of_one_agent_is_the_model_without_adapters(tmp_path: Path) -> None:
    engine = serve(slots=2)
    ref, alone = published(tmp_path, 1, {"planner": (3, 6.0)})
    await engine.load(ref)
    for agent in alone:
        request = replace(ask(prompt(9), 4, agent), agent=agent)
        assert_logprobs(alone[agent], request, await engine.generate(request))
    await engine.close()


async def test_a_first_version_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    engine = serve(slots=1)
    specs = Adapters(tiny(), SIZES).specs
    whole_model = publish({"w": torch.ones(2)}, tmp_path, PolicyVersion(1, 1), specs)
    with pytest.raises(WeightsError, match="not match its adapters"):
        await engine.load(whole_model)
    request = replace(ask(prompt(9), 4), agent="planner")
    assert_logprobs(tiny(), request, await engine.generate(request))
    await engine.close()
