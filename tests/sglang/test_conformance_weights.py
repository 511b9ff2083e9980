"""What every engine promises about weights: each token is of the version that its span says, whatever was
loaded meanwhile, and nothing of an older one is left in what is sampled anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from asyncrl.engines.base import Engine
from asyncrl.engines.sglang.http import PauseMode
from asyncrl.types import PolicyVersion, StopReason, VersionSpan
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsError, WeightsRef
from tests.fakes.weights import publish
from tests.sglang.conformance import TOLERANCE, Served, Subject, ask, in_use, prompt, seen, under_way

LONG = 900  # tokens: still running when whatever the test does has happened
FULL = pytest.mark.full
MODES = ["sglang-qwen2-in_place", "sglang-qwen2-retract", pytest.param("sglang-qwen2-abort", marks=FULL)]
QWEN3 = pytest.param("sglang-qwen3-in_place", marks=FULL)
every_mode = pytest.mark.parametrize("subject", ["torch-qwen2", *MODES], indirect=True)
every_family = pytest.mark.parametrize("subject", [*MODES, QWEN3], indirect=True)
in_place = pytest.mark.parametrize("subject", ["torch-qwen2", "sglang-qwen2-in_place"], indirect=True)


@every_family
async def test_an_update_between_requests(subject: Subject):
    async with subject.ready() as engine:
        for version in (1, 2):
            ref = subject.versions.refs[version]
            assert await engine.load(ref) == disk.read_manifest(ref)
            assert engine.version == version
            request = ask(prompt(20), 30, temperature=0.7)
            generation = await engine.generate(request)
            assert generation.spans == (VersionSpan(0, 30, version, version),)
            assert subject.versions.check(request, generation) == 30


@every_mode
async def test_updates_during_requests(subject: Subject):
    async with subject.ready() as engine:
        requests = [ask(prompt(20 + index, index), LONG, f"{index}", index) for index in range(4)]
        tasks = await under_way(engine, *requests)
        for version in (1, 2):
            await engine.load(subject.versions.refs[version])
            new = ask(prompt(5), 20, f"new {version}")
            generation = await engine.generate(new)
            assert generation.spans == (VersionSpan(0, 20, version, version),)
            assert subject.versions.check(new, generation) == 20
        for request, generation in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert generation.stop is StopReason.LENGTH and len(generation.ids) == LONG
            known_spans = [span for span in generation.spans if span.kv_version >= 0]
            assert [span.version for span in known_spans] == [0, 1, 2]
            expected = [0, 0, 0] if subject.keeps_cache else [0, 1, 2]
            assert [span.kv_version for span in known_spans] == expected
            compared = subject.versions.check(request, generation)
            assert compared == (generation.spans[0].end if subject.keeps_cache else LONG)


@in_place
async def test_the_first_token_of_a_version_is_known_exactly(subject: Subject):
    """Behind an update in place no forward of one version gives the recorded log-probs, but a forward that
    changes its weights at that token does."""
    async with subject.ready() as engine:
        requests = [ask(prompt(20 + index, index), LONG, f"{index}", index) for index in range(4)]
        tasks = await under_way(engine, *requests)
        await engine.load(subject.versions.refs[1])
        for request, generation in zip(requests, await asyncio.gather(*tasks), strict=True):
            before, *unknown, after = generation.spans
            assert (before.version, after.version) == (0, 1)
            # Real servers do not say of which version the token under way was; here it is of the old one.
            assert [(span.end - span.start, span.version, span.kv_version) for span in unknown] in (
                [],
                [(1, 0, -1)],
            )
            cut = after.start
            # The last token sampled by the old weights had no keys and values yet: the new ones write them.
            split = len(request.ids) + cut - 1
            expected = mixed_logprobs(subject.versions.paths, request.ids + generation.ids, split)
            logprobs = torch.tensor(generation.logprobs[cut:])
            torch.testing.assert_close(logprobs, expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def mixed_logprobs(paths: list[Path], ids: tuple[int, ...], split: int) -> Tensor:
    """Of ids[split + 1:], when version 0 read ids[:split] and version 1 goes on from there."""
    old, new = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths[:2])
    cache = DynamicCache(config=old.config)
    old(torch.tensor([ids[:split]]), past_key_values=cache, use_cache=True)
    logits = new(torch.tensor([ids[split:-1]]), past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[split + 1 :])[:, None])[:, 0]


@every_mode
async def test_no_prefix_of_older_weights_is_read_by_new_requests(subject: Subject):
    async with subject.ready() as engine:
        ended_request = ask(prompt(40, "ended"), 20, "ended")
        running = ask(prompt(50, "running"), LONG, "running")
        first = await engine.generate(ended_request)
        (task,) = await under_way(engine, running)
        await engine.load(subject.versions.refs[1])
        for ids in (ended_request.ids, ended_request.ids + first.ids, running.ids):
            await assert_fresh(subject, engine, ids, 1)
        crossed = await task
        assert seen(crossed) == [0, 1]
        # Its keys and values are of both versions now.
        await assert_fresh(subject, engine, running.ids + crossed.ids[:100], 1)
        await assert_fresh(subject, engine, running.ids + crossed.ids, 1)


async def assert_fresh(subject: Subject, engine: Engine, ids: tuple[int, ...], version: int) -> None:
    request = ask(ids, 12, "fresh")
    generation = await engine.generate(request)
    assert generation.spans == (VersionSpan(0, 12, version, version),)
    assert subject.versions.check(request, generation) == 12
    engine.release("fresh")


@every_mode
async def test_a_version_number_of_another_epoch_is_another_version(subject: Subject):
    """After a rollback of the trainer the same number comes again, with other weights."""
    async with subject.ready() as engine:
        versions = subject.versions
        request = ask(prompt(40), 20)
        await engine.load(versions.refs[1])
        before = await engine.generate(request)
        assert versions.check(request, before) == 20
        await engine.load(versions.publish(versions.tensors(3), 1, epoch=1))
        again = ask(request.ids + before.ids, 20, "again")
        after = await engine.generate(again)
        assert engine.version == 1 and after.spans == (VersionSpan(0, 20, 1, 1),)
        expected = versions.logprobs(3, again, after)
        torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("subject", MODES[:1], indirect=True)
async def test_runs_that_follow_each_other_on_a_server_share_no_prefix(subject: Subject, tmp_path: Path):
    """Their labels are the same, their weights are not, and the cache outlives a run."""
    async with subject.ready() as engine:
        assert isinstance(engine, Served)
        versions = subject.versions
        request = ask(prompt(40), 20)
        await engine.load(versions.refs[1])
        await engine.generate(request)
        async with in_use(Served(engine.loader.api.url, "in_place", salt="another run")) as other_run:
            await other_run.load(publish(versions.tensors(3), tmp_path, PolicyVersion(0, 1)))
            for run, reads_its_weights in (
                (engine, False),
                (other_run, True),
            ):  # the first one's client reads its old prefix
                generation = await run.generate(request)
                assert generation.spans == (VersionSpan(0, 20, 1, 1),)
                expected = versions.logprobs(3, request, generation)
                gap = (torch.tensor(generation.logprobs) - expected).abs().max()
                assert bool(gap < TOLERANCE) is reads_its_weights


@every_mode
async def test_requests_that_arrive_during_an_update(subject: Subject):
    async with subject.ready() as engine:
        requests = [ask(prompt(10, index), 30, f"{index}", index) for index in range(24)]
        loads = [asyncio.create_task(engine.load(subject.versions.refs[version])) for version in (1, 2)]
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(engine.generate(request)))
            await asyncio.sleep(0)
        for request, generation in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert len(generation.ids) == 30
            subject.versions.check(request, generation)
        await asyncio.gather(*loads)
        await assert_fresh(subject, engine, requests[0].ids, 2)


@every_mode
async def test_updates_are_applied_in_the_order_of_the_calls(subject: Subject):
    async with subject.ready() as engine:
        (task,) = await under_way(engine, ask(prompt(5), LONG))
        order = (1, 2, 3, 2)
        loads = (engine.load(subject.versions.refs[version]) for version in order)
        manifests = await asyncio.gather(*loads)
        assert tuple(manifest.version.step for manifest in manifests) == order
        assert engine.version == 2
        await assert_fresh(subject, engine, prompt(8), 2)
        generation = await task
        left = iter((0, *order))
        assert all(version in left for version in seen(generation))  # in this order; some may be missing


@every_mode
async def test_a_turn_is_cancelled_during_an_update(subject: Subject):
    async with subject.ready() as engine:
        request = ask(prompt(7), LONG, "cancelled")
        (task,) = await under_way(engine, request)
        load = asyncio.create_task(engine.load(subject.versions.refs[1]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await load
        await assert_fresh(subject, engine, request.ids, 1)


@every_mode
async def test_weights_that_are_damaged_or_absent_are_refused(subject: Subject):
    damaged = subject.versions.publish(subject.versions.tensors(1), 7)
    payload = Path(damaged.path) / disk.PAYLOAD
    data = payload.read_bytes()
    payload.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    absent = WeightsRef(PolicyVersion(0, 8), f"{damaged.path}-absent")
    async with subject.ready() as engine:
        for ref in (damaged, absent):
            with pytest.raises(WeightsError, match=ref.path):
                await engine.load(ref)
            assert engine.version == 0
            await assert_fresh(subject, engine, prompt(9), 0)
        await engine.load(subject.versions.refs[1])
        await assert_fresh(subject, engine, prompt(9), 1)


NORM = "model.norm.weight"
LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "subject",
    ["torch-qwen2", MODES[0]],
    indirect=True,
)
@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({LAYER: None}, LAYER),
        ({"model.extra.weight": torch.ones(3)}, "model.extra.weight"),
        ({NORM: torch.ones(31)}, rf"{NORM}.*31"),
    ],
    ids=["missing", "unknown", "shape"],
)
async def test_weights_of_another_model_are_refused(
    subject: Subject, changes: dict[str, Tensor | None], difference: str
):
    tensors = subject.versions.tensors(1) | changes
    other_model = subject.versions.publish(
        {name: value for name, value in tensors.items() if value is not None}, 9
    )
    async with subject.ready() as engine:
        with pytest.raises(WeightsError, match=difference):
            await engine.load(other_model)
        assert engine.version == 0
        await assert_fresh(subject, engine, prompt(9), 0)


@pytest.mark.parametrize("subject", MODES[:1], indirect=True)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_holds_requests_and_changes_nothing(subject: Subject, mode: PauseMode):
    """Only servers can be paused: what is embedded has no need of it."""
    async with subject.ready() as engine:
        assert isinstance(engine, Served)
        server = engine.loader.api
        running = ask(prompt(30), LONG, "running")
        new = ask(prompt(4), 8, "new")
        (task,) = await under_way(engine, running)
        await server.pause(mode)
        waiting = asyncio.create_task(engine.generate(new))
        assert not await server.ready()
        assert not task.done() and not waiting.done()
        await server.resume()
        assert subject.versions.check(running, await task) == LONG
        assert subject.versions.check(new, await waiting) == 8
        assert await server.ready()
