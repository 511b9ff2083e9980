"""Measures the time, speed and memory of a rank, under verl's metric names."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.model_class import is_within, parts_beside_text
from asyncrl.observe.metrics import PHASES

# One backward serves policy and critic, and counts as update_actor; update_critic is the critic's optimizer.
TIMED = tuple(name.removeprefix("timing_s/") for name in PHASES)
# These phases are also reported per token of the batch, as timing_per_token_ms/*.
TIMED_PER_TOKEN = ("ref", "values", "adv", "update_actor", "update_critic")
PEAK_SIZE = {"cpu": 512, "cuda": 8192}  # rows of the multiplied matrices
GB = 1e9


class AttentionCost(NamedTuple):
    """Describes layers of the same attention: `flops` of all layers for a pair of a token and a token in its
    view, forward and backward. A token sees at most `reach` tokens, including itself."""

    flops: float
    reach: float


class FlopCount(NamedTuple):
    """Counts floating point operations of the policy's matrix products in a forward and backward: `body` per
    computed token, `head` per scored token, `attention` for pairs of tokens, `patch` per patch of an image.
    Recomputation by activation checkpointing is left out, and so are the state updates of linear attention
    and the attention among patches."""

    body: float
    head: float
    attention: tuple[AttentionCost, ...] = ()
    patch: float = 0.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> FlopCount:
        """Count 2 operations per weight in the forward, 2 in the backward, and 2 more for a trained
        weight."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        uncounted = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} | {
            id(head)
        }
        expert_count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        chosen_experts = getattr(config, "num_experts_per_tok", None) or getattr(
            config, "top_k_experts", None
        )
        expert_fraction = chosen_experts / expert_count if chosen_experts and expert_count else 1.0
        matrices = {
            name: weight
            for name, weight in model.named_parameters()
            if weight.ndim > 1 and id(weight) not in uncounted
        }
        tower_parts = parts_beside_text(model)
        tower_names = {name for name in matrices if is_within(name, tower_parts)}
        body = sum(
            _weight_flops(weight) * (expert_fraction if weight.ndim == 3 or ".experts." in name else 1.0)
            for name, weight in matrices.items()
            if name not in tower_names
        )
        # A frozen tower has no backward. The projector counts for each patch, not for each merged patch.
        patch = sum(
            (6 if matrices[name].requires_grad else 2) * matrices[name].numel() for name in tower_names
        )

        return cls(body, _weight_flops(head), _attention_costs(config), patch)

    def total_flops(self, positions: np.ndarray, scored_tokens: int, patches: int = 0) -> float:
        """Return the operations for tokens at these `positions` of their sequences, each of which sees all
        earlier tokens and itself, for `scored_tokens` at the output layer, and for the `patches` of
        images."""
        attention_flops = (
            cost.flops * np.minimum(positions + 1, cost.reach).sum() for cost in self.attention
        )
        token_flops = self.body * positions.size + self.head * scored_tokens + self.patch * patches
        return float(token_flops + sum(attention_flops))


def _weight_flops(weight: torch.Tensor) -> int:
    return (6 if weight.requires_grad else 4) * weight.numel()


def _attention_costs(config: Any) -> tuple[AttentionCost, ...]:
    """Count a query and a key of d numbers, and a value of v: 2·d + 2·v in the forward of each head, twice as
    much in the backward (FlashAttention-2, arXiv 2307.08691, section 4.1)."""
    head_count = getattr(config, "num_attention_heads", 0)
    if not head_count:
        return ()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // head_count
    query_dim = getattr(config, "qk_head_dim", None) or head_dim
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    reach_by_type = {
        "full_attention": math.inf,
        "hybrid": math.inf,  # attention beside a state space
        "sliding_attention": getattr(config, "sliding_window", None) or math.inf,
        "chunked_attention": getattr(config, "attention_chunk_size", None) or math.inf,
    }
    uniform = "sliding_attention" if getattr(config, "use_sliding_window", True) else "full_attention"
    layer_types = getattr(config, "layer_types", None) or [uniform] * config.num_hidden_layers
    layers_by_reach = Counter(
        reach_by_type[layer_type] for layer_type in layer_types if layer_type in reach_by_type
    )
    layer_flops = 6.0 * head_count * (query_dim + value_dim)

    return tuple(AttentionCost(layers * layer_flops, reach) for reach, layers in layers_by_reach.items())


