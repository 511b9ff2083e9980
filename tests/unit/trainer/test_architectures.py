"""What small copies choose for all causal language models of transformers, against plain forwards of another
model of each class: of another size, with other weights, and longer rows."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncrl import shrunk
from asyncrl.config import ModelConfig
from asyncrl.engines.torch.check import decoding_problem
from asyncrl.trainer.attention import FOREST_ATTENTION
from asyncrl.trainer.model import Policy, architecture_problems
from asyncrl.trainer.scores import Selected

pytestmark = pytest.mark.long
log = logging.getLogger(__name__)
KEYS: dict[str, dict[str, Any]] = {  # where defaults are no model's, or switch off what is asked for
    "lfm2": {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "nemotron": {"num_key_value_heads": 8},
    "phimoe": {"sliding_window": 2048},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "deepseek_v2": {"topk_group": 3, "n_group": 8},
}
PACKED = {
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
}
PACKED |= {"smollm3", "olmo2", "granite", "glm4_moe", "deepseek_v3", "gpt2", "granitemoeshared", "opt"}


def other(kind: str, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Heads of 16, a reach of 12, other weights."""
    monkeypatch.setattr(shrunk, "WINDOW_TOKENS", 12)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: torch.random.default_generator.manual_seed(7))
    model = shrunk.shrunken_model(
        shrunk.narrowed_config(CONFIG_MAPPING[kind](**KEYS.get(kind, {})), min_head_size=16)
    )
    monkeypatch.undo()
    return model


def gradients(model: PreTrainedModel, values: list[Tensor]) -> dict[str, Tensor]:
    flat = torch.cat(values)
    (flat * torch.linspace(-1, 1, len(flat)).cos()).sum().backward()
    computed_gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return computed_gradients


def misses(model: PreTrainedModel, how: Any, whole: bool) -> tuple[float, float]:
    """Of log-probs and gradients of rows together, beside those of plain forwards of one row: differences by
    their norm."""
    rng = np.random.default_rng(5)
    shared, *ends = (rng.integers(8, 100, count) for count in (35, 20, 31, 12, 58))
    rows = [*(np.concatenate([shared, end]) for end in ends[:3]), ends[3]]
    plain = []
    for row in rows:
        logits = model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0, :-1]
        plain.append(logits.log_softmax(-1).gather(1, torch.from_numpy(row[1:, None]))[:, 0])
    wanted = gradients(model, plain)
    values = torch.cat(plain).detach()
    policy = Policy(model, ModelConfig(path="other", dtype="float32"), None)
    policy.runs_whole = whole or policy.runs_whole
    if how != "padded":
        model.set_attn_implementation(FOREST_ATTENTION)
    index = np.repeat(np.arange(len(rows)), [len(row) - 1 for row in rows])
    position = np.concatenate([np.arange(1, len(row)) for row in rows])
    logp = policy(Selected.lay_out(rows, index, position, torch.ones(len(index)), how)).logp
    computed_gradients = gradients(model, [logp])
    assert computed_gradients.keys() == wanted.keys()
    gap = sum(float((computed_gradients[name] - wanted[name]).square().sum()) for name in wanted) ** 0.5
    size = sum(float(one.square().sum()) for one in wanted.values()) ** 0.5
    return float((logp.detach() - values).norm() / values.norm()), gap / size


def test_no_model_is_packed_or_served_wrongly(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    directory = tmp_path_factory.getbasetemp()
    transformers.logging.set_verbosity_error()
    chosen: Counter[str] = Counter()
    wrong = []
    padded = []
    lines = []
    packed = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[kind](**KEYS.get(kind, {}))
            found = architecture_problems(config)
        except Exception as error:
            found = None
            log.info("%s: %s", kind, error)
        if found is None:
            chosen["no copy"] += 1
            lines.append(f"{kind}: no copy")
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(directory))
            engine = shrunk.cached_findings(
                config, "engine", lambda model: {"decoding": decoding_problem(model)}
            )
            how = "padded" if found["tree"] else "tree"
            packed |= {kind} if how == "tree" else set()
            depends = bool(found["padded"])
            refused = engine is None or bool(engine["decoding"])
            chosen.update([how, "refused" if refused else "served", *["depends on rows"] * depends])
            gaps = misses(other(kind, patch), how, bool(found["split"]))
            again = ""
            if how == "tree":
                gaps = max(gaps, misses(other(kind, patch), "packed", bool(found["split"])))
            if not refused:
                again = decoding_problem(other(kind, patch))
        bad = not depends and not (gaps[0] < 1e-3 and gaps[1] < 2e-2)
        wrong += [kind] * ((bad and how == "tree") or bool(again))
        padded += [kind] * (bad and how == "padded")  # nothing is left to fall back to
        lines.append(
            f"{kind}: {how} {gaps[0]:.0e} {gaps[1]:.0e} {'refused' if refused else 'served'} {again}"
        )
    print(*lines, chosen, f"wrong: {wrong}; padded, and unlike rows one by one: {padded}", sep="\n")
    assert not wrong and packed >= PACKED
