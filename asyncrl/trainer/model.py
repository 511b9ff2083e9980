"""The models of a trainer rank: the policy in training, a reference policy and a critic.

The policy is a language model of Hugging Face under FSDP2 that scores sampled tokens. Of a composite model
the text part trains; towers and projectors are loaded, run for images alone, and frozen without
model.train_vision.

Files and published weights carry the names of Hugging Face's files (weights/names.py). With dtype bfloat16
the weights in training and the gradient reduction are float32, forward and backward bfloat16: plain bfloat16
weights would lose updates below 1/256 of a weight. Frozen weights, which have no updates, are bfloat16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.config import ModelConfig, Packing, RunConfig, TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.model_class import frozen_parts, is_within
from asyncrl.shrunk import cached_findings
from asyncrl.trainer.attention import text_attention
from asyncrl.trainer.forced_routes import ForcedRoutes
from asyncrl.trainer.gradient_check import cached_gradient_check, check_gradients, sharing_problem
from asyncrl.trainer.layers import prepare_layers
from asyncrl.trainer.loading import read_model, shard_and_fill
from asyncrl.trainer.optimizer import make_optimizer, trainable
from asyncrl.trainer.recompute import Recomputation
from asyncrl.trainer.scores import (
    HeadInput,
    Logits,
    Scores,
    Selected,
    SplitModel,
    in_parts,
    score_chunks,
    widened,
)
from asyncrl.trainer.teacher import Teacher
from asyncrl.trainer.world import SequenceRanks, World
from asyncrl.weights.adapters import Adapters, owning_agent
from asyncrl.weights.model_files import StoredTensor
from asyncrl.weights.names import checkpoint_pieces, model_names, saved_buffers, sort_tensors

logger = logging.getLogger(__name__)


class Policy(nn.Module):
    """Is the FSDP root around the language model: head and softmax run on the selected tokens only.

    `file_tensors`: the tensors of the files that the model comes from, whose names published weights have.
    `kept_names`: those of them that training leaves as they are.
    `published`: the weights that train as engines know them, without adapters.
    `buffer_pieces`: its persistent buffers, published unchanged. `runs_whole`: all logits are computed at
    once, not in chunks, for a model that cannot be split at its output layer. `sequence_ranks`: the ranks
    that compute a packed micro-batch together.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        config: ModelConfig,
        sequence_ranks: SequenceRanks | None,
        *,
        adapters: Mapping[str, tuple[int, float]] | None = None,
        file_tensors: Mapping[str, StoredTensor] = {},
    ) -> None:
        super().__init__()
        self.lm = lm
        self.sequence_ranks = sequence_ranks
        self.export_dtype = getattr(torch, config.dtype)
        self.file_tensors = file_tensors
        frozen_names = frozen_parts(lm, train_vision=config.train_vision)
        names_in_model = model_names(lm, file_tensors)
        self.kept_names = sort_tensors(lm, file_tensors, names_in_model, frozen_names).kept_names
        self.vocabulary: int = lm.config.get_text_config().vocab_size  # token ids are below it
        buffers = saved_buffers(lm)
        trained_tensors = {
            name: tensor
            for name, tensor in (dict(lm.named_parameters()) | buffers).items()
            if not is_within(name, frozen_names)
        }
        pieces = checkpoint_pieces(lm, trained_tensors, file_tensors)
        self.published = tuple(piece for piece in pieces if piece.parameter not in buffers)
        self.buffer_pieces = tuple(piece for piece in pieces if piece.parameter in buffers)
        self.packing: Packing = "padded"  # how sequences must be laid out
        self.attention = text_attention(lm)  # attention of padded sequences
        self.forced_routes: ForcedRoutes | None = None  # replays the servers' routes in the routers
        self.adapters: Adapters | None = None
        if adapters is None and config.lora_rank:
            adapters = {"": (config.lora_rank, config.lora_alpha)}
        if adapters:
            self.adapters = Adapters(lm, adapters, config.lora_modules)
        self.split_model = SplitModel(lm, fp32_head=config.fp32_head)
        self.runs_whole = not self.split_model.is_possible

    def forward(
        self,
        tokens: Selected,
        entropy_grad: bool = False,
        with_collision: bool = False,
        with_variance: bool = False,
        teacher: Teacher | None = None,
    ) -> Scores:
        def score_part(part: Selected) -> Scores:
            features, logits_of = self._head_input(part)
            return score_chunks(
                logits_of,
                features,
                part,
                entropy_grad=entropy_grad,
                with_collision=with_collision,
                with_variance=with_variance,
                teacher=teacher,
                wide_logits=self.split_model.fp32_head,
            )

        columns: Any = in_parts(score_part, tokens, self.sequence_ranks)
        return Scores(*columns)

    def head(self, tokens: Selected) -> tuple[Tensor, Logits]:
        """Return the input of the output layer for the tokens that this rank scores, and the function from
        that input to logits. Like a forward, this leaves the root's parameters gathered."""
        head_inputs = []

        def read_head_input(part: Selected) -> tuple[()]:
            head_inputs.append(self._head_input(part))
            return ()

        in_parts(read_head_input, tokens, self.sequence_ranks)
        return head_inputs[0]

    def _head_input(self, part: Selected) -> HeadInput:
        if self.forced_routes is not None:
            self.forced_routes.use_routes(part.routes)
        if self.adapters is not None:
            self.adapters.select_adapters(part.adapter_indices)
        if self.runs_whole:
            return self.split_model.run_whole(part)
        return self.split_model.split(part)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Score without adapters inside the context."""
        return self.adapters.disabled() if self.adapters is not None else nullcontext()

    @property
    def trained_parameters(self) -> dict[str, list[nn.Parameter]]:
        """Return the trained parameters, by agent where several have adapters of their own; else all under
        ''."""
        if self.adapters is None or len(self.adapters.agents) == 1:
            return {"": trainable(self)}
        by_agent: dict[str, list[nn.Parameter]] = {agent: [] for agent in self.adapters.agents}
        for name, parameter in self.lm.named_parameters():
            agent = owning_agent(name)
            if agent is not None:
                by_agent[agent].append(parameter)

        return by_agent


def load_policy(
    config: ModelConfig,
    world: World,
    *,
    trainer: TrainerConfig | None = None,
    recomputation: Recomputation | None = None,
    adapters: Mapping[str, tuple[int, float]] | None = None,
    frozen: bool = False,
    offload: bool = False,
    key: str = "model.path",
) -> Policy:
    """Load a model directory and shard it over the ranks. A collective.

    `trainer`: how layers are trained. `recomputation`: which layers are recomputed; None: as `trainer` says.
    `adapters`: see Adapters; None: the adapter of `config`. `frozen`: the weights of the directory do not
    train. `offload`: the shards are kept in main memory. Raises ConfigError, naming `key`, when the directory
    holds no language model.
    """
    source = read_model(
        "language model", config.path, config.dtype, world, key, train_vision=config.train_vision
    )
    if frozen:
        source.model.requires_grad_(False)

    policy = Policy(source.model, config, world.sequence, adapters=adapters, file_tensors=source.file_tensors)
    if trainer is not None:
        prepare_layers(source.model, trainer, recomputation)
        policy.forced_routes = ForcedRoutes(source.model) if trainer.router_replay else None

    shard_and_fill(policy, source, world, offload=offload)
    _decide_split(policy, config.dtype, world, is_compiled=trainer is not None and trainer.compile)

    return policy


def _decide_split(policy: Policy, dtype: str, world: World, is_compiled: bool) -> None:
    """Set `policy.runs_whole` if the gradient check fails for logits that are computed in chunks, for which
    the model is split at its output layer. The model itself is checked where no small copy can be made."""
    problems = shared_architecture_problems(policy.lm.config, world)
    if problems is None and not policy.runs_whole:
        problems = cached_gradient_check(policy, (), dtype, world, is_compiled)
    problem = "has no backbone" if policy.runs_whole else problems and problems["split"]
    policy.runs_whole = bool(problem)

    if problem:
        logger.warning(
            "%s is not split at its output layer, so its logits are not chunked: it %s",
            type(policy.lm).__name__,
            problem,
        )


def architecture_problems(config: PreTrainedConfig) -> dict[str, str] | None:
    """Return the problem of each way to compute gradients of this architecture, see `check_gradients`, and of
    `shared` rows; None where no small copy of the model can be made."""
    model_config = ModelConfig(path=config.model_type, dtype="float32")

    def problems_of(copy: PreTrainedModel) -> dict[str, str]:
        return check_gradients(Policy(copy, model_config, None)) | {"shared": sharing_problem(copy)}

    return cached_findings(config, "trainer", problems_of)


def shared_architecture_problems(config: PreTrainedConfig, world: World) -> dict[str, str] | None:
    """Return rank 0's result on all ranks. A collective."""
    problems = architecture_problems(config) if world.rank == 0 else None
    problems_type: Any = dict[str, str] | None
    return world.gather(problems, problems_type)[0]


