from __future__ import annotations

import msgspec
import pytest

from asyncrl.config import TrainerConfig
from asyncrl.trainer.optimizer import learning_rate


def rates(total: int, **keys: object) -> list[float]:
    config = msgspec.convert({"lr": 1.0, **keys}, TrainerConfig)
    return [learning_rate(config, step, total) for step in range(total)]


def test_warm_up_reaches_the_peak_with_its_last_step() -> None:
    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]


def test_linear_ends_at_the_final_share() -> None:
    assert rates(5, lr_schedule="linear", lr_end=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    assert rates(3, lr_schedule="cosine", lr_end=0.0) == pytest.approx([1.0, 0.5, 0.0])


def test_beyond_the_end_the_final_rate_stays() -> None:
    config = msgspec.convert({"lr": 1.0, "lr_schedule": "linear"}, TrainerConfig)
    assert learning_rate(config, 99, 10) == pytest.approx(0.1)
