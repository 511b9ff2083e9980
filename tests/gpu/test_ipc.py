"""Weights through memory of a GPU, which another process opens as an SGLang server does."""

from __future__ import annotations

import socket
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch

from asyncrl.types import PolicyVersion
from asyncrl.weights.ipc import BucketMemory, ServerMemory
from tests.fakes.group_sender import weights
from tests.fakes.ipc_worker import read_weights
from tests.fakes.weights import snapshot_of, whole_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

LONG = 120.0


def _read(connection: Connection, address: str, index: int) -> None:
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    connection.send({name: tensor.float().numpy() for name, tensor in read_weights(address, device).items()})


@pytest.mark.parametrize("reader", [0, 1], ids=["same GPU", "another GPU"])
def test_another_process_reads_what_was_shown(reader: int) -> None:
    if reader >= torch.cuda.device_count():
        pytest.skip("one GPU only")
    mine, theirs = socket.socketpair()
    deadline, wanted = time.monotonic() + LONG, weights(1)
    with ServerMemory(1, BucketMemory(1 << 21, torch.device("cuda", 0)), mine) as memory:
        address = memory.sockets[f"GPU-{torch.cuda.get_device_properties(reader).uuid}"]
        here, there = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_read, args=(there, address, reader))
        process.start()
        memory.open(deadline)
        for spec, data in whole_tensors(snapshot_of(wanted, PolicyVersion(0, 1))):
            memory.load((spec,), data, deadline)
        memory.finish(deadline)
        assert here.poll(LONG)
        found = here.recv()
        process.join(LONG)
    theirs.close()
    mine.close()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(torch.from_numpy(found[name]), tensor.float()), name
