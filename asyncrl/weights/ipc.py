"""Weights through memory of a GPU that a server on the same machine opens.

SGLang's `/update_weights_from_ipc` has each of its ranks run the worker of the package checkpoint-engine,
which dials the socket for its GPU and is told there:

    trainer's rank                      each rank of the server
    the memory                    ──►   opens it
    bucket i: what lies where     ──►   loads the tensors out of it
      (meanwhile bucket i + 1 is copied into the other half)
    nothing more                  ──►   closes it
    the end                       ──►   makes the weights ready for use

Every message is answered: by nothing, or by the text of an error. An exception in place of any of them ends
the server's request with it. The server unpickles what it is told, so the sockets are in a directory that
only this user can enter. Nothing is unpickled here.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from pickle import dumps
from typing import Self

import torch
import zmq
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from asyncrl.errors import DeadlineError, one_line
from asyncrl.weights.group import side_stream
from asyncrl.weights.manifest import Layout, WeightsError

LIST_GPUS = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
LIST_SECONDS = 10.0
LAST_SECONDS = 1.0  # for a rank to be told that it is over
RELEASE_SECONDS = 10.0  # for the ranks of a server to dial somebody who tells them so
PREFIX = "asyncrl-"
ALIGNMENT = 16  # bytes: of the second half, for numbers of every kind
TEXT = 500  # characters of a server's error that are kept


class BucketMemory:
    """Memory on `device` for two buckets of at most `size` bytes, and the handle by which other processes
    open it. A sender makes one and keeps it: torch takes back none that was shown and never opened."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size + -size % ALIGNMENT, device
        self.stream = side_stream(device)
        if device.type == "cuda":  # Has not been run, for lack of a GPU.
            with torch.cuda.stream(self.stream):  # no block that training's kernels may still use
                self.bytes = torch.empty(2 * self.size, dtype=torch.uint8, device=device)
                self.handle: object = reduce_tensor(self.bytes)
            return
        # There are no handles of main memory: for tests, a file in its place.
        self._directory = tempfile.TemporaryDirectory(prefix=PREFIX)
        path = f"{self._directory.name}/memory"
        self.bytes = torch.from_file(path, shared=True, size=2 * self.size, dtype=torch.uint8)
        self.handle = (str, (path,))

    def write(self, start: int, data: Tensor) -> None:
        """Copied when this returns."""
        with torch.cuda.stream(self.stream):
            self.bytes[start : start + data.numel()].copy_(data)
        if self.stream is not None:
            self.stream.synchronize()


