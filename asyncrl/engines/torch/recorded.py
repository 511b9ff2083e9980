"""Computes a decode step on the device: one forward, and a token sampled for every slot that decodes.

A step of a small model is some hundred small operations, and Python takes longer to issue them than they take
to run. So on a CPU each kind of step is recorded by `torch.jit.trace` after it has been made often: the same
operations on the same tensors are then issued from C++, while other threads of Python run. Sizes are not part
of a recording, and weights and KV are read in place, so a recording stays valid for other batches and
weights. Without recordings 8 streams of a model of 0.9M parameters get a third fewer tokens per second, 64 a
fifth (tools/bench/engine.py, --plain). On a GPU steps are issued as they are: torch's tracing is deprecated,
and nothing was measured there.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_error

from asyncrl.engines.torch.sampler import Params, sample
from asyncrl.engines.torch.slots import ChunkImages, KVCache, Layout, SlotGroup
from asyncrl.engines.torch.step_layout import StepLayout
from asyncrl.errors import one_line

log = logging.getLogger("asyncrl.engine")

RECORD_AFTER = 300  # steps of a kind: a recording costs about as much as 300 steps
_RECORDING_LOCK = threading.Lock()  # torch records one module at a time


class StepKind(NamedTuple):
    """The values of a plan beside its tensors: a recording is valid for one kind of step."""

    groups: int
    decoding: int
    any_greedy: bool

    @property
    def has_chunks(self) -> bool:
        """True if prompt tokens are computed. Layers with a state do so in a loop over parts of the prompt,
        whose number would be part of a recording."""
        return self.groups > self.decoding


class RecordedStep:
    """Computes the steps of a cache, one at a time; the caller is in inference mode."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._can_record = cache.ids.device.type == "cpu"
        self._step_counts: Counter[StepKind] = Counter()
        self._step_functions: dict[StepKind, Callable[..., torch.Tensor]] = {}

    def __call__(self, plan: StepLayout, images: ChunkImages | None = None) -> list[int]:
        """Compute a step; return the slots whose turns ended with this step. `images`: of the plan's
        chunks."""
        layout = plan.layout
        params = plan.params
        kind = StepKind(len(layout.groups), layout.decoding_groups, params.any_greedy)
        step_tensors = (
            layout.cells,
            layout.positions,
            plan.logit_indices,
            plan.is_live,
            params.seed,
            params.temperature,
            params.greedy,
            plan.stops,
            plan.limits,
            *(tensor for group in layout.groups for tensor in group),
        )

        step = self._step_function(kind, step_tensors) if images is None else _Step(self._cache, kind, images)
        ended_samples = step(*step_tensors)
        return [plan.slots[index] for index in ended_samples.tolist()]

    def _step_function(
        self, kind: StepKind, step_tensors: tuple[torch.Tensor, ...]
    ) -> Callable[..., torch.Tensor]:
        """Return the function that computes steps of this kind, recorded if such steps are frequent. Steps
        with images are never recorded: vision towers loop over images."""
        if kind not in self._step_functions:
            self._step_functions[kind] = _Step(self._cache, kind)

        self._step_counts[kind] += 1
        can_record = self._can_record and not (kind.has_chunks and self._cache.has_states)
        if can_record and self._step_counts[kind] == RECORD_AFTER:
            with self._cache.states.unchanged():  # a recording computes the step, which is then computed
                self._step_functions[kind] = _record_step(self._step_functions[kind], step_tensors)

        return self._step_functions[kind]


class _Step(torch.nn.Module):
    """Computes the steps of one kind. The tensors that change between steps are registered as buffers:
    otherwise a recording would copy these tensors as constants."""

    def __init__(self, cache: KVCache, kind: StepKind, images: ChunkImages | None = None) -> None:
        super().__init__()
        self.model = cache.model
        self._cache = cache
        self._kind = kind
        self._images = images
        token_tables = (cache.ids, cache.logprobs, cache.adapter_indices)
        for index, state in enumerate((*token_tables, cache.rope_offsets, *cache.pools)):
            self.register_buffer(f"state_{index}", state)

    def forward(
        self,
        cells: torch.Tensor,
        positions: torch.Tensor,
        logit_indices: torch.Tensor,
        is_live: torch.Tensor,
        seed: torch.Tensor,
        temperature: torch.Tensor,
        greedy: torch.Tensor,
        stops: torch.Tensor,
        limits: torch.Tensor,
        *groups: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step and return the indices of the samples that end their turn, [ending]. For the
        arguments see StepLayout and Layout; `groups` has three tensors per SlotGroup."""
        cache = self._cache
        kind = self._kind
        slot_groups = tuple(SlotGroup(*groups[first : first + 3]) for first in range(0, 3 * kind.groups, 3))
        layout = Layout(cells, positions, slot_groups, kind.decoding)
        logits = cache.forward(layout, logit_indices, self._images)

        cells = cells[logit_indices] + 1
        positions = positions[logit_indices] + 1
        params = Params(seed, temperature, greedy, kind.any_greedy)
        ids, logprobs = sample(logits, positions, params, cache.vocabulary)
        cache.ids.view(-1).index_copy_(0, cells, ids)
        cache.logprobs.view(-1).index_copy_(0, cells, logprobs)

        is_stop_id = (ids[:, None] == stops).any(1)
        ends_turn = (is_stop_id | (positions + 1 >= limits) | logprobs.isnan()) & (is_live == 1)
        return ends_turn.nonzero().flatten()


def _record_step(
    step: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...]
) -> Callable[..., torch.Tensor]:
    """Return the recorded step, or the step itself if its code depends on values of tensors (mixtures of
    experts)."""
    with _RECORDING_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("error", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        previous_verbosity = get_verbosity()
        set_verbosity_error()  # the recording reads every attribute of the model, and some warn when read

        try:
            return torch.jit.trace(step, tensors, check_trace=False)
        except Exception as error:
            log.info("cannot record the engine's steps: %s", one_line(error.__cause__ or error))
            return step
        finally:
            set_verbosity(previous_verbosity)
