from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.correction import CorrectionInput, corrections
from asyncrl.config import AlgorithmConfig

# rho, advantage → weight, masked, truncated; defaults: band [0.5, 5], caps +5 and -2
TABLE = [
    (0.49, 1.0, 0.0, True, False),
    (0.51, 1.0, 0.51, False, False),
    (1.0, -1.0, 1.0, False, False),
    (3.0, 1.0, 3.0, False, False),
    (3.0, -1.0, 2.0, False, True),
    (4.99, 1.0, 4.99, False, False),
    (5.01, 1.0, 0.0, True, False),
    (3.0, 0.0, 3.0, False, False),
]


@pytest.mark.parametrize(("rho", "advantage", "weight", "masked", "truncated"), TABLE)
def test_mask_and_truncation_by_hand(
    rho: float, advantage: float, weight: float, masked: bool, truncated: bool
) -> None:
    """The bounds are on rho: 0.49 goes and 3 stays, not the other way round."""
    log_ratio = torch.tensor([math.log(rho)], dtype=torch.float64)
    given = CorrectionInput(log_ratio, torch.tensor([advantage], dtype=torch.float64), AlgorithmConfig())
    done = corrections.get("mask_truncate")(given)
    assert done.weight.item() == pytest.approx(weight)
    assert (done.masked.item(), done.truncated.item()) == (masked, truncated)
    assert done.ratio.item() == pytest.approx(rho)


def test_none_weighs_everything_one_and_still_reports_the_ratio() -> None:
    done = corrections.get("none")(CorrectionInput(torch.tensor([2.0]), torch.ones(1), AlgorithmConfig()))
    assert done.weight.item() == 1.0 and not done.masked.item()
    assert done.ratio.item() == pytest.approx(math.exp(2))


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_any_log_ratio_gives_a_finite_weight_within_the_cap(values: list[float]) -> None:
    log_ratio = torch.tensor(values, dtype=torch.float32)
    done = corrections.get("mask_truncate")(
        CorrectionInput(log_ratio, torch.ones_like(log_ratio), AlgorithmConfig())
    )
    assert torch.isfinite(done.ratio).all()
    assert ((done.weight >= 0) & (done.weight <= 5)).all()
