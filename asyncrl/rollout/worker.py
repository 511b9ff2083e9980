"""A rollout worker: many episodes in a single asyncio loop, over an embedded engine or over all servers.

consumes: assignments, weight versions and Sleep or the table of servers, `MinVersion` (control); acks and
    fences (bulk)
waits for: the coordinator, engines, tools and rewards -- each by name, see `waits`
unblocks: the coordinator (turns and endings), in sequence and kept until acknowledged

`serve` runs side by side: _listen_control, _listen_bulk, _keep_contact, the outbox and the loading of weights
into embedded engines. Each Assign starts a task of `EpisodeRunner.run`.

A worker owns nothing that could be lost: unacknowledged records are sent again, and the next worker continues
an episode after the last durable turn.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from asyncrl.observe.timeline import START_EVENT, Timeline
from asyncrl.remote import scorer_url
from asyncrl.rollout.agent_player import AgentPlayer, Agents
from asyncrl.rollout.context import EpisodeContext
from asyncrl.rollout.demonstrations import DemonstrationPlayer, NoEngine
from asyncrl.rollout.episode_run import EpisodeRun
from asyncrl.rollout.episode_runner import EpisodeRunner, Player
from asyncrl.rollout.images import WorkerImages
from asyncrl.rollout.samplers import LocalSampler, engine_factory
from asyncrl.rollout.server_pool import ENGINE_LANES, Connect, ServerPool, connector
from asyncrl.rollout.turn_player import TurnPlayer
from asyncrl.runtime.activity import Activity, BusyTimer, Waits
from asyncrl.runtime.liveness import Contact, ContactState
from asyncrl.runtime.mirror import Mirror
from asyncrl.runtime.probe_sampling import ProbeSampling
from asyncrl.runtime.process import on_end_signal
from asyncrl.runtime.weight_loader import sleep_answer
from asyncrl.tools.snapshots import Snapshots
from asyncrl.types import NO_VERSION
from asyncrl.wire.messages import shared, worker
from asyncrl.wire.messages.channels import ToWorkerBulk, ToWorkerControl
from asyncrl.wire.outbox import Outbox
from asyncrl.wire.sockets import AsyncLink, Endpoints, identity

log = logging.getLogger("asyncrl.worker")

FLUSH_SECONDS = 2.0  # seconds for the last records to become durable when stopping
SPARE_THREADS = 8  # beside a thread per episode for blocking tools: loading weights must not wait for tools


@exits_raise()
def run(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str) -> int:
    """Run a rollout worker until `Stop`. Returns 0, or 1 without a coordinator or engine."""
    torch.set_num_threads(config.launch.threads)
    samples_turns = config.total_steps and not imitates(config)  # first: user files may register a shaping
    episode_parts = EpisodeParts(config).load_parts()
    uses_servers = config.engine.remote
    build_engine = None if uses_servers else engine_factory(config, index)
    connectors = {name: connector(config, name) for name in dict(config.scorer_places)}
    if uses_servers:
        connectors |= dict.fromkeys([*ENGINE_LANES, *config.scorers_lent], connector(config))

    engine: Engine | None = None if samples_turns else NoEngine()
    if engine is None and build_engine is not None and not config.shifts:
        engine = build_engine()

    gc.collect()
    gc.freeze()  # a collection that scans torch and all modules stops every episode for a third of a second
    gc.set_threshold(10_000)  # hardly any of a step's many young objects is in a cycle

    # Not asyncio.run, which waits for threads: a blocking tool may hold a thread for ever.
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(config.rollout.slots + SPARE_THREADS))
    rollout_worker = RolloutWorker(
        endpoints, index, incarnation, episode_parts, build_engine, connectors, engine
    )
    # Programs of tools, rewards and agents end by the same signal, which must not count as a result.
    on_end_signal(loop, rollout_worker.leave_run)

    try:
        return loop.run_until_complete(rollout_worker.serve())
    except ConfigError:
        raise
    except AsyncrlError as error:
        log.error("worker %d exits: %s", index, one_line(error))
        return 1
    finally:
        loop.close()


class RolloutWorker:
    """Owns the running episodes and the contact with the coordinator.

    `build_engine` makes an embedded engine with the initial weights, possibly in a thread. `connectors` make
    clients of servers: for the engine lanes, where no engine is embedded, and for scorers. `engine`: the
    training engine, if already built.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        index: int,
        incarnation: str,
        episode_parts: EpisodeParts,
        build_engine: Callable[[], Engine] | None,
        connectors: Mapping[str, Connect],
        engine: Engine | None,
    ) -> None:
        config = episode_parts.config
        self.config = config
        self.index = index
        self.incarnation = incarnation
        self._episode_parts = episode_parts
        self._endpoints = endpoints
        self._identity = identity("rollout", index, incarnation)
        run_directory = Path(config.run_dir) / config.name
        self.timeline = Timeline(run_directory / "timeline" / f"rollout-{index}.jsonl")
        self.timeline.record_past(START_EVENT, 0.0)
        self.activity = Activity(self.timeline)
        self.waits = Waits(activity=self.activity)
        self.busy_timer = BusyTimer(self.timeline)

        # Embedded engines: one for training, one for validation.
        self._weight_mirror = Mirror(config, endpoints, "rollout", index, self.timeline)
        self._local_samplers: dict[str, LocalSampler] = {}
        if build_engine is not None:
            make_sampler = partial(
                LocalSampler,
                build_engine=build_engine,
                waits=self.waits,
                busy_timer=self.busy_timer,
                timeline=self.timeline,
                load_deadline=config.weights.deadline,
                mirror=self._weight_mirror,
            )
            sampler = make_sampler("train", engine=engine)
            if config.total_steps:  # without training nobody scores the samples
                sampler.probe_sampling = ProbeSampling(
                    config, index, sampler.generate_uncounted, sampler.release
                )
            self._local_samplers["train"] = sampler
            self._local_samplers["eval"] = make_sampler("eval", keeps_version=True)

        # Engines on servers, and scorers. The training engine may also score for scorers that lack a server.
        self._servers: dict[str, worker.EngineEntry] = {}  # keys: server names
        self._server_usage: dict[str, worker.EngineUse] = {}  # keys: server names
        make_pool = partial(
            ServerPool,
            waits=self.waits,
            busy_timer=self.busy_timer,
            turn_patience=config.engine.start_timeout,
            usage_by_name=self._server_usage,
        )
        self._server_pools = {name: make_pool(name, connect) for name, connect in connectors.items()}
        turn_readers: dict[str, ServerPool | LocalSampler] = {**self._server_pools}
        if self._local_samplers:
            turn_readers |= dict.fromkeys(config.scorers_lent, self._local_samplers["train"])

        # Episodes: what each of them shares, and the player of agent programs.
        self.outbox = Outbox(lambda records, frames: self._bulk_link.send(records, frames))
        self._snapshots = Snapshots(str(run_directory.absolute()), config.store.keep_bytes)
        self.images = WorkerImages(lambda request: self._bulk_link.send(request), self.waits)
        episode_context = EpisodeContext(
            episode_parts.rules,
            episode_parts.reward,
            self.outbox,
            self.waits,
            self.images,
            min_version=lambda: self._min_version,
            snapshots=self._snapshots,
            scorer_of=lambda source: turn_readers.get(config.reader(source)),
            top_tokens=config.kl.top_k,
        )
        self.agents: Agents | None = None
        gateway = Gateway(config.rollout.agent_address, config.rollout.slots)
        if episode_parts.agent:
            self.agents = Agents(episode_parts.agent, gateway, episode_parts.untrained)
        self.runner = EpisodeRunner(episode_context, self._make_player)

        # Messages of the coordinator change this state.
        self._episodes: dict[shared.Attempt, asyncio.Task[None]] = {}
        self._last_assigned = 0
        self._min_version = 0
        self._sleep_task: asyncio.Task[None] | None = None
        self._is_leaving = False  # True: the worker leaves before the run has ended
        self._coordinator_epoch = -1

    def _make_player(self, run: EpisodeRun) -> Player:
        if run.assignment.sample.demonstration:
            return DemonstrationPlayer(run, self._episode_parts.toolbox)
        if self.agents is not None:
            return AgentPlayer(run, self.agents)
        return TurnPlayer(run, self._episode_parts.toolbox, self._episode_parts.environment)

    async def serve(self) -> int:
        """Serve until `Stop`; raises DeadlineError when the coordinator does not come back."""
        loop = asyncio.get_running_loop()
        endpoints = self._endpoints
        scorer_url.set(lambda name: self._server_pools[name].url())
        if self.agents is not None:
            await self.agents.gateway.start()  # first: if starting fails, nothing has to be closed
        self._control_link = AsyncLink(endpoints.control, ToWorkerControl, self._identity, endpoints.keys)
        self._bulk_link = AsyncLink(endpoints.bulk, ToWorkerBulk, self._identity, endpoints.keys)
        self._exit_code: asyncio.Future[int] = loop.create_future()
        launch = self.config.launch
        self.contact = Contact(launch.lease, launch.start_timeout, loop.time())
        load_loops = [sampler.run(self._control_link.send) for sampler in self._local_samplers.values()]
        worker_loops = (
            self._listen_control(),
            self._listen_bulk(),
            self._keep_contact(),
            self.outbox.run_sender(),
        )
        services = [asyncio.create_task(service) for service in (*worker_loops, *load_loops)]
        try:
            end_futures: list[asyncio.Future[Any]] = [self._exit_code, *services]
            finished, _ = await asyncio.wait(end_futures, return_when=asyncio.FIRST_COMPLETED)
            return int(finished.pop().result())
        finally:
            await self._close_all(services)

    def end_serving(self, reason: str) -> None:
        """Leave, as after `Stop`."""
        if not self._exit_code.done():
            log.info("worker %d stops: %s", self.index, reason)
            self._exit_code.set_result(0)

    def leave_run(self) -> None:
        """Leave because a signal arrived: the machine is needed elsewhere, or the whole job was told to
        end."""
        self._is_leaving = True
        self.end_serving("by a signal")

    async def _close_all(self, services: list[asyncio.Task[None]]) -> None:
        """Drop the episodes, give the records a moment to become durable, and close everything."""
        dropped_tasks = list(self._episodes.values())
        self._drop_all_episodes("leaving")
        if dropped_tasks:
            await asyncio.wait(dropped_tasks, timeout=FLUSH_SECONDS)  # unfinished tasks end with the process

        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await self.outbox.wait_until_flushed()
        except TimeoutError:
            log.warning("episodes whose records were not acknowledged: %d", len(self.outbox.attempts))

        tasks = [*services, *filter(None, [self._sleep_task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        if self._is_leaving:  # the last message of the worker
            await self._control_link.send(worker.Leave())

        samplers: list[LocalSampler | ServerPool] = [
            *self._local_samplers.values(),
            *self._server_pools.values(),
        ]
        for sampler in samplers:
            await sampler.close()
        self._weight_mirror.close()
        if self.agents is not None:
            await self.agents.close()
        await self._episode_parts.close()
        self.busy_timer.flush()
        self.activity.flush()
        self.timeline.close()
        self._control_link.close()
        self._bulk_link.close()

    # -- the coordinator -----------------------------------------------------------------------------

    async def _listen_control(self) -> None:
        while True:
            message: ToWorkerControl
            message, frames = await self._control_link.receive()
            self._note_contact()
            match message:
                case shared.Welcome():
                    self._on_welcome(message)
                case worker.Assign():
                    self._start_episode(message, frames)
                case worker.Cancel():
                    self._drop_episode(message.attempt)
                    asyncio.get_running_loop().run_in_executor(
                        None, self._snapshots.forget_episode, message.attempt.uid
                    )
                case shared.LoadWeights():
                    self._local_samplers[message.lane].loads.offer_version(message.ref, message.probe)
                case shared.Sleep():
                    # A message is dropped while the lanes fall asleep; the coordinator repeats a new order.
                    if self._sleep_task is None or self._sleep_task.done():
                        samplers = self._local_samplers.values()
                        sleeping_lanes = asyncio.gather(*(sampler.sleep() for sampler in samplers))
                        self._sleep_task = asyncio.create_task(self._fall_asleep(message, sleeping_lanes))
                case worker.Engines():
                    self._servers = message.updated_table(self._servers)
                    for pool in self._server_pools.values():
                        pool.update_table(self._servers.values())
                case worker.MinVersion():
                    self._min_version = message.min_version
                    self._sampler_of("train").changed.notify()
                case shared.Stop():
                    self.end_serving(message.reason)
                case _:
                    assert_never(message)

    async def _fall_asleep(self, sleep_message: shared.Sleep, sleeping_lanes: Awaitable[Any]) -> None:
        await self._control_link.send(await sleep_answer(sleep_message, sleeping_lanes))

    async def _listen_bulk(self) -> None:
        while True:
            message: ToWorkerBulk
            message, frames = await self._bulk_link.receive()
            self._note_contact()
            match message:
                case worker.Ack():
                    self.outbox.acknowledge(message.seq)
                case worker.Fenced():
                    self._drop_episode(message.attempt)
                case shared.ImageFiles():
                    self.images.receive_files(message, frames)
                case _:
                    assert_never(message)

    def _note_contact(self) -> None:
        self.contact.message_arrived(asyncio.get_running_loop().time())

    def _on_welcome(self, message: shared.Welcome) -> None:
        """Send all unacknowledged records again after a restart of the coordinator, which counts assignments
        from 0 and may lack records that the old coordinator had not stored."""
        is_new_coordinator = message.coordinator_epoch != self._coordinator_epoch
        if is_new_coordinator:
            self._coordinator_epoch = message.coordinator_epoch
            self._last_assigned = 0
        if is_new_coordinator or self.outbox.is_paused:
            self.outbox.send_again()
        self.contact.welcomed = True

    async def _keep_contact(self) -> None:
        """Send heartbeats, or hellos while the coordinator is silent. DeadlineError after `start_timeout`."""
        while True:
            match self.contact.contact_state(asyncio.get_running_loop().time()):
                case ContactState.FINE:
                    await self._control_link.send(self._heartbeat())
                case ContactState.QUIET:
                    await self._send_hello()
                case ContactState.EXPIRED:
                    self._drop_all_episodes(
                        f"no message from the coordinator for {self.contact.lost_after:g} s"
                    )
                    await self._send_hello()
                case ContactState.GONE:
                    raise DeadlineError(f"no contact with the coordinator for {self.contact.leave_after:g} s")

            self.outbox.resend_overdue()
            self.busy_timer.flush_if_due()
            self.activity.flush_if_due()
            await asyncio.sleep(self.contact.tick_interval)

    async def _send_hello(self) -> None:
        self.outbox.pause_sending()
        engine_version = self._local_samplers["train"].loads.version if self._local_samplers else NO_VERSION
        hello = worker.WorkerHello(
            index=self.index,
            incarnation=self.incarnation,
            slots=self.config.rollout.slots,
            pid=os.getpid(),
            acked=self.outbox.acked_seq,
            version=engine_version,
        )
        await self._control_link.send(hello)

    def _heartbeat(self) -> worker.WorkerHeartbeat:
        """Return the heartbeat. `held` includes attempts with unacknowledged records: no other worker may
        start them."""
        busy_seconds, idle_seconds = self.busy_timer.seconds
        local_tokens = sum(sampler.tokens for sampler in self._local_samplers.values())
        server_tokens = sum(usage.tokens for usage in self._server_usage.values())
        return worker.WorkerHeartbeat(
            assigned=self._last_assigned,
            held=tuple(self.outbox.attempts | self._episodes.keys()),
            busy_s=busy_seconds,
            idle_s=idle_seconds,
            tokens=local_tokens + server_tokens,
            waiting=self.waits.longest_wait(),
            in_time=self.waits.within_deadline,
            engines=tuple(self._server_usage.values()),
            acked=self.outbox.acked_seq,
            leaving=self._is_leaving,
            reprefilled_tokens=sum(sampler.reprefilled_tokens for sampler in self._local_samplers.values()),
        )

    # -- episodes ------------------------------------------------------------------------------------

    def _start_episode(self, message: worker.Assign, frames: list[bytes]) -> None:
        self._last_assigned = message.seq
        if message.attempt in self._episodes:
            return

        for attempt in list(self._episodes):
            if attempt.uid == message.attempt.uid:
                self._drop_episode(attempt)

        def forget_task(task: asyncio.Task[None]) -> None:
            if self._episodes.get(message.attempt) is task:
                del self._episodes[message.attempt]
            error = None if task.cancelled() else task.exception()
            if error is not None and not self._exit_code.done():
                self._exit_code.set_exception(error)

        task = asyncio.create_task(self.runner.run(message, frames, self._sampler_of(message.lane)))
        self._episodes[message.attempt] = task
        task.add_done_callback(forget_task)

    def _drop_episode(self, attempt: shared.Attempt) -> None:
        """Cancel an episode; no more records of that attempt are posted."""
        task = self._episodes.pop(attempt, None)
        if task is not None:
            task.cancel()

    def _drop_all_episodes(self, reason: str) -> None:
        if self._episodes:
            log.warning("worker %d gives up its episodes (%d): %s", self.index, len(self._episodes), reason)
        for attempt in list(self._episodes):
            self._drop_episode(attempt)

    def _sampler_of(self, name: str) -> LocalSampler | ServerPool:
        return self._local_samplers[name] if self._local_samplers else self._server_pools[name]
