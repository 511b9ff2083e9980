"""How a role's process ends."""

from __future__ import annotations

import multiprocessing
import resource

import pytest
import zmq

from asyncrl.launch.role import leave


def leave_with_an_open_socket(memory: int) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    try:
        leave(3, patience=0.05)
    finally:
        socket.close()


@pytest.mark.parametrize("memory", [resource.RLIM_INFINITY, 1 << 20], ids=["", "no memory"])
def test_a_socket_that_was_left_open_does_not_keep_a_process(memory: int) -> None:
    """Nor its exit code, also where it ends because it has no memory."""
    forked = multiprocessing.get_context("fork")
    process = forked.Process(target=leave_with_an_open_socket, args=(memory,))
    process.start()
    process.join(20)
    code = process.exitcode
    process.kill()
    assert code == 3
