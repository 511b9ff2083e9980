"""Rank 0 of a process group beside this process's default group; the group's other ranks may die or freeze.

The group is made with the backend's own class, not by `init_process_group`: the default group of this process
is training's. Other ranks join by SGLang's `init_custom_process_group`, which nests the prefixes of keys as
`ServerGroup._make_group` does.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import default_pg_timeout

from asyncrl.errors import DeadlineError, fulfil

T = TypeVar("T")
Backend = Literal["gloo", "nccl"]
POLL_SECONDS = 0.005  # seconds between two looks at whether rank 0 is listening


def run_in_background(task: Callable[[], T]) -> Future[T]:
    """Run a task on a new daemon thread, which keeps no process from ending: for calls without
    interruption."""
    future: Future[T] = Future()
    threading.Thread(target=fulfil, args=(future, task), name="weights-group", daemon=True).start()
    return future


def loaded_nccl_version() -> str:
    """Return the version of the NCCL library in this process, "2.29.7", which torch's errors name, too.
    `torch.cuda.nccl.version()` names the library that torch was compiled with: the same only if linked into
    torch."""
    version = ctypes.c_int()
    with suppress(OSError):  # no library of its own
        nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
        if nccl.ncclGetVersion(ctypes.byref(version)) == 0:
            major, minor_and_patch = divmod(version.value, 10_000)
            return f"{major}.{minor_and_patch // 100}.{minor_and_patch % 100}"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


class ServerGroup:
    """A group of `rank_count` ranks; a broadcast takes at most `seconds`. Rank 0 has the store at which ranks
    meet."""

    def __init__(self, name: str, rank_count: int, device: torch.device, seconds: float) -> None:
        self.name = name
        self.rank_count = rank_count
        self.backend: Backend = "nccl" if device.type == "cuda" else "gloo"
        self._device = device
        self._seconds = timedelta(seconds=seconds)
        # A separate stream does not wait for training's kernels; `torch.cuda.stream` takes None, too.
        self._send_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

        # The store listens on all interfaces. Rank 0 itself does not wait for other ranks here.
        self._rendezvous_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._rendezvous_store.port
        self._group_future = run_in_background(self._make_group)

    @property
    def nccl_version(self) -> str:
        """Return NCCL's version here, which all ranks must have; "" for gloo."""
        return loaded_nccl_version() if self.backend == "nccl" else ""

    def await_listening(self, deadline: float) -> None:
        """Wait until a joining rank finds rank 0: without rank 0 the joining rank, and its server, would hang
        for half an hour. Raises the error that kept rank 0 from listening."""
        while not self._group_future.done() and not self._rendezvous_store.num_keys():
            if time.monotonic() > deadline:
                raise DeadlineError(f"group {self.name}: rank 0 was not listening in time")
            time.sleep(POLL_SECONDS)
        if self._group_future.done():
            self._group_future.result()

    def broadcast(self, data: Tensor, on_sent: Callable[[], None] = lambda: None) -> Future[None]:
        """Begin to send `data` to all other ranks, after all have joined. The caller must not write to `data`
        meanwhile. `on_sent` is called on another thread when all ranks have the data, before the future is
        done."""
        return run_in_background(partial(self._send_data, self._group_future, data, on_sent))

    def close(self) -> None:
        """Give up the group without waiting. Ranks that wait for a broadcast get an error; a rank that joins
        late still finds rank 0, without which that rank would hang. A broadcast under way ends by itself,
        within `seconds`."""
        # Dropping the last reference would wait for a broadcast under way, so a callback aborts the group.
        group_future = self._group_future
        self._group_future = Future()
        group_future.add_done_callback(_abort_group)

    def _send_data(self, group_future: Future[Any], data: Tensor, on_sent: Callable[[], None]) -> None:
        group = group_future.result()
        options = BroadcastOptions()
        options.rootRank = 0
        with torch.cuda.stream(self._send_stream):
            group.broadcast([data.to(self._device)], options).wait()
            if self._send_stream is not None:  # NCCL's `wait` only makes the stream wait
                self._await_sent(self._send_stream.record_event())
        on_sent()

    def _await_sent(self, sent: Any) -> None:
        """Wait for a CUDA event. DeadlineError long before NCCL's watchdog, which would end the process."""
        deadline = time.monotonic() + self._seconds.total_seconds()
        while not sent.query():
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"group {self.name}: a broadcast took longer than {self._seconds.total_seconds():g} s"
                )
            time.sleep(POLL_SECONDS)

    def _make_group(self) -> Any:
        # Needs its own client: a store answers one call at a time, and some calls wait.
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=default_pg_timeout)
        nested_store = PrefixStore(f"{self.name}/", PrefixStore(self.name, store))

        if self.backend == "gloo":
            group = ProcessGroupGloo(
                PrefixStore("cpu/", nested_store), 0, self.rank_count, default_pg_timeout
            )
            group._set_default_timeout(self._seconds)
            return group

        # Has not been run, for lack of a GPU.
        from torch.distributed import ProcessGroupNCCL  # exists with CUDA only

        options = ProcessGroupNCCL.Options()
        # NCCL's watchdog ends the process after this time; `close` comes long before.
        options._timeout = default_pg_timeout
        torch.cuda.set_device(self._device)
        return ProcessGroupNCCL(PrefixStore("cuda/", nested_store), 0, self.rank_count, options)


def _abort_group(group_future: Future[Any]) -> None:
    if group_future.exception() is None:
        run_in_background(group_future.result().abort)
