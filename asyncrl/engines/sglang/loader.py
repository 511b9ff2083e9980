"""Loads published versions into one server: verified, within a pause that always ends, and confirmed.

    files: verified, deltas made whole ──┐
                                         ├──► pause ──► load, labelled ──► continue ──► label read back
    sent: server and sender ready ───────┘

Only one process, the server's supervisor, may do this. A load that failed after the pause may leave the
server with half of a version. Then the server's label is changed to a label that no run uses before the
server goes on, so that clients discard the sampled tokens, and `broken` gives the reason until a load has
succeeded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from asyncrl.config import WeightsConfig
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.receiver import Receiver
from asyncrl.engines.sglang.sleep import ServerSleep
from asyncrl.errors import AsyncrlError, one_line
from asyncrl.weights import disk
from asyncrl.weights.checkpoint_match import trained_shapes
from asyncrl.weights.delta import materialise
from asyncrl.weights.manifest import Layout, Manifest, WeightsError, WeightsRef

log = logging.getLogger("asyncrl.server_supervisor")

T = TypeVar("T")
RESUME_SECONDS = 30.0  # deadline for a pause to end
FLUSH_SECONDS = 2.0  # for aborted requests to leave


class ServerLoader:
    """Loads whole versions into the server at `api.url`.

    `cache`: a directory of this loader alone, on a disk that the server reads, for versions published as
    deltas. `receiver`: for versions that are broadcast. `model_shapes`: the tensors of a version; by default
    the tensors of the first version.
    """

    def __init__(
        self,
        api: ServerApi,
        config: WeightsConfig,
        cache: Path,
        receiver: Receiver,
        model_shapes: Shapes | None = None,
    ) -> None:
        self.api = api
        self.broken = ""  # why the server's weights must not be used; empty if the weights are good
        self.loaded: WeightsRef | None = None  # the last version
        self.sleeping = ServerSleep(api)
        self._pause_mode = config.mode
        self._deadline = config.deadline

        self._cache = cache
        self._receiver = receiver
        self._model_shapes = model_shapes
        self._load_lock = asyncio.Lock()
        self._end_of_pause: asyncio.Future[None] | None = None
        self._preparation: asyncio.Future[tuple[WeightsRef, Manifest]] | None = None

    async def load(self, ref: WeightsRef) -> Manifest:
        """Load a version. Raises WeightsError: the old weights stay if the version is missing, damaged or of
        another model; after other failures see `broken`."""
        async with self._load_lock:  # versions are applied in the order of the calls
            await self._await_leftovers()
            if ref.path.startswith("tcp://"):
                async with self._receiver.push(ref, self._deadline) as push:
                    layout = tuple(spec for bucket in push.buckets for spec in bucket)
                    self._check_layout(ref, layout)
                    manifest = await self._replace_weights(ref, push.load_buckets)
            else:
                with disk.lock_version(ref):
                    # Files are verified here, as the server does not check them: tensors that no file has
                    # keep old values, and a damaged file ends the server, whose way back to the old weights
                    # reads the same file again.
                    self._preparation = asyncio.ensure_future(asyncio.to_thread(self._verified_whole, ref))
                    whole_ref, manifest = await asyncio.shield(self._preparation)
                    layout = manifest.layout
                    self._check_layout(ref, layout)

                    # The server has another working directory.
                    path = os.path.abspath(whole_ref.path)  # noqa: ASYNC240 (no file is touched)
                    update = partial(self.api.update_from_disk, path, ref.label, self._deadline)
                    await self._replace_weights(ref, update)

            self._model_shapes = self._model_shapes or Shapes.from_layout(layout)
            return manifest

    async def sleep(self) -> None:
        """Give up KV cache and weights until the next load; then requests under way go on."""
        async with self._load_lock:
            await self._await_leftovers()
            await self.sleeping.sleep()

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return log-probs of ids[1:] under the weights in use, at temperature 1; NaN where the server has no
        log-prob."""
        return await self.api.score(ids, self._deadline)

    async def label(self) -> str:
        """Return the label that the server gives its weights."""
        return await self.api.weight_label()

    async def close(self) -> None:
        """Leave the sender, delete the cache, and disconnect."""
        await self._await_leftovers()
        await self._receiver.close()
        await asyncio.to_thread(shutil.rmtree, self._cache, ignore_errors=True)
        await self.api.close()

    def _verified_whole(self, ref: WeightsRef) -> tuple[WeightsRef, Manifest]:
        """Return the version as whole and verified files, and its manifest as published."""
        manifest = disk.read_manifest(ref)
        if manifest.delta is None:
            return ref, disk.verify_version(ref)
        return materialise(ref, self._cache), manifest

    def _check_layout(self, ref: WeightsRef, layout: Layout) -> None:
        differences = (
            self._model_shapes.describe_differences(layout) if self._model_shapes is not None else ""
        )
        if differences:
            raise WeightsError(
                f"weights {ref.path}: {ref.label} does not fit the server's model: {differences}"
            )

    async def _replace_weights(self, ref: WeightsRef, load: Callable[[], Awaitable[T]]) -> T:
        """Run `load` while no request runs, empty the cache, and read the label back. Returns the result of
        `load`. A failure sets `broken`, and is raised as WeightsError."""
        self.broken = f"loading {ref.label} did not finish"
        swap_context = self.sleeping.waking_load if self.sleeping.asleep else self._requests_held
        try:
            with self.sleeping.waking():
                async with asyncio.timeout(self._deadline), swap_context():
                    load_result = await load()

                    # A sleeping server has lost its cache already. In mode in_place requests keep their KV,
                    # and salts keep the caches of versions apart.
                    if not self.sleeping.asleep and self._pause_mode == "abort":
                        await self.api.flush_cache(wait=FLUSH_SECONDS)
                    elif not self.sleeping.asleep and self._pause_mode == "retract":
                        await self.api.flush_cache()  # waiting would include the retracted requests

                    server_label = await self.api.weight_label()
                    if server_label != ref.label:
                        raise WeightsError(
                            f"after loading, the server reports that it holds weights {server_label!r}"
                        )
        except (AsyncrlError, TimeoutError) as error:
            failure: Exception = error
            if isinstance(error, TimeoutError):
                failure = WeightsError(f"the load took longer than {self._deadline:g} s")
            self.broken = f"loading {ref.label} failed ({one_line(failure)})"
            raise WeightsError(f"server {self.api.url}: {self.broken}") from error

        self.broken = ""
        self.loaded = ref
        return load_result

    @asynccontextmanager
    async def _requests_held(self) -> AsyncIterator[None]:
        """Hold requests during the body: else the server would wait for the end of every running request
        before the update. If the body fails, no request samples with the unfinished weights: requests are
        ended, or, if this fails too, stay held until the next load, or until the supervisor ends the
        server."""
        end_pause = self._resume_invalidated
        try:
            await self.api.pause(self._pause_mode)
            yield
            end_pause = partial(self.api.resume, RESUME_SECONDS)
        finally:
            # Not even a second cancellation may leave the server paused for ever.
            self._end_of_pause = asyncio.ensure_future(end_pause())
            await asyncio.shield(self._end_of_pause)

    async def _resume_invalidated(self) -> None:
        try:
            await self.api.invalidate(RESUME_SECONDS)
            await self.api.resume(RESUME_SECONDS)
        except AsyncrlError as error:  # the earlier error is raised
            log.warning(
                "server %s remains paused after an unfinished load: %s", self.api.url, one_line(error)
            )

    async def _await_leftovers(self) -> None:
        """Wait for the leftovers of a cancelled load: the end of its pause must not fall into the next pause,
        and its thread still changes the cache."""
        if leftovers := [future for future in (self._end_of_pause, self._preparation) if future is not None]:
            await asyncio.wait(leftovers)


