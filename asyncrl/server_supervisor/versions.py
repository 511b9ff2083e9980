"""Loads offered versions into an engine's server, samples with them for a test, puts the server to sleep, and
checks its version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.process import stored_kv_tokens
from asyncrl.engines.sglang.server import Attached, Loader, build_loader, vocabulary_size_of
from asyncrl.errors import ConfigError, EngineError
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime.mirror import Mirror
from asyncrl.runtime.probe_sampling import ProbeSampling
from asyncrl.runtime.weight_loader import LoadFailures, WeightLoader, sleep_answer
from asyncrl.weights.manifest import WeightsError
from asyncrl.wire.messages.shared import Loaded, LoadWeights, Prefetch, ProbeSamples, Sleep, Slept
from asyncrl.wire.sockets import Endpoints


class ServerVersions:
    """Owns all that changes the weights of a server: mirror, loader and sleep; and samples with new weights,
    as the workers do, for the test of the server."""

    def __init__(self, config: RunConfig, endpoints: Endpoints, index: int, timeline: Timeline) -> None:
        self._mirror = Mirror(config, endpoints, "engine", index, timeline)
        self._weight_loader = WeightLoader(
            "train", timeline, config.weights.deadline, self._ready_server, self._mirror
        )
        self._kv_use: float | None = None  # newest reading that is not reported yet
        self._config = config
        self._index = index

        self._server: Loader | None = None
        self._client: SGLangClient | None = None  # set with the server, in a run that trains
        self._probe_sampling: ProbeSampling | None = None  # set with the client
        self._loaded_count = 0  # loaded versions in all
        self._failures = LoadFailures()
        # The first server of a run starts before the trainer, later servers once the trainer has left the
        # devices.
        self._starts_later = config.shifts and stored_kv_tokens(Path(config.run_dir) / config.name, index) > 0
        self._sleep_answer: Awaitable[Slept] | None = None  # the answer to a sleep request under way

    async def wait_until_wanted(self, report: Callable[[Slept], Awaitable[None]]) -> None:
        """Wait until the server is to be started. Until then the server holds nothing on the devices."""
        while self._starts_later and not self._weight_loader.has_waiting:
            if self._sleep_answer is not None:
                await report(await self._fall_asleep(self._sleep_answer))
            else:
                await self._weight_loader.changed.wait()

        self._starts_later = False

    async def attach_server(self, server: Attached, attachment: str) -> None:
        """Take over a started server. In a run with shifts an unneeded server is put to sleep at once."""
        self._server = await asyncio.to_thread(build_loader, self._config, self._index, server, attachment)
        if self._config.total_steps:  # without training nobody scores the samples
            vocabulary = await asyncio.to_thread(vocabulary_size_of, self._config.model.path)
            client = SGLangClient(server.api, self._config, vocabulary, salt=attachment)
            self._client = client
            # The server forgets prefixes by itself: there is nothing to release.
            self._probe_sampling = ProbeSampling(
                self._config, self._index, client.generate, release=lambda session: None
            )

        if self._config.shifts and not self._weight_loader.has_waiting:
            await self._server.sleep()

    async def close(self) -> None:
        if self._probe_sampling is not None:
            await self._probe_sampling.close()
        if self._server is not None:
            await self._server.close()
        self._mirror.close()

    async def _ready_server(self) -> Loader:
        if self._server is None:
            raise EngineError("the server is not ready")
        return self._server

    def take_message(self, message: Prefetch | LoadWeights | Sleep) -> None:
        if isinstance(message, Prefetch):
            self._mirror.prefetch(message.ref)
        elif isinstance(message, LoadWeights):
            self._weight_loader.offer_version(message.ref, message.probe)
        elif self._sleep_answer is None:  # during a sleep request, the coordinator repeats a newer request
            self._sleep_answer = sleep_answer(message, self._weight_loader.sleep(self._sleep_server))
            self._weight_loader.changed.notify()

    def pop_kv_use(self) -> float | None:
        """Return the fraction of the server's KV memory that requests hold; None without a new reading."""
        kv_use = self._kv_use
        self._kv_use = None
        return kv_use

    @property
    def broken(self) -> bool:
        """True after a failed load, when the weights of the server are unknown."""
        return self._server is not None and bool(self._server.broken)

    @property
    def asleep(self) -> bool:
        """True if the server holds neither KV cache nor weights, or is not started yet."""
        return self._starts_later if self._server is None else self._server.sleeping.asleep

    @property
    def unknown_reason(self) -> str:
        """The reason why the server's memory is in an unknown state, which demands a new server; else ""."""
        return "" if self._server is None else self._server.sleeping.unknown_reason

    async def next_answer(self) -> Loaded | Slept:
        """Load the next offered version, or fall asleep."""
        while not (self._weight_loader.has_waiting or self._sleep_answer):
            await self._weight_loader.changed.wait()

        if self._sleep_answer is not None:
            return await self._fall_asleep(self._sleep_answer)

        message = await self._weight_loader.load_next()
        if not message.error:
            self._loaded_count += 1
        return message

    def sample_version(self, loaded: Loaded, report: Callable[[ProbeSamples], Awaitable[None]]) -> None:
        """Begin to sample with a version that was reported as loaded, for the test of the server."""
        if self._client is None or self._probe_sampling is None:
            return
        if not loaded.error:
            self._client.mark_version(loaded.ref.version)
        self._probe_sampling.note_load(loaded, self._weight_loader.compared_probe, report)

    async def _fall_asleep(self, sleep_answer: Awaitable[Slept]) -> Slept:
        answer = await sleep_answer
        self._sleep_answer = None
        return answer

    async def _sleep_server(self) -> None:
        if self._probe_sampling is not None:
            self._probe_sampling.stop()
        if self._server is not None:
            await self._server.sleep()

    def count_load(self, message: Loaded) -> None:
        """Count a load. Raises EngineError or ConfigError once loads have failed for too long.

        The cause need not be the server: files are pruned, or a trainer that broadcasts dies and comes back.
        So failures may last for `weights.deadline`, unless a server refuses files from the start: then a few
        failures in a row are enough (LoadFailures). After an EngineError a new process may succeed.
        """
        self._failures.add_answer(message)

        # Undecided: another load may succeed, as the server has loaded a version before, or nobody delivered
        # this version, or only the process is broken. Otherwise waiting is hopeless: files do not change.
        undecided = self._loaded_count or message.lost or message.process_failed
        hopeless = not undecided and self._config.weights.transport == "disk"

        if failure := self._failures.give_up_reason(0.0 if hopeless else self._config.weights.deadline):
            error_type = EngineError if self._loaded_count or message.process_failed else ConfigError
            raise error_type(f"engine {self._index}: {failure}")

    async def check_server(self) -> bool | None:
        """Return whether the server can be used, or None while a version is being loaded.

        During a load, old weights, new weights and a mixture are all legitimate.

        Raises:
            EngineError: the server does not answer.
            WeightsError: the server holds another version than the last loaded version.
        """
        server = await self._ready_server()
        loaded_before = self._loaded_count
        server_label = await server.label()

        if self._weight_loader.is_pending:
            return None

        if not server.sleeping.asleep:
            self._kv_use = await server.api.kv_use()

        expected_label = server.loaded.label if server.loaded is not None else server_label
        if loaded_before == self._loaded_count and not server.broken and server_label != expected_label:
            raise WeightsError(
                f"engine {self._index}: its server holds {server_label!r} instead of "
                f"{expected_label!r}; the server was restarted, or another program loaded weights into it"
            )

        return not server.broken
