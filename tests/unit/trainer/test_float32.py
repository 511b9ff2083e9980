"""Forwards in float32 of a policy that computes in bfloat16: as of a float32 policy, and gone afterwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig
from asyncrl.trainer.float32 import float32_meanwhile
from asyncrl.trainer.model import load_policy, score_ids
from asyncrl.trainer.world import World
from tests.fakes.models import VOCABULARY, save_small
from tests.fakes.ranks import run_ranks

IDS = tuple(index % VOCABULARY for index in range(3, 90, 4))


def score_in_both(lora_rank: int, world: World, folder: Path) -> Any:
    path = str(folder.parent / "model")
    exact_policy = load_policy(ModelConfig(path=path, dtype="float32", lora_rank=lora_rank), world)
    exact_logprobs = score_ids(exact_policy, IDS, world.device)

    policy = load_policy(ModelConfig(path=path, dtype="bfloat16", lora_rank=lora_rank), world)
    rounded_logprobs = score_ids(policy, IDS, world.device)
    with float32_meanwhile(policy):
        float32_logprobs = score_ids(policy, IDS, world.device)
    return exact_logprobs, rounded_logprobs, float32_logprobs, score_ids(policy, IDS, world.device)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_forward_in_float32_is_that_of_a_float32_policy(tmp_path: Path, ranks: int, lora_rank: int) -> None:
    """Frozen weights are kept in bfloat16, so that those of the file must be of bfloat16 to be equal."""
    save_small(tmp_path / "float32", "Qwen2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32")
    model.bfloat16().float().save_pretrained(tmp_path / "model")

    exact, rounded, float32, again = run_ranks(ranks, partial(score_in_both, lora_rank), tmp_path / "ranks")
    gap = max(abs(a - b) for a, b in zip(exact, rounded, strict=True))
    assert float32 == pytest.approx(exact, abs=1e-6) and gap > 1e-3
    assert again == rounded, "the dtype of later forwards has changed"
    assert torch.tensor(exact).isfinite().all()
