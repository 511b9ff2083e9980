"""What goes to a GPU goes in one transfer, from pinned memory, and is the same there."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config import Packing
from asyncrl.trainer.batch import collate
from asyncrl.trainer.staging import to_device
from asyncrl.trainer.teacher import TeacherScores
from asyncrl.types import TokenScores
from tests.fakes.training import with_generation
from tests.unit.trainer.test_batch import TURNS, joined

ELSEWHERE = torch.device("meta")


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, bool]]:
    """The buffers that went to ELSEWHERE, which is this memory, and whether nobody waited."""
    sent = list[tuple[Tensor, bool]]()

    in_memory = Tensor.to

    def to(tensor: Tensor, *where: Any, non_blocking: bool = False) -> Tensor:
        if where != (ELSEWHERE,):
            return in_memory(tensor, *where)
        sent.append((tensor, non_blocking))
        return tensor.clone()

    monkeypatch.setattr(Tensor, "to", to)
    return sent


def test_tensors_of_all_types_and_shapes_arrive_in_one_transfer(transfers: list[tuple[Tensor, bool]]) -> None:
    whole = torch.arange(24, dtype=torch.int64).reshape(4, 6)
    tensors = [
        torch.tensor([True, False, True]),
        whole,
        whole.t()[1:3],  # not contiguous
        torch.empty(0, dtype=torch.float64),
        torch.tensor(1.5, dtype=torch.float64),
        torch.tensor([[0.1], [float("nan")]], dtype=torch.bfloat16),
        torch.tensor([3], dtype=torch.int32),
    ]
    there = to_device(tensors, ELSEWHERE)
    assert [non_blocking for _, non_blocking in transfers] == [True]
    for before, after in zip(tensors, there, strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert torch.equal(after.double().nan_to_num(7.0), before.double().nan_to_num(7.0))
    assert to_device(tensors, torch.device("cpu"))[1] is whole


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = [getattr(value, f.name) for f in fields(value)]
    return (
        [tensor for part in value for tensor in tensors_of(part)]
        if isinstance(value, list | TeacherScores)
        else []
    )


@pytest.mark.parametrize("packing", ["padded", "packed", "tree"])
def test_a_micro_batch_arrives_in_one_transfer(
    transfers: list[tuple[Tensor, bool]], packing: Packing
) -> None:
    scores = TokenScores(np.array([-1.0] * 2, "<f4").tobytes())
    e = joined([with_generation(TURNS[0], scores=scores), TURNS[1]])
    micro = collate([replace(e, advantage=np.ones(e.model_tokens))] * 2, torch.float32, packing)
    there = micro.to(ELSEWHERE)
    assert len(transfers) == 1
    before = tensors_of(micro)
    after = tensors_of(there)
    assert len(before) == len(after) > 10 and all(map(torch.equal, before, after))
    forest = there.selected.forest
    assert (forest is None) if packing == "padded" else (forest is not None and forest.device == ELSEWHERE)
