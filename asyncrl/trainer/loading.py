"""From a model directory to a model sharded over the ranks.

skeleton (meta device) ──additions──► fully_shard ──► empty shards ◄── each rank's slices of the files

A model that transformers converts while it reads has no such slices: rank 0 reads it, and broadcasts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from asyncrl.errors import ConfigError, one_line
from asyncrl.shrunk import own_attention
from asyncrl.trainer.layers import layers_of
from asyncrl.trainer.lora import initial
from asyncrl.trainer.scores import widened
from asyncrl.trainer.slices import FileTensor, copy_shard, fill, locate
from asyncrl.trainer.world import World
from asyncrl.weights.names import FilePiece

logger = logging.getLogger(__name__)
LAYER_MIN_PARAMETERS = 10_000_000  # with fewer, gathering layer by layer is slower


@dataclass(frozen=True)
class WeightsSource:
    """A model without weights (on the meta device; its buffers are real), and where each rank reads them; or,
    if `places` is empty, the model with its weights on rank 0."""

    model: PreTrainedModel
    places: dict[FilePiece, FileTensor]
    filled: PreTrainedModel | None
    dtype: str


def read_model(kind: Any, path: str, dtype: str, world: World, key: str) -> WeightsSource:
    """Read a directory as `kind`, a transformers Auto class. Raises ConfigError, naming the key that holds
    the path, when it cannot be."""
    transformers_logging.disable_progress_bar()  # ranks share a terminal with a live view
    try:
        model = skeleton(kind, path, dtype)
        places = locate(model, path)
        sliced = all(world.gather(bool(places), bool))
        filled = None
        if not sliced and world.rank == 0:
            logger.warning(
                "%s: its files do not hold the weights as they are: rank 0 reads all of them", path
            )
            filled = kind.from_pretrained(path, dtype=_master(dtype))
            _check_tied(model, filled)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{key} {path!r}: cannot load it ({one_line(error)})") from error
    return WeightsSource(model, places if sliced else {}, filled, dtype)


def _check_tied(model: PreTrainedModel, filled: PreTrainedModel) -> None:
    """ValueError where the files have different values for what the configuration says is one tensor:
    transformers keeps them apart then."""
    if apart := model.all_tied_weights_keys.keys() - filled.all_tied_weights_keys.keys():
        raise ValueError(
            f"config.json ties {', '.join(sorted(apart))} to another tensor, and the files hold other values "
            "for it; set tie_word_embeddings=false there"
        )


def skeleton(kind: Any, path: str, dtype: str) -> PreTrainedModel:
    """The model of a directory without weights."""
    config = AutoConfig.from_pretrained(path)
    own = own_attention(config)
    if dtype == "float64":  # for which grouped products of experts do not exist
        own["experts_implementation"] = "eager"
    with init_empty_weights(include_buffers=False):
        model = kind.from_config(config, dtype=getattr(torch, dtype), **own)
    for parameter in model.parameters():  # buffers keep the type that they have in a forward
        parameter.data = parameter.data.to(_master(dtype))
    model.tie_weights()  # emptying parameters one by one separates shared ones
    found: PreTrainedModel = model.eval()  # no dropout, rho must be 1 at lag 0
    return found


def _master(dtype: str) -> torch.dtype:
    """The dtype of the weights that are trained; float64: for exact tests."""
    return torch.float64 if dtype == "float64" else torch.float32


def shard_and_fill(root: nn.Module, source: WeightsSource, world: World, *, offload: bool = False) -> None:
    """Shard `root`, which holds `source.model`, and fill in its weights. A collective.

    What was added to the model since it was read gets its initial values. `offload`: the shards stay in main
    memory, and go to the device as a forward needs them.
    """
    shard_empty(root, source.model, source.dtype, world, offload=offload)
    if source.places:
        fill(source.model, source.places)
        _initialise(source)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(source.model, _weights(source), options=options)
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters()), "FSDP2 did not shard"


def shard_empty(
    root: nn.Module, model: PreTrainedModel, dtype: str, world: World, *, offload: bool = False
) -> None:
    """Shard `root`, which holds `model`, and give the shards memory, but no values."""
    pinned = world.device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    _shard(root, model, dtype, world, policy)
    _empty(root, world.device, torch.device("cpu") if offload else world.device)
    model.tie_weights()


def _shard(root: nn.Module, model: PreTrainedModel, dtype: str, world: World, offload: OffloadPolicy) -> None:
    """fully_shard on every device; parameters are DTensors afterwards."""
    mixed = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype == "bfloat16":
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if sum(parameter.numel() for parameter in root.parameters()) >= LAYER_MIN_PARAMETERS:
        for layer in layers_of(model):
            fully_shard(layer, mesh=world.mesh, mp_policy=mixed, offload_policy=offload)
    # Embedding and head (often one tied tensor) stay in the root's group.
    fully_shard(root, mesh=world.mesh, mp_policy=mixed, offload_policy=offload)


def _empty(root: nn.Module, device: torch.device, shards: torch.device) -> None:
    """Give the parameters memory on `shards`; buffers go to `device` as they are."""
    buffers = [
        (module, name, buffer.to(device))
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    root.to_empty(device=shards)
    for module, name, buffer in buffers:
        setattr(module, name, buffer)


def _initialise(source: WeightsSource) -> None:
    """Returns what was added since the model was read."""
    state = source.model.state_dict(keep_vars=True)
    read = {id(state[piece.parameter]) for piece in source.places}
    for name, tensor in state.items():
        if id(tensor) not in read:
            copy_shard(initial(name, tensor), tensor)


def _weights(source: WeightsSource) -> dict[str, Any]:
    """All weights on rank 0, none on the others."""
    if source.filled is None:
        return {}
    weights = source.filled.state_dict()
    added = {n: initial(n, p) for n, p in source.model.named_parameters() if n not in weights}
    return weights | added


def add_value_head(model: PreTrainedModel, hidden_size: int) -> None:
    """A linear layer `value_head` on the hidden states, on the meta device as they are."""
    dtype = next(model.parameters()).dtype
    model.value_head = nn.Linear(hidden_size, 1, device="meta", dtype=dtype)


def values(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The value head's output for hidden states [N, H], in float32 at least, [N]."""
    head = cast(nn.Linear, model.value_head)
    return widened(hidden) @ widened(head.weight)[0] + widened(head.bias)
