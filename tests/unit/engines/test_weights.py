"""Weight swaps of the embedded engine: in mid-generation, tied, not finite; refused: tests/sglang."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from asyncrl.errors import EngineError
from asyncrl.types import Generation, PolicyVersion, StopReason, VersionSpan
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsRef
from asyncrl.weights.names import file_pieces
from tests.fakes import weights as fake_weights

from .tiny import FAMILIES, MIXTURES, ROUNDING, ask, assert_logprobs, generated, prompt, serve, tiny


def publish(model: PreTrainedModel, directory: Path, version: int) -> WeightsRef:
    parameters = dict(model.named_parameters())
    tensors = {piece.name: piece.view_in(parameters[piece.parameter]) for piece in file_pieces(model)}
    return fake_weights.publish(tensors, directory, PolicyVersion(0, version))


@torch.no_grad()
def mixed_logprobs(
    old: PreTrainedModel, new: PreTrainedModel, ids: tuple[int, ...], split: int
) -> torch.Tensor:
    """Log-probs of ids[split + 1:] when `old` wrote the KV of ids[:split] and `new` goes on."""
    cache = DynamicCache(config=old.config)
    old(torch.tensor([ids[:split]]), past_key_values=cache, use_cache=True)
    logits = new(torch.tensor([ids[split:-1]]), past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[split + 1 :])[:, None])[:, 0]


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES, "Qwen3Next"])
async def test_weights_swap_between_two_tokens(family: str, tmp_path: Path):
    old = tiny(family)
    new = tiny(family, seed=1)
    ref = publish(new, tmp_path, 3)
    engine = serve(tiny(family), stepwise=True)
    request = ask(prompt(8), 80)
    task = asyncio.create_task(engine.generate(request))
    await generated(engine, 5)
    assert await engine.load(ref) == disk.read_manifest(ref)
    assert engine.version == 3
    generation = await task
    (_, cut, *first), (start, end, *second) = map(tuple_of, generation.spans)
    assert 5 <= cut == start < end == 80
    assert first == [0, 0] and second == [3, 0]  # version, kv_version
    ids = request.ids + generation.ids
    before = Generation(generation.ids[:cut], generation.logprobs[:cut], (), StopReason.ABORT)
    assert_logprobs(old, request, before)
    # The last token sampled by the old weights has no KV yet: the new weights write it.
    expected = mixed_logprobs(old, new, ids, len(request.ids) + cut - 1)
    torch.testing.assert_close(torch.tensor(generation.logprobs[cut:]), expected, **ROUNDING)
    next_turn = await engine.generate(ask((*ids, 1), 3))
    assert next_turn.spans == (VersionSpan(0, 3, 3, 0),)
    engine.release("s")
    fresh = ask((*ids, 1), 3)
    generation = await engine.generate(fresh)
    assert generation.spans == (VersionSpan(0, 3, 3, 3),)
    assert_logprobs(new, fresh, generation)
    await engine.close()


def tuple_of(span: VersionSpan) -> tuple[int, int, int, int]:
    return span.start, span.end, span.version, span.kv_version


@pytest.mark.parametrize("both", [False, True])
async def test_tied_weights_load_under_one_name_or_both(tmp_path: Path, both: bool):
    new = tiny(seed=1, tie_word_embeddings=True)
    tensors = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    assert "lm_head.weight" in tensors
    if not both:
        del tensors["lm_head.weight"]
    ref = fake_weights.publish(tensors, tmp_path, PolicyVersion(0, 1))
    engine = serve(tiny(tie_word_embeddings=True))
    request = ask(prompt(5))
    await engine.load(ref)
    assert_logprobs(new, request, await engine.generate(request))
    await engine.close()


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3Next"])
async def test_not_finite_weights_fail_their_requests_and_leave_no_trace(family: str, tmp_path: Path):
    good = publish(tiny(family), tmp_path, 2)
    poisoned = tiny(family)
    torch.nn.init.constant_(poisoned.get_input_embeddings().weight, torch.nan)
    nan = publish(poisoned, tmp_path, 1)
    engine = serve(tiny(family), slots=4, stepwise=True)
    request = ask(prompt(5), 80)
    lengths = enumerate((80, 1, 80))  # the row in the middle sits out when the weights go bad
    other_turns = [asyncio.create_task(engine.generate(ask(prompt(4), n, str(i)))) for i, n in lengths]
    await other_turns.pop(1)
    await generated(engine, 7)
    await engine.load(nan)
    for outcome in await asyncio.gather(*other_turns, engine.generate(request), return_exceptions=True):
        assert isinstance(outcome, EngineError) and "not finite" in str(outcome)
    await engine.load(good)
    requests = [ask(prompt(6, i), 80, str(i)) for i in range(3)]
    for request, generation in zip(
        requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
    ):
        assert_logprobs(tiny(family), request, generation)
    await engine.close()
