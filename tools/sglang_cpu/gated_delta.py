"""Computes gated delta nets (Qwen3-Next, Qwen3.5) in torch, in place of kernels that need a GPU or AMX.

`install()` puts these functions where SGLang 0.5.23 looks for its CPU kernels; processors of Qwen's images
look there, too. They are a reference: a loop over tokens in float32, for tests.

Shapes: T tokens of all requests, one behind the other; N requests; Hk and Hv heads of keys and values, where
Hv is a multiple of Hk; Dk and Dv their sizes. A pool of states has a row for each request under way:

    convolution  [rows, channels, W - 1]   the last inputs of a causal convolution of width W
    recurrence   [rows, Hv, Dv, Dk]        the matrix S of the delta rule

Formulas: "Gated Delta Networks: Improving Mamba2 with Delta Rule", section 3,
https://arxiv.org/abs/2412.06464.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NORM_EPSILON = 1e-6  # of the L2 norm of queries and keys


def install() -> None:
    """Put the functions where SGLang's modules import them from. Call before SGLang imports a model, and
    after `sgl_kernel` can be imported."""
    mamba_kernels = types.ModuleType("sgl_kernel.mamba")
    mamba_kernels.causal_conv1d_fn_cpu = convolve  # type: ignore[attr-defined]
    mamba_kernels.causal_conv1d_update_cpu = convolve_next  # type: ignore[attr-defined]
    mamba_kernels.chunk_gated_delta_rule_cpu = delta_rule  # type: ignore[attr-defined]
    sys.modules["sgl_kernel.mamba"] = mamba_kernels

    operators = {
        "fused_gdn_gating_cpu": gates,
        "fused_sigmoid_gating_delta_rule_update_cpu": delta_rule_next,
        "fused_sigmoid_mul_cpu": multiply_by_sigmoid,
        "fused_qk_gemma_rmsnorm_cpu": normalise_heads,
        "fused_qk_gemma_rmsnorm_with_gate_cpu": normalise_gated_heads,
        "fused_qkvzba_split_reshape_cat_contiguous_cpu": split_projections,
    }
    for name, function in operators.items():
        setattr(torch.ops.sgl_kernel, name, function)

    # Names that the model's module reads when it is imported, and calls with AMX only.
    for name in ("fused_moe_router_cpu", "fused_input_proj_cpu"):
        setattr(torch.ops.sgl_kernel, name, None)


def install_in_sglang() -> None:
    """Replace functions that SGLang has in Triton only. Call after `install`; imports parts of SGLang."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise

    fused_norm_gate.FusedRMSNormGated.forward = gated_norm
    layernorm_gated.RMSNorm.forward = gated_norm
    elementwise.fused_gate_sigmoid_mul = shared_expert
    elementwise.fused_gate_sigmoid_mul_add = add_shared_expert


# -- the causal convolution ----------------------------------------------------------------------------------


