"""Sums over an engine's samples, against a plain loop in float64."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.packing import packing_for
from asyncrl.trainer.sample_scores import sum_surprisals
from asyncrl.trainer.world import World
from asyncrl.wire.messages.shared import SampledSequence
from asyncrl.wire.messages.trainer import SurprisalSums
from tests.fakes.models import VOCABULARY, save_small
from tests.fakes.ranks import run_ranks

TEMPERATURE = 0.7
SEQUENCES = tuple(
    SampledSequence(
        tuple((7 * index + 3 * position) % VOCABULARY for position in range(5 + length)), (-0.5,) * length
    )
    for index, length in enumerate((6, 1, 4))
)


def score(packing: Any, lora_rank: int, world: World, folder: Path) -> SurprisalSums:
    config = ModelConfig(path=str(folder.parent / "model"), dtype="float32", lora_rank=lora_rank)
    policy = load_policy(config, world)
    policy.packing = packing_for([policy], packing, "float32", world)
    assert policy.packing == packing
    for _ in range(2):  # the weights are gathered again
        sums = sum_surprisals(policy, "engine/0/a", SEQUENCES, temperature=TEMPERATURE, device=world.device)
    return sums


def plain_sums(path: Path) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    sums = dict.fromkeys(("tokens", "deviation", "squares", "variance", "gap"), 0.0)
    for sequence in SEQUENCES:
        with torch.no_grad():
            logits = model(torch.tensor([sequence.ids])).logits[0] / TEMPERATURE
        count = len(sequence.logprobs)
        for position in range(len(sequence.ids) - count, len(sequence.ids)):
            probabilities = logits[position - 1].softmax(0).tolist()
            entropy = -sum(p * math.log(p) for p in probabilities)
            logprob = math.log(probabilities[sequence.ids[position]])
            sums["tokens"] += 1
            sums["deviation"] += -logprob - entropy
            sums["squares"] += (-logprob - entropy) ** 2
            sums["variance"] += sum(p * math.log(p) ** 2 for p in probabilities) - entropy**2
            sums["gap"] += abs(logprob + 0.5)
    return sums


@pytest.mark.parametrize(
    ("ranks", "packing", "lora_rank"), [(1, "padded", 0), (2, "padded", 0), (2, "packed", 4)]
)
def test_sums_are_those_of_a_plain_loop(tmp_path: Path, ranks: int, packing: str, lora_rank: int) -> None:
    save_small(tmp_path / "model", "Qwen2")
    sums = run_ranks(ranks, partial(score, packing, lora_rank), tmp_path / "ranks")
    found = {name: getattr(sums, name) for name in ("tokens", "deviation", "squares", "variance", "gap")}
    assert found == pytest.approx(plain_sums(tmp_path / "model"), rel=1e-5)
    assert sums.engine == "engine/0/a" and sums.tokens == 11