@torch.no_grad()
def score_sequences(
    policy: Policy, sequences: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[tuple[float, ...], ...]:
    """Return, for each of these sequences of equal length, log-probs of sequence[1:] at temperature 1, with
    each adapter in turn. All are scored in one forward. A collective."""
    adapter_count = len(policy.adapters.agents) if policy.adapters else 1
    rows = [np.array(sequence) for sequence in sequences for _ in range(adapter_count)]
    adapter_indices = [*range(adapter_count)] * len(sequences)
    scored_tokens = len(sequences[0]) - 1  # of each row
    sequence_of = np.repeat(np.arange(len(rows)), scored_tokens)
    position = np.tile(np.arange(1, 1 + scored_tokens), len(rows))
    packing: Packing = "padded" if policy.packing == "padded" else "packed"  # equal rows stay apart
    selected = Selected.lay_out(
        rows, sequence_of, position, torch.ones(len(sequence_of)), packing, adapters=adapter_indices
    )
    scores = policy(selected.to(device))
    cast(FSDPModule, policy).reshard()  # a forward without a backward leaves the root's parameters whole

    return tuple(map(tuple, scores.logp.view(len(sequences), -1).tolist()))


def score_ids(policy: Policy, ids: tuple[int, ...], device: torch.device) -> tuple[float, ...]:
    """Return the log-probs of one sequence, see `score_sequences`. A collective."""
    (logprobs,) = score_sequences(policy, [ids], device)
    return logprobs


def adapter_shards(policy: Policy) -> Mapping[str, DTensor]:
    """Return the policy's adapters, by the model's own names."""
    assert policy.adapters is not None
    named_parameters = dict(policy.lm.named_parameters())
    return {
        piece.parameter: cast(DTensor, named_parameters[piece.parameter])
        for piece in policy.adapters.published
    }


class PublishedShards(Mapping[str, DTensor]):
    """The published weights, by the model's own names: the trained weights, or copies with an adapter merged
    in. A weight that two modules share has the first name only.

    Reading a weight is a collective. Only then is the adapter merged: copies of all weights would take as
    much of a GPU as the model."""

    def __init__(self, policy: Policy) -> None:
        self._weights = dict(policy.lm.named_parameters())
        self._adapters = policy.adapters
        assert all(isinstance(weight, DTensor) for weight in self._weights.values()), (
            "between forward and backward"
        )
        self._names = tuple(dict.fromkeys(piece.parameter for piece in policy.published))

    @torch.no_grad()
    def __getitem__(self, name: str) -> DTensor:
        weight = cast(DTensor, self._weights[name])
        return weight if self._adapters is None else self._adapters.merged_weight(name, weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def copied_buffers(policy: Policy, named_tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copy the persistent buffers to main memory, by their names in files. `named_tensors`: where to read
    them, else the model's buffers."""
    if named_tensors is None:
        named_tensors = dict(policy.lm.named_buffers(remove_duplicate=False))
    return {
        piece.name: piece.view_in(named_tensors[piece.parameter].detach().to("cpu", copy=True))
        for piece in policy.buffer_pieces
    }


@dataclass(frozen=True)
class Reference:
    """The frozen policy, or teacher, from which a KL term measures the distance, batch by batch.

    The reference is the policy before the first step, whatever checkpoint a run goes on from. `policy`: a
    separate copy from the model directory or, with adapters, the policy in training, whose base is scored.
    """

    policy: Policy

    def __post_init__(self) -> None:
        register_fsdp_forward_method(cast(nn.Module, self.policy), "head")

    @torch.no_grad()
    def logp(self, tokens: Selected) -> Tensor:
        """Return log-probs [N] at the tokens' temperatures, without gradient. A collective. Gathered weights
        are freed."""
        with self.policy.without_adapters():  # no routes are replayed: the reference's weights choose
            logprobs = self.policy(replace(tokens, routes=None)).logp
        self.release()
        return logprobs

    @torch.no_grad()
    def teacher(self, tokens: Selected, name: str, top_k: int) -> Teacher:
        """Return the teacher of the policy in training. Its output layer is used until the backward is done;
        call `release` then. A collective."""

        @torch.no_grad()
        def logits_of(part: Tensor) -> Tensor:
            with self.policy.without_adapters():
                return head(part)

        with self.policy.without_adapters():
            features, head = self.policy.head(replace(tokens, routes=None))
        return Teacher(name, top_k, features, logits_of)

    def release(self) -> None:
        """Free gathered weights, unless the policy in training owns them."""
        if self.policy.adapters is None:
            cast(FSDPModule, self.policy).reshard()


def load_reference(config: RunConfig, world: World, policy: Policy) -> Reference:
    """Load the reference of a run: `kl.reference`, else the base of the policy's adapters, else the initial
    policy, read once more. A collective. Raises ConfigError when its directory holds no language model."""
    if policy.adapters is not None and not config.kl.reference:
        return Reference(policy)
    path = config.kl.reference or config.model.path
    key = "kl.reference" if config.kl.reference else "model.path"
    model_config = msgspec.structs.replace(config.model, path=path, lora_rank=0)
    reference = load_policy(model_config, world, frozen=True, offload=config.kl.offload, key=key)

    is_smaller = reference.vocabulary < policy.vocabulary
    if is_smaller or (
        reference.vocabulary > policy.vocabulary and config.kl.diverges and not config.kl.top_k
    ):
        advice = (
            "set kl.top_k if the reference's vocabulary only has more padding; otherwise, use a reference "
            "with the policy's tokenizer"
        )
        if is_smaller:
            advice = (
                f"token IDs from {reference.vocabulary} onward can also be sampled; save the reference after "
                f"resize_token_embeddings({policy.vocabulary})"
            )

        raise ConfigError(
            f"kl.reference: {path} has a vocabulary of {reference.vocabulary} tokens, "
            f"but the policy's has {policy.vocabulary}; {advice}"
        )

    return Reference(reference)


class Critic(nn.Module):
    """The FSDP root around a backbone with `value_head`, which starts at zero, trained by the same
    micro-batches as the policy. V_t, the value before token t is sampled, reads the hidden state that
    predicts token t."""

    optimizer: torch.optim.Optimizer

    def __init__(self, backbone: PreTrainedModel, sequence_ranks: SequenceRanks | None) -> None:
        super().__init__()
        self.backbone = backbone
        self.sequence_ranks = sequence_ranks
        # On the meta device, like the rest of the model.
        hidden_size = backbone.config.get_text_config().hidden_size
        dtype = next(backbone.parameters()).dtype
        backbone.value_head = nn.Linear(hidden_size, 1, device="meta", dtype=dtype)

    def forward(self, tokens: Selected) -> Tensor:
        """Return values [N] with gradient, float32 at least."""
        (token_values,) = in_parts(self._score_part, tokens, self.sequence_ranks)
        assert token_values is not None
        return token_values

    def _score_part(self, tokens: Selected) -> tuple[Tensor]:
        hidden = tokens.predictors(self.backbone(**tokens.inputs).last_hidden_state)
        head = cast(nn.Linear, self.backbone.value_head)
        return (widened(hidden) @ widened(head.weight)[0] + widened(head.bias),)


def load_critic(config: RunConfig, world: World, recomputation: Recomputation | None = None) -> Critic:
    """Load the critic of a run with its optimizer, sharded over the ranks. A collective.

    All its weights are trained, also where the policy has adapters. Raises ConfigError when its directory
    holds no model.
    """
    path = config.critic.path or config.model.path
    key = "critic.path" if config.critic.path else "model.path"
    source = read_model("backbone", path, config.model.dtype, world, key)
    critic = Critic(source.model, world.sequence)
    prepare_layers(source.model, config.trainer, recomputation)
    shard_and_fill(critic, source, world, offload=config.trainer.offload_optimizer)
    critic.optimizer = make_optimizer(critic, config.trainer, lr=config.critic.lr)

    return critic
