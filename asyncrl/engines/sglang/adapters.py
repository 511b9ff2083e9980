"""Loads published adapters into one server, each under its own name, while the server serves requests.

    version: verified, in PEFT's layout ──► loaded as `label@attachment` ──► old ones unloaded
                                            (of agents: `label/agent@attachment`)

Nothing is paused: a request names its adapter and keeps this adapter to the end. A load that fails changes
nothing. Files are deleted after the server has read them: a server remembers the path of an unloaded adapter,
and would load the adapter again for a request with its name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import uuid
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from asyncrl.config import RunConfig
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.sleep import ServerSleep
from asyncrl.engines.sglang.stream import BASE_LABEL
from asyncrl.errors import AsyncrlError, one_line
from asyncrl.isolation.calls import to_its_end
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.manifest import Manifest, WeightsError, WeightsRef, agent_tensor_name, version_of
from asyncrl.weights.ranges import write_file

log = logging.getLogger("asyncrl.server_supervisor")

_ADAPTER_NAME = re.compile(r"(e\d+-v\d+)(?:/[\w-]+)?@(.+)")


def adapter_name(version: PolicyVersion, attachment: str, agent: str) -> str:
    """Name a version's adapter on a server. Servers outlive runs, and runs give the same labels to different
    versions, so the name contains the attachment."""
    return f"{version.label}{agent and f'/{agent}'}@{attachment}"


def is_outdated(version: PolicyVersion, newest: PolicyVersion, config: RunConfig) -> bool:
    """True if no request may go on with this version at a server that has the newest version."""
    return version.epoch != newest.epoch or newest.step - version.step > config.buffer.usual_staleness


class AdapterLoader:
    """Loads adapters into the server at `api.url`; compare `ServerLoader`. `cache`: a directory of this
    loader alone, on a disk that the server reads. `attachment`: names this supervisor among all supervisors
    that the server may have had. `has_base`: the server has the weights of model.path already."""

    broken = ""  # a load that fails leaves earlier versions as they are

    def __init__(
        self, api: ServerApi, config: RunConfig, cache: Path, attachment: str, has_base: bool
    ) -> None:
        self.api = api
        self.loaded: WeightsRef | None = None  # the last version
        self.sleeping = ServerSleep(api)
        self._previous_ref: WeightsRef | None = None  # the version before: known to all clients
        self._config = config
        self._cache = cache
        self._attachment = attachment
        self._has_base = has_base
        self._deadline = config.weights.deadline
        self._load_lock = asyncio.Lock()
        self._unload_task: asyncio.Task[None] | None = None

    async def load(self, ref: WeightsRef) -> Manifest:
        """Load a version beside earlier versions. Raises WeightsError for a version that is missing, damaged
        or of another model; earlier versions stay."""
        async with self._load_lock:
            adapter_files = self._cache / uuid.uuid4().hex
            try:
                with disk.lock_version(ref):
                    manifest = await to_its_end(partial(self._write_peft_files, ref, adapter_files))

                # The server sleeps, or has the weights of another directory or run. A sleeping server goes on
                # before an adapter is loaded: the load may wait for the end of requests with an old adapter.
                if not self._has_base:
                    path = os.path.abspath(self._config.model.path)  # noqa: ASYNC240 (no file is touched)
                    load_base = partial(self.api.update_from_disk, path, BASE_LABEL, self._deadline)
                    with self.sleeping.waking():
                        if self.sleeping.asleep:
                            async with self.sleeping.waking_load():
                                await load_base()
                        else:
                            await load_base()
                            await self.api.flush_cache(wait=self._deadline)
                    self._has_base = True

                loaded_names = await self.api.adapters()  # a load that was given up may have loaded some
                for agent, name in self._adapter_names(ref).items():
                    if name not in loaded_names:
                        await self.api.load_adapter(
                            name, str(adapter_files.absolute() / agent), self._deadline
                        )
            finally:
                await asyncio.to_thread(shutil.rmtree, adapter_files, ignore_errors=True)

            self._previous_ref = self.loaded
            self.loaded = ref
            if self._unload_task is None or self._unload_task.done():
                self._unload_task = asyncio.create_task(self._unload_old())
            return manifest

    async def sleep(self) -> None:
        """Give up KV cache and base until the next load; adapters, and requests that use adapters, stay."""
        async with self._load_lock:
            self._has_base = False
            await self.sleeping.sleep()

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return log-probs of ids[1:] with each adapter of the last loaded version, in turn, at temperature
        1; NaN where the server has no log-prob."""
        names = self._adapter_names(self.loaded).values() if self.loaded is not None else ("",)
        scores = [await self.api.score(ids, self._deadline, adapter=name) for name in names]
        return tuple(chain.from_iterable(scores))

    async def label(self) -> str:
        """Return what the server holds: the label of the last loaded version, if its adapters are there."""
        base_label = await self.api.weight_label()
        ref = self.loaded
        if base_label != BASE_LABEL or ref is None:
            return base_label
        adapter_names = set(self._adapter_names(ref).values())
        return ref.label if adapter_names <= await self.api.adapters() else "no adapters from this run"

    async def close(self) -> None:
        if self._unload_task is not None:
            self._unload_task.cancel()
            await asyncio.wait([self._unload_task])
        await asyncio.to_thread(shutil.rmtree, self._cache, ignore_errors=True)
        await self.api.close()

    def _adapter_names(self, ref: WeightsRef) -> dict[str, str]:
        """Return the names of a version's adapters, by agent."""
        return {agent: adapter_name(ref.version, self._attachment, agent) for agent in self._config.adapters}

    def _write_peft_files(self, ref: WeightsRef, files: Path) -> Manifest:
        """Write PEFT's directories. The files are copies, as the server may map files for as long as it has
        the adapters, and other machines may delete the files of the version."""
        manifest, arrays = disk.read_arrays(ref)
        if not manifest.adapters:
            raise WeightsError(f"weights {ref.path}: {ref.label} does not contain adapters")

        with WeightsError.instead_of(OSError, text=f"weights {ref.path}: cannot copy {ref.label} to {files}"):
            for agent, spec in manifest.adapters.items():
                agent_tensors = [
                    tensor for tensor in manifest.layout if agent_tensor_name(tensor.name, agent)
                ]
                layout = tuple(
                    tensor._replace(name=agent_tensor_name(tensor.name, agent)) for tensor in agent_tensors
                )
                (files / agent).mkdir(parents=True, exist_ok=True)
                adapter_config = msgspec.json.encode(spec.peft(self._config.model.path))
                (files / agent / "adapter_config.json").write_bytes(adapter_config)
                with (files / agent / "adapter_model.safetensors").open("wb") as file:
                    write_file(file, layout, (arrays[tensor.name] for tensor in agent_tensors))

        return manifest

    async def _unload_old(self) -> None:
        """Unload outdated adapters, and adapters that earlier supervisors have left. Their requests end
        soon."""
        try:
            for name in sorted(await self.api.adapters()):
                name_match = _ADAPTER_NAME.fullmatch(name)
                if name_match is None:
                    continue

                # No request uses an adapter that the version before the last makes outdated.
                version = version_of(name_match[1])
                is_old = False
                if self._previous_ref is not None and version is not None:
                    previous_version = self._previous_ref.version
                    is_old = version < previous_version and is_outdated(
                        version, previous_version, self._config
                    )

                if is_old or name_match[2] != self._attachment:
                    await self.api.unload_adapter(name, self._deadline)
        except AsyncrlError as error:  # the next load tries again
            log.warning("server %s did not unload old adapters: %s", self.api.url, one_line(error))
