"""A server that sleeps while the trainer has its devices: turns stay there, and nothing old survives.

The servers' memory saver is that of tools/sglang_cpu: what is released is gone, and NaN until it is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from asyncrl.config import RunConfig
from asyncrl.engines.base import Request
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi, ServerGone
from asyncrl.errors import EngineError
from asyncrl.rollout.server_pool import ServerPool
from asyncrl.runtime.activity import BusyTimer, Waits
from asyncrl.trainer.world import World
from asyncrl.types import Generation, PolicyVersion, StopReason
from asyncrl.weights.manifest import WeightsError, WeightsRef
from asyncrl.wire.messages.worker import EngineEntry, EngineUse
from tests.fakes.loop import Intervals, settle
from tests.fakes.sglang import loader_of, sglang_config
from tests.fakes.sglang_process import SGLangServer
from tests.sglang.conformance import DEADLINE, MAX_LEN, VOCABULARY, Versions, ask, in_use, prompt
from tests.sglang.conftest import Shared, Start

pytestmark = pytest.mark.full
FAMILY = "qwen2"
NEW = 700  # tokens: long enough to be under way when something happens
LONGER = 250
SALTS = iter(range(100))  # labels come again, as they never do in a run


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory, world: World) -> Versions:
    return Versions(FAMILY, tmp_path_factory.mktemp("sleep"), world, count=3)


@pytest.fixture(scope="module")
def server(sglang_server: Start, tiny_models: dict[str, object]) -> SGLangServer:
    return sglang_server(tiny_models[FAMILY], "--enable-memory-saver")


def shifts() -> RunConfig:
    config = sglang_config(MAX_LEN)
    return replace(config, engine=replace(config.engine, colocated=1), total_steps=1)


class Site:
    """A server as a run with shifts has it: its loader, and a worker's pool."""

    def __init__(self, server: SGLangServer, config: RunConfig) -> None:
        self._config = config
        self._url = server.url
        self._loaded_step = -1
        weights = replace(config.weights, mode=config.update_mode)
        self.loader = loader_of(ServerApi(server.url), weights)
        self.waits = Waits()
        self.salt = str(next(SALTS))
        self.pool = ServerPool(
            "train", self._connect, self.waits, BusyTimer(Intervals()), turn_patience=DEADLINE
        )

    def _connect(self, entry: EngineEntry, use: EngineUse) -> SGLangClient:
        return SGLangClient(ServerApi(entry.url), self._config, VOCABULARY, use, self.salt)

    async def load(self, ref: WeightsRef) -> None:
        await self.loader.load(ref)
        self._loaded_step = ref.version.step
        self.tell()

    async def sleep(self) -> None:
        await self.loader.sleep()
        self.tell(asleep=True)

    def tell(self, *other_entries: EngineEntry, asleep: bool = False) -> None:
        own_entry = EngineEntry(
            self._url, self._url, "1", PolicyVersion(0, self._loaded_step), not asleep, asleep=asleep
        )
        self.pool.update_table([own_entry, *other_entries])

    @property
    def use(self) -> EngineUse:
        return self.pool.usage_by_name[self._url]

    async def start(self, count: int, longest: int = -1) -> list[tuple[Request, asyncio.Task[Generation]]]:
        """Turns of which each is being sampled."""
        begin_events: list[asyncio.Event] = []

        def request(index: int) -> Request:
            event = asyncio.Event()
            begin_events.append(event)

            def watch(ids: list[int]) -> bool:
                event.set()
                return False

            new = NEW + LONGER * (index == longest)
            return replace(ask(prompt(20, index), new, f"{index}", index), stop_check=watch)

        requests = [request(index) for index in range(count)]
        turns = [
            (each_request, asyncio.create_task(self.pool.generate(each_request))) for each_request in requests
        ]
        await asyncio.gather(*(event.wait() for event in begin_events))
        return turns


@asynccontextmanager
async def site(server: SGLangServer) -> AsyncIterator[Site]:
    new_site = Site(server, shifts())
    try:
        async with asyncio.timeout(DEADLINE):
            yield new_site
    finally:
        await new_site.pool.close()
        await new_site.loader.close()


