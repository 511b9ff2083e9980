"""A trainer that offers one version for broadcast, as a process that can be killed or frozen in mid-push."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.types import PolicyVersion
from asyncrl.weights.collective import Sender
from asyncrl.weights.group import ServerGroup
from asyncrl.weights.manifest import WeightsRef
from tests.fakes.forked import FORKED
from tests.fakes.weights import snapshot_of

BUCKET_BYTES = 2 << 20
BUCKETS = 4


def weights(seed: int) -> dict[str, Tensor]:
    """Six tensors of several kinds, in `BUCKETS` buckets that do not fit in the buffers of a socket."""
    generator = torch.Generator().manual_seed(seed)
    big = {f"big{index}": torch.randn(1 << 18, 2, generator=generator) for index in range(3)}
    small = torch.randn(7, generator=generator).bfloat16()
    return big | {
        "small": small,
        "scalar": torch.tensor(3 + seed, dtype=torch.int32),
        "turned": torch.randn(5, 3, generator=generator).t(),
    }


def _run(connection: Connection, silent_from: int, path: str, bucket_bytes: int) -> None:
    torch.set_num_threads(1)

    broadcast = ServerGroup.broadcast
    count = 0

    def until_then(group: ServerGroup, data: Tensor, on_sent: Callable[[], None]) -> Future[None]:
        nonlocal count
        count += 1
        return broadcast(group, data, on_sent) if count <= silent_from else Future()

    ServerGroup.broadcast = until_then  # type: ignore[method-assign]
    sender = Sender("127.0.0.1", bucket_bytes, 60.0, torch.device("cpu"))
    connection.send(
        sender.offer_snapshot(snapshot_of(load_file(path) if path else weights(0), PolicyVersion(0, 1)))
    )
    threading.Event().wait()


class SenderProcess:
    """It says that it broadcasts bucket `silent_from`, and does not. `ref`: what it offers: some random
    weights, or a safetensors file."""

    def __init__(self, silent_from: int, path: str = "", bucket_bytes: int = BUCKET_BYTES) -> None:
        connection, theirs = FORKED.Pipe()
        self.process = FORKED.Process(
            target=_run, args=(theirs, silent_from, path, bucket_bytes), daemon=True
        )
        self.process.start()
        theirs.close()

        if not connection.poll(60.0):
            raise TimeoutError("the sender said nothing")
        self.ref: WeightsRef = connection.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
