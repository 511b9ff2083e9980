"""Names that users' algorithms may still use: an access says the new name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from asyncrl.algorithms.advantages import AdvantageInput, Trace
from asyncrl.algorithms.correction import CorrectionInput
from asyncrl.types import EpisodeResult
from tests.fakes.losses import loss_input, trace

ADVANTAGE_INPUT = AdvantageInput(EpisodeResult(1.0), (), np.zeros(2), np.zeros(2, dtype=int), 4)
LOSS_INPUT = loss_input([-1.0, -2.0])
CORRECTION_INPUT = CorrectionInput(*[LOSS_INPUT.logp.detach()] * 6)


@pytest.mark.parametrize(
    ("owner", "old", "new"),
    [
        (LOSS_INPUT, "fresh", "trainable"),
        (CORRECTION_INPUT, "fresh", "trainable"),
        (trace([-1.0]), "fresh", "trainable"),
        (ADVANTAGE_INPUT, "place", "position"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_old_attribute_names_the_new_one(owner: Any, old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{old}'; it is now called '{new}'"):
        getattr(owner, old)
    with pytest.raises(AttributeError, match=r"has no attribute 'other'$"):
        _ = owner.other
    assert hasattr(owner, new)


@pytest.mark.parametrize("old", ["CreditInput", "Credit", "credit_of"])
def test_an_old_import_names_the_new_one(old: str) -> None:
    with pytest.raises(ImportError, match=rf"asyncrl\.algorithms\.advantages: '{old}' is now called '\w+'"):
        exec(f"from asyncrl.algorithms.advantages import {old}")


def test_inputs_are_copied_and_pickled_as_ever() -> None:
    for owner in (ADVANTAGE_INPUT, trace([-1.0])):
        assert (
            copy.copy(owner).group == owner.group
            if isinstance(owner, Trace)
            else copy.copy(owner).issued == 4
        )
        pickle.loads(pickle.dumps(owner))
