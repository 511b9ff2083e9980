"""On a GPU: a recorded decode step issues the same kernels as Python does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch import recorded
from asyncrl.engines.torch.batch import Batcher
from asyncrl.types import Generation
from tests.fakes.models import small_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

TURNS, NEW = 3, 40


def generated(record_after: int) -> tuple[list[Generation], str]:
    """Some turns sampled together in bfloat16, and the graph that was executed last, if one was recorded."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = small_model("Qwen3", **sizes, head_dim=32).bfloat16().cuda()
    with mock.patch.object(recorded, "RECORD_AFTER", record_after):
        batcher = Batcher(model, TURNS, 64, 64, version=0)
        runs = [
            batcher.add(Request(str(n), tuple(range(1, 9 + n)), Sampling(NEW, stop_ids=()), n))
            for n in range(TURNS)
        ]
        found = dict[int, Generation]()
        while len(found) < TURNS:
            found |= {runs.index(run): batcher.end(run) for run in batcher.step()}
    graph = str(torch.jit.last_executed_optimized_graph()) if record_after < NEW else ""
    return [found[n] for n in range(TURNS)], graph


def test_a_recorded_step_is_not_fused_and_samples_the_same() -> None:
    wanted, _ = generated(1_000)
    found, graph = generated(4)
    assert "aten::" in graph and "TensorExpr" not in graph
    for a, b in zip(found, wanted, strict=True):
        assert a.ids == b.ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-3)
