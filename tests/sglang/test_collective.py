"""Weights broadcast into a real server: it samples with exactly these, and outlives a trainer that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
import torch

from asyncrl.config import WeightsConfig
from asyncrl.engines.base import EngineLost
from asyncrl.engines.sglang import http as sglang_http
from asyncrl.engines.sglang import loader as sglang_loader
from asyncrl.engines.sglang import receiver as sglang_receiver
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import INVALID_LABEL, PauseMode, ServerApi
from asyncrl.engines.sglang.receiver import Receiver
from asyncrl.errors import EngineError
from asyncrl.types import Generation, PolicyVersion
from asyncrl.weights.collective import Sender
from asyncrl.weights.manifest import WeightsError, WeightsRef
from tests.fakes.group_sender import SenderProcess
from tests.fakes.sglang import loader_of, sglang_config
from tests.fakes.sglang_process import SGLangServer
from tests.fakes.weights import snapshot_of
from tests.sglang.conformance import MAX_LEN, VOCABULARY, Versions, ask, in_use, prompt, seen, under_way
from tests.sglang.traps import Kept, running, until

FAMILY = "qwen2"
EPOCH = 7  # labels that no other test uses: what they salted is not found again
BUCKET_BYTES = 50_000  # several buckets
LONG = 60.0  # seconds in which everything is over that does not hang


@pytest.fixture
def server(shared_server: Callable[[str], SGLangServer]) -> SGLangServer:
    return shared_server(FAMILY)


@pytest.fixture
def versions(versions_of: Callable[[str], Versions]) -> Versions:
    return versions_of(FAMILY)


@pytest.fixture
def sender() -> Iterator[Sender]:
    with closing(Sender("127.0.0.1", BUCKET_BYTES, LONG, torch.device("cpu"))) as sender:
        yield sender


@contextmanager
def impatient(broadcast_server: BroadcastServer) -> Iterator[None]:
    """A load has a few seconds, and what waits for a stuck server afterwards gives up soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast_server.loader, "_deadline", 5.0)
        patch.setattr(sglang_receiver, "CLEANUP_SECONDS", 1.0)
        patch.setattr(sglang_http, "CLEANUP_SECONDS", 1.0)
        patch.setattr(sglang_loader, "RESUME_SECONDS", 2.0)
        yield


class Watched:
    """The server, as the receiver sees it. `event`: it has been told to receive for the `number`-th time."""

    def __init__(self, server: ServerApi, number: int) -> None:
        self.init_group = server.init_group
        self.destroy_group = server.destroy_group
        self.begin_update = server.begin_update
        self.end_update = server.end_update
        self._server = server
        self.url = server.url
        self.expect(number)

    def expect(self, number: int) -> None:
        """From now on."""
        self.event = asyncio.Event()
        self._left = number

    async def update_from_group(self, *arguments: Any, **settings: Any) -> None:
        task = asyncio.create_task(self._server.update_from_group(*arguments, **settings))
        self._left -= 1
        if not self._left:
            self.event.set()
        await task


class BroadcastServer(Kept):
    """A server into which weights are broadcast."""

    def __init__(self, server: ServerApi, mode: PauseMode) -> None:
        self.watched = Watched(server, 3)
        receiver = Receiver(self.watched, 0, 1)  # type: ignore[arg-type]
        config = WeightsConfig(mode=mode, deadline=LONG)
        super().__init__(server, loader_of(server, config, receiver=receiver), mode=mode)

    async def check(self, versions: Versions, version: int) -> None:
        """It samples with exactly these weights, under their label."""
        request = ask(prompt(20, version), 40, str(version))
        generation = await self.generate(request)
        assert [span.version for span in generation.spans] == [version]
        assert versions.check(request, generation) == 40


@asynccontextmanager
async def keeping(running: SGLangServer, mode: PauseMode = "in_place") -> AsyncIterator[BroadcastServer]:
    async with asyncio.timeout(4 * LONG):
        server = ServerApi(running.url)
        broadcast_server = BroadcastServer(server, mode)
        try:
            await server.flush_cache(wait=10)
            yield broadcast_server
        finally:
            await broadcast_server.close()


def offer(sender: Sender, versions: Versions, version: int) -> WeightsRef:
    return sender.offer_snapshot(snapshot_of(versions.tensors(version), PolicyVersion(EPOCH, version)))


async def test_it_samples_with_what_was_pushed(server, versions, sender):
    """Several buckets, three versions over one group."""
    async with keeping(server) as broadcast_server:
        for version in (1, 2, 3):
            await broadcast_server.load(offer(sender, versions, version))
            await broadcast_server.check(versions, version)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_requests_go_on_during_a_push(server, versions, sender, mode):
    """Their spans say where the version changed, and recorded log-probs are those of that version."""
    requests = [ask(prompt(8, index), 900, str(index), index) for index in range(4)]
    async with keeping(server, mode) as broadcast_server:
        await broadcast_server.load(offer(sender, versions, 1))
        tasks = await under_way(broadcast_server, *requests)
        await broadcast_server.load(offer(sender, versions, 2))
        for request, generation in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert seen(generation) == [1, 2]
            assert len(generation.ids) == 900
            compared = versions.check(request, generation)
            assert compared == (900 if mode == "retract" else generation.spans[0].end)
        await broadcast_server.check(versions, 2)


