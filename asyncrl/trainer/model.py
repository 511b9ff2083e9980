"""The policy in training: a Hugging Face causal LM under FSDP2 that scores sampled tokens.

Files and published weights carry Hugging Face's names. With dtype bfloat16 the master weights and the
gradient reduction are float32, forward and backward bfloat16: plain bfloat16 weights would lose
updates below 1/256 of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from asyncrl.errors import ConfigError, one_line
from asyncrl.trainer.world import World

LAYER_MIN_PARAMETERS = 10_000_000  # below, per-layer gathering costs more than it hides
ENTROPY_CHUNK = 1024  # tokens whose full distribution is held at once


class Scores(NamedTuple):
    """Per selected token [N], at its temperature: log-prob with gradient, entropy without. Natural logs."""

    logp: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Selected:
    """Which tokens to score. `ids` [B, T], right-padded; token i of N is ids[row[i], position[i]],
    predicted at position - 1 by logits divided by temperature[i]."""

    ids: Tensor
    row: Tensor
    position: Tensor
    temperature: Tensor


class Policy(nn.Module):
    """The FSDP root around the language model: head and softmax run on the selected tokens only.

    Selection happens in front of the output embedding, inside the model's own forward, so whatever a
    model does to its logits afterwards (scaling, soft caps) still applies.
    """

    def __init__(self, lm: PreTrainedModel, export_dtype: torch.dtype) -> None:
        super().__init__()
        self.lm = lm
        self.export_dtype = export_dtype
        self._wanted: tuple[Tensor, Tensor] | None = None
        lm.get_output_embeddings().register_forward_pre_hook(self._select)

    def forward(self, tokens: Selected) -> Scores:
        # No attention mask: padding is on the right, so causal attention never reads it.
        self._wanted = (tokens.row, tokens.position - 1)
        raw = self.lm(input_ids=tokens.ids, use_cache=False).logits[0]
        # Log-softmax in float32 at least, also under bfloat16.
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        logits = logits / tokens.temperature.to(logits.dtype)[:, None]
        labels = tokens.ids[tokens.row, tokens.position]
        logp = logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(-1)
        return Scores(logp, _entropy(logits.detach()))

    def _select(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        assert self._wanted is not None, "the language model is called through Policy only"
        return (args[0][self._wanted].unsqueeze(0),)


def _entropy(logits: Tensor) -> Tensor:
    """-Σ p·log p over the vocabulary, [N], a chunk of tokens at a time."""
    logps = (chunk.log_softmax(-1) for chunk in logits.split(ENTROPY_CHUNK))
    return torch.cat([-(logp.exp() * logp).nan_to_num(0.0).sum(-1) for logp in logps])


def load_policy(path: str, dtype: str, world: World) -> Policy:
    """Load a model directory and shard it over the ranks.

    Only rank 0 reads the weights; the others build an empty model and are sent their shards.
    Raises ConfigError when the directory holds no causal language model.
    """
    transformers_logging.disable_progress_bar()  # ranks share a terminal with a live view
    master = torch.float64 if dtype == "float64" else torch.float32  # float64: for exact tests
    try:
        lm = _skeleton(path, master)
        source = AutoModelForCausalLM.from_pretrained(path, dtype=master) if world.rank == 0 else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"$.model.path {path!r}: cannot load it ({one_line(error)})") from error
    policy = Policy(lm.eval(), getattr(torch, dtype))  # eval: no dropout, rho must be 1 at lag 0
    _shard(policy, dtype, world)
    return _fill(policy, source, world)


def _skeleton(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its buffers but without weights (on the meta device)."""
    config = AutoConfig.from_pretrained(path)
    with init_empty_weights(include_buffers=False):
        lm = AutoModelForCausalLM.from_config(config, dtype=dtype)
    lm.tie_weights()  # emptying parameters one by one parts the shared ones
    return lm


def _shard(policy: Policy, dtype: str, world: World) -> None:
    """fully_shard on every device; parameters are DTensors afterwards."""
    mixed = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype == "bfloat16":
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if sum(parameter.numel() for parameter in policy.parameters()) >= LAYER_MIN_PARAMETERS:
        for layer in _layers(policy.lm):
            fully_shard(layer, mesh=world.mesh, mp_policy=mixed)
    # Embedding and head (often one tied tensor) stay in the root's group.
    fully_shard(policy, mesh=world.mesh, mp_policy=mixed)


def _layers(lm: PreTrainedModel) -> Iterator[nn.Module]:
    """The blocks that the model's author marks as units."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    return (module for module in lm.modules() if type(module).__name__ in names)


def _fill(policy: Policy, source: nn.Module | None, world: World) -> Policy:
    """Materialise the shards and copy rank 0's weights into them."""
    buffers = {name: buffer.to(world.device) for name, buffer in policy.named_buffers()}
    policy.to_empty(device=world.device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])
    policy.lm.tie_weights()
    weights = source.state_dict() if source is not None else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(policy.lm, weights, options=options)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters()), "FSDP2 did not shard"
    return policy


@torch.no_grad()
def score(policy: Policy, ids: tuple[int, ...], device: torch.device) -> tuple[float, ...]:
    """Log-probs of ids[1:] at temperature 1. A collective."""
    position = torch.arange(1, len(ids), device=device)
    row = torch.zeros_like(position)
    batch = torch.tensor([ids], device=device)
    scores = policy(Selected(batch, row, position, torch.ones(len(position), device=device)))
    cast(FSDPModule, policy).reshard()  # a forward without a backward leaves the root's parameters whole
    return tuple(scores.logp.tolist())


def shards(policy: Policy) -> dict[str, DTensor]:
    """The trained weights, not copied, under Hugging Face's names; one that two modules share has the first
    name only."""
    found = dict(policy.lm.named_parameters())
    assert all(isinstance(shard, DTensor) for shard in found.values()), "between forward and backward"
    return cast(dict[str, DTensor], found)


@torch.no_grad()
def whole_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The weights in the configured dtype, one tensor at a time, whole and on the CPU, on every rank. A
    collective: all ranks exhaust it. A tensor may be the policy's own."""
    for name, shard in shards(policy).items():
        yield name, cast(DTensor, shard.detach().to(policy.export_dtype)).full_tensor().cpu()
