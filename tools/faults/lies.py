"""Embedded engines that lie: each computes, samples or reports something else than it says.

`asyncrl train experiment=calculator engine.name=tools/faults/lies.py:stale_weights` trains with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import torch

from asyncrl.engines.base import Request
from asyncrl.engines.torch import recorded, sampler
from asyncrl.engines.torch.engine import TorchEngine, build
from asyncrl.types import Generation
from asyncrl.weights.manifest import AdapterSpec

Tensors = Mapping[str, torch.Tensor]
Sample = Callable[..., tuple[torch.Tensor, torch.Tensor]]

REPORTED_TEMPERATURE = 0.7
SAMPLED_TEMPERATURE = 0.8
TOP_P = 0.9


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


class OtherTokenizer(TorchEngine):
    """Reads and writes ids of another tokenizer: those of the model, shifted by one."""

    async def generate(self, request: Request) -> Generation:
        generation = await super().generate(
            msgspec.structs.replace(request, ids=self._shifted(request.ids, 1))
        )
        return msgspec.structs.replace(generation, ids=self._shifted(generation.ids, -1))

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        return await super().score(self._shifted(ids, 1))

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


def _with_sampler(sample: Sample) -> Callable[..., TorchEngine]:
    def build_lying(**options: Any) -> TorchEngine:
        recorded.sample = sample  # patches this process, which has no other engine
        return build(**options)

    return build_lying


stale_weights = _with_engine(StaleEngine)
one_version_behind = _with_engine(OneVersionBehind)
layer_not_loaded = _with_engine(WithoutLayer)
quantized = _with_engine(Quantized)
other_tokenizer = _with_engine(OtherTokenizer)
shifted_logprobs = _with_engine(ShiftedLogprobs)
reported_temperature = _with_sampler(report_other_temperature)
sampled_temperature = _with_sampler(sample_below_temperature)
top_p = _with_sampler(sample_top_p)
top_p_honest = _with_sampler(sample_top_p_honestly)
