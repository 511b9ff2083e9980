"""Layers with a state in packed rows and trees, against the same rows one by one, gradients included."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5

from asyncrl.config import ModelConfig, Packing, TrainerConfig
from asyncrl.state_layers import DELTA_RULE, Recurrence, taken_sequence_argument
from asyncrl.trainer import prefix_tree
from asyncrl.trainer.attention import use_forest_attention
from asyncrl.trainer.forest_states import ForestStates
from asyncrl.trainer.layers import prepare_layers
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.packing import packing_for
from asyncrl.trainer.prefix_tree import plant_forest
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks
from tests.fakes.tiny_families import FAMILIES, VOCABULARY_SIZE, build_family, random_model

pytestmark = pytest.mark.slow

STATEFUL_FAMILIES = [  # a family for each kind of layer runs in every run of the tests
    "qwen3_5",
    "kimi_linear",
    "lfm2",
    "nemotron_h",
    *(
        pytest.param(name, marks=pytest.mark.full)
        for name in ("qwen3_next", "qwen3_5_moe", "granitemoehybrid")
    ),
]
LIMIT = 1e-5


def sequences() -> list[np.ndarray]:
    """A group of three with a prompt of several chunks, a fork of one of them, and a row and its prefix."""
    rng = np.random.default_rng(0)

    def draw(length: int) -> np.ndarray:
        return rng.integers(8, VOCABULARY_SIZE - 8, length)

    prompt = draw(90)
    group = [np.concatenate([prompt, draw(length)]) for length in (1, 70, 33)]
    alone = draw(70)
    return [*group, np.concatenate([group[1][:130], draw(9)]), alone, alone[:20]]


def select(rows: list[np.ndarray], packing: Packing) -> Selected:
    """Select all tokens but the first of each row."""
    row_of = np.repeat(np.arange(len(rows)), [len(row) - 1 for row in rows])
    position = np.concatenate([np.arange(1, len(row)) for row in rows])
    return Selected.lay_out(rows, row_of, position, torch.ones(len(row_of)), packing)


def learn(policy: Policy, parts: list[Selected]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs, and the gradients of a sum in which every token has a weight of its own."""
    logprobs = torch.cat([policy(part).logp for part in parts])
    (logprobs * torch.linspace(0.1, 1, len(logprobs))).sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return logprobs.detach(), gradients


def relative_distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    difference = torch.stack([(actual[name] - expected[name]).norm() for name in expected]).norm()
    return float(difference / torch.stack([gradient.norm() for gradient in expected.values()]).norm())


