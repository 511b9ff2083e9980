"""Layers with a state, windows, chunks, sinks and caps in the embedded engine, against full forwards."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asyncrl.engines.torch import recorded
from asyncrl.engines.torch.check import slot_sizes
from asyncrl.engines.torch.engine import TorchEngine

from .tiny import (
    ROUNDING,
    SCORINGS,
    STATES,
    Forwarded,
    ask,
    assert_logprobs,
    generated,
    prompt,
    serve,
    tiny,
)


@pytest.mark.parametrize("family", [*STATES, *SCORINGS])
async def test_turns_of_a_group_that_go_on_and_are_rewritten(family: str, monkeypatch: pytest.MonkeyPatch):
    """By the model's code and, after a few steps, from recordings."""
    monkeypatch.setattr(recorded, "RECORD_AFTER", 6)
    reference = tiny(family)

    async def turns(engine: TorchEngine, member: int) -> None:
        ids = prompt(40)
        for turn in range(3):
            request = ask(ids, 5 + member, str(member), 10 * member + turn, temperature=0.9)
            generation = await engine.generate(request)
            assert_logprobs(reference, request, generation)
            kept_ids = generation.ids[2:] if turn == 1 else generation.ids
            ids += kept_ids + prompt(4 + 9 * member, turn)

    engine = serve(tiny(family), slots=4, max_len=160, budget=48)
    await asyncio.gather(*(turns(engine, member) for member in range(5)))
    assert any(
        isinstance(step, torch.jit.ScriptModule)
        for step in engine._batcher._recorded_step._step_functions.values()
    )

    ids = prompt(50, "scored")
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(await engine.score(ids)), expected, **ROUNDING)
    await engine.close()


async def test_a_groups_states_are_computed_once_and_a_rewritten_turn_goes_on_from_its_prompt():
    model = tiny("Qwen3Next")
    forwarded = Forwarded(model)
    engine = serve(model, max_len=160)
    same = prompt(70)
    requests = [ask(same, 4, f"member {member}", member) for member in range(8)]
    generations = await asyncio.gather(*map(engine.generate, requests))
    assert 0 <= forwarded.tokens - (70 + 7 * 6 + 8 * 3) < 8  # 6 ids behind the last whole block
    assert engine.reprefilled_tokens == 0

    # The snapshot is at 64, the common prefix 70 + 2, the longer prompt's own snapshot at 96.
    before = forwarded.tokens
    rewritten = ask(same + generations[0].ids[:2] + prompt(30, "other"), 4, "member 0")
    assert_logprobs(tiny("Qwen3Next"), rewritten, await engine.generate(rewritten))
    assert forwarded.tokens - before == (102 - 64) + 3
    assert engine.reprefilled_tokens == 72 - 64

    # A prompt that ends within a block keeps its beginning as a snapshot, and is computed again from there.
    before = forwarded.tokens
    again = ask(rewritten.ids, 1, "member 0")
    assert_logprobs(tiny("Qwen3Next"), again, await engine.generate(again))
    assert forwarded.tokens - before == 102 - 96
    await engine.close()


async def test_slots_that_sit_out_keep_their_states_to_the_bit():
    engine = serve(tiny("Qwen3Next"), slots=3, stepwise=True)
    pools = engine._batcher.cache.states.pools
    await asyncio.gather(*(engine.generate(ask(prompt(5, name), 6, name)) for name in "abc"))
    slot = engine._batcher.slots._slot_by_session["b"].index
    states = [pool[slot].clone() for pool in pools]

    tasks = [asyncio.create_task(engine.generate(ask(prompt(9, name), 20, name))) for name in "ac"]
    await generated(engine, 40)
    await asyncio.gather(*tasks)
    assert engine._batcher.slots._slot_by_session["b"].index == slot
    for pool, state in zip(pools, states, strict=True):
        assert state.any() and torch.equal(pool[slot], state)
    await engine.close()


def test_what_a_slot_takes_is_known_without_the_model():
    config = tiny("Qwen3Next").config
    convolution_inputs = 3 * (2 * 2 * 8 + 4 * 8)  # of three tokens: queries and keys, values
    head_states = 4 * 8 * 8
    kv_numbers = 2 * 2 * 8  # keys and values of the other layer
    assert slot_sizes(config) == (kv_numbers, 2 * 4 * (convolution_inputs + head_states))