class ServerMemory:
    """The memory, as it is shown to the `ranks` ranks of one server.

    `sockets`: the address that a rank of the server dials, by its GPU. `keeper`: the connection to the
    server's keeper, which says nothing meanwhile; when it ends, so does every wait. Methods raise
    DeadlineError at `deadline` (monotonic), and WeightsError."""

    def __init__(self, ranks: int, memory: BucketMemory, keeper: socket.socket) -> None:
        gpus = _gpus(memory.device)
        if not 0 < ranks <= len(gpus):
            raise WeightsError(f"a server of {ranks} ranks, on a machine of {len(gpus)} GPUs")
        self._ranks, self._memory, self._keeper = ranks, memory, keeper
        self._directory = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        place = Path(self._directory.name)
        self.sockets = {gpu: f"ipc://{place / str(index)}" for index, gpu in enumerate(gpus)}
        self._context = zmq.Context()
        self._bound = [_listening(self._context, address) for address in self.sockets.values()]
        self._dialled: list[zmq.Socket] = []
        self._called, self._answered, self._loads = False, True, 0

    def open(self, deadline: float) -> None:
        """The server has been told of the sockets: wait until all of its ranks have opened the memory."""
        self._called = True
        while len(self._dialled) < self._ranks:
            waiting = [one for one in self._bound if one not in self._dialled]
            self._dialled += self._ready(waiting, zmq.POLLOUT, deadline)
        self._tell(self._memory.handle, deadline)

    def load(self, bucket: Layout, data: Tensor, deadline: float) -> None:
        """Have the tensors of a bucket loaded, whose bytes are `data` [n], while the caller goes on."""
        start = self._loads % 2 * self._memory.size
        self._memory.write(start, data)
        described = []
        for spec in bucket:
            dtype = getattr(torch, spec.dtype)
            described.append({"name": spec.name, "shape": spec.shape, "dtype": dtype, "offset": start})
            start += spec.nbytes
        self._tell(described, deadline)
        self._loads += 1

    def finish(self, deadline: float) -> None:
        """All buckets are loaded, and the server's request ends."""
        self._tell(None, deadline)
        self._tell(None, deadline)
        self._await_answers(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """An error ends the server's request, too: also that of ranks which dial only now."""
        if error is not None:
            end = time.monotonic() + LAST_SECONDS
            while self._called and len(self._dialled) < self._ranks and time.monotonic() < end:
                waiting = [one for one in self._bound if one not in self._dialled]
                self._dialled += [one for one in waiting if one.poll(10, zmq.POLLOUT)]
            _give_up(self._dialled, one_line(error))
        self._context.destroy(linger=int(LAST_SECONDS * 1000))
        self._directory.cleanup()

    def _tell(self, message: object, deadline: float) -> None:
        self._await_answers(deadline)
        try:  # a socket that nobody has dialled, or not any more, would block
            for one in self._dialled:
                one.send_multipart([b"", dumps(message)], zmq.NOBLOCK)
        except zmq.Again:
            raise WeightsError("a rank of the server has left") from None
        self._answered = False

    def _await_answers(self, deadline: float) -> None:
        waiting = [] if self._answered else list(self._dialled)
        while waiting:
            for one in self._ready(waiting, zmq.POLLIN, deadline):
                waiting.remove(one)
                *_, text = one.recv_multipart()
                if text:
                    *_, last = text.decode(errors="replace").strip().splitlines()
                    raise WeightsError(f"the server did not load them: {last[:TEXT]}")
        self._answered = True

    def _ready(self, sockets: list[zmq.Socket], event: int, deadline: float) -> list[zmq.Socket]:
        """Waits for connections that can be written to or read from, at least one."""
        poller = zmq.Poller()
        for one in sockets:
            poller.register(one, event)
        poller.register(self._keeper.fileno(), zmq.POLLIN)
        found = dict(poller.poll(max(0, int((deadline - time.monotonic()) * 1000))))
        if self._keeper.fileno() in found:
            raise WeightsError("the keeper has left")
        if not found:
            raise DeadlineError("the server did not open the memory, or load from it, in time")
        return [one for one in sockets if one in found]


def release(sockets: Mapping[str, str], over: Callable[[], bool]) -> None:
    """The trainer is gone: end the request of a server whose ranks dial, or will dial, these addresses, until
    that is `over`. Their directory is deleted. Only for addresses that were found `is_safe`."""
    paths = [_path(address) for address in sockets.values()]
    for path in paths:
        with suppress(OSError):  # the trainer has deleted it, which a rank that dials later does not see
            path.parent.mkdir(mode=0o700)
    if not all(_is_own(path.parent) for path in paths):
        return
    with suppress(WeightsError), zmq.Context() as context:
        waiting = [_listening(context, address) for address in sockets.values()]
        end = time.monotonic() + RELEASE_SECONDS
        while not over() and time.monotonic() < end:
            dialled = [one for one in waiting if one.poll(10, zmq.POLLOUT)]
            _give_up(dialled, "the trainer is gone")
            waiting = [one for one in waiting if one not in dialled]
            time.sleep(0.01)
        context.destroy(linger=int(LAST_SECONDS * 1000))
    for path in paths:
        shutil.rmtree(path.parent, ignore_errors=True)


def is_safe(address: str) -> bool:
    """True for a socket that a trainer of this user has made: a server believes what it is told there, and
    the trainer's port can be anybody's."""
    path = _path(address)
    with suppress(OSError):
        return stat.S_ISSOCK(path.lstat().st_mode) and _is_own(path.parent)
    return False


def _is_own(place: Path) -> bool:
    """A trainer's directory for sockets, which nobody else can enter."""
    with suppress(OSError):
        found = place.lstat()
        mine = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077 and found.st_uid == os.getuid()
        return mine and place.parent == Path(tempfile.gettempdir()) and place.name.startswith(PREFIX)
    return False


def _path(address: str) -> Path:
    return Path(address.removeprefix("ipc://"))


def _give_up(sockets: list[zmq.Socket], error: str) -> None:
    for one in sockets:
        with suppress(zmq.Again):  # that rank has left
            for _ in range(2):  # one that waits for the memory complains of the first, and waits for another
                one.send_multipart([b"", dumps(RuntimeError(error))], zmq.NOBLOCK)


def _listening(context: zmq.Context, address: str) -> zmq.Socket:
    """Speaks with a REP socket, but, unlike REQ, also before an answer has come."""
    one: zmq.Socket = context.socket(zmq.DEALER)
    try:
        one.bind(address)
    except zmq.ZMQError as error:
        one.close()
        raise WeightsError(f"{address}: no socket can be made there ({error}); set TMPDIR") from None
    return one


@cache
def _gpus(device: torch.device) -> list[str]:
    """The names that ranks of servers on this machine may have, of the GPUs that this torch sees."""
    if device.type != "cuda":
        return [f"GPU-{platform.machine()}"]  # SGLang's name for a CPU
    try:
        listed = subprocess.run(LIST_GPUS, capture_output=True, text=True, timeout=LIST_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise WeightsError(f"weights.transport=ipc needs nvidia-smi, to list the GPUs: {error}") from None
    return listed.stdout.split()
