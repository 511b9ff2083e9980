"""How often honest engines in bfloat16 are named as a mismatch by the probe, and how often lies are.

    python tools/bench/rounding.py --families mixtral --models 100           # a minute or two a family
    python tools/bench/rounding.py --families dense qwen3_moe --models 25 --lies

Each model is tiny and random; its sizes and the spread of its weights are drawn. The trainer computes in
bfloat16 and in float32, as for `Publishing.score_probe`. The honest engine has the same weights and rounds at
random: the result of each matrix product, activation and sum is rounded up or down, so that none of its
rounding is the trainer's. Kernels of real engines round to the nearest, mostly as the trainer does, so their
gaps are smaller. Lies round like the honest engine, and have other weights or log-probs of another
temperature.

Prints for each family the ratio of the engine's median gap to the trainer's rounding, and the models that
one probe names. "before": the rule that this one replaced, three times the mean over one text of 64 tokens;
here over 64 tokens of four texts, which vary less.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from common import table
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncrl.coordinator.mismatches import MIN_GAP_LIMIT, ROUNDING_MULTIPLE, gap_limit, mean_limit
from asyncrl.trainer.publishing import PROBE_SEQUENCES, PROBE_TOKENS
from asyncrl.weights.manifest import LogprobGaps, Probe

VOCABULARY = 512
HEAD_SIZE = 16
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 16, "num_experts_per_tok": 4, "decoder_sparse_step": 1}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOss", {"num_local_experts": 16, "num_experts_per_tok": 4}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
}
PRODUCTS = {"linear", "matmul", "__matmul__", "bmm", "mm", "addmm", "grouped_mm", "_grouped_mm"}
ROUNDED = PRODUCTS | {"scaled_dot_product_attention", "silu"}
ROUNDED_IF_HIDDEN = {"add", "__add__", "__radd__", "mul", "__mul__", "__rmul__"}
BITS_BELOW_BFLOAT16 = 0xFFFF  # of a float32


class RandomRounding(TorchFunctionMode):
    """Rounds results in float32 to bfloat16, up or down by a hash of their bits."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self._hidden_size = hidden_size

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if not isinstance(result, Tensor) or result.dtype != torch.float32 or result.dim() < 2:
            return result
        if name in ROUNDED or (name in ROUNDED_IF_HIDDEN and result.shape[-1] == self._hidden_size):
            bits = result.contiguous().view(torch.int32)
            noise = ((bits ^ 0x2545F491) * 40503 * 65599 >> 9) & BITS_BELOW_BFLOAT16
            result = ((bits + noise) & ~BITS_BELOW_BFLOAT16).view(torch.float32).reshape(result.shape)
        return result


def random_model(family: str, seed: int) -> PreTrainedModel:
    """Return a model in float32 whose weights are bfloat16 numbers."""
    generator = random.Random(f"{family} {seed}")
    class_name, own_sizes = FAMILIES[family]
    hidden_size = generator.choice([32, 64, 96])
    layer_count = generator.choice([2, 3, 4, 6])
    weight_spread = math.exp(generator.uniform(math.log(0.04), math.log(0.4)))
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "moe_intermediate_size": hidden_size,
        "num_hidden_layers": layer_count,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "initializer_range": weight_spread,
        "tie_word_embeddings": generator.random() < 0.3,
    }

    torch.manual_seed(seed)
    config = getattr(transformers, f"{class_name}Config")(**sizes | own_sizes)
    model: PreTrainedModel = getattr(transformers, f"{class_name}ForCausalLM")(config)
    return model.eval().bfloat16().float()


def logprobs(model: PreTrainedModel, ids: Tensor, temperature: float = 1.0) -> list[list[float]]:
    logits = model(ids, use_cache=False).logits[:, :-1].float() / temperature
    scored: list[list[float]] = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].tolist()
    return scored


def changed_model(model: PreTrainedModel, change: Callable[[str, Tensor], Tensor]) -> PreTrainedModel:
    changed = copy.deepcopy(model)
    for name, parameter in changed.named_parameters():
        parameter.copy_(change(name, parameter))
    return changed