NAMES_SHOWN = 3  # names in a message
# Names of buffers that models compute, and that older models have in their files, too.
COMPUTED_BUFFERS = ("inv_freq", ".masked_bias", "position_ids")


@dataclass(frozen=True)
class Shapes:
    """The tensors of a server's model by name, to be compared with a version. The server itself does not
    check names, and ends at a tensor of another shape. `optional` tensors share storage with another tensor
    (tied weights)."""

    shapes: dict[str, tuple[int, ...]]
    optional: frozenset[str] = frozenset()

    @classmethod
    def from_layout(cls, layout: Layout) -> Shapes:
        return cls({spec.name: tuple(spec.shape) for spec in layout})

    def describe_differences(self, layout: Layout) -> str:
        """Describe how a version differs from this model; '' if the version fits."""
        given_shapes = Shapes.from_layout(layout).shapes
        missing = self.shapes.keys() - given_shapes.keys() - self.optional
        unknown = given_shapes.keys() - self.shapes.keys() - self.optional
        mismatched = [
            f"{name} has shape {given_shapes[name]} instead of {shape}"
            for name, shape in self.shapes.items()
            if given_shapes.get(name, shape) != shape
        ]

        parts = [
            _describe_tensors("lacks", missing),
            _describe_tensors("has unknown", unknown),
            "; ".join(mismatched[:NAMES_SHOWN]),
        ]

        return "; ".join(part for part in parts if part)


def shapes_of(path: str, *, tied: bool, train_vision: bool) -> Shapes | None:
    """Read the tensors of a model directory that train from the headers of its files: the names that SGLang
    reads, and so the names of a version. None without such files. `tied`: input and output embedding are one
    tensor. `train_vision`: see `model.train_vision`. Raises ConfigError."""
    shapes = trained_shapes(path, train_vision=train_vision)
    optional = {name for name in shapes if name.endswith(COMPUTED_BUFFERS)} | (
        {"lm_head.weight"} if tied else set()
    )
    return Shapes(shapes, frozenset(optional)) if shapes else None


def _describe_tensors(verb: str, names: Iterable[str]) -> str:
    sorted_names = sorted(names)
    remainder = f" and {len(sorted_names) - NAMES_SHOWN} more" if len(sorted_names) > NAMES_SHOWN else ""
    return f"{verb} {', '.join(sorted_names[:NAMES_SHOWN])}{remainder}" if sorted_names else ""
