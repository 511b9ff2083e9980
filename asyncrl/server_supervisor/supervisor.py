"""The supervisor of a server: starts a server or attaches to one, watches the server, and loads versions into
an engine.

consumes: versions to load (control), the end of the server
waits for: the server to be ready, with a deadline; messages of the coordinator
unblocks: the coordinator (a server that can be used, versions confirmed)

    start / attach ──► ready ──► checked ──► hello with url ──► watched, loaded, heartbeats ──► end

Only the supervisor pauses the server or changes its weights; workers only sample or score. A server that
dies, is restarted from outside or cannot load a version ends the supervisor. The launcher starts both anew if
the supervisor was started by this launcher.
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
from asyncrl.engines.sglang.process import ServerProcess, server_keys, store_kv_tokens
from asyncrl.engines.sglang.server import Attached, attach
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineError, EngineError, one_line
from asyncrl.observe.timeline import START_EVENT, Timeline
from asyncrl.runtime.activity import Activity, Waits
from asyncrl.runtime.liveness import Contact, ContactState
from asyncrl.runtime.process import on_end_signal
from asyncrl.server_supervisor.versions import ServerVersions
from asyncrl.wire.addresses import local_address
from asyncrl.wire.messages.channels import ToSupervisor
from asyncrl.wire.messages.engine import SupervisorHeartbeat, SupervisorHello
from asyncrl.wire.messages.shared import Loaded, LoadWeights, Prefetch, Sleep, Stop, Welcome
from asyncrl.wire.messages.worker import Leave
from asyncrl.wire.sockets import AsyncLink, Endpoints, identity

T = TypeVar("T")
ScorerServer = tuple[str, int]  # name of a scorer, and number of the server among the scorer's servers
log = logging.getLogger("asyncrl.server_supervisor")

CHECK_SECONDS = 1.0  # seconds between two checks of a server
MAX_UNANSWERED = 3  # unanswered checks in a row after which a server is given up


def run(
    config: RunConfig, endpoints: Endpoints, index: int, incarnation: str, scorer: ScorerServer | None = None
) -> int:
    """Run a supervisor until `Stop`, or a signal. Returns 0, or 1 when the server or the coordinator is lost.
    Raises ConfigError for a server that can never serve this run."""
    supervisor = ServerSupervisor(config, endpoints, index, incarnation, scorer)

    try:
        return asyncio.run(supervisor.serve())
    except ConfigError:
        raise
    except AsyncrlError as error:
        log.error("%s leaves: %s", supervisor.name, one_line(error, 2000))
        return 1


class ServerSupervisor:
    """Owns a server and the contact with the coordinator.

    Args:
        scorer: the scorer and the number of its server; None: the server of an engine, which alone has
            versions.
    """

    def __init__(
        self,
        config: RunConfig,
        endpoints: Endpoints,
        index: int,
        incarnation: str,
        scorer: ScorerServer | None,
    ) -> None:
        self.config = config
        self.index = index
        self.incarnation = incarnation

        self._scorer, self._server_number = scorer or ("", index)
        self._role = "scorer" if scorer else "engine"
        self.name = "scorer {} {}".format(*scorer) if scorer else f"engine {index}"
        self._endpoints = endpoints

        self._run_dir = Path(config.run_dir) / config.name
        self._timeline = Timeline(self._run_dir / "timeline" / f"{self._role}-{index}.jsonl")
        self._timeline.record_past(START_EVENT, 0.0)
        self._activity = Activity(self._timeline)
        self._waits = Waits(activity=self._activity)
        self._versions = None if scorer else ServerVersions(config, endpoints, index, self._timeline)

        self._server: Attached | None = None  # set once the server is ready
        self._process: ServerProcess | None = None
        self._healthy = False

    async def serve(self) -> int:
        """Serve until `Stop`, a signal or an error. Return the exit code."""
        loop = asyncio.get_running_loop()
        peer_identity = identity(self._role, self.index, self.incarnation)
        self._control = AsyncLink(self._endpoints.control, ToSupervisor, peer_identity, self._endpoints.keys)

        launch = self.config.launch
        self._contact = Contact(launch.lease, launch.start_timeout, loop.time())

        self._exit_code: asyncio.Future[int] = loop.create_future()
        on_end_signal(loop, lambda: self._end_run("by a signal"))
        services = [
            asyncio.create_task(self._listen()),
            asyncio.create_task(self._keep_contact()),
            asyncio.create_task(self._keep_server()),
        ]

        try:
            finished_tasks, _ = await asyncio.wait(
                [self._exit_code, *services], return_when=asyncio.FIRST_COMPLETED
            )
            return int(finished_tasks.pop().result())
        finally:
            await self._shut_down(services)

    def _end_run(self, reason: str) -> None:
        if not self._exit_code.done():
            log.info("%s stops: %s", self.name, reason)
            self._exit_code.set_result(0)

    async def _shut_down(self, services: list[asyncio.Task[int]]) -> None:
        for task in services:
            task.cancel()
        await asyncio.gather(*services, return_exceptions=True)

        with suppress(AsyncrlError):  # an error here must not keep the server from being stopped
            await self._control.send(Leave())  # so that workers turn to other servers at once

        if self._process is not None:  # before all else, as the launcher does not wait for long
            await self._process.stop()
        if self._versions is not None:
            await self._versions.close()
        if self._server is not None:
            await self._server.api.close()

        self._activity.flush()
        self._timeline.close()
        self._control.close()

    # -- the server ----------------------------------------------------------------------------------

    async def _keep_server(self) -> int:
        """Start the server and watch it for ever. Raises EngineError when the server is lost."""
        if self._versions is not None and self._versions.asleep:
            with self._waits.wait_named("the trainer's devices, to start its server"):
                await self._versions.wait_until_wanted(self._control.send)

        server = await self._start_server()
        log.info("%s: %s at %s", self.name, server.description, server.api.url)

        if self._versions is not None:
            try:
                await self._versions.attach_server(server, self.incarnation)
            except BaseException:
                await server.api.close()
                raise

        self._server = server
        self._healthy = True
        await self._send_hello()

        coroutines: list[Coroutine[Any, Any, NoReturn]] = [self._watch_server(server)]
        if self._process is not None:
            coroutines.append(self._raise_at_exit(self._process))
        if self._versions is not None:
            coroutines.append(self._load_versions(self._versions))

        await first_finished(*coroutines)
        return 1

    async def _start_server(self) -> Attached:
        """Start or attach a server, and check the server against the run, within `engine.start_timeout`."""
        config = self.config
        scorer = self._scorer
        start_timeout = self.config.engine.start_timeout
        urls = config.serving(scorer).engine.urls

        try:
            async with asyncio.timeout(start_timeout):
                with self._waits.wait_named("its server to become ready"):
                    if urls:  # a supervisor that joined later knows the URL of its own server alone
                        return await self._attach(urls[self._server_number % len(urls)])

                    host = local_address(self._endpoints.control)
                    process = await ServerProcess.start(config, self.index, host, self._run_dir, scorer)
                    self._process = process
                    server = await first_finished(
                        self._attach(process.url, fresh=True), self._raise_at_exit(process)
                    )
                    process.note_ready()

                    if config.shifts and not scorer and server.info.max_total_num_tokens:
                        store_kv_tokens(self._run_dir, self.index, server.info.max_total_num_tokens)
                    return server
        except TimeoutError:
            raise EngineError(
                f"{self.name}: its server was not ready within engine.start_timeout ({start_timeout:g} s); "
                "its output is above"
            ) from None

    async def _attach(self, url: str, fresh: bool = False) -> Attached:
        return await attach(
            self.config, url, *server_keys(self.config.engine), scorer=self._scorer, started_here=fresh
        )

    async def _raise_at_exit(self, process: ServerProcess) -> NoReturn:
        """Wait for the process to end, then raise EngineError."""
        exit_code = await process.wait_ended()
        raise EngineError(f"{self.name}: its server exited with code {exit_code}; its output is above")

    async def _watch_server(self, server: Attached) -> NoReturn:
        """Check the server for ever. Raises when the server is gone, or holds weights of another origin."""
        unanswered = 0
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                if self._versions is None:
                    self._healthy = await server.api.ready()
                elif (usable := await self._versions.check_server()) is not None:
                    self._healthy = usable
                unanswered = 0
            except EngineError as error:
                unanswered += 1
                self._healthy = False
                if unanswered >= MAX_UNANSWERED:
                    raise EngineError(
                        f"{self.name}: its server failed to answer {unanswered} times in a row: {error}"
                    ) from error

    async def _load_versions(self, versions: ServerVersions) -> NoReturn:
        """Load offered versions for ever, and report each load."""
        while True:
            message = await versions.next_answer()
            if message.error:
                self._healthy = not (versions.broken or versions.unknown_reason)
                await self._send_heartbeat()
            await self._control.send(message)

            if versions.unknown_reason:
                raise EngineError(f"{self.name}: {versions.unknown_reason}")
            if isinstance(message, Loaded):
                versions.count_load(message)
                versions.sample_version(message, self._control.send)

    # -- the coordinator -----------------------------------------------------------------------------

    async def _listen(self) -> int:
        while True:
            message: ToSupervisor = (await self._control.receive())[0]
            self._contact.message_arrived(asyncio.get_running_loop().time())
            match message:
                case Welcome():
                    self._contact.welcomed = True
                case Prefetch() | LoadWeights() | Sleep():
                    assert self._versions is not None, "scorers receive no versions"
                    self._versions.take_message(message)
                case Stop():
                    self._end_run(message.reason)
                case _:
                    assert_never(message)

    async def _keep_contact(self) -> int:
        """Send heartbeats, or hellos while the coordinator does not answer.

        Workers go on sampling meanwhile. Raises DeadlineError when the coordinator stays away.
        """
        while True:
            match self._contact.contact_state(asyncio.get_running_loop().time()):
                case ContactState.FINE:
                    await self._send_heartbeat()
                case ContactState.QUIET | ContactState.EXPIRED:
                    await self._send_hello()
                case ContactState.GONE:
                    raise DeadlineError(
                        f"no message from the coordinator for {self._contact.leave_after:g} s"
                    )

            self._activity.flush_if_due()
            await asyncio.sleep(self._contact.tick_interval)

    async def _send_heartbeat(self) -> None:
        kv_use = self._versions.pop_kv_use() if self._versions else None
        # A sleeping server has no devices to start on.
        starting = not (self._server or (self._versions and self._versions.asleep))
        await self._control.send(
            SupervisorHeartbeat(self._healthy, starting, self._waits.longest_wait(), kv_use)
        )

    async def _send_hello(self) -> None:
        url = self._server.api.url if self._server else ""
        description = self._server.description if self._server else ""
        await self._control.send(SupervisorHello(self.index, self.incarnation, url, os.getpid(), description))


async def first_finished(*coroutines: Coroutine[Any, Any, T]) -> T:
    """Return the result of the coroutine that ends first, or raise its exception; cancel the others."""
    tasks = [asyncio.create_task(work) for work in coroutines]

    try:
        finished_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return finished_tasks.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
