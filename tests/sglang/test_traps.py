"""Ways to hang or fool a real server, and what the client does about each. To kill one: test_fatal_traps.py.

All tests here share a server and leave it running. They begin by loading what they rely on.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.engines.base import EngineLost
from asyncrl.engines.sglang.http import INVALID_LABEL, update_session
from asyncrl.engines.sglang.server import attach, build_loader
from asyncrl.engines.sglang.stream import decode_event
from asyncrl.errors import EngineError
from asyncrl.launch.servers import check_urls
from asyncrl.types import StopReason, VersionSpan
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsError, WeightsRef
from tests.fakes.sglang_process import SGLangServer
from tests.sglang.conformance import MAX_LEN, ask, in_use, prompt, under_way
from tests.sglang.conftest import Shared
from tests.sglang.models import CONTEXT
from tests.sglang.traps import LONG, Kept, frozen, idle, kept, paused, publish, raw, sampling, until


@pytest.fixture(scope="module")
def server(shared_server: Shared) -> SGLangServer:
    return shared_server("qwen2")


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[WeightsRef]:
    """Versions 0 and 1."""
    directory = tmp_path_factory.mktemp("versions")
    return [publish(directory, version) for version in range(2)]


# -- requests ------------------------------------------------------------------------------------------


async def test_a_turn_clipped_by_the_server_is_an_error_not_a_full_turn(
    server: SGLangServer, refs: list[WeightsRef]
):
    async with kept(server, max_len=CONTEXT) as engine:
        await engine.load(refs[0])
        with pytest.raises(
            EngineError, match=r"truncated a turn to \d of 8 tokens; raise its --context-length"
        ):
            await engine.generate(ask(prompt(CONTEXT - 8), 20))


async def test_a_cancelled_request_leaves_nothing_running(server: SGLangServer, refs: list[WeightsRef]):
    async with kept(server) as engine:
        await engine.load(refs[0])
        [task] = await under_way(engine, ask(prompt(4), LONG))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await until(lambda: idle(engine.api))


async def test_a_silent_server_loses_its_requests_but_not_what_they_have(
    server: SGLangServer, refs: list[WeightsRef]
):
    async with kept(server, silence=4.0) as engine:
        await engine.load(refs[1])
        task = await sampling(engine, ask(prompt(4), LONG))
        with frozen(server), pytest.raises(EngineLost, match="received no response within 4 s") as lost:
            await task
        partial = lost.value.partial
        assert 0 < len(partial.ids) == len(partial.logprobs) < LONG and partial.stop is StopReason.ABORT
        assert partial.spans == (VersionSpan(0, len(partial.ids), 1, 1),)
        await until(lambda: idle(engine.api))  # it was told, too


# -- pauses --------------------------------------------------------------------------------------------


async def test_requests_of_a_pause_whose_clients_left_never_run(server: SGLangServer, refs: list[WeightsRef]):
    prompts = [prompt(50, f"left {index}") for index in range(8)]

    async def cached(engine: Kept, ids: tuple[int, ...]) -> int:
        """How much of a prompt is in the cache: all but the last id, when a request with it has run."""
        return decode_event(await engine.api.generate_whole(raw(ids, 1))).meta_info.cached_tokens

    async with kept(server) as engine:
        await engine.load(refs[0])
        async with paused(engine.api, "in_place"):
            async with AsyncExitStack() as stack:
                for ids in prompts:  # each is entered when the server has begun to answer
                    await stack.enter_async_context(engine.api.generate(raw(ids, LONG), 30))
            assert not await engine.api.ready()  # they have left: it knew before this question
        assert len((await engine.generate(ask(prompt(4), 4))).ids) == 4
        await until(lambda: idle(engine.api))
        assert max([await cached(engine, ids) for ids in prompts]) < 10  # a first id or two in common
        assert min([await cached(engine, ids) for ids in prompts]) == 49  # now they have run


async def test_ready_knows_of_a_pause_and_the_process_is_alive(server: SGLangServer):
    """`/health` would be silent for 20 s."""
    async with kept(server) as engine:
        assert await engine.api.ready()
        async with paused(engine.api, "in_place"):
            assert not await engine.api.ready()
            assert await engine.api.alive()
        assert await engine.api.ready()


async def test_a_look_leaves_a_server_as_it_is_and_an_owner_ends_what_the_last_one_left(
    server: SGLangServer, refs: list[WeightsRef], tiny_models: dict[str, Path], tmp_path: Path
):
    """A supervisor that died in a pause may have left half of a version."""
    config = attached(server, tiny_models["qwen2"], tmp_path)
    cache = tmp_path / "runs" / "x" / "weights" / "cache-0"
    cache.mkdir(parents=True)
    async with kept(server) as engine:
        await engine.load(refs[1])
        task = await sampling(engine, ask(prompt(4), LONG))
        await engine.api.pause("in_place")
        await asyncio.to_thread(check_urls, config)
        assert not await engine.api.ready() and await engine.api.weight_label() == refs[1].label
        assert cache.exists()
        async with in_use(build_loader(config, 0, await attach(config, server.url))) as owner:
            assert await owner.api.ready() and await owner.api.weight_label() == INVALID_LABEL
            with pytest.raises(EngineLost) as lost:
                await task
            assert all(span.version == 1 for span in lost.value.partial.spans)
            await owner.load(refs[0])
            second_server = await attach(config, server.url)  # it was not paused
            async with in_use(build_loader(config, 0, second_server)) as again:
                assert await again.api.weight_label() == refs[0].label


def attached(server: SGLangServer, model: Path, directory: Path) -> RunConfig:
    return parse(
        {
            "name": "x",
            "run_dir": str(directory / "runs"),
            "model": {"path": str(model)},
            "data": {"train": "t.parquet"},
            "rollout": {"max_tokens": MAX_LEN, "max_new_tokens": MAX_LEN},
            "engine": {"name": "sglang", "urls": [server.url]},
            "weights": {"directory": "run"},
        }
    )


# -- weights -------------------------------------------------------------------------------------------


async def test_a_flush_with_running_requests_fails_and_in_place_updates_do_without(
    server: SGLangServer, refs: list[WeightsRef]
):
    async with kept(server) as engine:
        await engine.load(refs[0])
        task = await sampling(engine, ask(prompt(4), LONG))
        with pytest.raises(EngineError, match="/flush_cache"):
            await engine.api.flush_cache()
        await engine.load(refs[1])
        assert await engine.api.weight_label() == refs[1].label
        assert (await task).spans[-1].version == 1
        await engine.api.flush_cache(wait=5)


async def test_damaged_files_never_reach_the_server(
    server: SGLangServer, refs: list[WeightsRef], tmp_path: Path
):
    async with kept(server) as engine:
        await engine.load(refs[0])
        damaged = publish(tmp_path, 5)
        payload = Path(damaged.path) / disk.PAYLOAD
        content = bytearray(payload.read_bytes())
        content[-1] ^= 1
        payload.write_bytes(content)
        with pytest.raises(WeightsError, match="does not match its manifest"):
            await engine.load(damaged)
        assert not engine.loader.broken and engine.loader.loaded == refs[0]
        assert await engine.api.weight_label() == engine.loader.loaded.label == refs[0].label
        await engine.generate(ask(prompt(4), 4))


async def test_an_unfinished_load_breaks_the_engine_until_one_succeeds(
    server: SGLangServer, refs: list[WeightsRef]
):
    async with kept(server) as engine:
        await engine.load(refs[0])
        loader = engine.loader
        before = loader._end_of_pause
        deadline = loader._deadline

        async def is_late() -> bool:
            return loader._end_of_pause is not before

        with frozen(server):
            loader._deadline = 0.5
            load = asyncio.create_task(engine.load(refs[1]))
            await until(is_late)
        with pytest.raises(
            WeightsError, match=r"e0-v1 failed \(WeightsError: the load took longer than 0.5 s"
        ):
            await load
        loader._deadline = deadline
        assert await engine.api.ready()  # the pause ended all the same
        assert "e0-v1 failed" in engine.loader.broken
        with pytest.raises(EngineLost, match=INVALID_LABEL) as lost:
            await engine.generate(ask(prompt(4), 4))
        assert lost.value.partial.ids == ()
        await engine.load(refs[1])
        assert not engine.loader.broken
        assert (await engine.generate(ask(prompt(4), 4))).spans == (VersionSpan(0, 4, 1, 1),)


async def test_a_session_that_was_left_open_is_ended_by_the_next_one(
    server: SGLangServer, refs: list[WeightsRef]
):
    async with kept(server) as engine:
        await engine.api.begin_update()
        async with update_session(engine.api):
            with pytest.raises(WeightsError, match="already open"):
                await engine.api.begin_update()
        with pytest.raises(WeightsError, match="no weight-update session is open"):
            await engine.api.end_update()
        await engine.load(refs[0])


async def test_weights_that_the_run_never_gave_are_worth_nothing(
    server: SGLangServer, refs: list[WeightsRef]
):
    async with kept(server) as engine:
        await engine.api.update_from_disk(refs[1].path, "default")
        await engine.api.flush_cache()
        with pytest.raises(EngineLost, match="weights are 'default'") as lost:
            await engine.generate(ask(prompt(4), 4))
        assert lost.value.partial.ids == ()
        await engine.load(refs[0])
