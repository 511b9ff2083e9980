"""Forwards of a policy in another dtype than its own: a measure of rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from asyncrl.trainer.model import Policy

# Attributes of FSDP2's parameters that depend on the dtype of a forward.
GATHERING_ATTRIBUTES = ("param_dtype", "all_gather_outputs", "_unsharded_param")


@contextmanager
def narrow_head_meanwhile(policy: Policy) -> Iterator[None]:
    """Compute the output layer in the dtype of the other layers inside the context, despite
    `model.fp32_head`."""
    policy.split_model.fp32_head = False
    try:
        yield
    finally:
        policy.split_model.fp32_head = True


@contextmanager
def float32_meanwhile(root: nn.Module) -> Iterator[None]:
    """Compute forwards in float32 inside the context, without gradients. The root must be sharded, and its
    parameters must not be gathered.

    FSDP2 has no public way to change the dtype of a forward. The dtype of the gathered parameters is set
    here, and the memory for gathering is put aside, as it has the dtype of the first forward, which must have
    run before.
    """
    sharded_parameters: list[Any] = [
        parameter
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
    ]
    saved_attributes = [
        {name: vars(parameter).get(name) for name in GATHERING_ATTRIBUTES} for parameter in sharded_parameters
    ]
    buffers = {
        (module, name): buffer
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }

    for parameter in sharded_parameters:
        parameter.param_dtype = None if parameter.orig_dtype == torch.float32 else torch.float32
        parameter.all_gather_outputs = []
        vars(parameter).pop("_unsharded_param", None)
    for (module, name), buffer in buffers.items():
        setattr(module, name, buffer.float())

    try:
        yield
    finally:
        for parameter, attributes in zip(sharded_parameters, saved_attributes, strict=True):
            if attributes["_unsharded_param"] is None:
                vars(parameter).pop("_unsharded_param", None)
                del attributes["_unsharded_param"]
            vars(parameter).update(attributes)
        for (module, name), buffer in buffers.items():
            setattr(module, name, buffer)
