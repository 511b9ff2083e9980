"""Estimates a trainer rank's memory in closed form, from the headers of the weight files, config.json and the
configuration, and chooses from the estimate how many layers are recomputed. No model is made.

    static   weights, gradients and optimizer state of the rank's shards; frozen weights in model.dtype, the
             rest in float32
    work     what the layers keep of a micro-batch for the backward, with the pixels of its images and what a
             trained vision tower keeps, and the largest that comes on top: logits, gathered layers with their
             gradients, or the gradients of the embedding

tests/fakes/traced.py runs the trainer's own code on tensors without memory. Tests compare the two, and the
GPU kit prints the estimate beside a GPU's allocations.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.config import RunConfig, TrainerConfig, leaves
from asyncrl.vision.layout import read_image_layout
from asyncrl.weights.checkpoint_match import frozen_shapes, trained_shapes
from asyncrl.weights.model_files import DTYPE_BYTES, read_json
from asyncrl.weights.trained_tensors import adapter_count, frozen_counts

MASTER_BYTES = 4  # bytes of a weight, a gradient, and a number of the optimizer's state
CHUNK_TOKENS = 512  # tokens whose logits exist at once (trainer/scores.py)
LAYER_MIN_PARAMETERS = 10_000_000  # below this, gathering layer by layer is slower
LOGIT_BYTES = 16  # bytes: logits, their softmax, and the gradients of both, in float32
DIVERGENCE_BYTES = 36  # bytes: the same, and a divergence's intermediate results for both models
FEATURE_BYTES = 11  # bytes for each number of the hidden states that the output layer reads
SCORE_BYTES = {2: 8, 4: 12}  # bytes for each attention score that is kept, by those of a number
PIXEL_BYTES = 4  # bytes of a value of a pixel
# Numbers per patch that a block of a trained vision tower keeps beside the inputs and outputs of its
# matrices, as a multiple of the width, rounded up: measured with Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4V.
VISION_BLOCK_WIDTHS = 12
RECOMPUTED_EVERY = (0, 8, 4, 3, 2, 1)  # values of `auto`: recompute every k-th layer; 0: none
USABLE_FRACTION = 0.9  # fraction of a GPU's memory; the rest is for workspaces and the allocator
_LAYER_WEIGHT = re.compile(r"(.*?)\.(\d+)\.(.*)")
_EXPERT_WEIGHT = re.compile(r"experts\.(\d+)\.")
_MLP_WEIGHT = re.compile(r"mlp|moe|ffn|feed_forward|expert")
_ATTENTION_OUTPUT_WEIGHT = re.compile(r"o_proj|out_proj|dense\b|attn\.c_proj")
# Reads an activation.
_DOWN_PROJECTION = re.compile(r"down_proj|w2\b|fc2|dense_4h_to_h|output_linear|mlp\.c_proj")

_MERGER_WEIGHT = re.compile(r"merger|downsample")  # of a tower: reads merged patches
_OUTPUT_LAYER = re.compile(r"lm_head|embed_out|output\.")

Shapes = dict[str, tuple[int, ...]]  # by name of the weight


@dataclass(frozen=True)
class Footprint:
    """Holds the bytes of tensors on one rank. `work`: the most in a micro-batch of `rows` sequences of
    `length` tokens."""

    weights: int
    gradients: int
    optimizer: int
    work: int
    rows: int
    length: int

    @property
    def static(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.static + self.work


@dataclass(frozen=True)
class ModelSizes:
    """Holds the shapes of a model's weights that train, and the numbers in its config.json."""

    path: str

    @cached_property
    def shapes(self) -> Shapes:
        return trained_shapes(self.path)

    @cached_property
    def layers(self) -> list[Shapes]:
        """Return the weights of each layer of the largest stack of layers."""
        stacks = defaultdict[str, dict[str, Shapes]](lambda: defaultdict(dict))
        for name, shape in self.shapes.items():
            if match := _LAYER_WEIGHT.match(name):
                stacks[match[1]][match[2]][match[3]] = shape
        largest = max(stacks.values(), key=lambda stack: sum(map(count, stack.values())), default={})
        return list(largest.values())

    @cached_property
    def _config_numbers(self) -> dict[str, Any]:
        return dict(leaves(read_json(Path(self.path) / "config.json")))

    def number(self, *names: str) -> int:
        """Return the first of these keys that config.json has; 0 without any."""
        candidates = (
            self._config_numbers.get(key) for name in names for key in (name, f"text_config.{name}")
        )
        return int(next(filter(None, candidates), 0))


def count(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))


