"""Moves a rank's tensors from its device to main memory and back, while engines have the device.

    parameters, buffers, gradients, moments ──offload──► elsewhere ──onload──► same storages, new addresses

Storages are emptied and filled again in place, so every parameter, DTensor and view stays the same object.
FSDP2 does the same with gathered weights around each forward, so nothing may count on addresses. Compiled
layers do not: torch.compile records CUDA graphs only in modes that are not used here. Episodes that wait for
the end of their batch lie in main memory already, as do weights and moments that trainer.offload_optimizer
keeps there.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from asyncrl.errors import ConfigError, one_line
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime.process import main_memory
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from asyncrl.weights.memory import allocate_page_locked, trim_heap

log = logging.getLogger("asyncrl.trainer")
SMALL_STORAGE = 4096  # bytes: smaller storages stay on the device


class DeviceOffload:
    """Moves the tensors of one rank to main memory, and back. `is_offloaded`: the device is empty."""

    def __init__(self, learner: Learner, timeline: Timeline, run_dir: Path) -> None:
        self._learner = learner
        self._timeline = timeline
        self.is_offloaded = False
        self._device = learner.world.device
        self._device_module = torch.get_device_module(self._device)
        self._host_memory: Callable[[int], Tensor] = partial(unlinked_file, run_dir)
        if self._device.type != "cpu":
            self._host_memory = PageLockedMemory(learner.world).reserve
        # Storages, each with a copy of its bytes.
        self._host_copies: dict[int, tuple[UntypedStorage, Tensor]] = {}

    def offload(self, meet: Callable[[str], None]) -> None:
        """Offload, and return when all ranks have: `meet` waits for the ranks by a name. All ranks must call
        this. Raises ConfigError where main memory has no room."""
        # The timings' names, "rest" here and "wake" below, are columns of the metrics.
        with self._timeline.span("rest"), self._learner.stopwatch.phase("rest", waiting=True):
            if not self.is_offloaded:
                self._copy_and_empty()
            meet("the other ranks to leave the devices to the engines")

    def onload(self) -> None:
        """Bring all tensors back, if this rank has offloaded."""
        if self.is_offloaded:
            with self._timeline.span("wake"), self._learner.stopwatch.phase("wake", waiting=True):
                for host_copy in self._host_copies.values():
                    self._fill(*host_copy)
                self._device_module.synchronize()
                self._host_copies = {}
                self.is_offloaded = False

    @contextmanager
    def onloaded(self, tensor: Tensor) -> Iterator[None]:
        """Onload a single tensor inside the context: copying tensor by tensor needs no room for all."""
        if host_copy := self._host_copies.get(_storage_of(tensor)._cdata):
            self._fill(*host_copy)
        try:
            yield
        finally:
            if host_copy:
                host_copy[0].resize_(0)

    def _copy_and_empty(self) -> None:
        self._learner.micro_batch_size = 0, 0  # a lack of memory here is not that of a micro-batch
        gc.collect()
        self._device_module.synchronize()  # copies of the weights for engines and checkpoints are complete
        storages = {storage._cdata: storage for storage in map(_storage_of, _device_tensors(self._learner))}
        moved_storages = [
            storage
            for storage in storages.values()
            if storage.nbytes() > SMALL_STORAGE and storage.device == self._device
        ]
        storage_sizes = [storage.nbytes() for storage in moved_storages]
        error_text = (
            f"engine.colocated: a trainer rank's state ({sum(storage_sizes) / 1e9:.2f} GB) does not fit into "
            "main memory"
        )
        advice = "free some main memory, set model.lora_rank, or set engine.colocated=0"
        with ConfigError.instead_of(MemoryError, RuntimeError, text=error_text, advice=advice):
            storage_parts = list(
                zip(moved_storages, self._host_memory(sum(storage_sizes)).split(storage_sizes), strict=True)
            )
            for storage, host_part in storage_parts:
                host_part.copy_(_storage_bytes(storage), non_blocking=True)
            self._device_module.synchronize()

        for storage in moved_storages:
            storage.resize_(0)
        self._host_copies = {storage._cdata: (storage, host_part) for storage, host_part in storage_parts}
        self.is_offloaded = True
        torch.cuda.empty_cache()
        trim_heap()

    def _fill(self, storage: UntypedStorage, host_part: Tensor) -> None:
        storage.resize_(len(host_part))
        _storage_bytes(storage).copy_(host_part, non_blocking=True)


class PageLockedMemory:
    """Main memory that a GPU copies to and from directly. Kept between uses: locking pages takes longer than
    copying."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> Tensor:
        """Return memory of this size. A collective: the kernel would rather kill a process than refuse
        pages."""
        free_bytes = main_memory().available  # measured before any rank reserves
        missing_bytes = max(0, size - len(self._memory))

        needed_bytes = sum(self._world.gather(missing_bytes, int))  # all ranks are on this machine
        if needed_bytes > free_bytes:
            raise MemoryError(
                f"the ranks on this machine need {needed_bytes / 1e9:.2f} GB more main memory, "
                f"but only {free_bytes / 1e9:.2f} GB is free"
            )

        if missing_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed first: there may be no room for both
            self._memory = allocate_page_locked(size)

        return self._memory[:size]


def unlinked_file(directory: Path, size: int) -> Tensor:
    """Return memory on a disk, freed with its tensor or with this process, as the file has no name. On a CPU
    the device is main memory itself, so if the disk is full the tensors stay there."""
    try:
        with TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))  # a full disk shows now
            file_path = f"/proc/self/fd/{file.fileno()}"
            return torch.from_file(file_path, shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        log.warning("offloading to anonymous memory, because no file can be used: %s", one_line(error))
        return torch.empty(size, dtype=torch.uint8)


def _device_tensors(learner: Learner) -> Iterator[Tensor]:
    """Free the weights that a forward has gathered, then yield all tensors of a rank."""
    critic = learner.critic
    reference = learner.reference.policy if learner.reference is not None else None
    for model in filter(None, (learner.policy, critic, reference)):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        yield from model.buffers()
        for parameter in model.parameters():
            yield from (parameter,) if parameter.grad is None else (parameter, parameter.grad)

    for optimizer in (learner.optimizer, *((critic.optimizer,) if critic else ())):
        yield from (leaf for leaf in tree_leaves([*optimizer.state.values()]) if isinstance(leaf, Tensor))


def _storage_of(tensor: Tensor) -> UntypedStorage:
    detached = tensor.detach()
    return (detached.to_local() if isinstance(detached, DTensor) else detached).untyped_storage()


def _storage_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