def convolve(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cache_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the convolution of whole prompts, or of their remainders behind cached prefixes.

    inputs: [channels, T]; weight: [channels, W]; query_start_loc: [N + 1], the first token of each request.
    """
    assert conv_states is not None
    assert cache_indices is not None
    assert query_start_loc is not None
    channels, width = weight.shape
    outputs = torch.zeros_like(inputs)

    for index, row, start, end in requests_of(query_start_loc, cache_indices):
        state = conv_states[row]
        previous = inputs.new_zeros(channels, width - 1)
        if has_initial_state is not None and bool(has_initial_state[index]):
            previous = state.to(inputs.dtype)

        sequence = torch.cat([previous, inputs[:, start:end]], dim=1)
        convolved = functional.conv1d(
            sequence[None], weight[:, None].to(inputs.dtype), bias, groups=channels
        )[0]
        outputs[:, start:end] = activate(convolved, activation)
        state.copy_(sequence[:, 1 - width :])

    return outputs


def convolve_next(
    inputs: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the convolution at one further token of each request. inputs: [N, channels]."""
    assert conv_state_indices is not None
    outputs = torch.zeros_like(inputs)

    for index, row in enumerate(conv_state_indices.tolist()):
        if row < 0:  # a row that only fills up a batch
            continue

        state = conv_state[row]
        window = torch.cat([state.to(inputs.dtype), inputs[index][:, None]], dim=1)
        convolved = (window * weight.to(inputs.dtype)).sum(1)
        if bias is not None:
            convolved = convolved + bias
        outputs[index] = activate(convolved, activation)
        state.copy_(window[:, 1:])

    return outputs


def activate(values: Tensor, activation: str | None) -> Tensor:
    return functional.silu(values) if activation in ("silu", "swish") else values


# -- the delta rule ------------------------------------------------------------------------------------------


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay and the strength of writing, each [1, T, Hv]."""
    log_decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return log_decay[None], b.float().sigmoid()[None]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Return what queries read, [1, T, Hv, Dv], and move the requests' states on.

    q, k: [1, T, Hk, Dk]; v: [1, T, Hv, Dv]; g: logarithm of the decay, beta: strength, both [1, T, Hv].
    """
    outputs = torch.zeros_like(v)

    for _index, row, start, end in requests_of(cu_seqlens, initial_state_indices):
        tokens = slice(start, end)
        read_values, state = recur(
            queries=q[0, tokens].float(),
            keys=k[0, tokens].float(),
            values=v[0, tokens].float(),
            log_decay=g[0, tokens].float(),
            strength=beta[0, tokens].float(),
            state=initial_state[row].float(),
            normalised=use_qk_l2norm_in_kernel,
        )
        outputs[0, tokens] = read_values.to(v.dtype)
        initial_state[row] = state.to(initial_state.dtype)

    return outputs, None, None


def delta_rule_next(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    **_: Any,
) -> Tensor:
    """Return what queries read at one further token of each request."""
    heads = a.shape[-1]
    log_decay, strength = gates(A_log, a.reshape(-1, heads), b.reshape(-1, heads), dt_bias)
    outputs, _chunk_states, _final_state = delta_rule(
        q,
        k,
        v,
        g=log_decay,
        beta=strength,
        initial_state=initial_state_source,
        cu_seqlens=cu_seqlens,
        initial_state_indices=initial_state_indices,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return outputs


def recur(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    state: Tensor,
    normalised: bool,
) -> tuple[Tensor, Tensor]:
    """Return what the queries of one request read, [T, Hv, Dv], and the last state, [Hv, Dv, Dk].

    For each token S <- exp(g) S, then S <- S + beta (v - S k) k^T, and the token reads S q / sqrt(Dk).
    """
    if normalised:
        queries = queries * torch.rsqrt(queries.square().sum(-1, keepdim=True) + NORM_EPSILON)
        keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + NORM_EPSILON)

    value_heads_per_key = values.shape[1] // keys.shape[1]
    queries = queries.repeat_interleave(value_heads_per_key, dim=1) * queries.shape[-1] ** -0.5
    keys = keys.repeat_interleave(value_heads_per_key, dim=1)

    read_values: list[Tensor] = []
    for token in range(len(queries)):
        state = state * log_decay[token].exp()[:, None, None]
        stored_value = torch.einsum("hvk,hk->hv", state, keys[token])
        correction = (values[token] - stored_value) * strength[token][:, None]
        state = state + correction[:, :, None] * keys[token][:, None, :]
        read_values.append(torch.einsum("hvk,hk->hv", state, queries[token]))

    return torch.stack(read_values), state


def requests_of(starts: Tensor, rows: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yield each request that has tokens: its number, its row of the states, its first token and its end."""
    for index, (start, end) in enumerate(pairwise(starts.tolist())):
        row = int(rows[index])
        if row >= 0 and end > start:
            yield index, row, start, end


# -- what stands around them ---------------------------------------------------------------------------------


def split_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values in one block, the output gate z, b and a."""
    qkv_size = 2 * key_heads * key_size + value_heads * value_size
    return (
        qkvz[:, :qkv_size].contiguous(),
        qkvz[:, qkv_size:].reshape(-1, value_heads, value_size),
        ba[:, :value_heads].contiguous(),
        ba[:, value_heads:].contiguous(),
    )


def gemma_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm over the last axis, times one plus the weight, in the type of `values`."""
    exact_values = values.float()
    scale = torch.rsqrt(exact_values.square().mean(-1, keepdim=True) + epsilon)
    return (exact_values * scale * (1 + weight.float())).to(values.dtype)


def normalise_heads(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, head_size: int
) -> tuple[Tensor, Tensor]:
    return (
        gemma_norm(q.reshape(-1, head_size), q_weight, epsilon),
        gemma_norm(k.reshape(-1, head_size), k_weight, epsilon),
    )


def normalise_gated_heads(
    q_and_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    epsilon: float,
    head_size: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised queries and keys, and the gate. q_and_gate: per head a query, then its gate."""
    queries, gate = q_and_gate.reshape(len(q_and_gate), heads, 2 * head_size).chunk(2, dim=-1)
    keys = k.reshape(len(k), -1, head_size)
    return (
        gemma_norm(queries, q_weight, epsilon).contiguous(),
        gemma_norm(keys, k_weight, epsilon).contiguous(),
        gate.contiguous(),
    )


def multiply_by_sigmoid(values: Tensor, gate: Tensor) -> None:
    values.mul_(gate.sigmoid().view(values.shape))


def gated_norm(layer: Any, values: Tensor, gate: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the RMS norm of `values`, times the layer's weight, times silu of the gate."""
    exact_values = values.float()
    scale = torch.rsqrt(exact_values.square().mean(-1, keepdim=True) + layer.eps)
    normed_values = exact_values * scale * layer.weight.float()
    if gate is not None:
        normed_values = normed_values * functional.silu(gate.float().reshape(normed_values.shape))
    return normed_values.to(values.dtype)


def shared_expert(hidden: Tensor, gate_weight: Tensor, output: Tensor) -> Tensor:
    """Return the shared expert's output, weighted by a gate of one number per token."""
    return output * (hidden * gate_weight).sum(-1, keepdim=True).sigmoid()


def add_shared_expert(hidden: Tensor, gate_weight: Tensor, output: Tensor, routed: Tensor) -> None:
    """Add the shared expert's weighted output to that of the routed experts, in place."""
    routed.add_(shared_expert(hidden, gate_weight, output))