class WorkBytes(NamedTuple):
    """Holds the bytes that a model takes in a micro-batch. `activations`: kept by all layers for the
    backward. Added on top: first `logits`, then `layer`, the gathered weights and gradients of a layer.
    `embedding_gradients` come last."""

    activations: int
    logits: int
    layer: int
    embedding_gradients: int


def footprint(config: RunConfig, sequence_image_ids: int = 0) -> Footprint:
    """Return the bytes on one rank, with a critic, a reference model, and the largest micro-batch, whose
    sequences have so many ids of images each.

    The estimate is within 15% of the count by tests/fakes/traced.py for 15 families of models, or at most 25%
    above it, for Gemma 2 and GPT-NeoX (tests/unit/trainer/test_footprint.py).
    """
    sequence_count = config.largest_rows(config.trainer.micro_batch_tokens)
    work = work_bytes(config, sequence_image_ids)
    return Footprint(*static_bytes(config), work, sequence_count, config.rollout.max_tokens)


def work_bytes(
    config: RunConfig, sequence_image_ids: int = 0, sizes_of: Callable[[str], ModelSizes] = ModelSizes
) -> int:
    """Return the most bytes that a micro-batch takes. `sequence_image_ids`: see `footprint`. `sizes_of`:
    returns the sizes of the model at a path; reading takes a second where there are many experts."""
    policy_work = _work_bytes(config, sizes_of(config.model.path), bool(config.adapters))
    largest_work = max(
        policy_work.activations + max(policy_work.logits, policy_work.layer), policy_work.embedding_gradients
    )

    if needs_critic(config):  # the critic's backward comes first
        critic_work = _work_bytes(config, sizes_of(config.critic.path or config.model.path), False)
        largest_work = max(
            largest_work,
            policy_work.activations + critic_work.activations + critic_work.layer,
            policy_work.activations + critic_work.embedding_gradients,
        )

    if not (sequence_image_ids or config.model.train_vision):
        return largest_work
    # The tower is gathered as a whole: before the layers of the text part run, and for its own backward, when
    # the activations of the text part are gone.
    number_bytes = DTYPE_BYTES[config.model.dtype]
    gathered_bytes = 2 * number_bytes + MASTER_BYTES if config.model.train_vision else number_bytes
    tower_bytes = _frozen_numbers(config.model.path) * gathered_bytes
    sequence_count = config.largest_rows(config.trainer.micro_batch_tokens)
    return max(largest_work, tower_bytes) + image_bytes(config, sequence_count * sequence_image_ids)


def image_bytes(config: RunConfig, image_ids: int) -> int:
    """Return the bytes that images of so many ids take for the whole of a micro-batch: their pixels, and what
    a trained tower keeps of them for the backward. A frozen tower keeps nothing."""
    if not image_ids:
        return 0
    layout = read_image_layout(config.model.path)
    patch_values = 3 * layout.temporal_patch_size * layout.patch_size**2
    patches = image_ids * layout.merge_size**2
    pixel_bytes = patches * patch_values * PIXEL_BYTES
    if not config.model.train_vision:
        return pixel_bytes

    patch_numbers = 0
    merged_numbers = 0  # of a merged patch
    for part in frozen_shapes(config.model.path).values():
        for name, shape in part.items():
            if len(shape) == 2 and "embed" not in name:
                output_width, input_width = shape
                numbers = output_width + input_width * (1 + bool(_DOWN_PROJECTION.search(name)))
                if _MERGER_WEIGHT.search(name):
                    merged_numbers += numbers
                else:
                    patch_numbers += numbers
                if name.endswith("qkv.weight"):  # once per block
                    patch_numbers += VISION_BLOCK_WIDTHS * input_width

    number_bytes = DTYPE_BYTES[config.model.dtype]
    if number_bytes != PIXEL_BYTES:
        patch_numbers += patch_values  # a copy of the pixels in the tower's dtype
    return pixel_bytes + (patches * patch_numbers + image_ids * merged_numbers) * number_bytes


