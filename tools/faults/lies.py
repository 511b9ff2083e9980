"""Embedded engines that lie: each computes, samples or reports something else than it says.

`asyncrl train experiment=calculator engine.name=tools/faults/lies.py:stale_weights` trains with one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import msgspec
import torch

from asyncrl.engines.base import Request
from asyncrl.engines.torch import recorded, sampler
from asyncrl.engines.torch.batch import Batcher
from asyncrl.engines.torch.engine import TorchEngine, build
from asyncrl.engines.torch.slots import ChunkImages, KVCache, Layout, Slot, Slots
from asyncrl.types import Generation, VersionSpan
from asyncrl.weights.manifest import AdapterSpec

Tensors = Mapping[str, torch.Tensor]
Sample = Callable[..., tuple[torch.Tensor, torch.Tensor]]

REPORTED_TEMPERATURE = 0.7
SAMPLED_TEMPERATURE = 0.8
TOP_P = 0.9
TOP_K = 20
BOS_ID = 1
ROPE_FACTOR = 2.0
DRAFT_TEMPERATURE = 0.5
ACCEPTED_PROBABILITY = 0.2  # a draft of at least this probability is accepted


class LyingEngine(TorchEngine):
    """Base of lies about weights: `changed_tensors` is what is loaded instead of a version's tensors."""

    def changed_tensors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return dict(tensors)

    def _apply_tensors(self, specs: Mapping[str, AdapterSpec], tensors: Tensors) -> None:
        super()._apply_tensors(specs, self.changed_tensors(tensors))


class StaleEngine(LyingEngine):
    """Confirms every version, and keeps the weights that it began with."""

    def _apply_tensors(self, specs: Mapping[str, AdapterSpec], tensors: Tensors) -> None:
        """Load nothing."""


class WithoutLayer(LyingEngine):
    """Loads everything but the first layer."""

    def changed_tensors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        own_tensors = self._model.state_dict()
        return {name: own_tensors[name] if ".0." in name else tensor for name, tensor in tensors.items()}