def quantized(name: str, weight: Tensor) -> Tensor:
    """Round each row of a matrix to 8 bits."""
    if weight.dim() < 2:
        return weight
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


def moved(weight: Tensor, distance: float) -> Tensor:
    """Move each weight by `distance` of their standard deviation, as one step of Adam does."""
    return weight + distance * weight.std() * torch.randn_like(weight).sign()


def lying_logprobs(model: PreTrainedModel, ids: Tensor) -> dict[str, list[list[float]]]:
    """Return the log-probs of each lie."""
    lies = {
        "8 bits": changed_model(model, quantized),
        "one step behind": changed_model(model, lambda _, weight: moved(weight, 0.01)),
        "first layer behind": changed_model(
            model, lambda name, weight: moved(weight, 0.03) if ".layers.0." in name else weight
        ),
    }
    return {name: logprobs(lie, ids) for name, lie in lies.items()} | {
        "temperature 0.9": logprobs(model, ids, temperature=0.9)
    }


def is_named(gaps: LogprobGaps, rounding: LogprobGaps) -> bool:
    return gaps.median > gap_limit(rounding.median) or gaps.mean > mean_limit(rounding)


@torch.no_grad()
def compare_engines(family: str, seed: int, with_lies: bool) -> tuple[float, bool, dict[str, bool]]:
    """Return the honest engine's ratio, whether the old rule names the engine, and which engines this rule
    names, by name."""
    model = random_model(family, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (PROBE_SEQUENCES, PROBE_TOKENS), generator=generator)
    sequences = tuple(map(tuple, ids.tolist()))
    trainer_logprobs = logprobs(copy.deepcopy(model).bfloat16(), ids)
    exact_logprobs = logprobs(model, ids)

    probe = Probe(sequences, tuple(map(tuple, trainer_logprobs)))
    rounding = probe.compare(exact_logprobs)
    torch.manual_seed(seed)
    with RandomRounding(model.config.hidden_size):
        engines = {"honest": logprobs(model, ids)}
        if with_lies:
            engines |= lying_logprobs(model, ids)

    gaps = {name: probe.compare(engine_logprobs) for name, engine_logprobs in engines.items()}
    few = 64 // (PROBE_TOKENS - 1)
    few_probe = Probe(sequences[:few], probe.logprobs[:few])
    old_limit = ROUNDING_MULTIPLE * few_probe.compare(exact_logprobs[:few]).mean
    is_named_by_old_rule = few_probe.compare(engines["honest"][:few]).mean > max(MIN_GAP_LIMIT, old_limit)

    ratio = gaps["honest"].median / max(rounding.median, MIN_GAP_LIMIT / ROUNDING_MULTIPLE)
    return ratio, is_named_by_old_rule, {name: is_named(gap, rounding) for name, gap in gaps.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--models", type=int, default=100, help="models of each family")
    parser.add_argument("--first", type=int, default=0, help="seed of the first model")
    parser.add_argument("--lies", action="store_true", help="compare engines that lie, too")
    args = parser.parse_args()

    torch.set_num_threads(1)
    lines: list[list[str]] = []
    names: list[str] = []
    honest_count = 0
    for family in args.families:
        results = [
            compare_engines(family, seed, args.lies) for seed in range(args.first, args.first + args.models)
        ]
        ratios = sorted(ratio for ratio, _, _ in results)
        names = [*results[0][2]]
        named_counts = [sum(named[name] for _, _, named in results) for name in names]
        honest_count += named_counts[0]
        lines.append(
            [
                family,
                f"{len(results)}",
                f"{ratios[len(ratios) // 2]:.2f}",
                f"{ratios[-1]:.2f}",
                f"{sum(is_old for _, is_old, _ in results)}",
                *map(str, named_counts),
            ]
        )
        print(lines[-1], flush=True)

    header = ["family", "models", "ratio, median", "ratio, largest", "honest, before", *names]
    print(table(header, lines))
    return 1 if honest_count else 0


if __name__ == "__main__":
    sys.exit(main())