async def checked(
    versions: Versions, turns: list[tuple[Request, asyncio.Task[Generation]]]
) -> list[list[int]]:
    """Wait for all turns: each is whole, and each of its tokens the trainer's. Their versions, in order."""
    seen = []
    for request, turn in turns:
        generation = await turn
        assert (len(generation.ids), generation.stop) == (request.sampling.max_new_tokens, StopReason.LENGTH)
        assert versions.check(request, generation) == len(generation.ids)
        seen.append([span.version for span in generation.spans])
    return seen


async def test_turns_sleep_with_their_server_and_go_on_with_what_it_wakes_with(
    versions: Versions, server: SGLangServer
) -> None:
    """One of them is given up meanwhile, as that of an episode that is cancelled: it ends with the sleep, and
    the others see nothing of it."""
    async with site(server) as s:
        await s.load(versions.refs[0])
        turns = await s.start(9, longest=4)
        await s.sleep()
        await s.sleep()  # gives nothing up twice, which would end the server
        assert not any(task.done() for _, task in turns)
        _, given_up = turns.pop(4)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert given_up.cancelled()
        tokens = s.use.tokens
        held_request = ask(prompt(12, "held"), 16, "held")
        turns.append((held_request, asyncio.create_task(s.pool.generate(held_request))))
        await settle()
        assert s.pool.sleeps.asleep and s.use.requests == 1
        assert await s.loader.label() == "e0-v0"  # it can be looked after
        await s.load(versions.refs[1])
        assert s.use.tokens - tokens < 8 * 8  # what was on its way when it fell asleep
        assert await checked(versions, turns) == [[0, 1]] * 8 + [[1]]
        assert (s.use.requests, s.use.lost, s.use.moved, s.use.retracted) == (10, 0, 0, 0)
        await s.loader.api.flush_cache(wait=0.2)  # is refused while a request is left, as a longer one


async def test_a_server_wakes_with_the_version_that_it_had(versions: Versions, server: SGLangServer) -> None:
    async with site(server) as s:
        await s.load(versions.refs[0])
        turns = await s.start(2)
        for _ in range(2):
            await s.sleep()
            await s.load(versions.refs[0])
        assert await checked(versions, turns) == [[0]] * 2
        assert s.use.retracted == 0


async def test_weights_that_were_given_up_are_gone_until_a_version_is_loaded(
    versions: Versions, server: SGLangServer
) -> None:
    """What would be seen of an engine that only pauses, or takes its memory back and no weights."""
    async with site(server) as s:
        await s.load(versions.refs[0])
        await s.sleep()
        async with s.loader.sleeping.waking_load():
            pass
        s.tell()
        with pytest.raises(EngineError, match="cannot parse"):  # null is no log-prob
            await s.pool.generate(ask(prompt(4), 4))
        await s.sleep()
        await s.load(versions.refs[0])
        again = ask(prompt(4), 4, "again")
        assert await checked(versions, [(again, asyncio.create_task(s.pool.generate(again)))]) == [[0]]


async def test_a_server_sleeps_on_where_a_version_cannot_be_read(
    versions: Versions, server: SGLangServer
) -> None:
    async with site(server) as s:
        await s.load(versions.refs[0])
        turns = await s.start(2)
        await s.sleep()
        with pytest.raises(WeightsError):  # nothing is touched
            await s.loader.load(replace(versions.refs[2], path="/nowhere"))
        assert s.loader.sleeping.asleep and not s.loader.sleeping.unknown_reason
        assert not any(task.done() for _, task in turns)
        await s.load(versions.refs[1])
        assert await checked(versions, turns) == [[0, 1]] * 2


async def test_the_turns_of_a_server_that_is_killed_asleep_go_on_at_another(
    versions: Versions, server: SGLangServer, shared_server: Shared
) -> None:
    async with site(server) as s:
        await s.load(versions.refs[0])
        turns = await s.start(4)
        await s.sleep()
        await asyncio.to_thread(server.kill)
        with pytest.raises(WeightsError, match="resume_memory_occupation failed"):
            await s.loader.load(versions.refs[1])
        assert "waking did not finish" in s.loader.sleeping.unknown_reason  # its supervisor gives it up
        with pytest.raises(ServerGone):
            await s.loader.api.server_info()
        other_server = await asyncio.to_thread(shared_server, FAMILY)
        async with in_use(loader_of(ServerApi(other_server.url), shifts().weights)) as loader:
            await loader.load(versions.refs[2])
            s.tell(
                EngineEntry(other_server.url, other_server.url, "1", PolicyVersion(0, 2), True), asleep=True
            )
            assert await checked(versions, turns) == [[0, 2]] * 4