def static_bytes(config: RunConfig) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer state on each rank. Frozen parts of a model, such
    as a tower for pictures, are weights alone."""
    trainer = config.trainer
    model = config.model
    policy_numbers = count(trained_shapes(model.path, train_vision=model.train_vision))
    trained = policy_numbers
    frozen = sum(frozen_counts(model.path, train_vision=model.train_vision).values())
    if config.adapters:
        trained = adapter_count(config)
        frozen += policy_numbers

    if needs_critic(config):
        critic_path = config.critic.path or config.model.path
        frozen += _frozen_numbers(critic_path)
        trained += count(
            {
                name: shape
                for name, shape in trained_shapes(critic_path).items()
                if not _OUTPUT_LAYER.match(name)
            }
        )

    reference_in_rank = config.kl.where != "none" and not config.scored_reference
    if reference_in_rank and (config.kl.reference or not config.adapters):
        reference_path = config.kl.reference or config.model.path
        frozen += count(trained_shapes(reference_path)) + _frozen_numbers(reference_path)

    shards = trainer.ranks / trainer.replicas
    weight_bytes = (trained * MASTER_BYTES + frozen * DTYPE_BYTES[model.dtype]) / shards
    gradient_bytes = trained * MASTER_BYTES / shards

    return int(weight_bytes), int(gradient_bytes), int(gradient_bytes * _state_numbers_per_parameter(trainer))


def _frozen_numbers(path: str) -> int:
    return sum(frozen_counts(path).values())


def _work_bytes(config: RunConfig, model: ModelSizes, frozen: bool) -> WorkBytes:
    number_bytes = DTYPE_BYTES[config.model.dtype]
    recomputed_every = config.trainer.checkpointed_every
    sequence_count = config.largest_rows(config.trainer.micro_batch_tokens)
    length = config.rollout.max_tokens
    tokens = -(-sequence_count * length // config.trainer.sequence_parallel)
    hidden_size = model.number("hidden_size", "n_embd")
    vocabulary_size = model.number("vocab_size")
    layer_numbers = list(map(count, model.layers))
    total_numbers = count(model.shapes)
    if not (hidden_size and vocabulary_size and layer_numbers):
        raise ValueError("config.json has no hidden_size or vocab_size, or the weights have no layers")

    input_bytes = number_bytes * hidden_size * tokens
    activation_bytes = 0
    recomputed_bytes = 0  # of the largest layer that is computed once more
    for index, layer in enumerate(model.layers):
        layer_bytes = tokens * _kept_token_bytes(model, layer, number_bytes, length)
        if recomputed_every and index % recomputed_every == 0:
            recomputed_bytes = max(recomputed_bytes, layer_bytes)
            layer_bytes = input_bytes + tokens * _attention_output_bytes(model, layer, number_bytes)
        activation_bytes += layer_bytes

    root_numbers = total_numbers - sum(layer_numbers)
    group_numbers = max(layer_numbers)
    gathered_bytes = 2 * group_numbers * number_bytes
    if total_numbers < LAYER_MIN_PARAMETERS:
        root_numbers = total_numbers
        group_numbers = total_numbers
        gathered_bytes = 0

    gradient_bytes = (
        0
        if frozen
        else group_numbers * (number_bytes + MASTER_BYTES) + vocabulary_size * hidden_size * MASTER_BYTES
    )
    logit_bytes = DIVERGENCE_BYTES if config.kl.diverges and not config.kl.top_k else LOGIT_BYTES
    # The teacher's output layer and its input.
    teacher_bytes = root_numbers * number_bytes + input_bytes if config.kl.diverges else 0

    return WorkBytes(
        activations=activation_bytes,
        logits=min(CHUNK_TOKENS, tokens) * vocabulary_size * logit_bytes
        + tokens * hidden_size * FEATURE_BYTES
        + root_numbers * number_bytes
        + teacher_bytes,
        layer=recomputed_bytes + root_numbers * number_bytes + gathered_bytes + gradient_bytes,
        embedding_gradients=0 if frozen else root_numbers * (3 * number_bytes + MASTER_BYTES),
    )


def _kept_token_bytes(model: ModelSizes, layer: Shapes, number_bytes: int, length: int) -> int:
    """Return the bytes that a layer keeps of each token: the inputs (counted once, where several matrices
    share an input) and outputs of its matrices, the activations in front of the last matrix, and for norms a
    float32 number beside each output. Experts count as often as a token is routed to. Attention scores count
    if the kernel keeps them."""
    hidden_size = model.number("hidden_size", "n_embd")
    matrices_read = set[tuple[Any, ...]]()
    numbers = 0

    norm_numbers = 0
    chosen_experts = max(1, model.number("num_experts_per_tok", "experts_per_token", "top_k"))
    for name, shape in layer.items():
        expert = _EXPERT_WEIGHT.search(name)
        reads_activation = bool(_DOWN_PROJECTION.search(name))
        if len(shape) == 1 and name.endswith("weight") and ("norm" in name or "ln" in name):
            norm_numbers += _norm_inputs(layer, name, shape[0], hidden_size)
        if len(shape) < 2 or (expert and int(expert[1])):
            continue

        if len(shape) == 3:  # a stack: [experts, out, in], or [experts, in, out]
            inner_width = shape[1] if shape[2] == hidden_size else shape[2]
            numbers += chosen_experts * (hidden_size + inner_width * (1 + reads_activation))
            continue

        copies, (output_width, input_width) = chosen_experts if expert else 1, shape[:2]
        matrix_kind = input_width, bool(_MLP_WEIGHT.search(name)), bool(_ATTENTION_OUTPUT_WEIGHT.search(name))
        numbers += copies * (
            output_width + input_width * ((matrix_kind not in matrices_read) + reads_activation)
        )
        matrices_read.add(matrix_kind)

    score_bytes = 0
    if model.number("attn_logit_softcapping") or any("sinks" in name for name in layer):
        score_bytes = model.number("num_attention_heads", "n_head") * length * SCORE_BYTES[number_bytes]

    return numbers * number_bytes + norm_numbers * (MASTER_BYTES + number_bytes) + score_bytes


def _attention_output_bytes(model: ModelSizes, layer: Shapes, number_bytes: int) -> int:
    """Return the bytes per token that attention returns: the input of its last matrix, and a float32
    log-sum-exp of each head. Recomputed layers keep these, too (trainer/recompute.py)."""
    widths = (
        shape[1] for name, shape in layer.items() if len(shape) == 2 and _ATTENTION_OUTPUT_WEIGHT.search(name)
    )
    return (
        max(widths, default=0) * number_bytes + model.number("num_attention_heads", "n_head") * MASTER_BYTES
    )


def _norm_inputs(layer: Shapes, name: str, width: int, hidden_size: int) -> int:
    """Count the numbers that a norm reads: of all heads, where its weight is as wide as a head."""
    if width == hidden_size:
        return width
    projection = f"{name.split('.')[-2].removesuffix('norm')}proj"
    return next((shape[0] for weight, shape in layer.items() if weight.split(".")[-2] == projection), width)


def _state_numbers_per_parameter(trainer: TrainerConfig) -> float:
    """Return how many numbers the optimizer keeps per parameter."""
    if trainer.optimizer == "adamw":
        return 2.0  # making AdamW imports torch's compiler, a second of each start
    from torch import Tensor, nn

    from asyncrl.trainer.optimizer import make_optimizer

    layer = nn.Linear(64, 64, bias=False)
    layer_state = make_optimizer(layer, trainer, lr=1.0).state[layer.weight]
    return sum(value.numel() for value in layer_state.values() if isinstance(value, Tensor)) // 64 / 64


def needs_critic(config: RunConfig) -> bool:
    """Tell whether the advantage needs a critic."""
    from asyncrl.algorithms.recipe import compose  # imports torch

    return compose(config).critic


def with_recomputation(config: RunConfig, every: int) -> RunConfig:
    """Return the configuration with every `every`-th layer recomputed; 0: none."""
    trainer = msgspec.structs.replace(config.trainer, activation_checkpointing=every or "none")
    return msgspec.structs.replace(config, trainer=trainer)


def least_recomputation(
    config: RunConfig, memory: int, gpu: int, gpus: int, sequence_image_ids: int = 0
) -> int:
    """Return the least recomputation with which a rank fits into its GPU of `memory` bytes, number `gpu` of
    the `gpus` that this process sees: k of every k-th layer, 0 for none; 1, all layers, if nothing less fits.
    Servers that share the GPU keep their part. `sequence_image_ids`: see `footprint`. ValueError where
    config.json lacks the model's sizes."""
    static = 0 if config.trainer.offload_optimizer else sum(static_bytes(config))
    usable = usable_memory(config, memory, gpu, gpus)
    sizes_of = cache(ModelSizes)
    for every in RECOMPUTED_EVERY:
        work = work_bytes(with_recomputation(config, every), sequence_image_ids, sizes_of)
        if static + work <= usable:
            return every
    return 1


def usable_memory(config: RunConfig, memory: int, gpu: int, gpus: int) -> int:
    """Return the bytes of its GPU that a rank's tensors may take, see `least_recomputation`."""
    from asyncrl.engines.sglang.process import server_memory_fraction  # imports torch

    return int(memory * (1.0 - server_memory_fraction(config, gpu, gpus)) * USABLE_FRACTION)


def gpu_tensor_bytes(config: RunConfig, sequence_image_ids: int = 0) -> int:
    """Return the bytes of a rank's tensors on its GPU, by the estimate."""
    estimate = footprint(config, sequence_image_ids)
    return estimate.work if config.trainer.offload_optimizer else estimate.total
