"""Loads the versions that are offered to an engine's server, puts it to sleep between them where that is
asked for, and looks whether it holds the last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.engines.sglang.process import kept_tokens
from asyncrl.engines.sglang.server import Attached, Loader, loader
from asyncrl.errors import ConfigError, EngineError
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime.mirror import Mirror
from asyncrl.runtime.weight_loader import LoadFailures, WeightLoader, slept
from asyncrl.weights.manifest import WeightsError
from asyncrl.wire.messages.shared import Loaded, LoadWeights, Prefetch, Sleep, Slept
from asyncrl.wire.sockets import Endpoints

# Nats between server and trainer on the first probe; with more it is not the same model. In bfloat16
# rounding alone may reach that: then a multiple of what the trainer's own rounding makes.
MAX_PROBE_GAP = 1.0
MAX_PROBE_NOISES = 5.0


class ServerVersions:
    """Owns what changes the weights of a server."""

    def __init__(self, config: RunConfig, endpoints: Endpoints, index: int, timeline: Timeline) -> None:
        self._mirror = Mirror(config, endpoints, "engine", index, timeline)
        self._loads = WeightLoader("train", timeline, config.weights.deadline, self._ready, self._mirror)
        self._kv_use: float | None = None  # read since it was last asked for
        self._config = config
        self._index = index

        self._server: Loader | None = None
        # versions in all
        self._loaded = 0
        self._failures = LoadFailures()
        self._proven = False  # the server has been compared with the trainer
        # The first server of a run starts before the trainer does, later ones when that has left the devices.
        self._later = config.shifts and kept_tokens(Path(config.run_dir) / config.name, index) > 0
        self._falling: Awaitable[Slept] | None = None  # asleep, until it is answered

    async def wanted(self, report: Callable[[Slept], Awaitable[None]]) -> None:
        """Wait until the server is to be started. Until then it holds nothing."""
        while self._later and not self._loads.waiting:
            if self._falling is not None:
                await report(await self._fall_asleep(self._falling))
            else:
                await self._loads.changed.wait()

        self._later = False

    async def begin(self, server: Attached, attachment: str) -> None:
        """In a run with shifts a server that nothing waits for sleeps at once."""
        self._server = await asyncio.to_thread(loader, self._config, self._index, server, attachment)
        if self._config.shifts and not self._loads.waiting:
            await self._server.sleep()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        self._mirror.close()

    async def _ready(self) -> Loader:
        if self._server is None:
            raise EngineError("the server is not ready")
        return self._server

    def take(self, message: Prefetch | LoadWeights | Sleep) -> None:
        if isinstance(message, Prefetch):
            self._mirror.prefetch(message.ref)
        elif isinstance(message, LoadWeights):
            self._loads.offer(message.ref, message.probe)
        elif self._falling is None:  # else it is told again, if that was another order
            self._falling = slept(message, self._loads.sleep(self._give_up))
            self._loads.changed.notify()

    def pop_kv_use(self) -> float | None:
        """Return the share of the server's KV memory that requests hold; None: not read since."""
        use = self._kv_use
        self._kv_use = None
        return use

    @property
    def broken(self) -> bool:
        """Tells whether a load has failed: nobody knows which weights the server has now."""
        return self._server is not None and bool(self._server.broken)

    @property
    def asleep(self) -> bool:
        """The server holds neither KV cache nor weights, or is not started yet."""
        return self._later if self._server is None else self._server.sleeping.asleep

    @property
    def unknown(self) -> str:
        """Says why nobody knows what the server holds: it must be replaced; else ""."""
        return "" if self._server is None else self._server.sleeping.unknown

    async def next(self) -> Loaded | Slept:
        """Load what is offered next, or fall asleep. ConfigError: the server computes another model."""
        while not (self._loads.waiting or self._falling):
            await self._loads.changed.wait()

        if self._falling is not None:
            return await self._fall_asleep(self._falling)

        message = await self._loads.next()
        if not message.error:
            self._check_probe(message)
            self._loaded += 1
        return message

    async def _fall_asleep(self, falling: Awaitable[Slept]) -> Slept:
        answer = await falling
        self._falling = None
        return answer

    async def _give_up(self) -> None:
        if self._server is not None:
            await self._server.sleep()

    def count(self, message: Loaded) -> None:
        """Raises once loads have failed for too long. The cause need not be the server: files are pruned, a
        trainer that broadcasts dies and comes back. So failures may last for `weights.deadline`, but not
        where files are refused from the start. Another process may do better than one that fails."""
        self._failures.add(message)

        undecided = self._loaded or message.lost or message.process_failed
        hopeless = not undecided and self._config.weights.transport == "disk"

        if why := self._failures.too_many(0.0 if hopeless else self._config.weights.deadline):
            kind = EngineError if self._loaded or message.process_failed else ConfigError
            raise kind(f"engine {self._index}: {why}")

    async def look(self) -> bool | None:
        """Tells whether the server can be used. None while a version is loaded: then the old weights, the new
        ones and a mixture are all right. EngineError: no answer. WeightsError: it holds
        another version than the last one."""
        server = await self._ready()
        loaded = self._loaded
        label = await server.label()

        if self._loads.pending:
            return None

        if not server.sleeping.asleep:
            self._kv_use = await server.api.kv_use()

        expected = server.loaded.label if server.loaded is not None else label
        if loaded == self._loaded and not server.broken and label != expected:
            raise WeightsError(
                f"engine {self._index}: its server holds {label!r} and not {expected!r}: "
                "it was restarted, or another program loads weights into it"
            )

        return not server.broken

    def _check_probe(self, message: Loaded) -> None:
        limit = max(MAX_PROBE_GAP, MAX_PROBE_NOISES * message.probe_noise)

        if not self._proven and message.probe_gap > limit:
            raise ConfigError(
                f"engine {self._index}: the server computes another model: its log-probs of version "
                f"{message.ref.version.step} differ from the trainer's by up to {message.probe_gap:.3g} "
                f"nats, where rounding explains {limit:.3g}; start it with the trainer's model.path and dtype"
            )

        self._proven = not message.unproven
