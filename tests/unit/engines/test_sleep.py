"""The embedded engine sleeps, without weights and KV cache, and goes on as if it had not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.engines.base import Request
from asyncrl.engines.torch import recorded
from asyncrl.engines.torch.engine import TorchEngine
from asyncrl.errors import EngineError
from asyncrl.types import Generation, PolicyVersion, StopReason, VersionSpan
from asyncrl.weights.adapters import Adapters
from asyncrl.weights.manifest import WeightsError, WeightsRef
from tests.fakes import weights as fake_weights
from tests.fakes.loop import settle

from .tiny import ask, assert_logprobs, generated, prompt, serve, tiny


def publish(model: PreTrainedModel, folder: Path, version: int) -> WeightsRef:
    return fake_weights.publish(dict(model.named_parameters()), folder, PolicyVersion(0, version))


def held(engine: TorchEngine) -> int:
    """Bytes of weights and KV."""
    tensors = [*engine._model.parameters(), *engine._batcher.cache.pools]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# -- at any step -------------------------------------------------------------------------------------


@dataclass
class Stepped:
    """An engine of three slots whose steps are counted, and its turns: two that share the beginning of their
    prompts, one that waits for a slot, and one that has a second turn."""

    engine: TorchEngine = field(
        default_factory=lambda: serve(tiny().double(), slots=3, budget=24, stepwise=True)
    )
    steps: int = 0

    def __post_init__(self) -> None:
        step = self.engine._step_until_needed

        def counted() -> object:
            self.steps += 1
            return step()

        self.engine._step_until_needed = counted  # type: ignore[method-assign, assignment]

    async def turns(self, name: str, ids: tuple[int, ...], count: int = 1) -> list[Generation]:
        generations = []
        for turn in range(count):
            request = ask(ids, 9 + turn, name, key=len(name) + turn, temperature=0.9)
            generations.append(await self.engine.generate(request))
            ids += generations[-1].ids + prompt(5, turn)
        return generations

    async def all(self, cuts: Iterator[int], ref: WeightsRef | None) -> list[list[Generation]]:
        """Play all turns; it sleeps after so many steps, each time."""
        same = prompt(40)
        tasks = [
            asyncio.create_task(self.turns(name, ids, count))
            for name, ids, count in (
                ("a", same + prompt(7, "a"), 1),
                ("bb", same + prompt(9, "b"), 1),
                ("ccc", prompt(11, "c"), 2),
                ("dddd", prompt(30, "d"), 1),
            )
        ]
        for cut in cuts:
            while self.steps < cut and not all(task.done() for task in tasks):  # noqa: ASYNC110
                await asyncio.sleep(0)
            await self.engine.sleep()
            assert self.engine.asleep and held(self.engine) == 0
            before = self.steps
            await settle()
            assert self.steps == before
            assert ref is not None
            await self.engine.load(ref)
        generations = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        await self.engine.close()
        return generations


@pytest.fixture(scope="module")
def undisturbed() -> list[list[Generation]]:
    return asyncio.run(Stepped().all(iter(()), None))


@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.integers(0, 45), min_size=1, max_size=3).map(sorted))
def test_turns_go_on_as_if_it_had_not_slept(
    undisturbed: list[list[Generation]], tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
):
    """In prompts, between their chunks, while a prefix is awaited, in decode, before a second turn."""
    ref = publish(tiny(), tmp_path_factory.mktemp("weights"), 0)
    for before, after in zip(undisturbed, asyncio.run(Stepped().all(iter(cuts), ref)), strict=True):
        for turn_before, turn_after in zip(before, after, strict=True):
            assert (turn_before.ids, turn_before.stop) == (turn_after.ids, turn_after.stop)
            assert turn_after.logprobs == pytest.approx(turn_before.logprobs, abs=1e-6, rel=0)
            assert [(s.version, s.kv_version) for s in turn_after.spans] == [(0, 0)] * len(turn_after.spans)
            assert turn_after.seconds >= 0


def test_it_takes_no_more_steps_than_needed(tmp_path: Path):
    """What is prefilled again shares its prefix again."""
    awake = Stepped()
    slept = Stepped()
    asyncio.run(awake.all(iter(()), None))
    asyncio.run(slept.all(iter([8]), publish(tiny(), tmp_path, 0)))
    assert awake.steps < slept.steps <= awake.steps + 6


async def test_a_recording_serves_after_a_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded, "RECORD_AFTER", 2)
    engine = serve(stepwise=True)
    new = tiny(seed=1)
    await engine.generate(ask(prompt(9), 12))
    step_functions = engine._batcher._recorded_step._step_functions
    recordings = {
        kind: step_function
        for kind, step_function in step_functions.items()
        if isinstance(step_function, torch.jit.ScriptModule)
    }
    assert recordings
    await engine.sleep()
    await engine.load(publish(new, tmp_path, 1))
    request = ask(prompt(9), 12, "t")
    assert_logprobs(new, request, await engine.generate(request))
    assert all(step_functions[kind] is recording for kind, recording in recordings.items())
    await engine.close()


# -- versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3Moe", "Qwen3Next"])
async def test_the_version_that_wakes_it_computes_all_kv_anew(family: str, tmp_path: Path):
    from .test_weights import publish as published

    engine = serve(tiny(family), stepwise=True)
    request = ask(prompt(8), 30)
    new = tiny(family, seed=1)
    task = asyncio.create_task(engine.generate(request))
    await generated(engine, 5)
    await engine.sleep()
    await engine.sleep()
    assert engine.version == 0
    await engine.load(published(new, tmp_path, 3))
    generation = await task
    cut = generation.spans[0].end
    assert generation.spans == (VersionSpan(0, cut, 0, 0), VersionSpan(cut, 30, 3, 3)) and 5 <= cut < 30
    early = replace(generation, ids=generation.ids[:cut], logprobs=generation.logprobs[:cut])
    assert_logprobs(tiny(family), request, early)
    part_after_sleep = replace(generation, ids=generation.ids[cut:], logprobs=generation.logprobs[cut:])
    assert_logprobs(new, ask(request.ids + early.ids), part_after_sleep)
    next_turn = await engine.generate(ask((*request.ids, *generation.ids, 1), 3))
    assert next_turn.spans == (VersionSpan(0, 3, 3, 3),)
    await engine.close()


async def test_tied_weights_wake(tmp_path: Path):
    new = tiny(seed=1, tie_word_embeddings=True)
    engine = serve(tiny(tie_word_embeddings=True))
    await engine.sleep()
    assert held(engine) == 0
    await engine.load(publish(new, tmp_path, 1))
    request = ask(prompt(9))
    assert_logprobs(new, request, await engine.generate(request))
    await engine.close()


async def test_a_load_that_fails_leaves_it_asleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = serve(stepwise=True)
    request = ask(prompt(8), 30)
    task = asyncio.create_task(engine.generate(request))
    await generated(engine, 5)
    await engine.sleep()
    lacking = fake_weights.publish(
        dict(list(tiny().named_parameters())[1:]), tmp_path / "lacking", PolicyVersion(0, 0)
    )
    absent = WeightsRef(PolicyVersion(0, 0), str(tmp_path / "none"))
    for bad_ref, why in ((lacking, "missing"), (absent, "none")):
        with pytest.raises(WeightsError, match=why):
            await engine.load(bad_ref)
        assert engine.asleep and held(engine) == 0 and not task.done()
    good = publish(tiny(), tmp_path / "good", 0)
    with monkeypatch.context() as patch:
        short = mock.Mock(side_effect=torch.OutOfMemoryError("out of memory"))
        patch.setattr("asyncrl.engines.torch.engine.replace_weights", short)
        with pytest.raises(WeightsError, match="out of memory"):
            await engine.load(good)
    await engine.sleep()
    assert engine.asleep and held(engine) == 0 and not task.done()
    await engine.load(good)
    assert_logprobs(tiny(), request, await task)
    await engine.close()


async def test_memory_that_could_not_be_given_up_is_not_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """However often it is asked: it is to be replaced."""
    engine = serve()
    with monkeypatch.context() as patch:
        patch.setattr(engine._released_memory, "release", lambda tensors: torch.empty(-1))
        with pytest.raises(EngineError, match="the engine failed"):
            await engine.sleep()
    for call in (engine.sleep(), engine.load(publish(tiny(), tmp_path, 0))):
        with pytest.raises(EngineError, match="the engine failed"):
            await call
    assert held(engine) > 0
    await engine.close()


@pytest.mark.parametrize("first", [True, False], ids=["the first version", "a later one"])
async def test_adapters_alone_wake_it_with_the_base_of_its_directory(tmp_path: Path, first: bool):
    alone = tiny()
    both = tiny()
    sizes = {"": (3, 6.0)}
    draw = torch.Generator().manual_seed(1)
    adapters = Adapters(both, sizes)
    own_adapters = Adapters(alone, sizes)
    tensors = {}
    with torch.no_grad():
        for piece in adapters.published:
            value = 0.3 * torch.randn(both.get_parameter(piece.parameter).shape, generator=draw)
            alone.get_parameter(piece.parameter).copy_(value)
            tensors[piece.name] = value
    ref = fake_weights.publish(tensors, tmp_path, PolicyVersion(1, 1), own_adapters.specs)
    bad_ref = fake_weights.publish(
        {"w": torch.ones(2)}, tmp_path / "w", PolicyVersion(1, 2), own_adapters.specs
    )
    engine = serve()
    if not first:
        await engine.load(ref)
    await engine.sleep()
    with pytest.raises(WeightsError, match="not match its adapters"):
        await engine.load(bad_ref)
    assert engine.asleep and held(engine) == 0
    await engine.load(ref)
    request = ask(prompt(9))
    assert_logprobs(alone, request, await engine.generate(request))
    await engine.close()


# -- while it sleeps ---------------------------------------------------------------------------------


async def test_what_is_asked_of_a_sleeper(tmp_path: Path):
    """Running turns can be released, cancelled and heard of, and come to no more seconds; new ones and scores
    wait."""
    parts: list[Generation] = []
    heard = asyncio.Event()

    async def on_part(sampled: Generation) -> None:
        if engine.asleep:
            parts.append(sampled)
            heard.set()

    engine = serve(slots=3, stepwise=True)
    requests = {name: ask(prompt(7, name), 80, name) for name in ("released", "cancelled", "told", "waits")}
    requests["told"] = replace(requests["told"], part_seconds=1e-3, on_part=on_part)

    def asked(request: Request) -> asyncio.Task[Generation]:
        return asyncio.create_task(engine.generate(request))

    tasks = {name: asked(request) for name, request in requests.items()}
    await generated(engine, 12)
    await engine.sleep()
    tasks["new"] = asked(ask(prompt(5), 6, "new"))
    score = asyncio.create_task(engine.score(prompt(7)))
    read = asyncio.create_task(engine.read((1, 2), 1, 1))
    await settle()
    before = engine.tokens
    engine.release("released")
    partial = await tasks["released"]
    assert partial.stop is StopReason.ABORT and len(partial.ids) >= 4
    assert partial.spans == (VersionSpan(0, len(partial.ids), 0, 0),)
    assert_logprobs(tiny(), requests["released"], partial)
    engine.release("waits")
    assert (await tasks["waits"]).ids == ()
    tasks["cancelled"].cancel()
    await asyncio.gather(tasks["cancelled"], return_exceptions=True)
    for _ in range(3):  # the first one may be of before
        heard.clear()
        await asyncio.wait_for(heard.wait(), 60)
    assert len(parts[1].ids) >= 4 and len({(part.ids, part.seconds) for part in parts[1:]}) == 1
    assert engine.tokens == before and not any(task.done() for task in (score, read, tasks["new"]))
    await engine.load(publish(tiny(), tmp_path, 0))
    assert len((await tasks["new"]).ids) == 6 and len(await score) == 6 and await read
    assert_logprobs(tiny(), requests["told"], await tasks["told"])
    await engine.close()


async def test_close_ends_what_waits_for_a_sleeper():
    engine = serve()
    await engine.sleep()
    waiting = [
        asyncio.create_task(call) for call in (engine.score(prompt(3)), engine.generate(ask(prompt(4))))
    ]
    await settle()
    await engine.close()
    for outcome in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60):
        assert isinstance(outcome, EngineError) and "closed" in str(outcome)


# -- memory ------------------------------------------------------------------------------------------


async def test_memory_is_given_back_and_does_not_grow(tmp_path: Path):
    """Of a model that was mapped from its file, too."""
    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    size = sum(p.numel() * 4 for p in model.parameters())
    ref = publish(model, tmp_path, 1)
    engine = TorchEngine(model, tiny, 2, 64, 32)
    del model
    await engine.load(ref)
    await engine.generate(ask(prompt(5), 2))  # the first forward reads libraries
    asleep = list[int]()
    awake = list[int]()

    def used() -> int:
        """Without what is mapped from files, as versions are until they have been copied."""
        memory_info = psutil.Process().memory_info()
        return memory_info.rss - memory_info.shared

    for count in range(50):
        await engine.sleep()
        asleep.append(used())
        await engine.load(ref)
        if count % 10 == 0:
            await engine.generate(ask(prompt(5), 2, str(count)))
        awake.append(used())
    assert min(awake) - max(asleep) > 0.8 * size
    assert max(asleep[25:]) - asleep[5] < 0.1 * size
    await engine.close()