def check_layouts(policy: Policy, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    logprobs, gradients = expected
    use_forest_attention(policy.lm)
    for packing in ("packed", "tree"):
        packed_logprobs, packed_gradients = learn(policy, [select(sequences(), packing)])
        assert (packed_logprobs - logprobs).norm() < LIMIT * logprobs.norm(), packing
        assert relative_distance(packed_gradients, gradients) < LIMIT, packing


def policy_of(family: str, lora_rank: int = 0) -> Policy:
    model = random_model(FAMILIES[family], FAMILIES[family].configuration(), seed=0).eval()
    return Policy(model, ModelConfig(path=family, dtype="float32", lora_rank=lora_rank), None)


@pytest.mark.parametrize("family", STATEFUL_FAMILIES)
def test_gradients_are_those_of_rows_one_by_one(family: str) -> None:
    policy = policy_of(family)
    check_layouts(policy, learn(policy, [select([row], "padded") for row in sequences()]))


@pytest.mark.parametrize(("lora_rank", "recomputed"), [(4, "none"), (0, "full")])
def test_with_adapters_and_recomputed_layers(lora_rank: int, recomputed: str) -> None:
    policy = policy_of("qwen3_5", lora_rank)
    if policy.adapters is not None:
        torch.manual_seed(1)
        with torch.no_grad():
            for piece in policy.adapters.published:
                policy.lm.get_parameter(piece.parameter).normal_(0, 0.1)

    expected = learn(policy, [select([row], "padded") for row in sequences()])
    prepare_layers(policy.lm, TrainerConfig(activation_checkpointing=recomputed))
    check_layouts(policy, expected)


def gradients_on_ranks(directory: Path, world: World, folder: Path) -> dict[str, Tensor]:
    """Return the gradients of all rows, each rank's part of them as a tree."""
    policy = load_policy(ModelConfig(path=str(directory), dtype="float32"), world)
    assert packing_for([policy], "tree", "float32", world) == "tree"
    parts = [select(sequences()[world.rank :: world.size], "tree")]
    policy(parts[0].to(world.device)).logp.sum().backward()
    return {
        name: parameter.grad.full_tensor() * world.size  # FSDP2 averages
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.full
def test_two_ranks_have_the_gradients_of_one(world: World, tmp_path: Path) -> None:
    directory = build_family("qwen3_5", tmp_path / "model")
    alone = gradients_on_ranks(directory, world, tmp_path)
    together = run_ranks(2, partial(gradients_on_ranks, directory), tmp_path / "ranks")
    assert relative_distance(together, alone) < LIMIT


# ------------------------------------------------------------------- kernels


def decayed_sum(
    values: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return half of the sum so far plus the value, for each token: values [B, T] and sums [B, T, 1]."""
    state = torch.zeros(len(values), dtype=values.dtype) if initial_state is None else initial_state
    sums = list[Tensor]()
    for column in values.unbind(1):
        state = state / 2 + column
        sums.append(state)
    return torch.stack(sums, 1)[..., None], state if output_final_state else None


def decayed_sum_by_boundaries(
    values: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert cu_seqlens is not None and len(values) == 1
    states = [None] * (len(cu_seqlens) - 1) if initial_state is None else initial_state.split(1)
    lengths = cu_seqlens.diff().tolist()
    results = [
        decayed_sum(part, state, True) for part, state in zip(values.split(lengths, 1), states, strict=True)
    ]
    final_states = torch.cat([state for _, state in results if state is not None])
    return torch.cat([sums for sums, _ in results], 1), final_states if output_final_state else None


def decayed_sum_by_numbers(
    values: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if seq_idx is None:
        return decayed_sum(values, initial_state, output_final_state)
    assert initial_state is None and not output_final_state and len(values) == 1
    parts = values.split(seq_idx[0].unique_consecutive(return_counts=True)[1].tolist(), 1)
    return torch.cat([decayed_sum(part)[0] for part in parts], 1), None


def install_kernel(patch: pytest.MonkeyPatch, path: str, kernel: Callable[..., Any]) -> None:
    """Let `kernel` be importable under its own name from the module `path`."""
    package = path.split(".")[0]
    for name in (package, path):
        module = ModuleType(name)
        patch.setitem(sys.modules, name, module)
        vars(module)[kernel.__name__] = kernel


short_rows = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(short_rows, st.sampled_from(["", "cu_seqlens", "seq_idx"]), st.integers(0, 4))
def test_any_forest_continues_the_states_of_its_rows(
    rows: list[list[int]], argument: str, reach: int
) -> None:
    kernel = {"cu_seqlens": decayed_sum_by_boundaries, "seq_idx": decayed_sum_by_numbers}.get(argument)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "LEAST_SHARED", 1)
        forest = plant_forest([np.array(row) for row in rows], share_prefixes=True)
        function = decayed_sum
        if kernel is not None:
            install_kernel(patch, "tiny_kernels", kernel)
            function = use_kernel_func_from_hub_with_fallback(kernel.__name__, "tiny_kernels")(decayed_sum)

    kind = DELTA_RULE._replace(token_arguments=(0,), sequence_argument=argument)
    values = torch.randn(1, len(forest.ids), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert taken_sequence_argument(kind, function) == argument
    recurrence = Recurrence(kind, function, argument, {0: values})
    states = ForestStates(forest, torch.device("cpu"))
    sums = states.recur(recurrence)
    weight = torch.arange(1.0, reach + 2, dtype=torch.float64)

    def convolve(inputs: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(inputs, (reach, 0))
        return torch.nn.functional.conv1d(padded, weight[None, None])

    convolved = states.convolve(convolve, values[:, None], reach)
    for sequence in forest.sequences:
        row = values[:, sequence]
        assert torch.allclose(sums[:, sequence], decayed_sum(row)[0], atol=1e-12)
        assert torch.allclose(convolved[:, :, sequence], convolve(row[:, None]), atol=1e-12)


def test_the_kernel_of_the_delta_rule_gets_boundaries_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed row is one call, a tree a call for each level; gradients are those of rows one by one."""
    torch_function = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    policy = policy_of("qwen3_5")
    expected = learn(policy, [select([row], "padded") for row in sequences()])
    calls = list[tuple[list[int], bool, bool]]()

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert cu_seqlens is not None and use_qk_l2norm_in_kernel and len(q) == 1
        lengths = cu_seqlens.diff().tolist()
        calls.append((sorted(lengths), initial_state is not None, output_final_state))
        rows = zip(*(tensor.split(lengths, 1) for tensor in (q, k, v, g, beta)), strict=True)
        results = [
            torch_function(
                *row,
                initial_state=None if initial_state is None else initial_state[index : index + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            for index, row in enumerate(rows)
        ]
        states = torch.cat([state for _, state in results]) if output_final_state else None
        return torch.cat([output for output, _ in results], 1), states

    install_kernel(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule)
    bound = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(torch_function)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", bound)
    check_layouts(policy, expected)

    whole_row = (sorted(map(len, sequences())), False, False)
    tree_levels = [([20, 90], False, True), ([1, 33, 40, 50], True, True), ([9, 30], True, False)]
    assert calls == [whole_row] * 3 + tree_levels * 3  # three layers


def test_the_kernel_of_mamba_gets_the_number_of_each_tokens_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no state is passed on; levels of a tree are rows of a batch."""
    torch_function = inspect.unwrap(modeling_nemotron_h.mamba2_chunk_scan)
    policy = policy_of("nemotron_h")
    expected = learn(policy, [select([row], "padded") for row in sequences()])
    calls = list[list[int] | None]()

    def mamba_chunk_scan_combined(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
    ) -> Any:
        options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        if seq_idx is None:
            calls.append(None)
            states = {"initial_states": initial_states, "return_final_states": return_final_states}
            return torch_function(x, dt, A, B, C, chunk_size, **options, **states)
        assert initial_states is None and not return_final_states
        assert seq_idx.dtype == torch.int32
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        calls.append(lengths)
        rows = zip(*(tensor.split(lengths, 1) for tensor in (x, dt, B, C)), strict=True)
        return torch.cat([torch_function(x, dt, A, B, C, chunk_size, **options) for x, dt, B, C in rows], 1)

    install_kernel(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined)
    bound = use_kernel_func_from_hub_with_fallback("mamba_chunk_scan_combined", "mamba_ssm")(torch_function)
    monkeypatch.setattr(modeling_nemotron_h, "mamba2_chunk_scan", bound)
    check_layouts(policy, expected)
    assert calls[0] == [len(row) for row in sequences()]
    assert None in calls


def test_a_kernel_is_seen_through_the_module_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package `kernels` puts each function into a module, whose forward calls the function."""

    def module_around(func: Callable[..., Any]) -> torch.nn.Module:
        class Func(torch.nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return func(*args, **kwargs)

        return Func()

    torch_only = use_kernel_func_from_hub_with_fallback("missing", "missing_kernels")(decayed_sum)
    install_kernel(monkeypatch, "tiny_kernels", decayed_sum_by_boundaries)
    bound = use_kernel_func_from_hub_with_fallback("decayed_sum_by_boundaries", "tiny_kernels")(decayed_sum)
    assert taken_sequence_argument(DELTA_RULE, module_around(bound)) == "cu_seqlens"
    assert taken_sequence_argument(DELTA_RULE, module_around(torch_only)) == ""
    assert taken_sequence_argument(DELTA_RULE, decayed_sum) == ""
