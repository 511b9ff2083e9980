"""The states of layers that carry one from token to token, for every slot of the embedded engine.

    pool        [slots, ...]  each slot's state behind its last token, which every forward reads and writes
    snapshot    [slots, ...]  each slot's state at an earlier length

Keys and values can be cut at any length; a state cannot. So each slot keeps a snapshot: a turn whose text was
rewritten goes on from there, and members of a group copy it. Pools belong to the calls of a forward in their
order, which is the same in every forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from asyncrl.state_layers import DELTA_RULE, Argument, Convolve, Recurrence, StateLayout

NORM_EPSILON = 1e-6  # of the norms of queries and keys in delta rules


class TokenGroup(NamedTuple):
    """Holds r slots × width tokens of a forward, slot by slot."""

    tokens: slice
    slots: slice | Tensor  # [r]; a slice: slots that decode, which have one token each and are read in place


class LiveTokens(NamedTuple):
    """Says which tokens of a group change the states of their slots: the first ones of each slot. The others
    are padding, or of slots that sit out."""

    group: TokenGroup
    is_live: Tensor  # [r, width]
    counts: Tensor  # [r, 1] live tokens of each slot
    rows: Tensor  # [r, 1] 0, 1, …


class SlotStates(StateLayout):
    """Holds the states of all slots, and computes the layers that carry them."""

    def __init__(self, slot_count: int) -> None:
        self.pools: list[Tensor] = []
        self.snapshots: list[Tensor] = []
        self._slot_count = slot_count
        self._live_tokens: list[LiveTokens] = []
        self._is_allocated = False
        self._next_call = 0

    def begin_forward(self, groups: Sequence[TokenGroup], is_live: Sequence[Tensor]) -> None:
        """Prepare for a forward of the groups' tokens. `is_live` [r, width] of each group. The
        engine's first forward, which is not prepared, allocates the pools."""
        self._is_allocated = True
        self._next_call = 0
        self._live_tokens = [
            LiveTokens(
                group,
                is_live_token,
                counts=is_live_token.sum(1, keepdim=True),
                rows=torch.arange(is_live_token.shape[0], device=is_live_token.device)[:, None],
            )
            for group, is_live_token in zip(groups, is_live, strict=True)
        ]

    def convolve(self, convolve: Convolve, inputs: Tensor, reach: int) -> Tensor:
        """Compute a convolution, see StateLayout. A state holds the last inputs, [reach, channels]."""
        pool = self._pool_of_call((reach, inputs.shape[1]), inputs.dtype, inputs.device)
        token_inputs = inputs[0].transpose(0, 1)
        if not self._is_allocated:
            return torch.zeros_like(inputs)

        outputs: list[Tensor] = []
        for group, is_live, counts, row_indices in self._live_tokens:
            new_inputs = token_inputs[group.tokens].unflatten(0, is_live.shape)
            rows = torch.cat([pool[group.slots], new_inputs], dim=1)  # [r, reach + width, channels]

            if isinstance(group.slots, slice):
                output = _convolve_window(convolve, rows)
            else:
                output = convolve(rows.transpose(1, 2))[:, :, reach:].transpose(1, 2).flatten(0, 1)
            outputs.append(output)

            # The last inputs lie behind those that live tokens have pushed out.
            last_inputs = counts + torch.arange(reach, device=rows.device)
            _write_states(pool, group.slots, rows[row_indices, last_inputs])

        return torch.cat(outputs).transpose(0, 1)[None]

    def recur(self, recurrence: Recurrence) -> Tensor:
        """Compute a recurrence, see StateLayout. A state is a matrix for each head, in float32."""
        rule = DeltaRule(recurrence) if recurrence.kind is DELTA_RULE else StateSpace(recurrence)
        values = rule.values
        pool = self._pool_of_call(rule.state_shape, torch.float32, values.device)
        if not self._is_allocated:
            return torch.zeros_like(values)

        outputs: list[Tensor] = []
        for group, is_live, _, _ in self._live_tokens:
            tokens: dict[Argument, Tensor] = {}
            for name, tensor in rule.tokens.items():
                rows = tensor[0, group.tokens].unflatten(0, is_live.shape)
                is_padding = ~is_live.view(*is_live.shape, *[1] * (rows.dim() - 2))
                tokens[name] = rows.masked_fill(is_padding, 0)  # nor does a NaN there reach a state

            if isinstance(group.slots, slice):
                single_tokens = {name: tensor[:, 0].float() for name, tensor in tokens.items()}
                output = rule.step(pool[group.slots], single_tokens).to(values.dtype)
            else:
                arguments = {**tokens, **rule.changed_arguments}
                output, state = recurrence.run(arguments, pool[group.slots], returns_state=True)
                assert state is not None
                _write_states(pool, group.slots, state)
                output = output.flatten(0, 1)
            outputs.append(output)

        return torch.cat(outputs)[None]

    def take_snapshot(self, slot: int) -> None:
        """Keep the slot's present state as its snapshot."""
        for pool, snapshot in zip(self.pools, self.snapshots, strict=True):
            snapshot[slot] = pool[slot]

    def copy_snapshot(self, source: int, target: int) -> None:
        """Make the snapshot of a slot the state and the snapshot of another, or the same, slot."""
        for pool, snapshot in zip(self.pools, self.snapshots, strict=True):
            pool[target] = snapshot[source]
            snapshot[target] = snapshot[source]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the present states at the end."""
        present_states = [pool.clone() for pool in self.pools]
        try:
            yield
        finally:
            for pool, state in zip(self.pools, present_states, strict=True):
                pool.copy_(state)

    def move_slots(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copy states and snapshots of the slots to the same slots in another order."""
        for pool in (*self.pools, *self.snapshots):
            pool[target_slots] = pool[source_slots]

    def begin_sequence(self, slot: int) -> None:
        """Give the slot the state before a first token."""
        for pool in self.pools:
            pool[slot].zero_()

    def _pool_of_call(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the pool of the next call in a forward: [slots, *shape]."""
        call = self._next_call
        self._next_call += 1
        if not self._is_allocated:
            for pools in (self.pools, self.snapshots):
                pools.append(torch.zeros(self._slot_count, *shape, dtype=dtype, device=device))
        return self.pools[call]


def _write_states(pool: Tensor, slots: slice | Tensor, states: Tensor) -> None:
    """Write the states of a group's slots, [r, ...]. An assignment would drop the first dimension of a single
    slot, and a recording would repeat that for several slots."""
    if isinstance(slots, slice):
        pool[slots].copy_(states)
    else:
        pool.index_copy_(0, slots, states)


def _convolve_window(convolve: Convolve, rows: Tensor) -> Tensor:
    """Return the last outputs of a convolution, [r, channels], for inputs [r, k, channels]. Convolutions of
    torch take ten times as long on a CPU if there are few inputs."""
    outputs = (rows.to(convolve.weight.dtype) * convolve.weight.transpose(0, 1)).sum(1)
    if convolve.bias is not None:
        outputs = outputs + convolve.bias
    if convolve.activation is not None:
        outputs = ACT2FN[convolve.activation](outputs)
    return outputs.to(rows.dtype)


class DeltaRule:
    """A gated delta rule (arXiv 2412.06464): S ← e^g S, then S ← S + β k (v − Sᵀk)ᵀ; the output is Sᵀq. The
    decay e^g is that of a head, or of each of its keys' dimensions (KDA, arXiv 2510.26692)."""

    changed_arguments: Mapping[Argument, Any] = {}

    def __init__(self, recurrence: Recurrence) -> None:
        self.tokens = recurrence.tokens
        self.values = self.tokens[2]  # [1, N, heads, value_dim]
        self.state_shape = (self.values.shape[2], self.tokens[1].shape[3], self.values.shape[3])
        self._normalizes = recurrence.arguments.get("use_qk_l2norm_in_kernel", False)

    def step(self, state: Tensor, tokens: Mapping[Argument, Tensor]) -> Tensor:
        """Compute one token of r slots; returns the outputs [r, heads, value_dim] and changes the state [r,
        heads, key_dim, value_dim]. `tokens` [r, heads, ...]: query, key, value, log decay g and beta."""
        query, key, value, decay, beta = tokens.values()
        if self._normalizes:
            query = query * (query.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
            key = key * (key.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
        query = query * query.shape[-1] ** -0.5

        is_of_head = decay.dim() == beta.dim()
        state.mul_((decay[..., None, None] if is_of_head else decay[..., None]).exp())
        correction = (value - _product(key, state)) * beta[..., None]
        state.addcmul_(key[..., :, None], correction[..., None, :])

        return _product(query, state)


class StateSpace:
    """A selective state space (Mamba-2, arXiv 2405.21060): S ← e^(Δ A) S + Δ x Bᵀ; the output is S C + D x.
    A token with Δ = 0 leaves the state as it is."""

    changed_arguments: Mapping[Argument, Any] = {
        "dt_bias": None,
        "dt_softplus": False,
        "dt_limit": (0.0, float("inf")),
    }

    def __init__(self, recurrence: Recurrence) -> None:
        arguments = recurrence.arguments
        step_size = arguments[1]
        if (bias := arguments.get("dt_bias")) is not None:
            step_size = step_size + bias.to(step_size.dtype)
        if arguments.get("dt_softplus"):
            step_size = F.softplus(step_size)
        step_size = step_size.clamp(*arguments.get("dt_limit", (0.0, float("inf"))))

        self.tokens = {**recurrence.tokens, 1: step_size}
        self.values = self.tokens[0]  # [1, N, heads, head_dim]
        self.state_shape = (*self.values.shape[2:], self.tokens[3].shape[3])
        self._decay_rate = arguments[2].float()  # A [heads]
        self._skip_weight = arguments.get("D")  # [heads]

    def step(self, state: Tensor, tokens: Mapping[Argument, Tensor]) -> Tensor:
        """Compute one token of r slots; returns the outputs [r, heads, head_dim] and changes the state [r,
        heads, head_dim, state_size]. `tokens`: x [r, heads, head_dim], Δ [r, heads], B and C [r, groups,
        state_size]."""
        inputs, step_size, input_weight, output_weight = tokens.values()
        heads_per_group = inputs.shape[1] // input_weight.shape[1]
        input_weight = input_weight.repeat_interleave(heads_per_group, dim=1)
        output_weight = output_weight.repeat_interleave(heads_per_group, dim=1)

        state.mul_((step_size * self._decay_rate)[..., None, None].exp())
        state.addcmul_((inputs * step_size[..., None])[..., None], input_weight[..., None, :])
        outputs = (state @ output_weight[..., None])[..., 0]
        if self._skip_weight is not None:
            outputs = outputs + self._skip_weight.float()[:, None] * inputs

        return outputs


def _product(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Return the products of vectors [r, heads, m] with matrices [r, heads, m, n]: [r, heads, n]."""
    return (vectors[..., None, :] @ matrices)[..., 0, :]
