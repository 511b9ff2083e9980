"""The keeper of one server: starts it or attaches to it, watches it, and loads weights into it.

consumes: versions to load (control), the end of the server
waits for: the server to be ready -- with a deadline; messages of the coordinator
unblocks: the coordinator (an engine that can sample, versions confirmed)

    start / attach ──► ready ──► checked ──► hello with its url ──► loads and beats ──► end

It is the only one who pauses the server or changes its weights; workers only sample. A server that dies, is
restarted from outside or cannot be loaded ends the keeper, and the launcher starts both anew, where the
keeper is its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar, assert_never

from asyncrl.config import RunConfig
from asyncrl.engines.sglang.process import ServerProcess, keys
from asyncrl.engines.sglang.server import FrozenServer, Loader, attach, connect
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineError, EngineError, one_line
from asyncrl.observe.timeline import START, Timeline
from asyncrl.runtime.activity import Activity, Waits
from asyncrl.runtime.liveness import Contact, ContactState
from asyncrl.runtime.mirror import Mirror
from asyncrl.runtime.process import at_ending
from asyncrl.runtime.weight_loader import LoadFailures, WeightLoader
from asyncrl.wire.addresses import local_address
from asyncrl.wire.messages.channels import ToKeeper
from asyncrl.wire.messages.engine import KeeperBeat, KeeperHello
from asyncrl.wire.messages.shared import Loaded, LoadWeights, Prefetch, Stop, Welcome
from asyncrl.wire.messages.worker import Leave
from asyncrl.wire.sockets import AsyncLink, Endpoints, identity

T = TypeVar("T")
Served = Loader | FrozenServer
log = logging.getLogger("asyncrl.keeper")

CHECK_SECONDS = 1.0  # seconds between two looks at a server
MAX_UNANSWERED = 3  # looks in a row without an answer after which a server is given up
# Nats between server and trainer on the first probe; with more it is not the same model. In bfloat16
# rounding alone may reach that: then a multiple of what the trainer's own rounding makes.
MAX_PROBE_GAP, MAX_PROBE_NOISES = 1.0, 5.0


def run(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str) -> int:
    """Run a keeper until `Stop`, or a signal. Returns 0, or 1 when the server or the coordinator is lost.
    Raises ConfigError for a server that can never serve this run."""
    return _run(Keeper(config, endpoints, index, incarnation))


def run_scorer(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str) -> int:
    """Run the keeper of a scorer's server, in the same way."""
    return _run(Keeper(config, endpoints, index, incarnation, *config.scorer_places[index]))


def _run(keeper: Keeper) -> int:
    try:
        return asyncio.run(keeper.serve())
    except ConfigError:
        raise
    except AsyncrlError as error:
        log.error("%s leaves: %s", keeper.name, one_line(error, 2000))
        return 1


