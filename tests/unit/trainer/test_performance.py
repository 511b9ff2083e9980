from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncrl.trainer.performance import TIMED, FlopCount, Stopwatch, peak_flops, performance

SIZE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}


def test_only_what_happened_since_the_last_commit_is_timed() -> None:
    phases = {"update_actor": 2.0, "ref": 1.0, "adv": 0.5, "wait_data": 1.5, "wait_commit": 0.5}
    metrics = {"perf/total_num_tokens": 1000.0, "perf/model_tflop": 0.3}
    performance_metrics = performance(4.0, phases, metrics, peak_rate=1e11, ranks=3)
    assert performance_metrics.pop("perf/cpu_memory_used_gb") > 0
    assert performance_metrics == {
        "timing_s/update_actor": 2.0,
        "timing_s/ref": 1.0,
        "timing_s/adv": 0.5,
        "timing_s/wait_data": 1.5,
        "timing_per_token_ms/update_actor": 2.0,
        "timing_per_token_ms/ref": 1.0,
        "timing_per_token_ms/adv": 0.5,
        "perf/throughput": pytest.approx(1000 / 4 / 3),  # verl: tokens of the batch / seconds / GPUs
        "perf/mfu/actor": pytest.approx(0.5),
        "perf/time_per_step": 4.0,
    }


def test_all_phases_of_the_models_are_timed_per_token() -> None:
    phases = dict.fromkeys(TIMED, 1.0)
    performance_metrics = performance(20.0, phases, {"perf/total_num_tokens": 1.0}, peak_rate=1.0, ranks=1)
    per_token = {name for name in performance_metrics if name.startswith("timing_per_token_ms/")}
    assert {name.partition("/")[2] for name in per_token} == {
        *("adv", "update_actor", "ref", "values", "update_critic")  # as observe/metrics.yaml has them
    }


def test_a_batch_without_a_token_has_no_time_per_token() -> None:
    assert "timing_per_token_ms/update_actor" not in performance(1.0, {}, {}, peak_rate=1.0, ranks=1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_operations_are_those_that_torch_counts(kind: str, tied: bool) -> None:
    """One token: attention's own products are next to nothing, and the first layer's input gets no gradient
    where embeddings are frozen."""
    model = (
        LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=tied))
        if kind == "dense"
        else Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE, **EXPERTS, tie_word_embeddings=tied))
    )
    model.set_experts_implementation("eager") if kind == "experts" else None
    count = FlopCount.of(model)
    with FlopCounterMode(display=False) as seen:
        model(torch.zeros(1, 1, dtype=torch.int64)).logits.sum().backward()
    assert count.body + count.head == pytest.approx(seen.get_total_flops(), rel=0.02)


def llama(**settings: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZE, **settings))


def gemma(**settings: Any) -> Gemma3ForCausalLM:
    layer_types = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZE, sliding_window=3, layer_types=layer_types, **settings))


def deepseek() -> DeepseekV3ForCausalLM:
    dims = {
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
    }
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    sizes = {name: size for name, size in SIZE.items() if name != "head_dim"}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **dims, **experts))


@pytest.mark.parametrize(
    ("model", "costs"),
    [
        # layers * 6 * heads * (numbers of a query + of a value)
        (llama, [(2 * 6 * 4 * (16 + 16), math.inf)]),
        (gemma, [(6 * 4 * (16 + 16), 3), (6 * 4 * (16 + 16), math.inf)]),
        (deepseek, [(2 * 6 * 4 * (6 + 4 + 8), math.inf)]),
    ],
)
def test_attention_is_counted_by_pairs_of_tokens(
    model: Callable[[], Any], costs: list[tuple[float, float]]
) -> None:
    count = FlopCount.of(model())
    assert list(count.attention) == costs
    # Two rows of 5 and 2 tokens: 15 + 3 pairs, or 1 + 2 + 3 + 3 + 3 + 3 in a window of 3.
    pairs = {math.inf: 18, 3: 15}
    attention = sum(flops * pairs[reach] for flops, reach in costs)
    positions = np.array([0, 1, 2, 3, 4, 0, 1])
    assert count.total_flops(positions, scored_tokens=5) == 7 * count.body + 5 * count.head + attention


def test_attention_counts_half_of_what_torch_counts_without_a_mask() -> None:
    """torch counts all pairs of a row: n * n, of which a causal mask leaves n * (n + 1) / 2."""
    model = llama(attn_implementation="eager")
    length = 64
    count = FlopCount.of(model)
    with FlopCounterMode(display=False) as seen:
        model(torch.zeros(1, length, dtype=torch.int64)).logits.sum().backward()
    products = count._replace(attention=()).total_flops(np.arange(length), length)
    attention = count.total_flops(np.arange(length), length) - products
    assert attention * 2 * length / (length + 1) == pytest.approx(seen.get_total_flops() - products, rel=0.02)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA GB200", 2500),
    ],
)
def test_the_peak_of_a_known_device_is_that_of_its_data_sheet(
    name: str, tera: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), "bfloat16") == tera * 1e12


def test_the_peak_is_above_what_the_same_product_reaches_in_float64() -> None:
    """At least once in many tries: another process may take the core for one of the two."""
    cpu = torch.device("cpu")
    tries = ((peak_flops(cpu, "float32"), peak_flops(cpu, "float64")) for _ in range(100))
    assert any(single > 0.8 * double > 1e8 for single, double in tries)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_busy_and_idle_add_up_to_the_wall_time(clock: Clock) -> None:
    watch = Stopwatch(clock)
    clock.now += 1
    with watch.phase("wait", waiting=True):
        clock.now += 2
        assert (watch.busy_s, watch.idle_s) == (1, 2)  # a wait under way counts
        with watch.phase("work"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert (watch.busy_s, watch.idle_s) == (21, 10)
    assert watch.lap() == (31, {"wait": 10, "work": 4})


def test_a_phase_ends_with_an_error_too(clock: Clock) -> None:
    watch = Stopwatch(clock)
    with suppress(ValueError), watch.phase("wait", waiting=True):
        clock.now += 1
        raise ValueError
    clock.now += 2
    assert (watch.busy_s, watch.idle_s) == (2, 1)


def test_a_lap_starts_from_zero(clock: Clock) -> None:
    watch = Stopwatch(clock)
    with watch.phase("work"):
        clock.now += 1
        assert watch.lap() == (1, {"work": 1})
        clock.now += 2
    assert watch.lap() == (2, {"work": 2})
