"""Steps that are issued from a recording give the same as the model's own code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from asyncrl.engines.torch import recorded, step_layout
from asyncrl.engines.torch.engine import TorchEngine
from asyncrl.types import PolicyVersion
from tests.fakes import weights as fake_weights

from .tiny import ask, assert_logprobs, prompt, serve, tiny
from .tiny_images import tiny_vision

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RECORD_AFTER", 2)


def made(engine: TorchEngine) -> dict[recorded.StepKind, bool]:
    """The kinds of steps so far, and whether they are recorded."""
    steps = engine._batcher._recorded_step._step_functions
    return {kind: isinstance(step, torch.jit.ScriptModule) for kind, step in steps.items()}


@pytest.mark.parametrize(
    ("family", "changes"), [("Qwen3", {}), ("Qwen3Moe", {}), ("Llama", {"pad_token_id": 2})]
)
async def test_a_recording_serves_other_batches(
    family: str, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step_layout, "_WORTHWHILE_CELLS", 32)
    monkeypatch.setattr(step_layout, "_SHORT_LENGTH", 8)

    async def stream(engine: TorchEngine, index: int) -> None:
        ids = prompt(1 + 5 * index % 30, index)
        for turn in range(2):
            request = ask(ids, 4 + index % 7, str(index), 100 * index + turn, temperature=0.9)
            generation = await engine.generate(request)
            assert_logprobs(reference, request, generation)
            ids += generation.ids + prompt(1 + index % 4, turn)

    reference = tiny(family, **changes)
    engine = serve(tiny(family, **changes), slots=7, budget=24)
    move = Mock(wraps=engine._batcher.cache.move_slots)
    monkeypatch.setattr(engine._batcher.cache, "move_slots", move)
    await asyncio.wait_for(asyncio.gather(*(stream(engine, index) for index in range(9))), 120)
    request = ask(prompt(9), 8, engine._batcher.slots.every_slot[-1].session or "")
    assert_logprobs(reference, request, await engine.generate(request))
    kinds = made(engine)
    assert len(kinds) == 5 and all(kinds.values()), kinds  # 0, 1 or 4 groups decode, with prompts or not
    assert move.call_count > 3
    await engine.close()


async def test_a_recording_made_with_text_serves_turns_with_images(tmp_path: Path):
    vision = tiny_vision("qwen3_vl", tmp_path)
    engine = vision.serve(slots=2, budget=24)
    text_request = vision.ask(prompt(9), 8, "text")
    vision.assert_logprobs(text_request, await engine.generate(text_request))
    assert made(engine)[recorded.StepKind(1, 1, False)]

    picture = vision.picture(4, 7)
    requests = [
        vision.ask(prompt(30) + picture + prompt(2), 9, "picture"),
        vision.ask(prompt(3, seed=1), 6, "text"),
        vision.ask(prompt(30) + picture + prompt(2), 9, "the same picture", key=1),
    ]
    for request, generation in zip(
        requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
    ):
        vision.assert_logprobs(request, generation)
    await engine.close()


async def test_a_recording_uses_the_weights_of_the_day(tmp_path: Path):
    new = tiny(seed=1)
    engine = serve()
    await engine.generate(ask(prompt(5), 8))
    assert any(made(engine).values())
    await engine.load(fake_weights.publish(dict(new.named_parameters()), tmp_path, PolicyVersion(1, 3)))
    request = ask(prompt(5), 8, "new")
    assert_logprobs(new, request, await engine.generate(request))
    await engine.close()


async def test_a_model_whose_code_looks_at_values_is_played_from_its_code(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    model = tiny()
    model.model.norm.register_forward_hook(lambda _module, _args, out: out * 2 if out.any() else out)
    request = ask(prompt(5), 8)
    engine = serve(model)
    await engine.generate(request)
    assert made(engine) and not any(made(engine).values())
    assert "cannot record the engine's steps" in caplog.text
    await engine.close()


def test_steps_on_a_gpu_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any device but a CPU."""
    recording = Mock()
    monkeypatch.setattr(recorded, "_record_step", recording)
    cache: Any = SimpleNamespace(ids=torch.empty(1, device="meta"))
    steps = recorded.RecordedStep(cache)
    kind = recorded.StepKind(groups=0, decoding=0, any_greedy=False)
    steps._step_functions[kind] = lambda *tensors: torch.tensor([1])
    layout = SimpleNamespace(groups=(), decoding_groups=0, cells=None, positions=None)
    params = SimpleNamespace(seed=None, temperature=None, greedy=None, any_greedy=False)
    plan: Any = SimpleNamespace(
        layout=layout, params=params, logit_indices=None, is_live=None, stops=None, limits=None, slots=(4, 5)
    )
    assert [steps(plan) for _ in range(2 * recorded.RECORD_AFTER)] == [[5]] * (2 * recorded.RECORD_AFTER)
    recording.assert_not_called()
