"""Sums over engines' samples, against a plain loop in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.surprisal import SurprisalTest
from asyncrl.config import ModelConfig
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.packing import packing_for
from asyncrl.trainer.sample_scores import sum_surprisals
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.wire.messages.shared import SampledSequence
from asyncrl.wire.messages.trainer import EngineSamples, ScoredSamples, SurprisalSums
from tests.fakes.models import VOCABULARY, save_small
from tests.fakes.ranks import run_ranks

TEMPERATURE = 0.7
SUM_NAMES = ("tokens", "deviation", "squares", "variance", "median_gap")
SEQUENCES = tuple(
    SampledSequence(
        tuple((7 * index + 3 * position) % VOCABULARY for position in range(5 + length)), (-0.5,) * length
    )
    for index, length in enumerate((6, 1, 4))
)
# The sequences of two engines; at most two of the sequences fit into the budget of a forward.
SAMPLES = (EngineSamples("engine/0/a", SEQUENCES), EngineSamples("engine/1/b", SEQUENCES[1:]))
TOKEN_BUDGET = 2 * 11 + 1
FORWARDS = 3


def score(
    packing: Any, lora_rank: int, world: World, folder: Path, bad_id: int | None = None
) -> tuple[SurprisalSums, ...]:
    config = ModelConfig(path=str(folder.parent / "model"), dtype="float32", lora_rank=lora_rank)
    policy = load_policy(config, world)
    policy.packing = packing_for([policy], packing, "float32", world)
    assert policy.packing == packing

    if bad_id is not None:
        embedding: Any = policy.lm.get_input_embeddings().weight
        embedding.detach().to_local()[bad_id] = math.nan

    forwards = list[None]()
    sums = sum_surprisals(
        policy,
        SAMPLES,
        temperature=TEMPERATURE,
        token_budget=TOKEN_BUDGET,
        device=world.device,
        after_forward=lambda: forwards.append(None),
    )
    assert len(forwards) == FORWARDS  # the weights are gathered for each
    return sums


def plain_sums(path: Path, sequences: Sequence[SampledSequence]) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    sums = dict.fromkeys(SUM_NAMES, 0.0)
    gaps = list[float]()
    for sequence in sequences:
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
            gaps.append(abs(logprob + 0.5))
    sums["median_gap"] = median(gaps)
    return sums


@pytest.mark.parametrize(
    ("ranks", "packing", "lora_rank"), [(1, "padded", 0), (2, "padded", 0), (2, "packed", 4)]
)
def test_sums_are_those_of_a_plain_loop(tmp_path: Path, ranks: int, packing: str, lora_rank: int) -> None:
    save_small(tmp_path / "model", "Qwen2")
    sums = run_ranks(ranks, partial(score, packing, lora_rank), tmp_path / "ranks")
    assert [engine_sums.engine for engine_sums in sums] == [samples.engine for samples in SAMPLES]
    assert [engine_sums.tokens for engine_sums in sums] == [11, 5]
    for engine_sums, samples in zip(sums, SAMPLES, strict=True):
        values = {name: getattr(engine_sums, name) for name in SUM_NAMES}
        assert values == pytest.approx(plain_sums(tmp_path / "model", samples.sequences), rel=1e-5)


def test_sums_without_a_number_are_infinite_for_their_engine_only(tmp_path: Path) -> None:
    """The embedding of an id that only the first engine has sampled makes no numbers."""
    bad_id = SEQUENCES[0].ids[1]  # not the id of padding
    assert not any(bad_id in sequence.ids for sequence in SEQUENCES[1:])
    save_small(tmp_path / "model", "Qwen2", tie_word_embeddings=False)
    sums = run_ranks(1, partial(score, "padded", 0, bad_id=bad_id), tmp_path / "ranks")

    message = ScoredSamples(PolicyVersion(1, 4), sums)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ScoredSamples)
    for engine_sums, is_finite in zip(decoded.sums, (False, True), strict=True):
        values = [getattr(engine_sums, name) for name in SUM_NAMES[1:]]
        assert all(math.isfinite(value) for value in values) if is_finite else values == [math.inf] * 4
        test = SurprisalTest(alarm_rate=1e-4)
        test.add(
            tokens=engine_sums.tokens,
            deviation=engine_sums.deviation,
            squares=engine_sums.squares,
            variance=engine_sums.variance,
        )
        assert test.has_failed(rounding=0.0) is not is_finite
        assert math.isfinite(test.z) is is_finite
