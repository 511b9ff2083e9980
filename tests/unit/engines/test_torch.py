"""The embedded engine against teacher-forced forwards of the same weights."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from asyncrl.engines.base import StopCheck, engines, remaining_request, with_part
from asyncrl.engines.torch.batch import RunningRequest
from asyncrl.engines.torch.engine import TorchEngine
from asyncrl.errors import ConfigError, EngineError
from asyncrl.types import Generation, StopReason, VersionSpan

from .tiny import (
    FAMILIES,
    ROUNDING,
    VOCABULARY,
    Forwarded,
    ask,
    assert_logprobs,
    generated,
    prompt,
    serve,
    tiny,
)


@pytest.mark.parametrize("family", FAMILIES)
async def test_multi_turn_logprobs_with_kept_prefixes(family: str):
    model = tiny(family)
    forwarded = Forwarded(model)
    engine = serve(model)
    ids = prompt(17)
    for turn, temperature in enumerate((1.0, 0.7, 1.3)):
        request = ask(ids, temperature=temperature, key=turn)
        before = forwarded.tokens
        generation = await engine.generate(request)
        assert generation.stop is StopReason.LENGTH and len(generation.ids) == 12
        assert_logprobs(tiny(family), request, generation)
        # 17 or 1 + 5 new prompt ids, and one decoded token per further id
        assert forwarded.tokens - before == (17 if turn == 0 else 6) + 11
        ids += generation.ids + prompt(5, turn)
    await engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_ragged_streams_share_slots_with_chunked_prefill(family: str):
    async def stream(engine: TorchEngine, index: int) -> None:
        rng = random.Random(index)
        ids = prompt(1 + index % 30, index)
        for turn in range(2):
            temperature = rng.choice((0.0, 0.7, 1.0))
            request = ask(ids, rng.randint(1, 20), str(index), 100 * index + turn, temperature=temperature)
            generation = await engine.generate(request)
            assert len(generation.ids) == request.sampling.max_new_tokens
            assert_logprobs(reference, request, generation)
            ids += generation.ids + prompt(index % 5, turn)

    reference = tiny(family)
    engine = serve(tiny(family), slots=8, budget=24)
    await asyncio.wait_for(asyncio.gather(*(stream(engine, index) for index in range(24))), 120)
    await engine.close()


async def test_length_is_clipped_to_max_len_and_bad_requests_are_refused():
    engine = serve(max_len=20, stepwise=True)
    last = await engine.generate(ask(prompt(19), 50))
    assert len(last.ids) == 1 and last.stop is StopReason.LENGTH
    clipped = await engine.generate(ask(prompt(15), 50))
    assert len(clipped.ids) == 5 and clipped.stop is StopReason.LENGTH
    assert_logprobs(tiny(), ask(prompt(15)), clipped)
    for bad, reason in (
        (ask(()), "the prompt is empty"),
        (ask((3, VOCABULARY)), r"vocabulary \(size 61\)"),
        (ask((-1, 3)), "vocabulary"),
        (ask(prompt(20)), "max_len=20"),
        (ask((1,), 0), "out of range"),
        (ask((1,), temperature=-1.0), "out of range"),
    ):
        with pytest.raises(EngineError, match=reason):
            await engine.generate(bad)
    first = asyncio.create_task(engine.generate(ask((1, 2))))
    before = engine.tokens
    await generated(engine, engine._batcher.generated_tokens + 1)
    assert before < engine.tokens < before + 12  # the turn is under way: a sign of life
    with pytest.raises(EngineError, match="still running"):
        await engine.generate(ask((1, 2)))
    assert len((await first).ids) == 12
    await engine.close()


async def test_abort_and_cancel_give_back_what_there_is():
    engine = serve(slots=2, stepwise=True)
    requests = {name: ask(prompt(7, name), 80, session=name) for name in "abc"}
    tasks = {name: asyncio.create_task(engine.generate(request)) for name, request in requests.items()}
    await generated(engine, 10)
    engine.release("a")
    engine.release("c")  # still waits for a slot
    engine.release("unknown")
    partial = await tasks["a"]
    nothing = await tasks["c"]
    assert partial.stop is nothing.stop is StopReason.ABORT
    assert len(partial.ids) in (5, 6) and nothing.ids == nothing.spans == ()  # a step may be under way
    assert_logprobs(tiny(), requests["a"], partial)
    tasks["b"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks["b"]
    again = ask(requests["a"].ids + partial.ids, 3, session="a")  # goes on from the partial turn
    assert_logprobs(tiny(), again, await engine.generate(again))
    await engine.close()


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3Next"])
async def test_a_turn_is_heard_of_in_parts_and_goes_on_elsewhere_as_it_would_have(family: str):
    """Whoever hears of its parts, the turn is the same; and so is its rest on another engine, after any."""
    request = ask(prompt(11), 60, key=42, temperature=0.9)
    expected_turn = await (engine := serve(tiny(family))).generate(request)
    await engine.close()
    parts: list[Generation] = []

    async def on_part(sampled: Generation) -> None:
        parts.append(sampled)

    engine = serve(tiny(family), stepwise=True)
    engine._batcher.version = 3
    in_parts = await engine.generate(replace(request, part_seconds=1e-6, on_part=on_part))
    await engine.close()
    assert replace(in_parts, seconds=0.0, spans=()) == replace(expected_turn, seconds=0.0, spans=())
    parts = [part for part in parts if part.ids]  # none: it had ended
    sizes = [len(part.ids) for part in parts]
    assert sizes == sorted(sizes) and len({*sizes} - {60}) > 10
    for part in parts:
        count = len(part.ids)
        assert (part.ids, part.logprobs) == (expected_turn.ids[:count], expected_turn.logprobs[:count])
        assert part.spans == (VersionSpan(0, count, 3, 3),)
        assert part.stop is StopReason.ABORT
    last = parts[len(parts) // 2]
    other_engine = serve(tiny(family))
    after = with_part(request, last, await other_engine.generate(remaining_request(request, last)))
    await other_engine.close()
    assert after.ids == expected_turn.ids and after.stop is StopReason.LENGTH
    torch.testing.assert_close(torch.tensor(after.logprobs), torch.tensor(expected_turn.logprobs), **ROUNDING)


async def test_a_turn_that_is_cancelled_while_its_part_is_taken_leaves():
    engine = serve(slots=1, stepwise=True)
    part_received = asyncio.Event()

    async def on_part(sampled: Generation) -> None:
        part_received.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(
        engine.generate(replace(ask(prompt(7), 80), part_seconds=1e-6, on_part=on_part))
    )
    await part_received.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len((await engine.generate(ask(prompt(5), 3, session="t"))).ids) == 3
    await engine.close()


async def test_the_same_request_gives_the_same_ids_in_any_company():
    async def other(engine: TorchEngine, index: int) -> None:
        await generated(engine, index)
        await engine.generate(ask(prompt(3 + index, index), 5 + index, str(index), 7, temperature=0.9))

    request = ask(prompt(11), 50, key=42)
    alone = await serve().generate(request)
    engine = serve(stepwise=True)
    company = [asyncio.create_task(other(engine, index)) for index in range(20)]
    await generated(engine, 3)
    crowded = await engine.generate(request)
    await asyncio.gather(*company)
    assert crowded.ids == alone.ids
    assert (await engine.generate(ask(prompt(11), 50, "x", key=43))).ids != alone.ids
    await engine.close()


async def test_idle_sessions_are_evicted_and_prefilled_again():
    model = tiny()
    forwarded = Forwarded(model)
    engine = serve(model, slots=2)
    ids = {name: prompt(10, name) for name in "abc"}
    for name in "abac":  # c takes the slot of b, the least recently used
        request = ask(ids[name], 4, name)
        generation = await engine.generate(request)
        assert_logprobs(tiny(), request, generation)
        ids[name] += generation.ids + prompt(2, name)
    for name, new in (("a", 3), ("b", 16), ("c", 16)):  # b evicts c
        before = forwarded.tokens
        await engine.generate(ask(ids[name], 1, name))
        assert forwarded.tokens - before == new
    diverging = ask(ids["c"][:6] + prompt(7, "other"), 3, "c")
    before = forwarded.tokens
    assert_logprobs(tiny(), diverging, await engine.generate(diverging))
    assert forwarded.tokens - before == 7 + 2
    engine.release("c")
    engine.release("unknown")
    before = forwarded.tokens
    await engine.generate(ask(diverging.ids, 1, "c"))
    assert forwarded.tokens - before == 13
    await engine.close()


async def test_padding_near_max_len_stays_in_its_row():
    engine = serve(slots=2, max_len=40)
    ids = prompt(20)
    ids += (await engine.generate(ask(ids, 14, "low"))).ids
    wide = ask(prompt(16, 1), 20, "high")
    narrow = ask(ids + prompt(4), 20, "low")
    answers = await asyncio.gather(engine.generate(wide), engine.generate(narrow))
    for request, generation in zip((wide, narrow), answers, strict=True):
        assert_logprobs(tiny(), request, generation)
    await engine.close()


async def test_a_broken_engine_fails_everything_and_hangs_nothing():
    model = tiny()
    engine = serve(model, slots=2, stepwise=True)
    tasks = [asyncio.create_task(engine.generate(ask(prompt(4), 80, str(index)))) for index in range(4)]
    await generated(engine, 8)
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    for outcome in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
        assert isinstance(outcome, EngineError) and "ZeroDivisionError" in str(outcome)
    with pytest.raises(EngineError, match="the engine failed"):
        await engine.generate(ask((1,)))
    await engine.close()


async def test_a_change_between_steps_that_fails_drops_none_after_it(monkeypatch: pytest.MonkeyPatch):
    engine = serve(slots=2)
    monkeypatch.setattr(engine._batcher.slots, "release_session", lambda _: 1 / 0)
    changes_made: list[str] = []

    def watch(ids: object) -> bool:  # called in the midst of a step
        engine.release("d")
        engine._between_steps(lambda: changes_made.append("after"))
        return False

    await asyncio.wait_for(engine.generate(replace(ask(prompt(4), 80, "d"), stop_check=watch)), 60)
    assert changes_made == ["after"]
    with pytest.raises(EngineError, match="the engine failed: ZeroDivisionError"):
        await engine.generate(ask(prompt(4), 8, "e"))
    await engine.close()


async def test_a_turn_that_cannot_be_ended_breaks_the_engine_and_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = serve(slots=2)
    monkeypatch.setattr(engine._batcher, "end_run", lambda *_: 1 / 0)
    turns = [asyncio.create_task(engine.generate(ask(prompt(4), n, str(n)))) for n in (3, 9)]
    for outcome in await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), 60):
        assert isinstance(outcome, EngineError) and "ZeroDivisionError" in str(outcome)
    await engine.close()


async def test_a_part_that_cannot_be_read_hangs_nobody(monkeypatch: pytest.MonkeyPatch):
    engine = serve(slots=2, stepwise=True)
    task = asyncio.create_task(engine.generate(replace(ask(prompt(4), 80), part_seconds=1e-6)))
    await generated(engine, 8)
    monkeypatch.setattr(engine._batcher, "sampled_so_far", lambda _: 1 / 0)
    with pytest.raises((EngineError, ZeroDivisionError)):
        await asyncio.wait_for(task, 60)
    await engine.close()


async def test_close_fails_what_is_pending():
    engine = serve()
    await engine.close()  # never started
    engine = serve(stepwise=True)
    task = asyncio.create_task(engine.generate(ask(prompt(4), 80)))
    await generated(engine, 1)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask((1,)))


def test_built_by_name_and_the_module_still_serves_plain_calls(tmp_path: Path):
    tiny(seed=5).save_pretrained(tmp_path)
    engine = engines.get("torch")(
        model_path=str(tmp_path), dtype="float32", slots=2, max_len=32, max_batch_tokens=64
    )
    request = ask(prompt(5))
    assert_logprobs(tiny(seed=5), request, asyncio.run(engine.generate(request)))
    ids = torch.tensor([prompt(6), prompt(6, 1)])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        plain = engine._model(ids, attention_mask=mask).logits
        expected = tiny(seed=5)(ids, attention_mask=mask).logits
    torch.testing.assert_close(plain[:, 2:], expected[:, 2:])


def test_attention_to_chosen_keys_is_refused():
    sizes = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 8)
    model = tiny("GlmMoeDsa", **sizes, v_head_dim=8, index_head_dim=16, mlp_layer_types=["dense"] * 2)
    with pytest.raises(ConfigError, match="engine does not support indices attention"):
        serve(model)


async def test_a_watch_hears_every_id_and_ends_the_turn_with_the_one_it_chooses():
    engine = serve()
    requests = [ask(prompt(9, n), 20, f"{n}", n) for n in range(3)]
    whole_turns = await asyncio.gather(*map(engine.generate, requests))
    heard: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}

    def watch(n: int) -> StopCheck:
        return lambda ids: heard[n].append(tuple(ids)) or len(ids) == (7, 20)[n]  # type: ignore[func-returns-value]

    again = [
        replace(request, session=f"again {n}", stop_check=watch(n) if n < 2 else None)
        for n, request in enumerate(requests)
    ]
    cut, last, free = await asyncio.gather(*map(engine.generate, again))
    assert (cut.stop, last.stop, free.stop) == (StopReason.TEXT, StopReason.TEXT, StopReason.LENGTH)
    assert cut.ids == whole_turns[0].ids[:7]
    # Kernels may sum batches of other shapes in another order: equal within float32's rounding only.
    assert cut.logprobs == pytest.approx(whole_turns[0].logprobs[:7], abs=1e-5)
    assert cut.spans == (VersionSpan(0, 7, 0, 0),)
    assert (last.ids, free.ids) == (whole_turns[1].ids, whole_turns[2].ids)
    assert heard[0] == [whole_turns[0].ids[:n] for n in range(1, 8)]
    assert heard[1] == [whole_turns[1].ids[:n] for n in range(1, 21)]
    await engine.close()


async def test_the_thread_steps_on_until_a_turn_ends_or_something_is_asked(monkeypatch: pytest.MonkeyPatch):
    """A score waits for the step under way, not for the end of a turn."""
    engine = serve()
    fifth = threading.Event()
    change_requested = threading.Event()
    scored = threading.Event()
    steps = 0
    returns = []
    step = engine._batcher.step
    in_thread = engine._step_until_needed

    def counted() -> list[RunningRequest]:
        nonlocal steps
        steps += 1
        if steps == 5:
            fifth.set()
            assert change_requested.wait(30)
        assert steps < 6 or scored.wait(30)
        return step()

    def returning() -> list[RunningRequest]:
        try:
            return in_thread()
        finally:
            returns.append(steps)

    monkeypatch.setattr(engine._batcher, "step", counted)
    monkeypatch.setattr(engine, "_step_until_needed", returning)
    turn = asyncio.create_task(engine.generate(ask(prompt(9), 60)))
    await asyncio.to_thread(fifth.wait, 30)
    score = asyncio.create_task(engine.score(prompt(7)))
    await asyncio.sleep(0)
    change_requested.set()
    assert len(await score) == 6
    scored.set()
    assert len((await turn).ids) == 60 and returns == [5, 60]
    await engine.close()
