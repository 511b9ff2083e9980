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
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
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
ALIGNMENT = 16  # bytes: of the second half, for numbers of every kind
TEXT = 500  # characters of a server's error that are kept


class ServerMemory:
    """Memory on `device` for two buckets of at most `size` bytes, for the `ranks` ranks of one server.

    `sockets`: the address that a rank of the server dials, by its GPU. `keeper`: the connection to the
    server's keeper, which says nothing meanwhile; when it ends, so does every wait. Methods raise
    DeadlineError at `deadline` (monotonic), and WeightsError."""

    def __init__(self, ranks: int, size: int, device: torch.device, keeper: socket.socket) -> None:
        size += -size % ALIGNMENT
        self._ranks, self._size, self._keeper = ranks, size, keeper
        self._directory = tempfile.TemporaryDirectory(prefix="asyncrl-", ignore_cleanup_errors=True)
        place = Path(self._directory.name)
        self.sockets = {gpu: f"ipc://{place / gpu}" for gpu in _gpus(device)}
        self._stream = side_stream(device)
        if device.type == "cuda":  # Has not been run, for lack of a GPU.
            self._memory = torch.empty(2 * size, dtype=torch.uint8, device=device)
            self._handle: object = reduce_tensor(self._memory)
        else:  # there are no handles of main memory: for tests, a file in its place
            path = str(place / "memory")
            self._memory = torch.from_file(path, shared=True, size=2 * size, dtype=torch.uint8)
            self._handle = (str, (path,))
        self._context = zmq.Context()
        self._bound = [_listening(self._context, address) for address in self.sockets.values()]
        self._dialled: list[zmq.Socket] = []
        self._answered, self._loads = True, 0

    def open(self, deadline: float) -> None:
        """The server has been told of the sockets: wait until all of its ranks have opened the memory."""
        while len(self._dialled) < self._ranks:
            waiting = [one for one in self._bound if one not in self._dialled]
            self._dialled += self._ready(waiting, zmq.POLLOUT, deadline)
        self._tell(self._handle, deadline)

    def load(self, bucket: Layout, data: Tensor, deadline: float) -> None:
        """Have the tensors of a bucket loaded, whose bytes are `data` [n], while the caller goes on."""
        start = self._loads % 2 * self._size
        with torch.cuda.stream(self._stream):
            self._memory[start : start + data.numel()].copy_(data)
        if self._stream is not None:
            self._stream.synchronize()
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
        """An error ends the server's request, too."""
        if error is not None:
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
        """Those that can be written to or read from now, at least one."""
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


def release(sockets: Mapping[str, str]) -> None:
    """The trainer is gone: end the request of a server that waits for it at these addresses."""
    here = [address for address in sockets.values() if is_socket(address)]
    with suppress(zmq.ZMQError), zmq.Context() as context:  # the trainer may be there, and clean up
        bound = [_listening(context, address) for address in here]
        end = time.monotonic() + LAST_SECONDS
        while time.monotonic() < end and not all(one.poll(10, zmq.POLLOUT) for one in bound):
            pass
        _give_up([one for one in bound if one.poll(0, zmq.POLLOUT)], "the trainer is gone")
        context.destroy(linger=int(LAST_SECONDS * 1000))


def is_socket(address: str) -> bool:
    """Whether it can be seen from here, and is this user's: a server believes what it is told there."""
    path = Path(address.removeprefix("ipc://"))
    return path.is_socket() and path.stat().st_uid == os.getuid()


def _give_up(sockets: list[zmq.Socket], error: str) -> None:
    for one in sockets:
        with suppress(zmq.Again):  # that rank has left
            one.send_multipart([b"", dumps(RuntimeError(error))], zmq.NOBLOCK)


def _listening(context: zmq.Context, address: str) -> zmq.Socket:
    """Speaks with a REP socket, but, unlike REQ, also before an answer has come."""
    one: zmq.Socket = context.socket(zmq.DEALER)
    one.bind(address)
    return one


def _gpus(device: torch.device) -> list[str]:
    """The names that ranks of servers on this machine may have. Those on other GPUs than this process's are
    not known to its torch."""
    if device.type != "cuda":
        return [f"GPU-{platform.machine()}"]  # SGLang's name for a CPU
    try:
        listed = subprocess.run(LIST_GPUS, capture_output=True, text=True, timeout=LIST_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise WeightsError(f"weights.transport=ipc needs nvidia-smi, to list the GPUs: {error}") from None
    return listed.stdout.split()
