"""The gated delta rule of CPU servers: equal to transformers', in one piece or token by token."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from tools.sglang_cpu import gated_delta

TOKENS = 9
KEY_HEADS = 2
VALUE_HEADS = 4
SIZE = 8
ROWS = 3  # of the pools of states


def random_inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(1, TOKENS, KEY_HEADS, SIZE),
        "k": torch.randn(1, TOKENS, KEY_HEADS, SIZE),
        "v": torch.randn(1, TOKENS, VALUE_HEADS, SIZE),
        "g": -torch.rand(1, TOKENS, VALUE_HEADS),
        "beta": torch.rand(1, TOKENS, VALUE_HEADS),
    }


def run_rule(inputs: dict[str, Tensor], states: Tensor, starts: list[int], rows: list[int]) -> Tensor:
    outputs, _, _ = gated_delta.delta_rule(
        **inputs,
        initial_state=states,
        cu_seqlens=torch.tensor(starts),
        initial_state_indices=torch.tensor(rows),
    )
    return outputs


def test_it_is_the_rule_of_transformers() -> None:
    inputs = random_inputs()
    states = torch.zeros(ROWS, VALUE_HEADS, SIZE, SIZE)
    outputs = run_rule(inputs, states, [0, TOKENS], [1])

    repeated = {name: inputs[name].repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for name in ("q", "k")}
    expected, last_state = torch_recurrent_gated_delta_rule(
        repeated["q"],
        repeated["k"],
        inputs["v"],
        inputs["g"],
        inputs["beta"],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(states[1], last_state[0].transpose(1, 2))
    assert not states[[0, 2]].any()  # rows of other requests


def test_requests_of_a_batch_go_on_where_their_states_are() -> None:
    """Two requests of four and five tokens, and a row that only fills up the batch."""
    inputs = random_inputs()
    states = torch.zeros(ROWS, VALUE_HEADS, SIZE, SIZE)
    in_one_call = run_rule(inputs, states.clone(), [0, 4, TOKENS], [2, 0])

    first = {name: torch.cat([tensor[:, :2], tensor[:, 4:6]], 1) for name, tensor in inputs.items()}
    second = {name: torch.cat([tensor[:, 2:4], tensor[:, 6:]], 1) for name, tensor in inputs.items()}
    first_outputs = run_rule(first, states, [0, 2, 4], [2, 0])
    second_outputs = run_rule(second, states, [0, 2, 5, 5], [2, 0, -1])
    together = [first_outputs[:, :2], second_outputs[:, :2], first_outputs[:, 2:], second_outputs[:, 2:]]
    torch.testing.assert_close(torch.cat(together, 1), in_one_call)


def test_a_convolution_in_parts_is_the_convolution() -> None:
    channels = 6
    width = 4
    torch.manual_seed(1)
    inputs = torch.randn(channels, TOKENS)
    weight = torch.randn(channels, width)
    bias = torch.randn(channels)
    padded = torch.nn.functional.pad(inputs, (width - 1, 0))
    expected = torch.nn.functional.silu(
        torch.nn.functional.conv1d(padded[None], weight[:, None], bias, groups=channels)[0]
    )

    states = torch.full((ROWS, channels, width - 1), torch.nan)  # what another request left
    prompt = 2
    remainder = 5
    outputs = [
        gated_delta.convolve(
            inputs[:, start:end],
            weight,
            bias,
            activation="silu",
            conv_states=states,
            has_initial_state=torch.tensor([start > 0]),
            cache_indices=torch.tensor([1]),
            query_start_loc=torch.tensor([0, end - start]),
        )
        for start, end in ((0, prompt), (prompt, remainder))
    ]
    outputs += [
        gated_delta.convolve_next(
            inputs[:, token][None], states, weight, bias, "silu", conv_state_indices=torch.tensor([1])
        ).T
        for token in range(remainder, TOKENS)
    ]
    torch.testing.assert_close(torch.cat(outputs, 1), expected)
