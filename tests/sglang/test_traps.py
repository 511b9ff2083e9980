"""Ways to hang or fool a real server, and what the client does about each. To kill one: test_fatal_traps.py.

All tests here share a server and leave it running. They begin by loading what they rely on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.engines.base import EngineLost
from asyncrl.engines.sglang.connect import connect
from asyncrl.engines.sglang.engine import SGLangEngine
from asyncrl.engines.sglang.http import DISOWNED, PauseMode
from asyncrl.engines.sglang.stream import decode
from asyncrl.engines.sglang.versions import Sessions, dialect_of
from asyncrl.errors import EngineError
from asyncrl.launch.preflight import check_urls
from asyncrl.types import StopReason, VersionSpan
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsError, WeightsRef
from tests.sglang.conformance import EOS, MAX_LEN, ask, in_use, prompt, under_way
from tests.sglang.conftest import Shared
from tests.sglang.models import CONTEXT
from tests.sglang.server import SGLangServer
from tests.sglang.traps import LONG, WHOLE, client, frozen, idle, paused, publish, raw, run, sampling, until


@pytest.fixture(scope="module")
def server(shared_server: Shared) -> SGLangServer:
    return shared_server("qwen2")


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[WeightsRef]:
    """Versions 0 and 1."""
    directory = tmp_path_factory.mktemp("versions")
    return [publish(directory, version) for version in range(2)]


async def ending(stream: AsyncIterator[bytes]) -> str:
    """Why the server ended a raw request."""
    reasons = [decode(payload).meta_info.finish_reason async for payload in stream]
    assert reasons[-1] is not None
    return reasons[-1].type


# -- requests ------------------------------------------------------------------------------------------


def test_prefix_abort_is_real_and_ids_are_of_one_length(server: SGLangServer, refs: list[WeightsRef]):
    async def body() -> None:
        async with client(server) as engine:
            await engine.load(refs[0])
            async with AsyncExitStack() as stack:
                streams = [
                    await stack.enter_async_context(engine.server.generate(raw(prompt(4), LONG, rid=rid), 30))
                    for rid in ("p", "p1")
                ]
                for stream in streams:
                    await anext(stream)
                await engine.server.abort("p")
                assert [await ending(stream) for stream in streams] == ["abort", "abort"]  # the trap

            one, other = await under_way(engine, ask(prompt(4), LONG, "1"), ask(prompt(5), LONG, "11"))
            engine.abort("1")
            assert (await one).stop is StopReason.ABORT
            assert (await other).stop is StopReason.LENGTH

    run(body())


def test_an_end_of_sequence_id_that_is_no_stop_id_does_not_end_a_turn(
    server: SGLangServer, refs: list[WeightsRef]
):
    async def body() -> None:
        async with client(server) as engine:
            await engine.load(refs[0])
            turns = [ask(prompt(3, seed), WHOLE, str(seed), stop_ids=(EOS - 1,)) for seed in range(16)]
            answers = await asyncio.gather(*map(engine.generate, turns))
            assert engine.counters.requests > len(turns)  # some of them came to EOS, and went on
            for answer in answers:
                stopped = answer.ids[-1] == EOS - 1
                assert answer.stop is (StopReason.STOP if stopped else StopReason.LENGTH)
                assert stopped or len(answer.ids) == WHOLE
            assert any(EOS in answer.ids[:-1] for answer in answers)

    run(body())


def test_a_turn_clipped_by_the_server_is_an_error_not_a_full_turn(
    server: SGLangServer, refs: list[WeightsRef]
):
    async def body() -> None:
        async with client(server, max_len=CONTEXT) as engine:
            await engine.load(refs[0])
            with pytest.raises(
                EngineError, match=r"cut a turn to \d of 8 tokens: raise its --context-length"
            ):
                await engine.generate(ask(prompt(CONTEXT - 8), 20))

    run(body())


def test_a_cancelled_request_leaves_nothing_running(server: SGLangServer, refs: list[WeightsRef]):
    async def body() -> None:
        async with client(server) as engine:
            await engine.load(refs[0])
            [task] = await under_way(engine, ask(prompt(4), LONG))
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() and engine.running == 0
            await until(lambda: idle(engine))

    run(body())


def test_a_silent_server_loses_its_requests_but_not_what_they_have(
    server: SGLangServer, refs: list[WeightsRef]
):
    async def body() -> None:
        async with client(server, silence=4.0) as engine:
            await engine.load(refs[1])
            task = await sampling(engine, ask(prompt(4), LONG))
            with frozen(server), pytest.raises(EngineLost, match="got no answer within 4 s") as lost:
                await task
            partial = lost.value.partial
            assert 0 < len(partial.ids) == len(partial.logprobs) < LONG and partial.stop is StopReason.ABORT
            assert partial.spans == (VersionSpan(0, len(partial.ids), 1, 1),)
            await until(lambda: idle(engine))  # it was told, too

    run(body())


# -- pauses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_aborts_during_a_pause_are_not_lost(server: SGLangServer, refs: list[WeightsRef], mode: PauseMode):
    async def body() -> None:
        async with client(server) as engine:
            await engine.load(refs[0])
            running = await sampling(engine, ask(prompt(4), LONG, "running"))
            async with paused(engine.server, mode):
                held = asyncio.create_task(engine.generate(ask(prompt(4), LONG, "held")))
                await asyncio.sleep(0)
                assert not await engine.server.ready()  # the request is there: it came before this question
                engine.abort("running")
                engine.abort("held")
                assert (await held).ids == ()  # after ABORT_SECONDS: the server ignores the word
                assert 0 < len((await running).ids) < LONG and (await running).stop is StopReason.ABORT
            await until(lambda: idle(engine))
            assert engine.counters.aborted == 2 and engine.running == 0
            await engine.generate(ask(prompt(4), 4, "held"))

    run(body())


def test_requests_of_a_pause_whose_clients_left_never_run(server: SGLangServer, refs: list[WeightsRef]):
    prompts = [prompt(50, f"left {index}") for index in range(8)]

    async def cached(engine: SGLangEngine, ids: tuple[int, ...]) -> int:
        """How much of a prompt is in the cache: all but the last id, when a request with it has run."""
        return decode(await engine.server.generate_whole(raw(ids, 1))).meta_info.cached_tokens

    async def body() -> None:
        async with client(server) as engine:
            await engine.load(refs[0])
            async with paused(engine.server, "in_place"):
                async with AsyncExitStack() as stack:
                    for ids in prompts:  # each is entered when the server has begun to answer
                        await stack.enter_async_context(engine.server.generate(raw(ids, LONG), 30))
                assert not await engine.server.ready()  # they have left: it knew before this question
            assert len((await engine.generate(ask(prompt(4), 4))).ids) == 4
            await until(lambda: idle(engine))
            assert max([await cached(engine, ids) for ids in prompts]) < 10  # a first id or two in common
            assert min([await cached(engine, ids) for ids in prompts]) == 49  # now they have run

    run(body())


def test_ready_knows_of_a_pause_and_the_process_is_alive(server: SGLangServer):
    """`/health` would be silent for 20 s."""

    async def body() -> None:
        async with client(server) as engine:
            assert await engine.server.ready()
            async with paused(engine.server, "in_place"):
                assert not await engine.server.ready()
                assert await engine.server.alive()
            assert await engine.server.ready()

    run(body())


def test_a_look_leaves_a_server_as_it_is_and_an_owner_ends_what_the_last_one_left(
    server: SGLangServer, refs: list[WeightsRef], tiny_models: dict[str, Path], tmp_path: Path
):
    """A keeper that died in a pause may have left half of a version."""
    config = attached(server, tiny_models["qwen2"], tmp_path)
    cache = tmp_path / "runs" / "x" / "weights" / "cache-0"
    cache.mkdir(parents=True)

    async def body() -> None:
        async with client(server) as engine:
            await engine.load(refs[1])
            task = await sampling(engine, ask(prompt(4), LONG))
            await engine.server.pause("in_place")
            await asyncio.to_thread(check_urls, config)
            assert not await engine.server.ready() and await engine.label() == refs[1].label
            assert cache.exists()
            async with in_use(await connect(config, 0, server.url)) as owner:
                assert await owner.server.ready() and await owner.label() == DISOWNED
                with pytest.raises(EngineLost) as lost:
                    await task
                assert all(span.version == 1 for span in lost.value.partial.spans)
                await owner.load(refs[0])
                async with in_use(await connect(config, 0, server.url)) as again:  # it was not paused
                    assert await again.label() == refs[0].label

    run(body())


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


def test_a_flush_with_running_requests_fails_and_in_place_updates_do_without(
    server: SGLangServer, refs: list[WeightsRef]
):
    async def body() -> None:
        async with client(server) as engine:
            await engine.load(refs[0])
            task = await sampling(engine, ask(prompt(4), LONG))
            with pytest.raises(EngineError, match="/flush_cache"):
                await engine.server.flush_cache()
            async with paused(engine.server, "in_place"):
                with pytest.raises(
                    WeightsError, match="the cache was not flushed"
                ):  # the trap: it is updated,
                    await engine.server.update_from_disk(refs[1].path, refs[1].label, flush=True)
            assert await engine.label() == refs[0].label  # and says that it is not
            await engine.load(refs[1])
            assert await engine.label() == refs[1].label
            assert (await task).spans[-1].version == 1
            await engine.server.flush_cache(wait=5)

    run(body())


def test_damaged_files_never_reach_the_server(server: SGLangServer, refs: list[WeightsRef], tmp_path: Path):
    async def body() -> None:
        async with client(server) as engine:
            await engine.load(refs[0])
            damaged = publish(tmp_path, 5)
            payload = Path(damaged.path) / disk.PAYLOAD
            content = bytearray(payload.read_bytes())
            content[-1] ^= 1
            payload.write_bytes(content)
            with pytest.raises(WeightsError, match="does not match its manifest"):
                await engine.load(damaged)
            assert not engine.broken and engine.version == 0
            assert await engine.label() == engine.loaded_label == refs[0].label
            await engine.generate(ask(prompt(4), 4))

    run(body())


def test_an_unfinished_load_breaks_the_engine_until_one_succeeds(
    server: SGLangServer, refs: list[WeightsRef]
):
    async def body() -> None:
        async with client(server) as engine:
            await engine.load(refs[0])
            loader = engine._loader
            before, deadline = loader._end_of_pause, loader._deadline

            async def late() -> bool:
                return loader._end_of_pause is not before

            with frozen(server):
                loader._deadline = 0.5
                load = asyncio.create_task(engine.load(refs[1]))
                await until(late)
            with pytest.raises(WeightsError, match=r"e0-v1 failed \(WeightsError: it took longer than 0.5 s"):
                await load
            loader._deadline = deadline
            assert await engine.server.ready()  # the pause ended all the same
            with pytest.raises(EngineLost, match="e0-v1 failed") as lost:
                await engine.generate(ask(prompt(4), 4))
            assert lost.value.partial.ids == ()
            await engine.load(refs[1])
            assert not engine.broken
            assert (await engine.generate(ask(prompt(4), 4))).spans == (VersionSpan(0, 4, 1, 1),)

    run(body())


def test_a_session_that_was_left_open_is_ended_by_the_next_one(server: SGLangServer, refs: list[WeightsRef]):
    async def body() -> None:
        async with client(server) as engine:
            dialect = dialect_of((await engine.server.server_info()).version, server.url)
            if not isinstance(dialect, Sessions):
                pytest.skip("this version has no sessions")
            await engine.server.begin_update()
            async with dialect.update(engine.server):
                with pytest.raises(WeightsError, match="already open"):
                    await engine.server.begin_update()
            with pytest.raises(WeightsError, match="no weight-update session is open"):
                await engine.server.end_update()
            await engine.load(refs[0])

    run(body())


def test_weights_that_the_run_never_gave_are_worth_nothing(server: SGLangServer, refs: list[WeightsRef]):
    async def body() -> None:
        async with client(server) as engine:
            await engine.server.update_from_disk(refs[1].path, "default", flush=True)
            with pytest.raises(EngineLost, match="weights are 'default'") as lost:
                await engine.generate(ask(prompt(4), 4))
            assert lost.value.partial.ids == ()
            await engine.load(refs[0])

    run(body())