async def test_a_trainer_that_is_killed_in_mid_push(server, versions, sender):
    """The server, which waits for a broadcast, answers again at once, with an error. It holds a mixture then:
    a full push from the next trainer makes it whole."""
    async with keeping(server) as broadcast_server:
        trainer = SenderProcess(2, str(versions.paths[3] / "model.safetensors"), BUCKET_BYTES)
        start = time.monotonic()
        task = asyncio.create_task(broadcast_server.load(trainer.ref))
        await broadcast_server.watched.event.wait()
        trainer.end()
        with pytest.raises(WeightsError):
            await task
        assert time.monotonic() - start < LONG / 2
        await broadcast_server.load(offer(sender, versions, 1))
        await broadcast_server.check(versions, 1)


async def test_nothing_sampled_behind_a_push_that_was_cut_is_taken(server, versions, sender):
    """Requests under way are lost, with nothing but what the old weights sampled; others get nothing until a
    full load."""
    requests = [ask(prompt(8, index), 900, str(index), index) for index in range(4)]

    async def lost(task: Awaitable[Generation]) -> Generation:
        with pytest.raises(EngineLost) as error:
            await task
        return error.value.partial

    worker = SGLangClient(ServerApi(server.url), sglang_config(MAX_LEN), VOCABULARY)
    async with keeping(server) as broadcast_server, in_use(worker):
        await broadcast_server.load(offer(sender, versions, 1))
        worker.mark_version(PolicyVersion(EPOCH, 1))
        broadcast_server.watched.expect(3)
        trainer = SenderProcess(2, str(versions.paths[3] / "model.safetensors"), BUCKET_BYTES)
        tasks = [asyncio.create_task(worker.generate(request)) for request in requests]
        await until(lambda: running(broadcast_server.api, len(requests)))
        load = asyncio.create_task(broadcast_server.load(trainer.ref))
        await broadcast_server.watched.event.wait()
        held_request = asyncio.create_task(worker.generate(ask(prompt(9), 20, "held")))
        await asyncio.sleep(0)
        assert not await broadcast_server.api.ready()
        trainer.end()
        with pytest.raises(WeightsError):
            await load
        assert (
            await broadcast_server.api.ready() and await broadcast_server.api.weight_label() == INVALID_LABEL
        )
        partials = [await lost(task) for task in tasks]
        for request, partial in zip(requests, partials, strict=True):
            assert versions.check(request, partial) == len(partial.ids)
        assert (await lost(held_request)).ids == ()
        assert (await lost(worker.generate(ask(prompt(9), 20)))).ids == ()
        await broadcast_server.load(offer(sender, versions, 2))
        worker.mark_version(PolicyVersion(EPOCH, 2))
        await broadcast_server.check(versions, 2)
        request = ask(prompt(9), 20)
        assert versions.check(request, await worker.generate(request)) == 20


@pytest.mark.full
async def test_a_trainer_that_freezes_in_mid_push(server, versions, sender):
    """The push ends at its deadline, but the server is stuck until the end of the trainer, or its own."""
    async with keeping(server) as broadcast_server:
        trainer = SenderProcess(2, str(versions.paths[3] / "model.safetensors"), BUCKET_BYTES)
        with impatient(broadcast_server):
            task = asyncio.create_task(broadcast_server.load(trainer.ref))
            await broadcast_server.watched.event.wait()
            trainer.signal(SIGSTOP)
            with pytest.raises(WeightsError):
                await task
        assert broadcast_server.loader.broken
        with pytest.raises(EngineError):
            await broadcast_server.api.flush_cache(seconds=2.0)
        trainer.end()
        await broadcast_server.load(offer(sender, versions, 1))
        await broadcast_server.check(versions, 1)


@pytest.mark.full
async def test_a_server_that_freezes_before_it_joins(server, versions, sender):
    """The push ends at its deadline; the server, which joins when it wakes up, is not caught there."""
    async with keeping(server) as broadcast_server:
        ref = offer(sender, versions, 2)
        _signal(server, SIGSTOP)
        try:
            with impatient(broadcast_server), pytest.raises(WeightsError):
                await broadcast_server.load(ref)
        finally:
            _signal(server, SIGCONT)
        assert not broadcast_server.loader.broken  # it has its old weights
        await broadcast_server.load(ref)
        await broadcast_server.check(versions, 2)


async def test_weights_of_another_model_are_an_error(server, versions, sender):
    """A load that the server refuses is an error with its own words, and the next one is whole again."""
    async with keeping(server) as broadcast_server:
        tensors = versions.tensors(1)
        name = next(name for name in tensors if "embed_tokens" in name)
        wrong_tensors = tensors | {name: tensors[name][:-1].contiguous()}
        with pytest.raises(WeightsError, match="partially updated"):
            await broadcast_server.load(
                sender.offer_snapshot(snapshot_of(wrong_tensors, PolicyVersion(EPOCH, 4)))
            )
        await broadcast_server.load(offer(sender, versions, 3))
        await broadcast_server.check(versions, 3)


def _signal(server: SGLangServer, number: int) -> None:
    for process in server.processes():
        process.send_signal(number)
