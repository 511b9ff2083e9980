"""A pool of two real servers: turns survive one that hangs, is updated, is killed.

Every token that comes out is compared with the trainer's model, teacher-forced, at the version of its span.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from asyncrl.engines.base import Request, remaining_request, with_part
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import PauseMode, ServerApi
from asyncrl.rollout.server_pool import ServerPool
from asyncrl.runtime.activity import BusyTimer, Waits
from asyncrl.trainer.world import World
from asyncrl.types import Generation, PolicyVersion, StopReason
from asyncrl.wire.messages.worker import EngineEntry, EngineUse
from tests.fakes.loop import Intervals
from tests.fakes.sglang import loader_of, sglang_config
from tests.fakes.sglang_process import SGLangServer
from tests.sglang.conformance import DEADLINE, MAX_LEN, VOCABULARY, Versions, ask, prompt
from tests.sglang.conftest import KEYS, Shared

pytestmark = pytest.mark.full
FAMILY = "qwen2"
# long enough to be under way when something happens
PROMPT = 20
NEW = 900
Turn = tuple[Request, asyncio.Task[Generation]]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory, world: World) -> Versions:
    return Versions(FAMILY, tmp_path_factory.mktemp("pool"), world, count=3)


@pytest.fixture(scope="module")
def survivor(shared_server: Shared) -> SGLangServer:
    return shared_server(FAMILY)


@pytest.fixture
def victim(survivor: SGLangServer, guarded: SGLangServer) -> SGLangServer:
    return guarded


class Site:
    """A pool and, as supervisors have them, the loaders of its servers."""

    def __init__(self, mode: PauseMode, *servers: SGLangServer) -> None:
        self._config = sglang_config(MAX_LEN, mode)
        self.clients: list[SGLangClient] = []
        self.loaders = {
            server.url: loader_of(ServerApi(server.url, *KEYS), self._config.weights) for server in servers
        }
        self.held = dict.fromkeys(self.loaders, 0)
        self.pool = ServerPool(
            "train", self._connect, Waits(), BusyTimer(Intervals()), turn_patience=DEADLINE
        )

    def _connect(self, entry: EngineEntry, use: EngineUse) -> SGLangClient:
        self.clients.append(SGLangClient(ServerApi(entry.url, *KEYS), self._config, VOCABULARY, use))
        return self.clients[-1]

    async def load(self, server: SGLangServer, versions: Versions, version: int) -> None:
        await self.loaders[server.url].load(versions.refs[version])
        self.held[server.url] = version
        self.tell()

    def tell(self, *without: SGLangServer) -> None:
        """Send the table: every server with what it holds."""
        missing = {server.url for server in without}
        self.pool.update_table(
            [
                EngineEntry(url, url, "1", PolicyVersion(0, version), True)
                for url, version in self.held.items()
                if url not in missing
            ]
        )

    def start(self, count: int) -> list[Turn]:
        """Long turns, one per session."""
        requests = [ask(prompt(PROMPT, session), NEW, f"{session}", session) for session in range(count)]
        return [(request, asyncio.create_task(self.pool.generate(request))) for request in requests]

    async def under_way(self) -> None:
        """Return when every turn that was started is being sampled."""
        await asyncio.sleep(0)
        for client in self.clients:
            await client.generate(ask(prompt(3), 8, "gate"))  # began after them, and is through


@asynccontextmanager
async def site(mode: PauseMode, *servers: SGLangServer) -> AsyncIterator[Site]:
    new_site = Site(mode, *servers)
    try:
        async with asyncio.timeout(DEADLINE):
            for loader in new_site.loaders.values():
                await loader.api.flush_cache(wait=10)  # labels come again, as they never do in a run
            yield new_site
    finally:
        for loader in new_site.loaders.values():
            await loader.close()
        await new_site.pool.close()


async def checked(versions: Versions, turns: list[Turn]) -> list[list[int]]:
    """Wait for all turns: each is whole, and each of its tokens the trainer's. Their versions, in order."""
    seen = []
    for request, turn in turns:
        generation = await turn
        assert (len(generation.ids), generation.stop) == (NEW, StopReason.LENGTH)
        assert versions.check(request, generation) == NEW
        seen.append([span.version for span in generation.spans])
    return seen


