"""Loads the versions that are offered to an engine's server, and looks whether it holds the last."""

from __future__ import annotations

import asyncio

from asyncrl.config import RunConfig
from asyncrl.engines.sglang.server import Attached, Loader, loader
from asyncrl.errors import ConfigError, EngineError
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime.mirror import Mirror
from asyncrl.runtime.weight_loader import LoadFailures, WeightLoader
from asyncrl.weights.manifest import WeightsError
from asyncrl.wire.messages.shared import Loaded, LoadWeights, Prefetch
from asyncrl.wire.sockets import Endpoints

# Nats between server and trainer on the first probe; with more it is not the same model. In bfloat16
# rounding alone may reach that: then a multiple of what the trainer's own rounding makes.
MAX_PROBE_GAP, MAX_PROBE_NOISES = 1.0, 5.0


class ServerVersions:
    """Owns what changes the weights of a server."""

    def __init__(self, config: RunConfig, endpoints: Endpoints, index: int, timeline: Timeline) -> None:
        self._mirror = Mirror(config, endpoints, "engine", index, timeline)
        self._loads = WeightLoader("train", timeline, config.weights.deadline, self._ready, self._mirror)
        self._kv_use: float | None = None  # read since it was last asked for
        self._config, self._index = config, index
        self._server: Loader | None = None
        self._loaded, self._failures = 0, LoadFailures()  # versions in all
        self._proven = False  # the server has been compared with the trainer

    async def begin(self, server: Attached, attachment: str) -> None:
        self._server = await asyncio.to_thread(loader, self._config, self._index, server, attachment)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        self._mirror.close()

    async def _ready(self) -> Loader:
        if self._server is None:
            raise EngineError("the server is not ready")
        return self._server

    def take(self, message: Prefetch | LoadWeights) -> None:
        if isinstance(message, Prefetch):
            self._mirror.prefetch(message.ref)
        else:
            self._loads.offer(message.ref, message.probe)

    def pop_kv_use(self) -> float | None:
        """Return the share of the server's KV memory that requests hold; None: not read since."""
        use, self._kv_use = self._kv_use, None
        return use

    @property
    def broken(self) -> bool:
        """Tells whether a load has failed: nobody knows which weights the server has now."""
        return self._server is not None and bool(self._server.broken)

    async def next(self) -> Loaded:
        """Load what is offered next. ConfigError: the server computes another model."""
        while not self._loads.waiting:
            await self._loads.changed.wait()
        message = await self._loads.next()
        if not message.error:
            self._check_probe(message)
            self._loaded += 1
        return message

    def count(self, message: Loaded) -> None:
        """Raises once loads have failed for too long. The cause need not be the server: files are pruned, a
        trainer that broadcasts dies and comes back. So failures may last for `weights.deadline`, but not
        where files are refused from the start."""
        self._failures.add(message)
        hopeless = not (self._loaded or message.lost) and self._config.weights.transport == "disk"
        if why := self._failures.too_many(0.0 if hopeless else self._config.weights.deadline):
            raise (EngineError if self._loaded else ConfigError)(f"engine {self._index}: {why}")

    async def look(self) -> bool | None:
        """Tells whether the server can be used. None while a version is loaded: then the old weights, the new
        ones and a mixture are all right. EngineError: no answer. WeightsError: it holds
        another version than the last one."""
        server, loaded = await self._ready(), self._loaded
        label = await server.label()
        if self._loads.pending:
            return None
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