class Keeper:
    """Owns one server and the contact with the coordinator. `scorer`: the name of that whose server it is,
    `number` among these; '' for an engine's. A scorer's keeper is never sent versions."""

    def __init__(
        self,
        config: RunConfig,
        endpoints: Endpoints,
        index: int,
        incarnation: str,
        scorer: str = "",
        number: int = 0,
    ) -> None:
        self.config, self.index, self.incarnation = config, index, incarnation
        self._scorer, self._number = scorer, number if scorer else index
        self._role = "scorer" if scorer else "engine"
        self.name = f"scorer {scorer} {number}" if scorer else f"engine {index}"
        self._endpoints = endpoints
        self._run_dir = Path(config.run_dir) / config.name
        self._timeline = Timeline(self._run_dir / "timeline" / f"{self._role}-{index}.jsonl")
        self._timeline.past(START, 0.0)
        self._activity = Activity(self._timeline)
        self._waits = Waits(activity=self._activity)
        self._mirror = Mirror(config, endpoints, self._role, index, self._timeline)
        self._server: Served | None = None
        self._process: ServerProcess | None = None
        self._url, self._healthy = "", False
        self._kv_use: float | None = None  # read since the last beat
        self._loaded, self._failures = 0, LoadFailures()  # versions in all
        self._proven = False  # the server has been compared with the trainer

    async def serve(self) -> int:
        """Until `Stop`."""
        loop = asyncio.get_running_loop()
        name = identity(self._role, self.index, self.incarnation)
        self._control = AsyncLink(self._endpoints.control, ToKeeper, name, self._endpoints.keys)
        launch = self.config.launch
        self._contact = Contact(launch.lease, launch.start_timeout, loop.time())
        self._ending: asyncio.Future[int] = loop.create_future()
        at_ending(loop, lambda: self._end("by a signal"))
        deadline = self.config.weights.deadline
        self._loads = WeightLoader("train", self._timeline, deadline, self._ready, self._mirror)
        services = [*map(asyncio.create_task, (self._listen(), self._keep_contact(), self._keep_server()))]
        try:
            done, _ = await asyncio.wait([self._ending, *services], return_when=asyncio.FIRST_COMPLETED)
            return int(done.pop().result())
        finally:
            await self._leave(services)

    async def _ready(self) -> Loader:
        if self._server is None or isinstance(self._server, FrozenServer):
            raise EngineError("the server is not ready")
        return self._server

    async def _load(self) -> NoReturn:
        """Load what is offered, for ever."""
        while True:
            while not self._loads.waiting:
                await self._loads.changed.wait()
            await self._report(await self._loads.next())

    def _end(self, reason: str) -> None:
        if not self._ending.done():
            log.info("%s stops: %s", self.name, reason)
            self._ending.set_result(0)

    async def _leave(self, services: list[asyncio.Task[int]]) -> None:
        for task in services:
            task.cancel()
        await asyncio.gather(*services, return_exceptions=True)
        with suppress(AsyncrlError):  # nothing may keep the server from being ended
            await self._control.send(Leave())  # workers turn to other servers at once
        if self._process is not None:  # first: the launcher does not wait for long
            await self._process.stop()
        if self._server is not None:
            await self._server.close()
        self._mirror.close()
        self._activity.flush()
        self._timeline.close()
        self._control.close()

    # -- the server ----------------------------------------------------------------------------------

    async def _keep_server(self) -> int:
        """Start and serve; raises when the server is lost."""
        server = await self._start()
        log.info("%s: %s at %s", self.name, server.description, server.api.url)
        self._server = server
        self._url, self._healthy = server.api.url, True
        await self._hello()
        watch = [self._fail_at_end(self._process)] if self._process is not None else []
        await first(self._load(), self._look_after(server), *watch)
        return 1

    async def _start(self) -> Served:
        """A server that answers and has been checked against the run. It is given `engine.start_timeout`."""
        settings = (self.config.serving(self._scorer) if self._scorer else self.config).engine
        seconds = settings.start_timeout
        try:
            async with asyncio.timeout(seconds):
                with self._waits.named("its server to become ready"):
                    if urls := settings.urls:  # a keeper that has joined knows its own alone
                        return await self._connect(urls[self._number % len(urls)])
                    return await self._spawn()
        except TimeoutError:
            late = f"not ready within engine.start_timeout ({seconds:g} s); its output is above"
            raise EngineError(f"{self.name}: {late}") from None

    async def _spawn(self) -> Served:
        host = local_address(self._endpoints.control)
        process = self._process = await ServerProcess.start(
            self.config, self.index, host, self._run_dir, self._scorer
        )
        server = await first(self._connect(process.url), self._fail_at_end(process))
        process.ready()
        return server

    async def _connect(self, url: str) -> Served:
        """Waits for it: a server that is attached to may be restarting."""
        secrets, attachment = keys(self.config.engine), self.incarnation
        if self._scorer:
            return await attach(self.config, self._scorer, url, *secrets)
        return await connect(self.config, self.index, url, *secrets, patient=True, attachment=attachment)

    async def _fail_at_end(self, process: ServerProcess) -> NoReturn:
        """Raises EngineError when the process ends."""
        code = await process.ended()
        raise EngineError(f"{self.name}: its server ended with code {code}; its output is above")

    async def _look_after(self, server: Served) -> None:
        """Is it there, and does it hold what it confirmed? Raises EngineError when not."""
        silent = 0
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            loaded = self._loaded
            try:
                label = await server.label()
            except EngineError as error:
                silent, self._healthy = silent + 1, False
                if silent >= MAX_UNANSWERED:
                    raise EngineError(f"{self.name}: no answer {silent} times: {error}") from error
                continue
            silent = 0
            if self._loads.pending:
                continue  # it holds the old weights, the new ones or a mixture: all of them are right
            self._kv_use = await server.api.kv_use()
            self._healthy = not server.broken
            expected = server.loaded.label if server.loaded is not None else label
            if loaded == self._loaded and not server.broken and label != expected:
                raise EngineError(
                    f"{self.name}: its server holds {label!r} and not {expected!r}: "
                    "it was restarted, or another program loads weights into it"
                )

    # -- versions ------------------------------------------------------------------------------------

    async def _report(self, message: Loaded) -> None:
        """Report to the coordinator. Raises when the server cannot be loaded, whatever state it is in."""
        if message.error:
            self._healthy = self._server is not None and not self._server.broken
            await self._beat()
        else:
            self._check_probe(message)
            self._loaded += 1
        await self._control.send(message)
        self._failures.add(message)
        # The cause need not be the server: files are pruned, a trainer that broadcasts dies and comes back.
        # So failures have the time of `weights.deadline`, but for files that are refused from the start.
        hopeless = not (self._loaded or message.lost) and self.config.weights.transport == "disk"
        if why := self._failures.too_many(0.0 if hopeless else self.config.weights.deadline):
            raise (EngineError if self._loaded else ConfigError)(f"{self.name}: {why}")

    def _check_probe(self, message: Loaded) -> None:
        limit = max(MAX_PROBE_GAP, MAX_PROBE_NOISES * message.probe_noise)
        if not self._proven and message.probe_gap > limit:
            raise ConfigError(
                f"{self.name}: the server computes another model: its log-probs of version "
                f"{message.ref.version.step} differ from the trainer's by up to {message.probe_gap:.3g} "
                f"nats, where rounding explains {limit:.3g}; start it with the trainer's model.path and dtype"
            )
        self._proven = not message.unproven

    # -- the coordinator -----------------------------------------------------------------------------

    async def _listen(self) -> int:
        while True:
            message: ToKeeper = (await self._control.receive())[0]
            self._contact.message_arrived(asyncio.get_running_loop().time())
            match message:
                case Welcome():
                    self._contact.welcomed = True
                case Prefetch():
                    self._mirror.prefetch(message.ref)
                case LoadWeights():
                    self._loads.offer(message.ref, message.probe)
                case Stop():
                    self._end(message.reason)
                case _:
                    assert_never(message)

    async def _keep_contact(self) -> int:
        """Heartbeats; hellos while the coordinator does not answer; DeadlineError when it stays away. Workers
        go on sampling meanwhile."""
        while True:
            match self._contact.tick(asyncio.get_running_loop().time()):
                case ContactState.FINE:
                    await self._beat()
                case ContactState.QUIET | ContactState.EXPIRED:
                    await self._hello()
                case ContactState.GONE:
                    raise DeadlineError(f"no coordinator for {self._contact.give_up:g} s")
            self._activity.tick()
            await asyncio.sleep(self._contact.interval)

    async def _beat(self) -> None:
        use, self._kv_use = self._kv_use, None
        await self._control.send(KeeperBeat(self._healthy, not self._url, self._waits.longest(), use))

    async def _hello(self) -> None:
        what = self._server.description if self._server is not None else ""
        await self._control.send(KeeperHello(self.index, self.incarnation, self._url, os.getpid(), what))


async def first(*works: Coroutine[Any, Any, T]) -> T:
    """The result of what ends first, or its exception; the rest is cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