# Dense bfloat16 operations per second of a device, by a part of its name: the vendors' data sheets.
DATA_SHEET = {
    **dict.fromkeys(("H100", "H200", "H800", "GH200"), 989e12),
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H20": 148e12,
    **dict.fromkeys(("A100", "A800"), 312e12),
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI300X": 1307e12,
}


def peak_flops(device: torch.device, dtype: str) -> float:
    """Return the operations per second of this device in the type of a forward, for perf/mfu: from its data
    sheet, or else measured by a large product of random matrices."""
    if device.type == "cuda" and dtype == "bfloat16":
        name = torch.cuda.get_device_name(device)
        matching_names = [model for model in DATA_SHEET if re.search(rf"\b{model}\b", name)]
        if matching_names:
            return DATA_SHEET[max(matching_names, key=len)]

    matrix_size = PEAK_SIZE[device.type]
    # Random numbers, as a matrix of ones is faster on a GPU.
    matrix = torch.randn(matrix_size, matrix_size, device=device).to(getattr(torch, dtype))
    shortest = math.inf
    for _ in range(4):  # the first round warms up
        started_at = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        shortest = min(shortest, time.perf_counter() - started_at)

    return 2.0 * matrix_size**3 / shortest


def performance(
    seconds: float, phases: Mapping[str, float], metrics: Mapping[str, float], peak_rate: float, ranks: int
) -> dict[str, float]:
    """Return times and memory of this rank since its last commit; a phase that did not happen is left out.
    `metrics`: of the step, of all `ranks` (at least one); `peak_rate`: `peak_flops` of a rank.

    `update_weights` and `save_checkpoint` belong to the commit before this one.
    """
    measured = {f"timing_s/{name}": phases[name] for name in TIMED if name in phases}
    tokens = metrics.get("perf/total_num_tokens", 0.0)
    measured["perf/throughput"] = tokens / (seconds * ranks) if seconds > 0 else 0.0
    if tokens:
        measured |= {
            f"timing_per_token_ms/{name}": 1e3 * phases[name] / tokens
            for name in TIMED_PER_TOKEN
            if name in phases
        }

    busy_seconds = phases.get("update_actor", 0.0)
    if busy_seconds:
        measured["perf/mfu/actor"] = (
            1e12 * metrics.get("perf/model_tflop", 0.0) / (busy_seconds * peak_rate * ranks)
        )

    if torch.cuda.is_initialized():
        measured["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / GB
        measured["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / GB
    measured["perf/cpu_memory_used_gb"] = psutil.Process().memory_info().rss / GB
    measured["perf/time_per_step"] = seconds

    return measured


class Stopwatch:
    """Measures how a rank spends its time: every second belongs to exactly one phase.

    Phases nest: an inner phase interrupts the outer. Waiting is idle, everything else busy, so busy and idle
    add up to the wall time since the stopwatch was made.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._charged_at = clock()
        self._lap_started_at = self._charged_at
        self._phase = ""
        self._waiting = False
        self._busy_seconds = 0.0
        self._idle_seconds = 0.0
        self._phase_seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, *, waiting: bool = False) -> Iterator[None]:
        """Charge the body's time to `name`."""
        self._charge()
        outer = self._phase, self._waiting
        self._phase = name
        self._waiting = waiting
        try:
            yield
        finally:
            self._charge()
            self._phase, self._waiting = outer

    @property
    def busy_s(self) -> float:
        """Return the busy seconds so far, including the phase under way."""
        self._charge()
        return self._busy_seconds

    @property
    def idle_s(self) -> float:
        """Return the seconds of waiting so far, including the phase under way."""
        self._charge()
        return self._idle_seconds

    def lap(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last lap: in all, and of each phase."""
        self._charge()
        lap_seconds = self._charged_at - self._lap_started_at
        self._lap_started_at = self._charged_at
        phase_seconds = self._phase_seconds
        self._phase_seconds = {}
        return lap_seconds, phase_seconds

    def _charge(self) -> None:
        now = self._clock()
        elapsed = now - self._charged_at
        self._charged_at = now

        if self._phase:
            self._phase_seconds[self._phase] = self._phase_seconds.get(self._phase, 0.0) + elapsed
        if self._waiting:
            self._idle_seconds += elapsed
        else:
            self._busy_seconds += elapsed
