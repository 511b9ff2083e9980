"""A rollout worker: many episodes in one asyncio loop, over an engine of its own or over all servers.

consumes: assignments, weight versions and Sleep or the table of servers, the clock (control); acks and
    fences (bulk)
waits for: the coordinator, engines, tools and rewards -- each by name, see `waits`
unblocks: the coordinator (turns and endings), in sequence and kept until acknowledged

`serve` runs side by side: _listen_control, _listen_bulk, _keep_contact, the outbox and the loading of weights
into own engines. Each Assign starts a task of `EpisodeRunner.run`.

The worker owns nothing that could be lost: records that were not acknowledged are sent again, and an episode
is continued from its last durable turn by the worker that gets it next.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, assert_never

import torch

from asyncrl.algorithms.recipe import imitates
from asyncrl.config import RunConfig
from asyncrl.engines.base import Engine
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineError, one_line
from asyncrl.gateway import Gateway
from asyncrl.isolation.calls import exits_raise
from asyncrl.observe.timeline import START, Timeline
from asyncrl.remote import scorer_url
from asyncrl.rollout.agent_player import AgentPlayer, Agents
from asyncrl.rollout.context import EpisodeContext, EpisodeRun
from asyncrl.rollout.demonstrations import DemonstrationPlayer, NoEngine
from asyncrl.rollout.episode_runner import EpisodeRunner, Player
from asyncrl.rollout.samplers import LocalSampler, engine_factory
from asyncrl.rollout.server_pool import LANES, Connect, ServerPool, connector
from asyncrl.rollout.turn_player import TurnPlayer
from asyncrl.runtime.activity import Activity, BusyTimer, Waits
from asyncrl.runtime.liveness import Contact, ContactState
from asyncrl.runtime.mirror import Mirror
from asyncrl.runtime.process import at_ending
from asyncrl.runtime.weight_loader import slept
from asyncrl.tools.snapshots import Snapshots
from asyncrl.types import NO_VERSION
from asyncrl.wire.messages import shared, worker
from asyncrl.wire.messages.channels import ToWorkerBulk, ToWorkerControl
from asyncrl.wire.outbox import Outbox
from asyncrl.wire.sockets import AsyncLink, Endpoints, identity

log = logging.getLogger("asyncrl.worker")

FLUSH = 2.0  # seconds for the last records to become durable when stopping
SPARE_THREADS = 8  # beside one per episode for blocking tools: loading weights must not wait for those


@exits_raise()
def run(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str) -> int:
    """Run a rollout worker until `Stop`. Returns 0, or 1 without a coordinator or engine."""
    torch.set_num_threads(config.launch.threads)
    sampling = config.total_steps and not imitates(config)  # first: its files may register a shaping
    parts = EpisodeParts(config).load()
    remote = config.engine.remote
    build = None if remote else engine_factory(config, index)
    connect = {name: connector(config, name) for name in dict(config.scorer_places)}
    connect |= dict.fromkeys([*LANES, *config.scorers_lent], connector(config)) if remote else {}
    engine: Engine | None = None if sampling else NoEngine()
    if engine is None and build is not None and not config.shifts:
        engine = build()
    gc.collect()
    gc.freeze()  # a collection that scans torch and all modules stops every episode for a third of a second
    gc.set_threshold(10_000)  # of the many young objects of a step hardly any is in a cycle
    # Not asyncio.run: that waits for threads, and a blocking tool may hold one for ever.
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(config.rollout.slots + SPARE_THREADS))
    role = RolloutWorker(endpoints, index, incarnation, parts, build, connect, engine)
    # What tools, rewards and agents had started ends by the same signal: that is no result of theirs.
    at_ending(loop, role.leave)
    try:
        return loop.run_until_complete(role.serve())
    except ConfigError:
        raise
    except AsyncrlError as error:
        log.error("worker %d leaves: %s", index, one_line(error))
        return 1
    finally:
        loop.close()


class RolloutWorker:
    """Owns the episodes and the contact with the coordinator.

    `build` makes an embedded engine with the initial weights; it may be called from a thread. `connect` makes
    clients of servers, those of the lanes of engines where there are none embedded, and those of scorers.
    `engine`: the one of training, if it is there already.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        index: int,
        incarnation: str,
        parts: EpisodeParts,
        build: Callable[[], Engine] | None,
        connect: Mapping[str, Connect],
        engine: Engine | None,
    ) -> None:
        config = self.config = parts.config
        self.index = index
        self.incarnation = incarnation
        self._parts = parts
        self._endpoints = endpoints
        self._name = identity("rollout", index, incarnation)
        run_dir = Path(config.run_dir) / config.name
        self.timeline = Timeline(run_dir / "timeline" / f"rollout-{index}.jsonl")
        self.timeline.past(START, 0.0)
        self.activity = Activity(self.timeline)
        self.waits, self.busy_timer = Waits(activity=self.activity), BusyTimer(self.timeline)
        self._mirror = Mirror(config, endpoints, "rollout", index, self.timeline)
        self._local: dict[str, LocalSampler] = {}
        if build is not None:
            waited = self.waits, self.busy_timer, self.timeline, config.weights.deadline, self._mirror
            self._local["train"] = LocalSampler("train", build, *waited, engine=engine)
            self._local["eval"] = LocalSampler("eval", build, *waited, pinned=True)
        self._servers: dict[str, worker.EngineEntry] = {}  # by name
        self._uses: dict[str, worker.EngineUse] = {}  # by the server's name
        pool = (self.waits, self.busy_timer, config.engine.start_timeout, self._uses)
        self._pools = {name: ServerPool(name, one, *pool) for name, one in connect.items()}
        readers: dict[str, ServerPool | LocalSampler] = {**self._pools}
        if self._local:
            readers |= dict.fromkeys(config.scorers_lent, self._local["train"])
        self.outbox = Outbox(lambda records, frames: self._bulk.send(records, frames))
        self._snapshots = Snapshots(str(run_dir.absolute()), config.store.keep_bytes)
        context = EpisodeContext(
            parts.rules,
            parts.reward,
            self.outbox,
            self.waits,
            oldest=lambda: self._oldest,
            snapshots=self._snapshots,
            reader=lambda source: readers.get(config.reader(source)),
            top=config.kl.top_k,
        )
        gateway = Gateway(config.rollout.agent_address)
        self.agents = Agents(parts.agent, gateway, parts.untrained) if parts.agent else None
        self.runner = EpisodeRunner(context, self._player)
        self._episodes: dict[shared.Attempt, asyncio.Task[None]] = {}
        self._assigned = self._oldest = 0
        self._falling: asyncio.Task[None] | None = None  # asleep
        self._leaving = False  # while the run goes on
        self._epoch = -1

    def _player(self, run: EpisodeRun) -> Player:
        if run.assign.sample.demonstration:
            return DemonstrationPlayer(run, self._parts.toolbox)
        if self.agents is not None:
            return AgentPlayer(run, self.agents)
        return TurnPlayer(run, self._parts.toolbox, self._parts.environment)

    async def serve(self) -> int:
        """Serve until `Stop`; raises DeadlineError when the coordinator does not come back."""
        loop = asyncio.get_running_loop()
        endpoints = self._endpoints
        scorer_url.set(lambda name: self._pools[name].url())
        if self.agents is not None:
            await self.agents.gateway.start()  # first: where it cannot, nothing is to be closed
        self._control = AsyncLink(endpoints.control, ToWorkerControl, self._name, endpoints.keys)
        self._bulk = AsyncLink(endpoints.bulk, ToWorkerBulk, self._name, endpoints.keys)
        self._ending: asyncio.Future[int] = loop.create_future()
        launch = self.config.launch
        self.contact = Contact(launch.lease, launch.start_timeout, loop.time())
        loading = [sampler.run(self._control.send) for sampler in self._local.values()]
        own = self._listen_control(), self._listen_bulk(), self._keep_contact(), self.outbox.run()
        services = [asyncio.create_task(service) for service in (*own, *loading)]
        try:
            waited: list[asyncio.Future[Any]] = [self._ending, *services]
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return int(done.pop().result())
        finally:
            await self._close(services)

    def end(self, reason: str) -> None:
        """Leave, as after `Stop`."""
        if not self._ending.done():
            log.info("worker %d stops: %s", self.index, reason)
            self._ending.set_result(0)

    def leave(self) -> None:
        """End because this machine is wanted back, or the whole job was told to end."""
        self._leaving = True
        self.end("by a signal")

    async def _close(self, services: list[asyncio.Task[None]]) -> None:
        """Drop the episodes, give the records a moment to become durable, close."""
        dropped = list(self._episodes.values())
        self._fence("leaving")
        if dropped:
            await asyncio.wait(dropped, timeout=FLUSH)  # what does not end goes with the process
        try:
            async with asyncio.timeout(FLUSH):
                await self.outbox.flushed()
        except TimeoutError:
            log.warning("records of %d episodes were not acknowledged", len(self.outbox.attempts))
        tasks = [*services, *filter(None, [self._falling])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._leaving:  # and says nothing after that
            await self._control.send(worker.Leave())
        samplers: list[LocalSampler | ServerPool] = [*self._local.values(), *self._pools.values()]
        for sampler in samplers:
            await sampler.close()
        self._mirror.close()
        if self.agents is not None:
            await self.agents.close()
        await self._parts.close()
        self.busy_timer.flush()
        self.activity.flush()
        self.timeline.close()
        self._control.close()
        self._bulk.close()

    # -- the coordinator -----------------------------------------------------------------------------

    async def _listen_control(self) -> None:
        while True:
            message: ToWorkerControl
            message, frames = await self._control.receive()
            self._contacted()
            match message:
                case shared.Welcome():
                    self._welcome(message)
                case worker.Assign():
                    self._assign(message, frames)
                case worker.Cancel():
                    self._drop(message.attempt)
                    asyncio.get_running_loop().run_in_executor(
                        None, self._snapshots.forget, message.attempt.uid
                    )
                case shared.LoadWeights():
                    self._local[message.lane].loads.offer(message.ref, message.probe)
                case shared.Sleep():
                    self._sleep(message)
                case worker.Engines():
                    self._servers = message.update(self._servers)
                    for pool in self._pools.values():
                        pool.table(self._servers.values())
                case worker.Clock():
                    self._oldest = message.oldest
                    self._sampler("train").changed.notify()
                case shared.Stop():
                    self.end(message.reason)
                case _:
                    assert_never(message)

    def _sleep(self, order: shared.Sleep) -> None:
        if self._falling is None or self._falling.done():  # else it is told again, if that was another order
            lanes = asyncio.gather(*(sampler.sleep() for sampler in self._local.values()))
            self._falling = asyncio.create_task(self._fall_asleep(order, lanes))

    async def _fall_asleep(self, order: shared.Sleep, lanes: Awaitable[Any]) -> None:
        await self._control.send(await slept(order, lanes))

    async def _listen_bulk(self) -> None:
        while True:
            message: ToWorkerBulk = (await self._bulk.receive())[0]
            self._contacted()
            match message:
                case worker.Ack():
                    self.outbox.ack(message.seq)
                case worker.Fenced():
                    self._drop(message.attempt)
                case _:
                    assert_never(message)

    def _contacted(self) -> None:
        self.contact.message_arrived(asyncio.get_running_loop().time())

    def _welcome(self, message: shared.Welcome) -> None:
        """A new coordinator counts its assignments from 0. It may lack records that the old one had not
        stored, so they are sent again."""
        restarted = message.coordinator_epoch != self._epoch
        if restarted:
            self._epoch = message.coordinator_epoch
            self._assigned = 0
        if restarted or self.outbox.paused:
            self.outbox.rewind()
        self.contact.welcomed = True

    async def _keep_contact(self) -> None:
        """Send heartbeats, or hellos while the coordinator is silent. DeadlineError after `start_timeout`."""
        while True:
            match self.contact.tick(asyncio.get_running_loop().time()):
                case ContactState.FINE:
                    await self._control.send(self._heartbeat())
                case ContactState.QUIET:
                    await self._hello()
                case ContactState.EXPIRED:
                    self._fence(f"nothing heard from the coordinator for {self.contact.seconds:g} s")
                    await self._hello()
                case ContactState.GONE:
                    raise DeadlineError(f"no coordinator for {self.contact.give_up:g} s")
            self.outbox.check()
            self.busy_timer.tick()
            self.activity.tick()
            await asyncio.sleep(self.contact.interval)

    async def _hello(self) -> None:
        self.outbox.pause()
        slots = self.config.rollout.slots
        acked = self.outbox.acked
        held = self._local["train"].loads.version if self._local else NO_VERSION
        await self._control.send(
            worker.WorkerHello(self.index, self.incarnation, slots, os.getpid(), acked, held)
        )

    def _heartbeat(self) -> worker.Heartbeat:
        """`held` includes attempts whose records are not acknowledged: no other worker may start them."""
        busy, idle = self.busy_timer.seconds
        return worker.Heartbeat(
            assigned=self._assigned,
            held=tuple(self.outbox.attempts | self._episodes.keys()),
            busy_s=busy,
            idle_s=idle,
            tokens=sum(local.tokens for local in self._local.values())
            + sum(use.tokens for use in self._uses.values()),
            waiting=self.waits.longest(),
            in_time=self.waits.in_time,
            engines=tuple(self._uses.values()),
            acked=self.outbox.acked,
            leaving=self._leaving,
        )

    # -- episodes ------------------------------------------------------------------------------------

    def _assign(self, message: worker.Assign, frames: list[bytes]) -> None:
        self._assigned = message.seq
        if message.attempt in self._episodes:
            return
        for other in [held for held in self._episodes if held.uid == message.attempt.uid]:
            self._drop(other)
        task = asyncio.create_task(self.runner.run(message, frames, self._sampler(message.lane)))
        self._episodes[message.attempt] = task
        task.add_done_callback(lambda task: self._over(message.attempt, task))

    def _over(self, attempt: shared.Attempt, task: asyncio.Task[None]) -> None:
        if self._episodes.get(attempt) is task:
            del self._episodes[attempt]
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._ending.done():
            self._ending.set_exception(error)

    def _drop(self, attempt: shared.Attempt) -> None:
        """Cancel an episode; it posts nothing more."""
        task = self._episodes.pop(attempt, None)
        if task is not None:
            task.cancel()

    def _fence(self, why: str) -> None:
        if self._episodes:
            log.warning("worker %d gives up %d episodes: %s", self.index, len(self._episodes), why)
        for attempt in list(self._episodes):
            self._drop(attempt)

    def _sampler(self, name: str) -> LocalSampler | ServerPool:
        return self._local[name] if self._local else self._pools[name]