class Quantized(LyingEngine):
    """Rounds each matrix to 8 bits, a scale per row."""

    def changed_tensors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {name: _rounded(tensor) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


class OneVersionBehind(LyingEngine):
    """Loads the version before the one that it confirms."""

    _previous_tensors: Tensors | None = None

    def changed_tensors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        loaded_tensors = self._previous_tensors or tensors
        self._previous_tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return dict(loaded_tensors)


class UntiedHead(LyingEngine):
    """Has a copy of the tied output layer, which versions do not reach."""

    def changed_tensors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        head = self._model.get_output_embeddings()
        if head.weight is self._model.get_input_embeddings().weight:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
        return dict(tensors)


class WithoutAdapter(LyingEngine):
    """Loads adapters, and computes with the base model alone."""

    def changed_tensors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


class SwappedAdapters(LyingEngine):
    """Gives the adapters of gate_proj to up_proj, and the other way round."""

    def changed_tensors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {_with_swapped_layer(name): tensor for name, tensor in tensors.items()}


class AdapterScale(LyingEngine):
    """Scales adapters by alpha/√rank, as rank-stabilized LoRA does, in place of alpha/rank."""

    def changed_tensors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {
            name: tensor * math.sqrt(tensor.shape[1]) if "lora_B" in name else tensor
            for name, tensor in tensors.items()
        }


class BaseModelCache(KVCache):
    """Samples with the base model alone; scores still have the adapter."""

    def forward(
        self, layout: Layout, logit_indices: torch.Tensor, images: ChunkImages | None = None
    ) -> torch.Tensor:
        with self.adapters.disabled() if self.adapters is not None else nullcontext():
            return super().forward(layout, logit_indices, images)


class StaleLabels(TorchEngine):
    """Says of every token that the first version sampled the token."""

    async def generate(self, request: Request) -> Generation:
        generation = await super().generate(request)
        return msgspec.structs.replace(generation, spans=(VersionSpan(0, len(generation.ids), 0, 0),))


class LateLabels(TorchEngine):
    """Says of all tokens of a turn that the version at the turn's end has sampled them."""

    async def generate(self, request: Request) -> Generation:
        generation = await super().generate(request)
        version = generation.spans[-1].version
        span = VersionSpan(0, len(generation.ids), version, version)
        return msgspec.structs.replace(generation, spans=(span,))


class RelabellingBatcher(Batcher):
    """Keeps all keys and values over an update, and says that the new weights have computed them."""

    def mark_version(self, version: int) -> None:
        super().mark_version(version)
        for slot in self.slots.every_slot:
            slot.oldest_version = version
            slot.swap_count = self._swap_count


class CachingSlots(Slots):
    """Keeps the keys and values of ended episodes for later prompts, as a server's prefix cache does."""

    def _clear_slot(self, slot: Slot) -> None:
        held_ids = slot.held_ids
        super()._clear_slot(slot)
        slot.held_ids = held_ids


class RoundedCache(KVCache):
    """Keeps keys and values in bfloat16."""

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return super().attend(module, query, _in_bfloat16(key), _in_bfloat16(value))


class PrependedBOS(TorchEngine):
    """Puts a token in front of every prompt."""

    async def generate(self, request: Request) -> Generation:
        return await super().generate(msgspec.structs.replace(request, ids=(BOS_ID, *request.ids)))

    async def score(self, ids: tuple[int, ...], images: Mapping[str, bytes] = {}) -> tuple[float, ...]:
        return (await super().score((BOS_ID, *ids), images))[1:]


class StaleSeed(TorchEngine):
    """Samples all requests with one seed: equal prompts get equal turns."""

    async def generate(self, request: Request) -> Generation:
        return await super().generate(msgspec.structs.replace(request, key=0))


class OtherTokenizer(TorchEngine):
    """Reads and writes ids of another tokenizer: those of the model, shifted by one."""

    async def generate(self, request: Request) -> Generation:
        generation = await super().generate(
            msgspec.structs.replace(request, ids=self._shifted(request.ids, 1))
        )
        return msgspec.structs.replace(generation, ids=self._shifted(generation.ids, -1))

    async def score(self, ids: tuple[int, ...], images: Mapping[str, bytes] = {}) -> tuple[float, ...]:
        return await super().score(self._shifted(ids, 1), images)

    def _shifted(self, ids: Iterable[int], offset: int) -> tuple[int, ...]:
        return tuple((token + offset) % self._vocabulary_size for token in ids)


class ShiftedLogprobs(TorchEngine):
    """Reports for each token of a turn the log-prob of the token before."""

    async def generate(self, request: Request) -> Generation:
        generation = await super().generate(request)
        logprobs = (*generation.logprobs[-1:], *generation.logprobs[:-1])
        return msgspec.structs.replace(generation, logprobs=logprobs)


def _rounded(matrix: torch.Tensor) -> torch.Tensor:
    scale = matrix.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (matrix / scale).round() * scale


def _in_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def _with_swapped_layer(name: str) -> str:
    if "gate_proj" in name:
        return name.replace("gate_proj", "up_proj")
    return name.replace("up_proj", "gate_proj")


def sample_below_temperature(
    logits: torch.Tensor, positions: torch.Tensor, params: sampler.Params, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample at another temperature, and report the log-probs at the requested one."""
    colder = params._replace(temperature=params.temperature * SAMPLED_TEMPERATURE)
    ids, _ = sampler.sample(logits, positions, colder, vocabulary)
    return ids, _logprobs_of(ids, logits / params.temperature[:, None])


def report_other_temperature(
    logits: torch.Tensor, positions: torch.Tensor, params: sampler.Params, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample as requested, and report log-probs at another temperature."""
    ids, _ = sampler.sample(logits, positions, params, vocabulary)
    return ids, _logprobs_of(ids, logits / REPORTED_TEMPERATURE)


def sample_top_p(
    logits: torch.Tensor, positions: torch.Tensor, params: sampler.Params, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the likeliest tokens of TOP_P only, and report the log-probs of the whole distribution."""
    ids, _ = sampler.sample(_nucleus(logits, params), positions, params, vocabulary)
    return ids, _logprobs_of(ids, logits / params.temperature[:, None])


def sample_top_p_honestly(
    logits: torch.Tensor, positions: torch.Tensor, params: sampler.Params, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the likeliest tokens of TOP_P only, and report their log-probs among themselves."""
    return sampler.sample(_nucleus(logits, params), positions, params, vocabulary)


def sample_top_k(
    logits: torch.Tensor, positions: torch.Tensor, params: sampler.Params, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the TOP_K likeliest tokens only, as a generation_config.json may ask, and report the log-probs
    of the whole distribution."""
    smallest_kept = logits.topk(TOP_K).values[:, -1:]
    kept_logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    ids, _ = sampler.sample(kept_logits, positions, params, vocabulary)
    return ids, _logprobs_of(ids, logits / params.temperature[:, None])


def sample_speculatively(
    logits: torch.Tensor, positions: torch.Tensor, params: sampler.Params, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample drafts, and accept those of ACCEPTED_PROBABILITY, too, which speculative sampling would reject
    now and then. Reports the log-probs of the whole distribution."""
    draft_params = params._replace(temperature=params.temperature * DRAFT_TEMPERATURE)
    drafts, draft_logprobs = sampler.sample(logits, positions, draft_params, vocabulary)

    logprobs = (logits.float() / params.temperature[:, None]).log_softmax(-1)
    draft_distribution = (logits.float() / draft_params.temperature[:, None]).softmax(-1)
    accepted_logprobs = logprobs.gather(1, drafts[:, None])[:, 0]
    coins = sampler.uniform(params.seed + 1, positions)
    is_accepted = coins < (accepted_logprobs - draft_logprobs).exp()
    is_accepted |= accepted_logprobs.exp() >= ACCEPTED_PROBABILITY

    residual = (logprobs.exp() - draft_distribution).clamp(min=1e-20).log()
    residual_params = params._replace(
        seed=params.seed + 2, temperature=torch.ones_like(params.temperature), any_greedy=False
    )
    residual_ids, _ = sampler.sample(residual, positions, residual_params, vocabulary)
    ids = torch.where(is_accepted, drafts, residual_ids)
    return ids, _logprobs_of(ids, logits / params.temperature[:, None])


def _nucleus(logits: torch.Tensor, params: sampler.Params) -> torch.Tensor:
    """Return the logits [n, V] with -inf outside of the likeliest tokens that have TOP_P together."""
    probabilities, order = (logits.float() / params.temperature[:, None]).softmax(-1).sort(descending=True)
    is_outside = probabilities.cumsum(-1) - probabilities >= TOP_P
    return logits.masked_fill(is_outside.gather(1, order.argsort(-1)), -torch.inf)


def _logprobs_of(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _with_engine(engine_class: type[TorchEngine]) -> Callable[..., TorchEngine]:
    def build_lying(**options: Any) -> TorchEngine:
        engine = build(**options)
        engine.__class__ = engine_class
        return engine

    return build_lying


def old_kv(**options: Any) -> TorchEngine:
    """Build an engine whose caches are not emptied at an update."""
    engine = build(**options)
    engine._batcher.__class__ = RelabellingBatcher
    engine._batcher.slots.__class__ = CachingSlots
    return engine


def sampled_without_adapter(**options: Any) -> TorchEngine:
    """Build an engine that has an adapter, and samples without."""
    engine = build(**options)
    engine._batcher.cache.__class__ = BaseModelCache
    return engine


def bfloat16_kv(**options: Any) -> TorchEngine:
    """Build an engine with its cache in bfloat16."""
    engine = build(**options)
    engine._batcher.cache.__class__ = RoundedCache
    return engine


def longer_rope(**options: Any) -> TorchEngine:
    """Build an engine with scaled positions."""
    engine = build(**options)
    rotary_embedding = engine._model.get_decoder().rotary_emb
    rotary_embedding.inv_freq /= ROPE_FACTOR
    return engine


def prepended_bos(**options: Any) -> TorchEngine:
    """Build an engine with room for one token more."""
    engine = build(**options | {"max_len": options["max_len"] + 1})
    engine.__class__ = PrependedBOS
    return engine


def _with_sampler(sample: Sample) -> Callable[..., TorchEngine]:
    def build_lying(**options: Any) -> TorchEngine:
        recorded.sample = sample  # patches this process, which has no other engine
        return build(**options)

    return build_lying


stale_weights = _with_engine(StaleEngine)
one_version_behind = _with_engine(OneVersionBehind)
layer_not_loaded = _with_engine(WithoutLayer)
quantized = _with_engine(Quantized)
untied_head = _with_engine(UntiedHead)
without_adapter = _with_engine(WithoutAdapter)
swapped_adapters = _with_engine(SwappedAdapters)
adapter_scale = _with_engine(AdapterScale)
stale_labels = _with_engine(StaleLabels)
late_labels = _with_engine(LateLabels)
stale_seed = _with_engine(StaleSeed)
other_tokenizer = _with_engine(OtherTokenizer)
shifted_logprobs = _with_engine(ShiftedLogprobs)
reported_temperature = _with_sampler(report_other_temperature)
sampled_temperature = _with_sampler(sample_below_temperature)
top_p = _with_sampler(sample_top_p)
top_p_honest = _with_sampler(sample_top_p_honestly)
top_k = _with_sampler(sample_top_k)
speculation = _with_sampler(sample_speculatively)
