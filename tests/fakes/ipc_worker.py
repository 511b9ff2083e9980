"""A rank of a server that reads weights from another process's memory: what the worker of checkpoint-engine
0.4.2 does. It runs itself in tests/sglang; here its ranks may have GPUs of any name, and be threads."""

from __future__ import annotations

from typing import Any

import torch
import zmq
from torch import Tensor


def read_weights(address: str, device: torch.device, wrong: str = "") -> dict[str, Tensor]:
    """Everything that is shown at `address`. RuntimeError: the other side gave up. `wrong`: a tensor that is
    not of the model."""
    with zmq.Context() as context, context.socket(zmq.REP) as told:
        told.linger = 0
        told.connect(address)
        handle = told.recv_pyobj()
        if not isinstance(handle, tuple):
            told.send_string("AssertionError")
            told.recv()
            raise handle
        rebuild, arguments = handle
        memory, found, ended = _opened(rebuild, list(arguments), device), dict[str, Tensor](), 0
        told.send(b"")
        while ended < 2:
            message: Any = told.recv_pyobj()
            if isinstance(message, Exception):
                raise message
            names = {one["name"] for one in message or ()}
            for one in message or ():
                start, dtype = one["offset"], one["dtype"]
                size = dtype.itemsize * torch.Size(one["shape"]).numel()
                data = memory[start : start + size].view(dtype).view(torch.Size(one["shape"]))
                found[one["name"]] = data.clone().cpu()
            if message is None:
                memory, ended = torch.empty(0), ended + 1
            told.send_string(f"Traceback\nKeyError: {wrong!r}" if wrong in names else "")
    return found


def _opened(rebuild: Any, arguments: list[Any], device: torch.device) -> Tensor:
    if device.type == "cuda":
        arguments[6] = device.index
        memory: Tensor = rebuild(*arguments)
        return memory
    path = rebuild(*arguments)
    with open(path, "rb") as file:
        size = file.seek(0, 2)
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
