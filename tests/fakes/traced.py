"""Measures what a trainer rank will hold in memory: runs its code on tensors without any. The closed form of
trainer/footprint.py is compared with it by tests.

    skeletons ──► shards ──► optimizer ──► a micro-batch of one token (its gradients stay) ──► the largest

torch's FakeTensorMode computes shapes only, and its `fake` process group exchanges nothing. So FSDP2's
buffers, activations, checkpointing and the chunks of the output layer count as they are, whatever the model.
Measured on a CPU: kernels of a GPU keep about the same, and their workspaces are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from asyncrl.algorithms.recipe import compose
from asyncrl.config import Packing, RunConfig, TrainerConfig
from asyncrl.model_class import ModelRole
from asyncrl.trainer.attention import FOREST_ATTENTION
from asyncrl.trainer.footprint import LAYER_MIN_PARAMETERS, Footprint
from asyncrl.trainer.layers import layers_of, prepare_layers
from asyncrl.trainer.loading import cast_parameters, model_without_weights, shard_empty
from asyncrl.trainer.memory import forward_backward, largest_tokens, smallest_tokens
from asyncrl.trainer.model import Critic, Policy, Reference, architecture_problems
from asyncrl.trainer.optimizer import make_optimizer
from asyncrl.trainer.packing import packing_problem
from asyncrl.trainer.world import World

EXPERTS = "asyncrl_sizes"
GROWING = ("weights", "optimizer", "gradients", "work")  # with the layers


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operations return inside the context, until the storages are
    freed or (by FSDP2) resized to nothing. `now`: the present bytes; `peak`: the most so far."""

    supports_higher_order_operators = True  # counts what they return, too

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live = dict[int, int]()  # bytes of each

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # inside, functions are compiled

    def __enter__(self) -> LiveBytes:
        storages: Any = torch.UntypedStorage
        self._resize = resize = storages.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            if storage._cdata in self._live:
                self._set(storage._cdata, size)
            return resize(storage, size)

        storages.resize_ = resized
        super().__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*about)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._add(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._set(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._drop, storage._cdata)

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._live.get(key, 0)
        self._live[key] = size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._live.pop(key)


def _experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return tensors of the same sizes as the products by expert, which would need the experts of real
    tokens."""

    def product(rows: Tensor, stack: Tensor) -> Tensor:
        return rows @ (stack.mean(0) if module.is_transposed else stack.mean(0).t())

    tokens, k = index.shape
    order = torch.arange(tokens * k, device=hidden.device)
    output = product(hidden[order // k], module.gate_up_proj if module.has_gate else module.up_proj)
    output = module._apply_gate(output) if module.has_gate else module.act_fn(output)
    output = (product(output, module.down_proj) * weights.reshape(-1, 1))[order]
    return output.view(tokens, k, -1).sum(1).to(hidden.dtype)


ExpertsInterface.register(EXPERTS, _experts)


def traced(config: RunConfig) -> Footprint:
    """Trace one rank of this configuration, where there is no process group: it makes one.

    Of many layers that are alike, each adds the same: two models of few layers show how much.
    """
    lm = model_without_weights("language model", config.model.path, "float32")
    every = config.trainer.checkpointed_every or 1
    layers = layers_of(lm)
    total = sum(parameter.numel() for parameter in lm.parameters())
    few = (len(layers) - 1) % every + 1
    left_out = sum(parameter.numel() for layer in layers[few:] for parameter in layer.parameters())
    other_shards = total - left_out < LAYER_MIN_PARAMETERS <= total
    all_alike = len(set(map(_kind, layers))) == 1 and not compose(config).critic  # two graphs have two peaks
    if not all_alike or other_shards or len(layers) < few + 2 * every:
        return traced_with(config, 0)
    less, more = (traced_with(config, depth) for depth in (few, few + every))
    times = (len(layers) - few) // every
    sizes = {key: a + times * (vars(more)[key] - a) for key, a in vars(less).items() if key in GROWING}
    return replace(less, **sizes)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    return tuple((type(part), *(p.shape for p in part.parameters(recurse=False))) for part in layer.modules())


def traced_with(config: RunConfig, depth: int) -> Footprint:
    """With so many layers of the policy's model; 0: with all."""
    trainer = msgspec.structs.replace(config.trainer, compile=False)  # compiled layers run no fake tensors

    config = msgspec.structs.replace(config, trainer=trainer)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_world(config.trainer) as world, fake, LiveBytes() as live:
        policy, critic, reference = _models(config, world, depth)
        weights = live.now
        optimizers = [make_optimizer(policy, config.trainer, lr=1.0)]
        if critic is not None:
            optimizers.append(make_optimizer(critic, config.trainer, lr=1.0))
        bytes_before = live.now

        rows = config.largest_rows(config.trainer.micro_batch_tokens)
        length = config.rollout.max_tokens
        with unset_fake_temporarily():  # numpy is to read some of it
            sharing = 1 if policy.packing != "padded" else config.trainer.sequence_parallel
            rank_rows = -(
                -length // sharing
            )  # padded rows stand in for packed ones on a GPU, and are not cut
            micros = smallest_tokens(policy.packing), largest_tokens(rows, max(rank_rows, 2), policy.packing)

        before = live.now
        for tokens in micros:
            live.peak = live.now
            forward_backward(
                policy,
                critic,
                reference,
                tokens,
                config.algorithm.entropy_coef > 0,
                compose(config).divergence,
                config.kl.top_k,
            )

        del tokens, micros  # these rows hold the attention masks of the micro-batch
        gradients = live.now - before
        return Footprint(weights, gradients, bytes_before - weights, live.peak - live.now, rows, length)


def _models(config: RunConfig, world: World, depth: int) -> tuple[Policy, Critic | None, Reference | None]:
    recipe = compose(config)
    policy = _policy(config, config.model.path, world, depth, trained=True)

    critic = reference = None
    if recipe.critic:
        backbone = _skeleton("backbone", config.critic.path or config.model.path, config, depth)
        critic = Critic(backbone, world.sequence)
        _pack(backbone, config)
        prepare_layers(backbone, config.trainer)
        _shard(critic, backbone, config, world)

    if recipe.reference:
        has_own_reference = not config.model.lora_rank or config.kl.reference
        path = config.kl.reference or config.model.path
        reference = Reference(
            _policy(config, path, world, depth, trained=False) if has_own_reference else policy
        )

    return policy, critic, reference


def _policy(config: RunConfig, path: str, world: World, depth: int, *, trained: bool) -> Policy:
    model = config.model if trained else msgspec.structs.replace(config.model, lora_rank=0)
    lm = _skeleton("language model", path, config, depth)
    if not trained:
        lm.requires_grad_(False)
    policy = Policy(lm, model, world.sequence)
    policy.runs_whole = not policy.split_model.is_possible
    policy.packing = _pack(lm, config)
    if trained:
        prepare_layers(lm, config.trainer)

    _shard(policy, lm, config, world)
    return policy


def _shard(root: nn.Module, model: PreTrainedModel, config: RunConfig, world: World) -> None:
    with unset_fake_temporarily():  # the parameters are on the meta device, none is fake
        cast_parameters(root, config.model.dtype)
    shard_empty(root, model, config.model.dtype, world, separate_parts=())


def _skeleton(role: ModelRole, path: str, config: RunConfig, depth: int) -> PreTrainedModel:
    with unset_fake_temporarily():  # parameters that are fake cannot be emptied in torch 2.11
        model = model_without_weights(role, path, config.model.dtype)
    layers = set(layers_of(model)) if depth and path == config.model.path else set()
    for stack in [part for part in model.modules() if isinstance(part, nn.ModuleList) and layers & {*part}]:
        del stack[depth:]
    model.set_experts_implementation(EXPERTS)
    return model


def _pack(lm: PreTrainedModel, config: RunConfig) -> Packing:
    """Let a model attend to packed rows as configured, if the model can.

    On a GPU flex attention keeps about as much as attention of padded rows, and runs no fake tensors of a
    CPU.
    """
    gpu = torch.cuda.is_available() and config.model.device != "cpu"
    wanted = config.trainer.packing
    if gpu or wanted == "padded":
        return "padded"
    with _disable_current_modes():  # a small copy is computed with, and does not count
        model_findings = architecture_problems(lm.config)
    if packing_problem(lm, wanted, model_findings, config.trainer.sequence_parallel):
        return "padded"

    lm.set_attn_implementation(FOREST_ATTENTION)
    return wanted


@contextmanager
def _fake_world(trainer: TrainerConfig) -> Iterator[World]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=trainer.ranks)
    try:
        world = World(0, trainer.ranks, torch.device("cpu"), init_device_mesh("cpu", (trainer.ranks,)))
        yield world.arranged(trainer.replicas, trainer.sequence_parallel)
    finally:
        dist.destroy_process_group()
