"""A way to kill a real server; keys; a full queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.engines.base import EngineBusy, EngineLost
from asyncrl.engines.sglang.http import KeyRejected, ServerApi, ServerGone
from asyncrl.errors import EngineError
from asyncrl.types import Generation
from asyncrl.weights.manifest import WeightsRef
from tests.fakes.sglang_process import SGLangServer
from tests.sglang.conformance import MAX_LEN, VOCABULARY, ask, prompt
from tests.sglang.conftest import KEYS, Shared
from tests.sglang.traps import LONG, WHOLE, idle, kept, publish, raw, sampling

pytestmark = pytest.mark.full
MANY = 40  # requests: more than run and wait at once


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> WeightsRef:
    return publish(tmp_path_factory.mktemp("versions"), 0)


async def test_ids_outside_the_vocabulary_kill_a_server_and_are_not_sent(
    shared_server: Shared, tmp_path: Path
):
    server = shared_server("qwen3")  # nobody needs it any more
    async with kept(server) as engine:
        await engine.load(publish(tmp_path, 0, "qwen3"))
        for ids in ((0, VOCABULARY), (-1,), (), prompt(MAX_LEN)):
            with pytest.raises(EngineError, match=r"vocabulary|prompt is empty|no room"):
                await engine.generate(ask(ids))
        task = await sampling(engine, ask(prompt(4), LONG))
        with pytest.raises(ServerGone):  # the trap
            await engine.api.generate_whole(raw((0, 10 * VOCABULARY), 4))
        with pytest.raises(EngineLost) as lost:
            await task
        assert len(lost.value.partial.ids) > 0
        assert server.has_gone()
        assert not await engine.api.alive()
        with pytest.raises(EngineLost, match="Cannot connect"):
            await engine.generate(ask(prompt(4)))


async def test_keys_open_what_they_are_for_and_a_wrong_one_is_named(guarded: SGLangServer):
    for keys, sees, rules in (
        (KEYS, True, True),
        ((KEYS[0],), True, False),
        (("no", "no"), False, False),
    ):
        server = ServerApi(guarded.url, *keys)
        assert await server.ready()  # needs none
        for question, allowed in ((server.model_info(), sees), (server.resume(), rules)):
            if allowed:
                await question
            else:
                with pytest.raises(KeyRejected, match="check the API key and the admin key"):
                    await question
        await server.close()


async def test_a_full_queue_is_busy_and_nothing_is_lost(guarded: SGLangServer, first: WeightsRef):
    async with kept(guarded, *KEYS) as engine:
        await engine.load(first)
        assert await engine.api.kv_use() == 0
        turns = [asyncio.create_task(engine.generate(ask(prompt(4), WHOLE, str(i)))) for i in range(MANY)]
        uses = [0.0]
        while not all(turn.done() for turn in turns):
            uses.append(await engine.api.kv_use() or 0.0)
        assert 0.4 < max(uses) < 0.8  # 8 times 404 tokens of 4,096 are 0.79; cached prefixes do not count
        outcomes = await asyncio.gather(*turns, return_exceptions=True)
        refused = [answer for answer in outcomes if isinstance(answer, BaseException)]
        served = [answer for answer in outcomes if isinstance(answer, Generation)]
        assert {type(error) for error in refused} == {EngineBusy}
        assert len(served) >= 8 and len(served) + len(refused) == MANY
        assert all(len(answer.ids) == WHOLE for answer in served)
        crowd = (engine.api.generate_whole(raw(prompt(4), WHOLE)) for _ in range(MANY))
        answers = await asyncio.gather(*crowd, return_exceptions=True)  # in plain HTTP too
        assert {type(answer) for answer in answers} == {bytes, EngineBusy}
        assert await idle(engine.api)