async def test_a_server_that_hangs_gives_its_turns_back_when_it_leaves_the_table(
    versions: Versions, survivor: SGLangServer, victim: SGLangServer
) -> None:
    async with site("in_place", survivor, victim) as s:
        await s.load(survivor, versions, 0)
        await s.load(victim, versions, 1)
        turns = s.start(4)
        await s.under_way()
        for process in victim.processes():
            process.send_signal(signal.SIGSTOP)
        try:
            s.tell(victim)
            seen = await checked(versions, turns)
        finally:
            for process in victim.processes():
                process.send_signal(signal.SIGCONT)
        assert sorted(seen) == [[0], [0], [1, 0], [1, 0]]


async def test_episodes_stay_where_their_prefixes_are_cached(
    versions: Versions, survivor: SGLangServer, victim: SGLangServer
) -> None:
    async def episode(pool: ServerPool, index: int) -> None:
        ids = prompt(PROMPT, index)
        for turn in range(4):
            ids += (await pool.generate(ask(ids, 20, f"{index}", index))).ids + prompt(10, (index, turn))

    async with site("in_place", survivor, victim) as s:
        await s.load(survivor, versions, 2)
        await s.load(victim, versions, 2)
        # Two per server: so few are never moved for the sake of balance, however their turns interleave.
        await asyncio.gather(*(episode(s.pool, index) for index in range(4)))
        for use in s.pool.usage_by_name.values():
            assert (use.requests, use.moved) == (8, 0)
            assert use.prompt_tokens == 2 * (20 + 50 + 80 + 110)
            # Of each turn all but the reply, and the token before it, whose KV nobody had computed.
            assert use.cached_tokens == pytest.approx(2 * (39 + 69 + 99), abs=8)


async def test_turns_that_an_update_takes_back_go_on_with_the_new_weights(
    versions: Versions, survivor: SGLangServer
) -> None:
    async with site("abort", survivor) as s:
        await s.load(survivor, versions, 0)
        turns = s.start(4)
        await s.under_way()
        await s.load(survivor, versions, 1)
        assert await checked(versions, turns) == [[0, 1]] * 4
        (use,) = s.pool.usage_by_name.values()
        assert (use.lost, use.moved) == (4, 0)


async def test_the_turns_of_a_killed_server_go_on_at_the_other(
    versions: Versions, survivor: SGLangServer, victim: SGLangServer
) -> None:
    async with site("in_place", survivor, victim) as s:
        await s.load(survivor, versions, 0)
        await s.load(victim, versions, 1)
        turns = s.start(8)
        await s.under_way()
        family = victim.processes()
        assert len(family) >= 3  # HTTP, scheduler, detokenizer
        victim.process.kill()  # the first process only: its children notice by themselves
        assert await asyncio.to_thread(victim.has_gone)
        seen = await checked(versions, turns)
        assert sorted(seen) == [[0]] * 4 + [[1, 0]] * 4
        alive, dead = s.pool.usage_by_name.values()
        assert (dead.lost, alive.lost, alive.moved, dead.moved) == (4, 0, 4, 0)
        assert await checked(versions, s.start(2)) == [[0]] * 2  # the dead one is not asked again


async def test_a_turn_goes_on_after_a_part_of_it_with_newer_weights(
    versions: Versions, survivor: SGLangServer
) -> None:
    """As at another worker: all that it knows is what was durable."""
    parts: list[Generation] = []

    async def on_part(sampled: Generation) -> None:
        parts.append(sampled)

    async with site("in_place", survivor) as s:
        await s.load(survivor, versions, 0)
        ((request, uncut_turn),) = s.start(1)
        whole_turn = await s.pool.generate(replace(request, session="w", part_seconds=0.1, on_part=on_part))
        assert len(parts) > 2 and len((await uncut_turn).ids) == len(whole_turn.ids)
        for part in parts:
            count = len(part.ids)
            assert (part.ids, part.logprobs) == (whole_turn.ids[:count], whole_turn.logprobs[:count])
            assert versions.check(request, part) == count
        await s.load(survivor, versions, 1)
        part = parts[len(parts) // 2]
        after = with_part(request, part, await s.pool.generate(remaining_request(request, part)))
        assert (after.ids[: len(part.ids)], len(after.ids), after.stop) == (part.ids, NEW, StopReason.LENGTH)
        assert [span.version for span in after.spans] == [0, 1]
        assert versions.check(request, after) == NEW
